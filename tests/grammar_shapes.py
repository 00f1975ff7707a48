"""Random shapes of JSON values, random values for them, and a slow judge of which value a shape admits.

The judge reads the shapes' fields as `sgl/grammar/shape.py` documents them; it knows no automaton.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from sgl.grammar.regular.charset import EVERY_CHAR, json_text
from sgl.grammar.regular.expr import Expr, difference, literal, matches, union, words
from sgl.grammar.regular.regex import compile_regex
from sgl.grammar.shape import Array, Contains, CountedString, KeyPattern, Object, Shape, Text
from sgl.grammar.text.json import CANONICAL_BODY, JSON_INTEGER, JSON_NUMBER, JSON_STRING, string_body

KEYS = ["a", "ab", "b", "name", 'q"', "ключ"]
CHARS = {"any": EVERY_CHAR, "a-d": ((0x61, 0x64),), "wide": ((0x61, 0x62), (0x434, 0x436), (0x1F600, 0x1F601))}


@dataclass(eq=False)
class FixedSchema:
    """A schema whose alternatives are given, or set later: recursion."""

    shapes: tuple[Shape, ...] = ()
    samples: list[Any] = field(default_factory=list)
    """Some values that it may have, to make documents of."""

    def alternatives(self) -> tuple[Shape, ...]:
        return self.shapes


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def admits(schema: FixedSchema, value: Any, *, in_order: bool) -> bool:
    """Whether the canonical text of `value` is one of the schema's."""
    return any(_shape_admits(shape, value, in_order) for shape in schema.shapes)


def _shape_admits(shape: Shape, value: Any, in_order: bool) -> bool:
    match shape:
        case Text(expr):
            return not isinstance(value, dict | list) and matches(expr, dumps(value).encode())
        case CountedString(char, low, high):
            if not isinstance(value, str) or not low <= len(value) <= (len(value) if high is None else high):
                return False
            return all(matches(char, string_body(one)) for one in value)
        case Object():
            return isinstance(value, dict) and _object_admits(shape, value, in_order)
        case Array():
            return isinstance(value, list) and _array_admits(shape, value, in_order)


def _object_admits(shape: Object, value: dict[str, Any], in_order: bool) -> bool:
    declared = dict(shape.properties)
    if not shape.required <= value.keys() or len(value) < shape.min_properties:
        return False
    if shape.max_properties is not None and len(value) > shape.max_properties:
        return False
    for key, item in value.items():
        if key in declared:
            if not admits(declared[key], item, in_order=in_order):
                return False
        elif not any(
            matches(p.key, string_body(key)) and admits(p.value, item, in_order=in_order) for p in shape.patterns
        ):
            return False
    others = {key: item for key, item in value.items() if key not in declared}
    if not all(
        any(matches(e.key, string_body(k)) and admits(e.value, v, in_order=in_order) for k, v in others.items())
        for e in shape.exists
    ):
        return False
    places = [list(declared).index(key) if key in declared else len(declared) for key in value]
    return not in_order or places == sorted(places)


def _array_admits(shape: Array, value: list[Any], in_order: bool) -> bool:
    if len(value) < shape.min_items or (shape.max_items is not None and len(value) > shape.max_items):
        return False
    if shape.distinct is not None:
        kinds = [
            [i for i, one in enumerate(shape.distinct) if admits(one, item, in_order=in_order)] for item in value
        ]
        return all(kinds) and len({kind[0] for kind in kinds}) == len(kinds)
    if shape.contains is not None:
        return _contains_admits(shape.contains, value, in_order)
    for i, item in enumerate(value):
        schema = shape.prefix[i] if i < len(shape.prefix) else shape.items
        if schema is None or not admits(schema, item, in_order=in_order):
            return False
    return True


