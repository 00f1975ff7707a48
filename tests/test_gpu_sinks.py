"""Soft caps, sinks and windows on a GPU: FlashInfer and Triton against the oracle, for the sizes of heads in use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sgl.kernels.attention import flashinfer
from sgl.kernels.attention.base import AttentionStep, GraphAttention
from sgl.kernels.attention.torch import TorchAttention
from tests.test_attention import Case
from tests.test_gpu import MIXES, error_of, needs_flashinfer, no_waiting

pytestmark = pytest.mark.gpu

WAYS = ["fa2", "fa3", "triton"]
KINDS = {"caps": (2.0, False), "sinks": (None, True), "both": (2.0, True)}


def gpu_case(rows: list[tuple[int, int]], kind: str, head_dim: int, **options: Any) -> Case:
    softcap, has_sinks = KINDS[kind]
    sizes: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 4, "head_dim": head_dim, "device": "cuda"}
    sizes |= {"dtype": torch.bfloat16, "softcap": softcap, "has_sinks": has_sinks}
    return Case(rows, **(sizes | options))


def made(way: str, case: Case, **options: Any) -> GraphAttention:
    if way == "triton":
        from sgl.kernels.attention.triton import TritonAttention

        return TritonAttention(case.shape, **options)
    needs_flashinfer(case)
    if way == "fa3" and not flashinfer.has_fa3(case.shape):
        pytest.skip("fa3 is for Hopper")
    backend = flashinfer.FlashInferAttention(case.shape, prefill="fa3" if way == "fa3" else "fa2", **options)
    backend.short_prefill = backend.prefill
    return backend


def oracle(case: Case, window: int | None = None) -> torch.Tensor:
    torch_attention = TorchAttention(case.shape)
    torch_attention.plan(case.step)
    return torch_attention.run(case.query, case.key_cache, case.value_cache, window, sinks=case.sinks)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_any_step_equals_the_oracle(way: str, kind: str, head_dim: int) -> None:
    backend = None
    for rows in MIXES:
        case = gpu_case(rows, kind, head_dim, windows=(None, 100))
        backend = backend or made(way, case)
        with no_waiting():
            backend.plan(case.step)
        for window in case.shape.windows:
            found = backend.run(case.query, case.key_cache, case.value_cache, window, sinks=case.sinks)
            assert error_of(found, oracle(case, window)) < 1e-2


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("way", WAYS)
def test_captured_decodes_equal_the_oracle(way: str, head_dim: int) -> None:
    rng = np.random.default_rng(0)
    ones = np.ones(30, np.int32)
    case = gpu_case([(1, 1000)] * 30, "both", head_dim, windows=(None, 100))
    backend = made(way, case, max_graph_rows=30, max_pages=64)

    def attend() -> list[torch.Tensor]:
        caches = case.key_cache, case.value_cache
        return [
            backend.run(case.query, *caches, window, sinks=case.sinks, overlaps=window is None)
            for window in case.shape.windows
        ]

    backend.plan_decode(AttentionStep(ones, ones, np.zeros((30, 1), np.int32)), 0, ())
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    for longest in (1000, 1, 300):
        case.kv_lens = rng.integers(1, longest + 1, 30).astype(np.int32)
        with no_waiting():
            backend.plan_decode(case.step, 0, ())
            graph.replay()
        for window, its in zip(case.shape.windows, found, strict=True):
            assert error_of(its, oracle(case, window)) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_a_sink_counts_once_where_rows_share_a_prefix(kind: str) -> None:
    """Decodes, and short prompts, whose common keys are attended to once."""
    case = gpu_case([(1, 2000 + row) for row in range(100)], kind, 128, shared=120)
    backend = made("fa2", case)
    assert isinstance(backend, flashinfer.FlashInferAttention)
    backend._least_saved = 1000
    backend.plan(case.step)
    assert backend._planned_step is not None
    assert backend._planned_step.decodes_shared is not None
    found = backend.run(case.query, case.key_cache, case.value_cache, sinks=case.sinks)
    assert error_of(found, oracle(case)) < 1e-2

    case = gpu_case([(20 + row, 2100 + row) for row in range(60)], kind, 128, shared=120)
    backend = made("fa3", case)
    assert isinstance(backend, flashinfer.FlashInferAttention)
    backend.short_prefill, backend._least_work = "fa2", 1
    backend.plan(case.step)
    assert backend._planned_step is not None
    assert backend._planned_step.prompts_shared is not None
    found = backend.run(case.query, case.key_cache, case.value_cache, sinks=case.sinks)
    assert error_of(found, oracle(case)) < 1e-2
