"""Which of a model's modules the names and patterns of an adapter's config mean, as peft reads them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from sgl.runtime.bounded_regex import RegexRefused, compiled, timed

MAX_SECONDS = 10.0
"""CPU time in which a config's regular expressions are compiled and matched, but for the last one's compilation."""
MAX_PARTS = 65_536
"""Of a regular expression, which may list every module of a model. It compiles for half a second."""
_PLAIN = re.compile(r"[\w.]+", re.ASCII)
_BODY = re.compile(r"(model\.language_model|language_model\.model|model)\.")
"""Where one model has its layers by different versions of transformers."""
_OF_LAYERS = re.compile(rf"{_BODY.pattern}layers\.")


class Patterns:
    """Those of one config. All methods raise RegexRefused."""

    def __init__(self) -> None:
        self._seconds_left = MAX_SECONDS
        self._compiled = lru_cache(maxsize=1024)(lambda pattern: compiled(pattern, MAX_PARTS)[0])

    def means(self, modules: str | frozenset[str], module: str) -> bool:
        """Whether a regular expression means a module, or one of several names is its end."""
        if isinstance(modules, str):
            return bool(modules) and self._matches(modules, module)
        return any(end in modules for end in ends_of(module))

    def value(self, values: Mapping[str, Any], module: str, default: Any) -> Any:
        """Of the first expression that means a module, or an end of it."""
        for pattern, value in values.items():
            if _PLAIN.fullmatch(pattern):
                is_its = _is_end(pattern, module)
                self._spend(1e-6)  # about what it took
            else:
                is_its = self._matches(rf"(.*\.)?({pattern})", module)
            if is_its:
                return value
        return default

    def _matches(self, pattern: str, module: str) -> bool:
        began = time.thread_time()
        try:
            found = timed(self._compiled(pattern).fullmatch, self._seconds_left, module)
        except RegexRefused as error:
            raise RegexRefused(f"{_shown(pattern)} {error}") from error
        self._spend(time.thread_time() - began)
        return found is not None

    def _spend(self, seconds: float) -> None:
        self._seconds_left -= seconds
        if self._seconds_left <= 0:
            raise RegexRefused(f"its patterns take more than {MAX_SECONDS:g} s to match: there are too many")


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


def _is_end(pattern: str, module: str) -> bool:
    """For a pattern of names and dots alone, which mean any character."""
    start = len(module) - len(pattern)
    if start < 0 or (start and module[start - 1] != "."):
        return False
    return all(its in (".", there) for its, there in zip(pattern, module[start:], strict=True))


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else f"{pattern[:80]}…")