def _contains_admits(contains: Contains, value: list[Any], in_order: bool) -> bool:
    counts = {0}  # of matching items, in every way of sharing the items out
    for i, item in enumerate(value):
        place = min(i, len(contains.matching) - 1)
        matching, other = contains.matching[place], contains.other[place]
        following = set()
        if matching is not None and admits(matching, item, in_order=in_order):
            following |= {count + 1 for count in counts}
        if other is not None and admits(other, item, in_order=in_order):
            following |= counts
        counts = following
    top = len(value) if contains.max_count is None else contains.max_count
    return any(contains.min_count <= count <= top for count in counts)


_TEXTS: list[tuple[Expr, list[Any]]] = [
    (literal(b"null"), [None]),
    (words([b"true", b"false"]), [True, False]),
    (JSON_INTEGER, [0, 7, -12, 300]),
    (JSON_NUMBER, [0, 1.5, -2e-7, 12]),
    (JSON_STRING, ["", "x", "ä€😀", 'a"b\\c\n', "}]"]),
    (words([b'"red"', b'"reddish"', b'"green"', b"1", b"12"]), ["red", "reddish", "green", 1, 12]),
    (union(JSON_INTEGER, words([b'"7"', b"null"])), [7, "7", None]),
]


def random_schema(rng: random.Random, depth: int = 3) -> FixedSchema:
    """A random schema that has values. May be recursive."""
    schema = FixedSchema()
    _fill(schema, rng, depth, [])
    return schema


def _fill(schema: FixedSchema, rng: random.Random, depth: int, outer: list[FixedSchema]) -> None:
    shapes: list[Shape] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind = rng.random()
        if depth == 0 or kind < 0.3 or (kind < 0.5 and len(shapes) > 1):
            expr, samples = rng.choice(_TEXTS)
            shapes.append(Text(expr))
            schema.samples += samples
        elif kind < 0.45:
            shapes.append(_counted(schema, rng))
        elif kind < 0.8:
            shapes.append(_object(schema, rng, depth, outer))
        else:
            shapes.append(_array(schema, rng, depth, outer))
    schema.shapes = tuple(shapes)


