"""The Triton attention kernels (interpreted where there is no GPU) against attention written out in float64."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl.kernels.attention.base import AttentionStep
from tests.test_attention import Case

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
from sgl.kernels.attention.triton import TritonAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-4, atol=1e-5)


@settings(max_examples=20)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 2), (3, 3), (6, 2), (16, 1)]),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 30]),
)
def test_any_step_equals_attention_written_out(
    rows: list[tuple[int, int]], heads: tuple[int, int], page_size: int, window: int | None
) -> None:
    sizes = [(q, q + past) for q, past in rows]
    case = Case(
        sizes, num_heads=heads[0], num_kv_heads=heads[1], page_size=page_size, windows=(window,), device=DEVICE
    )
    backend = TritonAttention(case.shape)
    backend.plan(case.step)
    near(backend.run(case.query, case.key_cache, case.value_cache, window), case.expected(window))


@pytest.mark.parametrize("num_processors", [1, 24])
@pytest.mark.parametrize("window", [None, 50])
def test_what_was_captured_attends_for_later_steps(num_processors: int, window: int | None) -> None:
    """With rows split between programs or not; a replay runs the plan that was captured over later inputs."""
    rng = np.random.default_rng(0)
    case = Case([(1, 300)] * 3, windows=(window,), device=DEVICE)
    backend = TritonAttention(case.shape, max_graph_rows=3, max_pages=19)
    backend._num_processors = num_processors
    ones = np.ones(3, np.int32)
    backend.plan_decode(AttentionStep(ones, ones, np.zeros((3, 1), np.int32)), 0)
    captured = backend._current
    assert captured is not None
    assert captured.num_splits == (1 if num_processors == 1 else 8)
    for longest in (300, 1, 70):
        case.kv_lens = rng.integers(1, longest + 1, 3).astype(np.int32)
        backend.plan_decode(case.step, 0)
        backend._current = captured
        near(backend.run(case.query, case.key_cache, case.value_cache, window), case.expected(window))
