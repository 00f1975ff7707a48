"""Tool calls in chats: the constraint that makes them well-formed, and parsing them from answers, whole or streamed."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sgl.errors import InvalidRequest, nearest_name
from sgl.lang.ir.reasoning import ReasoningSplitter, half_tag
from sgl.lang.typed.tools import CALL_TAG, CallNotation, call_schema, call_tag, calls_of
from sgl.runtime.sampling_params import CONSTRAINTS
from sgl.runtime.server.custom_tools import function_of
from sgl.runtime.server.protocol import AllowedToolChoice, ChatBody, ChosenCustom, ChosenTool, CustomTool, Function


@dataclass(frozen=True)
class InputOf:
    """The text is the input of a custom tool."""

    name: str


Sure: TypeAlias = Literal["all", "tags"] | InputOf | None
"""Which text is certainly well-formed calls: all, what is in tags, or none."""


def call_constraint(
    body: ChatBody, notation: CallNotation | None, params: dict[str, Any]
) -> tuple[dict[str, Any], Sure]:
    """The constraint for well-formed calls (empty if none may come or the notation is unknown) and which text is then
    sure to be calls. Raises InvalidRequest for uncallable tools."""
    functions = [function_of(tool) for tool in body.tools or []]
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"two tools are named {name!r}", param="tools")
    for function in functions:
        if (function.parameters or {}).get("type", "object") != "object":
            raise InvalidRequest(f"the parameters of {function.name!r} must be of type object", param="tools")
    choice = body.tool_choice
    is_named = isinstance(choice, ChosenTool | ChosenCustom)
    if isinstance(choice, ChosenTool | ChosenCustom):
        functions = [_named(choice, functions)]
    elif isinstance(choice, AllowedToolChoice):
        allowed_tools = choice.allowed_tools
        choice, functions = allowed_tools.mode, [_named(tool, functions) for tool in allowed_tools.tools]
    if choice != "none" and (grammars := _lark_grammars(body, functions)):
        [(name, grammar)] = grammars.items()
        if len(functions) > 1 or choice == "auto" or choice is None:
            message = f"the Lark grammar of {name!r} holds where nothing else may be called: name it in tool_choice"
            raise InvalidRequest(message, param="tool_choice")
        return {"ebnf": grammar}, InputOf(name)
    if is_named:
        return {"json_schema": call_schema([_typed(functions[0])])}, "all"
    if choice == "required":
        if not functions:
            raise InvalidRequest("tool_choice is required, and there are no tools", param="tool_choice")
        calls = call_schema([_typed(function) for function in functions])
        most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
        return {"json_schema": {"type": "array", "items": calls, "minItems": 1, **most}}, "all"
    if not functions or choice == "none":
        return {}, None
    if "json_schema" in params:  # a document or a call
        document = {"$id": "urn:answer", **params["json_schema"]}
        return {"json_schema": {"anyOf": [call_schema([_typed(each) for each in functions]), document]}}, None
    if notation is None or params.keys() & CONSTRAINTS:
        return {}, None
    loosely = {"parameters": {"type": "object"}}
    allowed = [
        _typed(function) if function.strict else {"name": function.name, **loosely} for function in functions
    ]
    return {"structural_tag": call_tag(allowed, notation, only_one=body.parallel_tool_calls is False)}, "tags"


def _lark_grammars(body: ChatBody, functions: list[Function]) -> dict[str, str]:
    """Those of custom tools among the functions, no more than the first."""
    names = {function.name for function in functions}
    for tool in body.tools or ():
        if isinstance(tool, CustomTool) and tool.custom.name in names:
            grammar = tool.custom.grammar
            if grammar is not None and grammar.syntax == "lark":
                return {tool.custom.name: grammar.definition}
    return {}


def _named(chosen: ChosenTool | ChosenCustom, functions: list[Function]) -> Function:
    name = (chosen.function if isinstance(chosen, ChosenTool) else chosen.custom).name
    for function in functions:
        if function.name == name:
            return function
    hint = nearest_name(name, [function.name for function in functions])
    raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools{hint}", param="tool_choice")


def _typed(function: Function) -> dict[str, Any]:
    """A function with its arguments' schema, an object; without parameters, an empty one."""
    parameters = function.parameters or {"additionalProperties": False}
    return {"name": function.name, "parameters": {"type": "object", **parameters}}


