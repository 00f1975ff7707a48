"""Formats together with bounds on length and patterns: the same strings as each keyword allows by itself."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.json_generation import BYTES
from sgl.errors import GrammarError
from sgl.grammar import Grammar, compile
from sgl.grammar.text.formats import FORMATS
from tests.examples import few
from tests.json_random import accepts, text_of

EXAMPLES = {
    "date": "2024-02-29",
    "date-time": "2024-02-29T12:30:00.123456Z",
    "duration": "P1Y2M3DT4H5M",
    "email": "jane.doe+x@mail.example.com",
    "hostname": "www.example-site.com",
    "ipv4": "192.168.0.1",
    "ipv6": "2001:db8::ff00:42:8329",
    "iri": "https://exämple.com/a?b#c",
    "iri-reference": "/a/b?c=ü",
    "json-pointer": "/a/b~1c/ü",
    "relative-json-pointer": "1/a/b",
    "time": "12:30:00.25Z",
    "uri": "https://user@example.com:80/a/b?c=d#e",
    "uri-reference": "../a/b?x=1",
    "uri-template": "https://e.com/{id}/{?q,r*}",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
}


def grammar_of(**keywords: object) -> Grammar | None:
    """None where no string has all the keywords."""
    try:
        return compile(json_schema={"type": "string", **keywords}, vocabulary=BYTES)
    except GrammarError as error:
        if "no JSON value" not in str(error):
            raise
        return None


@cache
def grammar_of_format(name: str) -> Grammar:
    found = grammar_of(format=name)
    assert found is not None
    return found


def test_there_is_an_example_of_every_format() -> None:
    assert EXAMPLES.keys() == FORMATS


@pytest.mark.costly
@pytest.mark.parametrize("name", sorted(FORMATS))
@few
@given(data=st.data())
def test_format_length_and_pattern_are_an_intersection(name: str, data: st.DataObject) -> None:
    example = EXAMPLES[name]
    low = data.draw(st.integers(0, len(example) + 3), "minLength")
    high = data.draw(st.integers(low, len(example) + 40), "maxLength")
    pattern = data.draw(st.sampled_from(["", "[a-e2]", "^[^1]*$", "[.:]...", "[^3]$"]), "pattern")
    alone = grammar_of_format(name)
    both = grammar_of(format=name, minLength=low, maxLength=high, pattern=pattern)
    for _ in range(8):
        start, end = sorted(data.draw(st.tuples(st.integers(0, len(example)), st.integers(0, len(example)))))
        inserted = data.draw(st.text("ab1/.:%ü@-", max_size=4)) + example[start:end] * data.draw(st.integers(0, 3))
        text = example[:start] + inserted + example[end:]
        expected = accepts(alone, text_of(text)) and low <= len(text) <= high and bool(re.search(pattern, text))
        assert (both is not None and accepts(both, text_of(text))) == expected, text


@pytest.mark.costly
@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("lengths", [(0, 254), (250, 254), (1000, 100_000), (0, 100_000)])
def test_long_bounds_keep_within_the_limit_on_searches(name: str, lengths: tuple[int, int]) -> None:
    """Beyond EXPLORE_LIMIT derivatives, GrammarTooLarge would tell."""
    grammar = grammar_of(format=name, minLength=lengths[0], maxLength=lengths[1])
    example = EXAMPLES[name]
    is_within = lengths[0] <= len(example) <= lengths[1]
    assert (grammar is not None and accepts(grammar, text_of(example))) == is_within


@pytest.mark.parametrize("name", sorted(FORMATS - {"hostname"}))
def test_a_string_of_two_formats_has_both_and_not_one_of_them(name: str) -> None:
    names = ["hostname", name]
    formats = [{"format": each} for each in names]
    both, one = grammar_of(allOf=formats), grammar_of(oneOf=formats)
    alone = [grammar_of_format(each) for each in names]
    for example in (*EXAMPLES.values(), "a", "1.2", ""):
        text = text_of(example)
        belongs = [accepts(grammar, text) for grammar in alone]
        assert (both is not None and accepts(both, text)) == all(belongs), example
        assert (one is not None and accepts(one, text)) == (sum(belongs) == 1), example


def test_patterns_whose_shortest_text_is_hard_to_find_keep_to_lengths() -> None:
    patterns = [{"pattern": ".*abc.*"}, {"pattern": "a.{20}b"}]
    grammar = grammar_of(allOf=patterns, minLength=30, maxLength=64)
    assert grammar is not None
    assert accepts(grammar, text_of("abc" + 18 * "x" + "b" + 10 * "y"))
    assert not accepts(grammar, text_of("abc" + 18 * "x" + "b"))
