"""Requests that a tool answers: a system prompt with tools, the call, the tool's result, the answer from it.

The system prompt and the call are those of `sgl.describe_tools`; some prompts list the tools in other words, ask for
bare JSON, or ask only which tool it is. A few requests need no tool.
"""

from __future__ import annotations

import functools
import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.train_embedded.patterns import Sequence, Slot, parse, say
from tools.train_embedded.prompts import Example, compact
from tools.train_embedded.values import Number, Value, Values, number_text, phrases

UNITS = [group.split() for group in phrases("units")]
OPERATORS = [
    ("+", ["plus", "and", "+", "added to"]),
    ("-", ["minus", "-", "less", "take away"]),
    ("*", ["times", "multiplied by", "*", "x"]),
    ("/", ["divided by", "/", "over"]),
]
SMALL_TALK = [
    ("(Hi|Hello|Hey|Good morning)[ there][!|.]", "Hello! How can I help you?"),
    ("(Thanks|Thank you|Thanks a lot|Great, thanks)[!|.]", "You are welcome!"),
    ("(Who|What) are you?", "I am a small language model that ships with sgl."),
    ("(Bye|Goodbye|See you)[!|.]", "Goodbye!"),
    ("How are you[ today]?", "I am fine, thank you. How can I help you?"),
    ("What can you do?", "I can extract records, classify texts and call tools."),
]


@dataclass(slots=True)
class Parameter:
    """A parameter of a tool: the names it goes by, the kind of its values, what it is."""

    names: list[str]
    kind: str
    description: str


@dataclass(slots=True)
class ToolKind:
    """A tool: names, descriptions, parameters, and the patterns of requests and answers."""

    names: list[str]
    descriptions: list[str]
    parameters: dict[str, Parameter] = field(default_factory=dict)
    requests: list[Sequence] = field(default_factory=list)
    problems: list[tuple[Sequence, str]] = field(default_factory=list)  # arithmetic in words, and its expression
    result: dict[str, str] = field(default_factory=dict)
    answers: list[Sequence] = field(default_factory=list)


@functools.cache
def read_tools(split: str) -> list[ToolKind]:
    """tools.txt, of each tool's requests those of the split: "eval" has those whose kind is marked with "!"."""
    tools: list[ToolKind] = []
    for line in (Path(__file__).parent / "tools.txt").read_text(encoding="utf-8").splitlines():
        kind, _, rest = line.partition(" ")
        if kind[:1] in ("q", "x") and kind.endswith("!") != (split == "eval"):
            continue
        kind = kind.rstrip("!")
        if kind == "==":
            names, _, described = rest.partition(" | ")
            tools.append(ToolKind(names.split(), described.split("; ")))
        elif kind == "p":
            names, _, what = rest.partition(": ")
            value_kind, _, description = what.partition(" | ")
            found = Parameter(names.split(), value_kind, description)
            tools[-1].parameters[found.names[0]] = found
        elif kind == "q":
            tools[-1].requests.append(parse(rest))
        elif kind == "x":
            asked, _, solution = rest.partition(" => ")
            tools[-1].problems.append((parse(asked), solution))
        elif kind == "r":
            tools[-1].result = dict(part.split(": ") for part in rest.split(", "))
        elif kind == "a":
            tools[-1].answers.append(parse(rest))
    return tools


def operand(rng: random.Random) -> tuple[str, str]:
    """A number as it is said and as it is computed with."""
    number = rng.randint(1, rng.choice([12, 100, 1000, 20000]))
    if rng.random() < 0.12:
        text = f"{number}.{rng.randint(1, 99)}"
        return text, text
    if number > 999 and rng.random() < 0.3:
        return f"{number:,}", str(number)
    return (number_text(number) if number < 100 and rng.random() < 0.1 else str(number)), str(number)


def expression(values: Values) -> Value:
    """Arithmetic in words or signs; the data is the expression in signs."""
    rng = values.rng
    first, second = operand(rng), operand(rng)
    form = rng.random()
    if form < 0.12:
        percent = rng.choice(["{}% of {}", "{} percent of {}"]).format(first[0], second[0])
        return Value(percent, f"{first[1]} / 100 * {second[1]}")
    if form < 0.16:
        square = rng.choice(["the square of {}", "{} squared"]).format(first[0])
        return Value(square, f"{first[1]} * {first[1]}")
    sign, words = rng.choice(OPERATORS)
    if form < 0.26:
        named = {
            "+": "the sum of {} and {}",
            "*": "the product of {} and {}",
            "-": "the difference between {} and {}",
            "/": "the quotient of {} and {}",
        }
        return Value(named[sign].format(first[0], second[0]), f"{first[1]} {sign} {second[1]}")
    text, data = first
    for other in (second, operand(rng))[: rng.choice([1, 1, 1, 2])]:
        word = rng.choice(words)
        gap = " " if word[0].isalpha() or rng.random() < 0.85 else ""
        text += gap + word + gap + other[0]
        data += f" {sign} {other[1]}"
        sign, words = rng.choice(OPERATORS)
    return Value(text, data)


