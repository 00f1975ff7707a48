"""The automaton offers exactly the texts of the shapes it was given, and every prefix of one can be completed."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl.errors import GrammarTooLarge
from sgl.grammar import Matcher, Vocabulary
from sgl.grammar.automaton.nfa import Builder, KeyOrder
from sgl.grammar.automaton.pushdown import Automaton
from sgl.grammar.automaton.tables import DEAD, UNKNOWN, Tables
from sgl.grammar.automaton.values import value_node
from sgl.grammar.compiler import compile as compile_grammar
from sgl.grammar.regular.charset import EVERY_CHAR, json_text
from sgl.grammar.regular.expr import literal, union
from sgl.grammar.regular.regex import compile_regex
from sgl.grammar.shape import Array, CountedString, KeyPattern, Object, Text
from sgl.grammar.text.json import JSON_INTEGER, JSON_STRING, WHITESPACE
from tests.grammar_oracles import piece_vocabulary, shape_matcher
from tests.grammar_shapes import FixedSchema, admits, dumps, random_schema, random_values

VOCABULARY = piece_vocabulary()
SEEDS = st.integers(0, 1 << 32)
ORDERS: st.SearchStrategy[KeyOrder] = st.sampled_from(["schema", "any"])


def accepts(matcher: Matcher, text: str) -> bool:
    cursor = matcher.copy()
    return cursor.accept_bytes(text.encode()) and cursor.is_accepting()


@given(SEEDS, ORDERS)
def test_exactly_the_values_of_the_shapes_are_accepted(seed: int, order: KeyOrder) -> None:
    rng = random.Random(seed)
    schema = random_schema(rng)
    matcher = shape_matcher(schema, VOCABULARY, order)
    for value in random_values(schema, rng, 12):
        text = dumps(value)
        assert accepts(matcher, text) == admits(schema, value, in_order=order == "schema"), text


def test_of_ends_that_are_as_short_the_same_is_found_every_time() -> None:
    """Masks near the end of a budget hang on it, and the same seed is to give the same text in every process."""
    number = {"type": "number"}
    ways = [{"properties": {"x": number, key: number}, "required": ["x", key]} for key in "hgfedcba"]
    schema = {"anyOf": [{"type": "object", "additionalProperties": False, **way} for way in ways]}
    for _ in range(20):
        matcher = compile_grammar(json_schema=schema, vocabulary=VOCABULARY).matcher()
        assert matcher.accept_bytes(b'{"x":1')
        assert matcher.shortest_end() == b',"a":0}'


@given(SEEDS, ORDERS, st.sampled_from(["compact", "flexible"]))
@example(7, "any", "compact")
def test_every_prefix_can_be_completed_and_consistently(seed: int, order: KeyOrder, whitespace: str) -> None:
    rng = random.Random(seed)
    cursor = shape_matcher(random_schema(rng), VOCABULARY, order, whitespace)
    for _ in range(25):
        end = cursor.shortest_end()
        done = cursor.copy()
        assert done.accept_bytes(end), (end, "is no way to the end")
        assert done.is_accepting()
        if end:
            part = cursor.copy()
            cut = rng.randint(1, len(end))
            assert part.accept_bytes(end[:cut])
            assert len(part.shortest_end()) <= len(end) - cut
        live = [byte for byte in range(256) if cursor.copy().accept_bytes(bytes([byte]))]
        assert bool(live) or cursor.is_accepting()
        if not live:
            break
        weights = [6 if byte in b'"}],:' else 1 for byte in live]
        cursor.accept_bytes(bytes(rng.choices(live, weights)))


def test_a_union_of_objects_is_decided_by_their_ends() -> None:
    one = FixedSchema((Text(JSON_INTEGER),))
    word = FixedSchema((Text(JSON_STRING),))
    inner_a = FixedSchema((Object((("k", one),), frozenset(["k"])),))
    inner_b = FixedSchema((Object((("k", word),), frozenset(["k"])),))
    schema = FixedSchema(
        (
            Object((("x", inner_a), ("y", one)), frozenset(["x", "y"])),
            Object((("x", inner_b), ("z", one)), frozenset(["x", "z"])),
        )
    )
    matcher = shape_matcher(schema, VOCABULARY)
    assert accepts(matcher, '{"x":{"k":1},"y":2}')
    assert accepts(matcher, '{"x":{"k":"1"},"z":2}')
    assert not accepts(matcher, '{"x":{"k":1},"z":2}')
    assert not accepts(matcher, '{"x":{"k":"1"},"y":2}')


@pytest.mark.parametrize("limit", [200, 100_000])
def test_bounds_of_any_size_take_the_same_states(limit: int) -> None:
    char = json_text(EVERY_CHAR)
    texts = FixedSchema((CountedString(char, limit - 1, limit),))
    matcher = shape_matcher(texts, VOCABULARY)
    for length in range(limit - 2, limit + 2):
        assert accepts(matcher, '"' + "ä" * length + '"') == (length in (limit - 1, limit))
    many = shape_matcher(
        FixedSchema((Array(items=FixedSchema((Text(literal(b"1")),)), max_items=limit),)), VOCABULARY
    )
    assert accepts(many, "[" + "1," * (limit - 1) + "1]")
    assert not accepts(many, "[" + "1," * limit + "1]")
    assert len(matcher._automaton) < 60
    assert len(many._automaton) < 20


def test_deep_nesting_needs_no_more_states() -> None:
    schema = FixedSchema()
    schema.shapes = (Array(items=schema), Text(literal(b"1")))
    matcher = shape_matcher(schema, VOCABULARY)
    assert accepts(matcher, "[" * 20_000 + "1" + "]" * 20_000)
    assert not accepts(matcher, "[" * 3 + "]" * 2)


def test_keys_that_come_twice_count_once() -> None:
    any_key = KeyPattern(compile_regex("", json=True), FixedSchema((Text(JSON_INTEGER),)))
    schema = FixedSchema((Object(patterns=(any_key,), min_properties=2),))
    matcher = shape_matcher(schema, VOCABULARY)
    assert accepts(matcher, '{"a":1,"b":2}')
    assert not accepts(matcher, '{"a":1,"a":2}')
    assert accepts(matcher, '{"a":1,"b":2,"a":3}')


def test_too_many_states_are_an_error() -> None:
    builder = Builder(WHITESPACE["compact"], "schema")
    expr = compile_regex("(a|b)*a(a|b){14}", dialect="python", search=False)
    automaton = Automaton(builder, builder.after(expr, builder.end), max_states=500)

    def walk() -> None:
        rng, state = random.Random(0), automaton.start
        for _ in range(20_000):
            automaton.expand(state)
            state = automaton.tables.entries[state, automaton.tables.class_of[rng.choice(b"ab")]]

    with pytest.raises(GrammarTooLarge) as caught:
        walk()
    assert caught.value.limit == 500


@given(SEEDS)
def test_classes_of_bytes_say_what_single_bytes_would(seed: int) -> None:
    """Rows filled early must still be right once later rows divide their classes."""
    rng = random.Random(seed)
    builder = Builder(WHITESPACE["flexible"], "any")
    schema = random_schema(rng)
    automaton = Automaton(builder, value_node(builder, schema, builder.end))
    rows: dict[int, list[int]] = {}
    tables = automaton.tables
    for state in range(60):
        if state == len(automaton):
            break
        if tables.guards[state, 0] >= 0:
            assert tables.entries[state, 0] == UNKNOWN
            continue
        automaton.expand(state)
        rows[state] = tables.entries[state, tables.classes].tolist()
    for state, row in rows.items():
        assert tables.entries[state, tables.classes].tolist() == row
        assert all(entry >= DEAD for entry in row)
    assert tables.nbytes <= tables.num_states * (tables.num_classes * 4 + 26) + tables.returns.nbytes + 256


def test_members_of_a_choice_of_scalars_share_their_states() -> None:
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)], [])
    schema = FixedSchema((Text(union(literal(b'"red"'), literal(b'"rest"'))),))
    matcher = shape_matcher(schema, vocabulary)
    assert matcher.forced_bytes() == b'"re'


@given(st.lists(st.dictionaries(st.integers(0, 9), st.integers(0, 3)), max_size=30))
def test_rows_are_kept_by_as_few_classes_as_can_be(rows: list[dict[int, int]]) -> None:
    tables = Tables()
    for cells in rows:
        by_entry: dict[int, int] = {}
        for byte, entry in cells.items():
            by_entry[entry] = by_entry.get(entry, 0) | 1 << byte
        tables.set_row(tables.add_state(accepting=False), by_entry)
    columns = {tuple(cells.get(byte, DEAD) for cells in rows) for byte in range(256)}
    assert tables.num_classes == len(columns)
    assert bytes(tables.class_of) == tables.classes.tobytes()
    for state, cells in enumerate(rows):
        found = tables.entries[state, tables.classes].tolist()
        assert found == [cells.get(byte, DEAD) for byte in range(256)]
