"""Kernels of gated delta nets: chunks against single tokens, and Triton's twins (interpreted where there is no GPU)
against the references."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

import tests.interpreter  # noqa: F401 - mends it
from sgl.kernels.gdn import ops
from sgl.kernels.gdn.rows import Rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from sgl.kernels.gdn import delta_triton, parts_triton
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed (pip install triton)")

SHAPES = [(2, 4, 16, 8), (1, 3, 20, 40), (2, 2, 32, 32)]
"""(key heads, value heads, key dim, value dim)"""
STEPS = [[1, 1, 1], [1, 70, 3, 1], *(pytest.param(its, marks=pytest.mark.slow) for its in ([130], [2, 64, 1]))]
"""Tokens of rows."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def rows_of(q_lens: list[int], device: str = "cpu") -> Rows:
    """Their states lie in other slots than they do."""
    slots = np.array([(3 * row + 2) % 7 for row in range(len(q_lens))], np.int32)
    lens = np.array(q_lens, np.int32)
    arrays = [torch.from_numpy(array).to(device) for array in Rows.arrays(slots, lens)]
    num_single = Rows.count_single(lens)
    return Rows(arrays[0], num_single, *arrays[1:], tuple(q_lens[num_single:]))


def on(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(device, copy=True) for tensor in tensors]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


def rule_inputs(
    shape: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv, beta, decay, a_log, dt_bias, states."""
    k_heads, v_heads, k_dim, v_dim = shape
    qkv = draw(num_tokens, 2 * k_heads * k_dim + v_heads * v_dim, dtype=dtype)
    beta, decay = draw(num_tokens, 2 * v_heads + 3, dtype=dtype).split([v_heads + 3, v_heads], 1)
    return qkv, beta[:, :v_heads], decay, draw(v_heads) - 2, draw(v_heads, seed=1), draw(7, v_heads, k_dim, v_dim)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 65, 150])
def test_chunks_compute_what_single_tokens_do(shape: tuple[int, int, int, int], num_tokens: int) -> None:
    qkv, beta, decay, a_log, dt_bias, states = rule_inputs(shape, num_tokens)
    one_by_one, states_of_one = [], states.clone()
    for token in range(num_tokens):
        rows = Rows.of_decodes(torch.tensor([2]))
        part = slice(token, token + 1)
        one_by_one.append(ops.delta_rule(qkv[part], (beta[part], decay[part]), a_log, dt_bias, states_of_one, rows))
    rows = rows_of([num_tokens])
    rows = Rows(rows.slots, 0, rows.starts, rows.chunks, rows.first_chunks, (num_tokens,))
    together = ops.delta_rule(qkv, (beta, decay), a_log, dt_bias, states, rows)
    close(together, torch.cat(one_by_one), 2e-5)
    close(states, states_of_one, 2e-5)


def test_a_text_of_one_repeated_token_cancels_nothing() -> None:
    shape, num_tokens = (1, 1, 16, 16), 192
    qkv, beta, decay, a_log, dt_bias, states = rule_inputs(shape, num_tokens)
    qkv[:] = qkv[:1]
    args = qkv, (torch.full_like(beta, 9.0), torch.full_like(decay, -9.0)), a_log, dt_bias
    expected = states.clone()
    for token in range(num_tokens):
        part = slice(token, token + 1)
        gates = args[1][0][part], args[1][1][part]
        ops.delta_rule(qkv[part], gates, a_log, dt_bias, expected, Rows.of_decodes(torch.tensor([2])))
    ours, twin = states.clone(), states.to(DEVICE, copy=True)
    ops.delta_rule(*args, ours, rows_of([num_tokens]))
    close(ours, expected, 1e-4)
    if HAS_TRITON:
        qkv, beta, decay, a_log, dt_bias = on(DEVICE, args[0], *args[1], *args[2:])
        delta_triton.delta_rule(qkv, (beta, decay), a_log, dt_bias, twin, rows_of([num_tokens], DEVICE))
        close(twin, expected, 1e-4 if DEVICE == "cpu" else 1e-3)


@pytest.mark.costly
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("q_lens", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_delta_rule(shape: tuple[int, int, int, int], q_lens: list[int], dtype: torch.dtype) -> None:
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float16  # Triton's interpreter multiplies no bfloat16
    qkv, beta, decay, a_log, dt_bias, states = rule_inputs(shape, sum(q_lens), dtype)
    theirs = on(DEVICE, qkv, beta, decay, a_log, dt_bias, states)
    expected = ops.delta_rule(qkv, (beta, decay), a_log, dt_bias, states, rows_of(q_lens))
    actual = delta_triton.delta_rule(theirs[0], (theirs[1], theirs[2]), *theirs[3:], rows_of(q_lens, DEVICE))
    if dtype == torch.float32:
        tolerance = 3e-5 if DEVICE == "cpu" else 3e-4  # a GPU sums in another order, of three parts of 11 bits
        close(actual, expected, tolerance)
        close(theirs[5], states, tolerance)
        return
    for ours, exact in ((actual, expected), (theirs[5], states)):
        error = (ours.cpu().double() - exact.double()).norm() / exact.double().norm()
        assert error < 2e-2


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("q_lens", STEPS)
def test_convolutions(q_lens: list[int], width: int, dtype: torch.dtype) -> None:
    channels = 150
    x = draw(sum(q_lens), channels + 9, dtype=dtype)[:, 4:-5]
    weight, states = draw(width, channels, dtype=dtype), draw(7, width - 1, channels, dtype=dtype)
    whole, their_weight, their_states = on(DEVICE, x, weight, states)
    expected = ops.convolve(x, weight, states, rows_of(q_lens))
    actual = parts_triton.convolve(whole, their_weight, their_states, rows_of(q_lens, DEVICE))
    close(actual, expected, 2e-6 if dtype == torch.float32 else 3e-2)
    close(their_states, states, 0.0)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [(3, 8), (9, 20)])
def test_gates(heads: int, width: int, dtype: torch.dtype) -> None:
    x, gate = draw(5, heads, width, dtype=dtype), draw(5, heads * width + 7, dtype=dtype)[:, 3:-4]
    weight = draw(width, dtype=dtype)
    theirs = on(DEVICE, x, gate, weight)
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    close(parts_triton.gated_norm(*theirs, 1e-6), ops.gated_norm(x, gate, weight, 1e-6), tolerance)
    close(
        parts_triton.sigmoid_gated(theirs[0].flatten(1), theirs[1]),
        ops.sigmoid_gated(x.flatten(1), gate),
        tolerance,
    )


@pytest.mark.parametrize("copy", [ops.copy_states, pytest.param("twin", marks=needs_triton)])
def test_states_are_copied_and_emptied(copy: object) -> None:
    states = draw(2, 6, 70, 65)
    before = states.clone()
    moved, sources, targets = on(DEVICE, states, torch.tensor([1, -1, 0]), torch.tensor([4, 5, 2]))
    (parts_triton.copy_states if copy == "twin" else ops.copy_states)(moved, sources, targets)
    assert torch.equal(moved.cpu()[:, 4], before[:, 1])
    assert torch.equal(moved.cpu()[:, 2], before[:, 0])
    assert not moved[:, 5].any()
    assert torch.equal(moved.cpu()[:, [0, 1, 3]], before[:, [0, 1, 3]])