def _counted(schema: FixedSchema, rng: random.Random) -> CountedString:
    low = rng.choice([0, 0, 1, 3, 20])
    high = rng.choice([None, low, low + 2, low + 30])
    name = rng.choice(list(CHARS))
    some = {"any": 'xé"\n😀', "a-d": "abcd", "wide": "aде😀"}[name]
    top = low + 4 if high is None else high
    for length in {low, top, max(low - 1, 0), top + 1, (low + top) // 2}:
        schema.samples.append("".join(rng.choice(some) for _ in range(length)))
    return CountedString(json_text(CHARS[name]), low, high)


def _child(rng: random.Random, depth: int, outer: list[FixedSchema]) -> FixedSchema:
    child = FixedSchema()
    _fill(child, rng, depth - 1, outer)
    return child


def _object(schema: FixedSchema, rng: random.Random, depth: int, outer: list[FixedSchema]) -> Object:
    above = [*outer, schema]
    names = rng.sample(KEYS, rng.randint(0, 4))
    required = {name for name in names if rng.random() < 0.5}
    properties = []
    for name in names:
        recursive = name not in required and rng.random() < 0.25
        properties.append((name, rng.choice(above) if recursive else _child(rng, depth, above)))
    patterns: list[KeyPattern] = []
    free = difference(CANONICAL_BODY, words(string_body(name) for name in names))
    if rng.random() < 0.5:
        if rng.random() < 0.5:
            starts_with_x = compile_regex("^x[0-9]*$", json=True)
            patterns.append(KeyPattern(difference(starts_with_x, words([])), _child(rng, depth, above)))
            free = difference(free, starts_with_x)
        if rng.random() < 0.7 or not patterns:
            patterns.append(KeyPattern(free, _child(rng, depth, above)))
    exists: tuple[KeyPattern, ...] = ()
    if patterns and rng.random() < 0.2:
        exists = (KeyPattern(patterns[0].key, patterns[0].value),)
    most = len(names) + (30 if patterns else 0)
    if any(value in above for _, value in properties):
        most = len(required)  # no schema may need itself
    least = rng.choice([0, 0, 0, min(most, len(required) + 1), min(most, 2)])
    maximum = rng.choice([None, None, max(least, len(required) + len(exists)) + rng.randint(0, 3)])
    for _ in range(4):
        keys = [name for name in names if name in required or rng.random() < 0.6]
        keys += [key for key in ["x", "x1", "zz", "name"] if patterns and key not in names and rng.random() < 0.4]
        schemas = {p.key: p.value for p in patterns}
        value = {}
        for key in keys:
            found = dict(properties).get(key) or next(
                (v for k, v in schemas.items() if matches(k, string_body(key))), None
            )
            value[key] = rng.choice(found.samples) if found and found.samples else 0
        schema.samples.append(value)
    return Object(tuple(properties), frozenset(required), tuple(patterns), least, maximum, exists)


def _array(schema: FixedSchema, rng: random.Random, depth: int, outer: list[FixedSchema]) -> Array:
    above = [*outer, schema]
    kind = rng.random()
    if kind < 0.15:
        distinct = tuple(FixedSchema((Text(literal(text)),)) for text in (b"1", b'"1"', b"null", b'"one"'))
        low = rng.randint(0, 3)
        schema.samples += [[1, "1"], [1, 1], [], ["one", None, 1], ["one", "1", None, 1]]
        return Array(min_items=low, max_items=rng.randint(max(low, 1), 4), distinct=distinct)
    if kind < 0.35:
        matching, other = FixedSchema((Text(JSON_INTEGER),)), FixedSchema((Text(JSON_STRING),))
        low = rng.randint(0, 3)
        contains = Contains((matching,), (other,), low, rng.choice([None, low + 1, low]))
        schema.samples += [[1, "a", 2], ["a", "b"], [1, 2, 3, 4], [], [1], ["", 1, "", 2, 3]]
        return Array(items=None, contains=contains, min_items=rng.choice([0, 2]))
    prefix = tuple(_child(rng, depth, above) for _ in range(rng.choice([0, 0, 1, 2])))
    may_recur = rng.random() < 0.2 and not prefix
    items = (
        rng.choice(above) if may_recur else _child(rng, depth, above) if rng.random() < 0.9 or not prefix else None
    )
    low = 0 if may_recur else rng.choice([0, 0, 1, 2, 14])
    if items is None:
        low = min(low, len(prefix))
    high = None if items is not None else len(prefix)
    if items is not None and rng.random() < 0.5:
        high = max(low, len(prefix), 1) + rng.choice([0, 2, 13])
    for length in {low, low + 1, (high or low) + 1, high or 3, 0}:
        value = []
        for i in range(length):
            child = prefix[i] if i < len(prefix) else items
            value.append(rng.choice(child.samples) if child is not None and child.samples else 0)
        schema.samples.append(value)
    return Array(prefix, items, low, high)


def random_values(schema: FixedSchema, rng: random.Random, number: int) -> list[Any]:
    """Values that the schema admits, nearly admits, or does not admit at all."""
    found = []
    for _ in range(number):
        value = rng.choice(schema.samples) if schema.samples else None
        if rng.random() < 0.4:
            value = _changed(value, rng)
        found.append(value)
    return found


def _changed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        items = list(value.items())
        which = rng.randrange(len(items))
        if rng.random() < 0.4:
            del items[which]
        elif rng.random() < 0.5:
            items[which] = (items[which][0], _changed(items[which][1], rng))
        else:
            rng.shuffle(items)
        return dict(items)
    if isinstance(value, list) and value and rng.random() < 0.9:
        which = rng.randrange(len(value))
        return [*value[:which], _changed(value[which], rng), *value[which + 1 :]]
    if isinstance(value, str) and rng.random() < 0.5:
        return value[1:] + rng.choice(["", "a", "\t"])
    return rng.choice([None, 0, 3, -1.5, "", "red", [], {}, [1], {"a": 1}, True])
