"""What a JSON value may look like: the border between JSON Schema and the automaton.

A `Schema` names a set of JSON values and gives it as alternatives, each of one of four shapes. Whoever builds
shapes promises that each one has at least one value; the automaton promises to offer exactly the texts of the
alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sgl.grammar.regular.expr import Expr


class Schema(Protocol):
    """A set of JSON values. Compared by identity: equal sets should be one object, or states multiply."""

    def alternatives(self) -> tuple[Shape, ...]:
        """The set as shapes, which may overlap; none if no value belongs to it. Always the same objects."""

    def bare(self) -> tuple[Expr, Expr]:
        """Its strings as they are, without quotes and escapes, and the JSON texts of its other scalars."""


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A scalar whose whole JSON text, quotes included, matches `expr`."""

    expr: Expr


@dataclass(frozen=True, slots=True, eq=False)
class CountedString:
    """A string of `min_length` to `max_length` characters, each of which matches `char` in its JSON spelling.

    The characters are counted, not unrolled, so the bounds may be any size. `char` matches exactly one character.
    """

    char: Expr
    min_length: int
    max_length: int | None


@dataclass(frozen=True, slots=True, eq=False)
class KeyPattern:
    """Undeclared keys whose body (JSON text without quotes, canonical) matches `key`, and their values."""

    key: Expr
    value: Schema


@dataclass(frozen=True, slots=True, eq=False)
class Object:
    """A JSON object.

    `properties` are the declared keys with everything that applies to them already merged into the value's schema,
    in the order in which they are generated; every value schema has values (an optional key without values is in
    `forbidden`). Every key that is not declared must match one of `patterns`, which are disjoint, and disjoint from
    declared and forbidden keys: a key that matches none is not allowed. An unconstrained object has one pattern: any
    key body outside declared and forbidden ones. Of each of `exists` at least one undeclared key must be present, its
    values being among those that `patterns` allow for such keys.
    """

    properties: tuple[tuple[str, Schema], ...] = ()
    required: frozenset[str] = frozenset()
    patterns: tuple[KeyPattern, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None
    exists: tuple[KeyPattern, ...] = ()
    is_about_declared: bool = False
    """Whether schemas declare keys and say nothing at all of others, which none of them needs."""
    has_bare_keys: bool = False
    """Whether keys stand without quotes, as `literal_arguments.py` writes them; none needs an escape."""


@dataclass(frozen=True, slots=True, eq=False)
class Contains:
    """Between `min_count` and `max_count` items belong to `matching`; the others belong to `other`.

    Both are already intersected with the array's item schemas by position: `matching[i]`, `other[i]` for the i-th
    prefix item and the last entry for all items behind the prefix. Where `max_count` is None, `other` may overlap
    `matching`.
    """

    matching: tuple[Schema | None, ...]
    other: tuple[Schema | None, ...]
    min_count: int
    max_count: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """A JSON array: item i belongs to `prefix[i]`, items behind the prefix to `items` (None: no such item).

    `max_items` is already lowered to the first position that no value can fill, and min_items <= max_items.
    `distinct` holds, for uniqueItems over a finite set of scalars, the values one by one (disjoint, each one
    schema); every item is then one of them, each at most once. `unique` holds, for uniqueItems over strings, their
    bodies (as of `KeyPattern.key`): every item is one of them, each at most once, and there are enough of them.
    """

    prefix: tuple[Schema, ...] = ()
    items: Schema | None = None
    min_items: int = 0
    max_items: int | None = None
    contains: Contains | None = None
    distinct: tuple[Schema, ...] | None = None
    unique: Expr | None = None


Shape = Text | CountedString | Object | Array


def num_spots(spots: Sequence[bool], start: int, end: int) -> int:
    """How many of the positions from `start` to before `end` are true; the last stands for all behind it."""
    last = len(spots) - 1
    return sum(spots[start : min(end, last)]) + spots[last] * max(end - max(start, last), 0)
