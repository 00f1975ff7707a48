"""How a task is put to the model: fields described in many ways, instructions, chat turns, and what counts as answer.

The notations here are the prompt formats that the model card documents; the model sees all of them in training.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from tools.train_embedded.patterns import parse, say
from tools.train_embedded.values import phrases

START, END, STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


@dataclass(slots=True)
class Field:
    """A field that is asked for. `items`: the fields of the objects in a list of objects."""

    key: str
    type: str  # string, integer, number, boolean, array, or list of objects as "objects"
    enum: list[str] | None = None
    nullable: bool = False
    description: str | None = None
    items: tuple[tuple[str, str], ...] = ()

    def schema(self, *, titled: bool) -> dict[str, Any]:
        """The property as JSON Schema, as pydantic writes it."""
        plain: dict[str, Any] = {"type": self.type}
        if self.type == "array":
            plain = {"items": {"type": "string"}, "type": "array"}
        elif self.type == "objects":
            properties = {key: {"type": kind} for key, kind in self.items}
            plain = {"items": {"properties": properties, "type": "object"}, "type": "array"}
        elif self.enum:
            plain = {"enum": self.enum, "type": "string"}
        described = {"description": self.description} if self.description else {}
        title = {"title": self.key.replace("_", " ").title()} if titled else {}
        if self.nullable:
            return {"anyOf": [plain, {"type": "null"}], **described, **title}
        enum = plain.pop("enum", None)
        return {**({"enum": enum} if enum else {}), **described, **title, **plain}

    def hint(self, rng: random.Random) -> str:
        """The type in words."""
        names = {
            "string": ["string", "str", "text"],
            "integer": ["integer", "int", "whole number"],
            "number": ["number", "float", "decimal"],
            "boolean": ["boolean", "bool", "true/false"],
            "array": ["list of strings", "array of strings", "list[str]"],
            "objects": [f"list of {{{', '.join(key for key, _ in self.items)}}}"],
        }
        text = rng.choice(names[self.type][: rng.choice([1, 1, 3])])
        if self.enum:
            text = rng.choice(["|", ", ", " or ", "/"]).join(self.enum)
            text = rng.choice([text, f"one of {text}", f"enum: {text}"])
        return text + (rng.choice([" or null", ", optional", " | null", "?"]) if self.nullable else "")


@dataclass(slots=True)
class Example:
    """Text in pieces: (text, whether the model is to learn to write it)."""

    pieces: list[tuple[str, bool]] = field(default_factory=list)

    def turn(self, role: str, content: str, *, learn: bool | None = None) -> Example:
        """Append a chat turn; the assistant's are learnt."""
        learn = role == "assistant" if learn is None else learn
        self.pieces.append((f"{START}{role}\n", False))
        self.pieces.append((content + END, learn) if learn else (content + END, False))
        self.pieces.append(("\n", False))
        return self

    def raw(self, prompt: str, answer: str, rng: random.Random) -> Example:
        """Append a prompt without turns, and what follows it."""
        self.pieces += [(prompt, False), (answer + rng.choice(["", "\n"]) + STOP, True)]
        return self


def compact(data: Any) -> str:
    """JSON without spaces, decimals as they were written: what the model answers with."""
    if isinstance(data, dict):
        return "{" + ",".join(f"{json.dumps(k, ensure_ascii=False)}:{compact(v)}" for k, v in data.items()) + "}"
    if isinstance(data, list):
        return "[" + ",".join(map(compact, data)) + "]"
    return repr(data) if isinstance(data, float) else json.dumps(data, ensure_ascii=False)


