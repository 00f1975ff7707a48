"""The JSON texts of a set of numbers, as expressions that read digits and compare as they go.

A text is followed by its place against each bound and its remainder for each multiple, so no range is ever expanded
into alternatives. Called by the schema compiler for every constrained number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

from sgl.grammar.expr import EMPTY, EPSILON, Arcs, Compound, Expr, byte_set, concat, literal, repeat, union, words
from sgl.grammar.jsontext import JSON_INTEGER, JSON_NUMBER
from sgl.grammar.numbers import NumberSet, Range

MAX_EXPONENT: Final = 308
MIN_EXPONENT: Final = -324
MOST_DIGITS: Final = 15
"""Every decimal fraction of so many digits is told from all others by doubles."""
LARGEST_PLAIN: Final = 10**21
"""Single values from here on are written with an exponent where it is shorter."""

_START, _ZERO, _INTEGER, _POINT, _FRACTION = range(5)
_MINUS: Final = literal(b"-")
_ZEROS: Final = repeat(literal(b"0"), 0, None)
_TRAILING: Final = repeat(concat(literal(b"."), repeat(literal(b"0"), 1, None)), 0, 1)
_SETTLED: Final = 2
_DEAD: Final = 3


def number_text(numbers: NumberSet, *, any_spelling: bool) -> Expr:
    """The JSON texts of the numbers of a set.

    With `any_spelling`, zeros may trail behind the point and exponents may be used in the normalised form that JSON
    writers produce (one digit other than 0 before the point); without, a number has one plain decimal text, except
    where the set has no bound at all.
    """
    texts = [_range_text(part, any_spelling) for part in numbers.ranges]
    if numbers.values:
        texts.append(_values_text(numbers.values, any_spelling))
    return union(*texts)


def _values_text(values: Iterable[Fraction], any_spelling: bool) -> Expr:
    whole: list[bytes] = []
    broken: list[bytes] = []
    scientific: list[bytes] = []
    for value in values:
        plain = decimal_text(value)
        if any_spelling or abs(value) < LARGEST_PLAIN:
            (broken if "." in plain else whole).append(plain.encode())
        else:
            scientific.append(min((plain, _float_text(value)), key=len).encode())
        if any_spelling:
            written = _float_text(value)
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


def _float_text(value: Fraction) -> str:
    """How a JSON writer would print the value as a float, if a float holds it exactly; its plain text otherwise."""
    try:
        text = repr(float(value))
    except OverflowError:
        return decimal_text(value)
    return text if "inf" not in text and Fraction(text) == value else decimal_text(value)


def decimal_text(value: Fraction) -> str:
    """A decimal fraction without an exponent, in as few digits as possible."""
    shift = _decimals(value)
    digits = str(abs(value.numerator) * (10**shift // value.denominator))
    sign = "-" if value < 0 else ""
    if not shift:
        return sign + digits
    digits = digits.rjust(shift + 1, "0")
    return f"{sign}{digits[:-shift]}.{digits[-shift:]}"


def _decimals(value: Fraction) -> int:
    """How many digits behind the point a decimal fraction needs."""
    twos, fives, rest = 0, 0, value.denominator
    while rest % 2 == 0:
        rest //= 2
        twos += 1
    while rest % 5 == 0:
        rest //= 5
        fives += 1
    assert rest == 1, "bounds come from decimal texts"
    return max(twos, fives)


@lru_cache(maxsize=1024)
def _range_text(part: Range, any_spelling: bool) -> Expr:
    if part == Range():
        return JSON_NUMBER
    if part == Range(multiple_of=Fraction(1)) and not any_spelling:
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
    plain = _Plain.of(part, any_spelling)
    texts = [plain.node((_START, 0, *plain.start))]
    whole = part.multiple_of == 1 and not part.not_multiples_of
    if any_spelling and (whole or (part.multiple_of is None and not part.not_multiples_of)):
        scientific = _Scientific(
            _significant(part.low), part.low_open, _significant(part.high), part.high_open, whole
        )
        if part.high is None or part.high > 0:
            texts.append(scientific.node((_START, 0, *scientific.start, 0)))
    return union(*texts)


class Digits(Compound):
    """What is left of a number's text in some state of its form."""

    __slots__ = ("form", "state")

    def __init__(self, form: _Form, state: tuple[int, ...]) -> None:
        super().__init__(form.accepts(state), True)
        self.form = form
        self.state = state
        if self.nullable or form.surely_lives(state):
            self.known_empty = False

    def _derive(self) -> Arcs:
        return self.form.arcs(self.state)

    def __repr__(self) -> str:
        return f"<number {self.state}>"

    def __reduce__(self) -> tuple[object, ...]:
        return (_restore, (*self.form.key(), self.state))


