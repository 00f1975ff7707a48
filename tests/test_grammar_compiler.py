"""The public door: every kind of constraint, its errors, serialised grammars, and what hostile constraints come to."""

from __future__ import annotations

import gc
import json
import random
import re
import socket
import sys
from typing import Any

import numpy as np
import pytest

from sgl import grammar
from sgl.errors import GrammarError, GrammarTooLarge, RegexSyntaxError, UnsupportedSchema
from sgl.grammar import JSON_OBJECT, Grammar, Vocabulary
from sgl.grammar.automaton.finished import complete
from sgl.grammar.automaton.subsets import Subsets
from sgl.grammar.compiler import MAX_SOURCE, make_constraint
from sgl.runtime.constraints.process import Channel
from sgl.runtime.constraints.service import CompileService
from sgl.time_limit import OutOfTime, check_time, collection_time, time_limit
from tests.grammar_oracles import accepted_one_by_one, likely, mask_of, piece_vocabulary
from tests.json_random import accepts
from tests.patience import PATIENCE

PIECES = piece_vocabulary()
TAG: dict[str, Any] = {
    "triggers": ["<f"],
    "structures": [
        {"begin": "<f=add>", "schema": {"type": "array", "items": {"type": "integer"}}, "end": "</f>"},
        {"begin": "<f=say>", "regex": "[a-z]{20,40}", "end": "</f>"},
    ],
}


def compiled(**constraint: Any) -> Grammar:
    return grammar.compile(**constraint, vocabulary=PIECES)


