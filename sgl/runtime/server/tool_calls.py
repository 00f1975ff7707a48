"""Tool calls in chats: the constraint that makes them well-formed, and how an answer is read, whole or streamed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from time import thread_time
from typing import Any

from sgl.errors import GrammarError, InvalidRequest, nearest_name
from sgl.formats.call_format import BlockKind, CallFormat
from sgl.formats.calls import ARRAY, OBJECT
from sgl.formats.constraint import calls_tag, channels_tag, loose
from sgl.formats.detect import CallStyle
from sgl.formats.marks import half_mark
from sgl.formats.parser import ArgumentsDelta, ContentDelta, Event, ReasoningDelta, ToolCallStart
from sgl.formats.reading import AnswerReader, reader_of
from sgl.grammar.compiler import AdditionalProperties, compile
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.lang.ir.reasoning import ReasoningSplitter
from sgl.lang.typed.tools import CALL_TAG, call_schema, calls_of
from sgl.runtime.sampling_params import CONSTRAINTS
from sgl.runtime.server.custom_tools import function_of
from sgl.runtime.server.protocol import AllowedToolChoice, ChatBody, ChosenCustom, ChosenTool, CustomTool, Function
from sgl.time_limit import time_limit

_BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [None], [256], 257)
_MOST_SECONDS = 1.0  # of looking whether one tool's schema can be enforced
_MOST_SECONDS_IN_ALL = 5.0
_AT_ONCE = 4096  # characters: readers copy what is left of a text with each step
_MOST_KEPT = 16 << 10  # characters of a schema whose answer is kept


@dataclass(frozen=True, slots=True)
class Reading:
    """How an answer is read."""

    has_tools: bool = False
    format: CallFormat | None = None
    """Of calls; None: any that can be told."""
    is_sure: bool = False
    """Whether calls are certainly well-formed."""
    only_calls: bool = False
    """Whether the answer is nothing else."""
    input_of: str | None = None
    """The custom tool whose input all of it is."""
    schemas: Mapping[str, Any] = field(default_factory=dict)
    """The parameters of the tools by name."""
    bare: frozenset[str] | None = None
    """The tools that may be called without the format's marks; None: any."""
    separates_reasoning: bool = True
    """Of a format with channels: whether reasoning is no content."""
    streams_reasoning: bool = True
    """Likewise: else it comes in one piece, when it has ended."""
    begun: BlockKind = ""
    """Of a format with blocks: the one that the prompt began."""


