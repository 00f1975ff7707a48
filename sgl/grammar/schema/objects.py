"""Sets of JSON objects, closed under intersection and complement.

A conjunct lists the keyword groups of its schemas (properties, patterns, the rest), so merging is free. `resolve` turns
it into declared keys, disjoint key patterns and existence demands. Children are formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, product
from math import prod
from typing import Final, NamedTuple

from sgl.grammar.regular.byteset import bytes_of
from sgl.grammar.regular.expr import EMPTY, Expr, difference, intersect, is_empty, matches, union, words
from sgl.grammar.schema.formula import (
    CASES_LIMIT,
    FALSE,
    TRUE,
    Conjunct,
    Formula,
    Formulas,
    lower_of,
    too_many_conjuncts,
)
from sgl.grammar.shape import KeyPattern, Object, Schema
from sgl.grammar.text.json import CANONICAL_BODY, string_body, string_of
from sgl.time_limit import check_size

FEW_KEYS: Final = 64
"""A key pattern of at most this many keys becomes declared keys."""
MOST_CELLS: Final = 64
"""The most sets of undeclared keys that an object's patterns tell apart."""
_SPLIT_WORK: Final = 4000
"""The work of splitting a language of keys by a pattern, in units of `Formulas.work`."""


@dataclass(frozen=True, slots=True, eq=False)
class KeywordGroup:
    """One schema's keywords about values by key: by name, by pattern (all that match apply), and for the rest."""

    names: Mapping[str, Formula] = field(default_factory=dict)
    patterns: tuple[tuple[Expr, Formula], ...] = ()
    rest: Formula = TRUE
    is_declaring: bool = False
    """Whether `properties` wrote the names, which may be none."""
    is_about_others: bool = False
    """Whether the schema says anything of other keys, if only that they are allowed."""

    def under(self, name: str, formulas: Formulas) -> Formula:
        """What the value of a key must be."""
        own = self.names.get(name)
        if not self.patterns:
            return self.rest if own is None else own
        found = [] if own is None else [own]
        body = string_body(name)
        found += [value for key, value in self.patterns if matches(key, body)]
        return formulas.both(*found) if found else self.rest


class Keys(NamedTuple):
    """The keys whose canonical texts are in a language, without those of `but`."""

    language: Expr = CANONICAL_BODY
    but: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        """Whether it contains a key."""
        return name not in self.but and (
            self.language is CANONICAL_BODY or matches(self.language, string_body(name))
        )

    def texts(self) -> Expr:
        """Their language."""
        return difference(self.language, words(map(string_body, self.but))) if self.but else self.language


@dataclass(frozen=True, eq=False)
class ObjectConjunct(Conjunct):
    """Objects that satisfy all blocks, have the required keys, `low` to `high` keys in all, and for each of `exists` a
    matching key with a matching value."""

    blocks: tuple[KeywordGroup, ...] = ()
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    exists: tuple[tuple[Keys, Formula], ...] = ()
    evaluated: Expr = EMPTY
    """The language of the evaluated keys, for unevaluatedProperties."""

    def demands(self) -> frozenset[object]:
        return frozenset((*self.blocks, *self.required, *self.exists))

    def is_void(self) -> bool:
        return self.high is not None and max(self.low, len(self.required)) > self.high

    def under(self, name: str, formulas: Formulas) -> Formula:
        """What the value of a key must be."""
        return formulas.both(*[block.under(name, formulas) for block in self.blocks])

    def needed(self, formulas: Formulas, sides: tuple[ObjectConjunct, ...] = ()) -> Iterator[Formula]:
        names = list(self.required)
        for side in sides:
            named = side.named
            if named is not None:  # keys that a side only requires are constrained by others
                names = [name for name in names if name in named or name not in side.required]
        formulas.work(len(self.blocks) * len(names))
        return (self.under(name, formulas) for name in names)

    @property
    def is_about_declared(self) -> bool:
        """Whether keys are declared, if only none at all, and nothing is said of others."""
        if any(block.is_about_others or block.patterns or block.rest is not TRUE for block in self.blocks):
            return False
        declaring = [block.names for block in self.blocks if block.is_declaring]
        has_all = set(chain(*declaring)).issuperset(self.required)
        return bool(declaring) and has_all and self.low <= len(self.required)

    @cached_property
    def named(self) -> frozenset[str] | None:
        """The constrained keys; None if undeclared ones are constrained as well."""
        if any(block.patterns or block.rest is not TRUE for block in self.blocks):
            return None
        return frozenset(chain(*[block.names for block in self.blocks]))

    def join(self, other: ObjectConjunct, formulas: Formulas) -> ObjectConjunct | None:
        required = dict.fromkeys((*self.required, *other.required))
        blocks = dict.fromkeys((*self.blocks, *other.blocks))
        exists = dict.fromkeys((*self.exists, *other.exists))
        for keys, value in list(exists):
            names = _closed_names(blocks)
            if names is None:
                break
            # Only a key of the closed block can meet the demand.
            able = [name for name in names if keys.has(name) and not _clash(blocks, name, value, formulas)]
            if not able:
                return None
            if len(able) == 1:
                del exists[keys, value]
                required[able[0]] = None
                if value is not TRUE:
                    blocks[_one_key(able[0], value, formulas)] = None
        return ObjectConjunct(
            tuple(blocks),
            tuple(required),
            max(self.low, other.low),
            lower_of(self.high, other.high),
            tuple(exists),
            union(self.evaluated, other.evaluated),
        )

    def outside(self, formulas: Formulas) -> tuple[ObjectConjunct, ...]:
        result: list[ObjectConjunct] = []
        absent = dict.fromkeys(self.required)
        for block in self.blocks:
            for violation in _violations(block, formulas):
                (name,) = violation.required or (None,)
                if name in absent:  # a missing key is a violation too
                    del absent[name]
                    violation = replace(violation, required=())
                result.append(violation)
        result.extend(ObjectConjunct((_one_key(name, FALSE, formulas),)) for name in absent)
        if self.low > 0:
            result.append(ObjectConjunct(high=self.low - 1))
        if self.high is not None:
            result.append(ObjectConjunct(low=self.high + 1))
        for key, value in self.exists:
            result.append(ObjectConjunct((KeywordGroup(patterns=((key.texts(), formulas.negate(value)),)),)))
        return tuple(result)

    def with_unevaluated(self, formulas: Formulas, unevaluated: Formula) -> ObjectConjunct:
        if self.evaluated is CANONICAL_BODY:
            return self
        block = KeywordGroup({}, ((self.evaluated, TRUE),), unevaluated, is_about_others=True)
        return replace(self, blocks=(*self.blocks, block), evaluated=CANONICAL_BODY)

    def not_looked_at(self) -> ObjectConjunct:
        return replace(self, evaluated=EMPTY)


