"""What the embedded model gets right, on sentences from templates and words that it was never trained on.

    python benchmarks/embedded_eval.py [MODEL] [--count 200] [--seed 7] [--misses 5]

Generated sets come from the recipe's held-out patterns and word lists. Three sets are written by hand, in a style
unlike the templates: embedded_sentences.jsonl, whose misses were looked at while the patterns were written,
embedded_fresh.jsonl, whose misses were looked at once, and embedded_unseen.jsonl, written down before the last
training and judged only after it. Records and tool calls are decoded greedily, once freely
and once constrained by the schema; choices are decided by Engine.score, by the mean log-probability of a token as
`select` does. A field counts when its value equals the true one as JSON data, a record when all its fields do.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from sgl.runtime.engine import Engine

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # the recipe is no part of the package

from tools.train_embedded.classify import question  # noqa: E402
from tools.train_embedded.dialogues import dialogue_example  # noqa: E402
from tools.train_embedded.prompts import Field, object_schema  # noqa: E402
from tools.train_embedded.records import attribute_example, record_example  # noqa: E402
from tools.train_embedded.toolcalls import tool_prompt, tool_request  # noqa: E402
from tools.train_embedded.values import Values  # noqa: E402

BARS = {"fields": 0.95, "records": 0.85, "choices": 0.90, "tools": 0.95, "arguments": 0.90}
TOOLS = {
    "calculator": ("Evaluate an arithmetic expression.", {"expression": "string"}),
    "convert": (
        "Convert a value from one unit to another.",
        {"value": "number", "from_unit": "string", "to_unit": "string"},
    ),
    "get_weather": ("Get the weather for a city.", {"city": "string"}),
    "search": ("Search the web.", {"query": "string"}),
}


@dataclass(slots=True)
class Case:
    """A prompt with the JSON that should follow it, and the schema of that JSON."""

    prompt: str
    truth: dict[str, Any]
    schema: dict[str, Any]


@dataclass(slots=True)
class Choice:
    """A prompt and what may follow it."""

    prompt: str
    choices: list[str]
    answer: str


class Chat:
    """Prompts in the model's own chat template."""

    def __init__(self, engine: Engine) -> None:
        self.tokenizer = engine.get_tokenizer()

    def __call__(self, *turns: tuple[str, str]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text


def extraction_prompt(fields: Sequence[Field], noun: str, text: str, style: int) -> str:
    """The three notations that the model card recommends."""
    if style == 0:
        listed = ", ".join(f"{f.key} ({f.hint(random.Random(0))})" for f in fields)
        return f"Extract the {noun} as JSON with the fields {listed}.\nText: {text}"
    if style == 1:
        return f"Extract the record as JSON. Fields: {', '.join(f.key for f in fields)}\nText: {text}"
    schema = json.dumps(object_schema(list(fields), noun, titled=True), ensure_ascii=False)
    return f"Extract the {noun} as JSON.\nSchema: {schema}\nText: {text}"


def generated_cases(chat: Chat, make: Callable[..., Any], values: Values, count: int) -> list[Case]:
    """Records to extract from held-out patterns."""
    cases = []
    for i in range(count):
        text, fields, record, noun, _ = make(values, "eval")
        for f in fields:
            f.nullable = f.nullable and record[f.key] is None
        prompt = extraction_prompt(fields, noun, text, (0, 2)[i % 2])
        cases.append(Case(chat(("user", prompt)), record, strict(object_schema(fields, noun, titled=False))))
    return cases


def dialogue_cases(values: Values, count: int) -> list[Case]:
    """Conversations up to the JSON that ends them."""
    cases = []
    for _ in range(count):
        pieces = dialogue_example(values, "eval").pieces
        last = max(i for i, (_, learn) in enumerate(pieces) if learn)
        truth = json.loads(pieces[last][0].removesuffix("<|im_end|>"))
        fields = [Field(key, _type_of(value)) for key, value in truth.items()]
        cases.append(
            Case("".join(text for text, _ in pieces[:last]), truth, strict(object_schema(fields, "", titled=False)))
        )
    return cases


def tool_cases(chat: Chat, values: Values, count: int) -> list[Case]:
    """Requests of held-out patterns, with the tools that the recipe offers."""
    cases = []
    for _ in range(count):
        calls, call = tool_request(values, "eval")
        truth = {"name": call.name, "arguments": call.arguments()}
        prompt = chat(("system", tool_prompt(calls, random.Random(1))), ("user", call.request))
        cases.append(Case(prompt + "<tool_call>", truth, call_schema([c.schema for c in calls])))
    return cases


def hand_written(chat: Chat, rows: Sequence[dict[str, Any]], style: int) -> list[Case]:
    """The records of embedded_sentences.jsonl."""
    cases = []
    for row in rows:
        fields = [Field(key, kind) for key, kind in row["fields"].items()]
        prompt = chat(("user", extraction_prompt(fields, row["noun"], row["text"], style)))
        cases.append(Case(prompt, row["record"], strict(object_schema(fields, row["noun"], titled=False))))
    return cases


def hand_written_calls(chat: Chat, rows: Sequence[dict[str, Any]]) -> list[Case]:
    """The requests of embedded_sentences.jsonl, with four tools."""
    schemas = [
        {
            "name": name,
            "description": description,
            "parameters": strict(_object({k: {"type": v} for k, v in types.items()})),
        }
        for name, (description, types) in TOOLS.items()
    ]
    listed = "\n".join(map(json.dumps, schemas))
    system = (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\n"
        'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call> and nothing else. '
        "Several calls may follow each other. Answer in plain text when you need no function."
    )
    return [
        Case(
            chat(("system", system), ("user", row["text"])) + "<tool_call>",
            {"name": row["tool"], "arguments": row["arguments"]},
            call_schema(schemas),
        )
        for row in rows
    ]


def choices_of(chat: Chat, values: Values, count: int) -> list[Choice]:
    """Texts of held-out patterns with choices, as chat and as plain text."""
    found = []
    for i in range(count):
        asked = question(values, "eval")
        found.append(
            choice_of(chat, asked.text, asked.word.lower(), asked.choices, asked.answer, is_chat=i % 2 == 0)
        )
    return found


def choice_of(chat: Chat, text: str, word: str, choices: list[str], answer: str, *, is_chat: bool) -> Choice:
    """A question as the model card puts it."""
    if is_chat:
        prompt = chat(("user", f"Classify the {word} of the text as {', '.join(choices)}.\nText: {text}"))
    else:
        prompt = f"Choices: {', '.join(choices)}\nText: {text}\n{word.capitalize()}: "
    return Choice(prompt, choices, answer)


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Without keys beside those that it names."""
    return {**schema, "additionalProperties": False}


def call_schema(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Any one call of the tools."""
    calls = [strict(_object({"name": {"const": tool["name"]}, "arguments": tool["parameters"]})) for tool in tools]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"properties": properties, "required": list(properties), "type": "object"}


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", list: "array"}
    return kinds.get(type(value), "string")