def call_constraint(
    body: ChatBody,
    style: CallStyle | None,
    params: Mapping[str, Any],
    *,
    has_tags: bool = True,
    loosened: Collection[str] = (),
    begun: BlockKind = "",
) -> tuple[dict[str, Any], Reading]:
    """The constraint for well-formed calls (empty if none may come or their format is unknown), and how the answer is
    read then. A schema for texts does not hold where there are only calls. `has_tags`: the engine takes structural
    tags. `loosened`: tools whose arguments may be any where calls may come and need not, unless they say that they are
    strict. `begun`: the block that the prompt began. Raises InvalidRequest for uncallable tools."""
    format = None if style is None else style.format
    by_name = _functions(body)
    functions = list(by_name.values())
    choice = body.tool_choice
    is_named = isinstance(choice, ChosenTool | ChosenCustom)
    if isinstance(choice, ChosenTool | ChosenCustom):
        functions = [_named(choice, by_name)]
    elif isinstance(choice, AllowedToolChoice):
        allowed_tools = choice.allowed_tools
        choice = allowed_tools.mode
        allowed = {its.name: its for its in (_named(tool, by_name) for tool in allowed_tools.tools)}
        functions = list(allowed.values())  # thousands may name one, whose schema is long
    if not functions and choice == "required":
        raise InvalidRequest("tool_choice is required, and there are no tools", param="tool_choice")
    if not functions or choice == "none":
        return {}, Reading(format=_channels(format))
    if grammars := _lark_grammars(body, functions):
        [(name, grammar)] = grammars.items()
        if len(functions) > 1 or choice == "auto" or choice is None:
            message = f"the Lark grammar of {name!r} holds where nothing else may be called: name it in tool_choice"
            raise InvalidRequest(message, param="tool_choice")
        return {"ebnf": grammar, "json_schema": None}, Reading(has_tools=True, input_of=name)
    typed = [_typed(function) for function in functions]
    schemas = {function["name"]: function["parameters"] for function in typed}
    names = frozenset(schemas)
    only_one = body.parallel_tool_calls is False or is_named or (style is not None and style.only_one)
    if is_named or choice == "required":
        if format is not None and has_tags:
            tag = calls_tag(typed, format, choice="required", only_one=only_one, begun=begun)
            return {"structural_tag": tag, "json_schema": None}, Reading(True, format, True, True, schemas=schemas)
        return _as_json(typed, is_named=is_named, only_one=only_one)
    if "json_schema" in params:  # a document or a call
        if (channels := _channels(format)) is not None and has_tags:
            answer = {"type": "json_schema", "json_schema": params["json_schema"]}
            tag = channels_tag(typed, channels, only_one=only_one, answer=answer, begun=begun)
            return {"structural_tag": tag, "json_schema": None}, Reading(True, channels, True, schemas=schemas)
        document = {"$id": "urn:answer", **params["json_schema"]}
        return {"json_schema": {"anyOf": [call_schema(typed), document]}}, Reading(has_tools=True, bare=names)
    if format is None or params.keys() & CONSTRAINTS or not has_tags:
        return {}, Reading(True, format, schemas=schemas, bare=names)
    held = [
        each if _is_held(function, loosened) else {**each, "parameters": loose(each["parameters"], format)}
        for function, each in zip(functions, typed, strict=True)
    ]
    strict = {function.name for function in functions if function.strict}  # which nothing holds without marks
    return {"structural_tag": calls_tag(held, format, only_one=only_one, begun=begun)}, Reading(
        True, format, True, schemas=schemas, bare=names - strict
    )


def _is_held(function: Function, loosened: Collection[str]) -> bool:
    return function.name not in loosened if function.strict is None else function.strict


def loosenings(
    body: ChatBody, format: CallFormat, additional_properties: AdditionalProperties
) -> list[frozenset[str]]:
    """Which tools to loosen where the constraint on calls cannot be enforced: those whose own schemas cannot, then all
    that do not say. None where one says that it is strict."""
    functions = [function for function in _functions(body).values() if function.strict is not False]
    began = thread_time()

    def fails(function: Function) -> bool:
        if thread_time() - began > _MOST_SECONDS_IN_ALL:  # not looked at: loosened if it may be
            return function.strict is None
        return not _can_be_held(_typed(function), format, additional_properties)

    failing = {each.name for each in functions if fails(each)}
    unset = {function.name for function in functions if function.strict is None}
    if not failing <= unset:
        return []
    return [frozenset(failing), frozenset(unset)] if failing and failing != unset else [frozenset(unset)]


def _can_be_held(function: dict[str, Any], format: CallFormat, additional_properties: AdditionalProperties) -> bool:
    """Whether a tool's schema can be enforced alone, as far as that does not depend on the vocabulary."""
    text = json.dumps(function)
    check = _can_be_compiled if len(text) <= _MOST_KEPT else _can_be_compiled.__wrapped__
    return check(text, format, additional_properties)


@lru_cache(maxsize=256)
def _can_be_compiled(function: str, format: CallFormat, additional_properties: AdditionalProperties) -> bool:
    tag = calls_tag([json.loads(function)], format, choice="required")
    with suppress(GrammarError), time_limit(_MOST_SECONDS, thread_time):
        compile(structural_tag=tag, vocabulary=_BYTES, additional_properties=additional_properties)
        return True
    return False


def _channels(format: CallFormat | None) -> CallFormat | None:
    """A format that is read though there are no calls."""
    return format if format is not None and format.has_channels else None


def _as_json(typed: list[dict[str, Any]], *, is_named: bool, only_one: bool) -> tuple[dict[str, Any], Reading]:
    """Calls for models of which no format is known."""
    if is_named:
        return {"json_schema": call_schema(typed)}, Reading(True, OBJECT, True, True)
    most = {"maxItems": 1} if only_one else {}
    return {"json_schema": {"type": "array", "items": call_schema(typed), "minItems": 1, **most}}, Reading(
        True, ARRAY, True, True
    )


