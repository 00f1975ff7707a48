"""The Triton kernels of `mask/ops.py`. Imported only where a GPU or Triton's interpreter runs them. Tensor
arguments are untyped pointers inside a kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl.kernels.launch_triton import Launcher
from sgl.kernels.mask import layout
from sgl.kernels.mask.layout import GrammarTensors, Places, VocabularyTensors

_APPLY_BLOCK = 4096
_BASE_BLOCK = 1024
_RESIDENT = 8448
"""Most programs of one warp: 64 for each of 132 multiprocessors, twice what runs at a time."""
_MAX_SHARE = 16
"""Most token blocks that one program walks for one request."""

DEAD = tl.constexpr(layout.DEAD)
TARGET_MASK = tl.constexpr(layout.TARGET_MASK)
PUSH_BIT = tl.constexpr(layout.PUSH_BIT)
POP_BIT = tl.constexpr(layout.POP_BIT)
OPERATION_SHIFT = tl.constexpr(layout.OPERATION_SHIFT)
GUARD_BIT = tl.constexpr(layout.GUARD_BIT)
MAX_OPEN = tl.constexpr(layout.MAX_OPEN)
MAX_SAVED = tl.constexpr(layout.MAX_SAVED)
ENDLESS = tl.constexpr(layout.ENDLESS)
LEFT_BRACKET = tl.constexpr(0x5B)
ADDRESSES = tl.constexpr(6)
INFOS = tl.constexpr(8)


def apply_token_mask_(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> None:
    """See `mask.apply_token_mask_`."""
    num_rows, vocab_size = logits.shape
    grid = triton.cdiv(vocab_size, _APPLY_BLOCK), num_rows, 1
    _launch_apply(grid, logits, masks, mask_rows, vocab_size, logits.stride(0), masks.stride(0), _APPLY_BLOCK)


def compute_masks_(
    masks: torch.Tensor,
    rows: torch.Tensor,
    places: Places,
    grammars: GrammarTensors,
    vocabulary: VocabularyTensors,
    *,
    num_warps: int = 1,
) -> None:
    """See `mask.compute_masks_`. num_warps: the walk's."""
    num_places, num_words = len(rows), masks.shape[1]
    num_blocks = len(vocabulary.block_bytes)
    share = max(1, min(_MAX_SHARE, num_places * num_blocks // _RESIDENT))
    num_groups = triton.cdiv(num_blocks, share)
    given = masks, rows, places, grammars.addresses, vocabulary
    grid = triton.cdiv(num_words, _BASE_BLOCK), num_places, 1
    _launch_begin(grid, *given, num_words, len(vocabulary.plain_masks) - 1, _BASE_BLOCK)
    num_items = num_groups * num_places
    sizes = len(vocabulary.lengths), num_words, num_blocks, num_groups, num_items, places.stacks.shape[1]
    constants = vocabulary.block, grammars.has_stacks, grammars.has_counters
    _launch_walk(
        (min(_RESIDENT, num_items), 1, 1), *given, *sizes, *constants, any_values=(8, 9), num_warps=num_warps
    )


@triton.jit
def _apply(logits, masks, mask_rows, vocab_size, logits_stride, masks_stride, block: tl.constexpr):
    row = tl.program_id(1)
    mask_row = tl.load(mask_rows + row)
    if mask_row >= 0:
        tokens = tl.program_id(0) * block + tl.arange(0, block)
        is_token = tokens < vocab_size
        words = tl.load(masks + mask_row.to(tl.int64) * masks_stride + (tokens >> 5), mask=is_token, other=0)
        at = logits + row.to(tl.int64) * logits_stride + tokens
        nothing = tl.full([block], float("-inf"), tl.float32)
        if tl.max((words != 0).to(tl.int32), 0) == 0:  # most blocks of most masks: store whole vectors
            tl.store(at, nothing, mask=is_token)
        else:
            tl.store(at, nothing, mask=is_token & (((words >> (tokens & 31)) & 1) == 0))


@triton.jit
def _begin(masks, rows, places, addresses, vocabulary, num_words, most_chars, block: tl.constexpr):
    """Initialise each mask with what needs no walk."""
    at = tl.program_id(1)
    row = tl.load(rows + at)
    state = tl.load(places.states + at)
    infos = tl.load(addresses + tl.load(places.grammars + at) * ADDRESSES + 1).to(tl.pointer_type(tl.int32))
    limit = tl.load(infos + state * INFOS + 6)
    left = tl.minimum(tl.maximum(limit - tl.load(places.char_counts + at), 0), most_chars)
    words = tl.program_id(0) * block + tl.arange(0, block)
    is_word = words < num_words
    base = tl.load(vocabulary.plain_masks + left * num_words + words, mask=is_word)
    if tl.load(infos + state * INFOS + 7) > 0:
        base |= tl.load(vocabulary.end_mask + words, mask=is_word)
    tl.store(masks + row.to(tl.int64) * num_words + words, base, mask=is_word)


@triton.jit(do_not_specialize=["num_groups", "num_items"])  # they vary between steps
def _walk(
    masks,
    rows,
    places,
    addresses,
    vocabulary,
    num_ranks,
    num_words,
    num_blocks,
    num_groups,
    num_items,
    max_depth,
    block: tl.constexpr,
    has_stacks: tl.constexpr,
    has_counters: tl.constexpr,
):
    """Walk every token, all lanes of a block together, and allow the survivors. Blocks are dealt round robin, so
    that no program gets all the long ones."""
    item = tl.program_id(0)
    while item < num_items:
        at = item // num_groups
        automaton = _automaton(addresses, tl.load(places.grammars + at))
        mask = masks + tl.load(rows + at).to(tl.int64) * num_words
        which = item % num_groups
        while which < num_blocks:
            _walk_block(
                which,
                mask,
                at,
                places,
                automaton,
                vocabulary,
                num_ranks,
                max_depth,
                block,
                has_stacks,
                has_counters,
            )
            which += num_groups
        item += tl.num_programs(0)


@triton.jit
def _automaton(addresses, grammar):
    """Pointers to a grammar's tensors, and the widths of two of them."""
    address = addresses + grammar * ADDRESSES
    return (
        tl.load(address).to(tl.pointer_type(tl.int32)),
        tl.load(address + 1).to(tl.pointer_type(tl.int32)),
        tl.load(address + 2).to(tl.pointer_type(tl.int32)),
        tl.load(address + 3).to(tl.pointer_type(tl.int32)),
        tl.load(address + 4).to(tl.int32),
        tl.load(address + 5).to(tl.int32),
    )


@triton.jit
def _lanes(state, chars, items):
    """Readings that begin at a place: state; counted characters and items; frames opened since (16-bit symbols,
    8-bit item counts except the first's), their number, and the number of the place's own closed frames."""
    none = state * 0
    return state, chars + none, items + none, none.to(tl.int64), none, none, none, none


@triton.jit
def _walk_block(
    which,
    mask,
    at,
    places,
    automaton,
    vocabulary,
    num_ranks,
    max_depth,
    block: tl.constexpr,
    has_stacks: tl.constexpr,
    has_counters: tl.constexpr,
):
    entries, infos, _, classes, num_classes, _ = automaton
    start, start_chars = tl.load(places.states + at), tl.load(places.char_counts + at)
    left = tl.maximum(tl.load(infos + start * INFOS + 6) - start_chars, 0)
    first = tl.load(vocabulary.block_bytes + which)
    first_entry = tl.load(entries + start * num_classes + tl.load(classes + tl.maximum(first, 0)))
    if (tl.load(vocabulary.block_reaches + which) > left) & ((first < 0) | (first_entry != DEAD)):
        depth = tl.load(places.depths + at)
        stack = places.stacks + at.to(tl.int64) * max_depth * 2
        ranks = which * block + tl.arange(0, block)
        length = tl.load(vocabulary.lengths + ranks)
        is_walked = (length > 0) & (tl.load(vocabulary.reaches + ranks) > left)
        lanes = _lanes(tl.where(is_walked, start, DEAD), start_chars, tl.load(places.item_counts + at))
        run = tl.load(vocabulary.runs + ranks, mask=is_walked, other=0).to(tl.int32)
        upcoming = tl.load(vocabulary.runs + num_ranks + ranks, mask=is_walked & (length > 1), other=0)
        index = tl.zeros([block], tl.int32)
        top = 0
        while top >= 0:
            state = lanes[0]
            byte = run & 0xFF
            repeats = run >> 8
            is_active = (index < length) & (state >= 0)
            column = tl.load(classes + byte, mask=is_active, other=0)
            entry = tl.load(entries + state * num_classes + column, mask=is_active, other=DEAD)
            top = tl.max(entry, 0)
            # a byte that changes nothing may repeat
            skipped = tl.where(entry == state, repeats, 0)
            if has_stacks or has_counters:
                if top <= TARGET_MASK:  # almost always: only steps to other states
                    lanes = _stepped(lanes, tl.where(is_active, entry, state), 0)
                else:
                    lanes, room = _follow(
                        entry, byte, is_active, lanes, automaton, stack, depth, has_stacks, has_counters
                    )
                    if has_counters:
                        counted = tl.minimum(repeats, room)
                        lanes = _stepped(lanes, lanes[0], counted)
                        skipped = tl.maximum(skipped, counted)
            else:
                lanes = _stepped(lanes, tl.where(is_active, entry, state), 0)
            is_through = is_active & (repeats == skipped)
            index += is_through.to(tl.int32)
            run = tl.where(is_through, upcoming.to(tl.int32), run - 256 * (skipped + 1))
            has_next = is_through & (index + 1 < length)
            upcoming = tl.load(vocabulary.runs + (index + 1) * num_ranks + ranks, mask=has_next, other=upcoming)
        state = lanes[0]
        tokens = tl.load(vocabulary.token_ids + ranks, mask=state >= 0, other=0)
        tl.atomic_or(mask + (tokens >> 5), 1 << (tokens & 31), mask=state >= 0, sem="relaxed")


@triton.jit
def _stepped(lanes, state, more_chars):
    _, chars, items, open_symbols, open_items, outer_items, num_open, num_closed = lanes
    return state, chars + more_chars, items, open_symbols, open_items, outer_items, num_open, num_closed


@triton.jit
def _follow(
    entry,
    byte,
    is_active,
    lanes,
    automaton,
    stack,
    depth,
    has_stacks: tl.constexpr,
    has_counters: tl.constexpr,
):
    """Follow a byte's entries in the active lanes (see `layout`); also returns how many repeats of the byte would
    only count characters. Reads the request's stack when it pops its own frames; never writes it."""
    _, infos, returns, _, _, num_results = automaton
    state, chars, items, open_symbols, open_items, outer_items, num_open, num_closed = lanes
    room = entry * 0
    following = tl.where(entry < 0, entry, entry & (TARGET_MASK | GUARD_BIT))
    if has_stacks:
        is_push = (entry >= 0) & ((entry & PUSH_BIT) != 0)
        is_pop = (entry >= 0) & ((entry & POP_BIT) != 0)
        is_own = is_pop & (num_open > 0)
        is_under = is_pop & (num_open == 0)
        num_closed += is_under.to(tl.int32)
        frame = stack + (depth - num_closed) * 2
        has_frame = is_under & (num_closed <= depth)
        symbol = tl.load(frame, mask=has_frame, other=0)
        symbol = tl.where(is_own, (open_symbols & 0xFFFF).to(tl.int32), symbol)
        behind = returns + symbol * num_results + (entry & TARGET_MASK)
        following = tl.where(is_pop, tl.load(behind, mask=is_own | has_frame, other=DEAD), following)
        following = tl.where(is_push & (num_open == MAX_OPEN), DEAD, following)
        pushed = tl.load(infos + state * INFOS + 4 + (byte == LEFT_BRACKET).to(tl.int32), mask=is_push, other=0)
        if has_counters:
            is_inner = is_push & (num_open > 0)
            following = tl.where(is_inner & (items > MAX_SAVED), DEAD, following)
            outer_items = tl.where(is_push & (num_open == 0), items, outer_items)
            inner_items = tl.where(num_open > 1, open_items & 0xFF, outer_items)
            under_items = tl.load(frame + 1, mask=has_frame, other=0)
            open_items = tl.where(is_inner, (open_items << 8) | items, open_items)
            open_items = tl.where(is_own & (num_open > 1), open_items >> 8, open_items)
            items = tl.where(is_push, 0, tl.where(is_own, inner_items, tl.where(is_under, under_items, items)))
        open_symbols = tl.where(is_push, (open_symbols << 16) | pushed.to(tl.int64), open_symbols)
        open_symbols = tl.where(is_own, open_symbols >> 16, open_symbols)
        num_open += is_push.to(tl.int32) - is_own.to(tl.int32)
    if has_counters:
        operation = tl.where(entry < 0, 0, (entry >> OPERATION_SHIFT) & 7)
        chars = tl.where((operation & 2) > 0, 0, chars) + (operation & 1)
        items += operation >> 2
        is_guard = is_active & (following >= 0) & ((following & GUARD_BIT) != 0)
        while tl.max(is_guard.to(tl.int32), 0) > 0:
            info = infos + (following & TARGET_MASK) * INFOS
            limit = tl.load(info, mask=is_guard, other=0)
            counts_chars = tl.load(info + 1, mask=is_guard, other=0) == 0
            is_at = tl.where(counts_chars, chars, items) >= limit
            opened = tl.load(info + 2 + is_at.to(tl.int32), mask=is_guard, other=DEAD)
            only_counts = is_guard & (operation == 1) & (opened == state)
            room = tl.where(only_counts & (is_at == 0), limit - 1 - chars, room)
            following = tl.where(is_guard, opened, following)
            is_guard = is_guard & (following >= 0) & ((following & GUARD_BIT) != 0)
    state = tl.where(is_active, following, state)
    return (state, chars, items, open_symbols, open_items, outer_items, num_open, num_closed), room


_launch_apply, _launch_begin, _launch_walk = Launcher(_apply), Launcher(_begin), Launcher(_walk)
