"""Sets of Unicode characters as sorted ranges, and how they turn into expressions over UTF-8 or JSON text.

Surrogates are in no set: they have no UTF-8. Used by the regex parser and by the JSON text expressions.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache

from sgl.grammar.regular.byteset import byte_range
from sgl.grammar.regular.expr import Expr, byte_set, concat, literal, union

CharSet = tuple[tuple[int, int], ...]
"""Disjoint, sorted, non-touching inclusive ranges of code points."""

_Product = tuple[tuple[int, int], ...]
"""Strings of bytes, each in its range."""
MAX_CHAR = 0x10FFFF
_LAST_CASED = 0x1FFFF
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
"""The characters that JSON must escape, and their one canonical spelling here (Python's and JavaScript's)."""


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


def fold_ascii(chars: CharSet) -> CharSet:
    """The set with the other case of its ASCII letters."""
    return _with_classes(chars, [(code, code | 0x20) for code in range(0x41, 0x5B)])


def fold_case(chars: CharSet) -> CharSet:
    """The set with every character that Unicode's simple case folding takes for one of it."""
    return _with_classes(chars, _case_classes())


def _with_classes(chars: CharSet, classes: Iterable[tuple[int, ...]]) -> CharSet:
    firsts = [first for first, _ in chars]

    def has(code: int) -> bool:
        at = bisect_right(firsts, code) - 1
        return at >= 0 and code <= chars[at][1]

    return normalise((*chars, *((code, code) for alike in classes if any(map(has, alike)) for code in alike)))


@lru_cache(maxsize=1)
def _case_classes() -> tuple[tuple[int, ...], ...]:
    """The characters that simple case folding takes for one another, each with at least one other."""
    alike: dict[str, list[int]] = {}
    for code in range(_LAST_CASED + 1):
        char = chr(code)
        # Where full folding writes several characters, simple folding is the lower case, if that is one.
        forms = [form for form in (char.casefold(), char.lower(), char) if len(form) == 1]
        alike.setdefault(forms[0], []).append(code)
    return tuple(tuple(codes) for codes in alike.values() if len(codes) > 1)


@lru_cache(maxsize=1)
def _categories() -> dict[str, CharSet]:
    """Each two-letter general category of the interpreter's Unicode version."""
    runs: dict[str, list[tuple[int, int]]] = {}
    category = unicodedata.category
    start, current = 0, category(chr(0))
    for code in range(1, MAX_CHAR + 2):
        name = category(chr(code)) if code <= MAX_CHAR else ""
        if name != current:
            runs.setdefault(current, []).append((start, code - 1))
            start, current = code, name
    return {name: normalise(found) for name, found in runs.items()}


_LONG_CATEGORIES = {
    "letter": "L", "uppercase_letter": "Lu", "lowercase_letter": "Ll", "titlecase_letter": "Lt", "modifier_letter":
    "Lm", "other_letter": "Lo", "mark": "M", "nonspacing_mark": "Mn", "spacing_mark": "Mc", "enclosing_mark": "Me",
    "number": "N", "decimal_number": "Nd", "digit": "Nd", "letter_number": "Nl", "other_number": "No",
    "punctuation": "P", "connector_punctuation": "Pc", "dash_punctuation": "Pd", "open_punctuation": "Ps",
    "close_punctuation": "Pe", "initial_punctuation": "Pi", "final_punctuation": "Pf", "other_punctuation": "Po",
    "punct": "P", "symbol": "S", "math_symbol": "Sm", "currency_symbol": "Sc", "modifier_symbol": "Sk",
    "other_symbol": "So", "separator": "Z", "space_separator": "Zs", "line_separator": "Zl", "paragraph_separator":
    "Zp", "other": "C", "control": "Cc", "cntrl": "Cc", "format": "Cf", "private_use": "Co", "unassigned": "Cn",
}  # fmt: skip


def category(name: str) -> CharSet | None:
    """The characters of a general category, by its short or long name (`L`, `Lu`, `Uppercase_Letter`), or None."""
    if name == "Any":
        return EVERY_CHAR
    if name == "ASCII":
        return ((0, 0x7F),)
    short = _LONG_CATEGORIES.get(name.lower(), name)
    found = [chars for key, chars in _categories().items() if key == short or (len(short) == 1 and key[0] == short)]
    return union_of(*found) if found else None


@lru_cache(maxsize=4096)
def utf8(chars: CharSet) -> Expr:
    """One character of the set, as UTF-8."""
    return _by_lead_byte(tuple(sequence for first, last in chars for sequence in _utf8_sequences(first, last)))


@lru_cache(maxsize=4096)
def json_text(chars: CharSet) -> Expr:
    """One character of the set as it stands, canonically spelled, inside a JSON string."""
    escapes = [literal(ESCAPED[code]) for first, last in chars for code in ESCAPED if first <= code <= last]
    controls: CharSet = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
    return union(utf8(negate(union_of(negate(chars), controls))), *escapes)


def _utf8_sequences(first: int, last: int) -> Iterable[_Product]:
    """The code points first…last as products of byte ranges."""
    for low, high in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, MAX_CHAR)):
        if first <= high and last >= low:
            yield from _products(chr(max(first, low)).encode(), chr(min(last, high)).encode())


def _products(low: bytes, high: bytes) -> Iterable[_Product]:
    """The strings between two of one length, in order, whose bytes behind the first run over 0x80…0xBF."""
    if len(low) == 1:
        yield ((low[0], high[0]),)
        return
    if low[0] == high[0]:
        for rest in _products(low[1:], high[1:]):
            yield ((low[0], low[0]), *rest)
        return
    least, most = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
    start, end = low[0], high[0]
    if low[1:] != least:
        for rest in _products(low[1:], most):
            yield ((start, start), *rest)
        start += 1
    tail_needed = high[1:] != most
    if tail_needed:
        end -= 1
    if start <= end:
        yield ((start, end), *((0x80, 0xBF) for _ in least))
    if tail_needed:
        for rest in _products(least, high[1:]):
            yield ((high[0], high[0]), *rest)


@lru_cache(maxsize=4096)
def _by_lead_byte(sequences: tuple[_Product, ...]) -> Expr:
    """The sequences with the bytes that go on alike drawn together: few nodes, and arcs that never overlap."""
    last_bytes = 0
    tails: dict[int, list[_Product]] = {}
    for (first, last), *rest in sequences:
        if not rest:
            last_bytes |= byte_range(first, last)
            continue
        for byte in range(first, last + 1):
            tails.setdefault(byte, []).append(tuple(rest))
    leads: dict[tuple[_Product, ...], int] = {}
    for byte, rests in tails.items():
        leads[tuple(rests)] = leads.get(tuple(rests), 0) | 1 << byte
    parts = [concat(byte_set(mask), _by_lead_byte(rests)) for rests, mask in leads.items()]
    return union(byte_set(last_bytes), *parts)
