"""A text as its length and its parts, put together only when it is asked for.

The shortest document of a small grammar may have more bytes than there is memory. Its length costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache, reduce
from typing import Final

from sgl.errors import GrammarTooLarge

MAX_TEXT: Final = 16 << 10
"""Bytes of a text that is put together. Ropes may be of any length."""
_FEW_BYTES: Final = 64
"""Up to so many bytes are put together at once."""
_KNOWN_TEXTS: Final = 256  # of MAX_TEXT bytes each at most


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
        # Texts that are asked for one after another mostly have a long part in common.
        parts = (
            _known_text(part) if isinstance(part, Rope) and part.size > _FEW_BYTES else part for part in self.parts
        )
        return _put_together(parts) * self.count


def _put_together(parts: Iterable[bytes | memoryview | Rope]) -> bytes:
    pieces: list[bytes | memoryview] = []
    waiting = [*parts]
    waiting.reverse()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Rope):
            pieces.append(part)
        elif part.count == 1:
            waiting += reversed(part.parts)
        elif part.size:
            pieces.append(_put_together(part.parts) * part.count)
    return b"".join(pieces)


@lru_cache(_KNOWN_TEXTS)
def _known_text(found: Rope) -> bytes:
    return _put_together((found,))


def rope(*parts: bytes | memoryview | Rope) -> Rope:
    """The parts one after another."""
    found = Rope(parts)
    if found.size <= _FEW_BYTES and len(parts) > 1:
        found.parts = (_put_together(parts),)
    return found


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


def shortest_of(texts: Iterable[Rope | None]) -> Rope | None:
    """The shortest of some, as `shorter` has it."""
    return reduce(shorter, texts, None)


def joined(*parts: bytes | memoryview | Rope | None) -> Rope | None:
    """The parts one after another, if all are known."""
    known = [part for part in parts if part is not None]
    return rope(*known) if len(known) == len(parts) else None


def is_same(one: Rope | None, other: Rope | None) -> bool:
    """Whether two are the same text, as far as they may be put together."""
    if one is None or other is None or one.size != other.size:
        return one is other
    return not one.is_short or one.text() == other.text()