def test_json_mode_is_any_object() -> None:
    found = compiled(json_schema=JSON_OBJECT)
    for value in ({}, {"a": [1, {"b": None}], "c": "é\n", "": {}}):
        assert accepts(found, json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    for text in ("[]", "1", '"x"', "{", '{"a":}', '{"a":1,}', '{"a" :1}', "{}{}"):
        assert not accepts(found, text)


def test_whitespace_is_none_or_bounded() -> None:
    text = '{\n  "a": [ 1,\n    2 ],\n "b" : 1.50e+1}'
    assert not accepts(compiled(json_schema=JSON_OBJECT), text)
    flexible = grammar.compile(json_schema=JSON_OBJECT, vocabulary=PIECES, whitespace="flexible")
    assert accepts(flexible, text)
    assert not accepts(flexible, '{"a":  1}')
    assert not accepts(flexible, '{"a":\n\n1}')


@pytest.mark.parametrize(
    "before", ["{", '{"a"', '{"a":', '{"a":[', '{"a":[1', '{"a":[1,', '{"a":[1,1]', '{"a":[1,1],']
)
def test_at_most_sixty_four_blanks_follow_a_line_break(before: str) -> None:
    behind = '{"a":[1,1],"b":2}'[len(before) :]
    flexible = grammar.compile(json_schema=JSON_OBJECT, vocabulary=PIECES, whitespace="flexible")
    for line_break in ("\n", "\r\n"):
        for blanks in ("", " " * 64, "\t" * 64, " \t" * 32):
            assert accepts(flexible, before + line_break + blanks + behind)
        for blanks in (" " * 65, "\t" * 65, " " * 63 + "\n", " " * 64 + "\n"):
            assert not accepts(flexible, before + line_break + blanks + behind)


def test_blanks_take_no_state_for_each_number_of_them() -> None:
    sizes = []
    for whitespace in ("compact", "flexible"):
        automaton = grammar.compile(json_schema=JSON_OBJECT, vocabulary=PIECES, whitespace=whitespace).automaton  # type: ignore[arg-type]
        assert automaton is not None
        assert complete(automaton, 5000)
        sizes.append(len(automaton))
    assert sizes[1] < 3 * sizes[0]


def test_keys_come_in_order_unless_any_is_asked_for() -> None:
    schema = {
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "required": ["a", "b"],
        "type": "object",
    }
    text = '{"b":null,"a":null}'
    assert not accepts(compiled(json_schema=schema), text)
    assert accepts(compiled(json_schema=schema, key_order="any"), text)
    assert not accepts(compiled(json_schema=schema, key_order="any"), '{"b":null,"a":null,"b":null}')


def test_a_schema_may_be_given_as_text_and_dropped_keywords_are_listed() -> None:
    schema = {"type": "string", "format": "regex", "maxLength": 3}
    with pytest.raises(UnsupportedSchema) as caught:
        compiled(json_schema=json.dumps(schema))
    assert caught.value.keyword == "format"
    found = compiled(json_schema=json.dumps(schema), lenient=True)
    assert [one.keyword for one in found.dropped] == ["format"]
    assert accepts(found, '"abc"')
    assert not accepts(found, '"abcd"')


def test_choices_are_texts_also_if_one_begins_another() -> None:
    found = compiled(choices=["yes", "yes please", 'a"b', "日本"])
    for text in ("yes", "yes please", 'a"b', "日本"):
        assert accepts(found, text)
    for text in ("ye", "yes ", "no", ""):
        assert not accepts(found, text)


def test_structural_tags_leave_text_free_until_a_trigger() -> None:
    found = compiled(structural_tag=TAG)
    word = "abcdefghij" * 2
    for text in ("", "free { text", "x<f=add>[1,2]</f> and <f=say>" + word + "</f>", "< f <<f=add>[]</f>", "a<"):
        assert accepts(found, text), text
    for text in ("<f", "<f=mul>", "<f=add>[1", "<f=add>[1]", '<f=add>["a"]</f>', "<f=say>short</f>", "<f>"):
        assert not accepts(found, text), text
    once = compiled(structural_tag=TAG | {"at_least_one": True, "stop_after_first": True})
    assert not accepts(once, "free text")
    assert accepts(once, "free text<f=add>[]</f>")
    assert not accepts(once, "free text<f=add>[]</f>.")
    assert once.matcher().shortest_end() == b"<f=add>[]</f>"


ARRAY: dict[str, Any] = {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "integer"}}}
WORD: dict[str, Any] = {"type": "regex", "pattern": "[a-z]{2,4}"}
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "const_string", "value": "a<b"}, ["a<b"], ["", "a", "a<bc"]),
    (ARRAY, ["[]", "[1,2]"], ["", "{}", "[1"]),
    (WORD, ["ab", "abcd"], ["a", "abcde"]),
    ({"type": "any_text"}, ["", "x\n<"], []),
    ({"type": "any_text", "excludes": ["no"]}, ["", "n o"], ["a no b"]),
    (
        {"type": "tag", "begin": "<a>", "content": ARRAY, "end": "</a>"},
        ["<a>[1]</a>"],
        ["[1]", "<a>[1]", "x<a>[]</a>"],
    ),
    (
        {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
        ["<t></t>", "<t>a <b</t>"],
        ["<t>a</t>b</t>", "<t>"],
    ),
    (
        {"type": "sequence", "elements": [ARRAY, {"type": "const_string", "value": "-"}, ARRAY, WORD]},
        ["[]-[1]abcd"],
        ["[]-[]a", "[][]ab", "[]-ab"],
    ),
    (
        {"type": "or", "elements": [WORD, {"type": "const_string", "value": "abcdef"}]},
        ["ab", "abcdef"],
        ["abcde"],
    ),
    (
        {
            "type": "sequence",
            "elements": [
                {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                {
                    "type": "triggered_tags",
                    "triggers": ["<f"],
                    "tags": [
                        {"begin": "<f=a>", "content": ARRAY, "end": "</f>"},
                        {"type": "tag", "begin": "<f=b>", "content": WORD, "end": "</f>"},
                    ],
                    "at_least_one": True,
                    "stop_after_first": True,
                },
                {"type": "const_string", "value": "."},
            ],
        },
        ["<think>hm</think><f=a>[1]</f>.", "<think></think><f=b>abc</f>."],
        ["<think>hm</think>well <f=a>[1]</f>.", "<f=a>[1]</f>.", "<think></think><f=b>a</f>.", "<think></think>."],
    ),
]


def test_a_regex_beside_a_schema_goes_to_the_first_end_tag_that_completes_it() -> None:
    structures = [{"begin": "<f=say>", "regex": ".*", "end": "</f>"}]
    texts_alone = compiled(structural_tag=TAG | {"structures": structures})
    assert accepts(texts_alone, "<f=say>x</f>y</f>")
    assert accepts(texts_alone, "<f=say>x</f><f=mul></f>")
    structures.append({"begin": "<f=add>", "schema": {"type": "array"}, "end": "</f>"})
    found = compiled(structural_tag=TAG | {"structures": structures})
    for text in ("<f=add>[1]</f>", "<f=say>x</f><f=add>[1]</f>", "<f=say>{</f>y</f>", "<f=say></<</f>{<f=say></f>"):
        assert accepts(found, text), text
    for text in (
        "<f=say>x</f><f=mul></f>",
        "<f=say>x</f><f=add>{}</f>",
        "<f=say>x</f",
        "<f=say>x</f><f=add>[1</f>",
    ):
        assert not accepts(found, text), text
    structures[0]["regex"] = "[^<]{0,100000}"  # which holds no end tag, and is counted
    clear = compiled(structural_tag=TAG | {"structures": structures})
    assert accepts(clear, "<f=say>" + "x" * 5000 + "</f><f=add>[1]</f>")
    assert clear.automaton is not None
    assert len(clear.automaton) < 100


@pytest.mark.parametrize(
    "regex", ["(?:.|\n)*", ".*b", "(?:ab?)*", "a*(?:>a*)?", "[^b]{1,4}", "(?:a|>)(?:<a>)?", "b?"]
)
@pytest.mark.parametrize("end", [">", "</a>", "aa", "a>a", ""])
@pytest.mark.parametrize("key", ["triggers", "format"])
def test_tags_of_both_kinds_are_read_one_after_the_other(regex: str, end: str, key: str) -> None:
    """What a reader says who looks for the first end of each body."""
    if key == "format":
        tags = [
            {"begin": "<s", "content": {"type": "regex", "pattern": regex}, "end": end},
            {"begin": "<j", "content": ARRAY, "end": end},
        ]
        source: Any = {"format": {"type": "triggered_tags", "triggers": ["<s", "<j"], "tags": tags}}
    else:
        structures = [
            {"begin": "<s", "regex": regex, "end": end},
            {"begin": "<j", "schema": ARRAY["json_schema"], "end": end},
        ]
        source = {"triggers": ["<s", "<j"], "structures": structures}
    found = compiled(structural_tag=source)
    rng = random.Random(f"{regex} {end}")
    pieces = ["<s", "<j", "<j[]", "<j[1]" + end, end, "a", "b", "<", ">", "[", "]", "<s" + "a" + end]
    outcomes = set()
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 7)))
        outcomes.add(expected := is_tagged(text, regex, end))
        assert accepts(found, text) == expected, text
    assert outcomes == {True, False}


