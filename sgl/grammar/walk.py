"""The whole vocabulary walked through the automaton at once: which tokens may come next at a place.

A walk steps all live nodes of one level of the vocabulary's trie together. It records what it depended on: how many
frames of the stack it looked at, and between which counts it holds. Called by `masks.py`, which keeps the masks.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton import ENDLESS, NOT_PLAIN, OPEN_BRACE, Automaton
from sgl.grammar.place import Frame, Place
from sgl.grammar.tables import (
    AT,
    BELOW,
    CHARS,
    COUNT_SHIFT,
    COUNTER,
    INC_CHAR,
    INC_ITEM,
    LIMIT,
    POP_BIT,
    PUSH_BIT,
    RESET_CHAR,
    TARGET_MASK,
    UNKNOWN,
)
from sgl.grammar.trie import ROOT
from sgl.grammar.vocabulary import Vocabulary
from sgl.grammar.word_walk import walk_words

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
ANY_COUNT: Final = (0, 1 << 60)
_FIXED: Final = -1
_MANY: Final = 32
"""Up to so many nodes behind which plain characters go on without end are taken one by one."""


class Step(NamedTuple):
    """What the live nodes of a walk came to by one byte."""

    nodes: Int64Array
    parents: Int64Array
    """Index of the node that each came from."""
    before: Int64Array
    """The state before the byte."""
    entries: Int32Array
    chars: Int64Array | int = 0
    """Characters read before that, in `_leave_plain`."""


class Walk:
    """One walk of the vocabulary from a place; marks the tokens that are allowed.

    `num_frames` is how many frames of the place's stack were closed on the way at most. `char_bounds` and
    `item_bounds` (by how many frames below the top) say for which counts everything would have gone the same.
    """

    def __init__(
        self,
        automaton: Automaton,
        vocabulary: Vocabulary,
        place: Place,
        allowed: npt.NDArray[np.bool_],
        *,
        counts: bool,
    ) -> None:
        self.automaton = automaton
        self.trie = vocabulary.trie
        self.plain = vocabulary.plain
        self.chars = vocabulary.chars
        self.allowed = allowed
        self.counts = counts
        self.place = place
        self.groups: list[Int32Array] | None = None
        """If set, the allowed tokens are put here by the place they lead to; counts must be on."""
        self.num_frames = 0
        self.visited: set[int] = set()
        """The states that some token led to or through, but for those between words of a long list."""
        self.longest_word = 0
        """Bytes of the longest word, at a place within a long list of them."""
        self.steady_states: set[int] = set()
        self.char_bounds = ANY_COUNT
        self.item_bounds: dict[int, tuple[int, int]] = {}
        self.frames: list[tuple[int, int, int, int]] = []
        """Frames opened on the way: (stack below, symbol, item count, its source)."""
        self._frame_numbers: dict[tuple[int, int, int, int], int] = {}
        self.below: list[Frame | None] = [place.stack]
        """The place's own frames, from the top, as far as the walk has looked."""

    def run(self) -> None:
        """Set `allowed` for every token that the grammar allows at the place, except those that end the text."""
        nodes: Int64Array = np.full(1, ROOT, np.int64)
        states: Int64Array = np.full(1, self.place.state, np.int64)
        # A stack is -1 - i with the first i frames of the place closed, or the index of a frame opened on the way.
        stacks: Int64Array = np.full(1, -1, np.int64)
        counts = Counts(self.place) if self.counts else None
        step = self._leave_plain() or self._leave_words()
        if step is None:
            nodes = self._take_plain(nodes, states, stacks, counts)
        else:
            stacks = np.full(len(step.nodes), -1, np.int64)
            if counts is not None:
                counts = counts.of(step.parents)
                counts.chars += step.chars
        while True:
            if step is None:
                step = self._children(nodes, states)
                stacks = stacks[step.parents]
                counts = None if counts is None else counts.of(step.parents)
            nodes, entries, before = step.nodes, step.entries, step.before
            step = None
            is_blind = counts is None and self.automaton.has_counters  # met the first gate: `masks.py` walks again
            if is_blind or not len(nodes):
                return
            self._mark(nodes)
            states = (entries & TARGET_MASK).astype(np.int64)
            if counts is not None:
                counts.apply(entries >> COUNT_SHIFT)
            moved = np.flatnonzero(entries & (PUSH_BIT | POP_BIT))
            if len(moved):
                self._move(moved, before, entries, self.trie.byte[nodes], states, stacks, counts)
            if counts is not None:
                self._open_gates(states, counts)
                self._group(nodes, states, stacks, counts)
            self._visit(states)
            nodes = self._take_plain(nodes, states, stacks, counts)

    def _children(self, nodes: Int64Array, states: Int64Array) -> Step:
        """All live children of all nodes."""
        trie = self.trie
        starts, widths = trie.child_start[nodes], trie.width[nodes]
        self._expand(states[widths > 0])
        parents = np.repeat(np.arange(len(nodes)), widths)
        children = np.arange(len(parents)) + (starts - np.cumsum(widths) + widths)[parents]
        before = states[parents]
        entries = self._entries(before, trie.byte[children])
        alive = np.flatnonzero(entries >= 0)
        return Step(children[alive], parents[alive], before[alive], entries[alive])

    def _leave_plain(self) -> Step | None:
        """If plain characters leave the place as it is, allow the plain tokens and go to where others stop being
        so.
        """
        automaton, trie, place = self.automaton, self.trie, self.place
        steady = automaton.steady(place.state)
        if steady is None:
            return None
        states, limits = [place.state], [steady[0]]
        while limits[-1] != ENDLESS and automaton.plain_limit(steady[1]) != NOT_PLAIN:
            states.append(steady[1])
            steady = automaton.steady(states[-1])
            if steady is None or place.char_count >= limits[-1]:
                return None
            limits.append(steady[0])
        if limits[-1] != ENDLESS:
            states.append(steady[1])
        if limits[0] != ENDLESS:
            is_far = place.char_count + trie.most_chars < limits[0]
            self._bound_chars(
                *(0, limits[0] - trie.most_chars - 1) if is_far else (place.char_count, place.char_count)
            )
        self.steady_states = set(states)
        self.visited |= self.steady_states
        left = limits[-1] - place.char_count
        self._group_plain(trie.plain_tokens[trie.plain_chars <= left])
        if left >= trie.most_chars:
            self.allowed[: len(self.plain)] |= self.plain
        else:
            self.allowed[trie.plain_tokens[trie.plain_chars <= left]] = True
        counts = place.char_count + trie.exit_chars
        before = np.array(states)[np.searchsorted(limits, counts, side="right").clip(max=len(states) - 1)]
        self._expand(np.array(states))
        entries = self._entries(before, trie.byte[trie.exits])
        alive = np.flatnonzero((entries >= 0) & (counts <= limits[-1]))
        none = np.zeros(len(alive), np.int64)
        return Step(trie.exits[alive], none, before[alive], entries[alive], trie.exit_chars[alive].astype(np.int64))

    def _leave_words(self) -> Step | None:
        """If the place is within a long list of words, allow what begins them and go to where they have ended."""
        if self.groups is not None:
            return None
        words = walk_words(self.automaton, self.trie, self.place.state, with_nearest=False)
        if words is None:
            return None
        self.longest_word = words.longest
        self.visited.add(words.then)
        self._mark(words.nodes)
        none = np.zeros(len(words.ends), np.int64)
        entries = np.full(len(words.ends), words.then, np.int32)
        return Step(words.ends, none, none, entries)

    def _visit(self, states: Int64Array) -> None:
        is_here = np.zeros(len(self.automaton), np.bool_)
        is_here[states] = True
        self.visited.update(np.flatnonzero(is_here).tolist())

    def _expand(self, states: Int64Array) -> None:
        unknown = states[self.automaton.tables.entries[states, 0] == UNKNOWN]
        for state in dict.fromkeys(unknown.tolist()):
            self.automaton.expand(state)

    def _entries(self, states: Int64Array, byte: npt.NDArray[np.uint8]) -> Int32Array:
        tables = self.automaton.tables
        return tables.entries[states, tables.classes[byte]]

    def _mark(self, nodes: Int64Array) -> None:
        tokens = self.trie.token[nodes]
        self.allowed[tokens[tokens >= 0]] = True
        for node in nodes[self.trie.has_twins[nodes]].tolist():
            self.allowed[self.trie.twins[node]] = True

    def _take_plain(
        self, nodes: Int64Array, states: Int64Array, stacks: Int64Array, counts: Counts | None
    ) -> Int64Array:
        """Where plain characters lead nowhere else, allow the tokens that go on with nothing but them, and leave
        the others to be walked.
        """
        trie = self.trie
        limits = self.automaton.plain_limits(states)
        chosen = np.flatnonzero(limits != NOT_PLAIN)
        if self.groups is not None and len(chosen):
            # Other threads than the one that stays where it is may lead elsewhere by some of the plain tokens.
            chosen = chosen[[self.automaton.is_plain_alone(state) for state in states[chosen].tolist()]]
        if not len(chosen):
            return nodes
        nodes = nodes.copy()
        is_endless = limits[chosen] == ENDLESS
        if np.count_nonzero(is_endless) > _MANY:
            self._take_many(nodes, states, stacks, counts, chosen[is_endless])
            chosen = chosen[~is_endless]
        for i in chosen.tolist():
            node, limit = nodes.item(i), limits.item(i)
            if node < trie.full_size:
                start, end = trie.plain_start.item(node), trie.plain_end.item(node)
                if end - start == len(trie.plain_tokens) and (limit == ENDLESS or counts is None):
                    self._group_plain(trie.plain_tokens)
                    self.allowed[: len(self.plain)] |= self.plain
                elif start != end:
                    tokens, chars = trie.plain_tokens[start:end], trie.plain_chars[start:end]
                    self._allow_up_to(tokens, chars, node, limit, counts, i)
                node = nodes[i] = trie.ragged.item(node)
            if trie.is_plain_path[node] and states.item(i) in self.steady_states:
                nodes[i] = trie.nowhere  # `_leave_plain` has been here
            elif trie.is_plain_below[node]:
                start, end = trie.ragged_start.item(node), trie.ragged_end.item(node)
                tokens, chars = trie.ragged_tokens[start:end], trie.ragged_chars[start:end]
                self._allow_up_to(tokens, chars, node, limit, counts, i)
                nodes[i] = trie.nowhere
        return nodes

    def _take_many(
        self,
        nodes: Int64Array,
        states: Int64Array,
        stacks: Int64Array,
        counts: Counts | None,
        chosen: npt.NDArray[np.intp],
    ) -> None:
        """As `_take_plain`, of many nodes at once behind which plain characters go on without end."""
        trie = self.trie
        where = nodes[chosen]
        is_full = where < trie.full_size
        behind = np.where(is_full, trie.ragged[np.where(is_full, where, 0)], where)
        is_done = trie.is_plain_path[behind] & np.isin(states[chosen], list(self.steady_states))
        is_plain = trie.is_plain_below[behind] & ~is_done
        places = np.zeros(len(chosen), np.int64)
        if self.groups is not None and counts is not None:
            keys = np.stack([column[chosen] for column in (states, stacks, counts.chars, counts.items)])
            places = np.unique(keys, axis=1, return_inverse=True)[1]
        for place in range(int(places.max()) + 1):
            here = places == place
            full, below = where[here & is_full], behind[here & is_plain]
            plain = _covered(trie.plain_start[full], trie.plain_end[full], len(trie.plain_tokens))
            ragged = _covered(trie.ragged_start[below], trie.ragged_end[below], len(trie.ragged_tokens))
            tokens = np.concatenate([trie.plain_tokens[plain], trie.ragged_tokens[ragged]])
            self.allowed[tokens] = True
            if self.groups is not None:
                going_on = self._going_on(tokens, where[here])
                self.groups += [going_on] if len(going_on) else []
        nodes[chosen] = np.where(is_done | is_plain, trie.nowhere, behind)

    def _allow_up_to(
        self, tokens: Int32Array, chars: Int32Array, node: int, limit: int, counts: Counts | None, i: int
    ) -> None:
        """Allow the tokens below a node that keep within `limit` characters."""
        if limit != ENDLESS and counts is not None:
            left = limit - counts.chars.item(i) + self.trie.chars.item(node)
            base = self.place.char_count
            if left >= self.trie.most_chars:
                bounds = 0, base + left - self.trie.most_chars
            else:
                tokens = tokens[chars <= left]
                bounds = base, base
            if not counts.is_fixed[i]:
                self._bound_chars(*bounds)
        self.allowed[tokens] = True
        if self.groups is not None:
            self._group_plain(self._going_on(tokens, np.array([node])))

    def _going_on(self, tokens: Int32Array, nodes: Int64Array) -> Int32Array:
        """Those of the tokens below some nodes that do not end there: they may have left other threads behind."""
        ended = self.trie.token[nodes].tolist()
        for node in nodes[self.trie.has_twins[nodes]].tolist():
            ended += self.trie.twins[node]
        return tokens[~np.isin(tokens, ended)]

    def _group(self, nodes: Int64Array, states: Int64Array, stacks: Int64Array, counts: Counts) -> None:
        """Note which tokens end at the same place."""
        if self.groups is None:
            return
        ended = np.flatnonzero(self.trie.token[nodes] >= 0)
        if len(ended):
            order = ended[np.lexsort([column[ended] for column in (counts.items, counts.chars, stacks, states)])]
            differs = np.zeros(len(order) - 1, np.bool_)
            for column in (counts.items, counts.chars, stacks, states):
                differs |= np.diff(column[order]) != 0
            self.groups += np.split(self.trie.token[nodes[order]], np.flatnonzero(differs) + 1)
        for node in nodes[self.trie.has_twins[nodes]].tolist():
            self.groups.append(np.array(self.trie.twins[node], np.int32))

    def _group_plain(self, tokens: Int32Array) -> None:
        """As `_group`, of tokens that go on with plain characters alone from one node: their number decides, where
        anything is counted."""
        if self.groups is None or not len(tokens):
            return
        if not self.automaton.has_counters:
            self.groups.append(tokens)
            return
        chars = self.chars[tokens].astype(np.int16)  # sorted in one pass
        order = np.argsort(chars, kind="stable")
        self.groups += np.split(tokens[order], np.flatnonzero(np.diff(chars[order])) + 1)

    def _move(
        self,
        moved: npt.NDArray[np.intp],
        before: Int64Array,
        entries: Int32Array,
        byte: npt.NDArray[np.uint8],
        states: Int64Array,
        stacks: Int64Array,
        counts: Counts | None,
    ) -> None:
        """Push and pop, one by one: few tokens hold brackets."""
        automaton = self.automaton
        for i in moved.tolist():
            entry = entries.item(i)
            count, source = (0, _FIXED) if counts is None else (counts.items.item(i), counts.sources.item(i))
            if entry & PUSH_BIT:
                symbol = automaton.tables.symbols.item(before.item(i), 0 if byte.item(i) == OPEN_BRACE else 1)
                stacks[i] = self._opened((stacks.item(i), symbol, count, source))
                count, source = 0, _FIXED
            else:
                stack = stacks.item(i)
                if stack >= 0:
                    stacks[i], symbol, count, source = self.frames[stack]
                else:
                    symbol, count, source = self._close(-1 - stack)
                    stacks[i] = stack - 1
                states[i] = automaton.returned(symbol, entry & TARGET_MASK)
            if counts is not None:
                counts.items[i], counts.sources[i] = count, source

    def _opened(self, frame: tuple[int, int, int, int]) -> int:
        found = self._frame_numbers.get(frame)
        if found is None:
            found = self._frame_numbers[frame] = len(self.frames)
            self.frames.append(frame)
        return found

    def _close(self, closed: int) -> tuple[int, int, int]:
        """Close the next of the place's own frames, `closed` of which are closed: its symbol, count and source."""
        frame = self.below[closed]
        assert frame is not None, "the outermost frame is never closed"
        if closed + 1 == len(self.below):
            self.below.append(frame.parent)
            self.num_frames = closed + 1
        return frame.symbol, frame.item_count, closed + 1

    def _open_gates(self, states: Int64Array, counts: Counts) -> None:
        gates = self.automaton.tables.gates
        waiting = np.flatnonzero(gates[states, LIMIT] >= 0)
        while len(waiting):
            here = gates[states[waiting]]
            limits = here[:, LIMIT].astype(np.int64)
            is_chars = here[:, COUNTER] == CHARS
            count = np.where(is_chars, counts.chars[waiting], counts.items[waiting])
            is_at = count >= limits
            self._depend(waiting, limits, count, is_at, is_chars, counts)
            states[waiting] = np.where(is_at, here[:, AT], here[:, BELOW])
            waiting = waiting[gates[states[waiting], LIMIT] >= 0]

    def _depend(
        self,
        waiting: npt.NDArray[np.intp],
        limits: Int64Array,
        count: Int64Array,
        is_at: npt.NDArray[np.bool_],
        is_chars: npt.NDArray[np.bool_],
        counts: Counts,
    ) -> None:
        """Note for which counts at the place the gates would open the same way."""
        sources = np.where(is_chars, np.where(counts.is_fixed[waiting], _FIXED, 0), counts.sources[waiting])
        for source in set(sources.tolist()) - {_FIXED}:
            for of_chars in (True, False):
                chosen = (sources == source) & (is_chars == of_chars)
                if not chosen.any():
                    continue
                base = self.place.char_count if of_chars else self._item_count(source)
                margin = limits[chosen] - count[chosen] + base
                low = int(margin[is_at[chosen]].max(initial=0))
                high = int(margin[~is_at[chosen]].min(initial=ANY_COUNT[1])) - 1
                if of_chars:
                    self._bound_chars(low, high)
                else:
                    old = self.item_bounds.get(source, ANY_COUNT)
                    self.item_bounds[source] = max(old[0], low), min(old[1], high)

    def _item_count(self, source: int) -> int:
        if source == 0:
            return self.place.item_count
        frame = self.below[source - 1]
        assert frame is not None
        return frame.item_count

    def _bound_chars(self, low: int, high: int) -> None:
        self.char_bounds = max(self.char_bounds[0], low), min(self.char_bounds[1], high)


