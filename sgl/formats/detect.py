"""The format of calls that a chat template writes, and what it takes earlier calls as."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sgl.errors import InvalidRequest
from sgl.formats.calls import FORMATS, CallFormat
from sgl.formats.marks import parts_of
from sgl.formats.parser import Argued, Begun, CallParser

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
    begins = [written.find(part) for part in parts_of(format.trigger or format.begin)[:1]]
    parser = CallParser(format, {}, is_sure=False)
    events = parser.feed(written[max(0, begins[0]) :] if begins[0] >= 0 else "", final=True)
    names = [event.name for event in events if isinstance(event, Begun)]
    arguments = "".join(event.text for event in events if isinstance(event, Argued))
    return names == [_PROBE] and json.loads(arguments) == _ARGUMENTS


def _as_written(format: CallFormat, written: str) -> CallFormat:
    """The format with a template's white space."""
    if format.arguments != "json":
        return format
    names = [name for name in ("opening", "begin", "middle", "end", "closing") if getattr(format, name)]
    name = rf"(?:functions\.)?{_PROBE}(?::\d+)?"
    between = {"begin": name, "middle": rf'\{{\s*"{_PROBE}":\s*1\s*\}}'}
    pattern = ""
    for each in names:
        before, behind = ("" if each == names[0] else r"\s*"), ("" if each == names[-1] else r"\s*")
        mark = r"\s*".join(map(re.escape, parts_of(getattr(format, each))))
        pattern += rf"(?P<{each}>{before}{mark}{behind}){between.get(each, '')}"
    found = re.search(pattern, written)
    marks: dict[str, Any] = found.groupdict() if found else {}
    return dataclasses.replace(format, **marks)
