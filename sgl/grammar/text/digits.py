"""The JSON texts of a range of numbers, as expressions that compare digits as they read them.

A state holds the comparison with each bound and the remainder for each multiple, so no range becomes alternatives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from fractions import Fraction
from math import gcd
from typing import Final, NamedTuple

from sgl.grammar.regular.arcs import grouped
from sgl.grammar.regular.expr import EMPTY, Arcs, Compound, Expr
from sgl.grammar.regular.expr_leaves import ENDLESS
from sgl.grammar.text.decimals import Exact, Range
from sgl.time_limit import check_size

MOST_DIGITS: Final = 15
"""Doubles tell decimal fractions of so many digits apart."""
START, ZERO, INTEGER, POINT, FRACTION = range(5)
"""Phases: nothing read, a leading zero, digits before the point, the point, digits behind it."""
SETTLED: Final = 2
"""In place of a comparison: the bound holds whatever follows."""
_DEAD: Final = 3
MAX_EXPONENT: Final = 308
MIN_EXPONENT: Final = -324
_LEAST_NORMAL: Final = -307
"""Doubles tell MOST_DIGITS digits apart from this exponent on."""
MOST_REMAINDERS: Final = 1000
"""The most remainders of a multiple that must be searched."""
_MOST_DECIMALS: Final = 20
"""The most decimals of a whole number with an exponent."""


def decimal_text(value: Exact) -> str:
    """A decimal fraction without an exponent, in the fewest digits."""
    if value.denominator == 1:
        return str(value.numerator)
    shift = decimals_of(value)
    digits = str(abs(value.numerator) * (10**shift // value.denominator))
    sign = "-" if value < 0 else ""
    digits = digits.rjust(shift + 1, "0")
    return f"{sign}{digits[:-shift]}.{digits[-shift:]}"


def decimals_of(value: Exact) -> int:
    """The digits behind the point of a decimal fraction."""
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
    """The rest of a number's text in a state of its form."""

    __slots__ = ("form", "state")

    def __init__(self, form: Form, state: State) -> None:
        nullable = form.accepts(state)
        super().__init__(nullable, True, int(not nullable), ENDLESS)
        self.form = form
        self.state = state
        self.known_empty = False if self.nullable else form.is_dead(state)

    def shortest_text(self) -> bytes | None:
        return self.form.shortest_text(self.state)

    def _derive(self) -> Arcs:
        return self.form.arcs(self.state)

    def __repr__(self) -> str:
        return f"<number {self.state}>"


class State(NamedTuple):
    """What later digits depend on."""

    phase: int
    place: int
    """Digits since the start or the point, as far as bounds and multiples need them."""
    against: tuple[int, ...]
    """By bound: -1, 0, 1 if the digits read are less than, equal to or greater than as many of its own, or SETTLED."""
    digits: int
    """All digits, if their number is limited."""
    remainders: tuple[int, ...]
    """By multiple; -1 if the number can no longer be one."""


class Form(ABC):
    """One kind of texts of a range of non-negative numbers: one node for each state."""

    def __init__(self, part: Range) -> None:
        self.bounds = (
            Bound(part.low, is_open=part.low_open, is_low=True),
            Bound(part.high, is_open=part.high_open, is_low=False),
        )
        self._nodes: dict[State, Expr] = {}

    def node(self, state: State) -> Expr:
        """The expression of a state."""
        found = self._nodes.get(state)
        if found is None:
            found = self._nodes[state] = Digits(self, state)
        return found

    def accepts(self, state: State) -> bool:
        """Whether a number may end in a state."""
        return False

    def is_dead(self, state: State) -> bool | None:
        """Whether no number ends behind a state, or None if that takes a search."""
        return None

    def shortest_text(self, state: State) -> bytes | None:
        """See `Compound.shortest_text`."""
        return None

    @abstractmethod
    def arcs(self, state: State) -> Arcs:
        """The bytes that may follow."""