def _covered(starts: Int64Array, ends: Int64Array, size: int) -> npt.NDArray[np.bool_]:
    """bool [size]: which places lie in one of the ranges."""
    depth = np.bincount(starts, minlength=size + 1) - np.bincount(ends, minlength=size + 1)
    return np.cumsum(depth[:size]) > 0


class Counts:
    """The counters of every live node of a walk.

    `is_fixed` says that `chars` no longer goes back to the count at the place; `sources` which frame's count
    `items` goes on from, 0 for the place's own, i for the i-th frame below, _FIXED for a frame opened on the way.
    """

    __slots__ = ("chars", "is_fixed", "items", "sources")

    def __init__(self, place: Place) -> None:
        self.chars: Int64Array = np.full(1, place.char_count, np.int64)
        self.is_fixed = np.zeros(1, np.bool_)
        self.items: Int64Array = np.full(1, place.item_count, np.int64)
        self.sources: Int64Array = np.zeros(1, np.int64)

    def of(self, parents: Int64Array) -> Counts:
        """The counters of the children of `parents`."""
        after = Counts.__new__(Counts)
        after.chars = self.chars[parents]
        after.is_fixed = self.is_fixed[parents]
        after.items = self.items[parents]
        after.sources = self.sources[parents]
        return after

    def apply(self, operations: Int32Array) -> None:
        """Move the counters by the operations of what was read."""
        reset = (operations & RESET_CHAR) != 0
        self.chars += operations & INC_CHAR
        self.chars[reset] = 0
        self.is_fixed |= reset
        self.items += (operations & INC_ITEM) != 0
