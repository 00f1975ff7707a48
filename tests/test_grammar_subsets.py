"""The compiled subset construction makes the automaton that the reference makes, but for the states' numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl.errors import GrammarTooLarge
from sgl.grammar import compiler
from sgl.grammar.automaton import subsets
from sgl.grammar.automaton.nfa import Builder, KeyOrder, Node
from sgl.grammar.automaton.pushdown import OPEN_BRACE, Automaton
from sgl.grammar.automaton.shortest_end import ShortestEnds
from sgl.grammar.automaton.subsets import Subsets
from sgl.grammar.automaton.subsets_reference import SubsetsReference
from sgl.grammar.automaton.tables import (
    AT,
    BELOW,
    COUNTER,
    DEAD,
    LIMIT,
    POP_BIT,
    PUSH_BIT,
    TARGET_MASK,
    UNKNOWN,
)
from sgl.grammar.automaton.values import value_node
from sgl.grammar.regular.regex import compile_regex
from sgl.grammar.text.json import WHITESPACE
from tests.grammar_shapes import random_schema

pytestmark = pytest.mark.skipif(subsets.compiled() is None, reason="subsets.c cannot be compiled here")
MAX_PAIRS = 300
SCHEMAS: list[Any] = [
    True,
    {"type": "object", "properties": {f"key{i}": {"type": "integer"} for i in range(20)}, "required": ["key3"]},
    {"anyOf": [{"type": "string", "maxLength": high, "minLength": high // 3} for high in range(2, 40, 3)]},
    {"anyOf": [{"type": "array", "maxItems": high, "items": {"const": high}} for high in (15, 20, 200)]},
    {"type": "object", "additionalProperties": {"type": "string", "format": "date"}, "minProperties": 3},
    {"type": "array", "uniqueItems": True, "items": {"type": "string"}, "minItems": 2},
    {"enum": [*(f"word {i}" for i in range(100)), 1, None, {"a": [1, 2]}]},
    {"const": "long " * 40},
    {"type": "object", "patternProperties": {"^a+b?$": {"type": "null"}}, "additionalProperties": False},
    {"type": "array", "prefixItems": [{"pattern": "^é{2,5}$"}, {"pattern": "(ab|cd)*$"}], "contains": {"const": 5}},
    {"oneOf": [{"required": ["a"], "properties": {"a": {"const": 1}}}, {"required": ["b"]}]},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
]


def both(make: Callable[[], tuple[Builder, Node]]) -> tuple[Automaton, Automaton]:
    """The automaton of a grammar, compiled and by the reference. They share what is interned, so nodes compare."""
    builder, start = make()
    fast = Automaton(builder, start)
    with patch.object(subsets, "compiled", lambda: None):
        slow = Automaton(builder, start)
    assert isinstance(fast.subsets, Subsets)
    assert isinstance(slow.subsets, SubsetsReference)
    return fast, slow


def check_equal(fast: Automaton, slow: Automaton, max_pairs: int = MAX_PAIRS) -> dict[int, int]:
    """Walk both side by side from the start, frames behind all that can be open; returns the pairs that were met."""
    paired: dict[int, int] = {}
    waiting: list[tuple[int, int]] = []
    symbols: dict[int, int] = {}
    results: dict[int, int] = {}

    def pair(one: int, other: int) -> None:
        if paired.setdefault(one, other) == other and (one, other) not in seen:
            seen.add((one, other))
            waiting.append((one, other))
        assert paired[one] == other, "a state has one counterpart"

    seen: set[tuple[int, int]] = set()
    pair(fast.start, slow.start)
    while waiting and len(seen) < max_pairs:
        one, other = waiting.pop()
        a, b = fast.tables, slow.tables
        assert a.accepting[one] == b.accepting[other]
        assert a.reads_unique[one] == b.reads_unique[other]
        assert fast.plain_limit(one) == slow.plain_limit(other)
        assert len(fast.members(one)) == len(slow.members(other))
        guard, like = a.guards[one].tolist(), b.guards[other].tolist()
        assert guard[LIMIT] == like[LIMIT]
        if guard[LIMIT] >= 0:
            assert guard[COUNTER] == like[COUNTER]
            pair(guard[BELOW], like[BELOW])
            pair(guard[AT], like[AT])
            continue
        fast.expand(one)
        slow.expand(other)
        steady, alike = fast.steady(one), slow.steady(other)
        assert (steady is None) == (alike is None)
        if steady is not None and alike is not None:
            assert steady[0] == alike[0]
        assert (fast.subsets.only_list(one) is None) == (slow.subsets.only_list(other) is None)
        for byte in range(256):
            entry = int(a.entries[one, a.classes[byte]])
            same = int(b.entries[other, b.classes[byte]])
            if entry == DEAD or same == DEAD:
                assert entry == same
                continue
            assert entry & ~TARGET_MASK == same & ~TARGET_MASK
            if entry & POP_BIT:
                results[entry & TARGET_MASK] = same & TARGET_MASK
                assert fast.results[entry & TARGET_MASK] == slow.results[same & TARGET_MASK]
                continue
            pair(entry & TARGET_MASK, same & TARGET_MASK)
            if entry & PUSH_BIT:
                column = 0 if byte == OPEN_BRACE else 1
                symbol, its = int(a.symbols[one, column]), int(b.symbols[other, column])
                assert fast.callers[symbol] == slow.callers[its]
                symbols[symbol] = its
        for symbol, its in symbols.items():
            for result, like_it in results.items():
                if max(fast.results[result]) < len(fast.callers[symbol]):
                    pair(fast.returned(symbol, result), slow.returned(its, like_it))
    return paired


@pytest.mark.slow
@given(st.integers(0, 1 << 32), st.sampled_from(["schema", "any"]), st.sampled_from(["compact", "flexible"]))
def test_shapes_become_the_same_automaton(seed: int, order: KeyOrder, whitespace: str) -> None:
    schema = random_schema(random.Random(seed))

    def make() -> tuple[Builder, Node]:
        builder = Builder(WHITESPACE[whitespace], order)
        return builder, value_node(builder, schema, builder.end)

    assert len(check_equal(*both(make))) > 1


@pytest.mark.costly
@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema)[:40])
def test_schemas_become_the_same_automaton(schema: Any, order: KeyOrder) -> None:
    constraint = compiler.Constraint("json_schema", "", "flexible", False, order)

    def make() -> tuple[Builder, Node]:
        builder = Builder(WHITESPACE["flexible"], order)
        return builder, compiler._start_node(builder, schema, constraint, [])

    assert len(check_equal(*both(make), max_pairs=1_000)) > 10


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a|b)*a(a|b){5}",
        r"[^\s\"]{3,9}é*(?:x|yz)+",
        r"\d{4}-\d\d(T.*)?",
        "(" + "|".join(f"{i}x" for i in range(50)) + ")",
    ],
)
def test_patterns_become_the_same_automaton(pattern: str) -> None:
    expr = compile_regex(pattern, dialect="python", search=False)

    def make() -> tuple[Builder, Node]:
        builder = Builder(WHITESPACE["compact"], "schema")
        return builder, builder.after(expr, builder.end)

    assert len(check_equal(*both(make))) > 3


def test_too_many_states_raise_again_and_again() -> None:
    builder = Builder(WHITESPACE["compact"], "schema")
    expr = compile_regex("(a|b)*a(a|b){14}", dialect="python", search=False)
    automaton = Automaton(builder, builder.after(expr, builder.end), max_states=500)
    state = 0
    while len(automaton) < 500:
        automaton.expand(state)
        state += 1
    for _ in range(2):
        with pytest.raises(GrammarTooLarge, match="more than 500 states") as caught:
            automaton.expand(499)
        assert caught.value.limit == 500
        assert automaton.tables.entries[499, 0] == UNKNOWN


@pytest.mark.costly
@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema)[:40])
def test_the_ends_of_states_are_the_same(schema: Any, order: KeyOrder) -> None:
    constraint = compiler.Constraint("json_schema", "", "flexible", False, order)

    def make() -> tuple[Builder, Node]:
        builder = Builder(WHITESPACE["flexible"], order)
        return builder, compiler._start_node(builder, schema, constraint, [])

    fast, slow = both(make)
    paired = check_equal(fast, slow, max_pairs=500)
    ones, others = (np.array(side, np.int32) for side in zip(*paired.items(), strict=True))
    mine, its = ShortestEnds(fast), ShortestEnds(slow)
    assert (mine.max_bytes_within(ones) == its.max_bytes_within(others)).all()
    for i in range(len(ones)):
        assert mine.max_bytes_from_any(ones[i : i + 1]) == its.max_bytes_from_any(others[i : i + 1])