def decoded(engine: Engine, cases: Sequence[Case], *, constrained: bool) -> list[Any]:
    """What the model answers, as JSON data; None where it is none."""
    greedy = {"temperature": 0.0, "max_new_tokens": 256}
    free = {**greedy, "stop": ["</tool_call>"]}  # a constrained answer ends where its JSON does
    params = [{**greedy, "json_schema": json.dumps(case.schema)} if constrained else free for case in cases]
    answers = []
    for result in engine.generate(prompt=[case.prompt for case in cases], sampling_params=params):
        try:
            answers.append(json.loads(result["text"]))
        except ValueError:
            answers.append(None)
    return answers


def report(
    name: str, engine: Engine, cases: Sequence[Case], misses: int, *, is_tool: bool = False
) -> dict[str, float]:
    """Decode freely and constrained; print a line for each and return the scores of the constrained answers."""
    scores: dict[str, float] = {}
    for constrained in (False, True):
        answers = decoded(engine, cases, constrained=constrained)
        valid = sum(
            jsonschema.Draft202012Validator(case.schema).is_valid(answer)
            for case, answer in zip(cases, answers, strict=True)
        )
        if is_tool:
            right = [(a or {}).get("name") == c.truth["name"] for c, a in zip(cases, answers, strict=True)]
            parts = {
                "tools": sum(right),
                "arguments": sum(a == c.truth for c, a in zip(cases, answers, strict=True)),
            }
            totals = {"tools": len(cases), "arguments": len(cases)}
        else:
            records = [a if isinstance(a, dict) else {} for a in answers]
            parts = {
                "fields": sum(
                    r.get(k, ...) == v for c, r in zip(cases, records, strict=True) for k, v in c.truth.items()
                ),
                "records": sum(r == c.truth for c, r in zip(cases, records, strict=True)),
            }
            totals = {"fields": sum(len(c.truth) for c in cases), "records": len(cases)}
        scores = {key: parts[key] / totals[key] for key in parts}
        shown = "  ".join(f"{key} {value:6.1%}" for key, value in scores.items())
        print(f"{name:28} {'constrained' if constrained else 'free':12} {shown}  valid {valid / len(cases):6.1%}")
    wrong = [(case, answer) for case, answer in zip(cases, answers, strict=True) if answer != case.truth]
    for case, answer in wrong[:misses]:
        print(f"    text   {case.prompt[-400:]!r}\n    truth  {case.truth}\n    answer {answer}")
    return scores


