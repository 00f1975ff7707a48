"""The JSON texts of a set of numbers: ranges digit by digit, single values in the spellings that JSON writers use.

The schema compiler calls `number_text` for every set of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Final

from sgl.grammar.expr import EMPTY, EPSILON, Arcs, Expr, byte_set, concat, literal, repeat, union, words
from sgl.grammar.json_digits import FRACTION, INTEGER, POINT, SETTLED, START, Form, Plain, decimal_text, grouped
from sgl.grammar.jsontext import JSON_INTEGER, JSON_NUMBER
from sgl.grammar.numbers import INTEGERS, PLAIN_INTEGERS, Exact, NumberSet, Range

MAX_EXPONENT: Final = 308
MIN_EXPONENT: Final = -324
LARGEST_PLAIN: Final = 10**21
"""Single values from here on are written with an exponent where it is shorter."""
_SHORT: Final = 10**16
"""Whole floats below are printed without an exponent."""

_MINUS: Final = literal(b"-")
_ZEROS: Final = repeat(literal(b"0"), 0, None)
_TRAILING: Final = repeat(concat(literal(b"."), repeat(literal(b"0"), 1, None)), 0, 1)


def number_text(numbers: NumberSet, *, any_spelling: bool) -> Expr:
    """The JSON texts of the numbers of a set.

    With `any_spelling`, zeros may trail behind the point and exponents may be used in the normalised form that JSON
    writers produce (one digit other than 0 before the point), but in ranges that ask for plain texts; without, a
    number has one plain decimal text, except where the set has no bound at all.
    """
    texts = [_range_text(part, any_spelling and not part.is_plain) for part in numbers.ranges]
    if numbers.values:
        texts.append(_values_text(numbers.values, any_spelling))
    return union(*texts)


def _values_text(values: Iterable[Exact], any_spelling: bool) -> Expr:
    whole: list[bytes] = []
    broken: list[bytes] = []
    scientific: list[bytes] = []
    for value in values:
        plain = decimal_text(value)
        if any_spelling or -LARGEST_PLAIN < value < LARGEST_PLAIN:
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
    parts = []
    if whole:
        parts.append(concat(words(whole), _TRAILING))
    if broken:
        parts.append(concat(words(broken), _ZEROS))
    if scientific:
        parts.append(words(scientific))
    return union(*parts)


def _float_text(value: Exact) -> str:
    """How a JSON writer would print the value as a float, if a float holds it exactly; its plain text otherwise."""
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
    below: Range | None = None
    if part.low is None or part.low < 0:
        low = Fraction(0) if part.high is None or part.high >= 0 else -part.high
        high = None if part.low is None else -part.low
        low_open = part.high_open if part.high is not None and part.high < 0 else not any_spelling
        if part.high == 0 and part.high_open:
            low_open = True
        below = Range(low, high, low_open, part.low_open, part.multiple_of, part.not_multiples_of)
    above: Range | None = None
    if part.high is None or part.high >= 0:
        from_zero = part.low is None or part.low < 0
        above = Range(
            Fraction(0) if from_zero else part.low,
            part.high,
            not from_zero and part.low_open,
            part.high_open,
            part.multiple_of,
            part.not_multiples_of,
        )
    texts = []
    if above is not None:
        texts.append(_magnitude_text(above, any_spelling))
    if below is not None:
        texts.append(concat(_MINUS, _magnitude_text(below, any_spelling)))
    return union(*texts)


def _magnitude_text(part: Range, any_spelling: bool) -> Expr:
    """The texts of the numbers of a range of non-negative numbers."""
    plain = Plain.of(part, any_spelling)
    texts = [plain.node((START, 0, *plain.start))]
    whole = part.multiple_of == 1 and not part.not_multiples_of
    if any_spelling and (whole or (part.multiple_of is None and not part.not_multiples_of)):
        scientific = _Scientific(
            _significant(part.low), part.low_open, _significant(part.high), part.high_open, whole
        )
        if part.high is None or part.high > 0:
            texts.append(scientific.node((START, 0, *scientific.start, 0)))
    return union(*texts)


def _significant(value: Fraction | None) -> tuple[str, int] | None:
    """The significant digits of a positive number and the exponent of the first; None for zero or no bound."""
    if value is None or value == 0:
        return None
    whole, _, fraction = decimal_text(value).partition(".")
    digits = whole + fraction
    stripped = digits.lstrip("0")
    return stripped.rstrip("0"), len(whole) - 1 - (len(digits) - len(stripped))


class _Scientific(Form):
    """Texts d.ddde±x with one digit other than 0 before the point; whole numbers only, if so asked, and then only
    with as many decimals as the exponent shifts away.

    A state is (phase, place, against low, against high, decimals): comparisons are of the significant digits.
    """

    def __init__(
        self,
        low: tuple[str, int] | None,
        low_open: bool,
        high: tuple[str, int] | None,
        high_open: bool,
        whole: bool,
    ) -> None:
        super().__init__()
        self.low = low
        self.low_open = low_open
        self.high = high
        self.high_open = high_open
        self.whole = whole
        self.start = (SETTLED if low is None else 0, SETTLED if high is None else 0)

    def arguments(self) -> tuple[object, ...]:
        return (self.low, self.low_open, self.high, self.high_open, self.whole)

    def accepts(self, state: tuple[int, ...]) -> bool:
        return False

    def is_dead(self, state: tuple[int, ...]) -> bool | None:
        return None

    def arcs(self, state: tuple[int, ...]) -> Arcs:
        phase = state[0]
        found: list[tuple[int, Expr | None]] = []
        if phase != INTEGER:
            first = 1 if phase == START else 0
            found = [(1 << 0x30 + digit, self._digit(state, digit)) for digit in range(first, 10)]
        if phase == INTEGER:
            found.append((1 << 0x2E, self.node((POINT, *state[1:]))))
        if phase in (INTEGER, FRACTION):
            found.append((1 << 0x45 | 1 << 0x65, self._exponent(state)))
        return grouped(found)

    def _digit(self, state: tuple[int, ...], digit: int) -> Expr | None:
        phase, place, low, high, decimals = state
        after = INTEGER if phase == START else FRACTION
        if phase != START and self.whole:
            decimals += 1
            if decimals > 20:
                return None
        low = _compare(self.low, low, place, digit)
        high = _compare(self.high, high, place, digit)
        lengths = [len(bound[0]) for bound, seen in ((self.low, low), (self.high, high)) if bound and seen == 0]
        return self.node((after, min(place + 1, max(lengths, default=0)), low, high, decimals))

    def _exponent(self, state: tuple[int, ...]) -> Expr:
        _, place, low, high, decimals = state
        least, most = MIN_EXPONENT, MAX_EXPONENT
        if self.whole:
            least = decimals
        if self.low is not None:
            digits, exponent = self.low
            if low == 0 and place < len(digits):
                low = -1
            least = max(least, exponent if low > 0 or (low == 0 and not self.low_open) else exponent + 1)
        if self.high is not None:
            digits, exponent = self.high
            if high == 0 and place < len(digits):
                high = -1
            most = min(most, exponent if high < 0 or (high == 0 and not self.high_open) else exponent - 1)
        return _exponent_text(least, most)


def _compare(bound: tuple[str, int] | None, against: int, place: int, digit: int) -> int:
    if bound is None or against != 0:
        return against
    other = int(bound[0][place]) if place < len(bound[0]) else 0
    return (digit > other) - (digit < other)


@lru_cache(maxsize=1024)
def _exponent_text(least: int, most: int) -> Expr:
    """The exponents least…most with or without a plus sign and one leading zero."""
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
