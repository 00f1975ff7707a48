"""Finds stop regexes in growing text, and tracks where a match may have begun.

User patterns may be hostile: their size, the text a match may span, and the search time are bounded.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from re import _constants  # type: ignore[attr-defined]  # not in typeshed: the parser of re itself
from typing import Any

import regex

from sgl.errors import InvalidRequest
from sgl.runtime.bounded_regex import RegexRefused, as_regex_reads_it, compiled, inner_trees, timed, too_slow

MAX_LOOK_BACK = 512
"""Characters that a match may span, with what its lookaheads read; earlier text is sent."""
MAX_SEARCH_SECONDS = 0.05
"""CPU time of one search."""
FREE_SECONDS, SECONDS_PER_CHARACTER = 0.25, 50e-6
"""CPU time of all searches of a request: a base, plus an amount for each character."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A stop that was reached. Positions count from the start of the latest text; earlier text is negative."""

    arrival: int
    """End of the shortest text with the stop."""
    start: int
    end: int
    """Before the arrival only if a lookahead read on."""
    stop: str

    @property
    def key(self) -> tuple[int, int]:
        """The smallest wins."""
        return self.arrival, self.start


class RegexScanner:
    """The stop regexes of one request. Searches skip text where no match can start."""

    def __init__(self, sources: Sequence[str]) -> None:
        """Raises InvalidRequest if a regex is malformed, too large, or matches the empty text."""
        self._regexes = [StopRegex(source) for source in sources]
        self._starts = [0] * len(sources)  # by regex: no match starts before, in _text
        self._text = ""  # recent text that a match or lookbehind may need
        self._seconds_left = FREE_SECONDS

    @property
    def num_open(self) -> int:
        """Characters at the end that may belong to a match."""
        return len(self._text) - min(self._starts)

    def feed(self, text: str) -> Hit | None:
        """The first match in the new text (not empty). Raises InvalidRequest if a search takes too long."""
        self._seconds_left += SECONDS_PER_CHARACTER * len(text)
        known = len(self._text)
        self._text += text
        hits = [hit for index in range(len(self._regexes)) if (hit := self._advance(index, known)) is not None]
        self._forget()
        return min(hits, key=lambda hit: hit.key, default=None)

    def _advance(self, index: int, known: int) -> Hit | None:
        """The regex's first match after `known` characters; moves its start."""
        each, end = self._regexes[index], len(self._text)
        match = self._search(index, each.compiled, end, partial=True) if each.is_monotone else None
        if not each.is_monotone or (match is not None and not match.partial):
            for arrival in range(known + 1, end + 1):
                found = self._search(index, each.compiled, arrival, partial=False)
                if found is not None:
                    return Hit(arrival - known, found.start() - known, found.end() - known, each.source)
            match = None if each.opening is None else self._search(index, each.opening, end, partial=True)
        start = self._starts[index] if each.opening is None else end if match is None else match.start()
        self._starts[index] = max(start, end - MAX_LOOK_BACK)
        return None

    def _search(self, index: int, expression: Any, end: int, *, partial: bool) -> Any:
        """The first match up to `end`; with `partial`, else the first that more text may complete."""
        start = max(self._starts[index], end - MAX_LOOK_BACK)
        began = time.thread_time()
        source = self._regexes[index].source
        match = _search(source, expression, self._text, start, end, partial=partial)
        self._seconds_left -= time.thread_time() - began
        if self._seconds_left < 0:
            raise _refused(source, too_slow())
        return match

    def _forget(self) -> None:
        unread = min(self._starts) - MAX_LOOK_BACK
        if unread > MAX_LOOK_BACK:
            self._text = self._text[unread:]
            self._starts = [start - unread for start in self._starts]


def _search(source: str, expression: Any, *where: Any, **options: Any) -> Any:
    """The match. Raises InvalidRequest if it takes too long."""
    try:
        return timed(expression.search, MAX_SEARCH_SECONDS, *where, **options)
    except RegexRefused as error:
        raise _refused(source, error) from None


def _refused(source: str, error: RegexRefused) -> InvalidRequest:
    return InvalidRequest(f"stop_regex {source!r} {error}", param="stop_regex")


class StopRegex:
    """One compiled stop regex, and how its matches change as the text grows."""

    def __init__(self, source: str) -> None:
        """Raises InvalidRequest if the regex is malformed, too large, or matches the empty text."""
        self.source = source
        try:
            self.compiled, tree = compiled(source)
        except RegexRefused as error:
            raise _refused(source, error) from error
        if _search(source, self.compiled, "") is not None:
            raise InvalidRequest(
                f"stop_regex {source!r} matches the empty text: it would end every output before it begins",
                param="stop_regex",
            )
        fickle = [(op, args) for op, args in _nodes(tree) if _is_fickle(op, args)]
        self.is_monotone = not fickle
        """Whether a text with a match keeps one, whatever follows."""
        self.opening: Any = self.compiled if self.is_monotone else None
        """Its partial matches show where a match may have begun; None: unknown."""
        if fickle and not any(_is_unknowable(op, args) for op, args in fickle):
            self.opening = regex.compile(_opening(source, tree.state.flags), regex.VERSION0)


_AT_BEGINNING = (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)
_FICKLE = (
    _constants.ASSERT_NOT,
    _constants.ATOMIC_GROUP,
    _constants.POSSESSIVE_REPEAT,
    _constants.GROUPREF_EXISTS,
)


def _is_fickle(op: Any, args: Any) -> bool:
    """Whether more text may reverse the node's decision at the end of the text."""
    return op in _FICKLE or (op is _constants.AT and args not in _AT_BEGINNING)


def _is_unknowable(op: Any, args: Any) -> bool:
    """Whether a fickle node depends on another: more text may then turn a failure into a match unseen."""
    inside = (node for part in inner_trees(args) for node in _nodes(part))
    return op is _constants.GROUPREF_EXISTS or any(_is_fickle(*node) for node in inside)


_BOUNDARIES = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\.", re.DOTALL)


def _opening(source: str, flags: int) -> str:
    """A pattern that never matches, but matches partially wherever `source` may match with more text.

    `regex` reports a partial match where it needs a character beyond the end, but decides \\b and \\B as if nothing
    followed: here they always hold. A complete match at the end must read one more character and then fails, so it
    hides no other.
    """
    relaxed = _BOUNDARIES.sub(lambda found: "(?:)" if found[0] in (r"\b", r"\B") else found[0], source)
    end_of_comment = "\n" if flags & re.VERBOSE else ""
    return f"(?:{as_regex_reads_it(relaxed)}{end_of_comment})(?s:.)(?!)"


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    for op, args in tree:
        yield op, args
        for part in inner_trees(args):
            yield from _nodes(part)
