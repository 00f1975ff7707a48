"""A matcher goes on, back and apart; it knows what is forced, and brings a document to its end within a budget."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sgl import grammar
from sgl.grammar import Matcher, Vocabulary
from sgl.grammar.automaton.nfa import KeyOrder
from sgl.grammar.matching.budget import FAR
from sgl.grammar.matching.jump import ForcedText, Jump, cut, forced_text, jump
from tests.grammar_oracles import (
    accepted_one_by_one,
    likely,
    mask_of,
    piece_vocabulary,
    real_vocabulary,
    shape_matcher,
)
from tests.grammar_shapes import random_schema
from tests.house import REPOSITORY
from tests.test_grammar_regex import patterns
from tests.tiny_tokenizers import byte_level, sentencepiece

PIECES = piece_vocabulary()
SEEDS = st.integers(0, 1 << 32)
ORDERS: st.SearchStrategy[KeyOrder] = st.sampled_from(["schema", "any"])
TEN_FIELDS: dict[str, Any] = {
    "type": "object",
    "properties": {
        name: {"type": kind}
        for name, kind in zip(
            [
                "identifier",
                "title",
                "author",
                "published",
                "edition",
                "pages",
                "language",
                "price",
                "in_stock",
                "note",
            ],
            [
                "integer",
                "string",
                "string",
                "string",
                "integer",
                "integer",
                "string",
                "number",
                "boolean",
                "string",
            ],
            strict=True,
        )
    },
}
TEN_FIELDS |= {"required": list(TEN_FIELDS["properties"]), "additionalProperties": False}


@given(SEEDS, ORDERS)
def test_going_back_is_as_if_nothing_had_been_accepted(seed: int, order: KeyOrder) -> None:
    rng = random.Random(seed)
    matcher = shape_matcher(random_schema(rng), PIECES, order)
    accepted: list[int] = []
    masks = []
    for _ in range(12):
        mask = mask_of(matcher, PIECES)
        if not mask.any():
            break
        masks.append(mask)
        accepted.append(likely(matcher, PIECES, mask, rng))
        assert matcher.accept(accepted[-1])
    apart = matcher.copy()
    back = rng.randint(0, len(accepted))
    matcher.rollback(back)
    if back:
        assert (mask_of(matcher, PIECES) == masks[len(accepted) - back]).all()
    for token_id in accepted[len(accepted) - back :]:
        assert matcher.accept(token_id)
    assert (mask_of(matcher, PIECES) == mask_of(apart, PIECES)).all()
    with pytest.raises(ValueError, match="cannot be taken back"):
        matcher.rollback(len(accepted) + 1)


def test_the_end_is_accepted_once_where_the_text_may_end_and_can_be_taken_back() -> None:
    [first, second] = PIECES.eos_ids
    matcher = grammar.compile(regex="ab?", vocabulary=PIECES).matcher()
    assert not matcher.accept(first)
    assert matcher.accept(ord("a"))
    assert matcher.is_accepting()
    assert not matcher.is_finished()
    assert matcher.accept(second)
    assert matcher.is_finished()
    assert matcher.is_accepting()
    assert not mask_of(matcher, PIECES).any()
    assert not matcher.accept(ord("b"))
    assert not matcher.accept_bytes(b"b")
    assert not matcher.accept(first)
    assert matcher.forced_bytes() == b""
    matcher.rollback(1)
    assert matcher.accept(ord("b"))


def test_what_is_refused_changes_nothing() -> None:
    matcher = grammar.compile(regex="abc", vocabulary=PIECES).matcher()
    for token_id in (-1, PIECES.size, PIECES.size - 1, ord("b")):
        assert not matcher.accept(token_id)
    assert not matcher.accept_bytes(b"abx")
    assert matcher.accept_bytes(b"abc")


@given(patterns(), SEEDS)
def test_forced_bytes_are_what_every_continuation_begins_with(pattern: str, seed: int) -> None:
    rng = random.Random(seed)
    matcher = grammar.compile(regex=pattern, vocabulary=PIECES).matcher()
    for _ in range(4):
        cursor = matcher.copy()
        for byte in matcher.forced_bytes():
            assert not cursor.is_accepting()
            allowed = np.flatnonzero(accepted_one_by_one(cursor, PIECES)[:256]).tolist()
            assert allowed == [byte]
            cursor.accept(byte)
        live = np.flatnonzero(accepted_one_by_one(cursor, PIECES)[:256]).tolist()
        assert len(live) != 1 or cursor.is_accepting()
        if not live:
            break
        matcher.accept(rng.choice(np.flatnonzero(accepted_one_by_one(matcher, PIECES)).tolist()))


@given(SEEDS, ORDERS, st.sampled_from([0, 0, 1, 3, 10, 40]))
@example(266651, "any", 10)
def test_a_document_is_always_finished_within_its_budget(seed: int, order: KeyOrder, spare: int) -> None:
    rng = random.Random(seed)
    matcher = shape_matcher(random_schema(rng), PIECES, order, rng.choice(["compact", "flexible"]))
    left = least_tokens(matcher, PIECES) + spare
    assume(left <= FAR)  # beyond, budgets restrict nothing
    while left > 0:
        kept = mask_of(matcher, PIECES, left)
        assert not (kept & ~mask_of(matcher, PIECES)).any()
        kept[list(PIECES.eos_ids)] = False
        if not kept.any():
            break
        assert matcher.accept(likely(matcher, PIECES, kept, rng))
        left -= 1
    assert matcher.is_accepting()


def least_tokens(matcher: Matcher, vocabulary: Vocabulary) -> int:
    """Of the text that the matcher would end with."""
    text = matcher.shortest_end()
    needed = [0] + [1 << 30] * len(text)
    for end in range(1, len(text) + 1):
        needed[end] = 1 + min(needed[start] for start in range(end) if text[start:end] in vocabulary.ids)
    return needed[-1]


def test_a_budget_keeps_every_token_that_leaves_enough_room() -> None:
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)] + [b'"ab', b'",'], [])
    schema = {"type": "array", "items": {"type": "string", "minLength": 4}, "minItems": 1}
    matcher = grammar.compile(json_schema=schema, vocabulary=vocabulary).matcher()
    assert matcher.accept_bytes(b'["abcd')
    # `"]` ends it in two tokens; `",` and another item, which would be `"`, four spaces and `"`, and `]` take eight.
    assert mask_of(matcher, vocabulary, 2).nonzero()[0].tolist() == [ord('"')]
    assert mask_of(matcher, vocabulary, 3)[ord("x")]
    assert not mask_of(matcher, vocabulary, 3)[257]
    assert not mask_of(matcher, vocabulary, 7)[257]
    assert mask_of(matcher, vocabulary, 8)[257]
    assert (mask_of(matcher, vocabulary, FAR + 1) == mask_of(matcher, vocabulary)).all()


def check_ways(matcher: Matcher, vocabulary: Vocabulary, rng: random.Random) -> None:
    """Every allowed token has a way to the end, and it is as long as what is found behind the token itself."""
    mask = mask_of(matcher, vocabulary)
    mask[list(vocabulary.eos_ids)] = False
    group_of, texts = matcher._budget._ways(matcher._place)
    ways = [(np.flatnonzero(group_of == number), text) for number, text in enumerate(texts)]
    known = {i for tokens, text in ways if text is not None for i in tokens.tolist()}
    others = {i for tokens, text in ways if text is None for i in tokens.tolist()}
    allowed = set(np.flatnonzero(mask).tolist())
    assert known <= allowed <= known | others
    for tokens, text in ways:
        if text is None:
            continue
        for token_id in rng.sample(tokens.tolist(), min(len(tokens), 3)):
            behind = matcher.copy()
            assert behind.accept(token_id)
            assert len(behind.shortest_end()) == len(text), (vocabulary.token_bytes[token_id], text)


@given(SEEDS, ORDERS)
@example(230_846, "any")  # a token ends where others go on and leave a declared key behind
@example(996_335_778, "any")  # one only opens a key that may not come twice, others begin it
def test_what_suffices_behind_each_token_is_known(seed: int, order: KeyOrder) -> None:
    rng = random.Random(seed)
    matcher = shape_matcher(random_schema(rng, depth=2), PIECES, order, rng.choice(["compact", "flexible"]))
    for _ in range(5):
        mask = mask_of(matcher, PIECES)
        if matcher.is_finished() or not mask.any():
            break
        check_ways(matcher, PIECES, rng)
        matcher.accept(likely(matcher, PIECES, mask, rng))


@pytest.mark.parametrize("begun", ["", '{"', '{"t', '{"title":"', '{"title":"xyz","', '{"x":["'])
def test_what_suffices_is_known_over_a_vocabulary_of_many_plain_tokens(begun: str) -> None:
    vocabulary = real_vocabulary(REPOSITORY / "sgl" / "models" / "embedded")
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string", "minLength": 3, "maxLength": 40}, "tales": {"enum": [1, "two"]}},
        "additionalProperties": {"type": "array", "items": {"enum": [f"word {i}" for i in range(100)] + ["wo"]}},
    }
    matcher = grammar.compile(json_schema=schema, vocabulary=vocabulary, key_order="any").matcher()
    assert matcher.accept_bytes(begun.encode())
    assert (mask_of(matcher, vocabulary) == accepted_one_by_one(matcher, vocabulary)).all()
    check_ways(matcher, vocabulary, random.Random(0))


def test_without_room_for_any_document_the_mask_goes_the_shortest_way() -> None:
    matcher = grammar.compile(choices=["a long story", "short"], vocabulary=PIECES).matcher()
    assert mask_of(matcher, PIECES, 2).nonzero()[0].tolist() == [ord("s")]


def test_long_lists_of_words_keep_to_their_budget() -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcd", k=rng.randint(2, 12))) for _ in range(200)]
    compiled = grammar.compile(json_schema={"type": "array", "items": {"enum": texts}}, vocabulary=PIECES)
    for budget in range(4, 16):
        matcher = compiled.matcher()
        matcher.accept_bytes(b"[")
        for left in range(budget, 0, -1):
            kept = mask_of(matcher, PIECES, left)
            kept[list(PIECES.eos_ids)] = False
            if not kept.any():
                break
            matcher.accept(likely(matcher, PIECES, kept, rng))
        assert matcher.is_accepting(), budget


def spell(
    matcher: Matcher, vocabulary: Vocabulary, encode: Callable[[str], list[int]], text: str, *, jumps: bool
) -> int:
    """Lead the matcher through a text as a model would that means to write it; the number of steps that takes."""
    output: list[int] = []
    steps, done = 0, 0
    while done < len(text):
        run, draft = forced(matcher, vocabulary, output, encode) if jumps else Jump([])
        if not run:
            run = encode(text[done:])[:1]
            assert mask_of(matcher, vocabulary)[run[0]]
            steps += draft != run[0]
        for token_id in run:
            assert matcher.accept(token_id)
            done += len(vocabulary.token_bytes[token_id])
        output += run
    assert b"".join(vocabulary.token_bytes[i] for i in output) == text.encode()
    return steps


def forced(matcher: Matcher, vocabulary: Vocabulary, output: list[int], encode: Callable[[str], list[int]]) -> Jump:
    """What follows an output, cut on its own."""
    ahead = forced_text(matcher, vocabulary, output)
    if ahead is None:
        return Jump([])
    [ids] = cut([ahead], lambda texts: list(map(encode, texts)))
    return jump(vocabulary, ahead, ids)


def test_jumps_reach_every_document_in_fewer_steps() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    compiled = grammar.compile(json_schema=TEN_FIELDS, vocabulary=vocabulary)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    samples: dict[str, list[Any]] = {
        "integer": [7, 1954],
        "string": ["the cat", ""],
        "number": [2.5],
        "boolean": [True],
    }
    for seed in range(4):
        rng = random.Random(seed)
        document = {name: rng.choice(samples[field["type"]]) for name, field in TEN_FIELDS["properties"].items()}
        text = json.dumps(document, separators=(",", ":"))
        plain = spell(compiled.matcher(), vocabulary, encode, text, jumps=False)
        assert plain >= 1.5 * spell(compiled.matcher(), vocabulary, encode, text, jumps=True)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_texts_that_are_cut_together_are_cut_as_each_alone(make: Callable[[], Any]) -> None:
    tokenizer = make()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    compiled = grammar.compile(json_schema=TEN_FIELDS, vocabulary=vocabulary)

    def encode(texts: Sequence[str]) -> list[Sequence[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    seen: list[ForcedText] = []
    for seed in range(40):
        rng = random.Random(seed)
        matcher, output = compiled.matcher(), list[int]()
        for _ in range(25):
            ahead = forced_text(matcher, vocabulary, output)
            if ahead is not None:
                seen.append(ahead)
                assert ahead.data[ahead.start :] == matcher.forced_bytes()
                assert ahead.start <= ahead.seam <= len(ahead.data)
            output.append(likely(matcher, vocabulary, mask_of(matcher, vocabulary), rng))
            if not matcher.accept(output[-1]) or output[-1] in vocabulary.eos_ids:
                break
    together = cut(seen, encode)
    assert together == [cut([ahead], encode)[0] for ahead in seen]
    for ahead, ids in zip(seen, together, strict=True):
        spelt = b"".join(vocabulary.token_bytes[token_id] for token_id in ids)
        assert spelt == ahead.text[1:].encode() == ahead.data
    assert len(seen) > 40


def test_a_text_that_merges_with_what_is_put_before_it_is_not_cut() -> None:
    seen = [ForcedText("\na", b"a", 0, 1), ForcedText("\nb", b"b", 0, 1)]
    ids = {"\n": [1], "\na": [1, 2], "\nb": [3]}
    assert cut(seen, lambda texts: [ids[text] for text in texts]) == [[2], []]
