"""The JSON texts of a set of numbers, as expressions that read digits and compare as they go.

A text is followed by its place against each bound and its remainder for each multiple, so no range is ever expanded
into alternatives. Called by the schema compiler for every constrained number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Final

from sgl.grammar.expr import EMPTY, Arcs, Compound, Expr
from sgl.grammar.expr_leaves import ENDLESS
from sgl.grammar.numbers import Exact, Range

MOST_DIGITS: Final = 15
"""Every decimal fraction of so many digits is told from all others by doubles."""
START, ZERO, INTEGER, POINT, FRACTION = range(5)
"""Phases of a text: nothing read, a leading zero, digits before the point, the point, digits behind it."""
SETTLED: Final = 2
"""Instead of a comparison: the bound holds whatever follows."""
_DEAD: Final = 3


def decimal_text(value: Exact) -> str:
    """A decimal fraction without an exponent, in as few digits as possible."""
    if value.denominator == 1:
        return str(value.numerator)
    shift = decimals_of(value)
    digits = str(abs(value.numerator) * (10**shift // value.denominator))
    sign = "-" if value < 0 else ""
    digits = digits.rjust(shift + 1, "0")
    return f"{sign}{digits[:-shift]}.{digits[-shift:]}"


def decimals_of(value: Exact) -> int:
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


class Digits(Compound):
    """What is left of a number's text in some state of its form."""

    __slots__ = ("form", "state")

    def __init__(self, form: Form, state: tuple[int, ...]) -> None:
        nullable = form.accepts(state)
        super().__init__(nullable, True, int(not nullable), ENDLESS)
        self.form = form
        self.state = state
        self.known_empty = False if self.nullable else form.is_dead(state)

    def _derive(self) -> Arcs:
        return self.form.arcs(self.state)

    def __repr__(self) -> str:
        return f"<number {self.state}>"

    def __reduce__(self) -> tuple[object, ...]:
        return (_restore, (type(self.form), self.form.arguments(), self.state))


def _restore(form: type[Form], arguments: tuple[object, ...], state: tuple[int, ...]) -> Expr:
    return form(*arguments).node(state)


