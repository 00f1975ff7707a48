"""The ends of documents: of any length at no cost, refused where no output is so long, and known without a look at each
token while a budget is far."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl import grammar
from sgl.errors import GrammarTooLarge
from sgl.grammar.automaton.shortest_end import ShortestEnds
from sgl.grammar.matching.budget import MAX_LENGTH
from sgl.grammar.regular.rope import MAX_TEXT, rope, shorter, times
from tests.grammar_oracles import accepted_one_by_one, likely, mask_of, piece_vocabulary, shape_matcher
from tests.grammar_shapes import random_schema

PIECES = piece_vocabulary()


def test_a_rope_is_a_text_of_any_length() -> None:
    inner = rope(b"ab", memoryview(b"xcd")[1:])
    text = rope(times(inner, 3), b"!", times(rope(b"-"), 0), rope())
    assert text.text() == b"abcd" * 3 + b"!"
    assert text.size == len(text) == 13
    endless = times(times(rope(b"abc"), 10**12), 10**12)
    assert endless.size == 3 * 10**24
    with pytest.raises(GrammarTooLarge):
        endless.text()
    deep = rope(b"")
    for _ in range(5_000):
        deep = rope(b"[", deep, b"]")
    assert deep.text() == b"[" * 5_000 + b"]" * 5_000
    assert shorter(endless, deep) is deep is shorter(None, deep)
    assert shorter(rope(b"b"), rope(b"a")).text() == b"a"  # type: ignore[union-attr]  # there is one
    assert not rope()


def doubled(depth: int) -> dict[str, Any]:
    """Pairs of pairs of pairs."""
    pairs = {f"d{i}": {"prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2} for i in range(depth)}
    pairs = {name: {"type": "array", **pair} for name, pair in pairs.items()}
    return {"$defs": {**pairs, f"d{depth}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def nested(depth: int, low: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": low}
    return schema


TOO_LONG: dict[str, tuple[dict[str, Any], str]] = {
    "pattern and length": (
        {"json_schema": {"type": "string", "minLength": 10**9, "maxLength": 10**9, "pattern": "^[a-z]*$"}},
        "minLength of 1,000,000,000",
    ),
    "minLength": ({"json_schema": {"type": "string", "minLength": 10**6}}, "minLength of 1,000,000"),
    "inner minLength": (
        {"json_schema": {"type": "array", "prefixItems": [{"type": "string", "minLength": 10**7}], "minItems": 1}},
        "minLength of 10,000,000",
    ),
    "minLength as a float": ({"json_schema": '{"type": "string", "minLength": 1e300}'}, "minLength"),
    "minItems": ({"json_schema": {"type": "array", "minItems": 10**6}}, "minItems of 1,000,000"),
    "more items than fit a word": ({"json_schema": {"type": "array", "minItems": 10**30}}, "minItems"),
    "pairs of pairs": ({"json_schema": doubled(20)}, "minItems"),
    "many pairs of pairs": ({"json_schema": doubled(100)}, "minItems"),
    "arrays of arrays": ({"json_schema": nested(30, 2)}, "minItems"),
    "constant": ({"json_schema": {"const": "x" * 10**6}}, "json_schema"),
    "key": ({"json_schema": {"type": "object", "required": ["k" * 10**6]}}, "required"),
    "repeats": ({"regex": "(a{1000}){1000}"}, "repeats"),
    "repeats twice": ({"regex": "(a{1000}){1000}(b{1000}){1000}"}, "repeats"),
    "repeats of words": ({"regex": "((abcdefgh|ijklmnop){1000}){1000}"}, "repeats"),
    "repeats in a pattern": ({"json_schema": {"type": "string", "pattern": "^(a{1000}){1000}$"}}, "pattern"),
    "body of a tag": (
        {
            "structural_tag": {
                "triggers": ["<"],
                "structures": [{"begin": "<a>", "regex": "(a{1000}){1000}", "end": "</a>"}],
                "at_least_one": True,
            }
        },
        "schemas and patterns",
    ),
    "choice": ({"choices": ["x" * 10**6]}, "choices"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LONG)
def test_what_asks_for_more_than_any_output_has_is_refused_by_name(name: str) -> None:
    constraint, message = TOO_LONG[name]
    with pytest.raises(GrammarTooLarge, match=message) as caught:
        grammar.compile(**constraint, vocabulary=PIECES)
    assert caught.value.limit == MAX_LENGTH
    assert len(str(caught.value)) < 400


NOT_TOO_LONG: dict[str, dict[str, Any]] = {
    "other way": {"json_schema": {"anyOf": [{"type": "string", "minLength": 10**9}, {"type": "integer"}]}},
    "maxLength": {"json_schema": {"type": "array", "items": {"type": "string", "maxLength": 10**30}}},
    "maxItems": {"json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**30}},
    "optional": {"json_schema": {"type": "object", "properties": {"a": nested(30, 2), "b": {"const": "x" * 10**6}}}},
    "long": {"json_schema": {"type": "string", "minLength": 100_000}},
    "pairs of pairs": {"json_schema": doubled(10)},
    "many arrays": {"json_schema": nested(300, 1)},
    "many required": {"json_schema": {"type": "object", "required": [f"k{i}" for i in range(3000)]}},
    "repeats": {"regex": "(ab?){1000}(x{100}){100}"},
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_TOO_LONG)
@pytest.mark.parametrize("remaining", [None, 5000, 500, 3])
def test_what_may_be_short_is_generated_whatever_else_is_long(name: str, remaining: int | None) -> None:
    matcher = grammar.compile(**NOT_TOO_LONG[name], vocabulary=PIECES).matcher()
    rng = random.Random(1)
    for i in range(12):
        mask = mask_of(matcher, PIECES, None if remaining is None else max(remaining - i, 1))
        assert mask.any()
        assert matcher.accept(likely(matcher, PIECES, mask, rng))
        if matcher.is_finished():
            break


def test_a_budget_leaves_ways_out_that_are_too_long() -> None:
    """An integer ends in time, a string of a billion characters does not."""
    matcher = grammar.compile(**NOT_TOO_LONG["other way"], vocabulary=PIECES).matcher()
    assert mask_of(matcher, PIECES)[ord('"')]
    kept = mask_of(matcher, PIECES, 1000)
    assert not kept[ord('"')]
    assert kept[ord("7")]
    assert matcher.accept_bytes(b'"abc')
    assert mask_of(matcher, PIECES, 1000).any(), "no way is short enough: those that come nearest"
    with pytest.raises(GrammarTooLarge):
        matcher.shortest_end()


@pytest.mark.parametrize("kind", ["object", "array"])
def test_the_work_grows_with_the_number_of_members(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had grown with its square: 1,000 required properties took 19 s."""
    worked_out: list[Any] = []
    shape_of = ShortestEnds._shape

    def counted(self: ShortestEnds, shape: Any) -> Any:
        worked_out.append(shape)
        return shape_of(self, shape)

    monkeypatch.setattr(ShortestEnds, "_shape", counted)
    members = [{"type": "array", "minItems": 1, "items": {"type": "string", "maxLength": i}} for i in range(1, 61)]
    named = {f"k{i}": member for i, member in enumerate(members)}
    schema = {
        "object": {"type": "object", "properties": named, "required": [*named]},
        "array": {"type": "array", "prefixItems": members, "minItems": len(members), "items": False},
    }[kind]
    matcher = grammar.compile(json_schema=schema, vocabulary=PIECES).matcher()
    value = json.loads(matcher.shortest_end())
    assert value == {"object": {key: [""] for key in named}, "array": [[""]] * len(members)}[kind]
    assert 2 * len(members) < len(worked_out) <= 4 * len(members) + 4


