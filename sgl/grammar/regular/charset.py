"""Sets of Unicode characters as sorted ranges, and their expressions over UTF-8 or JSON text.

Surrogates are in no set: they have no UTF-8.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache

import regex

from sgl.grammar.regular.expr import EPSILON, Expr, byte_set, concat, literal, repeat, union

CharSet = tuple[tuple[int, int], ...]
"""Disjoint, sorted, non-touching inclusive ranges of code points."""
MAX_CHAR = 0x10FFFF
_LAST_CASED = 0x1FFFF
_UTF8 = ((0, 0, 0, 0x7F), (1, 0xC0, 0x80, 0x7FF), (2, 0xE0, 0x800, 0xFFFF), (3, 0xF0, 0x10000, MAX_CHAR))
"""By length: the bytes behind the first, its mark, the first and the last character."""
EVERY_CHAR: CharSet = ((0, 0xD7FF), (0xE000, MAX_CHAR))
ESCAPED: dict[int, bytes] = {
    **{code: b"\\u%04x" % code for code in range(0x20)},
    0x08: b"\\b",
    0x09: b"\\t",
    0x0A: b"\\n",
    0x0C: b"\\f",
    0x0D: b"\\r",
    0x22: b'\\"',
    0x5C: b"\\\\",
}
"""The characters that JSON must escape, in canonical spelling (Python's and JavaScript's)."""


def normalise(ranges: Iterable[tuple[int, int]]) -> CharSet:
    """Sorted, merged and without surrogates."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        for low, high in ((first, min(last, 0xD7FF)), (max(first, 0xE000), last)):
            if low > high:
                continue
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], high))
            else:
                merged.append((low, high))
    return tuple(merged)


def of(characters: str) -> CharSet:
    """The set of the characters of a string."""
    return normalise((ord(char), ord(char)) for char in characters)


def union_of(*sets: CharSet) -> CharSet:
    """All characters of the sets."""
    return normalise(pair for chars in sets for pair in chars)


def negate(chars: CharSet) -> CharSet:
    """Every character that is not in the set."""
    result = []
    start = 0
    for first, last in chars:
        if start < first:
            result.append((start, first - 1))
        start = last + 1
    if start <= MAX_CHAR:
        result.append((start, MAX_CHAR))
    return normalise(result)


def fold_case(chars: CharSet, *, ascii_only: bool = False) -> CharSet:
    """The set with all characters that Unicode's simple case folding takes for one of it, or ASCII's."""
    firsts = [first for first, _ in chars]

    def has(code: int) -> bool:
        at = bisect_right(firsts, code) - 1
        return at >= 0 and code <= chars[at][1]

    return normalise(
        (*chars, *((code, code) for alike in _case_classes(ascii_only) if any(map(has, alike)) for code in alike))
    )


@lru_cache(maxsize=2)
def _case_classes(ascii_only: bool) -> tuple[tuple[int, ...], ...]:
    """The classes of characters that simple case folding takes for one another."""
    alike: dict[str, list[int]] = {}
    for code in range(0x80 if ascii_only else _LAST_CASED + 1):
        char = chr(code)
        # If full folding has several characters, simple folding is the lower case, if that is one.
        forms = [form for form in (char.casefold(), char.lower(), char) if len(form) == 1]
        alike.setdefault(forms[0], []).append(code)
    return tuple(tuple(codes) for codes in alike.values() if len(codes) > 1)


@lru_cache(maxsize=64)
def category(name: str) -> CharSet | None:
    """The characters of a general category, by any name of it (`L`, `Lu`, `Uppercase_Letter`), or None."""
    if name == "Any":
        return EVERY_CHAR
    if name == "ASCII":
        return ((0, 0x7F),)
    try:
        runs = regex.compile(rf"\p{{gc={name}}}+") if name.replace("_", "").isalpha() else None
    except regex.error:
        return None
    every_char = "".join(map(chr, range(MAX_CHAR + 1)))
    return None if runs is None else normalise((run.start(), run.end() - 1) for run in runs.finditer(every_char))


@lru_cache(maxsize=4096)
def utf8(chars: CharSet) -> Expr:
    """One character of the set, as UTF-8."""
    texts = []
    for num_more, mark, first, last in _UTF8:
        found = tuple((max(low, first), min(high, last)) for low, high in chars if low <= last and high >= first)
        texts.append(_utf8_tail(found, mark, num_more))
    return union(*texts)


@lru_cache(maxsize=4096)
def json_text(chars: CharSet) -> Expr:
    """One character of the set, canonically spelled inside a JSON string."""
    escapes = [literal(ESCAPED[code]) for first, last in chars for code in ESCAPED if first <= code <= last]
    controls: CharSet = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
    return union(utf8(negate(union_of(negate(chars), controls))), *escapes)


@lru_cache(maxsize=4096)
def _utf8_tail(codes: CharSet, mark: int, num_more: int) -> Expr:
    """Numbers as one byte, which holds `mark` and their highest bits, and `num_more` bytes of six bits each."""
    size = 1 << 6 * num_more
    by_byte: dict[int, list[tuple[int, int]]] = {}
    for low, high in codes:
        for bits in range(low // size, high // size + 1):
            start = bits * size
            by_byte.setdefault(mark | bits, []).append((max(low - start, 0), min(high - start, size - 1)))
    # Bytes that go on alike are drawn together: few nodes, and arcs that never overlap.
    by_rest: dict[CharSet, int] = {}
    for byte, rest in by_byte.items():
        by_rest[tuple(rest)] = by_rest.get(tuple(rest), 0) | 1 << byte
    return union(
        *(
            concat(byte_set(mask), _utf8_tail(rest, 0x80, num_more - 1) if num_more else EPSILON)
            for rest, mask in by_rest.items()
        )
    )


ANY_TEXT = repeat(utf8(EVERY_CHAR), 0, None)
"""Any characters."""