def _functions(body: ChatBody) -> dict[str, Function]:
    """The tools as functions, by name. Raises InvalidRequest."""
    functions: dict[str, Function] = {}
    for function in map(function_of, body.tools or ()):
        if function.name in functions:
            raise InvalidRequest(f"two tools are named {function.name!r}", param="tools")
        kind = (function.parameters or {}).get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise InvalidRequest(f"the parameters of {function.name!r} must be of type object", param="tools")
        functions[function.name] = function
    return functions


def _lark_grammars(body: ChatBody, functions: list[Function]) -> dict[str, str]:
    """Those of custom tools among the functions, no more than the first."""
    names = {function.name for function in functions}
    for tool in body.tools or ():
        if isinstance(tool, CustomTool) and tool.custom.name in names:
            grammar = tool.custom.grammar
            if grammar is not None and grammar.syntax == "lark":
                return {tool.custom.name: grammar.definition}
    return {}


def _named(chosen: ChosenTool | ChosenCustom, functions: Mapping[str, Function]) -> Function:
    name = (chosen.function if isinstance(chosen, ChosenTool) else chosen.custom).name
    if name in functions:
        return functions[name]
    hint = nearest_name(name, functions)
    raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools{hint}", param="tool_choice")


def _typed(function: Function) -> dict[str, Any]:
    """A function with its arguments' schema, an object; without parameters, an empty one."""
    parameters = function.parameters or {"additionalProperties": False}
    return {"name": function.name, "parameters": {**parameters, "type": "object"}}


