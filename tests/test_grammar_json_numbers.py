"""Sets of numbers against exact arithmetic, and their JSON texts against what a JSON reader makes of them."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl.errors import GrammarTooLarge
from sgl.grammar.compiler import compile
from sgl.grammar.regular.expr import Expr, is_empty, matches
from sgl.grammar.regular.shortest import _search_shortest
from sgl.grammar.text.decimals import NumberSet, Range, make_set
from sgl.grammar.text.digits import Digits
from sgl.grammar.text.numbers import number_text
from tests.grammar_oracles import piece_vocabulary

VOCABULARY = piece_vocabulary()

BOUNDS = st.sampled_from(
    [Fraction(n, d) for n in range(-12, 13) for d in (1, 2, 10)] + [Fraction(1234), Fraction(-999)]
)
STEPS = st.sampled_from(
    [Fraction(1), Fraction(2), Fraction(3), Fraction(1, 2), Fraction(1, 100), Fraction(7, 10), Fraction(25)]
)
RANGES = st.builds(
    Range,
    low=st.none() | BOUNDS,
    high=st.none() | BOUNDS,
    low_open=st.booleans(),
    high_open=st.booleans(),
    multiple_of=st.none() | STEPS,
    not_multiples_of=st.frozensets(STEPS, max_size=1),
)
SETS = st.builds(make_set, st.lists(RANGES, max_size=2), st.sets(BOUNDS, max_size=3))
NUMBERS = (
    BOUNDS
    | st.fractions(-50, 2000, max_denominator=1).map(Fraction)
    | st.integers(-30, 30).map(lambda n: Fraction(n, 20))
)
TEXTS = st.from_regex(r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,3})?(e[+-]?[0-3])?", fullmatch=True)


@given(SETS, SETS, NUMBERS)
def test_sets_are_closed_under_the_set_operations(one: NumberSet, other: NumberSet, number: Fraction) -> None:
    assert (number in one & other) == (number in one and number in other)
    assert (number in one | other) == (number in one or number in other)
    assert (number in ~one) == (number not in one)
    if number in one:
        assert one


def value_of(text: str) -> Fraction:
    return Fraction(Decimal(text))


@given(SETS, TEXTS)
def test_a_text_belongs_exactly_if_its_value_does(numbers: NumberSet, text: str) -> None:
    flexible = number_text(numbers, any_spelling=True)
    mantissa = re.split("[.e]", text.lstrip("-"))[0]
    is_normal = "e" not in text or len(mantissa) == 1 != (mantissa == "0")
    if not is_normal or value_of(text) not in numbers:
        assert value_of(text) in numbers or not matches(flexible, text.encode())
    elif "e" not in text:
        assert matches(flexible, text.encode())


@given(SETS, NUMBERS)
def test_every_member_has_its_plain_text(numbers: NumberSet, number: Fraction) -> None:
    text = json.dumps(int(number) if number.denominator == 1 else float(number))
    for any_spelling in (False, True):
        assert matches(number_text(numbers, any_spelling=any_spelling), text.encode()) == (number in numbers)


@given(RANGES, st.booleans(), st.lists(st.integers(0, 10**6), min_size=30, max_size=60))
@example(Range(Fraction(0), low_open=True), True, [0] * 60)
@example(Range(Fraction(0), Fraction(1, 10**7), low_open=True), False, [0] * 60)
@example(Range(Fraction(1, 10), Fraction(1, 5), True, True), False, [1, 0, *[9] * 50])
def test_readers_that_use_doubles_find_no_open_bound(part: Range, any_spelling: bool, choices: list[int]) -> None:
    numbers = make_set([replace(part, multiple_of=None, not_multiples_of=frozenset())])
    expr, text = number_text(numbers, any_spelling=any_spelling), ""
    for choice in choices:
        if is_empty(expr):
            break
        if expr.nullable and math.isfinite(float(text)):
            read = Fraction(float(text))
            assert not part.low_open or part.low is None or read > part.low
            assert not part.high_open or part.high is None or read < part.high
        after = [(chr(byte), to) for mask, to in expr.arcs() for byte in range(256) if mask >> byte & 1]
        alive = sorted((char, to) for char, to in after if not is_empty(to))
        if not alive:
            break
        byte, expr = alive[choice % len(alive)]
        text += byte


@pytest.mark.parametrize(
    ("part", "texts"),
    [
        (Range(Fraction(0), low_open=True), ["0." + "0" * 400 + "1", "1e-324"]),
        (Range(Fraction(1, 10), Fraction(1, 5), True, True), ["0." + "1" + "0" * 20 + "1", "0.1" + "9" * 20]),
    ],
)
def test_what_doubles_round_to_an_open_bound_is_no_text(part: Range, texts: list[str]) -> None:
    for text in texts:
        assert not matches(number_text(make_set([part]), any_spelling=True), text.encode())
    assert matches(number_text(make_set([part]), any_spelling=True), b"0.15")


@given(RANGES, st.booleans(), st.text("0123456789.-", max_size=7))
@example(Range(multiple_of=Fraction(7, 100000)), True, "12345678901")
def test_no_prefix_is_a_dead_end(part: Range, any_spelling: bool, typed: str) -> None:
    text: Expr = number_text(make_set([part]), any_spelling=any_spelling)
    for byte in typed.encode():
        text = text.step(byte)
    seen: set[Expr] = {text}
    stack = [text]
    has_end = False
    while stack and not has_end and len(seen) < 3000:
        here = stack.pop()
        has_end = here.nullable
        fresh = {target for _, target in here._derive()} - seen
        seen |= fresh
        stack.extend(fresh)
    if has_end or not stack:
        assert is_empty(text) != has_end


@given(st.integers(1, 10**6), st.integers(-(10**7), 10**7), st.integers(0, 10**8), st.integers(0, 10**7))
@example(86_400, 1, 10**9, 864)
@example(1 << 20, 0, (1 << 31) - 1, 2_147_483)
def test_digits_go_on_where_a_multiple_begins_with_them(step: int, low: int, width: int, prefix: int) -> None:
    high = low + width
    numbers = make_set([Range(Fraction(low), Fraction(high), multiple_of=Fraction(step))])
    if not numbers:
        return
    expr = number_text(numbers, any_spelling=False)
    for byte in str(prefix).encode():
        expr = expr.step(byte)
    begins = [(prefix * 10**more, (prefix + 1) * 10**more - 1) for more in range(10 if prefix else 1)]
    spans = [(max(first, low), min(last, high)) for first, last in begins]
    assert is_empty(expr) == all(last // step * step < first for first, last in spans)


def magnitudes(part: Range, any_spelling: bool) -> Iterator[Expr]:
    """The expressions of a range's texts, from the start and behind a few digits."""
    level = [number_text(make_set([part]), any_spelling=any_spelling)]
    for _ in range(3):
        yield from level
        level = [target for expr in level for mask, target in expr.arcs() if mask >> 0x30 & 0x3FF][:40]