def result_of(expression_text: str, rng: random.Random) -> Any:
    """The number that the calculator returns."""
    operands = expression_text.split(" ")
    total = float(operands[0])
    if not any(sign in operands for sign in "*/") or len(operands) == 3:
        for sign, number in zip(operands[1::2], map(float, operands[2::2]), strict=True):
            total = {"+": total + number, "-": total - number, "*": total * number, "/": total / number}[sign]
    else:
        total = rng.randint(1, 50000) / rng.choice([1, 1, 10, 100])
    return int(total) if total == int(total) else Number(f"{total:.4f}".rstrip("0"))


def draw(values: Values, kind: str) -> Value:
    """A value of a kind that only tools have, or of any other."""
    rng = values.rng
    words = {
        "unit": rng.choice(UNITS),
        "currency": phrases("currencies"),
        "status": phrases("statuses"),
        "onoff": ["on", "off"],
    }.get(kind)
    if words:
        text = rng.choice(words)
        return Value(text, text)
    if kind == "expr":
        return expression(values)
    if kind == "topic_phrase":
        made = [
            values.word(rng.choice(["noun", "product", "sport", "subject", "animal", "hobby", "dish"])),
            values.draw(rng.choice(["person", "city", "title", "company", "team"])).text,
        ]
        text = rng.choice(
            [
                f"the best {made[0]} in {made[1]}",
                f"{made[0]} {made[1]}",
                made[1],
                f"{made[0]} of {made[1]}",
                f"the history of {made[0]}",
                f"cheap {made[0]}",
                f"{made[1]} {values.word('noun')}",
                made[0],
            ]
        )
        return Value(text, text)
    if kind == "made":
        text = values.made_up() if rng.random() < 0.5 else values.word("title_word").lower()
        return Value(text, text)
    return values.draw(kind)


@dataclass(slots=True)
class Call:
    """A tool as one prompt presents it, and, if it is the one to call, the request and the arguments."""

    tool: ToolKind
    name: str
    keys: dict[str, str]
    schema: dict[str, Any]
    request: str = ""
    said: dict[str, Value] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        return {self.keys[name]: self.said[name].data for name in self.tool.parameters}


def presented(tool: ToolKind, values: Values) -> Call:
    """The tool under one of its names, with parameters under one of theirs."""
    rng = values.rng
    plain = rng.random() < 0.4
    keys = {name: name if plain else rng.choice(p.names) for name, p in tool.parameters.items()}
    described = rng.random() < 0.5
    properties = {}
    for name, parameter in tool.parameters.items():
        data = draw(values, parameter.kind).data
        kind = {int: "integer", float: "number", Number: "number"}.get(type(data), "string")
        kind = "number" if parameter.kind in ("measure", "decimal") else kind
        properties[keys[name]] = {**({"description": parameter.description} if described else {}), "type": kind}
    schema = {
        "additionalProperties": False,
        "properties": properties,
        "required": list(properties),
        "type": "object",
    }
    name = tool.names[0] if plain else rng.choice(tool.names)
    return Call(
        tool, name, keys, {"name": name, "description": rng.choice(tool.descriptions), "parameters": schema}
    )


def called(call: Call, values: Values) -> Call:
    """Give it a request that needs this tool."""
    rng = values.rng

    def value(slot: Slot) -> str:
        if slot.name not in call.tool.parameters:  # said, but no argument
            return draw(values, slot.name).text
        parameter = call.tool.parameters[slot.name]
        taken = {v.text for k, v in call.said.items() if k != slot.name}
        while slot.name not in call.said or call.said[slot.name].text in taken:
            call.said[slot.name] = draw(values, parameter.kind)
            same = [group for group in UNITS if taken & set(group)]
            if parameter.kind == "unit" and same:
                text = rng.choice(same[0])
                call.said[slot.name] = Value(text, text)
        return call.said[slot.name].text

    if call.tool.problems and rng.random() < 0.4:
        text = _problem(call, rng)
    else:
        text = re.sub(r"  +", " ", say(rng.choice(call.tool.requests), rng, value)).strip()
    asks = re.match(r"(?i)(what|where|when|who|how|is|are|do|does|can|could|will|should|which|has)\b", text)
    if text[-1] not in ".?!":
        text += rng.choice(["?", "?", ""]) if asks else rng.choice([".", "", "!"])
    if rng.random() < 0.12:
        text = rng.choice(["Hi, ", "Hello! ", "Hey, ", "Please help me: ", "Quick one: ", "Okay. "]) + text
    call.request = text[0].lower() + text[1:] if rng.random() < 0.16 else text
    return call


