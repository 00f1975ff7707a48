"""The format of calls that a chat template writes, and what it takes earlier calls as."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sgl.errors import InvalidRequest
from sgl.formats.arguments import XML_STYLES
from sgl.formats.calls import FORMATS, CallFormat
from sgl.formats.marks import parts_of
from sgl.formats.reading import calls_in

_PROBE = "sgl_probe"
_ARGUMENTS = {_PROBE: 1}
_IDS = ("call00000", f"functions.{_PROBE}:0")
"""Templates refuse ids that are no nine letters, or write nothing but the id."""

Render = Callable[[list[dict[str, Any]]], str]


class CallStyle(NamedTuple):
    """How a template has calls."""

    format: CallFormat
    as_text: bool = False
    """It takes arguments as JSON text."""
    without_content: bool = False
    """It takes no content beside calls, not even an empty one."""


def call_style(render: Render, formats: Sequence[CallFormat] = FORMATS) -> CallStyle | None:
    """How a template writes calls, as its model was trained: the first of the formats in which a call can be read from
    what it renders, with the template's white space. None if there is none."""
    for as_text, without_content, written in _rendered(render):
        for each in formats:
            if _is_read(each, written):
                return CallStyle(_as_written(each, written), as_text, without_content)
    return None


def _rendered(render: Render) -> Iterator[tuple[bool, bool, str]]:
    for as_text in (False, True):
        for without_content in (False, True):
            for call_id in _IDS:
                turn = turn_of_calls(call_id, as_text=as_text, without_content=without_content)
                try:
                    yield as_text, without_content, render([{"role": "user", "content": "-"}, turn])
                except InvalidRequest:  # the template knows no such calls
                    continue


def turn_of_calls(call_id: str, *, as_text: bool, without_content: bool) -> dict[str, Any]:
    """A turn that calls."""
    arguments = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
    function = {"name": _PROBE, "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": None if without_content else "", "tool_calls": calls}


def _is_read(format: CallFormat, written: str) -> bool:
    """Whether a text holds the probe's call in the format."""
    at = written.find(format.trigger or parts_of(format.begin)[0])
    if at < 0:
        return False
    found = calls_in(written[at:], format)
    return [call["name"] for call in found] == [_PROBE] and json.loads(found[0]["arguments"] or "") == _ARGUMENTS


def _as_written(format: CallFormat, written: str) -> CallFormat:
    """The format with a template's white space."""
    if format.has_channels:
        return format
    name = rf"(?:functions\.)?{_PROBE}(?::\d+)?"
    behind = {"opening": "", "begin": name, "middle": _arguments_of(format), "end": "", "closing": ""}
    written_ones = [each for each in behind if getattr(format, each) or behind[each]]
    pattern = ""
    for each in written_ones:
        is_last = each == written_ones[-1] or (each == "middle" and format.arguments != "json")
        blanks = "" if each == written_ones[0] else r"\s*", "" if is_last else r"\s*"
        mark = r"\s*".join(map(re.escape, parts_of(getattr(format, each))))
        pattern += rf"(?P<{each}>{blanks[0]}{mark}{blanks[1]}){behind[each]}"
    found = re.search(pattern, written)
    marks: dict[str, Any] = found.groupdict() if found else {}
    return dataclasses.replace(format, **marks)


def _arguments_of(format: CallFormat) -> str:
    """A pattern of the probe's arguments."""
    if format.arguments == "json":
        return rf'\{{\s*"{_PROBE}":\s*1\s*\}}'
    style = XML_STYLES[format.arguments]
    marks = [style.begin + _PROBE, *style.middle.split(), "1", style.end]
    return r"\s*".join(["", *map(re.escape, marks)])
