"""Samples one token a row in one pass on a GPU: token mask, temperature, Gumbel noise and argmax.

Reads each logit at most once, and none that the mask forbids. Rows with top-k, top-p or min-p need more passes and
use `sampling.sample`. Imported only where Triton is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl.kernels.launch_triton import Launcher
from sgl.kernels.layers.fused_triton import overlap
from sgl.kernels.sampling import ops as sampling

_BLOCK, _TILES, _WARPS = 2048, 8, 8
"""Blocks of tokens that a program reads in turn. H200, 256 rows of 151,936: 39 µs (reading alone: 36), one block of
4096: 40; 64 rows: 10 and 11; 4 rows: 4.2 and 4.0."""

SALT_1 = tl.constexpr(0x243F6A88)
SALT_2 = tl.constexpr(0x13198A2E)
LAST_ID, LARGEST_KEY = tl.constexpr(sampling.LAST_ID), tl.constexpr(sampling.LARGEST_KEY)
MULTIPLIER_1 = tl.constexpr(0x21F0AAAD)
MULTIPLIER_2 = tl.constexpr(0xD35A2D97 - 2**32)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    rows: torch.Tensor | None,
    positions: torch.Tensor | None,
    latest: torch.Tensor,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
    landing: torch.Tensor | None = None,
) -> torch.Tensor:
    """`mask.apply_token_mask_`, then `sampling.sample`, up to the last bits of the noise.

    logits: float32 [B, V], rows contiguous, unchanged. temperature, seeds, latest: of R request rows; `rows`, int64
    [B]: those to sample; the others as for those functions, and in mask_rows -2 - t for token t, whatever its logit.
    Returns int64 [B], also written to latest[rows]; 0 where nothing is allowed. Does not wait for the device.

    landing: int32 [>= 4 B], pinned memory for few rows, in place of other inputs: B numbers each for the tokens that
    are drawn, and of mask_rows, rows and positions. It is returned then.
    """
    num_rows, vocab_size = logits.shape
    num_parts, lands = _num_parts(vocab_size), landing is not None
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if landing is None else landing
    parts = torch.empty(3, num_rows, num_parts, device=logits.device) if num_parts > 1 else None
    inputs = logits, temperature, seeds, rows, positions, masks, mask_rows
    _choose_parts(num_parts, inputs, (parts, chosen, latest), 0, lands)
    if parts is not None:
        arguments = parts, temperature, rows, mask_rows, chosen, latest, num_parts
        _combine(_launch_best_of_row, arguments, masks is not None, lands)
    return chosen


def draw_keys(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    first: int,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """`draw` among the part of the vocabulary that starts at token `first`, of which masks are, too: the keys of
    `sampling.draw_keys`, int64 [B]."""
    num_rows, vocab_size = logits.shape
    num_parts = _num_parts(vocab_size)
    parts = torch.empty(3, num_rows, num_parts, device=logits.device)
    keys = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    inputs = logits, temperature, seeds, rows, positions, masks, mask_rows
    _choose_parts(num_parts, inputs, (parts, None, None), first, False)
    _combine(_launch_key_of_row, (parts, temperature, rows, keys, first, num_parts))
    return keys


def num_programs(num_rows: int, vocab_size: int) -> int:
    """Those that read what a row of `draw` is given."""
    return num_rows * _num_parts(vocab_size)


def _num_parts(vocab_size: int) -> int:
    """Parts of a row, each of which a program reads."""
    return -(-vocab_size // (_BLOCK * _TILES))


def _choose_parts(num_parts, inputs, outputs, first, lands) -> None:
    """The best token of each part. inputs: of `draw`. outputs: parts, float32 [3, B, parts] for its score above the
    part's largest logit over the temperature, that logit, and its place in the logits (int32 in place of a float's
    bits); or if there is one part, None, and where tokens are noted. lands: there are the other inputs, too."""
    logits, temperature, seeds, *_, masks, _ = inputs
    strides = logits.stride(0), temperature.stride(0), seeds.stride(0), 0 if masks is None else masks.stride(0)
    options, (num_rows, vocab_size) = overlap(logits.device), logits.shape
    constants = masks is not None, lands, _BLOCK, _TILES, options.pop("overlaps")
    arguments = *inputs, *outputs, vocab_size, first, *strides, *constants
    _launch_best_of_part((num_parts, num_rows, 1), *arguments, num_warps=_WARPS, **options)


def _combine(launch, arguments, *constants) -> None:
    """Launch a kernel that goes on with parts. arguments: parts, temperature, …, the number of a row's parts."""
    parts, temperature, *_, num_parts = arguments
    options = overlap(parts.device)
    constants = temperature.stride(0), triton.next_power_of_2(num_parts), *constants, options.pop("overlaps")
    launch((parts.shape[1], 1, 1), *arguments, *constants, num_warps=1, **options)


