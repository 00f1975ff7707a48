"""Prompts of public suites as chats, for models that answer them: GSM8K, MT-bench, BFCL, and JSON extraction (E2E).

`DATA` is a folder with `gsm8k/`, `mtbench/`, `fastchat/`, `bfcl/` and `e2e/`, each as it is published, perhaps within
`workloads/` or `train/`. Training and evaluation use other prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

SUITES = "gsm8k", "mtbench", "bfcl", "json"
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "String": "string", "bool": "boolean"}
_RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "eatType": {"enum": ["coffee shop", "pub", "restaurant"]},
        "food": {"type": "string", "maxLength": 24},
        "priceRange": {"enum": ["cheap", "moderate", "high", "less than £20", "£20-25", "more than £30"]},
        "area": {"enum": ["city centre", "riverside"]},
        "familyFriendly": {"type": "boolean"},
        "near": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "eatType", "food", "priceRange", "area", "familyFriendly", "near"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A chat that waits for an answer, and the JSON Schema that the answer must have, if any."""

    messages: list[dict[str, str]]
    schema: dict[str, Any] | None = None


def prompts(data: Path, suite: str, *, training: bool, most: int, seed: int = 0) -> list[Asked]:
    """At most so many of a suite, the same for the same seed."""
    found = list(_SUITES[suite](data, training))
    random.Random(seed).shuffle(found)
    return found[:most]


def _chat(text: str, schema: dict[str, Any] | None = None, system: str | None = None) -> Asked:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return Asked([*messages, {"role": "user", "content": text}], schema)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _folder(data: Path, name: str) -> Path:
    return next((its for part in ("workloads", "train") if (its := data / part / name).is_dir()), data / name)


def _gsm8k(data: Path, training: bool) -> Iterator[Asked]:
    for line in _lines(_folder(data, "gsm8k") / f"{'train' if training else 'test'}.jsonl"):
        yield _chat(line["question"])


def _mtbench(data: Path, training: bool) -> Iterator[Asked]:
    if not training:
        for line in _lines(_folder(data, "mtbench") / "question.jsonl"):
            yield _chat(line["turns"][0])
        return
    for line in _lines(_folder(data, "mtbench") / "vicuna_bench_question.jsonl"):
        yield _chat(line["turns"][0])
    dialogues = _folder(data, "fastchat") / "dummy_conversation.json"
    for dialogue in json.loads(dialogues.read_text(encoding="utf-8")) if dialogues.exists() else ():
        for turn in dialogue["conversations"]:
            if turn["from"] == "human":
                yield _chat(turn["value"][:2000])


def _bfcl(data: Path, training: bool) -> Iterator[Asked]:
    for name in ("simple_python", "live_simple", "multiple"):
        for number, line in enumerate(_lines(_folder(data, "bfcl") / f"BFCL_v4_{name}.json")):
            if number % 2 == training:
                continue
            tools = line["function"]
            system = (
                "You may call one of these functions. Answer with JSON alone: its name and its arguments.\n"
                + "\n".join(json.dumps(tool) for tool in tools)
            )
            schema = {"anyOf": [_call(tool) for tool in tools]} if len(tools) > 1 else _call(tools[0])
            yield _chat(line["question"][0][-1]["content"], schema, system)


def _call(tool: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool["name"]}, "arguments": _schema(tool["parameters"])},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _schema(given: dict[str, Any]) -> dict[str, Any]:
    """BFCL's types in JSON Schema's words, without what only describes."""
    kind = _TYPES.get(given.get("type", "any"), given.get("type", "any"))
    schema: dict[str, Any] = {} if kind == "any" else {"type": kind}
    if given.get("enum"):
        schema = {"enum": [value for value in given["enum"] if value is not None] or [None]}
    if kind == "object" and given.get("properties"):
        schema["properties"] = {name: _schema(its) for name, its in given["properties"].items()}
        schema["required"] = [name for name in given.get("required", []) if name in schema["properties"]]
        schema["additionalProperties"] = False
    if kind == "array":
        schema |= {"items": _schema(given.get("items") or {"type": "any"}), "maxItems": 8}
    if kind == "string" and "enum" not in schema:
        schema["maxLength"] = 80
    return schema


def _json(data: Path, training: bool) -> Iterator[Asked]:
    name = "train_from_clean_dev" if training else "test_clean"
    fields = ", ".join(_RECORD["properties"])
    for line in islice(_lines(_folder(data, "e2e") / f"{name}.jsonl"), 0, None, 3):
        text = f"{line['text']}\n\nWrite this restaurant as a JSON object with the fields {fields}."
        yield _chat(text, _RECORD)


_SUITES: dict[str, Callable[[Path, bool], Iterator[Asked]]] = {
    "gsm8k": _gsm8k,
    "mtbench": _mtbench,
    "bfcl": _bfcl,
    "json": _json,
}
