"""A mask is what trying every token by itself would say, wherever the text stands and whatever was cached before."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl import grammar
from sgl.grammar import Vocabulary
from sgl.grammar.automaton.finished import finish
from sgl.grammar.automaton.nfa import KeyOrder
from sgl.grammar.regular.charset import EVERY_CHAR, json_text
from sgl.grammar.shape import Array, CountedString
from tests.grammar_oracles import (
    accepted_one_by_one,
    likely,
    mask_of,
    piece_vocabulary,
    real_vocabulary,
    shape_matcher,
)
from tests.grammar_shapes import FixedSchema, random_schema
from tests.house import REPOSITORY
from tests.test_grammar_regex import patterns
from tests.tiny_tokenizers import WITH_TABLE

PIECES = piece_vocabulary()
TINY = {name: Vocabulary.from_tokenizer(make(), eos_ids=[1]) for name, make in WITH_TABLE.items()}
SEEDS = st.integers(0, 1 << 32)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "cat"]}, "maxItems": 20},
        "more": {},
    },
    "required": ["name", "age"],
}


def check_walk(matcher: grammar.Matcher, vocabulary: Vocabulary, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        mask = mask_of(matcher, vocabulary)
        expected = accepted_one_by_one(matcher, vocabulary)
        wrong = np.flatnonzero(mask != expected)
        assert not len(wrong), [(vocabulary.token_bytes[i], bool(mask[i])) for i in wrong[:8]]
        if not mask.any() or matcher.is_finished():
            break
        matcher.accept(likely(matcher, vocabulary, mask, rng))


@given(SEEDS, st.sampled_from(["schema", "any"]), st.sampled_from(["compact", "flexible"]))
def test_masks_of_random_shapes(seed: int, order: KeyOrder, whitespace: str) -> None:
    rng = random.Random(seed)
    start = shape_matcher(random_schema(rng), PIECES, order, whitespace)
    for _ in range(2):  # the second walk meets what the first left in the cache
        check_walk(start.copy(), PIECES, rng, 10)


@given(patterns(), SEEDS)
def test_masks_of_random_regexes(pattern: str, seed: int) -> None:
    check_walk(grammar.compile(regex=pattern, vocabulary=PIECES).matcher(), PIECES, random.Random(seed), 6)


NEARLY_ANY = st.lists(
    st.sampled_from([".", r"[\s\S]", r"[^\n]", "[^a]", "(a|[^a])", "[^ab{]", "a"]), min_size=1, max_size=4
)


@given(NEARLY_ANY, st.lists(st.sampled_from(["", "+", "*", "?", "{2,}"]), min_size=4, max_size=4), SEEDS)
def test_masks_of_nearly_any_text(parts: list[str], counts: list[str], seed: int) -> None:
    """Places that differ from where any text may follow in a few bytes, or only in whether the text may end."""
    pattern = "".join(part + count for part, count in zip(parts, counts, strict=False))
    check_walk(grammar.compile(regex=pattern, vocabulary=PIECES).matcher(), PIECES, random.Random(seed), 6)


@pytest.mark.parametrize("pattern", [".+", r"[\s\S]+", "[^\n]+", "(.|\n){1,}"])
def test_a_text_that_must_not_be_empty_is_not_ended_at_once(pattern: str) -> None:
    matcher = grammar.compile(regex=pattern, vocabulary=PIECES).matcher()
    assert not mask_of(matcher, PIECES)[list(PIECES.eos_ids)].any()
    assert matcher.accept_bytes(b"x")
    assert mask_of(matcher, PIECES)[list(PIECES.eos_ids)].all()


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("whitespace", ["compact", "flexible"])
def test_masks_of_a_schema_over_every_kind_of_tokenizer(name: str, whitespace: Any) -> None:
    compiled = grammar.compile(json_schema=SCHEMA, vocabulary=TINY[name], whitespace=whitespace)
    for seed in range(3):
        check_walk(compiled.matcher(), TINY[name], random.Random(seed), 25)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["embedded", "gpt2", "qwen2.5", "mistral-v3"])
def test_masks_of_real_vocabularies(request: pytest.FixtureRequest, name: str) -> None:
    if name == "embedded":
        folder = REPOSITORY / "sgl" / "models" / "embedded"
    else:
        folder = request.getfixturevalue("unpacked")("tokenizers") / name
    vocabulary = real_vocabulary(folder)
    compiled = grammar.compile(json_schema=SCHEMA, vocabulary=vocabulary, whitespace="flexible")
    for begun in (
        b"",
        b'{"name": "x',
        b'{"name": "Jo", "age": 1',
        b'{"name": "", "age": 15, "tags": ["ca',
        b'{"name":"","age":7,"more":[{"k":"',
    ):
        matcher = compiled.matcher()
        assert matcher.accept_bytes(begun)
        check_walk(matcher, vocabulary, random.Random(0), 1)
    check_walk(
        grammar.compile(regex="[a-z ]{3,60}é?", vocabulary=vocabulary).matcher(), vocabulary, random.Random(0), 1
    )


@pytest.mark.parametrize(("low", "high"), [(0, 3), (2, 70), (5, 5), (40, None), (0, 200)])
def test_masks_near_the_bounds_of_counted_strings(low: int, high: int | None) -> None:
    schema = FixedSchema((CountedString(json_text(EVERY_CHAR), low, high),))
    start = shape_matcher(schema, PIECES)
    for length in {
        0,
        1,
        low,
        max(low - 1, 0),
        max(low - 5, 0),
        (high or low) - 1,
        (high or low),
        (high or low) - 9,
    }:
        matcher = start.copy()
        if length >= 0 and matcher.accept_bytes(b'"' + b"x" * length):
            check_walk(matcher, PIECES, random.Random(length), 2)


@pytest.mark.parametrize("other", [{"pattern": "^[a-c]*$"}, {"const": "abcabcabc"}, {"maxLength": 5}])
def test_a_bound_on_a_string_does_not_bound_what_else_may_stand_there(other: dict[str, Any]) -> None:
    schema = {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "string", **other}]}
    vocabulary = Vocabulary([*PIECES.token_bytes, b"abca", b"bcabc", b'bcabcabc"'], PIECES.eos_ids)
    start = grammar.compile(json_schema=schema, vocabulary=vocabulary).matcher()
    for text in (b'"', b'"a', b'"ab', b'"abc', b'"abcab'):
        matcher = start.copy()
        if matcher.accept_bytes(text):
            check_walk(matcher, vocabulary, random.Random(0), 2)


def test_masks_near_the_bounds_of_counted_arrays() -> None:
    start = shape_matcher(FixedSchema((Array(items=FixedSchema((_one(),)), min_items=14, max_items=16),)), PIECES)
    for length in (1, 12, 13, 14, 15, 16):
        matcher = start.copy()
        assert matcher.accept_bytes(b"[" + b",".join([b"1"] * length))
        check_walk(matcher, PIECES, random.Random(0), 2)


def _one() -> Any:
    from sgl.grammar.regular.expr import literal
    from sgl.grammar.shape import Text

    return Text(literal(b"1"))


@pytest.mark.parametrize("number", [63, 300])
def test_masks_inside_long_lists_of_words(number: int) -> None:
    rng = random.Random(3)
    texts = ["".join(rng.choices("abd12é", k=rng.randint(1, 9))) for _ in range(number)]
    check_walk(grammar.compile(choices=texts, vocabulary=PIECES).matcher(), PIECES, rng, 5)
    for seed in range(4):
        compiled = grammar.compile(json_schema={"type": "array", "items": {"enum": texts}}, vocabulary=PIECES)
        matcher = compiled.matcher()
        assert matcher.accept_bytes(b'["')
        check_walk(matcher, PIECES, random.Random(seed), 8)


def test_a_mask_is_computed_once_for_all_depths_and_counts_that_cannot_tell() -> None:
    any_json: dict[str, Any] = {}
    compiled = grammar.compile(json_schema={"type": "array", "items": any_json}, vocabulary=PIECES)
    matcher = compiled.matcher()
    assert compiled.masks is not None
    walks = []
    for _ in range(6):
        matcher.accept_bytes(b'[["')
        mask_of(matcher, PIECES)
        matcher.accept_bytes(b'x"],')
        walks.append(compiled.masks.walks)
    assert walks[-1] == walks[2]
    text = grammar.compile(json_schema={"type": "string", "maxLength": 100_000}, vocabulary=PIECES)
    matcher = text.matcher()
    matcher.accept_bytes(b'"')
    for _ in range(50):
        mask_of(matcher, PIECES)
        matcher.accept_bytes(b"some text ")
    assert text.masks is not None
    assert text.masks.walks == 1


def test_the_cache_is_bounded_and_forgets_nothing_that_changes_an_answer() -> None:
    bound = PIECES.words * 4 * 3
    compiled = grammar.compile(json_schema=SCHEMA, vocabulary=PIECES, mask_cache_bytes=bound)
    rng = random.Random(1)
    for _ in range(4):
        check_walk(compiled.matcher(), PIECES, rng, 12)
    assert compiled.masks is not None
    assert compiled.masks.num_bytes <= bound + PIECES.words * 4 * 8


def test_special_tokens_are_never_allowed_and_the_end_exactly_where_the_text_may_end() -> None:
    vocabulary = Vocabulary([b"a", b"<s>", b"</s>", None, b"b", b"</s>"], [2, 3], 40)
    matcher = grammar.compile(regex="a|.*b", vocabulary=vocabulary).matcher()
    free = np.flatnonzero(mask_of(matcher, vocabulary)).tolist()
    assert free == [0, 1, 4, 5]
    matcher.accept(0)
    assert np.flatnonzero(mask_of(matcher, vocabulary)).tolist() == [0, 1, 2, 3, 4, 5]
    matcher.accept(0)
    assert np.flatnonzero(mask_of(matcher, vocabulary)).tolist() == [0, 1, 4, 5]


def test_tokens_of_the_same_bytes_are_allowed_together() -> None:
    vocabulary = Vocabulary([b"x", b"ab", b"ab", b"a", b"ab"], [])
    assert mask_of(grammar.compile(regex="abx", vocabulary=vocabulary).matcher(), vocabulary).tolist() == [
        False, True, True, True, True,
    ]  # fmt: skip


BOUNDS = [(0, None), (3, None), (3, 10), (5, None), (5, 9), (0, 4), (2, 7)]


@pytest.mark.parametrize("form", ["properties", "arrays", "patterns"])
@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(BOUNDS, 2)))
def test_alternatives_may_count_to_different_bounds(
    one: tuple[int, int | None], other: tuple[int, int | None], form: str
) -> None:
    """Where one string has reached a bound, another still counts to its own."""
    first, second = (
        {"type": "string", "minLength": low} | ({} if high is None else {"maxLength": high})
        for low, high in (one, other)
    )
    schema: dict[str, Any] = {
        "type": "array",
        "items": {"anyOf": [first, second | {"pattern": "^a*$"}]},
        "minItems": 1,
    }
    if form == "properties":
        longer = {"properties": {"k": first, "z": {"type": "integer"}}, "required": ["k", "z"]}
        shorter = {"properties": {"k": second}, "required": ["k"]}
        alternatives = [alternative | {"additionalProperties": False} for alternative in (longer, shorter)]
        schema = {"type": "object", "anyOf": alternatives}
    elif form == "arrays":
        schema = {"type": "array", "anyOf": [{"items": first, "minItems": 2}, {"items": second, "maxItems": 1}]}
    compiled = grammar.compile(json_schema=schema, vocabulary=PIECES)
    validator = jsonschema.Draft202012Validator(schema)
    opening = b'{"k":"' if form == "properties" else b'["'
    ends = [b'"}', b'","z":1}'] if form == "properties" else [b'"]', b'","a"]', b'","aaaaa"]']
    matcher = compiled.matcher()
    assert matcher.accept_bytes(opening)
    for number in range(12):
        for end in ends:
            behind, text = matcher.copy(), opening + b"a" * number + end
            is_accepted = behind.accept_bytes(end) and behind.is_accepting()
            assert is_accepted == validator.is_valid(json.loads(text)), text
        allowed = mask_of(matcher, PIECES)
        assert (allowed == accepted_one_by_one(matcher, PIECES)).all()
        if not matcher.accept_bytes(b"a"):
            break
    assert compiled.automaton is not None
    assert finish(compiled.automaton, 5000) is not None
