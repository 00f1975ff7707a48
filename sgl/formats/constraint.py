"""The structural tags that hold a model to its format of calls and their arguments to the tools' schemas, and that let
it think first."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sgl.formats.arguments import XML_STYLES
from sgl.formats.call_format import BlockKind, CallFormat
from sgl.formats.harmony import MESSAGE, START
from sgl.formats.marks import parts_of
from sgl.formats.value_types import types_of

Choice = Literal["auto", "required"]
Tag = dict[str, Any]

_FREE = ("any_text", "triggered_tags", "dispatch")
_OPAQUE = ("json_schema", "schema", "pattern", "excludes")
_ANYTHING: Tag = {"type": "any_text"}
_NUMBER = "[0-9]{1,4}"
_ID = "[a-zA-Z0-9]{9}"
_TYPES = (" <|constrain|>json", "<|constrain|>json", " json", "")
"""How the type of a call's arguments may be written in Harmony."""


def calls_tag(
    functions: Sequence[Mapping[str, Any]],
    format: CallFormat,
    *,
    choice: Choice = "auto",
    only_one: bool = False,
    begun: BlockKind = "",
) -> Tag:
    """Calls of the functions ({"name", "parameters"}), alone if they are `required`, else within free text, in which a
    begun call must be one of them. begun: the block that the prompt began, of a format with blocks."""
    if format.has_channels:
        needs_call = choice == "required"
        return channels_tag(functions, format, needs_call=needs_call, only_one=only_one, begun=begun)
    section = _section(functions, format, only_one=only_one)
    if choice == "required":
        return _structural(section)
    if not format.trigger:
        calls = _sequence(_optional(_text(format.prefix)), section) if format.prefix else section
        return _structural(_either(calls, _no_calls(format)))
    if not format.opening and not format.id_mark and format.arguments == "json":
        structures = [
            {"begin": tag["begin"], "schema": tag["content"]["json_schema"], "end": tag["end"]}
            for tag in section["tags"]
        ]
        return {"triggers": [format.trigger], "structures": structures, "stop_after_first": only_one}
    tags = [section] if format.opening else section["tags"]
    return _structural(_triggered([format.trigger], tags, only_one=only_one))


def channels_tag(
    functions: Sequence[Mapping[str, Any]],
    format: CallFormat,
    *,
    needs_call: bool = False,
    only_one: bool = False,
    answer: Tag | None = None,
    begun: BlockKind = "",
) -> Tag:
    """An answer in channels: thoughts, then calls of the functions, or unless one is needed what is said, which is text
    or of another format."""
    if format.blocks is None:
        return _structural(_messages(functions, format, needs_call, only_one, answer or _ANYTHING))
    blocks = format.blocks
    thoughts = _tag(blocks.thought[0], _ANYTHING, blocks.thought[1])
    said = _tag(blocks.said[0], answer or _ANYTHING, blocks.said[1])
    before = _optional(thoughts)
    if begun == "thought":
        before = {**thoughts, "begin": ""}
    elif begun == "said":
        before, said = _text(""), {**said, "begin": ""}
    ways = [] if needs_call else [said]
    if functions:
        calls = _section(functions, format, only_one=only_one)
        if begun != "said":
            ways.append(calls)
        if begun == "said" or blocks.says_first:
            ways.append(_sequence({**said, "content": _ANYTHING}, calls))
    behind = [_optional(_text(blocks.end))] if blocks.end else []
    return _structural(_sequence(before, _either(*ways), *behind))


def _messages(
    functions: Sequence[Mapping[str, Any]], format: CallFormat, needs_call: bool, only_one: bool, answer: Tag
) -> Tag:
    """Harmony's: any thoughts, then calls or the answer. What is not the last message must not end as one: models stop
    there."""
    thoughts = [_tag(f"<|channel|>{each}{MESSAGE}", _ANYTHING, ["<|end|>"]) for each in ("analysis", "commentary")]
    before: Tag = {"type": "star", "content": _sequence(_either(*thoughts), _text(START))}
    ways = []
    if functions:
        calls = [_message_to(function, format) for function in functions]
        ways.append(_several(calls, START, only_one=only_one))
    if not needs_call:
        ways.append(_tag(f"<|channel|>final{MESSAGE}", answer, ["<|end|>", "<|return|>"]))
    return _sequence(before, _either(*ways))


def _message_to(function: Mapping[str, Any], format: CallFormat) -> Tag:
    name = format.written_name(function["name"])
    headers = [f"<|channel|>commentary to=functions.{name}{each}{MESSAGE}" for each in _TYPES]
    headers += [f" to=functions.{name}<|channel|>commentary{each}{MESSAGE}" for each in _TYPES]
    return _tag("", _sequence(_either(*map(_text, headers)), _arguments(function)), "<|call|>")


def _section(functions: Sequence[Mapping[str, Any]], format: CallFormat, *, only_one: bool) -> Tag:
    """Calls, and what stands around all of them."""
    several = _several([_call(function, format) for function in functions], format.separator, only_one=only_one)
    return _tag(format.opening, several, format.closing) if format.opening else several


def in_channels(kind: str, source: Any, format: CallFormat, begun: BlockKind = "") -> Tag | None:
    """A constraint, given by its kind and source, on what a model says in its last channel. None as for
    `behind_reasoning`."""
    answer = _as_format(kind, source)
    return None if answer is None else channels_tag([], format, answer=answer, begun=begun)


