"""Jump-forward: what is forced is what the tokenizer cuts, whatever follows, and what masks would have allowed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl import grammar
from sgl.errors import GrammarError
from sgl.grammar import Grammar, Vocabulary
from sgl.grammar.automaton.finished import finish
from sgl.grammar.automaton.place import Place, advance
from sgl.grammar.matching.jump import Encode, _seam, cut
from sgl.runtime.constraints.cursor import Cursor, FinishedCursor, FinishedGrammar, MatcherCursor
from sgl.runtime.text.tokenizer import Tokenizer
from tests.house import REPOSITORY
from tests.tiny_tokenizers import byte_level, sentencepiece

REAL = ["gpt2", "qwen2.5", "mistral-v3"]
EMBEDDED = REPOSITORY / "sgl" / "models" / "embedded"
TINY = {"byte_level": byte_level, "sentencepiece": sentencepiece}
WORDS = [
    *[
        "error",
        "session",
        "status",
        "search",
        "essions",
        "sess",
        "ions",
        "sit",
        "its",
        "self",
        "elf",
        "data",
        "table",
    ],
    *[
        "tables",
        "able",
        "the",
        "then",
        "hen",
        "cat",
        "cats",
        "at",
        "sat",
        "on",
        "one",
        "none",
        "information",
        "mat",
    ],
    *[
        "formation",
        "mate",
        "inter",
        "national",
        "nation",
        "al",
        "ation",
        "don't",
        "'ll",
        "café",
        "naïve",
        "日本",
        "12",
    ],
]
JOINTS = [
    "",
    "",
    "",
    " ",
    "  ",
    "   ",
    "_",
    "-",
    ". ",
    "\n",
    "\n    ",
    '":',
    '","',
    '{"',
    "'s",
    "/",
    "\t",
    "\u00a0",
]
CHARS = [
    *"abest' \n\t\"{}:,.-_/\\12é日한🎉’",
    "  ",
    "\r\n",
    "'ll",
    "'RE",
    '":"',
    '","',
    '{"',
    "<tool_call>",
    " the",
    "\u3000",
]


class Model:
    """A tokenizer, and what a grammar needs of it."""

    def __init__(self, hf: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer(
            hf if hasattr(hf, "backend_tokenizer") else PreTrainedTokenizerFast(tokenizer_object=hf)
        )
        self.vocabulary = Vocabulary.from_tokenizer(tokenizer.hf)
        self.encode: Encode = lambda texts: [
            tuple(ids) for ids in tokenizer.encode_all(texts, add_special_tokens=False, allow_special=False)
        ]

    def tokens(self, text: str) -> list[int]:
        """The text as the tokenizer cuts it behind a line break; empty where it writes it another way."""
        marks, ids = self.encode(["\n", "\n" + text])
        rest = list(ids[len(marks) :])
        is_spelt = b"".join([self.vocabulary.token_bytes[token_id] for token_id in rest]) == text.encode()
        return rest if is_spelt and ids[: len(marks)] == marks else []

    def cursors(self, compiled: Grammar) -> Iterator[Cursor]:
        """One that works masks out on the host, and one of a finished automaton, if it can be finished."""
        yield MatcherCursor(compiled)
        finished = None if compiled.automaton is None else finish(compiled.automaton, 500)
        if finished is not None:
            yield FinishedCursor(FinishedGrammar(finished, self.vocabulary, lambda: compiled))

    def forced(self, cursor: Cursor, output: list[int], remaining: int | None = None) -> list[int]:
        ahead = cursor.forced_text(output)
        if ahead is None:
            return []
        [ids] = cut([ahead], self.encode)
        return cursor.forced(ahead, ids, remaining).token_ids

    def lead(self, cursor: Cursor, ids: list[int]) -> int:
        """Lead a cursor along a text as a model would that means to write it; how many tokens were forced."""
        output: list[int] = []
        num_forced = 0
        while len(output) < len(ids):
            run = self.forced(cursor, output)
            assert run == ids[len(output) : len(output) + len(run)], (output, run)
            num_forced += len(run)
            run = run or ids[len(output) : len(output) + 1]
            assert cursor.accept_all(run)
            output += run
        return num_forced


@cache
def real_model(folder: Path) -> Model:
    from transformers import PreTrainedTokenizerFast

    return Model(PreTrainedTokenizerFast.from_pretrained(folder))


@pytest.fixture(scope="module", params=[*TINY, "embedded", *REAL])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param in TINY:
        return Model(TINY[request.param]())
    if request.param == "embedded":
        return real_model(EMBEDDED)
    folder: Path = request.getfixturevalue("unpacked")("tokenizers")
    return real_model(folder / request.param)


def follow(model: Model, compiled: Grammar, text: str) -> int:
    """How many tokens were forced on the way through a text, which is the same on both paths."""
    ids = model.tokens(text)
    [num_forced] = {model.lead(cursor, ids) for cursor in model.cursors(compiled)} if ids else {0}
    return num_forced


def test_bytes_are_a_pair_if_they_stand_side_by_side_in_a_token(model: Model) -> None:
    slow = {data[at : at + 2] for data in model.vocabulary.text_bytes for at in range(len(data) - 1)}
    assert len(model.vocabulary.pairs) == 1 << 16
    assert {bytes(divmod(i, 256)) for i, is_pair in enumerate(model.vocabulary.pairs) if is_pair} == slow


@pytest.mark.costly
def test_at_a_seam_two_tokens_meet_whatever_follows(model: Model) -> None:
    rng = random.Random(5)
    parts = [
        *CHARS,
        *WORDS,
        *filter(None, JOINTS),
        "e\u0301",
        "=\u0338",
        "\u200d",
        "}",
        "]",
        "[",
        "0",
        "7",
        "true",
        "null",
        "A",
        "Bc",
    ]

    def some(high: int) -> str:
        return "".join(rng.choices(parts, k=rng.randint(1, high)))

    num_seams = num_inner = 0
    for _ in range(2000):
        begun = some(8)
        texts = [begun + some(4) for _ in range(3)]
        behind = {text.encode()[len(begun.encode())] for text in texts}
        seam = _seam(begun.encode(), behind, model.vocabulary)
        try:
            before = model.tokens(begun.encode()[:seam].decode())
        except UnicodeDecodeError:
            raise AssertionError((begun, seam)) from None
        for text in texts:
            ids = model.tokens(text)
            if ids and before:  # it is spelt byte for byte
                assert ids[: len(before)] == before, (text, seam)
        num_seams += seam > 0
        num_inner += 0 < seam < len(begun.encode())
    assert num_seams > 500
    assert num_inner > 100


def test_the_bytes_that_may_come_next_are_those_that_are_accepted() -> None:
    rng = random.Random(6)
    vocabulary = Vocabulary.from_tokenizer(byte_level())
    schema = {"properties": {"ab": {"enum": ["x", "xy", 12]}, "c": {"type": "string", "maxLength": 3}}}
    constraints: list[dict[str, Any]] = [
        {"json_schema": schema},
        {"regex": r"a(b|cd){1,3}\.?"},
        {"ebnf": 'root ::= "a" [b-d]+ ("." | "é")'},
    ]
    for constraint in constraints:
        compiled = grammar.compile(**constraint, vocabulary=vocabulary)
        finished = None if compiled.automaton is None else finish(compiled.automaton, 500)
        assert (finished is None) == ("ebnf" in constraint)
        for _ in range(20):
            matcher = compiled.matcher()
            place: Place | None = None if finished is None else finished.start
            for _ in range(30):
                allowed = [byte for byte in range(256) if matcher.copy().accept_bytes(bytes([byte]))]
                assert list(matcher.next_bytes()) == allowed
                if finished is not None:
                    assert place is not None
                    assert finished.next_bytes(place) == allowed
                if not allowed:
                    break
                data = bytes([rng.choice(allowed)])
                assert matcher.accept_bytes(data)
                place = None if finished is None or place is None else advance(finished, place, data)


def test_of_choices_that_begin_alike_the_tokenizers_own_tokens_are_forced(model: Model) -> None:
    rng = random.Random(0)

    def some(low: int, high: int) -> str:
        return "".join(rng.choice(WORDS) + rng.choice(JOINTS) for _ in range(rng.randint(low, high)))

    num_forced = 0
    for _ in range(80):
        begun = some(1, 3)[: rng.choice([None, None, -1, -2])]
        choices = [begun + some(1, 2) for _ in range(2)]
        compiled = grammar.compile(choices=choices, vocabulary=model.vocabulary)
        num_forced += sum(follow(model, compiled, text) for text in choices)
    assert num_forced > 300


def test_whatever_the_characters_forced_tokens_are_the_tokenizers_own(model: Model) -> None:
    rng = random.Random(1)

    def some(high: int) -> str:
        return "".join(rng.choices(CHARS, k=rng.randint(1, high)))

    num_forced = 0
    for _ in range(80):
        begun = some(12)
        choices = sorted({begun + some(6) for _ in range(rng.randint(2, 3))} | set([begun] * rng.randint(0, 1)))
        compiled = grammar.compile(choices=choices, vocabulary=model.vocabulary)
        num_forced += sum(follow(model, compiled, text) for text in choices)
    assert num_forced > 300


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        (
            "qwen2.5",
            ["errorsessionstatus", "errorsessionsearch"],
        ),  # cut error|session|…, its beginning errors|essions
        ("qwen2.5", ["vent. give/hangs", "vent. givedetails"]),
        ("qwen2.5", ["two  12", "two  34"]),  # white space ends differently before what is none
        ("qwen2.5", ["e\u0301a", "e\u0300b"]),  # the tokenizer composes é
        ("gpt2", ["é" * 3 + "a", "é" * 3 + "è"]),  # a run that ends within a character
    ],
)
def test_beginnings_that_are_cut_otherwise_than_their_texts(
    unpacked: Callable[[str], Path], name: str, choices: list[str]
) -> None:
    model = real_model(unpacked("tokenizers") / name)
    compiled = grammar.compile(choices=choices, vocabulary=model.vocabulary)
    for text in choices:
        follow(model, compiled, text)


def test_documents_under_real_schemas_are_cut_as_the_tokenizer_cuts_them(
    unpacked: Callable[[str], Path], model: Model
) -> None:
    paths = sorted(unpacked("maskbench").rglob("*.json"))
    num_documents = num_forced = 0
    for path in random.Random(3).sample(paths, 50):
        document = json.loads(path.read_text())
        try:
            compiled = grammar.compile(
                json_schema=document["schema"], vocabulary=model.vocabulary, key_order="any", lenient=True
            )
        except GrammarError:
            continue
        valid = [test["data"] for test in document["tests"] if test["valid"]]
        texts = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in valid[:1]]
        for text in texts:
            if len(text) < 2000 and compiled.matcher().accept_bytes(text.encode()):
                num_forced += follow(model, compiled, text)
                num_documents += 1
    assert num_documents > 25
    assert num_forced > 100


def test_a_run_is_forced_only_as_far_as_the_document_can_still_be_ended(model: Model) -> None:
    rng = random.Random(4)
    for _ in range(10):
        begun = "".join(rng.sample(WORDS[:36], 3))
        texts = [begun + "".join(rng.sample(WORDS[:36], 2)) for _ in range(2)]
        schema = {
            "type": "object",
            "properties": {
                "".join(rng.sample(WORDS[:36], 2)): {"enum": texts},
                "x": {"type": "array", "items": {"enum": texts}},
            },
            "additionalProperties": False,
        }
        schema["required"] = list(schema["properties"])
        compiled = grammar.compile(json_schema=schema, vocabulary=model.vocabulary)
        room = least_tokens(model, compiled)
        for more in range(3):
            for cursor in model.cursors(compiled):
                output = write(model, cursor, MatcherCursor(compiled), room + more, rng)
                assert cursor.is_complete(), (schema, room + more, output)


def least_tokens(model: Model, compiled: Grammar) -> int:
    """The fewest tokens that complete a document."""
    text = compiled.matcher().shortest_end()
    needed = [0]
    for end in range(1, len(text) + 1):
        starts = range(max(0, end - model.vocabulary.max_token_len), end)
        needed.append(1 + min(needed[start] for start in starts if text[start:end] in model.vocabulary.ids))
    return needed[-1]


def write(model: Model, cursor: Cursor, masks: MatcherCursor, room: int, rng: random.Random) -> list[int]:
    """An output of at most so many tokens: jumps, and random tokens of the masks between them."""
    output: list[int] = []
    while len(output) < room and not cursor.is_complete():
        left = room - len(output)
        cursor.mask(left)
        row = masks.mask(left)
        run = model.forced(cursor, output, left)
        run = run or [int(rng.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))))]
        assert cursor.accept_all(run)
        assert masks.accept_all(run)
        output += run
    return output
