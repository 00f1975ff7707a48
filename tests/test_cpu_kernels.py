"""The CPU's compiled kernels against the plain torch that they replace; and what is said where they cannot be had."""

from __future__ import annotations

import logging
import math
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sgl import Engine, native_code
from sgl.errors import ConfigError
from sgl.kernels import cpu
from sgl.kernels.attention.base import AttentionShape
from sgl.kernels.attention.cpu import why_not
from sgl.kernels.layers import activation, norm, qkv
from tests.test_attention import COMPILED, MIXED, Case
from tests.tiny_models import tiny_checkpoint

needs_them = pytest.mark.skipif(cpu.why_not() is not None, reason=f"cannot be compiled: {cpu.why_not()}")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)


@needs_them
@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (2, 16), (5, 48), (2, 3, 33), (70, 300), (0, 8)])
def test_norms(shape: tuple[int, ...], num_threads: int) -> None:
    x, residual, weight = draw(*shape), draw(*shape, seed=1), draw(shape[-1])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        check(cpu.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))
        for parts in (x, draw(3, *shape)):
            ours, theirs = residual.clone(), residual.clone()
            check(cpu.add_rms_norm(parts, ours, weight, 1e-5), norm.add_rms_norm(parts, theirs, weight, 1e-5))
            check(ours, theirs)
    finally:
        torch.set_num_threads(before)


