"""Platforms of other packages: found by entry point, refused with reason, and held to the conformance suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sgl.errors import ConfigError
from sgl.kernels.attention.base import AttentionShape
from sgl.platforms import check, platform_of, registered
from sgl.runtime.attention_choice import choose_attention
from sgl.runtime.config import EngineConfig
from sgl.runtime.engine import Engine
from sgl.runtime.platform.base import Platform
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "platform"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example, and others that are wrong; the folders to be on the path."""
    folder = tmp_path / "sgl_mirror-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sgl-mirror\nVersion: 0.1.0\n")
    points = ["mirror = mirror_platform:Mirror", "gone = no_such_module:Gone", "wrong = pathlib:Path"]
    (folder / "entry_points.txt").write_text("\n".join(["[sgl.platforms]", *points]) + "\n")
    for path in (tmp_path, EXAMPLE):
        monkeypatch.syspath_prepend(str(path))
    yield os.pathsep.join(map(str, (ROOT, tmp_path, EXAMPLE)))
    sys.modules.pop("mirror_platform", None)


def test_an_option_names_a_platform_or_is_refused_with_those_there_are(installed: str) -> None:
    assert registered() == ["cuda", "cpu", "jax", "gone", "mirror", "wrong"]
    assert platform_of("mirror:3") is platform_of("mirror")
    for option, words in {
        "tpu": "cpu, cuda or cuda:N, jax or jax:N, gone or gone:N, mirror or mirror:N",
        "cpu:x": "cpu or cpu:N",
        "gone": "no_such_module:Gone, which is registered for it, cannot be imported",
        "wrong": "no class of Platform",
    }.items():
        with pytest.raises(ConfigError, match=words) as refused:
            platform_of(option)
        assert refused.value.option == "device"


BROKEN = """
import torch
from sgl.platforms import Platform

class Sound(Platform):
    name = "sound"
    is_shared = True
    def names(self): return ["it"]
    def device(self, index): return torch.device("cpu")
    def total_memory(self, device, sharing): return 1 << 32, "its memory"

class Another(Sound): name = "twice"
class Unmade(Sound):
    name = "unmade"
    def __init__(self): raise OSError("no driver")
class Abstract(Platform): name = "abstract"
class Silent(Sound):
    name = "silent"
    def names(self): raise KeyError("no bus")
class Absent(Sound):
    name = "absent"
    def names(self): return []
class Texts(Sound):
    name = "texts"
    def device(self, index): return "cpu"
class Turned(Sound):
    name = "turned"
    def lay_out(self, matrix): return torch.zeros(matrix.shape[::-1])
class Heavy(Sound):
    name = "heavy"
    def total_memory(self, device, sharing): raise OSError("no counter")
class Vague(Sound):
    name = "vague"
    def total_memory(self, device, sharing): return 1 << 32
class Full(Sound):
    name = "full"
    def memory_left(self, device): return {}["left"]
class Slow(Sound):
    name = "slow"
    def step_tokens(self, device, num_multiplied): return num_multiplied // 0
class Idle(Sound):
    name = "idle"
    def step_tokens(self, device, num_multiplied): return 0
class Blind(Sound):
    name = "blind"
    def attention(self, shape): raise RuntimeError("no kernel")
class Odd(Sound):
    name = "odd"
    def attention(self, shape): return "flash"
class Locked(Sound):
    name = "locked"
    def lay_out(self, matrix): raise ValueError("a lock")
class Nameless(Sound):
    name = "nameless"
    def device_name(self, device): raise ValueError("no plate")
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages whose platforms fail in many ways."""
    (tmp_path / "broken_platforms.py").write_text(BROKEN)
    (tmp_path / "broken_syntax.py").write_text("def x(:")
    points = [f"{each.lower()} = broken_platforms:{each}" for each in re.findall(r"class (\w+)", BROKEN)]
    points += [
        "syntax = broken_syntax:X",
        "missing = broken_platforms:Missing",
        "misnamed = broken_platforms:Sound",
    ]
    for package, lines in {"first": [*points, "twice = broken_platforms:Sound"], "second": [points[1]]}.items():
        folder = tmp_path / f"{package}-0.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
        text = "\n".join(["[sgl.platforms]", *lines]).replace("another =", "twice =")
        (folder / "entry_points.txt").write_text(text + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("broken_platforms", None)


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "syntax": "broken_syntax:X, which is registered for it, cannot be loaded .SyntaxError",
        "missing": "broken_platforms:Missing, which is registered for it, cannot be loaded .AttributeError",
        "misnamed": "has name='sound', and must have name='misnamed', by which it is registered",
        "twice": "broken_platforms:Another of .*Sound of first are registered for it; uninstall all .* but one",
        "unmade": r"broken_platforms:Unmade cannot be made \(OSError: no driver\)",
        "abstract": "broken_platforms:Abstract cannot be made .TypeError",
        "silent": "Silent does not find it .KeyError: 'no bus'",
        "absent": "device='absent': there is none on this machine",
        "texts": "Texts.device gave 'cpu', which is no torch.device",
        "turned": "Turned.lay_out gave no tensor of its matrix's shape",
        "heavy": "device='heavy': Heavy.total_memory raised OSError: no counter",
        "vague": "Vague.total_memory gave 4294967296, which is not what sgl.platforms.Platform asks for",
        "full": "Full.memory_left raised KeyError: 'left'",
        "slow": "Slow.step_tokens raised ZeroDivisionError",
        "idle": "Idle.step_tokens gave 0, which is not",
        "blind": "Blind.attention raised RuntimeError: no kernel",
        "odd": "Odd.attention gave 'flash', which is not",
        "locked": "Locked.lay_out raised ValueError: a lock",
    }.items(),
)
def test_a_broken_platform_is_refused_with_what_is_wrong_of_it(name: str, words: str, broken: None) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        Engine(device=name, max_total_tokens=512)
    assert refused.value.option == "device"