def report_choices(name: str, engine: Engine, choices: Sequence[Choice], misses: int) -> float:
    """Decide by scores; print and return the share of right ones."""
    right = 0
    for choice in choices:
        scores = [sum(s.logprobs) / len(s.logprobs) for s in engine.score(choice.prompt, choice.choices)]  # type: ignore[arg-type]
        chosen = choice.choices[scores.index(max(scores))]
        right += chosen == choice.answer
        if chosen != choice.answer and misses > 0:
            misses -= 1
            print(f"    text   {choice.prompt[-300:]!r}\n    truth  {choice.answer}   answer {chosen}")
    print(f"{name:28} {'':12} choices {right / len(choices):6.1%}")
    return right / len(choices)


def report_hand_written(name: str, engine: Engine, chat: Chat, misses: int) -> None:
    """Everything in one of the files of hand-written sentences."""
    path = Path(__file__).parent / f"embedded_{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    records, calls, choices = ([r for r in rows if key in r] for key in ("record", "tool", "choices"))
    for style, notation in enumerate(("types", "names only", "pydantic schema")):
        cases = hand_written(chat, records, style)
        report(f"{name}, {notation}", engine, cases, misses if style == 0 else 0)
    report(f"{name}, tools", engine, hand_written_calls(chat, calls), misses, is_tool=True)
    for is_chat in (True, False):
        asked = [choice_of(chat, r["text"], r["word"], r["choices"], r["answer"], is_chat=is_chat) for r in choices]
        report_choices(f"{name}, {'chat' if is_chat else 'plain'}", engine, asked, misses if is_chat else 0)


def main() -> None:
    """Run all sets and print them, and which bars are missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=str(REPOSITORY / "sgl" / "models" / "embedded"))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--misses", type=int, default=0, help="of each set, how many wrong answers to show")
    options = parser.parse_args()
    values = Values(random.Random(options.seed), "eval")
    with Engine(model_path=options.model) as engine:
        chat = Chat(engine)
        count, misses = options.count, options.misses
        scores = report("records", engine, generated_cases(chat, record_example, values, count), misses)
        report(
            "attributes of any name", engine, generated_cases(chat, attribute_example, values, count // 2), misses
        )
        report("conversations", engine, dialogue_cases(values, count // 2), misses)
        scores |= report("tools", engine, tool_cases(chat, values, count), misses, is_tool=True)
        scores["choices"] = report_choices("choices", engine, choices_of(chat, values, count), misses)
        for name in ("sentences", "fresh", "unseen"):
            report_hand_written(name, engine, chat, misses)
    for name, bar in BARS.items():
        print(f"{name:10} {scores[name]:6.1%}  bar {bar:.0%}  {'ok' if scores[name] >= bar else 'MISSED'}")


if __name__ == "__main__":
    main()