@needs_them
@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 90])
@pytest.mark.parametrize("heads", [(4, 2, 8), (7, 7, 12), (9, 1, 64), (2, 1, 300), (1, 1, 2)])
def test_heads_are_normed_rotated_and_stored(heads: tuple[int, int, int], num_tokens: int, has_norm: bool) -> None:
    num_heads, num_kv_heads, head_dim = heads
    given = draw(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    rotary = draw(num_tokens, 1, head_dim), draw(num_tokens, 1, head_dim, seed=1)
    weights = draw(num_heads + num_kv_heads, head_dim) if has_norm else None
    slots = torch.randperm(160)[:num_tokens]
    caches = [torch.zeros(2, 20, 8, num_kv_heads, head_dim) for _ in range(2)]
    expected = qkv.rotate_and_store(given, num_heads, rotary, weights, 1e-5, *caches[0], slots)
    out = torch.empty(num_tokens, num_heads, head_dim)
    actual = cpu.rotate_and_store(given, num_heads, rotary, weights, 1e-5, *caches[1], slots, out)
    assert actual is out
    check(actual, expected)
    check(caches[1], caches[0])
    check(cpu.rotate_and_store(given, num_heads, rotary, weights, 1e-5, *caches[1], slots), expected)


@needs_them
@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("shape", [(1, 2), (3, 34), (2, 2, 64), (90, 400)])
@pytest.mark.parametrize("scale", [1.0, 40.0, 1e30])
def test_silu_and_mul(shape: tuple[int, ...], scale: float) -> None:
    gate_up = draw(*shape)
    gate_up[..., : shape[-1] // 2] *= scale
    check(cpu.gate(gate_up), activation.silu_and_mul(gate_up))


@needs_them
@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_what_is_no_number_is_not_hidden(what: str) -> None:
    case = Case([(1, 100), (3, 40)], way=COMPILED)
    tensor = {"query": case.query[0], "key": case.key_cache, "value": case.value_cache}[what]
    tensor[..., 3] = float("nan")
    assert case.run()[0].isnan().any()


@needs_them
def test_torchs_default_number_does_not_matter() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        Case([(1, 300 + i) for i in range(9)], shared=16, way=COMPILED).check()
    finally:
        torch.set_default_dtype(torch.float32)


@needs_them
@given(st.lists(st.floats(-120, 120, width=32), min_size=1, max_size=40))
@example([-87.25])
def test_gates_of_any_number(gates: list[float]) -> None:
    x = torch.tensor(gates)
    actual = cpu.gate(torch.cat((x, torch.ones_like(x))))
    least = 88 * math.exp(-87)  # the kernel takes e^x for 0 below -87
    torch.testing.assert_close(actual.double(), torch.nn.functional.silu(x.double()), rtol=1e-6, atol=least)


@needs_them
def test_the_references_are_these_kernels_where_they_can_be() -> None:
    x, weight = draw(4, 64), draw(64)
    assert torch.equal(norm.rms_norm(x, weight, 1e-5), cpu.rms_norm(x, weight, 1e-5))
    assert torch.equal(activation.silu_and_mul(x), cpu.gate(x))
    assert not cpu.takes(x, weight.double())
    assert not cpu.takes(x.to("meta"))
    assert not cpu.takes(x, weight.requires_grad_())


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home of somebody who never used these kernels."""
    monkeypatch.setenv("HOME", str(tmp_path))
    # Whether they are kept is asked here, not how fast they are: optimising takes three quarters of the time.
    monkeypatch.setattr(native_code, "_FLAGS", ("-O0", *native_code._FLAGS[1:]))
    functions = (cpu.library, cpu.why_not)
    for function in functions:
        function.cache_clear()
    yield tmp_path
    for function in functions:
        function.cache_clear()


@needs_them
def test_they_are_compiled_once_on_a_machine(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.why_not() is None
    [made] = (fresh / ".cache" / "sgl").iterdir()
    written = made.stat().st_mtime_ns
    cpu.library.cache_clear()
    cpu.library()
    assert [path.stat().st_mtime_ns for path in (fresh / ".cache" / "sgl").iterdir()] == [written]
    monkeypatch.setattr(cpu, "_FLAGS", (*cpu._FLAGS, "-DOTHERS"))
    cpu.library.cache_clear()
    cpu.library()
    assert len(list((fresh / ".cache" / "sgl").iterdir())) == 2, "of another source or processor"


@pytest.mark.costly
@needs_them
@pytest.mark.parametrize(
    "what", ["no folder", "no home", "no library", "another library", "others write there", "full"]
)
def test_what_cannot_be_kept_or_trusted_is_compiled_again(
    what: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fresh / ".cache" / "sgl"
    if what == "no folder":
        (fresh / ".cache").write_text("a file")
    elif what == "no home":
        monkeypatch.setattr(native_code, "cache_folder", lambda: None)
    elif what == "full":
        monkeypatch.setattr(native_code.os, "fsync", Mock(side_effect=OSError("No space left on device")))
    else:
        assert cpu.why_not() is None
        [made] = folder.iterdir()
        made.unlink()  # this process goes on with what it loaded
        if what == "another library":
            shutil.copy(sys.modules["_ctypes"].__file__, made)
        else:
            made.write_text("a part of a library")
        if what == "others write there":
            folder.chmod(0o777)
            monkeypatch.setattr(native_code, "_load", Mock(wraps=native_code._load))
    cpu.library.cache_clear()
    assert cpu.library().sgl_attend is not None
    if what == "others write there":
        [call] = native_code._load.mock_calls
        assert folder not in call.args[0].parents
    elif what == "full":
        assert list(folder.iterdir()) == []
    elif folder.exists():
        native_code._load(made, {})


@needs_them
def test_without_a_folder_for_temporary_files_there_are_none(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = FileNotFoundError("No usable temporary directory found")
    monkeypatch.setattr(native_code.tempfile, "TemporaryDirectory", Mock(side_effect=error))
    assert cpu.why_not() == str(error)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "there is no C compiler: install gcc"),
        ("echo '#define __clang__ 1'", "is Clang: install gcc"),
        ("echo 'no such flag' >&2; exit 1", "failed: no such flag"),
        ('case "$*" in *-dM*) ;; *) echo "cannot link" >&2; exit 1; esac', "failed: cannot link"),
        ("sleep 60", "timed out after 0.5 seconds"),
    ],
)
def test_without_them_plain_torch_serves_and_says_so(
    script: str | None,
    message: str,
    fresh: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    if script is not None:
        compiler = tools / "gcc"
        compiler.write_text(f"#!{shutil.which('sh')}\nPATH=/usr/bin:/bin\n{script}\n")
        compiler.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tools))
    if "timed out" in message:
        monkeypatch.setattr(native_code, "_SECONDS", 0.5)
    model = tiny_checkpoint(tmp_path / "model", head_dim=16)
    options = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 64}
    with caplog.at_level(logging.INFO), Engine(model, **options) as engine:
        assert engine.config.attention_backend == "torch"
        engine.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 4})
    [line] = [record for record in caplog.records if "attention: torch" in record.message]
    assert message in line.message
    assert line.levelno == logging.WARNING
    with pytest.raises(ConfigError, match="attention_backend='cpu'") as caught:
        Engine(model, attention_backend="cpu", **options)
    assert message in str(caught.value)


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize(
    ("options", "is_slow"), [({"dtype": "bfloat16"}, False), ({"attention_backend": "torch"}, True)]
)
def test_a_warning_says_what_a_compiler_would_change(
    options: dict[str, str], is_slow: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_checkpoint(tmp_path, head_dim=16)
    with (
        caplog.at_level(logging.INFO),
        Engine(model, device="cpu", skip_tokenizer_init=True, max_total_tokens=64, **options),
    ):
        pass
    [line] = [record for record in caplog.records if "attention: torch" in record.message]
    assert (line.levelno == logging.WARNING) == is_slow == ("the test says so" in line.message)


def test_what_the_attention_cannot_serve_is_said(tmp_path: Path) -> None:
    shape = AttentionShape(4, 2, 8, 16, 1.0, torch.float32, torch.device("cuda"))
    assert why_not(shape) == "it is for CPUs, and this is cuda"
    model = tiny_checkpoint(tmp_path, "qwen3", head_dim=20)
    options = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 64}
    with Engine(model, **options) as engine:
        assert engine.config.attention_backend == "torch"
        assert len(engine.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 4})["output_ids"]) <= 4
    with pytest.raises(ConfigError, match=r"multiple of 8 .* and these have 20"):
        Engine(model, attention_backend="cpu", **options)


@pytest.mark.slow
@needs_them
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names its levels")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3"])
def test_processors_with_less_get_the_same_numbers(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without AVX-512, and without any AVX; and the source compiles without a warning."""
    gcc = str(shutil.which("gcc") or shutil.which("cc"))
    strict = "-Wall", "-Wextra", "-Werror", "-Wno-psabi"  # no function with vectors is called from elsewhere
    command = [
        gcc,
        *native_code._FLAGS,
        *cpu._FLAGS,
        f"-march={level}",
        *strict,
        str(Path(cpu.__file__).with_suffix(".c")),
    ]
    native_code._run([*command, "-o", str(tmp_path / "cpu.so")])
    library = native_code._load(tmp_path / "cpu.so", cpu._FUNCTIONS)
    monkeypatch.setattr(cpu, "library", lambda: library)
    Case(MIXED, head_dim=24, way=COMPILED).check()
    Case([(1, 300 + i) for i in range(9)], shared=16, way=COMPILED).check()
    x = draw(3, 34)
    torch.testing.assert_close(cpu.gate(x), torch.nn.functional.silu(x[:, :17]) * x[:, 17:])
    torch.testing.assert_close(cpu.rms_norm(x, x[0], 1e-5), torch.nn.functional.rms_norm(x, (34,), x[0], 1e-5))


@pytest.mark.slow
@needs_them
def test_their_threads_are_torchs() -> None:
    """One runtime of OpenMP in the process: a second one's threads would wait on the same cores."""
    code = (
        "import torch; from sgl.kernels import cpu; cpu.library(); x = torch.randn(4096, 64); "
        "torch.set_num_threads(2); cpu.rms_norm(x, x[0], 1e-5); x @ x.T; "
        "print({l.split()[-1] for l in open('/proc/self/maps') if 'omp' in l.rsplit('/', 1)[-1]})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count(".so") == 1, done.stdout