@triton.jit
def _best_of_part(
    logits,
    temperature,
    seeds,
    rows,
    positions,
    masks,
    mask_rows,
    parts,
    chosen,
    latest,
    vocab_size,
    first_token,
    logits_stride,
    temperature_stride,
    seeds_stride,
    masks_stride,
    has_masks: tl.constexpr,
    lands: tl.constexpr,
    block: tl.constexpr,
    tiles: tl.constexpr,
    overlaps: tl.constexpr,
):
    if overlaps:
        gdc_launch_dependents()
        if not lands:
            gdc_wait()
    row = tl.program_id(1)
    num_rows = tl.num_programs(1)
    if lands:
        mask_rows, rows, positions = chosen + num_rows, chosen + 2 * num_rows, chosen + 3 * num_rows
    request, mask_row = tl.load(rows + row, cache_modifier=".cv"), -1
    position = tl.load(positions + row, cache_modifier=".cv").to(tl.int32)
    if has_masks:
        mask_row = tl.load(mask_rows + row, cache_modifier=".cv")
    if overlaps and lands:  # the host's memory was written before the launch
        gdc_wait()
    warmth = tl.load(temperature + request * temperature_stride)
    at = logits + row.to(tl.int64) * logits_stride
    at_mask = masks
    if has_masks:
        at_mask = masks + tl.cast(mask_row, tl.int64) * masks_stride
        vocab_size = tl.where(mask_row < -1, 0, vocab_size)  # of a token that is known, nothing is read
    lanes = tl.arange(0, block)
    first = tl.program_id(0) * (block * tiles)
    best = tl.full([block], float("-inf"), tl.float32)
    which = lanes
    for tile in tl.static_range(tiles):
        tokens = first + tile * block + lanes
        scores = _allowed(at, tokens, vocab_size, at_mask, mask_row, has_masks)
        which = tl.where(scores > best, tile * block + lanes, which)
        best = tl.maximum(best, scores)
    top = tl.max(best, 0)
    value = 0.0
    if (warmth > 0) & (top > float("-inf")):
        seed = tl.load(seeds + request * seeds_stride)
        best = tl.full([block], float("-inf"), tl.float32)
        for again in range(tiles):
            tokens = first + again * block + lanes
            scores = _allowed(at, tokens, vocab_size, at_mask, mask_row, has_masks)
            scores = (scores - top) * (1 / warmth) + _gumbel(tokens + first_token, seed, position)
            which = tl.where(scores > best, again * block + lanes, which)
            best = tl.maximum(best, scores)
        value = tl.max(best, 0)
        index = tl.min(tl.where(best == value, which, block * tiles), 0)
    else:
        index = tl.min(tl.where(best == top, which, block * tiles), 0)
    if parts is None:
        _note(tl.where(top > float("-inf"), index, 0), mask_row, chosen + row, latest + request)
    else:
        to = parts + row * tl.num_programs(0) + tl.program_id(0)
        size = num_rows * tl.num_programs(0)
        tl.store(to, value)
        tl.store(to + size, top)
        tl.store(to + 2 * size, (first + index).to(tl.float32, bitcast=True))


@triton.jit
def _note(token, mask_row, chosen, latest):
    """Store the token of a row, or the only one that its mask's row names."""
    token = tl.where(mask_row < -1, -2 - mask_row, token).to(tl.int64)
    tl.store(chosen, token)
    tl.store(latest, token)


