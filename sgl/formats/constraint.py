"""The structural tag that holds a model to its format of calls, and their arguments to the tools' schemas."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sgl.formats.calls import CallFormat
from sgl.formats.marks import parts_of

Choice = Literal["auto", "required"]
Tag = dict[str, Any]

_ANYTHING: Tag = {"type": "any_text"}


def calls_tag(
    functions: Sequence[Mapping[str, Any]], format: CallFormat, *, choice: Choice = "auto", only_one: bool = False
) -> Tag:
    """Calls of the functions ({"name", "parameters"}), alone if they are `required`, else within free text, in which a
    begun call must be one of them."""
    tags = [_tag(function, format) for function in functions]
    several: Tag = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": format.separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }
    section: Tag = several
    if format.opening:
        section = {"type": "tag", "begin": format.opening, "content": several, "end": format.closing}
    if choice == "required":
        return _structural(section)
    if format.trigger:
        return _structural(
            {
                "type": "triggered_tags",
                "triggers": [format.trigger],
                "tags": [section] if format.opening else tags,
                "stop_after_first": only_one,
            }
        )
    if format.prefix:
        prefix = {"type": "const_string", "value": format.prefix}
        section = {"type": "sequence", "elements": [{"type": "optional", "content": prefix}, section]}
    return _structural({"type": "or", "elements": [section, _no_calls(format)]})


def _structural(source: Tag) -> Tag:
    return {"type": "structural_tag", "format": source}


def _tag(function: Mapping[str, Any], format: CallFormat) -> Tag:
    parameters = function.get("parameters", {"type": "object"})
    content: Tag = {"type": "json_schema", "json_schema": parameters}
    if format.arguments != "json":
        content["style"] = format.arguments
    begin = f"{format.begin}{function['name']}{format.middle}"
    if format.writes_id:
        number = {"type": "regex", "pattern": "[0-9]{1,4}"}
        middle = {"type": "const_string", "value": format.middle}
        content = {"type": "sequence", "elements": [number, middle, content]}
        begin = f"{format.begin}functions.{function['name']}:"
    return {"type": "tag", "begin": begin, "content": content, "end": format.end}


def _no_calls(format: CallFormat) -> Tag:
    """An answer that no reader takes for calls."""
    parts = [re.escape(part) for part in parts_of(format.opening + format.begin)]
    prefix = "".join(re.escape(part) for part in parts_of(format.prefix))
    begins = r"\s*".join([f"(?:{prefix})?", *parts])
    return {"type": "regex", "pattern": rf"(?!\s*{begins})(?:.|\n)*"}
