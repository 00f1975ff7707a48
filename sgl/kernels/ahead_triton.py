"""A step that is launched while the drafts before it are being verified: inputs are made on the host as if all of these
stood, and moved back on the device, to where they did. Imported only where Triton is."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sgl.kernels.launch_triton import Launcher

MAX_TOKENS = 8
"""Of a row: its last token and its drafts."""


def accept(
    sampled: torch.Tensor,
    computed: torch.Tensor,
    queries: int,
    window: torch.Tensor,
    simulated: int,
    stood: torch.Tensor,
    tokens: torch.Tensor,
    first: tuple[torch.Tensor, int, torch.Tensor],
    later: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """See how many drafts stand in each of R rows, and move the inputs of passes that draft behind them.

    sampled: int64 [R, k + 1]. computed: int64, `queries` of each row, the last known token and k drafts. window: int64
    [R, n >= 2 * k] slots from the place of the first draft on. simulated: so many stand, whatever was sampled; -1:
    those that equal it. stood: int64 [R] how many. tokens: int64 [R, k + 1]; the first becomes the last one known by
    now. first: of the first pass token ids, so many of each row, of which k + 1 are made, and int64 [R] the index of
    each row's last. later: int64 [passes, R or more] which keys are seen, positions of what is drawn, and of one pass
    less positions and slots; with equal strides.
    """
    token_ids, first_queries, last = first
    seen, places, positions, slots = later
    num_rows, num_tokens = sampled.shape
    _launch_accept(
        (num_rows, 1, 1),
        sampled,
        computed,
        window,
        stood,
        tokens,
        token_ids,
        last,
        seen,
        places,
        positions,
        slots,
        simulated,
        queries,
        window.shape[1],
        first_queries,
        seen.stride(0),
        len(seen),
        triton.next_power_of_2(len(seen)),
        num_tokens,
        MAX_TOKENS,
        num_warps=1,
    )


def place(
    drafts: torch.Tensor,
    window: torch.Tensor,
    stood: torch.Tensor,
    tokens: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    queries: int,
    sampling: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Move the inputs of a step that verifies new drafts, as `accept` those of the passes that drew them.

    drafts: int64 [passes, R or more]. window, stood, tokens: as of `accept`; the rest of the tokens is made. inputs:
    rows, token ids, positions and slots, int64, `queries` of each row, and int32 [R] each row's first position.
    sampling: int64 [R * (k + 1)] rows and positions of what is sampled, made here.
    """
    rows, token_ids, positions, slots, firsts = inputs
    num_rows, num_tokens = tokens.shape
    _launch_place(
        (num_rows, 1, 1),
        drafts,
        window,
        stood,
        tokens,
        rows,
        token_ids,
        positions,
        slots,
        firsts,
        *sampling,
        drafts.stride(0),
        queries,
        window.shape[1],
        num_tokens,
        MAX_TOKENS,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["simulated", "queries", "width", "first_queries", "stride", "passes", "num_tokens"])
def _accept(
    sampled,
    computed,
    window,
    stood,
    tokens,
    token_ids,
    last,
    seen,
    places,
    positions,
    slots,
    simulated,
    queries,
    width,
    first_queries,
    stride,
    passes,
    most_passes: tl.constexpr,
    num_tokens,
    most_tokens: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, most_tokens)
    num_drafts = num_tokens - 1
    is_draft, inside = at < num_drafts, at < num_tokens
    drawn = tl.load(sampled + b * num_tokens + at, mask=inside, other=0)
    draft = tl.load(computed + b * queries + 1 + at, mask=is_draft, other=0)
    number = tl.min(tl.where(is_draft & (drawn != draft), at, num_drafts))
    if simulated >= 0:
        number = tl.minimum(simulated, num_drafts)
        drawn = tl.where(at < number, draft, drawn)
    tl.store(stood + b, number.to(tl.int64))
    tl.store(tokens + b * num_tokens, tl.sum(tl.where(at == number, drawn, 0)))
    tl.store(token_ids + b * first_queries + at, drawn, mask=inside)
    back = number - num_drafts  # 0 or less
    tl.store(last + b, tl.load(last + b) + back)
    turn = tl.arange(0, most_passes)
    of_row = turn * stride + b
    is_later = (turn > 0) & (turn < passes)
    tl.store(seen + of_row, tl.load(seen + of_row, mask=is_later, other=0) + back, mask=is_later)
    tl.store(places + of_row, tl.load(places + of_row, mask=turn < passes, other=0) + back, mask=turn < passes)
    is_wanted = turn < num_drafts - 1  # further passes use the dummy page
    tl.store(positions + of_row, tl.load(positions + of_row, mask=is_wanted, other=0) + back, mask=is_wanted)
    moved = tl.load(window + b * width + 1 + number + turn, mask=is_wanted, other=0)
    tl.store(slots + of_row, moved, mask=is_wanted)


@triton.jit(do_not_specialize=["stride", "queries", "width", "num_tokens"])
def _place(
    drafts,
    window,
    stood,
    tokens,
    rows,
    token_ids,
    positions,
    slots,
    firsts,
    sampling_rows,
    sampling_positions,
    stride,
    queries,
    width,
    num_tokens,
    most_tokens: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, most_tokens)
    inside = at < num_tokens
    number = tl.load(stood + b)
    back = number - (num_tokens - 1)
    known = tl.load(tokens + b * num_tokens)
    drawn = tl.load(drafts + (at - 1) * stride + b, mask=(at > 0) & inside, other=0)
    ids = tl.where(at == 0, known, drawn)
    compact, padded = b * num_tokens + at, b * queries + at
    tl.store(tokens + compact, ids, mask=inside)
    tl.store(token_ids + padded, ids, mask=inside)
    there = tl.load(positions + padded, mask=inside, other=0) + back
    tl.store(positions + padded, there, mask=inside)
    tl.store(slots + padded, tl.load(window + b * width + number + at, mask=inside, other=0), mask=inside)
    tl.store(firsts + b, tl.load(firsts + b) + back.to(tl.int32))
    tl.store(sampling_rows + compact, tl.load(rows + padded, mask=inside, other=0), mask=inside)
    tl.store(sampling_positions + compact, there + 1, mask=inside)


_launch_accept: Any = Launcher(_accept)
_launch_place: Any = Launcher(_place)