def test_a_structure_may_be_over_with_its_begin_tag() -> None:
    found = compiled(structural_tag={"triggers": ["<a"], "structures": [{"begin": "<a", "regex": "b*", "end": ""}]})
    for text in ("<a", "<abb", "x<a<abb x"):
        assert accepts(found, text), text


def is_tagged(text: str, regex: str, end: str) -> bool:
    while (start := re.search("<s|<j", text)) is not None:
        text = text[start.end() :]
        body = regex if start[0] == "<s" else r"\[(?:-?\d+(?:,-?\d+)*)?\]"
        ends = (i for i in range(len(end), len(text) + 1) if text[:i].endswith(end))
        first = next((i for i in ends if re.fullmatch(body, text[: i - len(end)])), None)
        if first is None:
            return False
        text = text[first:]
    return True


@pytest.mark.parametrize(("source", "good", "bad"), FORMATS)
def test_structural_tags_may_be_written_as_formats(source: dict[str, Any], good: list[str], bad: list[str]) -> None:
    found = compiled(structural_tag={"type": "structural_tag", "format": source})
    for text in good:
        assert accepts(found, text), text
    for text in bad:
        assert not accepts(found, text), text
    end = found.matcher().shortest_end()
    assert end is not None
    assert accepts(found, end.decode())


