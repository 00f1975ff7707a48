"""Users' regular expressions with bounds on their size and on the time of a match.

They mean what they mean to Python's `re`, whose word boundaries, look-behind, (?m), back-references and Unicode `\\w`
the derivatives of `grammar.regular` lack. The package `regex` compiles them: it has time limits and partial matches.
"""

from __future__ import annotations

import re
import time
from re import _constants, _parser  # type: ignore[attr-defined]  # not in typeshed: the parser of re itself
from typing import Any

import regex

MAX_PARTS = 10_000
"""Largest regex by default: in characters, and in characters and classes with fixed repeats unrolled. Ten times as much
compiles for a second."""
MAX_GROUPS = 2_000
"""Capturing ones, whose compilation is quadratic."""
REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)


class RegexRefused(Exception):
    """Says what is wrong with a regex, as what follows it in a sentence."""


def compiled(source: str, most: int = MAX_PARTS) -> tuple[Any, Any]:
    """A regex of the package `regex` of so many parts at most, and its tree of Python's. Raises RegexRefused."""
    try:
        _check(len(source), most, "characters")
        tree = _parser.parse(source)
        _check(_unrolled_size(tree), most, "parts with its repeats written out")
        _check(tree.state.groups - 1, MAX_GROUPS, "groups")
        return regex.compile(as_regex_reads_it(source), regex.VERSION0), tree
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        raise RegexRefused(f"is malformed: {error}") from error


def timed(method: Any, seconds: float, *where: Any, **options: Any) -> Any:
    """What a method of a compiled regex finds within so much CPU time of this thread. Raises RegexRefused."""
    began = time.thread_time()
    while True:
        try:
            return method(*where, timeout=seconds, **options)
        except TimeoutError:  # counts CPU time of all threads; only ours matters
            if time.thread_time() - began >= seconds:
                raise too_slow() from None


def too_slow() -> RegexRefused:
    """Of a regex that takes too long."""
    return RegexRefused(
        "takes too long to match: repeats inside of repeats, or several ways to match the same text, multiply"
    )


_BRACES = re.compile(r"\\N\{[^}]*\}|\\.|\{(?![0-9]+\}|[0-9]*,[0-9]*\})", re.DOTALL)


def as_regex_reads_it(source: str) -> str:
    """`regex` reads a brace that starts no repeat as fuzzy matching, `re` as a brace."""
    return _BRACES.sub(lambda found: r"\{" if found[0] == "{" else found[0], source)


def inner_trees(args: Any) -> list[Any]:
    """The trees inside a node's arguments."""
    if isinstance(args, _parser.SubPattern):
        return [args]
    if isinstance(args, list | tuple):
        return [part for arg in args for part in inner_trees(arg)]
    return []


def _check(size: int, most: int, what: str) -> None:
    if size > most:
        raise RegexRefused(f"is too large: it has {size} {what}, and {most} are allowed")


def _unrolled_size(tree: Any) -> int:
    size = 0
    for op, args in tree:
        times = max(1, args[0]) if op in REPEATS else 1
        own = len(args) if op is _constants.IN else 1
        size += own + times * sum(_unrolled_size(part) for part in inner_trees(args))
    return size
