"""The kernel that reads keys and values from their pages answers as XLA's products of copies of them do, and as
transformers, run by Pallas' interpreter; for CUDA it is lowered, which needs no device."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl.runtime.engine import Engine
from tests.patience import PATIENCE
from tests.test_jax import MESH, OPTIONS, ROOT, check, expected_of
from tests.tiny_models import tiny_checkpoint

jax = pytest.importorskip("jax", reason="needs sgl[jax]")

SHAPES: list[dict[str, Any]] = [
    {"group": 4},
    {"group": 1, "page_size": 1, "window": 9},
    {"group": 5, "page_size": 3, "cap": 20.0, "sinks": True},
    {"group": 20, "page_size": 16, "window": 70, "sinks": True, "splits": 4},
    {"group": 2, "page_size": 4, "window": 200, "cap": 5.0, "splits": 3},
    {"group": 3, "sinks": True, "splits": 8},
]

KINDS = {
    "llama": {(False, False, False)},
    "gemma2": {(True, True, False), (False, True, False)},
    "gpt-oss": {(True, False, True), (False, False, True)},
}
"""Whether layers have a window, a cap and sinks."""


def inputs_of(
    group: int, *, page_size: int = 8, sinks: bool = False, num_kv: int = 2, dim: int = 16, dtype: str = "float32"
) -> list[Any]:
    """Arguments of `attend_paged`: rows of 1 to 300 tokens, on pages that lie anywhere."""
    generator = np.random.default_rng(group)
    positions = np.array([0, 1, 63, 64, 65, 130, 299], np.int32)
    num_pages = -(-300 // page_size)
    table = 1 + generator.permutation(len(positions) * num_pages).reshape(len(positions), num_pages)
    pages = generator.normal(size=(2, table.size + 1, page_size, num_kv, dim))
    query = generator.normal(0, 2, (len(positions), num_kv, group, dim))
    its = generator.normal(0, 2, (num_kv, group)) if sinks else None
    floats = [None if each is None else jax.numpy.asarray(each, dtype) for each in (query, *pages, its)]
    return [*floats, jax.numpy.asarray(positions), jax.numpy.asarray(table.astype(np.int32))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_reads_what_copies_give(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl.runtime.jax import paged
    from sgl.runtime.jax.attention import Blocks, Window, attend

    window = Window(0.3, shape.get("cap"), shape.get("window"))
    arguments = inputs_of(**{name: shape[name] for name in ("group", "page_size", "sinks") if name in shape})
    query, keys, values, sinks, positions, pages = arguments
    number = len(positions)
    monkeypatch.setattr(paged, "_PROGRAMS", shape.get("splits", 1) * number * query.shape[1])
    order = np.arange(number, dtype=np.int32)
    expected = attend(query, keys, values, positions, Blocks(pages, order[:, None], order), window, sinks)
    found = jax.jit(functools.partial(paged.attend_paged, window=window))(*arguments)
    assert np.allclose(np.asarray(found), np.asarray(expected), atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_lowered_for_cuda(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from jax import export

    from sgl.runtime.jax import paged
    from sgl.runtime.jax.attention import Window

    names = "group", "page_size", "sinks"
    arguments = inputs_of(**{name: shape[name] for name in names if name in shape}, dtype="bfloat16")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(paged, "_PROGRAMS", shape.get("splits", 1) * 14)
    function = jax.jit(
        functools.partial(paged.attend_paged, window=Window(0.3, shape.get("cap"), shape.get("window")))
    )
    kernel = "__gpu$xla.gpu.triton"
    allowed = [export.DisabledSafetyCheck.custom_call(kernel)]
    lowered = export.export(function, platforms=["cuda"], disabled_checks=allowed)(*arguments)
    assert kernel in lowered.mlir_module()


@pytest.mark.parametrize(
    ("backend", "capability", "dtype", "dim", "served"),
    [
        ("gpu", "9.0", "bfloat16", 128, True),
        ("gpu", "8.0", "float16", 64, True),
        ("gpu", "10.0", "bfloat16", 256, True),
        ("gpu", "7.5", "float16", 64, False),
        ("gpu", "gfx942", "bfloat16", 128, False),
        ("gpu", "9.0", "float32", 128, False),
        ("gpu", "9.0", "bfloat16", 96, False),
        ("gpu", "9.0", "bfloat16", 8, False),
        ("gpu", "9.0", "bfloat16", 512, False),
        ("tpu", None, "bfloat16", 128, False),
        ("cpu", None, "bfloat16", 128, False),
    ],
)
def test_where_it_serves(
    backend: str, capability: str | None, dtype: str, dim: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sgl.runtime.jax.paged import is_served

    device = type("Device", (), {} if capability is None else {"compute_capability": capability})()
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert is_served(dtype, dim) is served


def test_longer_rows_are_rarely_compiled_anew() -> None:
    from sgl.kernels.attention.base import AttentionStep
    from sgl.runtime.jax.attention import blocks_of

    def widths(q_len: int, *, is_paged: bool) -> set[int]:
        found = set()
        for kv_len in range(q_len, 8000, 7):
            table = np.zeros((1, -(-kv_len // 16)), np.int32)
            step = AttentionStep(np.array([q_len], np.int32), np.array([kv_len], np.int32), table)
            blocks = blocks_of(step, 8, 16, 512, is_paged=is_paged)
            assert blocks.pages.shape[1] * 16 >= kv_len
            found.add(blocks.pages.shape[1])
        return found

    assert widths(1, is_paged=True) == {64, 128, 256, 512}
    assert widths(2, is_paged=True) == widths(2, is_paged=False) > {64, 128, 256, 512}


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_engines_that_take_it_answer_as_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sgl.runtime.jax import decoder

    kinds: set[tuple[bool, bool, bool]] = set()
    attend_paged = decoder.attend_paged

    def counted(*arrays: Any, window: Any) -> Any:
        kinds.add((window.window is not None, window.cap is not None, arrays[3] is not None))
        return attend_paged(*arrays, window=window)

    monkeypatch.setattr(decoder, "attend_paged", counted)
    monkeypatch.setattr(decoder, "is_served", lambda dtype, head_dim: True)
    tiny_checkpoint(tmp_path, family, seed=1)
    options = {"chunked_prefill_size": 7, "page_size": 4, "skip_tokenizer_init": True}
    with Engine(tmp_path, device="jax", check_ledger=True, **OPTIONS, **options) as engine:
        check(engine, expected_of(tmp_path))
    assert kinds == KINDS[family]


@pytest.mark.slow
def test_a_mesh_of_two_devices_that_take_it_answers_as_one(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, with_tokenizer=True, num_hidden_layers=2)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    taken = "from sgl.runtime.jax import decoder\ndecoder.is_served = lambda *_: True\n"
    done = subprocess.run(
        [sys.executable, "-c", taken + MESH, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=PATIENCE * 2, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