BAD_FORMATS: list[tuple[Any, str]] = [
    (
        {"type": "sequence", "elements": [{"type": "triggered_tags", "triggers": ["<"], "tags": [1]}]},
        "has a type of",
    ),
    ({"type": "sequence", "elements": [{"type": "any_text"}, ARRAY]}, "nothing tells which it is"),
    ({"type": "or", "elements": [{"type": "any_text"}, ARRAY]}, "nothing tells which it is"),
    ({"type": "plus", "content": {"type": "grammar", "grammar": "root ::= a"}}, "root ::= a|rule a"),
    ({"type": ["tag"]}, "has a type of"),
    ("tag", "has a type of"),
    ({"type": "tag", "begin": "a", "content": WORD}, "of type 'tag' has begin, content, end"),
    ({"type": "const_string", "value": 1}, "value of a format is a string"),
    ({"type": "sequence", "elements": []}, "at least one"),
    ({"type": "any_text", "excludes": [""]}, "none of them empty"),
    ({"type": "json_schema", "json_schema": {}, "style": "kimi_k3_xml"}, "style of a json_schema is 'json'"),
    (
        {
            "type": "triggered_tags",
            "triggers": ["<"],
            "tags": [{"begin": "<", "content": {"type": "any_text"}, "end": ""}],
        },
        "around text of no certain end",
    ),
    ({"type": "triggered_tags", "triggers": [], "tags": [{"begin": "<", "content": WORD, "end": ""}]}, "triggers"),
    (json.loads('{"type":"sequence","elements":[' * 40 + '{"type":"any_text"}' + "]}" * 40), "nested more than 32"),
]


