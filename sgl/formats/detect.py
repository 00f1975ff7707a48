"""The format of calls that a chat template writes, and what it takes earlier calls as."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from sgl.errors import InvalidRequest
from sgl.formats.arguments import XML_STYLES
from sgl.formats.call_format import CallFormat
from sgl.formats.calls import FORMATS
from sgl.formats.literals import LITERAL_STYLES
from sgl.formats.marks import parts_of
from sgl.formats.reading import calls_in

_PROBE = "sgl_probe"
_ARGUMENTS = {_PROBE: 1}
_IDS = ("call00000", f"functions.{_PROBE}:0")
"""Templates refuse ids that are no nine letters, or write nothing but the id."""
_LONG_ID = "call_000000000000000000000000"
_USER = {"role": "user", "content": "-"}
_TOOL = {"type": "function", "function": {"name": "-", "description": "-", "parameters": {"type": "object"}}}

Render = Callable[..., str]
"""Messages, and variables of the template, to text."""


class CallStyle(NamedTuple):
    """How a template has calls."""

    format: CallFormat
    as_text: bool = False
    """It takes arguments as JSON text."""
    without_content: bool = False
    """It takes no content beside calls, not even an empty one."""
    only_one: bool = False
    """It refuses a turn of several calls, or leaves all but one out."""
    short_ids: bool = False
    """It takes no ids but those of nine letters and digits."""


def call_style(render: Render, formats: Sequence[CallFormat] = FORMATS) -> CallStyle | None:
    """How a template writes calls, as its model was trained: the first of the formats in which a call can be read from
    what it renders, with the template's white space. None if there is none."""
    for tools in ({}, {"tools": [_TOOL]}):  # some write calls where there are tools only, some show examples then
        before = _rendered(render, [_USER], add_generation_prompt=True, **tools)
        for as_text in (False, True):
            for without_content in (False, True):
                for call_id in _IDS:
                    turn = partial(turn_of_calls, as_text=as_text, without_content=without_content)
                    written = _rendered(render, [_USER, turn(call_id)], **tools)
                    for each in formats:
                        if written is None or not _is_read(each, written, before) or not _has_blocks(render, each):
                            continue
                        both = _rendered(render, [_USER, turn(call_id, call_id[:-1] + "1")], **tools)
                        takes_long = _rendered(render, [_USER, turn(_LONG_ID)], **tools) is not None
                        return CallStyle(
                            _as_written(each, written),
                            as_text,
                            without_content,
                            only_one=both is None or both.count(_PROBE) == written.count(_PROBE),
                            short_ids=call_id == _IDS[0] and not takes_long,
                        )
    return None


def shows_tools(render: Render) -> bool:
    """Whether a template tells the model of tools. One that refuses them says so to who sends some."""
    with_tools = _rendered(render, [_USER], tools=[_TOOL])
    return with_tools is None or with_tools != _rendered(render, [_USER])


def _rendered(render: Render, messages: list[dict[str, Any]], **variables: Any) -> str | None:
    """None where the template refuses them."""
    try:
        return render(messages, **variables)
    except InvalidRequest:  # it knows no such calls
        return None


def turn_of_calls(*ids: str, as_text: bool, without_content: bool) -> dict[str, Any]:
    """A turn with a call of each id."""
    arguments = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
    calls = [
        {"id": call_id, "type": "function", "function": {"name": _PROBE, "arguments": arguments}} for call_id in ids
    ]
    return {"role": "assistant", "content": None if without_content else "", "tool_calls": calls}


def _is_read(format: CallFormat, written: str, before: str | None) -> bool:
    """Whether a text holds the probe's call in the format. `before`: what stands before an answer."""
    at = written.find(format.trigger)
    if not format.trigger:  # calls are the whole answer: others' may hold what looks like them
        at = len(before) if before and written.startswith(before) else -1
    if at < 0 or not (format.has_channels or all(part in written[at:] for part in parts_of(format.end))):
        return False
    found = calls_in(written[at:], format)
    is_probe = [call["name"] for call in found] == [_PROBE]
    return is_probe and json.loads(found[0]["arguments"] or "") in (_ARGUMENTS, {_PROBE: "1"})  # all as strings


def _has_blocks(render: Render, format: CallFormat) -> bool:
    """Whether a template has answers in the format's blocks, if it has any."""
    if format.blocks is None:
        return True
    written = _rendered(render, [_USER, {"role": "assistant", "content": "-"}, _USER])
    return written is not None and format.blocks.said[0] in written


def _as_written(format: CallFormat, written: str) -> CallFormat:
    """The format with a template's white space."""
    if format.has_channels and format.blocks is None:
        return format
    own_id = re.escape(format.id_mark) + r"\w+" if format.id_mark else ""
    name = rf"(?:functions\.)?{_PROBE}(?::\d+)?{own_id}"
    if format.number_mark:
        name = r"\d+" + r"\s*".join(["", *map(re.escape, parts_of(format.number_mark)), _PROBE])
    behind = {"opening": "", "begin": name, "middle": _arguments_of(format), "end": "", "closing": ""}
    written_ones = [each for each in behind if getattr(format, each) or behind[each]]
    pattern = ""
    for each in written_ones:
        is_last = each in (written_ones[-1], "end") or (each == "middle" and format.arguments != "json")
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
    if (literal := LITERAL_STYLES.get(format.arguments)) is not None:
        quote = "|".join(map(re.escape, literal.quotes))
        return rf"\s*{_PROBE}\s*{literal.assigns}\s*(?:{quote})?1(?:{quote})?\s*"
    style = XML_STYLES[format.arguments]
    marks = [style.begin + _PROBE, *style.middle.split(), "1", style.end]
    return r"\s*".join(["", *map(re.escape, marks)])