def test_a_device_without_a_name_is_said_when_the_name_is_asked_for(broken: None) -> None:
    with (
        Engine(device="nameless", max_total_tokens=512) as engine,
        pytest.raises(ConfigError, match=r"device='nameless': Nameless\.device_name raised ValueError: no plate"),
    ):
        engine.get_server_info()


def test_the_suite_tells_of_each_check_whatever_a_platform_raises(
    broken: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["silent"]) == 2
    assert capsys.readouterr().err == "silent.is_available: KeyError: 'no bus'\n"
    assert check.main(["texts"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert len(told) == len(check.Suite("texts").checks)
    assert all(line.startswith("FAILED") for line in told)


def test_a_platform_chooses_its_layout_of_weights_and_its_attention_to_latents(installed: str) -> None:
    with Engine(device="cpu", max_total_tokens=2048) as engine:
        expected = engine.generate("Once upon a time", {"temperature": 0.0, "max_new_tokens": 12})
    with Engine(device="mirror", max_total_tokens=2048) as engine:
        found = engine.generate("Once upon a time", {"temperature": 0.0, "max_new_tokens": 12})
        info = engine.get_server_info()
        weights = engine._started.runner._model.weights  # type: ignore[union-attr]
    assert found["output_ids"] == expected["output_ids"]
    assert (info["device"], info["device_name"]) == ("mirror", "a mirror of the CPU")
    matrices = [its for its in weights.tensors() if its.dim() == 2 and min(its.shape) > 1]
    assert matrices
    assert all(its.stride(0) == 1 for its in matrices)
    config = EngineConfig(device="mirror", max_running_requests=4, context_length=64)
    shape = AttentionShape(4, 1, 40, 8, 1.0, torch.float32, torch.device("cpu"), latent_dim=32)
    assert type(choose_attention(config, shape)[1]).__name__ == "LatentMirror"


def test_what_a_platform_leaves_out_is_what_any_device_has() -> None:
    class Bare(Platform):
        name = "bare"

        def names(self) -> list[str]:
            return ["first", "second"]

        def device(self, index: int | None) -> torch.device:
            return torch.device("meta", index or 0)

        def total_memory(self, device: torch.device, sharing: int) -> tuple[int, str]:
            return 1 << 30, "the device's memory"

    bare = Bare()
    device = bare.device(1)
    assert bare.is_available()
    assert (bare.option(device), bare.device_name(device)) == ("bare:1", "second")
    assert (bare.memory_left(device), bare.step_tokens(device, 1)) == (None, 2048)
    assert "NVIDIA" in (bare.why_no_fp8(device) or "")
    matrix = torch.zeros(2, 3)
    assert bare.lay_out(matrix) is matrix


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nosuch", "device must be cpu, cuda or cuda:N, jax or jax:N, gone or gone:N, mirror or mirror:N"),
        ("cuda", "there is no cuda device on this machine"),
        ("--help", "usage: python -m sgl.platforms.check NAME, of cuda, cpu, jax, gone, mirror, wrong"),
    ],
)
def test_what_cannot_be_checked_is_said_once(
    name: str, words: str, installed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert check.main([name]) == 2
    told = capsys.readouterr()
    assert words in told.err
    assert told.out == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mirror", "cpu", "jax"])
def test_the_conformance_suite_passes(name: str, installed: str) -> None:
    environment = {**os.environ, "PYTHONPATH": installed}
    if name == "jax":
        pytest.importorskip("jax", reason="needs sgl[jax]")
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "sgl.platforms.check", name]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE * 2, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 12
    left_out = [line for line in lines if not line.startswith("ok ")]
    assert [line.partition(": Deepseek")[0] for line in left_out] == ["left out models: deepseek_v2"] * (
        name == "jax"
    )
