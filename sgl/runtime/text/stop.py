"""Ends a request where its text reaches a stop string or a stop regex, and withholds text that may become one.

Knows text only: tokens, end-of-sequence ids and lengths are the caller's. A stop is found at the character that
completes it, so how the text was cut into pieces changes nothing. The engine's loop feeds it what the detokenizer
gives. Patterns are hostile input: their size, their look-back and their time are bounded.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from re import _constants, _parser  # type: ignore[attr-defined]  # not in typeshed; the parser of re itself
from typing import Any

import regex

from sgl.errors import InvalidRequest

MAX_STOP_CHARACTERS = 1024
"""Longest stop string."""
MAX_LOOK_BACK = 512
"""A match of a stop regex, with what its lookaheads read, may have so many characters; the text before is sent."""
MAX_UNROLLED = 10_000
"""Largest stop regex, in characters and classes, with fixed repeats written out, which is how they are compiled."""
MAX_SEARCH_SECONDS = 0.05
"""CPU time that one search may take."""
FREE_SECONDS, SECONDS_PER_CHARACTER = 0.25, 50e-6
"""CPU time that all searches of a request may take: so much, and so much more for each character of its text."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What ended the text."""

    stop: str
    """The stop string, or the source of the stop regex."""
    text: str
    """What it matched."""


class StopMatcher:
    """The stops of one request.

    A stop arrives with the first character that makes the text so far contain it (for a regex: that makes
    `re.search` over the text so far succeed, `$` and `\\b` being tried at its end). The earliest arrival wins; of
    stops that arrive together, the one that starts first, then strings before regexes, then the order given.
    """

    def __init__(self, strings: Sequence[str] = (), regexes: Sequence[str] = ()) -> None:
        """Raises InvalidRequest if a string is empty or too long, or if a regex is malformed, too large, or matches
        the empty text."""
        self._strings = _StringScanner(strings)
        self._regexes = _RegexScanner(regexes) if regexes else None
        self._withheld = ""

    def feed(self, text: str) -> tuple[str, StopMatch | None]:
        """Take the next text; give what of the text so far can be sent, and the stop if it was reached.

        What is sent then ends where the stop begins, what came behind the stop is gone, and feed must not be called
        again. Raises InvalidRequest if a regex takes too long.
        """
        if self._regexes is None and not self._withheld and self._strings.cannot_start_in(text):
            return text, None
        hit = self._strings.feed(text)
        if self._regexes is not None:
            regex_hit = self._regexes.feed(text if hit is None else text[: hit.arrival])
            if regex_hit is not None and (hit is None or regex_hit.key < hit.key):
                hit = regex_hit
        offset = len(self._withheld)
        text = self._withheld + text
        if hit is not None:
            self._withheld = ""
            start = max(0, offset + hit.start)
            return text[:start], StopMatch(hit.stop, text[start : offset + hit.end])
        num_withheld = max(self._strings.num_open, self._regexes.num_open if self._regexes is not None else 0)
        sent = len(text) - num_withheld
        self._withheld = text[sent:]
        return text[:sent], None

    def flush(self) -> str:
        """What was withheld, once there is no more text and no stop was reached."""
        text, self._withheld = self._withheld, ""
        return text


@dataclass(frozen=True, slots=True)
class _Hit:
    """A stop that was reached. Positions count from the start of the text fed last; earlier text is negative."""

    arrival: int  # the stop is there once the text up to here is
    start: int
    end: int  # before the arrival only if a lookahead read on
    stop: str

    @property
    def key(self) -> tuple[int, int]:
        return self.arrival, self.start


class _StringScanner:
    """All stop strings at once (Aho and Corasick 1975).

    The state is the longest end of the text that starts a stop, which is just what must be withheld. A character
    costs O(1) amortised, whatever the stops are.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._found: list[str | None] = [None]  # the longest stop that ends the state's text
        for stop in strings:
            if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
                raise InvalidRequest(
                    f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters, got one of {len(stop)}",
                    param="stop",
                )
            self._add(stop)
        self._link()
        self._first = frozenset(self._next[0])
        self._state = 0

    @property
    def num_open(self) -> int:
        """How many of the last characters may be the start of a stop."""
        return self._depth[self._state]

    def cannot_start_in(self, text: str) -> bool:
        return self._first.isdisjoint(text)

    def feed(self, text: str) -> _Hit | None:
        state, following, fail = self._state, self._next, self._fail
        for position, character in enumerate(text):
            while (reached := following[state].get(character)) is None and state:
                state = fail[state]
            state = reached or 0
            if (stop := self._found[state]) is not None:
                return _Hit(position + 1, position + 1 - len(stop), position + 1, stop)
        self._state = state
        return None

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = self._next[state][character]
        self._found[state] = stop

    def _link(self) -> None:
        """Breadth first: each state falls back to the longest proper end of its text that is a state too."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                fallback = self._fail[state]
                while character not in self._next[fallback] and fallback:
                    fallback = self._fail[fallback]
                self._fail[child] = self._next[fallback].get(character, 0)
                queue.append(child)
            if self._found[state] is None:
                self._found[state] = self._found[self._fail[state]]