def loose(parameters: Mapping[str, Any], format: CallFormat) -> dict[str, Any]:
    """A schema of arguments of a tool that is not strict about them: an object, in which strings are told from other
    values where the format does not."""
    if format.arguments not in XML_STYLES:
        return {"type": "object"}
    properties = parameters.get("properties")
    names = properties if isinstance(properties, Mapping) else {}
    return {
        "type": "object",
        "properties": {name: {"type": sorted(types_of(parameters, name))} for name in names},
        "additionalProperties": {"type": sorted(types_of(parameters, ""))},
    }


def behind_reasoning(kind: str, source: Any, begin: str, end: str, *, is_inside: bool) -> Tag | None:
    """A constraint, given by its kind and source, that holds from where the reasoning ends; without any, at once.
    `is_inside`: the prompt began the reasoning. None for a constraint that is malformed, or cannot stand behind another
    text."""
    rest = _as_format(kind, source)
    if rest is None:
        return None
    rest = _without(rest, begin)
    reasoning = [_tag("" if is_inside else begin, _ANYTHING, end), _regex("\n{0,2}")]
    before = reasoning if is_inside else [_optional(_sequence(*reasoning))]
    return _structural(_sequence(*before, rest))


def _as_format(kind: str, source: Any) -> Tag | None:
    if kind == "regex":
        return _regex(source)
    if kind == "ebnf":
        return None
    try:
        given = json.loads(source) if isinstance(source, str) else source
    except ValueError:  # whoever reads it will say so
        return None
    if kind == "json_schema":
        return _schema(given)
    if not isinstance(given, Mapping) or given.get("at_least_one"):
        return None  # formats have no way to say that text may come before
    if "format" in given:
        return given["format"] if isinstance(given["format"], dict) else None
    if not given.get("triggers") or not given.get("structures"):
        return None
    tags = [_as_tag(structure) for structure in given["structures"]]
    return _triggered(given["triggers"], tags, only_one=bool(given.get("stop_after_first")))


def _without(source: Any, begin: str) -> Any:
    """A format whose free text does not begin the reasoning, else nothing tells text from reasoning."""
    if isinstance(source, list):
        return [_without(each, begin) for each in source]
    if not isinstance(source, dict):
        return source
    kept = {name: value for name, value in source.items() if name in _OPAQUE}
    found = {name: _without(value, begin) for name, value in source.items() if name not in _OPAQUE}
    if source.get("type") in _FREE:
        excludes = source.get("excludes") or []
        found["excludes"] = [*excludes, begin] if isinstance(excludes, list) else excludes
    return {**kept, **found}


def _as_tag(structure: Any) -> Any:
    if not isinstance(structure, Mapping):
        return structure
    content = _schema(structure["schema"]) if "schema" in structure else _regex(structure.get("regex"))
    return _tag(structure.get("begin"), content, structure.get("end"))


def _call(function: Mapping[str, Any], format: CallFormat) -> Tag:
    arguments = _arguments(function)
    if format.arguments != "json":
        arguments["style"] = format.arguments
    name = format.written_name(function["name"])
    begin, middle, number = format.begin + name, format.middle, _NUMBER
    if format.number_mark:
        begin, middle = format.begin, f"{format.number_mark}{name}{middle}"
    elif format.writes_id:
        begin = f"{format.begin}functions.{name}:"
    elif format.id_mark:
        begin, number = begin + format.id_mark, _NUMBER if format.has_number else _ID
    else:
        return _tag(begin + middle, arguments, format.end)
    return _tag(begin, _sequence(_regex(number), _text(middle), arguments), format.end)


def _arguments(function: Mapping[str, Any]) -> Tag:
    return _schema(function.get("parameters", {"type": "object"}))


def _no_calls(format: CallFormat) -> Tag:
    """An answer that no reader takes for calls."""
    parts = [re.escape(part) for part in parts_of(format.opening + format.begin)]
    if not format.begin:
        parts += [r"[\w./-]+", re.escape(format.middle)]
    prefix = "".join(re.escape(part) for part in parts_of(format.prefix))
    begins = r"\s*".join([f"(?:{prefix})?", *parts])
    return _regex(rf"(?!\s*{begins})(?:.|\n)*")


# ── structural tags ─────────────────────────────────────────────────────────────────────────────────────────────────


def _structural(format: Tag) -> Tag:
    return {"type": "structural_tag", "format": format}


def _text(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def _regex(pattern: Any) -> Tag:
    return {"type": "regex", "pattern": pattern}


def _schema(schema: Any) -> Tag:
    return {"type": "json_schema", "json_schema": schema}


def _optional(content: Tag) -> Tag:
    return {"type": "optional", "content": content}


def _sequence(*elements: Tag) -> Tag:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: Tag) -> Tag:
    return {"type": "or", "elements": list(elements)}


def _tag(begin: Any, content: Tag, end: Any) -> Tag:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _several(tags: list[Tag], separator: str, *, only_one: bool) -> Tag:
    several: Tag = {"type": "tags_with_separator", "tags": tags, "separator": separator}
    return {**several, "at_least_one": True, "stop_after_first": only_one}


def _triggered(triggers: Any, tags: list[Any], *, only_one: bool) -> Tag:
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": only_one}