@dataclass(slots=True)
class Piece:
    """What a piece adds. A call's first delta has id and name; later ones extend its arguments."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


def merged(pieces: list[Piece]) -> Piece:
    """All pieces of one text as one, where their order does not matter."""
    content = "".join([piece.content for piece in pieces])
    return Piece(pieces[0].reasoning, content, [call for piece in pieces for call in piece.calls])


class AnswerSplitter:
    """Splits an answer fed in pieces. `sure` calls (`call_constraint`) stream; possible ones are held to the end."""

    def __init__(self, reasoning_format: str | None, *, has_tools: bool, sure: Sure = None) -> None:
        self._reasoning = None if reasoning_format is None else ReasoningSplitter(reasoning_format)
        self._has_tools = has_tools
        self._sure = sure
        self._held = ""
        self._is_call = False
        self._is_tagged = False
        self._has_begun = False
        self._is_behind_call = False
        self._num_calls = 0
        self._arguments: _Arguments | None = None

    @property
    def is_calling(self) -> bool:
        """Whether what was fed last is of a call."""
        return self._is_call or isinstance(self._sure, InputOf)

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """What the next text adds, in order: text behind a call begins another piece. `final` releases what is
        held."""
        piece = Piece(content=text)
        pieces = [piece]
        if self._reasoning is not None:
            piece.reasoning, piece.content = self._reasoning.feed(text, final=final)
        if isinstance(self._sure, InputOf):
            self._take_input(piece, self._sure.name)
            return pieces
        if not self._has_tools:
            return pieces
        self._held += piece.content
        piece.content = self._free_text(final=final)
        while self._is_call and self._is_sure() and self._follow(pieces[-1]):
            if behind := self._free_text(final=final):
                pieces.append(Piece(content=behind))
        if final and self._held:
            if not self._num_calls:
                self._find(piece)
            self._held = ""
        return pieces

    def _take_input(self, piece: Piece, name: str) -> None:
        """All that is said goes to a custom tool."""
        text, piece.content = piece.content, ""
        if not self._num_calls:
            custom = {"name": name, "input": text}
            piece.calls.append({"index": 0, "id": _new_id(), "type": "custom", "custom": custom})
            self._num_calls = 1
        elif text:
            piece.calls.append({"index": 0, "custom": {"input": text}})

    def _is_sure(self) -> bool:
        return self._sure == "all" or (self._sure == "tags" and self._is_tagged)

    def _free_text(self, *, final: bool) -> str:
        """Held text that belongs to no call."""
        if self._is_call:
            return ""
        if self._is_behind_call:
            self._held = self._held.lstrip()
            self._is_behind_call = not self._held
        start = self._held.lstrip()
        if not self._has_begun:
            if not start and not final:
                return ""
            if start.startswith(("{", "[", "```")):  # an untagged call is the whole answer
                self._is_call = True
                return ""
            self._has_begun = bool(start)
        before, tag, _ = self._held.partition(CALL_TAG)
        if tag:
            self._is_call = self._is_tagged = True
        elif not final:
            before = self._held[: len(self._held) - half_tag(self._held, CALL_TAG)]
        self._held = self._held[len(before) :]
        return before

    def _follow(self, piece: Piece) -> bool:
        """Consume what there is of a call; returns whether it ended."""
        if self._arguments is None:
            head = _HEAD.match(self._held)
            if head is None:
                return False
            self._held = self._held[head.end() :]
            self._arguments = _Arguments()
            piece.calls.append(_call(self._num_calls, json.loads(head.group(1)), ""))
            self._num_calls += 1
        text, self._held = self._arguments.split(self._held)
        if text:
            index = self._num_calls - 1
            if not piece.calls or piece.calls[-1]["index"] != index:
                piece.calls.append({"index": index, "function": {"arguments": ""}})
            piece.calls[-1]["function"]["arguments"] += text
        tail = (_TAGGED_TAIL if self._is_tagged else _TAIL).match(self._held)
        if not self._arguments.is_complete or tail is None:
            return False
        self._held = self._held[tail.end() :]
        self._arguments = None
        if self._is_tagged:
            self._is_call, self._is_behind_call = False, True
        return True

    def _find(self, piece: Piece) -> None:
        """Parse held text as calls if it is nothing else, otherwise release it as content."""
        found = calls_of(self._held, {})
        if any(call.error is not None for call in found) or not found:
            piece.content += self._held
            return
        piece.calls = [
            _call(index, call.name, json.dumps(call.arguments, ensure_ascii=False))
            for index, call in enumerate(found)
        ]


_HEAD = re.compile(
    rf'(?:{CALL_TAG}|[\[,])?\s*{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?={{)'
)
_TAIL = re.compile(r"\s*\}")
_TAGGED_TAIL = re.compile(r"\s*\}\s*</tool_call>")


class _Arguments:
    """Finds the end of a JSON object fed in pieces."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def split(self, text: str) -> tuple[str, str]:
        """The object's part of the text, and the rest."""
        for position, character in enumerate(text):
            if self.is_complete:
                return text[:position], text[position:]
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                self.is_complete = self._depth == 0
        return text, ""


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": _new_id(), "type": "function", "function": function}


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
