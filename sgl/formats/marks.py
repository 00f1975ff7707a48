"""Reads what is written around calls: any white space may stand between the parts of a mark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_PART = re.compile(r'<[^<>\s]*>|\[[A-Z_]+\]|"[a-z]+"|[{}\[\]:,"]|[^\s{}\[\]:,"<]+|<[^<>\s]*')


_SAME = ('"arguments"', '"parameters"')
"""What models write for each other."""
_WAYS = dict.fromkeys(_SAME, _SAME)


class Malformed(Exception):
    """A text is no call after all."""


class NeedMore(Exception):
    """What follows decides."""


@lru_cache(maxsize=1024)
def parts_of(mark: str) -> tuple[str, ...]:
    """A mark without its white space."""
    return tuple(_PART.findall(mark))


def read_mark(mark: str, text: str) -> int:
    """How many characters of a text its mark takes. Raises Malformed, and NeedMore where the text ends before it."""
    at = 0
    for part in parts_of(mark):
        if text[at : at + 1].isspace():
            at = len(text) - len(text[at:].lstrip())
        ways = _WAYS.get(part, (part,))
        for way in ways:
            if text.startswith(way, at):
                at += len(way)
                break
        else:
            if any(way.startswith(text[at:]) for way in ways):
                raise NeedMore
            raise Malformed(f"{part!r} is expected")
    return at


def read_one(marks: Sequence[str], text: str) -> tuple[int, int]:
    """Which of several marks a text begins with, the first one of them, and how many characters it takes. Raises as
    `read_mark`."""
    is_open = False
    for index, mark in enumerate(marks):
        try:
            length = read_mark(mark, text)
        except NeedMore:
            is_open = True
        except Malformed:
            continue
        else:
            if is_open and not length:  # nothing, or the one before
                break
            return index, length
    if is_open:
        raise NeedMore
    raise Malformed(f"one of {marks!r} is expected")


def find_mark(mark: str, text: str) -> int:
    """Where a mark begins, without the white space before it. Raises NeedMore where it does not come yet."""
    at = text.find(parts_of(mark)[0])
    if at < 0:
        raise NeedMore
    return at


def half_mark(text: str, mark: str) -> int:
    """The length of the longest end of a text that begins a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
