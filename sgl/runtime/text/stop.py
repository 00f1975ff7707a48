"""Finds stop strings and regexes in growing text, and withholds text that may become one. A stop is found at the
character that completes it, however the text is cut into pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sgl.errors import InvalidRequest
from sgl.runtime.text.stop_regex import Hit, RegexScanner

MAX_STOP_CHARACTERS = 1024
"""Longest stop string."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop that ended the text."""

    stop: str
    """The stop string, or the source of the stop regex."""
    text: str
    """The matched text."""


class StopMatcher:
    """The stops of one request.

    A stop arrives with the first character after which the text contains it (for a regex: after which `re.search`
    over the text so far succeeds, `$` and `\\b` tried at its end). The earliest arrival wins; then the earliest
    start, strings before regexes, the given order.
    """

    def __init__(self, strings: Sequence[str] = (), regexes: Sequence[str] = ()) -> None:
        """Raises InvalidRequest for empty or long strings and malformed or large regexes, or ones that match the
        empty text."""
        self._strings = _StringScanner(strings)
        self._regexes = RegexScanner(regexes) if regexes else None
        self._withheld = ""

    def feed(self, text: str) -> tuple[str, StopMatch | None]:
        """Take text; returns what can be sent, and the stop if reached. After that, feed must not be called again.
        Raises InvalidRequest if a regex takes too long."""
        if not text or (not self._withheld and self._regexes is None and self._strings.cannot_start_in(text)):
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
        """The withheld rest, at the end without a stop."""
        text, self._withheld = self._withheld, ""
        return text


class _StringScanner:
    """All stop strings at once (Aho and Corasick 1975).

    The state is the longest suffix of the text that begins a stop: exactly what must be withheld. O(1) amortised a
    character.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._found: list[str | None] = [None]  # the longest stop that is a suffix of the state's text
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
        """Characters at the end that may begin a stop."""
        return self._depth[self._state]

    def cannot_start_in(self, text: str) -> bool:
        return self._first.isdisjoint(text)

    def feed(self, text: str) -> Hit | None:
        state, following, fail = self._state, self._next, self._fail
        for position, character in enumerate(text):
            while (reached := following[state].get(character)) is None and state:
                state = fail[state]
            state = reached or 0
            if (stop := self._found[state]) is not None:
                return Hit(position + 1, position + 1 - len(stop), position + 1, stop)
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
        """Breadth first: each state falls back to its text's longest proper suffix that is a state."""
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