@dataclass(slots=True)
class Piece:
    """What a piece adds. A call's first delta has id and name; later ones extend its arguments."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


def merged(pieces: list[Piece]) -> Piece:
    """All pieces of one text as one, where their order does not matter."""
    return Piece(
        "".join([piece.reasoning for piece in pieces]),
        "".join([piece.content for piece in pieces]),
        [call for piece in pieces for call in piece.calls],
    )


class AnswerSplitter:
    """Splits an answer fed in pieces."""

    def __init__(self, reasoning: ReasoningSplitter | None, reading: Reading) -> None:
        self._reasoning = reasoning
        self._reading = reading
        self._reader: AnswerReader | None = None
        self._held = ""  # until the reader is chosen
        self._num_calls = 0
        self._thought = ""  # that was not told yet

    @property
    def is_calling(self) -> bool:
        """Whether what was fed last is of a call."""
        reading, reader = self._reading, self._reader
        return reading.only_calls or reading.input_of is not None or (reader is not None and reader.is_calling)

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """What the next text adds, in order: text behind a call begins another piece. `final` releases what is
        held."""
        piece = Piece(content=text)
        pieces = [piece]
        if self._reasoning is not None:
            piece.reasoning, piece.content = self._reasoning.feed(text, final=final)
        if self._reading.input_of is not None:
            self._take_input(piece, self._reading.input_of)
            return pieces
        if not self._reading.has_tools and self._reading.format is None:
            return pieces
        self._held += piece.content
        piece.content = ""
        if self._reader is None:
            self._reader = _reader_for(self._held, self._reading, final=final)
        if self._reader is None:
            return pieces
        text, self._held = self._held, ""
        for start in range(0, max(1, len(text)), _AT_ONCE):
            end = start + _AT_ONCE
            for event in _joined(self._reader.feed(text[start:end], final=final and end >= len(text))):
                if isinstance(event, ReasoningDelta):
                    self._think(event.text, pieces)
                else:
                    self._end_thought(pieces)
                    self._add(event, pieces)
        if final or self._reading.streams_reasoning:
            self._end_thought(pieces)
        return pieces

    def _think(self, text: str, pieces: list[Piece]) -> None:
        if self._reading.separates_reasoning:
            self._thought += text
        else:
            self._add(ContentDelta(text), pieces)

    def _end_thought(self, pieces: list[Piece]) -> None:
        """Tell what is thought."""
        if self._thought:
            if pieces[-1].calls or pieces[-1].content:
                pieces.append(Piece())
            pieces[-1].reasoning += self._thought
            self._thought = ""

    def _add(self, event: Event, pieces: list[Piece]) -> None:
        match event:
            case ContentDelta(text):
                if pieces[-1].calls:
                    pieces.append(Piece())
                pieces[-1].content += text
            case ToolCallStart(name, call_id):
                function = {"name": name, "arguments": ""}
                call = {
                    "index": self._num_calls,
                    "id": call_id or _new_id(),
                    "type": "function",
                    "function": function,
                }
                pieces[-1].calls.append(call)
                self._num_calls += 1
            case ArgumentsDelta(text):
                index, calls = self._num_calls - 1, pieces[-1].calls
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text

    def _take_input(self, piece: Piece, name: str) -> None:
        """All that is said goes to a custom tool."""
        text, piece.content = piece.content, ""
        if not self._num_calls:
            custom = {"name": name, "input": text}
            piece.calls.append({"index": 0, "id": _new_id(), "type": "custom", "custom": custom})
            self._num_calls = 1
        elif text:
            piece.calls.append({"index": 0, "custom": {"input": text}})


def _joined(events: list[Event]) -> Iterator[Event]:
    """The same, neighbours of one kind as one: a text of many small ones would be copied for each."""
    for kind, those in groupby(events, type):
        if kind is ToolCallStart:
            yield from those
        else:
            yield kind("".join(event.text for event in those if not isinstance(event, ToolCallStart)))


def _reader_for(text: str, reading: Reading, *, final: bool) -> AnswerReader | None:
    """What reads an answer that begins so; None where more must come first. Calls without tags are a whole answer, in
    any format."""
    format, start = reading.format, text.lstrip()
    if format is not None and format.has_channels:
        return reader_of(
            format, reading.schemas, has_tools=reading.has_tools, is_sure=reading.is_sure, begun=reading.begun
        )
    if format is not None:
        is_open = (
            not start or (bool(format.trigger) and format.trigger.startswith(start)) or "```".startswith(start)
        )
        if is_open and not final:
            return None
        is_tagged = not start.startswith(_BARE) or start.startswith(format.trigger or " ")
        if is_tagged or not format.trigger:
            return reader_of(format, reading.schemas, is_sure=reading.is_sure)
    return _AnyCalls(reading.bare)


_BARE = ("{", "[", "```")


class _AnyCalls:
    """Looks for calls in any form that can be told. Text from where one may begin is held to the end."""

    def __init__(self, names: frozenset[str] | None) -> None:
        """names: what may be called; None: anything."""
        self._names = names
        self._held = ""
        self._has_begun = False
        self.is_calling = False

    def feed(self, text: str, *, final: bool = False) -> list[Event]:
        self._held += text
        before = self._free_text(final=final)
        self._held = self._held[len(before) :]
        events: list[Event] = [ContentDelta(before)] if before else []
        if final and self._held:
            events += self._found()
            self._held = ""
        return events

    def _free_text(self, *, final: bool) -> str:
        """Held text that belongs to no call."""
        if self.is_calling:
            return ""
        start = self._held.lstrip()
        if not self._has_begun:
            if not start and not final:
                return ""
            if start.startswith(_BARE):
                self.is_calling = True
                return ""
            self._has_begun = bool(start)
        before, tag, _ = self._held.partition(CALL_TAG)
        if tag:
            self.is_calling = True
        elif not final:
            before = self._held[: len(self._held) - half_mark(self._held, CALL_TAG)]
        return before

    def _found(self) -> list[Event]:
        """Held text as calls if it is nothing else, otherwise as text."""
        events: list[Event] = []
        for call in calls_of(self._held, {}):
            if call.error is not None or (self._names is not None and call.name not in self._names):
                return [ContentDelta(self._held)]
            try:
                arguments = json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)
            except ValueError:  # a number of more digits than are written
                return [ContentDelta(self._held)]
            events += (ToolCallStart(call.name), ArgumentsDelta(arguments))
        return events or [ContentDelta(self._held)]


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
