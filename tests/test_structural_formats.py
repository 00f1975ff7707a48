"""Structural tags made of formats, against brute force, and against XGrammar where it is installed."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.json_generation import BYTES
from sgl.errors import GrammarError
from sgl.grammar import Grammar, Vocabulary, compile
from sgl.grammar.vocabulary.special import spelled
from tests.format_oracle import is_of
from tests.json_random import accepts

ARRAY = {"type": "json_schema", "json_schema": {"type": "array", "items": {"const": 1}, "maxItems": 2}}
NUMBER = {"type": "json_schema", "json_schema": {"enum": [1, 11]}}
WORDS = ["a", "ab", "<", "<a", "b>", "]"]
ALPHABET = "ab<>[]1,"
UNKNOWN = "nothing tells which it is"


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.sampled_from([ARRAY, NUMBER]),
        st.sampled_from(WORDS).map(lambda word: {"type": "const_string", "value": word}),
        st.sampled_from(["a*", "[ab<]{1,2}", "(?:ab)+", "b?"]).map(lambda each: {"type": "regex", "pattern": each}),
        st.lists(st.sampled_from(WORDS), max_size=1).map(lambda each: {"type": "any_text", "excludes": each}),
        st.integers(0, 2).map(lambda most: {"type": "any_text", "max_chars": most}),
    )


def tags(inner: st.SearchStrategy[Any], begins: list[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    end = st.sampled_from([">", "b>", "]", ["a", ">"]])
    tag = st.fixed_dictionaries({"begin": st.sampled_from(begins), "content": inner, "end": end})
    return st.lists(tag.map(lambda each: {"type": "tag", **each}), min_size=1, max_size=2)


def compounds(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    flags = {"at_least_one": st.booleans(), "stop_after_first": st.booleans()}
    several = st.lists(inner, min_size=1, max_size=3)
    triggered = st.fixed_dictionaries(
        {
            "type": st.just("triggered_tags"),
            "triggers": st.just(["<"]),
            "tags": tags(inner, ["<", "<a", "<ab"]),
            **flags,
        },
        optional={"excludes": st.just(["]]"])},
    )
    return st.one_of(
        several.map(lambda each: {"type": "sequence", "elements": each}),
        several.map(lambda each: {"type": "or", "elements": each}),
        tags(inner, ["<", "", "a"]).map(lambda each: each[0]),
        st.tuples(st.sampled_from(["optional", "star", "plus"]), inner).map(
            lambda each: {"type": each[0], "content": each[1]}
        ),
        st.tuples(st.integers(0, 2), st.sampled_from([-1, 2, 3]), inner).map(
            lambda each: {"type": "repeat", "min": each[0], "max": each[1], "content": each[2]}
        ),
        triggered,
        st.fixed_dictionaries(
            {
                "type": st.just("tags_with_separator"),
                "tags": tags(inner, ["<", "<a", "b"]),
                "separator": st.sampled_from([",", "", "ab"]),
                **flags,
            }
        ),
        st.fixed_dictionaries(
            {
                "type": st.just("dispatch"),
                "rules": st.lists(
                    st.tuples(st.sampled_from(["<", "ab"]), inner),
                    min_size=1,
                    max_size=2,
                    unique_by=lambda rule: rule[0],
                ).map(lambda rules: [list(rule) for rule in rules]),
                "loop": st.booleans(),
            }
        ),
    )


FORMATS = st.recursive(leaves(), compounds, max_leaves=5)


def compiled(source: dict[str, Any]) -> Grammar | None:
    """None where no byte would tell a bracket from text, or there is no end to an empty text."""
    try:
        return compile(structural_tag={"type": "structural_tag", "format": source}, vocabulary=BYTES)
    except GrammarError as error:
        if not any(words in str(error) for words in (UNKNOWN, "may be empty", "no certain end")):
            raise
        return None


def texts_near(grammar: Grammar, draw: Any) -> list[str]:
    """Texts that the grammar allows, or nearly: a walk, each with a change."""
    found = [""]
    for _ in range(6):
        matcher, text = grammar.matcher(), ""
        for _ in range(draw(st.integers(0, 10))):
            allowed = [chr(byte) for byte in matcher.next_bytes() if chr(byte) in ALPHABET]
            if not allowed:
                break
            text += draw(st.sampled_from(sorted(allowed)))
            assert matcher.accept_bytes(text[-1:].encode())
        text += matcher.shortest_end().decode()
        at = draw(st.integers(0, len(text)))
        found += [text, text[:at] + draw(st.sampled_from(ALPHABET)) + text[at:], text[:at] + text[at + 1 :]]
    return found


@settings(deadline=None)
@given(source=FORMATS, data=st.data())
def test_formats_mean_what_their_description_says(source: dict[str, Any], data: st.DataObject) -> None:
    grammar = compiled(source)
    assume(grammar is not None)
    assert grammar is not None
    for text in texts_near(grammar, data.draw):
        assert accepts(grammar, text) == is_of(source, text), (source, text)


@settings(deadline=None)
@given(source=FORMATS, data=st.data())
def test_formats_mean_what_xgrammar_says(source: dict[str, Any], data: st.DataObject) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string as is_accepted

    grammar = compiled(source)
    assume(grammar is not None)
    assert grammar is not None
    try:
        other = xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": source}))
    except RuntimeError:  # it takes fewer
        assume(False)
    for text in texts_near(grammar, data.draw):
        if not any(blank in text for blank in " \n"):
            assert accepts(grammar, text) == is_accepted(other, text), (source, text)


def test_a_begin_tag_may_begin_another() -> None:
    for key in ("triggers", "format"):
        pairs = [("<f", {"type": "string"}), ("<f2", {"type": "array"}), ("<f>", {"type": "object"})]
        if key == "format":
            listed = [
                {"begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": ";"}
                for begin, schema in pairs
            ]
            tag: Any = {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": listed}}
        else:
            listed = [{"begin": begin, "schema": schema, "end": ";"} for begin, schema in pairs]
            tag = {"triggers": ["<f"], "structures": listed}
        found = compile(structural_tag=tag, vocabulary=BYTES)
        for text in ('<f"x";', "<f2[];", "a<f>{};<f2[1];b"):
            assert accepts(found, text), text
        for text in ("<f[];", '<f2"x";', "<f>[];", "<f2{}"):
            assert not accepts(found, text), text


CALL, END, EOS = "<|call|>", "<|/call|>", "<|eos|>"
NAMES = {256: CALL, 257: END, 258: EOS}
SPECIAL = Vocabulary([bytes([byte]) for byte in range(256)] + [None] * 3, [258], special=NAMES)


def ids_of(text: str) -> list[int]:
    """Special tokens by their names in braces, other characters by their bytes."""
    parts = text.replace("{C}", "\0").replace("{/C}", "\1").replace("{E}", "\2")
    return [256 + byte if byte < 3 else byte for byte in parts.encode()]


def takes(grammar: Grammar, text: str) -> bool:
    matcher = grammar.matcher()
    for token_id in ids_of(text):
        row = matcher.mask()
        allowed = bool(row[token_id // 32] >> (token_id % 32) & 1)
        assert matcher.copy().accept(token_id) == allowed
        if not allowed:
            return False
        assert matcher.accept(token_id)
    return bool(matcher.is_accepting())


BY_NAME = {
    "type": "triggered_tags",
    "triggers": [CALL],
    "tags": [{"begin": CALL + "f", "content": ARRAY, "end": END}],
}
TOKEN = {"type": "token", "token": CALL}
BY_TOKEN = {
    "type": "token_triggered_tags",
    "trigger_tokens": [256],
    "tags": [
        {
            "begin": TOKEN,
            "content": {"type": "sequence", "elements": [{"type": "const_string", "value": "f"}, ARRAY]},
            "end": {"type": "token", "token": 257},
        }
    ],
}
BY_DISPATCH = {
    "type": "token_dispatch",
    "rules": [
        [
            256,
            {
                "type": "sequence",
                "elements": [{"type": "const_string", "value": "f"}, ARRAY, {"type": "token", "token": END}],
            },
        ]
    ],
}
OLD = {"triggers": [CALL], "structures": [{"begin": CALL + "f", "schema": ARRAY["json_schema"], "end": END}]}


@pytest.mark.parametrize("tag", [{"format": BY_NAME}, {"format": BY_TOKEN}, {"format": BY_DISPATCH}, OLD])
def test_special_tokens_are_triggers_and_ends(tag: Any) -> None:
    found = compile(structural_tag=tag, vocabulary=SPECIAL)
    for text in ("", "a {b}", "{C}f[1]{/C}", "x{C}f[]{/C}y{C}f[1,1]{/C}", "a < b <|x|>"):
        assert takes(found, text), text
    for text in ("{C}g", "{C}f[1]" + END, "{/C}", "x{C}", CALL + "f[1]" + END, CALL):
        assert not takes(found, text), text
    assert Grammar.from_bytes(found.to_bytes(), SPECIAL).constraint == found.constraint


def test_where_the_model_has_no_such_token_its_name_is_text() -> None:
    found = compile(structural_tag={"format": BY_NAME}, vocabulary=BYTES)
    assert accepts(found, f"x{CALL}f[1]{END}y")
    assert not accepts(found, f"{CALL}g")


def test_a_token_that_ends_texts_ends_the_tag() -> None:
    tag = {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ["]", EOS]}
    source = {"type": "sequence", "elements": [tag, {"type": "const_string", "value": "!"}]}
    found = compile(structural_tag={"format": source}, vocabulary=SPECIAL)
    for text in ("<a]!", "<a{E}", "<a", "<"):
        assert takes(found, text), text
    for text in ("<a]", "a", "<a]{E}", f"<a{EOS}"):
        assert not takes(found, text), text


def test_special_tokens_are_no_text() -> None:
    free = compile(regex="(?s:.*)", vocabulary=SPECIAL)
    for text, is_allowed in (("a<|call|>", True), ("{C}", False), ("a{/C}", False)):
        assert takes(free, text) == is_allowed
    assert spelled(CALL) == SPECIAL.token_bytes[256]


BAD: list[tuple[Any, str]] = [
    ({"type": "repeat", "min": 3, "max": 2, "content": ARRAY}, "max of a repeat is at least its min, 3"),
    ({"type": "repeat", "min": -1, "max": 2, "content": ARRAY}, "min of a format is an integer from 0"),
    ({"type": "repeat", "min": 10**6, "max": -1, "content": ARRAY}, "min of a format is an integer from 0"),
    ({"type": "star", "content": {"type": "any_text"}}, "may be empty, so that there is no end"),
    ({"type": "any_text", "max_tokens": 3}, "max_tokens of any_text is not supported"),
    ({"type": "any_text", "max_chars": 10**6}, "max_chars of a format is an integer from 0 to 4096"),
    ({"type": "json_schema", "json_schema": {}, "any_order": True}, "any_order of a json_schema is false here"),
    ({"type": "json_schema", "json_schema": {}, "excludes": ["a"]}, "excludes of a json_schema is not supported"),
    ({"type": "json_schema", "json_schema": {"type": "array"}, "style": "qwen_xml"}, "is an object"),
    ({"type": "qwen_xml_parameter", "json_schema": {"type": "object", "properties": {"a b": {}}}}, "named 'a b'"),
    ({"type": "qwen_xml_parameter", "json_schema": {"type": "object", "minProperties": 1}}, "no minProperties"),
    (
        {
            "type": "json_schema",
            "json_schema": {"type": "object", "properties": {'a"b': {}}},
            "style": "minimax_xml",
        },
        "named 'a\"b'",
    ),
    ({"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": ["b", ""]}, "has an end"),
    ({"type": "tag", "begin": {"type": "token", "token": 1.5}, "content": ARRAY, "end": ""}, "a text or a token"),
    ({**BY_TOKEN, "tags": BY_NAME["tags"]}, "begin with a token"),
    ({**BY_NAME, "tags": BY_TOKEN["tags"]}, "begin with a text"),
    ({**BY_TOKEN, "trigger_tokens": [10**6]}, "token 1000000 is no token"),
    ({"type": "dispatch", "rules": [["a"]]}, "pairs of a text and a format"),
    ({"type": "dispatch", "rules": [["a", {"type": "any_text"}]]}, "no certain end"),
    (
        {
            "type": "tags_with_separator",
            "separator": "",
            "tags": [{"begin": "", "content": {"type": "regex", "pattern": "a*"}, "end": ""}],
        },
        "have a separator",
    ),
    ({"type": "exclude_token"}, "has a type of .* not 'exclude_token'"),
    (
        {"type": "triggered_tags", "triggers": [EOS], "tags": [{"begin": EOS, "content": ARRAY, "end": ""}]},
        "ends the text",
    ),
    (
        {
            "type": "repeat",
            "min": 0,
            "max": 1000,
            "content": {"type": "repeat", "min": 0, "max": 1000, "content": ARRAY},
        },
        "more than 100000 formats",
    ),
]


@pytest.mark.parametrize(("source", "words"), BAD)
def test_formats_that_cannot_be_are_refused(source: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        compile(structural_tag={"format": source}, vocabulary=SPECIAL)


def test_every_combination_of_flags_of_tags_with_a_separator() -> None:
    tag = {"type": "tag", "begin": "<", "content": ARRAY, "end": ">"}
    for at_least_one, stop in itertools.product([False, True], repeat=2):
        source = {"type": "tags_with_separator", "tags": [tag], "separator": ",", "at_least_one": at_least_one}
        found = compiled({**source, "stop_after_first": stop})
        assert found is not None
        assert accepts(found, "") == (not at_least_one)
        assert accepts(found, "<[]>")
        assert accepts(found, "<[]>,<[1]>") == (not stop)


LINEAR = [
    'root ::= "a" ("b" | "c"){1,3} n*\nn ::= [ab]+ ","',
    'root ::= "a" s | "b"\ns ::= "b" root | "c" s | ""',
    'root ::= root "a" | "b" root | ","',
    'root ::= x ("," x)*\nx ::= "a"? y\ny ::= "b" z | "a"\nz ::= "b" y | x',
    'root ::= [^a] "b"? | "" | loop\nloop ::= "a" loop',
]


@pytest.mark.parametrize("source", LINEAR)
def test_grammars_without_nesting_stand_anywhere(source: str) -> None:
    """As llguidance reads them."""
    pytest.importorskip("llguidance")
    whole = compile(ebnf=source, vocabulary=BYTES)
    tag = {"type": "tag", "begin": "<", "content": {"type": "grammar", "grammar": source}, "end": ">"}
    found = compile(structural_tag={"format": tag}, vocabulary=BYTES)
    texts = ["".join(each) for length in range(6) for each in itertools.product("abc,", repeat=length)]
    allowed = [text for text in texts if accepts(whole, text)]
    assert allowed == [text for text in texts if accepts(found, f"<{text}>")]
    assert allowed


def test_a_grammar_that_nests_stands_alone() -> None:
    pytest.importorskip("llguidance")
    nested = {"type": "grammar", "grammar": 'root ::= "(" root ")" | "a"'}
    assert accepts(compile(structural_tag={"format": nested}, vocabulary=BYTES), "((a))")
    with pytest.raises(GrammarError, match="for the whole text"):
        compile(structural_tag={"format": {"type": "optional", "content": nested}}, vocabulary=BYTES)