ANY_OBJECT: Final = ObjectConjunct()


def _closed_names(blocks: Iterable[KeywordGroup]) -> list[str] | None:
    """The only possible keys, if a block without patterns allows no others."""
    closed = [block for block in blocks if block.rest is FALSE and not block.patterns]
    if not closed:
        return None
    least = min(closed, key=lambda block: len(block.names))
    return [name for name, value in least.names.items() if value is not FALSE]


def _clash(blocks: Iterable[KeywordGroup], name: str, value: Formula, formulas: Formulas) -> bool:
    return formulas.both(value, *[block.under(name, formulas) for block in blocks]) is FALSE


def _one_key(name: str, value: Formula, formulas: Formulas) -> KeywordGroup:
    """The block about one key: the same object each time, so that conjuncts can be compared."""
    key = (name, value)
    found = formulas.blocks.get(key)
    if found is None:
        found = formulas.blocks[key] = KeywordGroup({name: value})
    assert isinstance(found, KeywordGroup)
    return found


def _violations(block: KeywordGroup, formulas: Formulas) -> Iterator[ObjectConjunct]:
    """The objects that violate a block: one key with a wrong value is enough."""
    for name in block.names:
        wrong = formulas.negate(block.under(name, formulas))
        if wrong is not FALSE:
            yield ObjectConjunct(() if wrong is TRUE else (_one_key(name, wrong, formulas),), required=(name,))
    for key, value in block.patterns:
        wrong = formulas.negate(value)
        if wrong is not FALSE:
            yield ObjectConjunct(exists=((Keys(key), wrong),))
    wrong = formulas.negate(block.rest)
    if wrong is not FALSE:
        others = CANONICAL_BODY
        if block.patterns:
            others = difference(others, union(*[key for key, _ in block.patterns]))
        yield ObjectConjunct(exists=((Keys(others, frozenset(block.names)), wrong),))


def _without(names: list[str], keys: Expr) -> Expr:
    bodies = [body for body in map(string_body, names) if keys is CANONICAL_BODY or matches(keys, body)]
    return difference(keys, words(bodies)) if bodies else keys


