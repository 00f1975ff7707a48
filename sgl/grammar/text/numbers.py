"""The JSON texts of a set of numbers: ranges digit by digit, single values in the spellings of JSON writers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Final

from sgl.grammar.regular.expr import EMPTY, EPSILON, Expr, byte_set, concat, literal, repeat, union, words
from sgl.grammar.text.decimals import INTEGERS, PLAIN_INTEGERS, Exact, NumberSet, Range, meet
from sgl.grammar.text.digits import Plain, Scientific, decimal_text
from sgl.grammar.text.json import JSON_INTEGER, JSON_NUMBER

LARGEST_PLAIN: Final = 10**21
"""Floats that a schema lists have an exponent from here on, if that is shorter."""
_SHORT: Final = 10**16
"""Whole floats below have no exponent."""

_MINUS: Final = literal(b"-")
_ZEROS: Final = repeat(literal(b"0"), 0, None)
_TRAILING: Final = repeat(concat(literal(b"."), repeat(literal(b"0"), 1, None)), 0, 1)


def number_text(numbers: NumberSet, *, any_spelling: bool) -> Expr:
    """The JSON texts of the numbers of a set.

    With `any_spelling`, zeros may trail and exponents are allowed in the normalised form of JSON writers (one digit
    other than 0 before the point), except in plain ranges. Without, a number has one plain decimal text, except in the
    set of all numbers, and floats as large as writers give an exponent: readers take what has one for a float, which
    is not the whole number that a schema lists, and what has none for a whole number.
    """
    texts = []
    single: list[Exact] = []
    for part in numbers.ranges:
        if part.is_plain and part.low is not None and part.low == part.high:
            single.append(int(part.low))
        else:
            texts.append(_range_text(part, any_spelling and not part.is_plain))
    if single:
        texts.append(_values_text(single, False))
    if numbers.values:
        texts.append(_values_text(numbers.values, any_spelling))
    return union(*texts)


def _values_text(values: Iterable[Exact], any_spelling: bool) -> Expr:
    whole: list[bytes] = []
    broken: list[bytes] = []
    scientific: list[bytes] = []
    for value in values:
        plain = decimal_text(value)
        if any_spelling or isinstance(value, int) or -LARGEST_PLAIN < value < LARGEST_PLAIN:
            (broken if "." in plain else whole).append(plain.encode())
        else:
            scientific.append(min((plain, _float_text(value)), key=len).encode())
        if any_spelling:
            written = "" if -_SHORT < value < _SHORT and value.denominator == 1 else _float_text(value)
            if "e" in written:
                scientific.append(written.encode())
            if value == 0:
                whole.append(b"-0")
    if not any_spelling:
        return words([*whole, *broken, *scientific])
    return union(concat(words(whole), _TRAILING), concat(words(broken), _ZEROS), words(scientific))


def _float_text(value: Exact) -> str:
    """The value as JSON writers print the float, if one holds it exactly; else its plain text."""
    try:
        text = repr(float(value))
    except OverflowError:
        return decimal_text(value)
    return text if "inf" not in text and Fraction(text) == value else decimal_text(value)


@lru_cache(maxsize=1024)
def _range_text(part: Range, any_spelling: bool) -> Expr:
    if part == Range():
        return JSON_NUMBER
    if not any_spelling and part in (INTEGERS.ranges[0], PLAIN_INTEGERS.ranges[0]):
        return JSON_INTEGER
    texts = []
    is_strict = (part.low_open or part.high_open) and part.multiple_of != 1
    above = meet(part, Range(Fraction(0)))
    if above is not None:
        texts.append(_magnitude_text(above, any_spelling, is_strict))
    if part.low is None or part.low < 0:
        low, high = (None if bound is None else -bound for bound in (part.high, part.low))
        mirrored = replace(part, low=low, high=high, low_open=part.high_open, high_open=part.low_open)
        below = meet(mirrored, Range(Fraction(0), low_open=not any_spelling))
        if below is not None:
            texts.append(concat(_MINUS, _magnitude_text(below, any_spelling, is_strict)))
    return union(*texts)


def _magnitude_text(part: Range, any_spelling: bool, is_strict: bool = False) -> Expr:
    plain = Plain(part, any_spelling=any_spelling, is_strict=is_strict).start
    is_whole = part.multiple_of == 1 and not part.not_multiples_of
    has_exponents = is_whole or (part.multiple_of is None and not part.not_multiples_of)
    if not any_spelling or not has_exponents or part.high == 0:
        return plain
    return union(plain, Scientific(part, _exponent_text, is_whole=is_whole, is_strict=is_strict).start)


@lru_cache(maxsize=1024)
def _exponent_text(least: int, most: int) -> Expr:
    """The exponents least…most, optionally with a plus sign and one leading zero."""
    if least > most:
        return EMPTY
    padding = repeat(literal(b"0"), 0, 1)
    signs = byte_set(1 << 0x2B)
    parts = []
    if most >= 0:
        positive = _magnitude_text(Range(Fraction(max(least, 0)), Fraction(most), multiple_of=Fraction(1)), False)
        parts.append(concat(union(EPSILON, signs), padding, positive))
    if least < 0:
        low = Fraction(max(-most, 1))
        negative = _magnitude_text(Range(low, Fraction(-least), multiple_of=Fraction(1)), False)
        parts.append(concat(_MINUS, padding, negative))
    return union(*parts)
