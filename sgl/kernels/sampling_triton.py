"""One token a row from logits in one pass on a GPU: token mask, temperature, Gumbel noise and the largest of all.

Reads every logit at most once, and none that the mask forbids. Rows that cut off tails (top-k, top-p, min-p) need
more passes and take `sampling.sample`. Imported only where Triton is; see `mask_triton.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096

SALT_1 = tl.constexpr(0x243F6A88)
SALT_2 = tl.constexpr(0x13198A2E)
MULTIPLIER_1 = tl.constexpr(0x21F0AAAD)
MULTIPLIER_2 = tl.constexpr(0xD35A2D97 - 2**32)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `mask.apply_token_mask_` and `sampling.sample` give one after the other, up to the last bits of the noise.

    logits: float32 [B, V], rows contiguous, left as they are; the others as for those two. Returns int64 [B]; where
    nothing is allowed, 0. Does not wait for the device.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    values, tops = torch.empty(2, num_rows, num_blocks, device=logits.device)
    indices = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    has_masks = masks is not None
    _best_of_block[(num_blocks, num_rows)](
        logits,
        temperature,
        seeds,
        positions,
        masks,
        mask_rows,
        values,
        tops,
        indices,
        vocab_size,
        logits.stride(0),
        temperature.stride(0),
        seeds.stride(0),
        masks.stride(0) if masks is not None else 0,
        has_masks=has_masks,
        block=_BLOCK,
        num_warps=8,
    )
    _best_of_row[(num_rows,)](
        values,
        tops,
        indices,
        temperature,
        chosen,
        num_blocks,
        temperature.stride(0),
        block=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )
    return chosen


@triton.jit
def _best_of_block(
    logits,
    temperature,
    seeds,
    positions,
    masks,
    mask_rows,
    values,
    tops,
    indices,
    vocab_size,
    logits_stride,
    temperature_stride,
    seeds_stride,
    masks_stride,
    has_masks: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(1)
    tokens = tl.program_id(0) * block + tl.arange(0, block)
    is_allowed = tokens < vocab_size
    if has_masks:
        mask_row = tl.load(mask_rows + row)
        if mask_row >= 0:
            at = masks + mask_row.to(tl.int64) * masks_stride + (tokens >> 5)
            words = tl.load(at, mask=is_allowed, other=0)
            is_allowed = is_allowed & (((words >> (tokens & 31)) & 1) > 0)
    best = float("-inf")
    top = float("-inf")
    which = 0
    if tl.max(is_allowed.to(tl.int32), 0) > 0:
        at = logits + row.to(tl.int64) * logits_stride + tokens
        scores = tl.load(at, mask=is_allowed, other=float("-inf"))
        top = tl.max(scores, 0)
        warmth = tl.load(temperature + row * temperature_stride)
        if (warmth > 0) & (top > float("-inf")):
            seed = tl.load(seeds + row * seeds_stride)
            position = tl.load(positions + row).to(tl.int32)
            scores = (scores - top) * (1 / warmth) + _gumbel(tokens, seed, position)
            best, which = tl.max(scores, 0, return_indices=True)
        else:
            best, which = tl.max(scores, 0, return_indices=True)
            best = 0.0
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(values + at, best)
    tl.store(tops + at, top)
    tl.store(indices + at, tl.program_id(0) * block + which)


@triton.jit
def _best_of_row(values, tops, indices, temperature, chosen, num_blocks, temperature_stride, block: tl.constexpr):
    """Blocks measure from their own largest logit, which keeps the bits that matter: bring them together."""
    row = tl.program_id(0)
    at = row * num_blocks + tl.arange(0, block)
    is_block = tl.arange(0, block) < num_blocks
    top = tl.load(tops + at, mask=is_block, other=float("-inf"))
    best_top = tl.max(top, 0)
    warmth = tl.load(temperature + row * temperature_stride)
    value = tl.load(values + at, mask=is_block, other=float("-inf")).to(tl.float64)
    if best_top > float("-inf"):
        value += ((top - best_top) / tl.where(warmth > 0, warmth, 1.0)).to(tl.float64)
    best = tl.argmax(value, 0)
    found = tl.load(indices + row * num_blocks + best)
    tl.store(chosen + row, tl.where(best_top > float("-inf"), found, 0).to(tl.int64))


@triton.jit
def _gumbel(tokens, seed, position):
    """As `sampling.gumbel`: the same bits, and their logarithms to about 3e-6."""
    low = seed.to(tl.int32)
    high = (seed >> 32).to(tl.int32)
    first = _mix(_mix(_mix(low + SALT_1, 0) + high, 0) + position, 0)
    second = _mix(_mix(_mix(low + SALT_2, 0) + high, 0) + position, 0)
    bits = _mix(tokens + first, second)
    uniform = tl.minimum(((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * (1.0 / 2147483648.0), 1.0 - 1.0 / 16777216.0)
    # -log(1 - u), by its series where the subtraction would lose what counts
    series = uniform * (1 + uniform * (0.5 + uniform * (1.0 / 3 + uniform * (0.25 + uniform * 0.2))))
    exponential = tl.where(uniform < 0.0625, series, -tl.log(1 - uniform))
    return -tl.log(exponential)


@triton.jit
def _mix(bits, key):
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * MULTIPLIER_1
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = (bits + key) * MULTIPLIER_2
    return bits ^ ((bits >> 15) & 0x1FFFF)