class Bound:
    """A bound: its digits before and behind the point, its significant digits and the exponent of the first.

    Lower if `is_low`, else upper; none if the value is None.
    """

    def __init__(self, value: Fraction | None, *, is_open: bool, is_low: bool) -> None:
        self.value = value
        self.is_open = is_open
        self.is_low = is_low
        self.whole, _, self.fraction = decimal_text(value or 0).partition(".")
        digits = self.whole + self.fraction
        self.significant = digits.strip("0")
        self.exponent = len(self.whole) - 1 - (len(digits) - len(digits.lstrip("0")))

    def is_met(self, order: int) -> bool:
        """Whether a number meets it that compares to it as `order`."""
        return not self.is_open if order == 0 else (order > 0) == self.is_low

    def _decided(self, order: int) -> int:
        """The comparison with a number that stays less or greater, or is equal so far."""
        return 0 if order == 0 else SETTLED if self.is_met(order) else _DEAD

    def after_whole(self, against: int, place: int, digit: int) -> int:
        """The comparison after one more digit before the point."""
        if against == SETTLED:
            return SETTLED
        if place >= len(self.whole):
            return self._decided(1)
        against = against or compare(digit, self.whole[place])
        return self._decided(1) if against > 0 and place + 1 == len(self.whole) else against

    def after_point(self, against: int, place: int) -> int:
        """The comparison once all digits before the point are read."""
        return against if against == SETTLED else self._decided(-1 if place < len(self.whole) else against)

    def after_fraction(self, against: int, place: int, digit: int) -> int:
        """The comparison after one more digit behind the point."""
        return against if against == SETTLED else self._decided(compare(digit, self.fraction[place : place + 1]))

    def holds(self, against: int, phase: int, place: int) -> bool:
        """Whether a number may end here."""
        if against == SETTLED:
            return True
        if phase == FRACTION:
            is_shorter = place < len(self.fraction)
        else:
            is_shorter = place < len(self.whole) or (against == 0 and self.fraction != "")
        return self.is_met(-1 if is_shorter else against)


def compare(digit: int, other: str) -> int:
    """-1, 0 or 1 as a digit is less than, equal to or greater than another; "" is 0."""
    value = int(other or 0)
    return (digit > value) - (digit < value)


class Multiple(NamedTuple):
    """Numbers must, or must not, be multiples of `step`, in units of its last decimal."""

    step: int
    decimals: int
    is_wanted: bool


