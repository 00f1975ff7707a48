"""Keys and items that may not come twice where it matters: no legal document is refused, and no other is accepted."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.json_generation import BYTES
from sgl.grammar import Matcher, compile
from sgl.grammar.automaton import shortest_end
from sgl.grammar.regular.expr import difference
from sgl.runtime.constraints.process import _finished
from tests.examples import few
from tests.grammar_oracles import accepted_one_by_one, likely, mask_of, piece_vocabulary
from tests.json_random import text_of

PIECES = piece_vocabulary()
KEYS = st.one_of(st.text(max_size=4), st.sampled_from(["a", "ab", "abc", 'a"', "a\\", 'a\\"', "é", ""]))
AT_LEAST_ONE_TEXT = {"not": {"additionalProperties": {"type": "integer"}}}


def matcher_of(schema: dict[str, Any], vocabulary: Any = BYTES, **options: Any) -> Matcher:
    return compile(json_schema=schema, vocabulary=vocabulary, **options).matcher()


def object_of(pairs: list[tuple[str, Any]]) -> bytes:
    return b"{" + b",".join(text_of(key) + b":" + text_of(value) for key, value in pairs) + b"}"


def accepts(matcher: Matcher, text: bytes) -> bool:
    cursor = matcher.copy()
    return all(cursor.accept(byte) for byte in text) and cursor.is_accepting()


@given(st.lists(KEYS, max_size=6), st.integers(0, 5), st.sampled_from(["schema", "any"]))
@example(["a"] * 3, 2, "any")
@example(["a", "ab", "a"], 3, "schema")
def test_different_keys_are_counted_and_no_other(keys: list[str], least: int, order: str) -> None:
    matcher = matcher_of({"type": "object", "minProperties": least}, key_order=order)
    is_told_apart = len(set(keys[:least])) == len(keys[:least])
    expected = is_told_apart and len(keys) >= least
    assert accepts(matcher, object_of([(key, 1) for key in keys])) == expected


def test_none_of_thousands_of_keys_is_refused() -> None:
    matcher = matcher_of({"type": "object", "minProperties": 3})
    for i in range(3000):
        keys = [f"k{i}", f"key {i * 7}", str(i)]
        assert accepts(matcher, object_of([(key, i) for key in keys])), keys


@given(st.lists(st.tuples(KEYS, st.sampled_from([1, "text"])), max_size=5))
def test_what_must_exist_is_not_undone_by_the_same_key(pairs: list[tuple[str, Any]]) -> None:
    matcher = matcher_of({"type": "object", **AT_LEAST_ONE_TEXT})
    keys = [key for key, _ in pairs]
    expected = len(set(keys)) == len(keys) and "text" in [value for _, value in pairs]
    assert accepts(matcher, object_of(pairs)) == expected


def test_a_key_is_not_begun_that_has_no_other_end_than_one_before_it() -> None:
    keys = {"^(foo|x.*|y[a-z]*|ba[rz][0-9]{2})$": {"type": "integer"}}
    schema = {"type": "object", "patternProperties": keys, "additionalProperties": False, "minProperties": 3}
    matcher = matcher_of(schema)
    assert matcher.accept_bytes(b'{"foo":1,"')
    assert not matcher.copy().accept(ord("f"))
    assert matcher.copy().accept(ord("x"))
    assert matcher.accept_bytes(b'x":1,"')
    assert matcher.copy().accept(ord("x"))
    assert not matcher.copy().accept_bytes(b'x"')


STRINGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


@given(st.lists(KEYS, max_size=6), st.integers(0, 4), st.sampled_from([None, 5, 20]))
@example(["a", "ab", "a"], 0, None)
def test_strings_of_a_list_are_told_apart(items: list[str], least: int, most: int | None) -> None:
    matcher = matcher_of({**STRINGS, "minItems": least, **({} if most is None else {"maxItems": most})})
    expected = len(set(items)) == len(items) and least <= len(items) <= (most or 99)
    assert accepts(matcher, text_of(items)) == expected


@given(st.lists(st.one_of(KEYS, st.integers(0, 3)), max_size=4))
def test_another_reading_of_a_list_may_hold_a_string_twice(items: list[Any]) -> None:
    """Whichever alternative it was that asked for different ones, the others go on."""
    matcher = matcher_of({"anyOf": [{**STRINGS, "minItems": 2}, {"type": "array", "maxItems": 3}]})
    is_unique = all(isinstance(item, str) for item in items) and len(set(items)) == len(items) >= 2
    assert accepts(matcher, text_of(items)) == (is_unique or len(items) <= 3)


@given(
    st.lists(st.text('ab"\\\n,', max_size=3), max_size=4), st.sampled_from(["", ",", ',"', ',"a']), st.booleans()
)
def test_masks_within_lists_of_different_strings(items: list[str], behind: str, has_other_reading: bool) -> None:
    schema: dict[str, Any] = {**STRINGS, "minItems": 2}
    if has_other_reading:
        schema = {"anyOf": [schema, {"type": "array", "maxItems": 3}]}
    matcher = matcher_of(schema, PIECES)
    if matcher.accept_bytes(text_of(items)[:-1] + behind.encode()):
        assert (mask_of(matcher, PIECES) == accepted_one_by_one(matcher, PIECES)).all()


def test_lists_end_where_no_string_is_left() -> None:
    schema = {**STRINGS, "items": {"type": "string", "pattern": "^[a-c]{4}$"}}
    matcher = matcher_of(schema)
    texts = ["".join(text) for text in product("abc", repeat=4)]
    assert accepts(matcher, text_of(texts))
    assert not matcher.copy().accept_bytes(text_of(texts)[:-1] + b",")
    assert matcher.accept_bytes(text_of(texts[:-1])[:-1] + b',"ccc')
    assert np.flatnonzero(mask_of(matcher, BYTES)).tolist() == [ord("c")]


def test_a_short_end_of_a_list_has_different_strings() -> None:
    matcher = matcher_of({**STRINGS, "minItems": 20})
    assert matcher.accept_bytes(b'["",')
    assert accepts(matcher, matcher.shortest_end())


SCHEMAS: list[dict[str, Any]] = [
    {"minProperties": 3, "additionalProperties": {"type": ["integer", "object"], "minProperties": 2}},
    {"properties": {"title": {"type": "integer"}}, "minProperties": 3},
    AT_LEAST_ONE_TEXT,
    {"minProperties": 1, "additionalProperties": {**STRINGS, "minItems": 3}},
    {"patternProperties": {"^(na.*|t|ti)$": {}}, "additionalProperties": False, "minProperties": 2},
]


@pytest.mark.costly
@pytest.mark.parametrize("schema", SCHEMAS)
@few
@given(seed=st.integers(0, 1 << 32))
def test_masks_are_what_is_accepted_token_by_token(schema: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    matcher = matcher_of({"type": "object", **schema}, PIECES, key_order=rng.choice(["schema", "any"]))
    for start in rng.choice([[], [b'{"na":1,"'], [b'{"na":1,"n'], [b'{"t":"x",'], [b'{"name":{"a":1,"na":2},"na']]):
        matcher.accept_bytes(start)
    for _ in range(12):
        mask = mask_of(matcher, PIECES)
        assert (mask == accepted_one_by_one(matcher, PIECES)).all()
        if not matcher.accept(likely(matcher, PIECES, mask, rng)) or matcher.is_finished():
            break


@pytest.mark.costly
@pytest.mark.parametrize(
    "schema", [SCHEMAS[0], SCHEMAS[4], *(pytest.param(its, marks=pytest.mark.slow) for its in SCHEMAS[1:4])]
)
@few
@given(seed=st.integers(0, 1 << 32))
def test_a_budget_brings_documents_to_their_end(schema: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    matcher = matcher_of({"type": "object", **schema}, PIECES)
    remaining = rng.randint(40, 80)
    while remaining and not matcher.is_finished():
        allowed = np.flatnonzero(mask_of(matcher, PIECES, remaining)).tolist()
        quoted = [token for token in allowed if b'"' in PIECES.token_bytes[token]]
        assert matcher.accept(rng.choice(quoted if quoted and rng.random() < 0.3 else allowed))
        remaining -= 1
    assert matcher.is_finished() or matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 40},
        {"type": "object", "minProperties": 40, "additionalProperties": {"type": "integer"}},
    ],
)
def test_texts_that_are_missing_are_searched_once_and_not_at_each_token(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher, rng, searches = matcher_of(schema, PIECES), random.Random(1), 0

    def counted(*arguments: Any) -> Any:
        nonlocal searches
        searches += 1
        return difference(*arguments)

    monkeypatch.setattr(shortest_end, "difference", counted)
    steps = 0
    for remaining in range(500, 0, -1):
        allowed = np.flatnonzero(mask_of(matcher, PIECES, remaining)).tolist()
        quoted = [token for token in allowed if b'"' in PIECES.token_bytes[token]]
        steps += matcher.accept(rng.choice(quoted if quoted and rng.random() < 0.3 else allowed))
        if matcher.is_accepting():
            break
    assert matcher.is_accepting()
    assert searches < 20 * steps, f"{searches} searches for {steps} tokens"


def test_such_automata_are_walked_where_notes_are_kept() -> None:
    for least, is_closed in ((1, True), (2, False)):
        schema = {"type": "object", "minProperties": least, "additionalProperties": {"type": "integer"}}
        assert (_finished(compile(json_schema=schema, vocabulary=BYTES), b"") is not None) == is_closed