def describe(fields: list[Field], rng: random.Random, noun: str) -> str:
    """The fields in one of the notations."""
    style = rng.choices(range(8), [4, 2.5, 1.2, 4.5, 2, 1.2, 1, 1])[0]
    keys = [f.key for f in fields]
    if style == 0:
        return ", ".join(f"{f.key} ({f.hint(rng)})" for f in fields)
    if style == 1:
        return json.dumps({f.key: f.schema(titled=False) for f in fields}, ensure_ascii=False)
    if style == 2:
        return rng.choice([", ".join(keys), " and ".join(keys), "; ".join(keys), json.dumps(keys)])
    if style == 3:
        return json.dumps(object_schema(fields, noun, titled=True), ensure_ascii=False)
    if style == 4:
        return ", ".join(f"{f.key}: {f.hint(rng)}" for f in fields)
    if style == 5:
        return "{" + ", ".join(f'"{f.key}": {f.hint(rng)}' for f in fields) + "}"
    if style == 6:
        return "\n" + "\n".join(f"- {f.key} ({f.hint(rng)})" for f in fields)
    python = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list[str]"}
    lines = [f"    {f.key}: {python.get(f.type, 'list[dict]')}{' | None' * f.nullable}" for f in fields]
    return f"class {noun.title().replace('_', '')}(BaseModel):\n" + "\n".join(lines)


def object_schema(fields: list[Field], noun: str, *, titled: bool) -> dict[str, Any]:
    """The JSON Schema of a record, as pydantic's model_json_schema writes it."""
    schema: dict[str, Any] = {"properties": {f.key: f.schema(titled=titled) for f in fields}}
    schema["required"] = [f.key for f in fields]
    if titled:
        schema["title"] = noun.title().replace("_", "")
    schema["type"] = "object"
    return schema


def extraction(
    text: str,
    fields: list[Field],
    record: dict[str, Any],
    noun: str,
    rng: random.Random,
    shots: list[tuple[str, Any]],
) -> Example:
    """Text and fields in, the record out; as chat or as plain text. `shots`: solved examples to show first."""
    noun = noun.replace("_", " ")
    blind = rng.random() < 0.1  # the fields come as the grammar forces them
    listed = "" if blind else describe(fields, rng, noun)

    def one(name: str) -> str:
        return say(parse(rng.choice(phrases(name))), rng, lambda slot: noun).replace("~", "\n").replace("_", " ")

    parts = ("extract_verb", "extract_what", "extract_where", "extract_how")
    verb, what, where, how = map(one, parts)
    task = f"{verb} {what}{where}{how}" if rng.random() < 0.9 else one("extract_short")
    label = one("extract_label")
    body = label + text + ('"' if label == '"' else "")
    closing = "" if "\n" in listed and listed.endswith((")", "}")) else rng.choice([".", ".", ""])
    instruction = task + (one("extract_link") + listed if listed else "") + closing
    answer = compact(record)
    example = Example()
    if rng.random() < 0.2:
        return _plain_extraction(example, text, listed, answer, instruction, shots, rng)
    style = rng.random()
    if style < 0.25:
        example.turn("system", instruction)
        for shot, solved in shots:
            example.turn("user", shot).turn("assistant", compact(solved))
        return example.turn("user", rng.choice([text, text, body])).turn("assistant", answer)
    if style < 0.35:
        example.turn("system", one("extract_system"))
    if rng.random() < 0.3:
        content = f"{body}\n{instruction}" if rng.random() < 0.7 else f"{body}\n\n{instruction}"
    else:
        content = instruction + rng.choice(["\n", "\n", "\n\n", " "]) + body
    return example.turn("user", content).turn("assistant", answer)


def _plain_extraction(
    example: Example,
    text: str,
    listed: str,
    answer: str,
    instruction: str,
    shots: list[tuple[str, Any]],
    rng: random.Random,
) -> Example:
    label = rng.choice(["Text", "Sentence", "Input", "Message", "Review", "Note"])
    result = rng.choice(["JSON", "Record", "Output", "Result", "Answer", "Data"])
    gap = rng.choice([" ", "\n", ""])
    prompt = rng.choice(
        [f"{instruction}\n", f"Fields: {listed}\n" if listed else "", ""] if not shots else [f"{instruction}\n", ""]
    )
    for shot, solved in shots:
        prompt += f"{label}: {shot}\n{result}:{gap}{compact(solved)}\n\n"[: None if rng.random() < 0.5 else -1]
    return example.raw(f"{prompt}{label}: {text}\n{result}:{gap}", answer, rng)
