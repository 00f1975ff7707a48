"""`kernels.mask.ops` in plain torch: the reference of the Triton kernels, for tests without a GPU.

Walks all tokens of one request together, byte by byte; one request after another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl.grammar.automaton.finished import device_arrays
from sgl.grammar.automaton.pushdown import Automaton
from sgl.kernels.mask.layout import (
    DEAD,
    GUARD_BIT,
    MAX_OPEN,
    MAX_SAVED,
    MAX_SYMBOLS,
    OPERATION_SHIFT,
    POP_BIT,
    PUSH_BIT,
    TARGET_MASK,
    AutomatonTensors,
    GrammarTensors,
    Places,
    VocabularyTensors,
)
from sgl.kernels.mask.ops import apply_token_mask_
from sgl.runtime.runner.device_grammars import addresses_of

__all__ = ["apply_token_mask_", "compute_masks_"]

_LEFT_BRACKET = 0x5B


def automaton_tensors(automaton: Automaton, device: torch.device) -> AutomatonTensors:
    """A copy of the automaton's present tables."""
    tables = automaton.tables
    assert tables.num_symbols <= MAX_SYMBOLS, "more do not fit"
    arrays = device_arrays(tables, automaton.plain_limits())
    return AutomatonTensors(*(torch.from_numpy(array).to(device) for array in arrays))


def grammar_tensors(automata: Sequence[AutomatonTensors], device: torch.device) -> GrammarTensors:
    """Automata, numbered by their place in the sequence."""
    return GrammarTensors(
        automata=list(automata),
        addresses=torch.from_numpy(addresses_of(automata)).to(device),
        has_stacks=any(bool((one.infos[:, 4:6] >= 0).any()) for one in automata),
        has_counters=any(bool((one.infos[:, 0] >= 0).any()) for one in automata),
    )


def compute_masks_(
    masks: torch.Tensor,
    rows: torch.Tensor,
    places: Places,
    grammars: GrammarTensors,
    vocabulary: VocabularyTensors,
) -> None:
    """See `mask.compute_masks_`."""
    for at, row in enumerate(rows.tolist()):
        masks[row] = _mask(places, at, grammars.automata[int(places.grammars[at])], vocabulary)


def _mask(places: Places, at: int, automaton: AutomatonTensors, vocabulary: VocabularyTensors) -> torch.Tensor:
    """The packed mask at a place."""
    lanes = _Lanes(places, at, automaton, len(vocabulary.lengths))
    for position, runs in enumerate(vocabulary.runs):
        is_active = (position < vocabulary.lengths) & (lanes.states >= 0)
        if not is_active.any():
            break
        for repeat in range(int((runs[is_active] >> 8).max()) + 1):
            lanes.follow(runs & 0xFF, is_active & (runs >> 8 >= repeat))
    alive = (lanes.states >= 0) & (vocabulary.lengths > 0)
    allowed = torch.zeros(len(vocabulary.end_mask) * 32, dtype=torch.int64)
    allowed[vocabulary.token_ids[alive].long()] = 1
    words = (allowed.view(-1, 32) << torch.arange(32)).sum(1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    if automaton.infos[places.states[at], 7] > 0:
        words |= vocabulary.end_mask
    return words


class _Lanes:
    """Many readings from one place, each with the frames it opened."""

    def __init__(self, places: Places, at: int, automaton: AutomatonTensors, count: int) -> None:
        def repeated(value: torch.Tensor) -> torch.Tensor:
            return value[at].to(torch.int64).repeat(count)

        self.automaton = automaton
        self.stack = places.stacks[at].to(torch.int64)
        self.depth = int(places.depths[at])
        self.states = repeated(places.states)
        self.chars = repeated(places.char_counts)
        self.items = repeated(places.item_counts)
        self.frames = torch.zeros(count, MAX_OPEN, 2, dtype=torch.int64)
        self.num_open = torch.zeros(count, dtype=torch.int64)
        self.num_closed = torch.zeros(count, dtype=torch.int64)

    def follow(self, bytes_: torch.Tensor, is_active: torch.Tensor) -> None:
        """Advance the live ones of the active lanes by one byte."""
        lanes = (is_active & (self.states >= 0)).nonzero().squeeze(1)
        columns = self.automaton.classes[bytes_[lanes].long()]
        entries = self.automaton.entries[self.states[lanes], columns].long()
        is_alive = entries >= 0
        is_push, is_pop = is_alive & (entries & PUSH_BIT > 0), is_alive & (entries & POP_BIT > 0)
        following = torch.where(is_alive, entries & (TARGET_MASK | GUARD_BIT), entries)
        self._push(lanes[is_push], bytes_, following, is_push)
        following[is_pop] = self._pop(lanes[is_pop], entries[is_pop] & TARGET_MASK)
        operations = torch.where(is_alive, entries >> OPERATION_SHIFT & 7, 0)
        self.chars[lanes] = torch.where(operations & 2 > 0, 0, self.chars[lanes]) + (operations & 1)
        self.items[lanes] += operations >> 2
        self.states[lanes] = self._split_guards(lanes, following)

    def _push(
        self, lanes: torch.Tensor, bytes_: torch.Tensor, following: torch.Tensor, is_push: torch.Tensor
    ) -> None:
        num_open, items = self.num_open[lanes], self.items[lanes]
        columns = 4 + (bytes_[lanes] == _LEFT_BRACKET).long()
        symbols = self.automaton.infos[self.states[lanes], columns].long()
        fits = (num_open < MAX_OPEN) & ((num_open == 0) | (items <= MAX_SAVED))
        following[is_push] = torch.where(fits, following[is_push], DEAD)
        self.frames[lanes[fits], num_open[fits]] = torch.stack([symbols, items], 1)[fits]
        self.num_open[lanes] += 1
        self.items[lanes] = 0

    def _pop(self, lanes: torch.Tensor, results: torch.Tensor) -> torch.Tensor:
        """The states after the closed frames."""
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

    def _split_guards(self, lanes: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        while True:
            is_guard = (following >= 0) & (following & GUARD_BIT > 0)
            if not is_guard.any():
                return following
            guards = self.automaton.infos[following[is_guard] & TARGET_MASK].long()
            here = lanes[is_guard]
            counts = torch.where(guards[:, 1] == 0, self.chars[here], self.items[here])
            following[is_guard] = torch.where(counts >= guards[:, 0], guards[:, 3], guards[:, 2])
