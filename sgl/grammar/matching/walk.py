"""Which tokens may come next at a place: the vocabulary walked through the automaton, in C where it can be compiled.

`walk_reference.py` is the definition of a walk, and does it where there is no compiler. The automaton may still be
growing: the C stops where nobody has asked yet, and goes on there. Called by `masks.py`, which keeps the masks.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sgl import native_code
from sgl.grammar.automaton.place import Place
from sgl.grammar.automaton.plain import ENDLESS
from sgl.grammar.automaton.pushdown import Automaton
from sgl.grammar.automaton.subsets import Subsets
from sgl.grammar.automaton.tables import Tables
from sgl.grammar.matching import walk_reference
from sgl.grammar.matching.walk_plan import ANY_COUNT, Mask, Plan, allow, beside, make_plan
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.time_limit import check_time

_STEPS: Final = 1 << 17  # nodes between two looks at the time
_DONE, _EXPAND, _RETURN, _FRAMES, _GROUPS, _TIME, _PLAIN = range(7)
_NONE, _ALLOWED, _STAYS = range(1, 4)  # what plain characters do in a state
logger = logging.getLogger(__name__)


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """walk.c; None where it cannot be had, which is logged once."""
    try:
        return native_code.load(Path(__file__).with_suffix(".c"), {"sgl_walk": "pi:i"})
    except native_code.CannotCompile as error:
        logger.warning("token masks will take several times as long, nothing is compiled for them: %s", error)
        return None


_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Walk(ctypes.Structure):
    """`Walk` of walk.c."""

    _fields_ = [
        (name, kind)
        for kind, names in (
            (_POINTER, "entries symbols guards returns classes"),
            (_LONG, "width results"),
            (_POINTER, "nodes rest plain_before rest_of plain_tokens plain row_of rows starts regions stack"),
            (_LONG, "words num_starts num_regions num_stack chars items"),
            (_POINTER, "mask seen group_of frames groups bounds at"),
            (_LONG, "max_frames num_frames max_groups num_groups num_closed"),
            (_INT, "on_place unused"),
            (_LONG, "next_start node end back back_end state symbol result"),
            (_LONG, "fresh low high num_rows"),
            (_POINTER, "expand classify_plain subsets"),
        )
        for name in names.split()
    ]


class Walker:
    """Walks one vocabulary through one automaton, again and again in the same memory: not from two threads at once."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary) -> None:
        self._automaton = automaton
        self._vocabulary = vocabulary
        vocabulary.work_out()  # outside of any mask's time limit
        self._fields = _Walk(words=vocabulary.words, max_frames=32, max_groups=32)
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        """What the fields point to."""
        subsets = automaton.subsets
        if isinstance(subsets, Subsets):
            self._fields.expand, self._fields.classify_plain = map(
                subsets.function, ("sgl_expand_meanwhile", "sgl_plain")
            )
            self._fields.subsets = subsets.address
        plain, longest = vocabulary.plain_tokens, vocabulary.max_token_len  # no token closes more frames
        self._keep(
            rest=plain.rest.nodes,
            rest_of=plain.rest_of,
            plain_tokens=plain.in_order,
            row_of=plain.row_of,
            rows=plain.rows,
            at=np.zeros((longest + 1, 6), np.int32),
            stack=np.zeros((longest, 2), np.int32),
            bounds=np.zeros((longest + 2, 2), np.int64),
            frames=np.zeros((32, 6), np.int32),
            groups=np.zeros((32, 5), np.int32),
            regions=np.zeros((4, 2), np.int64),
            seen=np.zeros(0, np.int32),
            plain=np.zeros(0, np.int32),
        )

    def walk(self, place: Place, *, grouped: bool = False) -> Mask:
        """The mask of a place; if `grouped`, with the place that each token leads to. Raises GrammarTooLarge."""
        return self._carry_out(make_plan(self._automaton, self._vocabulary, place), place, grouped=grouped)

    def walk_beside(self, place: Place, like: Mask, first: bytes) -> Mask:
        """The mask of a place, given that of one from which all bytes but `first` lead to the same."""
        found = self._carry_out(beside(self._vocabulary, place, like, first), place, grouped=False)
        found.chars = _shared(found.chars, like.chars)
        pairs = zip_longest(found.items, like.items, fillvalue=ANY_COUNT)
        found.items = [_shared(one, other) for one, other in pairs]
        number = len(found.opened)
        found.opened += [(around + number if around >= 0 else around, symbol) for around, symbol in like.opened]
        found.longest_word = like.longest_word
        return found

    def _carry_out(self, plan: Plan, place: Place, *, grouped: bool) -> Mask:
        library = compiled()
        if library is None:
            number = self._vocabulary.size if grouped else None
            found = walk_reference.Reference(self._automaton, place, plan).run(number)
        else:
            found = self._run(library, place, plan, grouped=grouped)
        if grouped and plan.num_plain:
            plain = self._vocabulary.plain_tokens
            differs = np.diff(plain.chars[: plan.num_plain]) != 0  # their number decides where anything is counted
            bounds = np.flatnonzero(differs & self._automaton.has_counters) + 1
            for tokens in np.split(plain.tokens[: plan.num_plain], bounds):
                found.add_group(tokens)
        duplicates = self._vocabulary.duplicates
        if len(duplicates):
            first, other = duplicates.T
            allow(found.row, other[found.row[first >> 5] >> (first & 31) & 1 == 1])
            if found.group_of is not None:
                found.group_of[other] = found.group_of[first]
        return found

    def _run(self, library: ctypes.CDLL, place: Place, plan: Plan, *, grouped: bool) -> Mask:
        fields, arrays, tables = self._fields, self._arrays, self._automaton.tables
        run, address = library.sgl_walk, ctypes.addressof(fields)
        stack, frame, number = arrays["stack"], place.stack, 0
        while frame is not None and number < len(stack):
            stack[number] = frame.symbol, frame.item_count
            frame, number = frame.parent, number + 1
        regions = arrays["regions"]
        if len(plan.regions) > len(regions):
            self._keep(regions=(regions := np.zeros((2 * len(plan.regions), 2), np.int64)))
        for i, region in enumerate(plan.regions):
            regions[i] = region
        plain = self._vocabulary.plain_tokens
        self._keep(nodes=plan.trie.nodes, plain_before=None if plan.trie is plain.rest else plain.before)
        self._keep(starts=plan.starts, mask=plan.row)
        group_of = np.full(self._vocabulary.size, -1, np.int32) if grouped else None
        self._keep(group_of=group_of)
        fields.num_starts, fields.num_regions, fields.num_stack = len(plan.starts), len(plan.regions), number
        fields.chars, fields.items = place.char_count, place.item_count
        fields.low, fields.high = plan.chars
        fields.fresh = 1
        while True:
            if tables.entries is not arrays.get("entries") or tables.returns is not arrays.get("returns"):
                self._point_to(tables)
            why = run(address, _STEPS)
            if why == _DONE:
                break
            if why == _EXPAND:
                self._automaton.expand(fields.state)
            elif why == _RETURN:
                self._automaton.returned(fields.symbol, fields.result)
            elif why == _FRAMES:
                fields.max_frames = self._grow("frames", 2 * fields.max_frames)
            elif why == _GROUPS:
                fields.max_groups = self._grow("groups", 2 * fields.max_groups)
            elif why == _PLAIN:
                arrays["plain"][fields.state] = self._plain(fields.state)
            else:
                check_time()
        self._automaton.subsets.take_over()
        if plan.seen:
            arrays["seen"][plan.seen] = 1
        chars, *items = arrays["bounds"][: fields.num_closed + 2].tolist()
        return Mask(
            row=plan.row,
            chars=tuple(chars),
            items=list(map(tuple, items)),
            seen=arrays["seen"].nonzero()[0].astype(np.int32),
            opened=list(map(tuple, arrays["frames"][: fields.num_frames, :2].tolist()))
            if fields.num_frames
            else [],
            longest_word=plan.longest_word,
            group_of=group_of,
            firsts=arrays["groups"][: fields.num_groups, 3].tolist() if grouped else [],
        )

    def _point_to(self, tables: Tables) -> None:
        self._keep(entries=tables.entries, symbols=tables.symbols, guards=tables.guards, returns=tables.returns)
        self._keep(classes=tables.classes)
        self._fields.width, self._fields.results = tables.entries.shape[1], tables.returns.shape[1]
        self._fields.num_rows = len(tables.entries)
        self._grow("seen", len(tables.entries))
        self._grow("plain", len(tables.entries))

    def _plain(self, state: int) -> int:
        """Whether plain characters may go on there without end, and whether they leave it as it is."""
        automaton = self._automaton
        if automaton.plain_limit(state) != ENDLESS:
            return _NONE
        steady = automaton.steady(state)
        is_counted = steady is None or automaton.tables.entries[state, automaton.tables.class_of[0x20]] != state
        return _ALLOWED if is_counted else _STAYS

    def _keep(self, **arrays: npt.NDArray[Any] | None) -> None:
        """Let fields point to arrays."""
        for name, array in arrays.items():
            if array is None:
                if self._arrays.pop(name, None) is not None:
                    setattr(self._fields, name, None)
            elif self._arrays.get(name) is not array:
                assert array.flags.c_contiguous
                self._arrays[name] = array
                setattr(self._fields, name, array.ctypes.data)

    def _grow(self, name: str, length: int) -> int:
        """Make room in an array, which stays as it is. Returns `length`."""
        old = self._arrays[name]
        if len(old) < length:
            self._keep(**{name: np.concatenate([old, np.zeros((length - len(old), *old.shape[1:]), old.dtype)])})
        return length


def _shared(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])
