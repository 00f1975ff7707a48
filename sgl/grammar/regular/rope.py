"""A text as its length and its parts, put together only when it is asked for.

The shortest document of a small grammar may have more bytes than there is memory. Its length costs nothing.
"""

from __future__ import annotations

import sys
from typing import Final

from sgl.errors import GrammarTooLarge

MAX_TEXT: Final = 16 << 10
"""Bytes of a text that is put together. Ropes may be of any length."""


class Rope:
    """`parts` one after another, `count` times over. `size` is its length in bytes, any int."""

    __slots__ = ("count", "parts", "size")

    def __init__(self, parts: tuple[bytes | memoryview | Rope, ...], count: int = 1) -> None:
        self.parts = parts
        self.count = count
        self.size: int = count * sum(part.size if isinstance(part, Rope) else len(part) for part in parts)

    def __len__(self) -> int:
        return min(self.size, sys.maxsize)

    def __bool__(self) -> bool:
        return self.size > 0

    @property
    def is_short(self) -> bool:
        """Whether it may be put together."""
        return self.size <= MAX_TEXT

    def text(self) -> bytes:
        """The text. Raises GrammarTooLarge where it has more than MAX_TEXT bytes."""
        if not self.is_short:
            raise GrammarTooLarge(f"a text has more than {MAX_TEXT:,} bytes", states=0, limit=MAX_TEXT)
        pieces: list[bytes | memoryview] = []
        waiting: list[bytes | memoryview | Rope] = [self]
        while waiting:
            part = waiting.pop()
            if not isinstance(part, Rope):
                pieces.append(part)
            elif part.count == 1:
                waiting += reversed(part.parts)
            elif part.size:
                pieces.append(Rope(part.parts).text() * part.count)
        return b"".join(pieces)


def rope(*parts: bytes | memoryview | Rope) -> Rope:
    """The parts one after another."""
    return Rope(parts)


def times(part: Rope, count: int) -> Rope:
    """A rope so many times over; none for a negative number."""
    return Rope((part,), max(count, 0))


def shorter(one: Rope | None, other: Rope | None) -> Rope | None:
    """The shorter of two, None being longer than any; of two as long the first in the order of bytes, where they may be
    put together."""
    if one is None or other is None:
        return other if one is None else one
    if one.size != other.size or not one.is_short:
        return one if one.size <= other.size else other
    return one if one is other or one.text() <= other.text() else other