def _problem(call: Call, rng: random.Random) -> str:
    """Arithmetic that is told, not written."""
    asked, solution = rng.choice(call.tool.problems)
    numbers = {name: operand(rng) for name in "abc"}
    text = say(asked, rng, lambda slot: numbers[slot.name][0])
    data = solution.format(**{name: number[1] for name, number in numbers.items()})
    call.said["expression"] = Value(data, data)
    return text


def tool_prompt(calls: list[Call], rng: random.Random) -> str:
    """The system prompt: as `sgl.describe_tools` writes it, or in other words."""
    listed = "\n".join(json.dumps(call.schema, ensure_ascii=False) for call in calls)
    if rng.random() < 0.7:
        return (
            f"You may call these functions:\n<tools>\n{listed}\n</tools>\n"
            'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call> and nothing else. '
            "Several calls may follow each other. Answer in plain text when you need no function."
        )
    signatures = "\n".join(
        f"- {call.name}({', '.join(call.keys.values())}): {call.schema['description']}" for call in calls
    )
    opening = rng.choice(
        ["Tools:", "You have these tools:", "Available tools:", "You are an assistant with tools."]
    )
    return f"{opening}\n{listed if rng.random() < 0.4 else signatures}"


def tool_request(values: Values, split: str) -> tuple[list[Call], Call]:
    """Tools to choose from, and the one that the request needs."""
    rng = values.rng
    tools = read_tools(split)
    weights = [3 if tool.names[0] in ("calculator", "convert", "get_weather", "search") else 1 for tool in tools]
    right = rng.choices(
        [t for t in tools if t.requests], [w for t, w in zip(tools, weights, strict=True) if t.requests]
    )[0]
    others = [tool for tool in tools if tool is not right]
    chosen = [right, *rng.sample(others, rng.choice([0, 1, 2, 2, 3, 3, 4]))]
    rng.shuffle(chosen)
    calls = [presented(tool, values) for tool in chosen]
    if len({call.name for call in calls}) < len(calls):
        return tool_request(values, split)
    return calls, called(next(call for call in calls if call.tool is right), values)


def tool_example(values: Values, split: str) -> Example:
    """A conversation with tools."""
    rng = values.rng
    calls, call = tool_request(values, split)
    example = Example()
    if rng.random() < 0.12:
        return _which_tool(example, calls, call, rng)
    system = tool_prompt(calls, rng)
    example.turn("system", system)
    if rng.random() < 0.1:
        asked, answer = rng.choice(SMALL_TALK)
        example.turn("user", say(parse(asked), rng, lambda slot: "")).turn("assistant", answer)
    asked_call = compact({"name": call.name, "arguments": call.arguments()})
    bare = "<tool_call>" not in system and rng.random() < 0.5
    example.turn("user", call.request)
    example.turn("assistant", asked_call if bare else f"<tool_call>{asked_call}</tool_call>")
    if rng.random() < 0.15:
        return example
    _answer(example, call, values)
    if rng.random() < 0.1:
        example.turn("user", rng.choice(["Thanks!", "Thank you.", "Great, thanks."])).turn(
            "assistant", "You are welcome!"
        )
    return example


def _which_tool(example: Example, calls: list[Call], call: Call, rng: random.Random) -> Example:
    names = rng.choice([", ", " or ", " / "]).join(c.name for c in calls)
    if rng.random() < 0.5:
        return example.raw(
            f"Tools: {names}\nRequest: {call.request}\nTool:{' ' if rng.random() < 0.5 else ''}", call.name, rng
        )
    task = rng.choice(
        [f"Which tool answers this: {names}?", f"Choose a tool: {names}.", f"Tools: {names}. Which one is needed?"]
    )
    return example.turn("user", f"{task}\n{call.request}").turn("assistant", call.name)


def _answer(example: Example, call: Call, values: Values) -> None:
    rng, tool = values.rng, call.tool
    results: dict[str, Value] = {}
    for name, kind in tool.result.items():
        results[name] = (
            draw(values, kind) if kind != "number" else Value("", result_of(call.said["expression"].data, rng))
        )
    for value in results.values():
        value.text = str(value.data) if not isinstance(value.data, float) else repr(value.data)
    data = {name: value.data for name, value in results.items()}
    plain = rng.random() < 0.45
    content = ", ".join(f"{v.text}" for v in results.values()) if plain else json.dumps(data, ensure_ascii=False)
    known = {**call.said, **results}
    fitting = [a for a in tool.answers if a]
    text = say(rng.choice(fitting), rng, lambda slot: known[slot.name].text)
    example.turn("tool", content).turn("assistant", text[0].upper() + text[1:])
