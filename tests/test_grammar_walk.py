"""The compiled walk tells the same as the reference, bit for bit, and so do the shortcuts of its plan."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl import grammar, native_code
from sgl.grammar import Vocabulary
from sgl.grammar.automaton import subsets
from sgl.grammar.automaton.nfa import KeyOrder
from sgl.grammar.automaton.place import Place, advance
from sgl.grammar.automaton.pushdown import Automaton
from sgl.grammar.matching import walk
from sgl.grammar.matching.budget import Budget
from sgl.grammar.matching.masks import MaskCache
from sgl.grammar.matching.walk_plan import Mask, likeness, whole
from sgl.time_limit import OutOfTime, time_limit
from tests.grammar_oracles import likely, mask_of, piece_vocabulary, real_vocabulary, shape_matcher
from tests.grammar_shapes import random_schema
from tests.house import REPOSITORY

PIECES = piece_vocabulary()
SEEDS = st.integers(0, 1 << 32)
needs_it = pytest.mark.skipif(walk.compiled() is None, reason="walk.c cannot be compiled here")
BOUNDED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "short": {"type": "string", "minLength": 2, "maxLength": 9},
        "long": {"type": "string", "maxLength": 5000},
        "many": {"type": "array", "items": {"type": "array", "maxItems": 3}, "minItems": 2, "maxItems": 7},
        "code": {"type": "string", "pattern": "^[A-Z][a-z]*( [a-z]+)?$"},
        "word": {"enum": [f"word {i}{'x' * (i % 3)}" for i in range(90)] + ["wo"]},
    },
    "required": ["short", "many"],
}
LISTS = b'{"short":"ab","many":[[],[]],'
BEGUN = (
    *(b"", b'{"', b'{"short":"', b'{"short":"a', b'{"short":"abcdefg', b'{"short":"ab","long":"some'),
    *(
        b'{"short":"ab","many":[[',
        b'{"short":"ab","many":[[],[1,2',
        b'{"short":"ab","many":[[],[],[],[],[],[],[{"a":[["',
    ),
    *(LISTS + b'"code":"', LISTS + b'"code":"Abc', LISTS + b'"word":"', LISTS + b'"word":"word 1'),
)


@contextmanager
def way(*, compiled: bool, planned: bool) -> Iterator[None]:
    """Walks in C or by the reference, by the shortest plan or of everything."""
    plan, library = walk.make_plan, walk.compiled
    if not planned:
        plan = lambda _, vocabulary, place: whole(vocabulary, place)  # noqa: E731
    if not compiled:
        library = lambda: None  # noqa: E731
    with patch.object(walk, "make_plan", plan), patch.object(walk, "compiled", library):
        yield


def walked(automaton: Automaton, vocabulary: Vocabulary, place: Place, **kind: bool) -> Mask:
    with way(**kind):
        return walk.Walker(automaton, vocabulary).walk(place, grouped=True)


def frames(mask: Mask) -> set[tuple[int, ...]]:
    """The symbols of each opened frame and those around it, down to how many of the place's are closed."""

    def stack(number: int) -> tuple[int, ...]:
        around, symbol = mask.opened[number]
        return (*stack(around), symbol) if around >= 0 else (around, symbol)

    return set(map(stack, range(len(mask.opened))))


def parts(mask: Mask) -> set[frozenset[int]]:
    """The tokens by group."""
    assert mask.group_of is not None
    found = {number: np.flatnonzero(mask.group_of == number) for number in range(len(mask.firsts))}
    assert all(first in found[number] for number, first in enumerate(mask.firsts))
    return {frozenset(tokens.tolist()) for tokens in found.values()}


def check_equal(one: Mask, other: Mask) -> None:
    assert (one.row == other.row).all()
    assert one.chars == other.chars
    assert one.items == other.items
    assert one.seen.tolist() == other.seen.tolist()
    assert frames(one) == frames(other)
    assert parts(one) == parts(other)


def check(automaton: Automaton, vocabulary: Vocabulary, place: Place) -> None:
    """All ways at one place, and each at the counts between which it holds."""
    truth = walked(automaton, vocabulary, place, compiled=False, planned=False)
    check_equal(walked(automaton, vocabulary, place, compiled=True, planned=False), truth)
    short = walked(automaton, vocabulary, place, compiled=True, planned=True)
    check_equal(short, walked(automaton, vocabulary, place, compiled=False, planned=True))
    whole_parts = parts(truth)
    assert all(any(part <= other for other in whole_parts) for part in parts(short))
    with way(compiled=True, planned=True):
        mask = walk.Walker(automaton, vocabulary).walk(place)
    assert (short.row == truth.row).all()
    assert (mask.row == truth.row).all()
    assert mask.holds(place)
    kept = MaskCache(automaton, vocabulary, 1 << 24).look_up(place)
    if not automaton.tables.accepting[place.state]:  # else the end of the text is allowed, too
        assert (kept.row == truth.row).all()
    assert frames(truth) <= frames(kept)
    for count in (
        {*mask.chars, place.char_count + 1, place.char_count * 2} if mask.chars[0] else {0, place.char_count + 3}
    ):
        moved = place._replace(char_count=min(count, 1 << 20))
        if mask.holds(moved) or kept.holds(moved):
            assert (walked(automaton, vocabulary, moved, compiled=False, planned=False).row == truth.row).all()


