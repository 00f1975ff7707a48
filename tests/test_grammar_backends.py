"""One interface, three backends: the same masks, valid documents through every door, and each backend's refusals."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from sgl import Engine, grammar
from sgl.errors import ConfigError, GrammarError, GrammarTooLarge
from sgl.grammar import Grammar, Vocabulary
from sgl.grammar.compiler import make_constraint
from sgl.runtime.constraints import packages
from sgl.runtime.constraints.service import CompileService
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served
from tests.patience import PATIENCE
from tests.test_constraint_doors import (
    Kind,
    chat_whole,
    completions_stream,
    engine_stream,
    engine_whole,
    everywhere,
    fits,
    matches,
    native_whole,
    program_in_process,
    program_shipped_streamed,
)

pytest.importorskip("llguidance")
pytest.importorskip("outlines_core")
pytest.importorskip("interegular")

BACKENDS = ["sgl", "outlines", "llguidance"]
BYTES = Vocabulary([bytes([byte]) for byte in range(256)], [])
TOKENS = [
    "",
    "a",
    "b",
    "c",
    "ab",
    "abc",
    "ba",
    "é",
    "bé",
    '"',
    '{"',
    '":',
    "true",
    "1",
    "10",
    "[",
    "]",
    "{",
    "}",
    ":",
    ",",
]
PARTS = [b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", b"\xf4", b"\x8f", b"\xbf", b"\xbe", b"\xf4\x8f\xbf", b"a\xf4"]
PIECES = Vocabulary([*(token.encode() for token in TOKENS), *PARTS], eos_ids=[0])
END = "\U0010ffff".encode()
LAST_BUT_ONE = "\U0010fffe"  # shares its first bytes with the character that outlines' patterns end in


def compiled(backend: str, vocabulary: Vocabulary = PIECES, **constraint: Any) -> Grammar:
    return grammar.compile(**constraint, vocabulary=vocabulary, backend=backend)  # type: ignore[arg-type]  # of BACKENDS


def allowed(matcher: Any, vocabulary: Vocabulary) -> list[int]:
    row = np.full(vocabulary.words, -1, np.int32)
    matcher.fill_mask(row)
    assert (row == matcher.mask()).all()
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def texts_of(pattern: str, alphabet: str = "abcé1", length: int = 4) -> set[bytes]:
    """The texts of a regex, none of which is longer."""
    every = ("".join(chars) for n in range(length + 1) for chars in itertools.product(alphabet, repeat=n))
    return {text.encode() for text in every if re.fullmatch(pattern, text, re.ASCII)}


PATTERNS = [
    "a|ab",
    "(ab)?c?",
    "ab{0,2}?c?",
    "(a|b|ab){1,2}",
    "a{2}|b?é",
    "1[^\\Wb\\d_d-zA-Z]?",
    "^(a|abc)$",
    "(a|)é{1,2}",
]
FINITE: list[tuple[dict[str, Any], set[bytes]]] = [
    *(({"regex": pattern}, texts_of(pattern)) for pattern in PATTERNS),
    ({"choices": ["a", "ab", "abc", "b.c", "é", "a"]}, {b"a", b"ab", b"abc", b"b.c", "é".encode()}),
    ({"choices": ["a", f"a{LAST_BUT_ONE}"]}, {b"a", f"a{LAST_BUT_ONE}".encode()}),
    ({"json_schema": {"enum": ["a", "ab", 1, 10, True]}}, {b'"a"', b'"ab"', b"1", b"10", b"true"}),
    (
        {
            "json_schema": {
                "type": "object",
                "properties": {"a": {"const": 1}, "b": {"enum": ["é", 10]}},
                "required": ["b"],
                "additionalProperties": False,
            }
        },
        {b'{"b":10}', '{"b":"é"}'.encode(), b'{"a":1,"b":10}', '{"a":1,"b":"é"}'.encode()},
    ),
    (
        {"json_schema": {"type": "array", "items": {"const": 1}, "maxItems": 2}},
        {b"[]", b"[1]", b"[1,1]"},
    ),
    (
        {
            "json_schema": {
                "type": "array",
                "prefixItems": [{"const": 1}],
                "minItems": 1,
                "maxItems": 1,
                "items": False,
            }
        },
        {b"[1]"},
    ),
    (
        {"json_schema": {"$ref": "#/$defs/b", "$defs": {"b": {"anyOf": [{"const": 1}, {"const": 10}]}}}},
        {b"1", b"10"},
    ),
    ({"json_schema": {"type": "string", "pattern": "^(a|b)c?$"}}, {b'"a"', b'"b"', b'"ac"', b'"bc"'}),
    ({"json_schema": {"type": "string", "pattern": '^[\\n"]$'}}, {b'"\\n"', b'"\\""'}),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("constraint", "texts"), FINITE, ids=lambda value: json.dumps(value) if type(value) is dict else ""
)
def test_masks_are_those_of_brute_force(backend: str, constraint: dict[str, Any], texts: set[bytes]) -> None:
    begun = {text[:end] for text in texts for end in range(len(text) + 1)}
    first = compiled(backend, **constraint).matcher()
    waiting, seen = [(b"", first)], {b""}
    while waiting:
        text, matcher = waiting.pop()
        assert matcher.is_accepting() == (text in texts), text
        expected = {i for i, data in enumerate(PIECES.token_bytes) if data and text + data in begun}
        assert set(allowed(matcher, PIECES)) == expected | ({0} if text in texts else set()), text
        assert set(matcher.next_bytes()) == {
            one[len(text)] for one in begun if one.startswith(text) and one != text
        }
        forced = matcher.forced_bytes()
        assert all(one.startswith(text + forced) for one in texts if one.startswith(text))
        for token_id in range(PIECES.size):
            after = matcher.copy()
            assert after.accept(token_id) == (token_id in expected or (token_id == 0 and text in texts))
            longer = text + PIECES.token_bytes[token_id]
            if token_id in expected and longer not in seen:
                seen.add(longer)
                waiting.append((longer, after))
        assert matcher.copy().accept_bytes(b"b") == (text + b"b" in begun)
        assert set(allowed(matcher, PIECES)) >= expected, "what copies did changed nothing"
    assert len(seen) > 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_are_taken_back(backend: str) -> None:
    matcher = compiled(backend, regex="(ab|c){1,3}").matcher()
    masks = []
    for token in ("ab", "c", ""):
        masks.append(allowed(matcher, PIECES))
        assert matcher.accept(TOKENS.index(token))
    assert matcher.is_finished()
    assert allowed(matcher, PIECES) == []
    assert not matcher.accept(TOKENS.index("ab"))
    with pytest.raises(ValueError, match="4 steps"):
        matcher.rollback(4)
    for mask in reversed(masks):
        matcher.rollback(1)
        assert allowed(matcher, PIECES) == mask


def random_regex(rng: random.Random, depth: int = 3) -> str:
    kind = rng.randrange(6) if depth else rng.randrange(2)
    if kind == 0:
        return rng.choice(["a", "b", "é", ".", "[ab]", "[^a]", "\\w", "\\d", LAST_BUT_ONE])
    if kind == 1:
        return rng.choice(["ab", "abc", "bé"])
    parts = [random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if kind in (2, 3):
        return "".join(parts)
    if kind == 4:
        return f"({'|'.join(parts)})"
    return f"({parts[0]}){rng.choice(['*', '+', '?', '{2}', '{1,3}', '{0,2}?', '*?'])}"


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_regexes_mean_the_same_in_every_backend(backend: str) -> None:
    rng = random.Random(5)
    num_masks = 0
    for _ in range(150):
        pattern = random_regex(rng)
        ours, theirs = (compiled(name, regex=pattern).matcher() for name in ("sgl", backend))
        text = b""
        for _ in range(8):
            tokens, theirs_too = allowed(ours, PIECES), allowed(theirs, PIECES)
            following = set(ours.next_bytes()) ^ set(theirs.next_bytes())
            if backend == "outlines" and text.endswith(END[:-1]):  # END is its own
                tokens, theirs_too = (
                    [t for t in some if PIECES.token_bytes[t] != END[-1:]] for some in (tokens, theirs_too)
                )
                following.discard(END[-1])
            assert theirs_too == tokens, pattern
            assert following == set(), pattern
            num_masks += 1
            tokens = [token for token in tokens if token]
            if not tokens:
                break
            token = rng.choice(tokens)
            assert ours.accept(token)
            assert theirs.accept(token)
            text += PIECES.token_bytes[token]
    assert num_masks > 400


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "id": {"type": "string", "pattern": "^[a-c]{2}[0-9]$"},
        "tags": {"type": "array", "items": {"enum": ["x", "y\n"]}, "minItems": 1, "maxItems": 2},
        "at": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
        "is": {"type": ["boolean", "integer"]},
    },
    "required": ["name", "at"],
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "integer"}},
            "required": ["x"],
        }
    },
}
VALID: list[Any] = [
    PERSON,
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"anyOf": [{"type": "string"}, {"const": "a"}, {"type": "integer"}]},
    {"type": "array", "items": {"type": "string", "pattern": "b|[c-e]$"}, "maxItems": 2},
    {"allOf": [{"type": "integer"}], "title": "A number"},
    {"enum": [1.5, 2.0, "a", None, True, 1], "type": ["integer", "string"]},
    {"$ref": "#/$defs/a~1b%25%20c", "$defs": {"a/b% c": {"enum": [2**53, -0.1, 1e-7, 1e20, 123456.789]}}},
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("whitespace", ["compact", "flexible"])
@pytest.mark.parametrize("schema", VALID, ids=range(len(VALID)))
def test_documents_are_valid(backend: str, whitespace: Any, schema: Any) -> None:
    """Bytes at random, those that end something more often than others."""
    rng = random.Random(3)
    found = grammar.compile(
        json_schema=schema,
        vocabulary=BYTES,
        backend=backend,  # type: ignore[arg-type]  # of BACKENDS
        whitespace=whitespace,
        additional_properties="closed",
    )
    num_complete = 0
    for _ in range(30):
        matcher, text = found.matcher(), bytearray()
        while len(text) < 400 and (tokens := allowed(matcher, BYTES)):
            enders = [token for token in tokens if token in b'"]},']
            text.append(rng.choice(enders if enders and rng.random() < 0.4 else tokens))
            assert matcher.accept(text[-1])
            if matcher.is_accepting() and rng.random() < 0.5:
                break
        if matcher.is_accepting():
            num_complete += 1
            document = json.loads(text)
            jsonschema.validate(document, schema)
            if schema is PERSON:
                assert document.keys() <= PERSON["properties"].keys(), "the objects are closed"
    assert num_complete >= 5


def tagged(**more: Any) -> dict[str, Any]:
    structures = [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "regex": "[b/]{1,2}", "end": "</f>"},
        {"begin": "<g>", "schema": {"enum": [True]}, "end": ""},
    ]
    return {"triggers": ["<f", "<g"], "structures": structures, **more}


@pytest.mark.parametrize("backend", ["sgl", "llguidance"])
@pytest.mark.parametrize("at_least_one", [False, True])
@pytest.mark.parametrize("stop_after_first", [False, True])
def test_structural_tags_mean_the_same(backend: str, at_least_one: bool, stop_after_first: bool) -> None:
    tag = tagged(at_least_one=at_least_one, stop_after_first=stop_after_first)
    found = compiled(backend, BYTES, structural_tag=tag)
    for text, num_tags, ends_with_tag in [
        ("", 0, False),
        ("so <h", 0, False),
        ("so <f=a>12</f>", 1, True),
        ("<f=b>/b</f>", 1, True),
        ("é<g>true", 1, True),
        ("<f=a>1</f> and <g>true.", 2, False),
        ("<f=a>1</f>.", 1, False),
    ]:
        matcher = found.matcher()
        is_complete = matcher.accept_bytes(text.encode()) and matcher.is_accepting()
        one = num_tags == 1 and ends_with_tag
        is_stopped_right = not stop_after_first or num_tags == 0 or one
        assert is_complete == (is_stopped_right and (num_tags > 0 or not at_least_one)), text
    for text in ("<f=c", "<f ", "<f=a>x", "<f=b>a", "<g> "):
        assert not found.matcher().accept_bytes(text.encode()), text


DEEP: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
ONE = {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"], "additionalProperties": False}
TWO = {**ONE, "properties": {"k": {"const": 2}}}
ROUNDED = [2**53 + 1, -(2**63), 2**64, 123456789.12345679, 1.7976931348623157e308]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("outlines", {"ebnf": 'root ::= "a"'}, "ebnf"),
    ("outlines", {"structural_tag": tagged()}, "structural_tag"),
    ("outlines", {"regex": "a(?=b)b"}, "look-ahead"),
    ("outlines", {"regex": "a^b"}, "anchors"),
    ("outlines", {"regex": "a[^\\s\\S]"}, "can match nothing at all"),
    ("outlines", {"regex": "a|b[^\\s\\S]"}, "class without characters"),
    ("outlines", {"regex": "(?<=a)b"}, "look-behind"),
    ("outlines", {"json_schema": DEEP}, "recursion"),
    ("outlines", {"json_schema": {"type": "integer", "minimum": 1}}, "keyword minimum"),
    ("outlines", {"json_schema": {"type": "array", "uniqueItems": True}}, "keyword uniqueItems"),
    ("outlines", {"json_schema": {"not": {"type": "null"}}}, "keyword not"),
    ("outlines", {"json_schema": {"allOf": [{"type": "null"}, {"type": "null"}]}}, "allOf of several"),
    ("outlines", {"json_schema": {"anyOf": [{"type": "null"}], "type": "null"}}, "anyOf beside type"),
    ("outlines", {"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "alternatives 0 and 1"),
    ("outlines", {"json_schema": {"oneOf": [{"const": 1}, {"const": 1.0}]}}, "alternatives 0 and 1"),
    ("outlines", {"json_schema": {"oneOf": [ONE, {**TWO, "additionalProperties": True}]}}, "beside properties"),
    ("outlines", {"json_schema": {"oneOf": [ONE, {"type": "object"}]}}, "oneOf over JSON of any shape"),
    ("outlines", {"json_schema": {"type": "string", "format": "date"}}, "format 'date'"),
    ("outlines", {"json_schema": {"type": "string", "pattern": "a", "maxLength": 2}}, "maxLength beside pattern"),
    ("outlines", {"json_schema": {"type": "string", "maxLength": -1}}, "whole numbers"),
    ("outlines", {"json_schema": {"oneOf": [{"maxLength": 1, "type": "string"}, {"const": "ab"}]}}, "no quotes"),
    ("outlines", {"json_schema": {"const": {"a": 1}}}, "objects and arrays"),
    ("outlines", {"json_schema": {"type": "string", "enum": [1]}}, "can match nothing"),
    ("outlines", {"json_schema": {"const": "\x01"}}, "control characters"),
    ("outlines", {"json_schema": {"type": "object", "properties": {'a"': True}}}, "quotes"),
    ("outlines", {"json_schema": {"type": "object", "required": ["a"]}}, "required 'a'"),
    ("outlines", {"json_schema": False}, "allows nothing"),
    ("outlines", {"json_schema": {"$ref": "http://x/y"}}, "http://x/y"),
    ("outlines", {"json_schema": {"$ref": "#/$defs/a"}}, "leads nowhere"),
    ("outlines", {"json_schema": {"allOf": [{"$ref": "#/allOf/" + "1" * 5000}]}}, "leads nowhere"),
    ("sgl", {"json_schema": {"allOf": [{"$ref": "#/allOf/" + "1" * 5000}]}}, "nothing stands at"),
    ("outlines", {"json_schema": [1]}, "an object or a bool"),
    ("llguidance", {"regex": "a(?!b)c"}, "look-ahead"),
    ("llguidance", {"regex": "a[^\\s\\S]"}, "class without characters"),
    ("llguidance", {"json_schema": {"not": {"type": "null"}}}, '"not"'),
    ("llguidance", {"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
    ("llguidance", {"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ("llguidance", {"json_schema": False}, "match nothing"),
    ("llguidance", {"json_schema": {"type": "object", "minProperties": 2}}, "minProperties of more than one key"),
    ("llguidance", {"json_schema": {"not": {}}}, 'grammar_backend "llguidance" cannot enforce this json_schema'),
    *(("llguidance", {"json_schema": {"const": [number]}}, f"the number {number!r}") for number in ROUNDED),
    *(("outlines", {"json_schema": {"enum": ["a", number]}}, f"the number {number!r}") for number in ROUNDED),
    ("llguidance", {"json_schema": {"type": "integer", "minimum": -(2**63)}}, f"the number -{2**63}"),
    ("llguidance", {"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}}, "format"),
    *((backend, {"choices": []}, "at least one string") for backend in BACKENDS),
    *((backend, {"choices": ["a", "\ud800"]}, "not valid Unicode") for backend in BACKENDS),
    *((backend, {"regex": "(a"}, "group is not closed") for backend in BACKENDS),
]


@pytest.mark.parametrize(("backend", "constraint", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_a_backend_cannot_enforce_is_refused_by_name(
    backend: str, constraint: dict[str, Any], message: str
) -> None:
    with pytest.raises(GrammarError, match=re.escape(message)):
        compiled(backend, BYTES, **constraint)


MALFORMED: list[dict[str, Any]] = [
    {"type": "array", "prefixItems": [{}], "minItems": "x"},
    {"type": "array", "items": {"type": "integer"}, "minItems": "x"},
    {"type": "array", "items": {"type": "integer"}, "maxItems": -1},
    {"type": "array", "prefixItems": 5},
    {"type": "object", "properties": 5},
    {"type": "object", "properties": [1]},
    {"type": "object", "properties": {"a": {}}, "required": 5},
    {"type": "object", "properties": {"a": {}}, "required": [[1]]},
    {"type": "object", "additionalProperties": 5},
    {"type": "string", "pattern": 5},
    {"type": "string", "format": []},
    {"type": [["a"]]},
    {"type": {}},
    {"type": []},
    {"type": "text"},
    {"const": 1, "type": [[1]]},
    {"enum": {"a": 1}},
    {"anyOf": 5},
    {"$ref": ["a"]},
]


@pytest.mark.parametrize("schema", MALFORMED, ids=str)
@pytest.mark.parametrize("additional_properties", ["closed", "schema"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_malformed_schemas_are_refused(backend: str, additional_properties: Any, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        compiled(backend, BYTES, json_schema=schema, additional_properties=additional_properties)


def test_alternatives_that_exclude_each_other_are_one_of() -> None:
    found = compiled("outlines", BYTES, json_schema={"oneOf": [ONE, TWO, {"type": "null"}]})
    for text, is_allowed in ((b'{"k":1}', True), (b'{"k":2}', True), (b"null", True), (b'{"k":3}', False)):
        assert found.matcher().accept_bytes(text) == is_allowed


def test_a_longer_string_is_no_exponentially_larger_automaton() -> None:
    matcher = compiled(
        "outlines", BYTES, json_schema={"type": "string", "minLength": 60, "maxLength": 60}
    ).matcher()
    assert matcher.accept_bytes(b'"' + b"a" * 59 + "é".encode())
    assert list(matcher.next_bytes()) == [ord('"')]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_is_part_of_a_grammar(backend: str) -> None:
    found = compiled(backend, choices=["a", "ab"])
    again = Grammar.from_bytes(found.to_bytes(), PIECES)
    assert again.constraint == found.constraint
    assert type(again.matcher()) is type(found.matcher())
    assert found.num_bytes >= 0
    for options in ({"lenient": True}, {"key_order": "any"}, {"backend": "xgrammar"}):
        if options.get("backend") or backend != "sgl":
            with pytest.raises(GrammarError, match="backend"):
                make_constraint({"choices": ["a"]}, **{"backend": backend, **options})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_hostile_constraints_end_in_time_and_others_go_on(backend: Any) -> None:
    service = CompileService(PIECES, deadline=2.0, num_threads=1)
    hostile = ["((.{0,300}){0,300}){0,300}a", "(.*a.{300}){0,200}", "(\\w{0,2000}\\W){0,2000}"]
    try:
        flights = [service.submit(make_constraint({"regex": regex}, backend=backend)) for regex in hostile]
        outcomes = [flight.exception(PATIENCE) for flight in flights]
        assert all(error is None or isinstance(error, GrammarError) for error in outcomes)
        if backend == "outlines":
            assert any(isinstance(error, GrammarTooLarge) for error in outcomes)
        service.deadline = PATIENCE
        plain = service.submit(make_constraint({"regex": "a|ab"}, backend=backend)).result(PATIENCE)
        assert plain.matcher().accept_bytes(b"ab")  # type: ignore[union-attr]  # no automaton is closed here
    finally:
        service.close()


# Through the engine's doors. No backend but ours keeps to a budget, so the constraints end by themselves.

BOOK = {
    "type": "object",
    "properties": {"id": {"enum": [7, 42]}, "kind": {"enum": ["a", "bc"]}, "new": {"type": "boolean"}},
    "required": ["id", "kind"],
}
KINDS = [
    everywhere("regex", {"regex": r"\d{4}-(0[1-9]|1[0-2])( é)?"}, matches(r"\d{4}-(0[1-9]|1[0-2])( é)?")),
    Kind(
        "json_schema",
        fits(BOOK),
        {"json_schema": json.dumps(BOOK)},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "book", "schema": BOOK}}},
        {"json_schema": json.dumps(BOOK)},
    ),
]
DOORS = [
    *(engine_whole, engine_stream, native_whole, chat_whole, completions_stream),
    *(program_in_process, program_shipped_streamed),
]


@pytest.fixture(scope="module", params=BACKENDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    checkpoint = str(chat_checkpoint(tmp_path_factory.mktemp("model")))
    with Engine(checkpoint, grammar_backend=request.param, **OPTIONS) as engine, served(engine) as server:
        yield server


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_text_matches_through_every_door(server: LiveServer, kind: Kind, door: Any) -> None:
    reason, text = door(server, kind)
    assert reason == "stop", text
    assert kind.check(text), text


def test_choices_are_kept_to(server: LiveServer) -> None:
    words = ["yes (a)", "yes, and é", "no. [b]"]
    for door in (chat_whole, completions_stream):
        assert door(server, Kind("choices", bool, None, {"choices": words}))[1] in words


def test_a_refusal_reaches_who_asked(server: LiveServer) -> None:
    backend = server.engine.config.grammar_backend
    body = {"text": "so", "sampling_params": {"regex": "a(?=b)b", "max_new_tokens": 9}}
    answer = server.post("/generate", body)
    if backend == "sgl":
        assert answer.json()["text"] == "ab"
    else:
        assert answer.status_code == 400
        assert f'grammar_backend "{backend}"' in answer.json()["error"]["message"]
        with pytest.raises(GrammarError, match="look-ahead"):
            server.engine.generate("so", body["sampling_params"])


@pytest.mark.parametrize(
    ("backend", "missing", "extra"),
    [
        ("outlines", "outlines_core", "engine"),
        ("outlines", "interegular", "engine"),
        ("llguidance", "llguidance", "ebnf"),
    ],
)
def test_a_missing_package_is_named_at_start(
    monkeypatch: pytest.MonkeyPatch, backend: Any, missing: str, extra: str
) -> None:
    found = packages.find_spec
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(ConfigError, match=rf"{missing}, which is not installed: pip install 'sgl\[{extra}\]'"):
        Engine("embedded", device="cpu", grammar_backend=backend)
