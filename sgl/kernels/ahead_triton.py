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
COLUMNS = 5
"""Of what is known of a row: the first place of its sampled tokens; how many drafts are being verified; the first
place among the next step's tokens; how many drafts it wants there; and how many of the former stand, whatever was
sampled, -1: those that equal it."""


def accept(
    sampled: torch.Tensor,
    computed: torch.Tensor,
    queries: int,
    known: torch.Tensor,
    stood: torch.Tensor,
    tokens: torch.Tensor,
    first: tuple[torch.Tensor, int, torch.Tensor],
    later: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """See how many drafts stand in each of R rows, and move the inputs of passes that draft behind them, which were
    made as if all did.

    sampled: int64 [S]. computed: int64, `queries` of each row, the last known token and its drafts. known: int64 [R,
    COLUMNS + n], then slots from the place of the first draft on, as many as both steps' drafts. stood: int64 [R], made
    here. tokens: int64 of the next step; the first of each row is made here. first: of the first pass token ids, so
    many of each row, of which one more than its drafts are made, and int64 [R] the index of its last. later: int64
    [passes, R or more] which keys are seen, positions of what is drawn, and of one pass less positions and slots; with
    equal strides.
    """
    token_ids, first_queries, last = first
    seen, places, positions, slots = later
    _launch_accept(
        (len(known), 1, 1),
        sampled,
        computed,
        known,
        stood,
        tokens,
        token_ids,
        last,
        seen,
        places,
        positions,
        slots,
        queries,
        known.shape[1],
        first_queries,
        seen.stride(0),
        len(seen),
        triton.next_power_of_2(len(seen)),
        MAX_TOKENS,
        COLUMNS,
        any_values=(11, 12, 13, 14, 15),
        num_warps=1,
    )


def place(
    drafts: torch.Tensor,
    known: torch.Tensor,
    stood: torch.Tensor,
    tokens: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    queries: int,
    sampling: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Move the inputs of a step that verifies new drafts, as `accept` those of the passes that drew them.

    drafts: int64 [passes, R or more]. known, stood, tokens: as of `accept`; the rest of the tokens is made. inputs:
    rows, token ids, positions and slots, int64, `queries` of each row, and int32 [R] each row's first position.
    sampling: int64 rows and positions of what is sampled after each of the tokens, made here.
    """
    rows, token_ids, positions, slots, firsts = inputs
    _launch_place(
        (len(known), 1, 1),
        drafts,
        known,
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
        known.shape[1],
        MAX_TOKENS,
        COLUMNS,
        any_values=(11, 12, 13),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["queries", "width", "first_queries", "stride", "passes"])
def _accept(
    sampled,
    computed,
    known,
    stood,
    tokens,
    token_ids,
    last,
    seen,
    places,
    positions,
    slots,
    queries,
    width,
    first_queries,
    stride,
    passes,
    most_passes: tl.constexpr,
    most_tokens: tl.constexpr,
    columns: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    own = known + b * width
    num_drafts = tl.load(own + 1)
    simulated = tl.load(own + 4)
    at = tl.arange(0, most_tokens)
    is_draft, inside = at < num_drafts, at <= num_drafts
    drawn = tl.load(sampled + tl.load(own) + at, mask=inside, other=0)
    draft = tl.load(computed + b * queries + 1 + at, mask=is_draft, other=0)
    number = tl.min(tl.where(is_draft & (drawn != draft), at, num_drafts))
    if simulated >= 0:
        number = tl.minimum(simulated, num_drafts)
        drawn = tl.where(at < number, draft, drawn)
    tl.store(stood + b, number)
    tl.store(tokens + tl.load(own + 2), tl.sum(tl.where(at == number, drawn, 0)))
    tl.store(token_ids + b * first_queries + at, drawn, mask=inside)
    back = number - num_drafts  # 0 or less
    tl.store(last + b, tl.load(last + b) + back)
    turn = tl.arange(0, most_passes)
    of_row = turn * stride + b
    is_later = (turn > 0) & (turn < passes)
    tl.store(seen + of_row, tl.load(seen + of_row, mask=is_later, other=0) + back, mask=is_later)
    tl.store(places + of_row, tl.load(places + of_row, mask=turn < passes, other=0) + back, mask=turn < passes)
    is_wanted = turn < tl.load(own + 3) - 1  # further passes use the dummy page
    tl.store(positions + of_row, tl.load(positions + of_row, mask=is_wanted, other=0) + back, mask=is_wanted)
    moved = tl.load(own + columns + 1 + number + turn, mask=is_wanted, other=0)
    tl.store(slots + of_row, moved, mask=is_wanted)


@triton.jit(do_not_specialize=["stride", "queries", "width"])
def _place(
    drafts,
    known,
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
    most_tokens: tl.constexpr,
    columns: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    own = known + b * width
    first = tl.load(own + 2)
    at = tl.arange(0, most_tokens)
    inside = at <= tl.load(own + 3)
    number = tl.load(stood + b)
    back = number - tl.load(own + 1)
    last_known = tl.load(tokens + first)
    drawn = tl.load(drafts + (at - 1) * stride + b, mask=(at > 0) & inside, other=0)
    ids = tl.where(at == 0, last_known, drawn)
    compact, padded = first + at, b * queries + at
    tl.store(tokens + compact, ids, mask=inside)
    tl.store(token_ids + padded, ids, mask=inside)
    there = tl.load(positions + padded, mask=inside, other=0) + back
    tl.store(positions + padded, there, mask=inside)
    tl.store(slots + padded, tl.load(own + columns + number + at, mask=inside, other=0), mask=inside)
    tl.store(firsts + b, tl.load(firsts + b) + back.to(tl.int32))
    tl.store(sampling_rows + compact, tl.load(rows + padded, mask=inside, other=0), mask=inside)
    tl.store(sampling_positions + compact, there + 1, mask=inside)


_launch_accept: Any = Launcher(_accept)
_launch_place: Any = Launcher(_place)