@given(
    step=st.integers(2, 60),
    low=st.none() | st.integers(-300, 300),
    width=st.none() | st.integers(0, 500),
    is_open=st.booleans(),
    any_spelling=st.booleans(),
)
@example(step=7, low=0, width=None, is_open=True, any_spelling=False)
def test_arithmetic_finds_the_same_shortest_text_as_a_search(
    step: int, low: int | None, width: int | None, is_open: bool, any_spelling: bool
) -> None:
    high = None if low is None or width is None else Fraction(low + width)
    part = Range(None if low is None else Fraction(low), high, is_open, is_open, Fraction(step))
    known = 0
    for expr in magnitudes(part, any_spelling):
        for member in getattr(expr, "members", (expr,)):
            if isinstance(member, Digits) and not member.nullable and not is_empty(member):
                text = member.shortest_text()
                known += text is not None
                assert text is None or text == _search_shortest(member)
    assert known or high is not None


@pytest.mark.parametrize("step", [9973, 99_991, 10**6, 123_456_789_123, 10**40 + 7])
@pytest.mark.parametrize("more", [{}, {"minimum": 5}, {"minimum": -(10**45), "exclusiveMaximum": -3}])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_whole_multiple_may_be_of_any_size(step: int, more: dict[str, int], kind: str) -> None:
    """Whatever begins in a way that a mask allows is ended within the tokens that are left."""
    grammar = compile(json_schema={"type": kind, "multipleOf": step, **more}, vocabulary=VOCABULARY)
    for seed in range(5):
        at, rng, said = grammar.matcher(), random.Random(seed), b""
        for left in range(70, 0, -1):
            allowed = np.flatnonzero(np.unpackbits(at.mask(left).view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed.tolist()))
            if token in VOCABULARY.eos_ids:
                break
            assert at.accept(token)
            said += VOCABULARY.token_bytes[token]
        value = Fraction(said.decode())
        assert (value / step).denominator == 1
        assert more.get("minimum", value) <= value <= more.get("exclusiveMaximum", value + 1)


def test_a_multiple_that_takes_a_search_has_a_limit_and_says_what_would_be_right() -> None:
    """By its size, whatever time that took: nothing is searched."""
    for schema, message in [
        ({"multipleOf": 99.99}, "1000 units.*whole number may be any"),
        ({"multipleOf": 0.123457, "minimum": 1}, "1000 units"),
        ({"multipleOf": 9973, "not": {"multipleOf": 7}}, "excluded is 100 at most"),
    ]:
        with pytest.raises(GrammarTooLarge, match=message):
            compile(json_schema={"type": "number", **schema}, vocabulary=VOCABULARY)
    for schema in [
        {"multipleOf": 9.97},
        {"multipleOf": 97, "not": {"multipleOf": 7}},
        {"not": {"multipleOf": 9973}},
    ]:
        assert compile(json_schema={"type": "number", **schema}, vocabulary=VOCABULARY).matcher().mask(500).any()


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 10**30},
        {"const": 1e30},
        {"enum": [10**25, -(10**25), 1e100, 7]},
        {"type": "integer", "minimum": 10**30, "maximum": 10**30 + 3},
        {"type": "integer", "enum": [1e30, 5], "minimum": 10},
        {"type": "number", "enum": [1e30, 10**24, 5], "not": {"multipleOf": 1e25, "maximum": 7}},
        {"type": "number", "minimum": 10**24, "maximum": 10**24},
        {"type": "integer", "multipleOf": 10**21, "minimum": 1, "maximum": 4 * 10**21},
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "enum": [10**30]},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 10**30,
            "maximum": 10**30,
        },
    ],
)
def test_readers_find_the_large_numbers_that_a_schema_lists(schema: dict[str, object]) -> None:
    """Python's reads 1e+30 as a float, which is not 10**30."""
    number = compile(json_schema=schema, vocabulary=VOCABULARY)
    judge = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    for seed in range(12):
        at, rng, said = number.matcher(), random.Random(seed), b""
        while not at.is_accepting():
            allowed = np.flatnonzero(np.unpackbits(at.mask().view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed.tolist()))
            assert at.accept(token)
            said += VOCABULARY.token_bytes[token]
        judge.validate(json.loads(said))