class Plain(Form):
    """Texts without an exponent.

    With multiples, and if `is_strict` (a bound is no number itself), the number of digits is limited: readers that use
    doubles would round a longer fraction to a multiple or to the bound, or from one.
    """

    def __init__(self, part: Range, *, any_spelling: bool, is_strict: bool) -> None:
        super().__init__(part)
        steps = [] if part.multiple_of is None else [(part.multiple_of, True)]
        steps += [(other, False) for other in sorted(part.not_multiples_of)]
        self.multiples = [
            Multiple(int(step * 10 ** decimals_of(step)), decimals_of(step), is_wanted) for step, is_wanted in steps
        ]
        self.is_whole = len(steps) == 1 and self.multiples[0].is_wanted and self.multiples[0].decimals == 0
        """Numbers must be multiples of a whole number: arithmetic finds them."""
        if part.multiple_of is not None and not self.is_whole:
            most = MOST_REMAINDERS if len(steps) == 1 else MOST_REMAINDERS // 10
            what = "multipleOf with decimals has {} units of its last one at most; a whole number may be any"
            if len(steps) > 1:  # a search meets a remainder in up to ten ways
                what = "multipleOf beside multiples that are excluded is {} at most, in units of its last decimal"
            check_size(self.multiples[0].step, most, what)
        is_short = part.multiple_of is not None and not any_spelling
        self.max_decimals = self.multiples[0].decimals if is_short else None
        self.counts_digits = is_strict or any(multiple != (1, 0, True) for multiple in self.multiples)
        low, high = self.bounds
        self.most_digits = MOST_DIGITS + (max(0, -high.exponent) if high.value and not self.multiples else 0)
        is_trivial = (not low.value and not low.is_open, high.value is None)
        against = tuple(SETTLED if trivial else 0 for trivial in is_trivial)
        self.start = self.node(State(START, 0, against, 0, (0,) * len(steps)))

    def accepts(self, state: State) -> bool:
        phase, place, against, _, remainders = state
        if phase in (START, POINT):
            return False
        if not all(bound.holds(seen, phase, place) for bound, seen in zip(self.bounds, against, strict=True)):
            return False
        for remainder, (step, decimals, is_wanted) in zip(remainders, self.multiples, strict=True):
            left = max(decimals - (place if phase == FRACTION else 0), 0)
            if (remainder >= 0 and remainder * 10**left % step == 0) != is_wanted:
                return False
        return True

    def is_dead(self, state: State) -> bool | None:
        """By arithmetic for multiples: a search would visit most remainders."""
        phase, place, (against_low, against_high), digits, remainders = state
        is_wanted = all(multiple.is_wanted for multiple in self.multiples)
        is_one = is_wanted and len(self.multiples) == 1
        if phase in (POINT, FRACTION) and against_low == against_high == SETTLED:
            return not self._reaches_multiple(place, digits, remainders[0]) if is_one else None
        if phase != INTEGER or not is_wanted:
            return None
        if against_high == SETTLED:
            return False
        if self.is_whole:
            return self._whole_multiple(place, against_low, against_high, remainders[0]) is None
        low, high = (len(bound.whole) for bound in self.bounds)
        if against_high > -1 or (against_low != SETTLED and low >= high and (low > high or against_low <= 0)):
            return None
        return False if all(10 ** (high - place) >= multiple.step for multiple in self.multiples) else None

    def shortest_text(self, state: State) -> bytes | None:
        """By arithmetic if possible: a search would visit most remainders."""
        if not self.is_whole or state.phase not in (START, INTEGER):
            return None
        if state.phase == INTEGER:
            _, place, (against_low, against_high), _, remainders = state
            found = self._whole_multiple(place, against_low, against_high, remainders[0])
            assert found is not None, "the language is not empty"
            return found.encode()
        texts = []
        for digit in range(10):
            behind = self._digit(state, digit)
            if behind.nullable:
                return b"%d" % digit
            if isinstance(behind, Digits) and behind.state.phase == INTEGER and not behind.known_empty:
                texts.append(b"%d" % digit + (self.shortest_text(behind.state) or b""))
        return min(texts, key=lambda text: (len(text), text))

    def _whole_multiple(self, place: int, against_low: int, against_high: int, remainder: int) -> str | None:
        """The first of the shortest strings of digits that lead to a whole multiple within the bounds."""
        low, high = self.bounds
        step = self.multiples[0].step
        start = max(place, 0 if against_low == SETTLED else len(low.whole))
        for length in range(start, (start + len(str(step)) if against_high == SETTLED else len(high.whole)) + 1):
            least, most = 0, 10 ** (length - place) - 1
            if against_low != SETTLED and length == len(low.whole):
                if against_low < 0:
                    continue
                if against_low == 0:
                    least = int(low.whole[place:] or 0) + (low.is_open or low.fraction != "")
            if length == len(high.whole) and against_high != SETTLED:
                if against_high > 0:
                    continue
                if against_high == 0:
                    most = int(high.whole[place:] or 0) - (high.is_open and not high.fraction)
            # the digits y that follow: remainder * 10**(length - place) + y = 0 modulo the step
            digits = least + -(remainder * (10 ** (length - place)) + least) % step
            if digits <= most:
                return str(digits).rjust(length - place, "0") if length > place else ""
        return None

    def _reaches_multiple(self, place: int, digits: int, remainder: int) -> bool:
        """Whether more digits behind the point, within the limit, lead to a multiple."""
        step, decimals, _ = self.multiples[0]
        left = max(decimals - place, 0)
        free = min(left, self.most_digits - digits) if self.counts_digits else left
        # free digits y, then zeros: remainder * 10**left + y * 10**(left - free) = 0 modulo the step
        target, factor = -remainder * 10**left % step, 10 ** (left - free)
        divisor = gcd(factor, step)
        if target % divisor:
            return False
        modulus = step // divisor
        least = target // divisor * int(pow(factor // divisor, -1, modulus)) % modulus
        return bool(least < 10**free)

    def arcs(self, state: State) -> Arcs:
        phase = state.phase
        is_full = phase == FRACTION and self.max_decimals is not None and state.place >= self.max_decimals
        found: list[tuple[int, Expr]] = []
        if phase != ZERO and not is_full:
            found = [(1 << 0x30 + digit, self._digit(state, digit)) for digit in range(10)]
        if phase in (ZERO, INTEGER) and self.max_decimals != 0:
            found.append((1 << 0x2E, self._point(state)))
        return grouped(found)

    def _digit(self, state: State, digit: int) -> Expr:
        phase, place, before, digits, remainders = state
        digits += self.counts_digits and digits <= self.most_digits
        left = []
        if phase in (START, INTEGER):
            after = ZERO if phase == START and digit == 0 else INTEGER
            against = [
                bound.after_whole(seen, place, digit) for bound, seen in zip(self.bounds, before, strict=True)
            ]
            for old, (step, _, _) in zip(remainders, self.multiples, strict=True):
                left.append((10 * old + digit) % step)
            place = 0 if against == [SETTLED, SETTLED] else place + 1
        elif digits > self.most_digits:
            return EMPTY
        else:
            after = FRACTION
            against = [
                bound.after_fraction(seen, place, digit) for bound, seen in zip(self.bounds, before, strict=True)
            ]
            for old, (step, decimals, is_wanted) in zip(remainders, self.multiples, strict=True):
                is_zero_behind = place >= decimals and digit == 0
                new = old if is_zero_behind or old < 0 else (10 * old + digit) % step if place < decimals else -1
                if new < 0 and is_wanted:
                    return EMPTY
                left.append(new)
            place = min(place + 1, self._place_limit(against))
        return EMPTY if _DEAD in against else self.node(State(after, place, tuple(against), digits, tuple(left)))

    def _place_limit(self, against: list[int]) -> int:
        """The decimals beyond which a zero changes nothing."""
        limits = [self.max_decimals or 0, *(multiple.decimals for multiple in self.multiples)]
        for bound, seen in zip(self.bounds, against, strict=True):
            limits.append(0 if seen == SETTLED else len(bound.fraction))
        return max(limits)

    def _point(self, state: State) -> Expr:
        if state.digits >= self.most_digits:
            return EMPTY
        against = [
            bound.after_point(seen, state.place) for bound, seen in zip(self.bounds, state.against, strict=True)
        ]
        return EMPTY if _DEAD in against else self.node(State(POINT, 0, tuple(against), *state[3:]))


