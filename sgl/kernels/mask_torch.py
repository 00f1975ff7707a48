"""The functions of `mask.py` in plain torch: what the Triton kernels are compared with, and what runs without a GPU.

Walks all tokens of one request together, a byte at a time; requests one after another.
"""

from __future__ import annotations

import torch

from sgl.kernels.mask_layout import (
    DEAD,
    DEPENDS,
    ENDLESS,
    FINISHED,
    GATE_BIT,
    INCOMPLETE,
    MAX_OPEN,
    MAX_SAVED,
    OPEN,
    OPERATION_SHIFT,
    POP_BIT,
    PUSH_BIT,
    REFUSED,
    STUCK,
    TARGET_MASK,
    UNKNOWN,
    AutomatonTensors,
    GrammarTensors,
    Places,
    VocabularyTensors,
)

_LEFT_BRACKET = 0x5B


def find_masks_(
    masks: torch.Tensor,
    rows: torch.Tensor,
    places: Places,
    grammars: GrammarTensors,
    vocabulary: VocabularyTensors,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `mask.find_masks_`."""
    mask_rows, flags = torch.full_like(rows, -1), torch.zeros_like(rows)
    for at, row in enumerate(rows.tolist()):
        grammar, state = places.grammars[row].item(), places.states[row].item()
        if grammar < 0 or places.statuses[row] != OPEN:
            continue
        automaton = grammars.automata[int(grammar)]
        mask_rows[at] = automaton.cached[int(state)]
        if mask_rows[at] < 0:
            mask_rows[at] = row
            masks[row], flags[at] = _mask(places, row, automaton, vocabulary)
    return mask_rows, flags


def advance_(
    places: Places,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    grammars: GrammarTensors,
    vocabulary: VocabularyTensors,
) -> None:
    """See `mask.advance_`."""
    for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
        grammar = int(places.grammars[row])
        if grammar < 0 or places.statuses[row] != OPEN:
            continue
        automaton = grammars.automata[grammar]
        if vocabulary.end_mask[token_id >> 5] >> (token_id & 31) & 1:
            is_accepting = automaton.infos[places.states[row], 7] > 0
            places.statuses[row] = FINISHED if is_accepting else REFUSED
            continue
        data = vocabulary.text[vocabulary.starts[token_id] : vocabulary.starts[token_id + 1]]
        lane = _Lanes(places, row, automaton, 1)
        for byte in data:
            lane.follow(byte[None], torch.ones(1, dtype=torch.bool))
        state = int(lane.states) if len(data) else DEAD
        depth = int(places.depths[row] - lane.num_closed)
        num_open = int(lane.num_open)
        if state == UNKNOWN or (state >= 0 and depth + num_open > places.stacks.shape[1]):
            places.statuses[row] = STUCK
        elif state == DEAD:
            places.statuses[row] = REFUSED
        else:
            places.states[row] = state
            places.char_counts[row], places.item_counts[row] = lane.chars[0], lane.items[0]
            places.stacks[row, depth : depth + num_open] = lane.frames[0, :num_open]
            places.depths[row] = depth + num_open


def _mask(
    places: Places, row: int, automaton: AutomatonTensors, vocabulary: VocabularyTensors
) -> tuple[torch.Tensor, int]:
    """The packed mask at a row's place, and its flags."""
    info = automaton.infos[places.states[row]]
    limit = int(info[6])
    lanes = _Lanes(places, row, automaton, len(vocabulary.lengths))
    for position, runs in enumerate(vocabulary.runs):
        is_active = (position < vocabulary.lengths) & (lanes.states >= 0)
        if not is_active.any():
            break
        for repeat in range(int((runs[is_active] >> 8).max()) + 1):
            lanes.follow(runs & 0xFF, is_active & (runs >> 8 >= repeat))
    is_known = lanes.states != UNKNOWN
    alive = (lanes.states >= 0) & (vocabulary.lengths > 0)
    allowed = torch.zeros(len(vocabulary.end_mask) * 32, dtype=torch.int64)
    allowed[vocabulary.token_ids[alive].long()] = 1
    words = (allowed.view(-1, 32) << torch.arange(32)).sum(1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    if info[7] > 0:
        words |= vocabulary.end_mask
    depends = bool(lanes.depends.any()) or bool((lanes.num_closed > 0).any()) or 0 <= limit < ENDLESS
    return words, (0 if is_known.all() else INCOMPLETE) | (DEPENDS if depends else 0)


class _Lanes:
    """Many readings that go on from one place, each with the frames that it opened."""

    def __init__(self, places: Places, row: int, automaton: AutomatonTensors, count: int) -> None:
        def repeated(value: torch.Tensor) -> torch.Tensor:
            return value[row].to(torch.int64).repeat(count)

        self.automaton = automaton
        self.stack = places.stacks[row].to(torch.int64)
        self.depth = int(places.depths[row])
        self.states = repeated(places.states)
        self.chars = repeated(places.char_counts)
        self.items = repeated(places.item_counts)
        self.frames = torch.zeros(count, MAX_OPEN, 2, dtype=torch.int64)
        self.num_open = torch.zeros(count, dtype=torch.int64)
        self.num_closed = torch.zeros(count, dtype=torch.int64)
        self.depends = torch.zeros(count, dtype=torch.bool)

    def follow(self, bytes_: torch.Tensor, is_active: torch.Tensor) -> None:
        """One byte further in the active lanes that are alive."""
        lanes = (is_active & (self.states >= 0)).nonzero().squeeze(1)
        columns = self.automaton.classes[bytes_[lanes].long()]
        entries = self.automaton.entries[self.states[lanes], columns].long()
        is_alive = entries >= 0
        is_push, is_pop = is_alive & (entries & PUSH_BIT > 0), is_alive & (entries & POP_BIT > 0)
        following = torch.where(is_alive, entries & (TARGET_MASK | GATE_BIT), entries)
        self._push(lanes[is_push], bytes_, following, is_push)
        following[is_pop] = self._pop(lanes[is_pop], entries[is_pop] & TARGET_MASK)
        operations = torch.where(is_alive, entries >> OPERATION_SHIFT & 7, 0)
        self.chars[lanes] = torch.where(operations & 2 > 0, 0, self.chars[lanes]) + (operations & 1)
        self.items[lanes] += operations >> 2
        self.states[lanes] = self._open_gates(lanes, following)

    def _push(
        self, lanes: torch.Tensor, bytes_: torch.Tensor, following: torch.Tensor, is_push: torch.Tensor
    ) -> None:
        num_open, items = self.num_open[lanes], self.items[lanes]
        columns = 4 + (bytes_[lanes] == _LEFT_BRACKET).long()
        symbols = self.automaton.infos[self.states[lanes], columns].long()
        fits = (num_open < MAX_OPEN) & ((num_open == 0) | (items <= MAX_SAVED))
        following[is_push] = torch.where(fits, following[is_push], UNKNOWN)
        self.frames[lanes[fits], num_open[fits]] = torch.stack([symbols, items], 1)[fits]
        self.num_open[lanes] += 1
        self.items[lanes] = 0

    def _pop(self, lanes: torch.Tensor, results: torch.Tensor) -> torch.Tensor:
        """The states behind the frames that are closed."""
        is_own = self.num_open[lanes] > 0
        self.num_closed[lanes] += (~is_own).long()
        under = self.depth - self.num_closed[lanes]
        frames = torch.where(
            is_own[:, None],
            self.frames[lanes, (self.num_open[lanes] - 1).clamp(min=0)],
            self.stack[under.clamp(min=0)],
        )
        self.num_open[lanes] -= is_own.long()
        self.items[lanes] = frames[:, 1]
        behind = self.automaton.returns[frames[:, 0], results].long()
        return torch.where(is_own | (under >= 0), behind, DEAD)

    def _open_gates(self, lanes: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        while True:
            is_gate = (following >= 0) & (following & GATE_BIT > 0)
            if not is_gate.any():
                return following
            gates = self.automaton.infos[following[is_gate] & TARGET_MASK].long()
            here = lanes[is_gate]
            counts = torch.where(gates[:, 1] == 0, self.chars[here], self.items[here])
            following[is_gate] = torch.where(counts >= gates[:, 0], gates[:, 3], gates[:, 2])
            self.depends[here] = True