@triton.jit
def _allowed(at, tokens, vocab_size, at_mask, mask_row, has_mask: tl.constexpr):
    """The tokens' logits; -inf, without reading them, where forbidden."""
    is_allowed = tokens < vocab_size
    if has_mask:
        # one value for each lane: newer interpreters take no scalar as a mask
        has_row = tl.broadcast_to(mask_row, tokens.shape) >= 0
        words = tl.load(at_mask + (tokens >> 5), mask=is_allowed & has_row, other=-1)
        is_allowed = is_allowed & (((words >> (tokens & 31)) & 1) > 0)
    return tl.load(at + tokens, mask=is_allowed, other=float("-inf"))


@triton.jit
def _best_of_row(
    parts,
    temperature,
    rows,
    mask_rows,
    chosen,
    latest,
    num_parts,
    temperature_stride,
    block: tl.constexpr,
    has_masks: tl.constexpr,
    lands: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Combine parts, whose values are relative to their own largest logit to keep precision."""
    if overlaps:
        gdc_launch_dependents()
        if not lands:
            gdc_wait()
    row = tl.program_id(0)
    num_rows = tl.num_programs(0)
    if lands:
        mask_rows, rows = chosen + num_rows, chosen + 2 * num_rows
    request, mask_row = tl.load(rows + row, cache_modifier=".cv"), -1
    if has_masks:
        mask_row = tl.load(mask_rows + row, cache_modifier=".cv")
    if overlaps and lands:
        gdc_wait()
    at = parts + row * num_parts
    size = num_rows * num_parts
    lanes = tl.arange(0, block)
    top = tl.load(at + size + lanes, mask=lanes < num_parts, other=float("-inf"))
    best_top = tl.max(top, 0)
    warmth = tl.load(temperature + request * temperature_stride)
    value = tl.load(at + lanes, mask=lanes < num_parts, other=float("-inf")).to(tl.float64)
    if best_top > float("-inf"):
        value += ((top - best_top) / tl.where(warmth > 0, warmth, 1.0)).to(tl.float64)
    best = tl.argmax(value, 0)
    found = tl.load(at + 2 * size + best).to(tl.int32, bitcast=True)
    _note(tl.where(best_top > float("-inf"), found, 0), mask_row, chosen + row, latest + request)


@triton.jit
def _key_of_row(
    parts,
    temperature,
    rows,
    keys,
    first_token,
    num_parts,
    temperature_stride,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    """The largest key of all parts; see `sampling.draw_keys`."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    size = tl.num_programs(0) * num_parts
    at = parts + row * num_parts + tl.arange(0, block)
    is_part = tl.arange(0, block) < num_parts
    warmth = tl.load(temperature + tl.load(rows + row) * temperature_stride)
    top = tl.load(at + size, mask=is_part, other=float("-inf")).to(tl.float64)
    score = tl.load(at, mask=is_part, other=0.0).to(tl.float64)
    score += top * (1 / tl.where(warmth > 0, warmth, 1.0)).to(tl.float64)
    bits = score.to(tl.int64, bitcast=True)
    ranked = (bits ^ ((bits >> 63) & LARGEST_KEY)) & -(LAST_ID + 1)
    token = tl.load(at + 2 * size, mask=is_part, other=0.0).to(tl.int32, bitcast=True) + first_token
    key = ranked + LAST_ID - token.to(tl.int64)
    tl.store(keys + row, tl.max(tl.where(is_part, key, -LARGEST_KEY), 0))


@triton.jit
def _gumbel(tokens, seed, position):
    """`sampling.gumbel`: the same bits, with logarithms to about 3e-6."""
    low = seed.to(tl.int32)
    high = (seed >> 32).to(tl.int32)
    first = _mix(_mix(_mix(low + SALT_1, 0) + high, 0) + position, 0)
    second = _mix(_mix(_mix(low + SALT_2, 0) + high, 0) + position, 0)
    bits = _mix(tokens + first, second)
    uniform = tl.minimum(((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * (1.0 / 2147483648.0), 1.0 - 1.0 / 16777216.0)
    # -log(1 - u), by its series where the subtraction would lose precision
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


_launch_best_of_part, _launch_best_of_row = Launcher(_best_of_part), Launcher(_best_of_row)
_launch_key_of_row = Launcher(_key_of_row)