class Form:
    """One kind of number text under fixed bounds: states are tuples, nodes are made once per state."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[int, ...], Expr] = {}

    def node(self, state: tuple[int, ...]) -> Expr:
        """What may follow in a state."""
        found = self.nodes.get(state)
        if found is None:
            found = self.nodes[state] = Digits(self, state)
        return found

    def arguments(self) -> tuple[object, ...]:
        """What the form was made with."""
        raise NotImplementedError

    def accepts(self, state: tuple[int, ...]) -> bool:
        """Whether a number may end in a state."""
        raise NotImplementedError

    def is_dead(self, state: tuple[int, ...]) -> bool | None:
        """Whether no number ends behind a state, or None where that takes a search."""
        raise NotImplementedError

    def arcs(self, state: tuple[int, ...]) -> Arcs:
        """The bytes that may follow."""
        raise NotImplementedError


def grouped(arcs: Iterable[tuple[int, Expr | None]]) -> Arcs:
    """Arcs with those to one target drawn together, and those that lead nowhere left out."""
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


class Plain(Form):
    """Texts without an exponent: digits, and perhaps a point and more digits.

    A state is (phase, place, against low, against high, digits, remainder of each multiple…): the place counts
    digits since the start or the point as far as they matter; `against` is -1, 0, 1 while the digits read so far
    are less than, equal to or greater than as many digits of the bound, or settled when the bound holds whatever
    follows. Where multiples matter all digits are counted, since a reader that keeps numbers as doubles would round
    a longer fraction to what is a multiple or is none.
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
        self.start = (SETTLED if low is None else 0, SETTLED if high is None else 0, 0, *(0 for _ in multiples))

    @staticmethod
    def of(part: Range, any_spelling: bool) -> Plain:
        """The form of the numbers of a range of non-negative numbers."""
        steps = [] if part.multiple_of is None else [(part.multiple_of, True)]
        steps += [(other, False) for other in sorted(part.not_multiples_of)]
        multiples = []
        for step, wanted in steps:
            decimals = decimals_of(step)
            multiples.append((int(step * 10**decimals), decimals, wanted))
        max_decimals = multiples[0][1] if part.multiple_of is not None and not any_spelling else None
        low = None if part.low == 0 and not part.low_open else _Bound.of(part.low, part.low_open)
        return Plain(low, _Bound.of(part.high, part.high_open), tuple(multiples), max_decimals)

    def arguments(self) -> tuple[object, ...]:
        return (self.low, self.high, self.multiples, self.max_decimals)

    def accepts(self, state: tuple[int, ...]) -> bool:
        phase, place, low, high, _, *remainders = state
        if phase in (START, POINT):
            return False
        if not _holds(self.low, low, phase, place, is_low=True) or not _holds(
            self.high, high, phase, place, is_low=False
        ):
            return False
        for remainder, (step, decimals, wanted) in zip(remainders, self.multiples, strict=True):
            left = decimals - (place if phase == FRACTION else 0)
            divides = remainder >= 0 and remainder * 10 ** max(left, 0) % step == 0
            if divides != wanted:
                return False
        return True

    def is_dead(self, state: tuple[int, ...]) -> bool | None:
        """Enough free digits before the point reach a multiple and pass every lower bound."""
        phase, place, low, high, digits, *remainders = state
        if (
            phase in (POINT, FRACTION)
            and low == high == SETTLED
            and len(self.multiples) == 1 == self.multiples[0][2]
        ):
            return not self._reaches_multiple(place, digits, remainders[0])
        if phase != INTEGER or not all(wanted for _, _, wanted in self.multiples):
            return None
        if high == SETTLED:
            return False
        if self.high is None or high >= 0:
            return None
        free = len(self.high.whole) - place
        if self.low is not None and low != SETTLED:
            shorter = len(self.low.whole) < len(self.high.whole)
            if not (shorter or (len(self.low.whole) == len(self.high.whole) and low > 0)):
                return None
        return False if all(10**free >= step for step, _, _ in self.multiples) else None

    def _reaches_multiple(self, place: int, digits: int, remainder: int) -> bool:
        """Whether some more digits behind the point, within the limit on digits, lead to a multiple."""
        step, decimals, _ = self.multiples[0]
        left = max(decimals - place, 0)
        free = min(left, MOST_DIGITS - digits) if self.counts_digits else left
        # free digits y, then zeros: remainder * 10**left + y * 10**(left - free) = 0 modulo the step
        target, factor = -remainder * 10**left % step, 10 ** (left - free)
        divisor = gcd(factor, step)
        if target % divisor:
            return False
        modulus = step // divisor
        least = target // divisor * int(pow(factor // divisor, -1, modulus)) % modulus
        return bool(least < 10**free)

    def arcs(self, state: tuple[int, ...]) -> Arcs:
        phase = state[0]
        found: list[tuple[int, Expr | None]] = []
        if phase != ZERO and not (
            phase == FRACTION and self.max_decimals is not None and state[1] >= self.max_decimals
        ):
            found = [(1 << 0x30 + digit, self._digit(state, digit)) for digit in range(10)]
        if phase in (ZERO, INTEGER) and self.max_decimals != 0:
            found.append((1 << 0x2E, self._point(state)))
        return grouped(found)

    def _digit(self, state: tuple[int, ...], digit: int) -> Expr | None:
        phase, place, low, high, digits, *remainders = state
        digits += self.counts_digits and digits <= MOST_DIGITS
        if phase in (START, INTEGER):
            low = _read_whole(self.low, low, place, digit, is_low=True)
            high = _read_whole(self.high, high, place, digit, is_low=False)
            after = ZERO if phase == START and digit == 0 else INTEGER
            left = [(10 * old + digit) % step for old, (step, _, _) in zip(remainders, self.multiples, strict=True)]
            place = 0 if low == high == SETTLED else place + 1
        elif digits > MOST_DIGITS:
            return None
        else:
            low = _read_fraction(self.low, low, place, digit, is_low=True)
            high = _read_fraction(self.high, high, place, digit, is_low=False)
            after = FRACTION
            left = []
            for old, (step, decimals, wanted) in zip(remainders, self.multiples, strict=True):
                is_zero_behind = place >= decimals and digit == 0
                new = old if is_zero_behind or old < 0 else (10 * old + digit) % step if place < decimals else -1
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
        if self.low is not None and low != SETTLED:
            limits.append(len(self.low.fraction))
        if self.high is not None and high != SETTLED:
            limits.append(len(self.high.fraction))
        return max(limits)

    def _point(self, state: tuple[int, ...]) -> Expr | None:
        _, place, low, high, digits, *remainders = state
        if digits >= MOST_DIGITS:
            return None
        if self.low is not None and low != SETTLED:
            if place < len(self.low.whole) or low < 0:
                return None
            low = SETTLED if low > 0 else 0
        if self.high is not None and high != SETTLED:
            if place == len(self.high.whole) and high > 0:
                return None
            high = SETTLED if place < len(self.high.whole) or high < 0 else 0
        return self.node((POINT, 0, low, high, digits, *remainders))


def _read_whole(bound: _Bound | None, against: int, place: int, digit: int, *, is_low: bool) -> int:
    """How digits before the point stand to a bound after one more."""
    if bound is None or against == SETTLED:
        return SETTLED
    length = len(bound.whole)
    if place >= length:
        return SETTLED if is_low else _DEAD
    if against == 0:
        other = int(bound.whole[place])
        against = (digit > other) - (digit < other)
    if place + 1 == length and against > 0:
        return SETTLED if is_low else _DEAD
    return against


def _read_fraction(bound: _Bound | None, against: int, place: int, digit: int, *, is_low: bool) -> int:
    """How a number that equalled a bound so far stands to it after one more digit behind the point."""
    if bound is None or against == SETTLED:
        return SETTLED
    other = int(bound.fraction[place]) if place < len(bound.fraction) else 0
    if digit == other:
        return 0
    return SETTLED if (digit > other) == is_low else _DEAD


def _holds(bound: _Bound | None, against: int, phase: int, place: int, *, is_low: bool) -> bool:
    """Whether a bound holds for a number that ends here."""
    if bound is None or against == SETTLED:
        return True
    if phase != FRACTION:
        if place < len(bound.whole) or (against == 0 and bound.fraction):
            against = -1
    elif place < len(bound.fraction):
        against = -1
    if against == 0:
        return not bound.is_open
    return (against > 0) == is_low
