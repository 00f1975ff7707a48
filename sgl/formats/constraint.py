"""The structural tags that hold a model to its format of calls and their arguments to the tools' schemas, and that let
it think first."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sgl.formats.arguments import XML_STYLES
from sgl.formats.call_format import BlockKind, CallFormat
from sgl.formats.harmony import harmony_tag
from sgl.formats.marks import parts_of
from sgl.formats.value_types import types_of

Choice = Literal["auto", "required"]
Tag = dict[str, Any]

_FREE = ("any_text", "triggered_tags", "dispatch")
_OPAQUE = ("json_schema", "schema", "pattern", "excludes")
_ANYTHING: Tag = {"type": "any_text"}


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
    if format.trigger and not format.opening and not format.id_mark and format.arguments == "json":
        structures = [
            {"begin": tag["begin"], "schema": tag["content"]["json_schema"], "end": tag["end"]}
            for tag in section["tags"]
        ]
        return {"triggers": [format.trigger], "structures": structures, "stop_after_first": only_one}
    if format.trigger:
        return _structural(
            {
                "type": "triggered_tags",
                "triggers": [format.trigger],
                "tags": [section] if format.opening else section["tags"],
                "stop_after_first": only_one,
            }
        )
    if format.prefix:
        prefix = {"type": "const_string", "value": format.prefix}
        section = {"type": "sequence", "elements": [{"type": "optional", "content": prefix}, section]}
    return _structural({"type": "or", "elements": [section, _no_calls(format)]})


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
        return _structural(harmony_tag(functions, format, needs_call=needs_call, only_one=only_one, answer=answer))
    blocks = format.blocks
    thoughts: Tag = {"type": "tag", "begin": blocks.thought[0], "content": _ANYTHING, "end": blocks.thought[1]}
    said: Tag = {"type": "tag", "begin": blocks.said[0], "content": answer or _ANYTHING, "end": blocks.said[1]}
    before: Tag = {"type": "optional", "content": thoughts}
    if begun == "thought":
        before = {**thoughts, "begin": ""}
    elif begun == "said":
        before, said = {"type": "const_string", "value": ""}, {**said, "begin": ""}
    ways = [] if needs_call else [said]
    if functions:
        calls = _section(functions, format, only_one=only_one)
        if begun != "said":
            ways.append(calls)
        if begun == "said" or blocks.says_first:
            ways.append({"type": "sequence", "elements": [{**said, "content": _ANYTHING}, calls]})
    elements = [before, {"type": "or", "elements": ways}]
    if blocks.end:
        elements.append({"type": "optional", "content": {"type": "const_string", "value": blocks.end}})
    return _structural({"type": "sequence", "elements": elements})


def _section(functions: Sequence[Mapping[str, Any]], format: CallFormat, *, only_one: bool) -> Tag:
    """Calls, and what stands around all of them."""
    several: Tag = {
        "type": "tags_with_separator",
        "tags": [_tag(function, format) for function in functions],
        "separator": format.separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }
    if not format.opening:
        return several
    return {"type": "tag", "begin": format.opening, "content": several, "end": format.closing}


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
    breaks: Tag = {"type": "regex", "pattern": "\n{0,2}"}
    reasoning: Tag = {"type": "tag", "begin": "" if is_inside else begin, "content": _ANYTHING, "end": end}
    if is_inside:
        return _structural({"type": "sequence", "elements": [reasoning, breaks, rest]})
    optional = {"type": "optional", "content": {"type": "sequence", "elements": [reasoning, breaks]}}
    return _structural({"type": "sequence", "elements": [optional, rest]})


def _as_format(kind: str, source: Any) -> Tag | None:
    if kind == "regex":
        return {"type": "regex", "pattern": source}
    if kind == "ebnf":
        return None
    try:
        given = json.loads(source) if isinstance(source, str) else source
    except ValueError:  # whoever reads it will say so
        return None
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": given}
    if not isinstance(given, Mapping) or given.get("at_least_one"):
        return None  # formats have no way to say that text may come before
    if "format" in given:
        return given["format"] if isinstance(given["format"], dict) else None
    if not given.get("triggers") or not given.get("structures"):
        return None
    return {
        "type": "triggered_tags",
        "triggers": given["triggers"],
        "tags": [_as_tag(structure) for structure in given["structures"]],
        "stop_after_first": bool(given.get("stop_after_first")),
    }


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
    content: Tag = {"type": "regex", "pattern": structure.get("regex")}
    if "schema" in structure:
        content = {"type": "json_schema", "json_schema": structure["schema"]}
    return {"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end")}


def _structural(source: Tag) -> Tag:
    return {"type": "structural_tag", "format": source}


def _tag(function: Mapping[str, Any], format: CallFormat) -> Tag:
    parameters = function.get("parameters", {"type": "object"})
    content: Tag = {"type": "json_schema", "json_schema": parameters}
    if format.arguments != "json":
        content["style"] = format.arguments
    name = format.written_name(function["name"])
    begin = f"{format.begin}{name}{format.middle}"
    if format.number_mark:
        number = {"type": "regex", "pattern": "[0-9]{1,4}"}
        middle = {"type": "const_string", "value": f"{format.number_mark}{name}{format.middle}"}
        content = {"type": "sequence", "elements": [number, middle, content]}
        begin = format.begin
    if format.writes_id or format.id_mark:
        is_number = format.writes_id or format.has_number
        number = {"type": "regex", "pattern": "[0-9]{1,4}" if is_number else "[a-zA-Z0-9]{9}"}
        middle = {"type": "const_string", "value": format.middle}
        content = {"type": "sequence", "elements": [number, middle, content]}
        begin = f"{format.begin}functions.{name}:" if format.writes_id else f"{format.begin}{name}{format.id_mark}"
    return {"type": "tag", "begin": begin, "content": content, "end": format.end}


def _no_calls(format: CallFormat) -> Tag:
    """An answer that no reader takes for calls."""
    parts = [re.escape(part) for part in parts_of(format.opening + format.begin)]
    if not format.begin:
        parts += [r"[\w./-]+", re.escape(format.middle)]
    prefix = "".join(re.escape(part) for part in parts_of(format.prefix))
    begins = r"\s*".join([f"(?:{prefix})?", *parts])
    return {"type": "regex", "pattern": rf"(?!\s*{begins})(?:.|\n)*"}