@pytest.mark.parametrize(("source", "message"), BAD_FORMATS)
def test_malformed_formats_are_refused(source: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compiled(structural_tag={"type": "structural_tag", "format": source})


BAD_TAGS: list[tuple[Any, str]] = [
    ({"triggers": [], "structures": TAG["structures"]}, "triggers"),
    ({"triggers": ["<f"], "structures": []}, "structures"),
    (TAG | {"triggers": ["<g"]}, "starts with none"),
    (TAG | {"triggers": ["<f", "<g"]}, "no begin tag starts with"),
    (TAG | {"more": 1}, "structural tag is an object"),
    (TAG | {"at_least_one": 1}, "true or false"),
    ({"triggers": ["<"], "structures": [{"begin": "<a", "end": ""}]}, "either schema or regex"),
]


@pytest.mark.parametrize(("tag", "message"), BAD_TAGS)
def test_malformed_structural_tags_are_refused(tag: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compiled(structural_tag=tag)


def test_context_free_grammars_go_through_llguidance() -> None:
    pytest.importorskip("llguidance")
    found = compiled(ebnf='root ::= "a" ("b" | "c" root "d")*')
    assert found.automaton is None
    for text in ("a", "abb", "acabdb"):
        assert accepts(found, text)
    for text in ("b", "acab", "abx"):
        assert not accepts(found, text)
    matcher = compiled(ebnf='start: "x1" /[ab]{2}/ "red"').matcher()
    assert matcher.forced_bytes() == b"x1"
    rng = random.Random(0)
    for _ in range(20):
        mask = mask_of(matcher, PIECES)
        assert mask.any()
        assert (mask == accepted_one_by_one(matcher, PIECES)).all()
        token_id = likely(matcher, PIECES, mask, rng)
        before = matcher.copy()
        assert matcher.accept(token_id)
        if matcher.is_finished():
            break
        matcher.rollback(1)
        assert (mask_of(matcher, PIECES) == mask_of(before, PIECES)).all()
        assert matcher.accept(token_id)
    assert matcher.is_finished()
    with pytest.raises(GrammarError, match="grammar"):
        compiled(ebnf="start: (")


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = Vocabulary([b"a"], [])
    with pytest.raises(GrammarError, match=r"sgl\[ebnf\]"):
        grammar.compile(ebnf='start: "a"', vocabulary=fresh)


def nested_objects(depth: int) -> dict[str, Any]:
    """An object in an object in …"""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one"),
    ({"regex": "a", "choices": ["a"]}, "exactly one"),
    ({"choices": []}, "at least one string"),
    ({"choices": "abc"}, "at least one string"),
    ({"choices": ["\ud800"]}, "not valid Unicode"),
    ({"regex": "(?=a)b"}, "nothing at all"),
    ({"json_schema": "{not json"}, "not valid JSON"),
    ({"json_schema": {"type": object}}, "not JSON data"),
    ({"json_schema": nested_objects(800)}, "nested too deeply"),
    ({"json_schema": "[" * 100_000}, "nested too deeply"),
    ({"regex": "a", "whitespace": "any"}, "whitespace"),
    ({"regex": "a", "key_order": "random"}, "key_order"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_what_is_no_constraint_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compiled(**arguments)


def test_depth_that_shows_behind_some_bytes_is_refused_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = compiled(regex="ab*c").matcher()
    assert matcher.accept_bytes(b"a")

    def expand(*_: Any) -> None:
        raise RecursionError

    monkeypatch.setattr(Subsets, "expand", expand)
    with pytest.raises(GrammarTooLarge, match="nested too deeply"):
        matcher.accept_bytes(b"bc")


def test_long_sequences_of_optional_parts_keep_to_their_time() -> None:
    matcher = compiled(regex="xyz" + "".join(f"(w{i} )?" for i in range(3_000))).matcher()
    with pytest.raises(OutOfTime), time_limit(0.01):
        matcher.accept_bytes(b"xyzw")


def test_grammars_are_serialised_by_their_source() -> None:
    found = grammar.compile(json_schema=JSON_OBJECT, vocabulary=PIECES, whitespace="flexible", key_order="any")
    again = Grammar.from_bytes(found.to_bytes(), PIECES)
    assert again.constraint == found.constraint
    assert accepts(again, '{ "a": 1 }')
    for data, message in [
        (b"junk", "not a serialised grammar"),
        (b"[]", "not a serialised grammar"),
        (found.to_bytes().replace(b'"version": 1', b'"version": 9'), "format 9"),
    ]:
        with pytest.raises(GrammarError, match=message):
            Grammar.from_bytes(data, PIECES)
    with pytest.raises(GrammarError, match="another vocabulary"):
        Grammar.from_bytes(found.to_bytes(), Vocabulary([b"a"], []))


def test_six_fields_take_little_memory() -> None:
    kinds = ["string", "integer", "number", "boolean", "string", "integer"]
    properties = {f"field_number_{i}": {"type": kind} for i, kind in enumerate(kinds)}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    found = compiled(json_schema=schema)
    assert found.automaton is not None
    matcher = found.matcher()
    for i, value in enumerate(['"text"', "12", "1.5e3", "true", '""', "0"]):
        for byte in f'{"{" if i == 0 else ","}"field_number_{i}":{value}'.encode():
            mask_of(matcher, PIECES)
            assert matcher.accept(byte)
    assert found.automaton.tables.nbytes <= 100_000
    assert found.num_bytes > found.automaton.tables.nbytes


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [{"type": "array", "items": schema}, {"type": "null"}]}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "deep schema": {"json_schema": '{"items":' * 20_000 + "{}" + "}" * 20_000},
    "nested choices": {"json_schema": nested(150)},
    "deep regex": {"regex": "(" * 5_000 + "a" + ")" * 5_000},
    "exponential regex": {"regex": "(a|b)*a(a|b){40}"},
    "nested repeats": {"regex": "((((a{1,90}){1,90}){1,90}){1,90}b?){1,90}"},
    "ambiguous": {"regex": "(a?){400}a{400}"},
    "huge bounds": {"json_schema": {"type": "string", "pattern": "^(ab?){1,99999}$", "minLength": 90_000}},
    "intersections": {
        "json_schema": {"allOf": [{"type": "string", "pattern": f"{a}.{{7}}{b}"} for a in "abc" for b in "def"]}
    },
    "NUL": {"json_schema": {"const": "a\0b", "title": "\0"}},
    "NUL regex": {"regex": "a\0b\\x00[\\0-\\x05]"},
    "many keys": {"json_schema": {"type": "object", "properties": {f"key {i}": {} for i in range(30_000)}}},
    "empty loop": {"json_schema": {"$ref": "#"}},
    "impossible recursion": {
        "json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    },
    "exclusive": {
        "json_schema": {"oneOf": [{"type": "string", "pattern": f"^.*{i}.*{i}.*$"} for i in range(12)]}
    },
    "megabyte": {"json_schema": {"enum": [f"{i:050d}" for i in range(20_000)]}},
    "too large": {"choices": ["x" * MAX_SOURCE]},
}  # fmt: skip


@pytest.fixture(scope="module")
def service() -> Any:
    service = CompileService(PIECES, deadline=3.0, moment=0.2)
    yield service
    service.close()


@pytest.mark.costly
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_end_in_a_grammar_or_a_typed_error(service: CompileService, name: str) -> None:
    constraint = make_constraint(HOSTILE[name])
    flight = service.submit(constraint)
    try:
        found = flight.result(PATIENCE)
    except GrammarError:
        assert service.submit(constraint) is flight, "failures are remembered"
        return
    matcher, rng = found.matcher(), random.Random(0)
    try:
        while not matcher.is_finished() and len(matcher._history) < 10:
            assert matcher.accept(likely(matcher, PIECES, mask_of(matcher, PIECES, 50), rng))
    except GrammarTooLarge:
        return


def test_equal_constraints_are_one_flight_and_old_ones_make_room() -> None:
    service = CompileService(PIECES, max_grammars=2)
    try:
        one, two, three = (make_constraint({"regex": text}) for text in ("a", "b", "c"))
        first = service.submit(one)
        assert service.submit(one) is first
        assert accepts(first.result(PATIENCE), "a")
        service.submit(two)
        service.submit(three)
        assert service.submit(one) is not first
        assert accepts(service.submit(one).result(PATIENCE), "a")
    finally:
        service.close()


def test_a_failure_is_forgotten_after_a_while() -> None:
    service = CompileService(PIECES, failures_kept=0.0)
    try:
        bad = make_constraint({"regex": "("})
        first = service.submit(bad)
        assert isinstance(first.exception(PATIENCE), RegexSyntaxError)
        assert service.submit(bad) is not first
    finally:
        service.close()


def test_what_outlives_the_deadline_is_killed_and_the_service_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    service = CompileService(PIECES, deadline=0.3)
    try:
        # A trial that never answers stands for one that is stuck where no check stands.
        monkeypatch.setattr(service._trial, "_channel", _silent())
        monkeypatch.setattr(service._trial, "_is_ready", True)
        monkeypatch.setattr(service._trial, "_started", lambda: service._trial._channel)
        monkeypatch.setattr(service, "moment", 0.0)
        with pytest.raises(GrammarTooLarge):
            service.submit(make_constraint({"regex": "stuck"})).result(PATIENCE)
        monkeypatch.undo()
        service.deadline = PATIENCE
        assert accepts(service.submit(make_constraint({"regex": "ok"})).result(PATIENCE), "ok")
    finally:
        service.close()


def _silent() -> Channel:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    channel = Channel(ours)
    channel.other_end = theirs  # type: ignore[attr-defined]  # kept open
    return channel


def test_time_limits_nest_and_end() -> None:
    with time_limit(100), pytest.raises(OutOfTime), time_limit(-1):
        check_time()
    with pytest.raises(OutOfTime), time_limit(-1), time_limit(100):
        check_time()
    check_time()


def test_collections_of_garbage_are_no_time_of_who_works() -> None:
    now = [0.0]
    with time_limit(1.0, lambda: now[0]):
        before = collection_time()
        gc.collect()
        took = collection_time() - before
        assert took > 0
        now[0] = 1.0 + took / 2
        check_time()
        now[0] = 1.0 + took * 2
        with pytest.raises(OutOfTime):
            check_time()


def test_a_mask_that_takes_too_long_is_an_error_and_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiled(regex="[a-c]{3}x")
    matcher = found.matcher()
    monkeypatch.setattr(found.masks, "max_seconds", -1.0)
    with pytest.raises(GrammarTooLarge):
        matcher.fill_mask(np.zeros(PIECES.words, np.int32))
    monkeypatch.undo()
    matcher.fill_mask(np.zeros(PIECES.words, np.int32))
