"""From behind a frame to the end of its document, found once for all places within the frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from sgl.grammar.automaton.nfa import Node
from sgl.grammar.automaton.place import Frame
from sgl.grammar.automaton.pushdown import Callers
from sgl.grammar.regular.rope import Rope, shortest_of
from sgl.time_limit import check_time

_MAX_KNOWN: Final = 1024
Ends = dict[int, Rope | None]
"""By origin of a frame, which is one of the values that it may be. None: it cannot be ended."""


class FrameEnds:
    """Shortest ends behind frames. `node` finds that of a node which waits in a frame, up to the end of the one
    around."""

    def __init__(self, callers: Sequence[Callers], node: Callable[[Node, Frame], Rope | None]) -> None:
        self._callers = callers
        self._node = node
        self._known: dict[int, tuple[Frame, Ends]] = {}  # by the frame's id: hashing it takes as long as it is deep

    def behind(self, frame: Frame, origins: set[int]) -> Ends:
        """What ends the document behind a frame, for these origins and maybe others."""
        asked: list[tuple[Frame, Ends, set[int]]] = []
        outer: Frame | None = frame
        ends: Ends = {}
        while outer is not None:
            check_time()
            ends = self._ends(outer)
            missing = origins - ends.keys()
            if not missing:
                break
            asked.append((outer, ends, missing))
            origins = {around for origin in missing for around, _ in self._callers[outer.symbol][origin]}
            outer = outer.parent
        for frame, found, missing in reversed(asked):
            for origin in missing:
                texts: list[Rope | None] = []
                for around, node in self._callers[frame.symbol][origin]:
                    text = self._node(node, frame)
                    if text is not None and frame.parent is not None:
                        rest = ends[around]
                        text = None if rest is None else Rope((text, rest))
                    texts.append(text)
                found[origin] = shortest_of(texts)
            ends = found
        return ends

    def _ends(self, frame: Frame) -> Ends:
        known = self._known.get(id(frame))
        if known is None or known[0] is not frame:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[id(frame)] = frame, {}
        return known[1]