def resolve(
    conjunct: ObjectConjunct, formulas: Formulas, schema_of: Callable[[Formula], Schema]
) -> Iterator[Object]:
    """The shapes of a conjunct: one, unless several declared keys or patterns can meet an existence demand. Some may
    turn out to have no values."""
    names: dict[str, Formula] = {}
    for block in conjunct.blocks:
        for name in block.names:
            if name not in names:
                names[name] = conjunct.under(name, formulas)
    demanded_keys = [few_words(keys.texts(), FEW_KEYS) or [] for keys, _ in conjunct.exists]
    for name in (*conjunct.required, *map(string_of, chain(*demanded_keys))):
        if name not in names:
            names[name] = conjunct.under(name, formulas)
    cells = _cells(conjunct, list(names), formulas)
    required = frozenset(conjunct.required)
    if any(names[name] is FALSE for name in required):
        return
    for cell in list(cells):
        few = few_words(cell[0], FEW_KEYS) if cell[1] is not TRUE or conjunct.low else None
        if few is not None:
            cells.remove(cell)
            names.update((string_of(body), cell[1]) for body in few)
    ways = [_ways_to_exist(names, cells, key, value, formulas) for key, value in conjunct.exists]
    if prod(map(len, ways)) > CASES_LIMIT:
        raise too_many_conjuncts()
    patterns = tuple(KeyPattern(key, schema_of(value)) for key, value in cells)
    for choice in product(*ways):
        formulas.work(len(names))
        chosen = dict(names)
        demanded = set(required)
        exists: dict[tuple[Expr, Formula], None] = {}
        for place, value in choice:
            if isinstance(place, str):
                chosen[place] = formulas.both(chosen[place], value)
                demanded.add(place)
            else:
                exists[place, value] = None
        properties = tuple((name, schema_of(value)) for name, value in chosen.items())
        for together in _joint(list(exists), formulas):
            demands = tuple(KeyPattern(key, schema_of(value)) for key, value in together)
            yield Object(
                properties,
                frozenset(demanded),
                patterns,
                conjunct.low,
                conjunct.high,
                demands,
                conjunct.is_about_declared,
            )


def _joint(demands: list[tuple[Expr, Formula]], formulas: Formulas) -> Iterator[tuple[tuple[Expr, Formula], ...]]:
    """The ways to meet existence demands by different keys, or by one key for several."""
    if not demands:
        yield ()
        return
    (key, value), *rest = demands
    for others in _joint(rest, formulas):
        yield ((key, value), *others)
        for i, (other_key, other_value) in enumerate(others):
            both_keys, both = intersect(key, other_key), formulas.both(value, other_value)
            if both is not FALSE and not is_empty(both_keys):
                yield (*others[:i], (both_keys, both), *others[i + 1 :])


def _cells(conjunct: ObjectConjunct, names: list[str], formulas: Formulas) -> list[tuple[Expr, Formula]]:
    """The undeclared keys in disjoint languages, each with the formula of its values."""
    patterns = list(dict.fromkeys(key for block in conjunct.blocks for key, _ in block.patterns))
    parts: list[tuple[Expr, frozenset[Expr]]] = [(CANONICAL_BODY, frozenset())]
    for pattern in patterns:
        split: list[tuple[Expr, frozenset[Expr]]] = []
        for keys, inside in parts:
            formulas.work(_SPLIT_WORK)
            both, rest = intersect(keys, pattern), difference(keys, pattern)
            if not is_empty(both):
                split.append((both, inside | {pattern}))
            if not is_empty(rest):
                split.append((rest, inside))
        parts = split
        check_size(len(parts), MOST_CELLS, "patternProperties overlap in more than {} ways")
    cells: dict[Formula, list[Expr]] = {}
    for keys, inside in parts:
        found = []
        for block in conjunct.blocks:
            applying = [value for key, value in block.patterns if key in inside]
            found += applying or [block.rest]
        value = formulas.both(*found) if found else TRUE
        if value is FALSE:
            continue
        keys = _without(names, keys)
        if not is_empty(keys):
            cells.setdefault(value, []).append(keys)
    return [(union(*keys), value) for value, keys in cells.items()]


def _ways_to_exist(
    names: dict[str, Formula],
    cells: list[tuple[Expr, Formula]],
    keys: Keys,
    value: Formula,
    formulas: Formulas,
) -> list[tuple[str | Expr, Formula]]:
    """The declared keys and the languages of undeclared keys that can meet an existence demand."""
    ways: list[tuple[str | Expr, Formula]] = []
    for name, own in names.items():
        if keys.has(name) and formulas.both(own, value) is not FALSE:
            ways.append((name, value))
    for texts, own in cells:
        both = formulas.both(own, value)
        if both is not FALSE:
            shared = intersect(texts, keys.texts())
            if not is_empty(shared):
                ways.append((shared, both))
    return ways


def few_words(expr: Expr, limit: int) -> list[bytes] | None:
    """The strings of a language if it has at most `limit`, all short; else None."""
    found: list[bytes] = []
    stack = [(expr, b"")]
    steps = 0
    while stack:
        here, text = stack.pop()
        steps += 1
        if steps > 16 * limit or len(text) > limit:
            return None
        if here.nullable:
            found.append(text)
            if len(found) > limit:
                return None
        arcs = here.arcs()
        if any(mask.bit_count() > limit for mask, _ in arcs):
            return None
        stack.extend((target, text + bytes((byte,))) for mask, target in arcs for byte in bytes_of(mask))
    return found
