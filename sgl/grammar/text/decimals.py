"""Sets of numbers: ranges, multiples and single values, closed under the set operations.

Bounds are exact fractions: 0.1 is a tenth. `numbers.py` knows their JSON texts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Final

FEW_VALUES: Final = 256
"""A range of at most this many multiples becomes single values."""
Exact = Fraction | int
"""A number without rounding; multiples, and what a schema lists as ints, are ints, since thousands may be listed."""


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers between two bounds (None: unbounded) that are multiples of one number and of none of others.

    `is_plain` integers have no point and no exponent."""

    low: Fraction | None = None
    high: Fraction | None = None
    low_open: bool = False
    high_open: bool = False
    multiple_of: Fraction | None = None
    not_multiples_of: frozenset[Fraction] = frozenset()
    is_plain: bool = False

    def __contains__(self, value: Exact) -> bool:
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.high_open and value == self.high)):
            return False
        if self.multiple_of is not None and not _is_multiple(value, self.multiple_of):
            return False
        return not any(_is_multiple(value, other) for other in self.not_multiples_of)


@dataclass(frozen=True, slots=True)
class NumberSet:
    """A union of ranges and single values."""

    ranges: tuple[Range, ...] = ()
    values: frozenset[Exact] = frozenset()

    def __contains__(self, value: Exact) -> bool:
        return value in self.values or any(value in part for part in self.ranges)

    def __bool__(self) -> bool:
        """Whether any number belongs to the set; exact, since `make_set` drops empty ranges."""
        return bool(self.ranges or self.values)

    def __and__(self, other: NumberSet) -> NumberSet:
        if self == EVERY_NUMBER:
            return other
        if other == EVERY_NUMBER:
            return self
        met = [meet(left, right) for left in self.ranges for right in other.ranges]
        single = set(self.values & other.values)
        for one, another in ((self, other), (other, self)):
            for part in another.ranges:
                held = [value for value in one.values - another.values if value in part]
                met += [meet(_only(value), part) for value in held if part.is_plain]
                single.update(() if part.is_plain else held)  # as they are listed
        return make_set([part for part in met if part is not None], single)

    def __or__(self, other: NumberSet) -> NumberSet:
        if self == EVERY_NUMBER or other == EVERY_NUMBER:
            return EVERY_NUMBER
        return make_set(dict.fromkeys((*self.ranges, *other.ranges)), self.values | other.values)

    def __invert__(self) -> NumberSet:
        result = make_set(_gaps(sorted(self.values)), ())
        for part in self.ranges:
            result &= _complement(part)
        return result


def make_set(ranges: Iterable[Range], values: Iterable[Exact] = ()) -> NumberSet:
    """The union of ranges and single values; empty ranges are dropped, small ones become values."""
    kept: list[Range] = []
    single = set(values)
    for part in ranges:
        tightened = _tighten(part)
        if isinstance(tightened, Range):
            kept.append(tightened)
        elif part.is_plain:
            kept += [replace(_only(value), multiple_of=Fraction(1), is_plain=True) for value in tightened]
        else:
            single.update(tightened)
    if kept:
        single = {value for value in single if not any(value in part for part in kept)}
    return NumberSet(tuple(kept), frozenset(single))


def _is_multiple(value: Exact, of: Fraction) -> bool:
    """In integers, since a division of fractions takes ten times as long."""
    return value.numerator * of.denominator % (value.denominator * of.numerator) == 0


def _whole(value: Fraction) -> Exact:
    return value.numerator if value.denominator == 1 else value


def _only(value: Exact) -> Range:
    return Range(Fraction(value), Fraction(value))


def meet(left: Range, right: Range) -> Range | None:
    """The intersection of two ranges; None if their bounds contradict each other."""
    low, low_open = max(
        ((part.low, part.low_open) for part in (left, right) if part.low is not None), default=(None, False)
    )
    high, closed = min(
        ((part.high, not part.high_open) for part in (left, right) if part.high is not None), default=(None, True)
    )
    if low is not None and high is not None and low > high:
        return None
    multiple = left.multiple_of
    if right.multiple_of is not None:
        multiple = right.multiple_of if multiple is None else least_common_multiple(multiple, right.multiple_of)
    return Range(
        low,
        high,
        low_open,
        not closed,
        multiple,
        left.not_multiples_of | right.not_multiples_of,
        left.is_plain or right.is_plain,
    )


def _tighten(part: Range) -> Range | tuple[Exact, ...]:
    """The range with its bounds moved to members, or its members if they are few."""
    step = part.multiple_of
    if step is None:
        if part.low is None or part.high is None or part.low < part.high:
            return part
        return (_whole(part.low),) if part.low in part else ()
    if any(_is_multiple(step, other) for other in part.not_multiples_of):
        return ()
    low, high = part.low, part.high
    if low is not None:
        low = step * math.ceil(low / step)
        if part.low_open and low == part.low:
            low += step
    if high is not None:
        high = step * math.floor(high / step)
        if part.high_open and high == part.high:
            high -= step
    if part.is_plain and not part.not_multiples_of and (low is None or high is None or low <= high):
        return replace(part, low=low, high=high, low_open=False, high_open=False)
    if low is not None and high is not None and high < low + step * FEW_VALUES:
        places, size = range(int(low / step), int(high / step) + 1), step.numerator
        values: Iterable[Exact] = (_whole(step * place) for place in places)
        if step.denominator == 1:
            values = range(places.start * size, places.stop * size, size)
        others = part.not_multiples_of
        return tuple(value for value in values if not any(_is_multiple(value, other) for other in others))
    return replace(part, low=low, high=high, low_open=False, high_open=False)


def _complement(part: Range) -> NumberSet:
    result = []
    if part.low is not None:
        result.append(Range(high=part.low, high_open=not part.low_open))
    if part.high is not None:
        result.append(Range(low=part.high, low_open=not part.high_open))
    inside = Range(part.low, part.high, part.low_open, part.high_open)
    if part.multiple_of is not None:
        result.append(replace(inside, not_multiples_of=frozenset((part.multiple_of,))))
    result.extend(replace(inside, multiple_of=other) for other in part.not_multiples_of)
    return make_set(result)


def _gaps(values: list[Exact]) -> list[Range]:
    """The ranges between, below and above sorted values."""
    bounds: list[Fraction | None] = [None, *map(Fraction, values), None]
    return [Range(low, high, low is not None, high is not None) for low, high in itertools.pairwise(bounds)]


def least_common_multiple(left: Fraction, right: Fraction) -> Fraction:
    """The smallest positive number that is a multiple of both."""
    return Fraction(
        math.lcm(left.numerator * right.denominator, right.numerator * left.denominator),
        left.denominator * right.denominator,
    )


@lru_cache(maxsize=1 << 15)
def exact(value: int | float) -> Fraction:
    """The number as the schema writes it: a float by its shortest decimal text. Raises ValueError for infinities, NaN
    and too many digits."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("a number is too large: it must be finite")
        return Fraction(Decimal(repr(value)))
    return Fraction(sized(value))


def sized(value: int) -> int:
    """The number itself. Raises ValueError for too many digits."""
    if value.bit_length() > 4096:
        raise ValueError("more than 1,200 digits")
    return value


EVERY_NUMBER: Final = NumberSet((Range(),))
INTEGERS: Final = NumberSet((Range(multiple_of=Fraction(1)),))
PLAIN_INTEGERS: Final = NumberSet((Range(multiple_of=Fraction(1), is_plain=True),))
