"""Sets of bytes as ints of 256 bits, and partitions of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, TypeVar

ALL_BYTES: Final = (1 << 256) - 1
T = TypeVar("T")


def byte_range(first: int, last: int) -> int:
    """The set of the bytes `first` to `last`, both included."""
    return (1 << last + 1) - (1 << first)


@lru_cache(maxsize=4096)
def bytes_of(mask: int) -> bytes:
    """The bytes of a set, rising."""
    return bytes(byte for byte in range(256) if mask >> byte & 1)


def lowest(mask: int) -> int:
    """The first byte of a set that has one."""
    return (mask & -mask).bit_length() - 1


def refine(cells: list[tuple[int, list[T]]], mask: int, item: T) -> None:
    """Add `item` for the bytes of `mask` to disjoint cells, dividing those that it meets in part."""
    for i in range(len(cells)):
        cell, items = cells[i]
        both = cell & mask
        if both:
            if both != cell:
                cells.append((cell & ~both, items))
            cells[i] = both, [*items, item]
            mask &= ~both
            if not mask:
                return
    cells.append((mask, [item]))
