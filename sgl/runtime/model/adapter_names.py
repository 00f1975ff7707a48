"""Which of a model's modules the names and patterns of an adapter's config mean, as peft reads them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from sgl.runtime.bounded_regex import RegexRefused, compiled, timed

MAX_SECONDS = 10.0
"""CPU time in which a config's regular expressions are compiled and matched, but for the last one's compilation."""
MAX_PARTS = 65_536
"""Of a regular expression, which may list every module of a model. It compiles for half a second."""
_AROUND = r"(.*\.)?(", ")"
"""What peft puts around a pattern with a value."""
_PLAIN = re.compile(r"[\w.]+", re.ASCII)
_BODY = re.compile(r"(model\.language_model|language_model\.model|model)\.")
"""Where one model has its layers by different versions of transformers."""
_OF_LAYERS = re.compile(rf"{_BODY.pattern}layers\.")


class Patterns:
    """Those of one config. All methods raise RegexRefused."""

    def __init__(self) -> None:
        self._seconds_left = MAX_SECONDS
        self._compiled = lru_cache(maxsize=1024)(_compiled)

    def means(self, field: str, modules: str | frozenset[str], module: str) -> bool:
        """Whether a field's regular expression means a module, or one of its several names is its end."""
        if isinstance(modules, str):
            return bool(modules) and self.matches(field, modules, module)
        return any(end in modules for end in ends_of(module))

    def matches(self, field: str, pattern: str, module: str, before: str = "", after: str = "") -> bool:
        """Whether a field's regular expression between others means a module."""
        began = time.thread_time()
        is_compiled = False
        try:
            fullmatch = self._compiled(pattern, before, after).fullmatch
            is_compiled = True
            found = timed(fullmatch, self._seconds_left, module)
        except RegexRefused as error:
            if is_compiled and self._seconds_left < MAX_SECONDS / 2:  # others have had most of it
                self.spend(MAX_SECONDS)
            raise RegexRefused(f"{field} has {_shown(pattern)}, which {error}") from error
        self.spend(time.thread_time() - began)
        return found is not None

    def spend(self, seconds: float) -> None:
        """CPU time of all."""
        self._seconds_left -= seconds
        if self._seconds_left <= 0:
            raise RegexRefused(f"its patterns take more than {MAX_SECONDS:g} s to match: there are too many")


class Values:
    """What a field of the config gives to modules, by patterns of which the first counts that means a module, or an end
    of it. Of those of names and dots alone, which may be as many as modules, none is tried: they are looked up."""

    def __init__(self, field: str, values: Mapping[str, Any], patterns: Patterns) -> None:
        self._field, self._patterns = field, patterns
        self._values = list(values.values())
        self._others: list[tuple[int, str]] = []
        self._plain: dict[str, int] = {}  # their places, by the pattern
        self._dots: dict[int, set[tuple[int, ...]]] = {}  # where they have some, by their length
        for place, pattern in enumerate(values):
            if _PLAIN.fullmatch(pattern):
                self._plain[pattern] = place
                dots = tuple(at for at, its in enumerate(pattern) if its == ".")
                self._dots.setdefault(len(pattern), set()).add(dots)
            else:
                self._others.append((place, pattern))

    def value(self, module: str, default: Any) -> Any:
        """The module's. Raises RegexRefused."""
        first = min(self._plain_places(module), default=len(self._values))
        for place, pattern in self._others:
            if place > first:
                break
            if self._patterns.matches(self._field, pattern, module, *_AROUND):
                first = place
                break
        return default if first == len(self._values) else self._values[first]

    def _plain_places(self, module: str) -> Iterator[int]:
        for end in ends_of(module):
            every = self._dots.get(len(end), ())
            self._patterns.spend(2e-6 * len(every))  # about what they take
            for dots in every:
                letters = list(end)
                for at in dots:
                    letters[at] = "."  # means any character
                if (place := self._plain.get("".join(letters))) is not None:
                    yield place


def body_of(modules: Iterable[str]) -> str | None:
    """Where those of an adapter's file have the layers."""
    found = map(_OF_LAYERS.match, modules)
    return next((its[1] for its in found if its is not None), None)


def spelled(module: str, body: str | None) -> str:
    """A module as an adapter names it that has the layers there."""
    found = _BODY.match(module)
    return module if body is None or found is None else f"{body}.{module[found.end() :]}"


def ends_of(module: str) -> Iterable[str]:
    """By which a list may mean a module."""
    parts = module.split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def _compiled(pattern: str, before: str, after: str) -> Any:
    try:
        return compiled(f"{before}{pattern}{after}", MAX_PARTS)[0]
    except RegexRefused as error:
        compiled(pattern, MAX_PARTS)  # whose error has its own positions
        raise RegexRefused(f"{error}, behind the {before} that peft puts before it") from error


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else f"{pattern[:80]}…")
