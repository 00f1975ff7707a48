"""What masks cost on a CPU: time to the first mask, masks along a document, memory, and steps saved by jumps.

    python -m benchmarks.mask_cpu TOKENIZER_DIR [--json OUT] [--backends [CASE …]]

Times are CPU time of the one thread that works, so a busy machine changes them little. Every case is compiled from
scratch; only the vocabulary's trie is built beforehand. `--backends` measures the other grammar backends as well, each
constraint as they see it: all cases take minutes and gigabytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections.abc import Callable
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from sgl import grammar
from sgl.errors import GrammarError
from sgl.grammar import Grammar, Vocabulary
from sgl.grammar.compiler import Backend
from sgl.grammar.matching.jump import Jump, cut, forced_text, jump

BACKENDS: tuple[Backend, ...] = ("sgl", "outlines", "llguidance")
FIELDS = {
    "identifier": ("integer", 4711),
    "title": ("string", "The C Programming Language"),
    "author": ("string", "Kernighan and Ritchie"),
    "published": ("string", "1978"),
    "edition": ("integer", 2),
    "pages": ("integer", 272),
    "language": ("string", "English"),
    "price": ("number", 67.5),
    "in_stock": ("boolean", True),
    "note": ("string", ""),
}
BOOK: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": kind} for name, (kind, _) in FIELDS.items()},
    "required": list(FIELDS),
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["value", "children"],
    "additionalProperties": False,
}


def tools(number: int) -> dict[str, Any]:
    """Schemas of calls of that many tools, in one anyOf."""
    kinds = ["string", "integer", "number", "boolean"]
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": f"tool_{i}"},
                    "arguments": {
                        "type": "object",
                        "properties": {f"p{j}_{i}": {"type": kinds[j % 4]} for j in range(6)},
                        "required": [f"p{j}_{i}" for j in range(3)],
                    },
                },
                "required": ["name", "arguments"],
            }
            for i in range(number)
        ]
    }


def cases() -> dict[str, tuple[dict[str, Any], str]]:
    """Constraint and a text that it allows, by name."""
    rng = random.Random(0)
    many = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=rng.randint(3, 30))) for _ in range(10_000)]
    call = {"name": "tool_9", "arguments": {"p0_9": "some text", "p1_9": 12, "p2_9": 1.5}}
    prose = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4
    tag = {
        "triggers": ["<function="],
        "structures": [{"begin": f"<function=f{i}>", "schema": BOOK, "end": "</function>"} for i in range(8)],
    }
    book = {name: value for name, (_, value) in FIELDS.items()}
    tree = {"value": 1, "children": [{"value": 2, "children": []}, {"value": 3, "children": []}]}
    return {
        "phone": ({"regex": r"\(\d{3}\) \d{3}-\d{4}"}, "(030) 555-0199"),
        "date": ({"regex": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"}, "1978-02-22"),
        "e-mail": ({"regex": r"[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}"}, "brian.k@bell-labs.com"),
        "(.|\\n){0,1000}": ({"regex": r"(.|\n){0,1000}"}, prose),
        "[a-z ]{1,4096}": ({"regex": r"[a-z ]{1,4096}"}, "it was the best of times it was the worst of times"),
        "ten fields": ({"json_schema": BOOK}, dumps(book)),
        "recursive tree": ({"json_schema": TREE}, dumps(tree)),
        "any object": ({"json_schema": grammar.JSON_OBJECT}, dumps({"a": [book], "b": {"c": [1, None, tree]}})),
        "maxLength 200": ({"json_schema": {"type": "string", "maxLength": 200}}, dumps(prose[:150])),
        "maxLength 100000": ({"json_schema": {"type": "string", "maxLength": 100_000}}, dumps(prose)),
        "maxItems 1000": (
            {"json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 1000}},
            dumps([*range(40)]),
        ),
        "10,000 choices": ({"choices": many}, many[77]),
        "enum of 10,000": ({"json_schema": {"enum": many}}, dumps(many[77])),
        "16 tools": ({"json_schema": tools(16)}, dumps(call)),
        "128 tools": ({"json_schema": tools(128)}, dumps(call)),
        "structural tag": ({"structural_tag": tag}, f"Let me see. <function=f3>{dumps(book)}</function> Done."),
    }


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def measure(
    constraint: dict[str, Any], text: str, vocabulary: Vocabulary, encode: Callable[[str], list[int]]
) -> dict[str, float]:
    row = np.zeros(vocabulary.words, np.int32)
    start = thread_time()
    compiled = grammar.compile(**constraint, vocabulary=vocabulary)
    compiled.matcher().fill_mask(row)
    first = thread_time() - start
    fresh, again = [walk(compiled, text, encode, row) for _ in range(2)]
    assert compiled.automaton is not None
    return {
        "first_mask_ms": first * 1e3,
        "fresh_mask_us_p50": float(np.percentile(fresh, 50)),
        "fresh_mask_us_max": max(fresh),
        "cached_us_p50": float(np.percentile(again, 50)),
        "cached_us_p99": float(np.percentile(again, 99)),
        "states": len(compiled.automaton),
        "tables_kb": compiled.automaton.tables.nbytes / 1e3,
    }


def compare_backends(
    names: list[str], vocabulary: Vocabulary, encode: Callable[[str], list[int]]
) -> dict[str, dict[str, Any]]:
    """Milliseconds to the first mask and µs a token, fresh and again, or what each backend refuses."""
    found: dict[str, dict[str, Any]] = {}
    for backend in BACKENDS:  # each works out what it needs of the vocabulary
        grammar.compile(regex="a", vocabulary=vocabulary, backend=backend).matcher().mask()
    for name, (constraint, text) in cases().items():
        for backend in BACKENDS if not names or name in names else ():
            start = thread_time()
            try:
                compiled = grammar.compile(
                    **constraint, vocabulary=vocabulary, backend=backend, additional_properties="closed"
                )
            except GrammarError as error:
                found[f"{name}, {backend}"] = {"refused": str(error)}
                print(f"{name:18}{backend:12}{error}", flush=True)
                continue
            compiled.matcher().mask()
            first = (thread_time() - start) * 1e3
            if not compiled.matcher().accept_bytes(text.encode()):
                found[f"{name}, {backend}"] = {"first_mask_ms": first}
                print(f"{name:18}{backend:12}{first:14.1f}  and it does not allow the text", flush=True)
                continue
            row = np.zeros(vocabulary.words, np.int32)
            fresh, again = [float(np.percentile(walk(compiled, text, encode, row), 50)) for _ in range(2)]
            found[f"{name}, {backend}"] = {"first_mask_ms": first, "fresh_us_p50": fresh, "again_us_p50": again}
            print(f"{name:18}{backend:12}{first:14.1f}{fresh:14.1f}{again:14.1f}", flush=True)
    return found


def walk(compiled: Grammar, text: str, encode: Callable[[str], list[int]], row: Any) -> list[float]:
    """µs of mask and accept together, token by token."""
    matcher = compiled.matcher()
    times = []
    for token_id in encode(text):
        start = thread_time()
        matcher.fill_mask(row)
        accepted = matcher.accept(token_id)
        times.append((thread_time() - start) * 1e6)
        assert accepted, (text, token_id)
    assert matcher.is_accepting(), text
    return times


def steps(
    vocabulary: Vocabulary, encode: Callable[[str], list[int]], plain: Callable[[str], list[int]], *, jumps: bool
) -> int:
    """How many tokens a model has to choose for the ten fields. `plain` is the tokenizer's own `encode`."""
    matcher = grammar.compile(json_schema=BOOK, vocabulary=vocabulary).matcher()
    text = dumps({name: value for name, (_, value) in FIELDS.items()})
    output: list[int] = []
    chosen = done = 0
    while done < len(text):
        run, draft = Jump([])
        if jumps and (ahead := forced_text(matcher, vocabulary, output)) is not None:
            [ids] = cut([ahead], lambda texts: list(map(plain, texts)))
            run, draft = jump(vocabulary, ahead, ids)
        if not run:
            run = encode(text[done:])[:1]
            chosen += draft != run[0]  # one that was drafted is confirmed in the step before
        for token_id in run:
            assert matcher.accept(token_id)
            done += len(vocabulary.token_bytes[token_id])
        output += run
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--backends", nargs="*", metavar="CASE", help="compare the grammar backends over these cases"
    )
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    start = thread_time()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    assert len(vocabulary.trie) > 0
    print(f"vocabulary of {vocabulary.size} tokens, {thread_time() - start:.2f} s")
    gc.collect()
    gc.freeze()  # as engines do: what lives for ever is not looked at again

    def plain(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def encode(text: str) -> list[int]:
        # Behind a line break, so that no tokenizer puts a space before the text.
        return plain("\n" + text)[len(plain("\n")) :]

    if arguments.backends is not None:
        print(f"{'':30}{'first mask ms':>14}{'fresh µs p50':>14}{'again µs p50':>14}")
        compared = compare_backends(arguments.backends, vocabulary, encode)
        if arguments.json:
            arguments.json.write_text(json.dumps(compared))
        return
    results = {}
    columns = "first mask ms", "fresh µs p50", "max", "cached µs p50", "p99", "states", "tables kB"
    print(f"{'':18}" + "".join(f"{name:>14}" for name in columns))
    for name, (constraint, text) in cases().items():
        results[name] = measure(constraint, text, vocabulary, encode)
        print(f"{name:18}" + "".join(f"{value:14.1f}" for value in results[name].values()), flush=True)
    chosen, jumped = (steps(vocabulary, encode, plain, jumps=jumps) for jumps in (False, True))
    print(f"ten fields: {chosen} steps, {jumped} with jump-forward: {chosen / jumped:.2f}x fewer")
    if arguments.json:
        arguments.json.write_text(json.dumps({"cases": results, "steps": chosen, "steps_with_jumps": jumped}))


if __name__ == "__main__":
    main()
