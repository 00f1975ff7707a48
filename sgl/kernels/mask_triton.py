"""The Triton kernels behind `mask.py`, which says what each promises.

Imported only where a GPU or Triton's interpreter runs them: Triton is not installed elsewhere. An argument of a
kernel that is a tensor outside is a pointer inside, which no type says.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl.kernels import mask_layout as layout
from sgl.kernels.mask_layout import GrammarTensors, Places, VocabularyTensors

_APPLY_BLOCK = 4096
_BASE_BLOCK = 1024
_ADVANCE_BLOCK = 16
_RESIDENT = 8448
"""Programs of one warp that are started at most: 64 for each of 132 multiprocessors, twice what runs at a time."""
_MAX_SHARE = 16
"""Blocks of tokens that one program walks for one request at most."""

DEAD = tl.constexpr(layout.DEAD)
UNKNOWN = tl.constexpr(layout.UNKNOWN)
TARGET_MASK = tl.constexpr(layout.TARGET_MASK)
PUSH_BIT = tl.constexpr(layout.PUSH_BIT)
POP_BIT = tl.constexpr(layout.POP_BIT)
OPERATION_SHIFT = tl.constexpr(layout.OPERATION_SHIFT)
GATE_BIT = tl.constexpr(layout.GATE_BIT)
MAX_OPEN = tl.constexpr(layout.MAX_OPEN)
MAX_SAVED = tl.constexpr(layout.MAX_SAVED)
OPEN = tl.constexpr(layout.OPEN)
FINISHED = tl.constexpr(layout.FINISHED)
REFUSED = tl.constexpr(layout.REFUSED)
STUCK = tl.constexpr(layout.STUCK)
INCOMPLETE = tl.constexpr(layout.INCOMPLETE)
DEPENDS = tl.constexpr(layout.DEPENDS)
ENDLESS = tl.constexpr(layout.ENDLESS)
LEFT_BRACKET = tl.constexpr(0x5B)
ADDRESSES = tl.constexpr(7)
INFOS = tl.constexpr(8)


def apply_token_mask_(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> None:
    """See `mask.apply_token_mask_`."""
    num_rows, vocab_size = logits.shape
    grid = (triton.cdiv(vocab_size, _APPLY_BLOCK), num_rows)
    _apply[grid](logits, masks, mask_rows, vocab_size, logits.stride(0), masks.stride(0), block=_APPLY_BLOCK)


def find_masks_(
    masks: torch.Tensor,
    rows: torch.Tensor,
    places: Places,
    grammars: GrammarTensors,
    vocabulary: VocabularyTensors,
    *,
    num_warps: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `mask.find_masks_`. num_warps is that of the walk."""
    num_rows, num_words = len(rows), masks.shape[1]
    mask_rows, flags = torch.empty_like(rows), torch.empty_like(rows)
    work = torch.zeros(num_rows + 1, dtype=torch.int32, device=rows.device)
    num_blocks = len(vocabulary.block_bytes)
    share = max(1, min(_MAX_SHARE, num_rows * num_blocks // _RESIDENT))
    num_groups = triton.cdiv(num_blocks, share)
    _begin[(triton.cdiv(num_words, _BASE_BLOCK), num_rows)](
        masks,
        mask_rows,
        flags,
        work,
        rows,
        places,
        grammars.addresses,
        vocabulary,
        num_words,
        len(vocabulary.plain_masks) - 1,
        block=_BASE_BLOCK,
    )
    _walk[(min(_RESIDENT, num_groups * num_rows),)](
        masks,
        flags,
        work,
        rows,
        places,
        grammars.addresses,
        vocabulary,
        len(vocabulary.lengths),
        num_words,
        num_blocks,
        num_groups,
        places.stacks.shape[1],
        block=vocabulary.block,
        has_stacks=grammars.has_stacks,
        has_counters=grammars.has_counters,
        num_warps=num_warps,
    )
    return mask_rows, flags


def advance_(
    places: Places,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    grammars: GrammarTensors,
    vocabulary: VocabularyTensors,
) -> None:
    """See `mask.advance_`."""
    _advance[(triton.cdiv(len(rows), _ADVANCE_BLOCK),)](
        rows,
        token_ids,
        places,
        grammars.addresses,
        vocabulary,
        len(rows),
        places.stacks.shape[1],
        block=_ADVANCE_BLOCK,
        has_stacks=grammars.has_stacks,
        has_counters=grammars.has_counters,
        num_warps=1,
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
        if tl.max((words != 0).to(tl.int32), 0) == 0:  # most blocks of most masks: whole vectors are stored
            tl.store(at, nothing, mask=is_token)
        else:
            tl.store(at, nothing, mask=is_token & (((words >> (tokens & 31)) & 1) == 0))


@triton.jit
def _begin(
    masks,
    mask_rows,
    flags,
    work,
    rows,
    places,
    addresses,
    vocabulary,
    num_words,
    most_chars,
    block: tl.constexpr,
):
    """Say where each row's mask is, and where it has to be walked, begin with what needs no walk.

    work: how many rows have to be walked, then which.
    """
    at = tl.program_id(1)
    row = tl.load(rows + at)
    grammar = tl.load(places.grammars + row)
    found = -1
    flag = 0
    if (grammar >= 0) & (tl.load(places.statuses + row) == OPEN):
        state = tl.load(places.states + row)
        cached = tl.load(addresses + grammar * ADDRESSES + 3).to(tl.pointer_type(tl.int32))
        found = tl.load(cached + state)
        if found < 0:
            found = row
            infos = tl.load(addresses + grammar * ADDRESSES + 1).to(tl.pointer_type(tl.int32))
            limit = tl.load(infos + state * INFOS + 6)
            if (limit >= 0) & (limit < ENDLESS):
                flag = DEPENDS
            left = tl.minimum(tl.maximum(limit - tl.load(places.char_counts + row), 0), most_chars)
            words = tl.program_id(0) * block + tl.arange(0, block)
            is_word = words < num_words
            base = tl.load(vocabulary.plain_masks + left * num_words + words, mask=is_word)
            is_accepting = tl.load(infos + state * INFOS + 7)
            if is_accepting > 0:
                base |= tl.load(vocabulary.end_mask + words, mask=is_word)
            tl.store(masks + row.to(tl.int64) * num_words + words, base, mask=is_word)
    if tl.program_id(0) == 0:
        tl.store(mask_rows + at, found)
        tl.store(flags + at, flag)
        if found == row:
            tl.store(work + 1 + tl.atomic_add(work, 1, sem="relaxed"), at)


@triton.jit(do_not_specialize=["num_groups"])  # it varies from step to step
def _walk(
    masks,
    flags,
    work,
    rows,
    places,
    addresses,
    vocabulary,
    num_ranks,
    num_words,
    num_blocks,
    num_groups,
    max_depth,
    block: tl.constexpr,
    has_stacks: tl.constexpr,
    has_counters: tl.constexpr,
):
    """Walk every token, all lanes of a block together, and allow those that stay alive.

    Rows and groups of blocks are dealt out to the programs like cards, and blocks to groups, so that no program gets
    all of the long ones.
    """
    num_items = tl.load(work) * num_groups
    item = tl.program_id(0)
    while item < num_items:
        at = tl.load(work + 1 + item // num_groups)
        row = tl.load(rows + at)
        automaton = _automaton(addresses, tl.load(places.grammars + row), True)
        flag = 0
        which = item % num_groups
        while which < num_blocks:
            mask = masks + row.to(tl.int64) * num_words
            flag |= _walk_block(
                which,
                mask,
                row,
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
        if flag > 0:
            tl.atomic_or(flags + at, flag, sem="relaxed")
        item += tl.num_programs(0)


@triton.jit
def _automaton(addresses, grammar, is_wanted):
    """Pointers to the tensors of a grammar, and the widths of two of them."""
    address = addresses + grammar * ADDRESSES
    return (
        tl.load(address, mask=is_wanted, other=0).to(tl.pointer_type(tl.int32)),
        tl.load(address + 1, mask=is_wanted, other=0).to(tl.pointer_type(tl.int32)),
        tl.load(address + 2, mask=is_wanted, other=0).to(tl.pointer_type(tl.int32)),
        tl.load(address + 4, mask=is_wanted, other=0).to(tl.pointer_type(tl.int32)),
        tl.load(address + 5, mask=is_wanted, other=0).to(tl.int32),
        tl.load(address + 6, mask=is_wanted, other=0).to(tl.int32),
    )


@triton.jit
def _lanes(state, chars, items):
    """Readings that begin at a place: state; characters and items counted; the frames opened since (symbols by 16
    bits, item counts by 8 but for that of the frame below the first), how many, how many of the place's own are
    closed; whether a counter decided anything."""
    none = state * 0
    return state, chars + none, items + none, none.to(tl.int64), none, none, none, none, none


@triton.jit
def _walk_block(
    which,
    mask,
    row,
    places,
    automaton,
    vocabulary,
    num_ranks,
    max_depth,
    block: tl.constexpr,
    has_stacks: tl.constexpr,
    has_counters: tl.constexpr,
):
    """Allow the tokens of one block that stay alive; the flags of the mask."""
    entries, infos, _, classes, num_classes, _ = automaton
    start, start_chars = tl.load(places.states + row), tl.load(places.char_counts + row)
    left = tl.maximum(tl.load(infos + start * INFOS + 6) - start_chars, 0)
    first = tl.load(vocabulary.block_bytes + which)
    first_entry = tl.load(entries + start * num_classes + tl.load(classes + tl.maximum(first, 0)))
    flag = 0
    if (tl.load(vocabulary.block_reaches + which) > left) & ((first < 0) | (first_entry != DEAD)):
        depth = tl.load(places.depths + row)
        stack = places.stacks + row.to(tl.int64) * max_depth * 2
        ranks = which * block + tl.arange(0, block)
        length = tl.load(vocabulary.lengths + ranks)
        is_walked = (length > 0) & (tl.load(vocabulary.reaches + ranks) > left)
        lanes = _lanes(tl.where(is_walked, start, DEAD), start_chars, tl.load(places.item_counts + row))
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
            # A byte that leaves everything as it is does so however often it comes.
            skipped = tl.where(entry == state, repeats, 0)
            if has_stacks or has_counters:
                if top <= TARGET_MASK:  # nothing but steps to other states, as almost always
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
        flag = tl.max(tl.where(state == UNKNOWN, INCOMPLETE, 0), 0)
        flag |= tl.max(tl.where(lanes[7] + lanes[8] > 0, DEPENDS, 0), 0)
    return flag


@triton.jit
def _stepped(lanes, state, more_chars):
    """The lanes in other states, with more characters counted."""
    _, chars, items, open_symbols, open_items, outer_items, num_open, num_closed, depends = lanes
    return state, chars + more_chars, items, open_symbols, open_items, outer_items, num_open, num_closed, depends


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
    """Where the entries of a byte lead the active lanes, as `mask_layout` says; and how many characters more of the
    same byte would do nothing but count. Reads the request's stack for pops of its own frames; never writes it.
    """
    _, infos, returns, _, _, num_results = automaton
    state, chars, items, open_symbols, open_items, outer_items, num_open, num_closed, depends = lanes
    room = entry * 0
    following = tl.where(entry < 0, entry, entry & (TARGET_MASK | GATE_BIT))
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
        following = tl.where(is_push & (num_open == MAX_OPEN), UNKNOWN, following)
        pushed = tl.load(infos + state * INFOS + 4 + (byte == LEFT_BRACKET).to(tl.int32), mask=is_push, other=0)
        if has_counters:
            is_inner = is_push & (num_open > 0)
            following = tl.where(is_inner & (items > MAX_SAVED), UNKNOWN, following)
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
        is_gate = is_active & (following >= 0) & ((following & GATE_BIT) != 0)
        depends |= is_gate.to(tl.int32)
        while tl.max(is_gate.to(tl.int32), 0) > 0:
            info = infos + (following & TARGET_MASK) * INFOS
            limit = tl.load(info, mask=is_gate, other=0)
            counts_chars = tl.load(info + 1, mask=is_gate, other=0) == 0
            is_at = tl.where(counts_chars, chars, items) >= limit
            opened = tl.load(info + 2 + is_at.to(tl.int32), mask=is_gate, other=DEAD)
            only_counts = is_gate & (operation == 1) & (opened == state)
            room = tl.where(only_counts & (is_at == 0), limit - 1 - chars, room)
            following = tl.where(is_gate, opened, following)
            is_gate = is_gate & (following >= 0) & ((following & GATE_BIT) != 0)
    state = tl.where(is_active, following, state)
    return (state, chars, items, open_symbols, open_items, outer_items, num_open, num_closed, depends), room


@triton.jit
def _advance(
    rows,
    token_ids,
    places,
    addresses,
    vocabulary,
    num_rows,
    max_depth,
    block: tl.constexpr,
    has_stacks: tl.constexpr,
    has_counters: tl.constexpr,
):
    """One lane a request."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.load(rows + at, mask=at < num_rows, other=0)
    grammar = tl.load(places.grammars + row, mask=at < num_rows, other=-1)
    is_open = (grammar >= 0) & (tl.load(places.statuses + row, mask=at < num_rows, other=FINISHED) == OPEN)
    automaton = _automaton(addresses, grammar, is_open)
    entries, infos, _, classes, num_classes, _ = automaton
    start = tl.load(places.states + row, mask=is_open, other=0)
    depth = tl.load(places.depths + row, mask=is_open, other=0)
    stack = places.stacks + row.to(tl.int64) * max_depth * 2
    token = tl.load(token_ids + at, mask=is_open, other=0)
    first = tl.load(vocabulary.starts + token, mask=is_open, other=0)
    length = tl.load(vocabulary.starts + token + 1, mask=is_open, other=0) - first
    ends = ((tl.load(vocabulary.end_mask + (token >> 5), mask=is_open, other=0) >> (token & 31)) & 1) > 0
    is_accepting = tl.load(infos + start * INFOS + 7, mask=is_open & ends, other=0) > 0
    lanes = _lanes(
        tl.where(is_open & (length > 0), start, DEAD),
        tl.load(places.char_counts + row, mask=is_open, other=0),
        tl.load(places.item_counts + row, mask=is_open, other=0),
    )
    position = 0
    top = 0
    while top >= 0:
        is_active = (position < length) & (lanes[0] >= 0)
        byte = tl.load(vocabulary.text + first + position, mask=is_active, other=0).to(tl.int32)
        column = tl.load(classes + byte, mask=is_active, other=0)
        entry = tl.load(entries + lanes[0] * num_classes + column, mask=is_active, other=DEAD)
        top = tl.max(entry, 0)
        lanes, _ = _follow(entry, byte, is_active, lanes, automaton, stack, depth, has_stacks, has_counters)
        position += 1
    state, chars, items, open_symbols, open_items, outer_items, num_open, num_closed, _ = lanes
    under = depth - num_closed
    state = tl.where((state >= 0) & (under + num_open > max_depth), UNKNOWN, state)
    status = tl.where(state >= 0, OPEN, tl.where(state == UNKNOWN, STUCK, REFUSED))
    status = tl.where(ends, tl.where(is_accepting, FINISHED, REFUSED), status)
    tl.store(places.statuses + row, status, mask=is_open)
    goes_on = is_open & (status == OPEN)
    tl.store(places.states + row, state, mask=goes_on)
    if has_stacks:
        tl.store(places.depths + row, under + num_open, mask=goes_on)
        for i in tl.static_range(MAX_OPEN):
            is_frame = goes_on & (i < num_open)
            above = tl.maximum(num_open - 1 - i, 0)
            symbol = ((open_symbols >> (above * 16).to(tl.int64)) & 0xFFFF).to(tl.int32)
            saved = outer_items if i == 0 else (open_items >> (above * 8)) & 0xFF
            tl.store(stack + (under + i) * 2, symbol, mask=is_frame)
            tl.store(stack + (under + i) * 2 + 1, saved, mask=is_frame)
    if has_counters:
        tl.store(places.char_counts + row, chars, mask=goes_on)
        tl.store(places.item_counts + row, items, mask=goes_on)