@pytest.mark.slow
@needs_it
@given(SEEDS, st.sampled_from(["schema", "any"]), st.sampled_from(["compact", "flexible"]))
def test_walks_of_random_shapes(seed: int, order: KeyOrder, whitespace: str) -> None:
    rng = random.Random(seed)
    matcher = shape_matcher(random_schema(rng), PIECES, order, whitespace)
    for _ in range(8):
        check(matcher._automaton, PIECES, matcher._place)
        mask = mask_of(matcher, PIECES)
        if matcher.is_finished() or not mask.any():
            break
        matcher.accept(likely(matcher, PIECES, mask, rng))


@needs_it
@pytest.mark.parametrize("name", ["pieces", "embedded"])
@pytest.mark.parametrize("whitespace", ["compact", "flexible"])
def test_walks_within_bounds_and_words(name: str, whitespace: Any) -> None:
    vocabulary = PIECES if name == "pieces" else real_vocabulary(REPOSITORY / "sgl" / "models" / "embedded")
    for begun in BEGUN:
        compiled = grammar.compile(json_schema=BOUNDED, vocabulary=vocabulary, whitespace=whitespace)
        matcher = compiled.matcher()
        assert matcher.accept_bytes(begun), begun
        check(matcher._automaton, vocabulary, matcher._place)


@needs_it
@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize("name", ["pieces", "embedded"])
def test_keys_are_walked_beside_the_mask_of_any_key(name: str, order: KeyOrder) -> None:
    vocabulary = PIECES if name == "pieces" else real_vocabulary(REPOSITORY / "sgl" / "models" / "embedded")
    schema = {
        "properties": {"name": {}, "number": {"type": "integer"}, "nu": {"maxItems": 3}, "{": {}},
        "additionalProperties": {"type": "array", "maxItems": 20},
        "required": ["nu"] if order == "any" else [],
    }
    for begun in (b'{"', b'{"n', b'{"num', b'{"a":[1,2],"', b'{"a":[[],[[]],[3]],"nam'):
        compiled = grammar.compile(json_schema=schema, vocabulary=vocabulary, key_order=order)
        matcher = compiled.matcher()
        assert matcher.accept_bytes(begun), begun
        automaton, place = matcher._automaton, matcher._place
        found = likeness(automaton, place)
        assert found is not None
        assert len(found[1]) < 5, "quotes, and bytes of declared keys"
        check(automaton, vocabulary, place)
        mask, budget = MaskCache(automaton, vocabulary, 1 << 24).look_up(place), Budget(automaton, vocabulary)
        most = budget.most_behind(mask, place)
        for token in np.flatnonzero(np.unpackbits(mask.row.view(np.uint8), bitorder="little"))[::7]:
            behind = advance(automaton, place, vocabulary.token_bytes[token])
            assert behind is not None
            assert budget.finish.end(behind).size <= most


@needs_it
def test_a_walk_looks_at_the_time_and_goes_on_where_it_stopped() -> None:
    matcher = grammar.compile(json_schema=BOUNDED, vocabulary=PIECES).matcher()
    walker = walk.Walker(matcher._automaton, PIECES)
    expected = walker.walk(matcher._place)
    looks = []
    with patch.object(walk, "_STEPS", 1), patch.object(walk, "check_time", lambda: looks.append(1)):
        assert (walker.walk(matcher._place).row == expected.row).all()
    assert len(looks) >= 2, "one at least for each node but the last"
    with patch.object(walk, "_STEPS", 1), time_limit(0.0), pytest.raises(OutOfTime):
        walker.walk(matcher._place)
    assert (walker.walk(matcher._place).row == expected.row).all()


@needs_it
def test_what_is_worked_out_meanwhile_may_move_the_tables() -> None:
    """More states, symbols, frames and groups than there was room for at first."""
    schema = {
        "type": "array",
        "items": {"anyOf": [{"type": "array", "items": {"const": f"v{i}"}} for i in range(40)]},
    }
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep]
    tokens = [*PIECES.token_bytes, *(b"[" * n for n in range(2, 70)), *(b"]" * n for n in range(2, 70))]
    tokens += [b'["v%d"' % i for i in range(40)] + [b'"v%d"' % i + b"]" * (i % 5) for i in range(40)]
    vocabulary = Vocabulary(tokens, PIECES.eos_ids)
    for source, begun in ((schema, b""), (schema, b"["), (schema, b'[["v'), ({}, b"["), ({}, b"[" * 60)):
        matcher = grammar.compile(json_schema=source, vocabulary=vocabulary).matcher()
        assert matcher.accept_bytes(begun)
        check(matcher._automaton, vocabulary, matcher._place)


def test_without_a_compiler_masks_are_the_same_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> None:
        raise native_code.CannotCompile("there is no C compiler: install gcc")

    expected = [mask_of(matcher, PIECES) for matcher in _begun()]
    for library in (walk.compiled, subsets.compiled):
        library.cache_clear()
    try:
        with patch.object(native_code, "load", fails), caplog.at_level(logging.WARNING):
            found = [mask_of(matcher, PIECES) for matcher in _begun()]
    finally:
        for library in (walk.compiled, subsets.compiled):
            library.cache_clear()
    assert all((one == other).all() for one, other in zip(found, expected, strict=True))
    assert len(caplog.records) == 2
    assert all("there is no C compiler: install gcc" in record.getMessage() for record in caplog.records)


def _begun() -> Iterator[grammar.Matcher]:
    for begun in BEGUN:
        matcher = grammar.compile(json_schema=json.dumps(BOUNDED), vocabulary=PIECES).matcher()
        assert matcher.accept_bytes(begun)
        yield matcher