def _restore(kind: str, arguments: tuple[object, ...], state: tuple[int, ...]) -> Expr:
    form: _Form = _Plain(*arguments) if kind == "plain" else _Scientific(*arguments)  # type: ignore[arg-type]
    return form.node(state)


class _Form:
    """One kind of number text under fixed bounds: states are tuples, nodes are made once per state."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[int, ...], Expr] = {}

    def node(self, state: tuple[int, ...]) -> Expr:
        found = self.nodes.get(state)
        if found is None:
            found = self.nodes[state] = Digits(self, state)
        return found

    def key(self) -> tuple[str, tuple[object, ...]]:
        raise NotImplementedError

    def accepts(self, state: tuple[int, ...]) -> bool:
        raise NotImplementedError

    def surely_lives(self, state: tuple[int, ...]) -> bool:
        raise NotImplementedError

    def arcs(self, state: tuple[int, ...]) -> Arcs:
        raise NotImplementedError


def _grouped(arcs: Iterable[tuple[int, Expr | None]]) -> Arcs:
    masks: dict[Expr, int] = {}
    for mask, target in arcs:
        if target is not None and target is not EMPTY:
            masks[target] = masks.get(target, 0) | mask
    return tuple((mask, target) for target, mask in masks.items())


@dataclass(frozen=True, slots=True)
class _Bound:
    """The digits of a bound before and behind its point, or None for no bound."""

    whole: str
    fraction: str
    is_open: bool

    @staticmethod
    def of(value: Fraction | None, is_open: bool) -> _Bound | None:
        if value is None:
            return None
        whole, _, fraction = decimal_text(value).partition(".")
        return _Bound(whole, fraction, is_open)


class _Plain(_Form):
    """Texts without an exponent: digits, and perhaps a point and more digits.

    A state is (phase, place, against low, against high, digits, remainder of each multiple…): the place counts digits
    since the start or the point as far as they matter; `against` is -1, 0, 1 while the digits read so far are less
    than, equal to or greater than as many digits of the bound, or settled when the bound holds whatever follows.
    Where multiples matter all digits are counted, since a reader that keeps numbers as doubles would round a longer
    fraction to what is a multiple or is none.
    """

    def __init__(
        self,
        low: _Bound | None,
        high: _Bound | None,
        multiples: tuple[tuple[int, int, bool], ...],
        max_decimals: int | None,
    ) -> None:
        super().__init__()
        self.low = low
        self.high = high
        self.multiples = multiples
        self.max_decimals = max_decimals
        self.counts_digits = any(multiple != (1, 0, True) for multiple in multiples)
        self.start = (_SETTLED if low is None else 0, _SETTLED if high is None else 0, 0, *(0 for _ in multiples))

    @staticmethod
    def of(part: Range, any_spelling: bool) -> _Plain:
        steps = [] if part.multiple_of is None else [(part.multiple_of, True)]
        steps += [(other, False) for other in sorted(part.not_multiples_of)]
        multiples = []
        for step, wanted in steps:
            decimals = _decimals(step)
            multiples.append((int(step * 10**decimals), decimals, wanted))
        max_decimals = multiples[0][1] if part.multiple_of is not None and not any_spelling else None
        low = None if part.low == 0 and not part.low_open else _Bound.of(part.low, part.low_open)
        return _Plain(low, _Bound.of(part.high, part.high_open), tuple(multiples), max_decimals)

    def key(self) -> tuple[str, tuple[object, ...]]:
        return ("plain", (self.low, self.high, self.multiples, self.max_decimals))

    def accepts(self, state: tuple[int, ...]) -> bool:
        phase, place, low, high, _, *remainders = state
        if phase in (_START, _POINT):
            return False
        if not _holds(self.low, low, phase, place, is_low=True) or not _holds(
            self.high, high, phase, place, is_low=False
        ):
            return False
        for remainder, (step, decimals, wanted) in zip(remainders, self.multiples, strict=True):
            left = decimals - (place if phase == _FRACTION else 0)
            divides = remainder >= 0 and remainder * 10 ** max(left, 0) % step == 0
            if divides != wanted:
                return False
        return True

    def surely_lives(self, state: tuple[int, ...]) -> bool:
        """Enough free digits reach a multiple and pass every lower bound."""
        phase, place, low, high, *_ = state
        if phase != _INTEGER or sum(wanted for _, _, wanted in self.multiples) != len(self.multiples):
            return False
        if high == _SETTLED:
            return True
        if self.high is None or high >= 0:
            return False
        free = len(self.high.whole) - place
        if self.low is not None and low != _SETTLED:
            shorter = len(self.low.whole) < len(self.high.whole)
            if not (shorter or (len(self.low.whole) == len(self.high.whole) and low > 0)):
                return False
        return all(10**free >= step for step, _, _ in self.multiples)

    def arcs(self, state: tuple[int, ...]) -> Arcs:
        phase = state[0]
        found: list[tuple[int, Expr | None]] = []
        if phase != _ZERO and not (
            phase == _FRACTION and self.max_decimals is not None and state[1] >= self.max_decimals
        ):
            found = [(1 << 0x30 + digit, self._digit(state, digit)) for digit in range(10)]
        if phase in (_ZERO, _INTEGER) and self.max_decimals != 0:
            found.append((1 << 0x2E, self._point(state)))
        return _grouped(found)

    def _digit(self, state: tuple[int, ...], digit: int) -> Expr | None:
        phase, place, low, high, digits, *remainders = state
        digits += self.counts_digits and digits <= MOST_DIGITS
        if phase in (_START, _INTEGER):
            low = _read_whole(self.low, low, place, digit, is_low=True)
            high = _read_whole(self.high, high, place, digit, is_low=False)
            after = _ZERO if phase == _START and digit == 0 else _INTEGER
            left = [(10 * old + digit) % step for old, (step, _, _) in zip(remainders, self.multiples, strict=True)]
            place = 0 if low == high == _SETTLED else place + 1
        elif digits > MOST_DIGITS:
            return None
        else:
            low = _read_fraction(self.low, low, place, digit, is_low=True)
            high = _read_fraction(self.high, high, place, digit, is_low=False)
            after = _FRACTION
            left = []
            for old, (step, decimals, wanted) in zip(remainders, self.multiples, strict=True):
                if place < decimals:
                    new = (10 * old + digit) % step if old >= 0 else -1
                else:
                    new = old if digit == 0 else -1
                if new < 0 and wanted:
                    return None
                left.append(new)
            place = min(place + 1, self._place_limit(low, high))
        if _DEAD in (low, high):
            return None
        return self.node((after, place, low, high, digits, *left))

    def _place_limit(self, low: int, high: int) -> int:
        """Beyond this many decimals one more zero changes nothing."""
        limits = [0 if self.max_decimals is None else self.max_decimals]
        limits += [decimals for _, decimals, _ in self.multiples]
        if self.low is not None and low != _SETTLED:
            limits.append(len(self.low.fraction))
        if self.high is not None and high != _SETTLED:
            limits.append(len(self.high.fraction))
        return max(limits)

    def _point(self, state: tuple[int, ...]) -> Expr | None:
        _, place, low, high, digits, *remainders = state
        if digits >= MOST_DIGITS:
            return None
        if self.low is not None and low != _SETTLED:
            if place < len(self.low.whole) or low < 0:
                return None
            low = _SETTLED if low > 0 else 0
        if self.high is not None and high != _SETTLED:
            if place == len(self.high.whole) and high > 0:
                return None
            high = _SETTLED if place < len(self.high.whole) or high < 0 else 0
        return self.node((_POINT, 0, low, high, digits, *remainders))


def _read_whole(bound: _Bound | None, against: int, place: int, digit: int, *, is_low: bool) -> int:
    """How digits before the point stand to a bound after one more."""
    if bound is None or against == _SETTLED:
        return _SETTLED
    length = len(bound.whole)
    if place >= length:
        return _SETTLED if is_low else _DEAD
    if against == 0:
        other = int(bound.whole[place])
        against = (digit > other) - (digit < other)
    if place + 1 == length and against > 0:
        return _SETTLED if is_low else _DEAD
    return against


def _read_fraction(bound: _Bound | None, against: int, place: int, digit: int, *, is_low: bool) -> int:
    """How a number that equalled a bound so far stands to it after one more digit behind the point."""
    if bound is None or against == _SETTLED:
        return _SETTLED
    other = int(bound.fraction[place]) if place < len(bound.fraction) else 0
    if digit == other:
        return 0
    return _SETTLED if (digit > other) == is_low else _DEAD


def _holds(bound: _Bound | None, against: int, phase: int, place: int, *, is_low: bool) -> bool:
    """Whether a bound holds for a number that ends here."""
    if bound is None or against == _SETTLED:
        return True
    if phase != _FRACTION:
        if place < len(bound.whole) or (against == 0 and bound.fraction):
            against = -1
    elif place < len(bound.fraction):
        against = -1
    if against == 0:
        return not bound.is_open
    return (against > 0) == is_low


def _significant(value: Fraction | None) -> tuple[str, int] | None:
    """The significant digits of a positive number and the exponent of the first; None for zero or no bound."""
    if value is None or value == 0:
        return None
    whole, _, fraction = decimal_text(value).partition(".")
    digits = whole + fraction
    stripped = digits.lstrip("0")
    return stripped.rstrip("0"), len(whole) - 1 - (len(digits) - len(stripped))


class _Scientific(_Form):
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
        self.start = (_SETTLED if low is None else 0, _SETTLED if high is None else 0)

    def key(self) -> tuple[str, tuple[object, ...]]:
        return ("scientific", (self.low, self.low_open, self.high, self.high_open, self.whole))

    def accepts(self, state: tuple[int, ...]) -> bool:
        return False

    def surely_lives(self, state: tuple[int, ...]) -> bool:
        return False

    def arcs(self, state: tuple[int, ...]) -> Arcs:
        phase = state[0]
        found: list[tuple[int, Expr | None]] = []
        if phase != _INTEGER:
            first = 1 if phase == _START else 0
            found = [(1 << 0x30 + digit, self._digit(state, digit)) for digit in range(first, 10)]
        if phase == _INTEGER:
            found.append((1 << 0x2E, self.node((_POINT, *state[1:]))))
        if phase in (_INTEGER, _FRACTION):
            found.append((1 << 0x45 | 1 << 0x65, self._exponent(state)))
        return _grouped(found)

    def _digit(self, state: tuple[int, ...], digit: int) -> Expr | None:
        phase, place, low, high, decimals = state
        after = _INTEGER if phase == _START else _FRACTION
        if phase != _START and self.whole:
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