@given(st.integers(0, 1 << 30), st.sampled_from(["schema", "any"]))
@example(266651, "any")
@example(266, "schema")
def test_no_token_leads_further_from_the_end_than_is_promised(seed: int, order: Any) -> None:
    rng = random.Random(seed)
    matcher = shape_matcher(random_schema(rng), PIECES, order, rng.choice(["compact", "flexible"]))
    for _ in range(6):
        mask = mask_of(matcher, PIECES)
        # Texts that were used make the next ones longer: a matcher asks for no such promise then.
        if matcher.is_finished() or not mask.any() or matcher._automaton.has_unique_texts:
            break
        budget, place = matcher._budget, matcher._place
        most = budget.most_behind(matcher._masks.look_up(place), place)
        assert (mask == accepted_one_by_one(matcher, PIECES)).all()
        mask[list(PIECES.eos_ids)] = False
        for token_id in np.flatnonzero(mask).tolist():
            behind = matcher.copy()
            assert behind.accept(token_id)
            assert budget.finish.end(behind._place).size <= most, PIECES.token_bytes[token_id]
        matcher.accept(likely(matcher, PIECES, mask_of(matcher, PIECES), rng))


def large_schema(*, is_required: bool) -> dict[str, Any]:
    """146 properties, 8 to 10 KB."""
    kinds: list[dict[str, Any]] = [
        {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "string", "maxLength": 40},
        {"enum": ["red", "green", "blue"]}, {"type": "array", "items": {"type": "integer"}},
    ]  # fmt: skip
    properties = {f"customer_{['order', 'address', 'invoice'][i % 3]}_{i:03d}": kinds[i % 6] for i in range(146)}
    required = list(properties) if is_required else []
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    assert len(json.dumps(schema)) > 7_500
    return schema


@pytest.mark.parametrize("order", ["schema", "any"])
def test_a_mask_far_from_the_budgets_end_takes_one_walk(order: Any) -> None:
    """As many as one without a budget: what suffices behind tokens is not looked for one by one."""
    found = grammar.compile(json_schema=large_schema(is_required=False), vocabulary=PIECES, key_order=order)
    plain, near = found.matcher(), found.matcher()
    rng = random.Random(0)
    assert found.masks is not None
    for i in range(60):
        before = found.masks.walks
        kept = mask_of(near, PIECES, 500 - i)
        assert found.masks.walks <= before + 1
        assert (kept == mask_of(plain, PIECES)).all()
        token = likely(plain, PIECES, kept, rng)
        assert plain.accept(token)
        assert near.accept(token)
        if plain.is_finished():
            break
    assert near._budget.walks == 0
    assert near._budget.counts.steps == 0


def test_the_tokens_of_ends_are_counted_once_for_what_they_share() -> None:
    """A large schema that cannot be finished in time: each mask takes two walks, and few bytes of its ends are new."""
    found = grammar.compile(json_schema=large_schema(is_required=True), vocabulary=PIECES, key_order="any")
    matcher = found.matcher()
    length = len(matcher.shortest_end())
    assert length < MAX_TEXT
    rng, masks = random.Random(0), 20
    for i in range(masks):
        assert matcher.accept(likely(matcher, PIECES, mask_of(matcher, PIECES, 1000 - i), rng))
    assert matcher._budget.walks <= masks
    one_by_one = matcher._budget.walks * 146 * length
    assert matcher._budget.counts.steps < one_by_one / 4