class _RegexScanner:
    """Stop regexes over the end of the text: no search starts where a match can no longer start."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._patterns = [_Pattern(source) for source in sources]
        self._starts = [0] * len(sources)  # per pattern: no match starts before, in _text
        self._text = ""  # the end of the text: what may belong to a match, and what lookbehinds may read
        self._seconds_left = FREE_SECONDS

    @property
    def num_open(self) -> int:
        """How many of the last characters may be the start of a match."""
        return len(self._text) - min(self._starts)

    def feed(self, text: str) -> _Hit | None:
        self._seconds_left += SECONDS_PER_CHARACTER * len(text)
        known = len(self._text)
        self._text += text
        hits = [hit for index in range(len(self._patterns)) if (hit := self._advance(index, known)) is not None]
        self._forget()
        return min(hits, key=lambda hit: hit.key, default=None)

    def _advance(self, index: int, known: int) -> _Hit | None:
        """The first match that arrives behind the first `known` characters; moves the pattern's start."""
        pattern, end = self._patterns[index], len(self._text)
        if pattern.is_monotone:
            match = self._search(index, end, partial=True)
            if match is None or match.partial:
                self._starts[index] = max(end - MAX_LOOK_BACK, end if match is None else match.start())
                return None
        for arrival in range(known + 1, end + 1):
            match = self._search(index, arrival, partial=arrival == end)
            if match is not None and not match.partial:
                return _Hit(arrival - known, match.start() - known, match.end() - known, pattern.source)
        self._starts[index] = max(end - MAX_LOOK_BACK, end if match is None else match.start())
        return None

    def _search(self, index: int, end: int, *, partial: bool) -> Any:
        """The first match in the text up to `end`; else, if `partial`, the first that more text may complete."""
        pattern = self._patterns[index]
        start = max(self._starts[index], end - MAX_LOOK_BACK)
        began = time.thread_time()
        is_done = False
        while not is_done:
            try:
                match = pattern.compiled.search(self._text, start, end, partial=partial, timeout=MAX_SEARCH_SECONDS)
                is_done = True
            except TimeoutError:  # it counts the CPU time of all threads of the process: only ours is to count
                is_done = False
            seconds = time.thread_time() - began
            if seconds > self._seconds_left or not (is_done or seconds < MAX_SEARCH_SECONDS):
                raise InvalidRequest(
                    f"stop_regex {pattern.source!r} takes too long to match: repeats inside of repeats, or several "
                    "ways to match the same text, multiply",
                    param="stop_regex",
                )
        self._seconds_left -= seconds
        return match

    def _forget(self) -> None:
        """Drop text that no search and no lookbehind of MAX_LOOK_BACK characters reads."""
        unread = min(self._starts) - MAX_LOOK_BACK
        if unread > MAX_LOOK_BACK:
            self._text = self._text[unread:]
            self._starts = [start - unread for start in self._starts]


class _Pattern:
    """A stop regex in the syntax of Python's `re`, compiled by `regex`, which can search with a time limit and tell
    where a match may have begun. Where the two differ on braces, it is `re` that counts."""

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            tree = _parser.parse(source)
            size = _unrolled_size(tree)
            if size > MAX_UNROLLED:
                raise InvalidRequest(
                    f"stop_regex {source!r} is too large: with its repeats written out it has {size} parts, and "
                    f"{MAX_UNROLLED} are allowed",
                    param="stop_regex",
                )
            self.compiled: Any = regex.compile(_BRACES.sub(_literal_brace, source), regex.VERSION0)
        except (re.error, regex.error, OverflowError, RecursionError, ValueError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(f"stop_regex {source!r} is malformed: {error}", param="stop_regex") from error
        if self.compiled.search("", timeout=MAX_SEARCH_SECONDS) is not None:
            raise InvalidRequest(
                f"stop_regex {source!r} matches the empty text: it would end every output before it begins",
                param="stop_regex",
            )
        self.is_monotone = not any(_depends_on_the_end(op, args) for op, args in _nodes(tree))
        """Whether a text that contains a match keeps containing one, however it goes on."""


_BRACES = re.compile(r"\\N\{[^}]*\}|\\.|\{(?!\d+(?:,\d*)?\}|,\d+\})", re.DOTALL)
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_NOT_MONOTONE = (
    _constants.ASSERT_NOT,
    _constants.ATOMIC_GROUP,
    _constants.POSSESSIVE_REPEAT,
    _constants.GROUPREF_EXISTS,
)
_AT_BEGINNING = (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)


def _literal_brace(found: re.Match[str]) -> str:
    """`regex` takes a brace that starts no repeat for fuzzy matching, `re` for a brace."""
    return r"\{" if found[0] == "{" else found[0]


def _depends_on_the_end(op: Any, args: Any) -> bool:
    return op in _NOT_MONOTONE or (op is _constants.AT and args not in _AT_BEGINNING)


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    for op, args in tree:
        yield op, args
        for part in _parts(args):
            yield from _nodes(part)


def _unrolled_size(tree: Any) -> int:
    size = 0
    for op, args in tree:
        times = max(1, args[0]) if op in _REPEATS else 1
        own = len(args) if op is _constants.IN else 1
        size += own + times * sum(_unrolled_size(part) for part in _parts(args))
    return size


def _parts(args: Any) -> list[Any]:
    """The sub-patterns among a node's arguments."""
    if isinstance(args, _parser.SubPattern):
        return [args]
    if isinstance(args, list | tuple):
        return [part for arg in args for part in _parts(arg)]
    return []