class Scientific(Form):
    """Texts d.ddde±x with one digit other than 0 before the point. `exponents` gives the texts of a range of exponents.

    If `is_whole`, no more decimals than the exponent shifts away; if `is_strict`, no more than doubles tell apart.
    Comparisons are of significant digits, and `digits` counts decimals.
    """

    def __init__(
        self, part: Range, exponents: Callable[[int, int], Expr], *, is_whole: bool, is_strict: bool
    ) -> None:
        super().__init__(part)
        self.exponents = exponents
        self.is_whole = is_whole
        self.least_exponent = _LEAST_NORMAL if is_strict else MIN_EXPONENT
        self.most_decimals = _MOST_DECIMALS if is_whole else MOST_DIGITS - 1 if is_strict else None
        against = tuple(0 if bound.value else SETTLED for bound in self.bounds)
        self.start = self.node(State(START, 0, against, 0, ()))

    def arcs(self, state: State) -> Arcs:
        phase = state.phase
        found: list[tuple[int, Expr]] = []
        if phase != INTEGER:
            first = 1 if phase == START else 0
            found = [(1 << 0x30 + digit, self._digit(state, digit)) for digit in range(first, 10)]
        if phase == INTEGER:
            found.append((1 << 0x2E, self.node(state._replace(phase=POINT))))
        if phase in (INTEGER, FRACTION):
            found.append((1 << 0x45 | 1 << 0x65, self._exponent(state)))
        return grouped(found)

    def _digit(self, state: State, digit: int) -> Expr:
        phase, place, before, decimals, _ = state
        decimals += phase != START and self.most_decimals is not None
        if self.most_decimals is not None and decimals > self.most_decimals:
            return EMPTY
        against = tuple(
            seen or compare(digit, bound.significant[place : place + 1])
            for bound, seen in zip(self.bounds, before, strict=True)
        )
        lengths = [len(bound.significant) for bound, seen in zip(self.bounds, against, strict=True) if seen == 0]
        after = INTEGER if phase == START else FRACTION
        return self.node(State(after, min(place + 1, max(lengths, default=0)), against, decimals, ()))

    def _exponent(self, state: State) -> Expr:
        limits = [state.digits if self.is_whole else self.least_exponent, MAX_EXPONENT]
        for i, (bound, seen) in enumerate(zip(self.bounds, state.against, strict=True)):
            if seen != SETTLED:
                order = -1 if seen == 0 and state.place < len(bound.significant) else seen
                beyond = 1 if bound.is_low else -1
                limit = bound.exponent if bound.is_met(order) else bound.exponent + beyond
                limits[i] = max(limits[i], limit) if bound.is_low else min(limits[i], limit)
        return self.exponents(*limits)
