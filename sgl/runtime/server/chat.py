"""Chats: conversations to token ids, and what the model wrote to reasoning, content and tool calls.

Knows the model's chat template through its tokenizer. Nothing that a user wrote becomes a control token.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgl.errors import InvalidRequest, nearest_name
from sgl.lang.reasoning import ReasoningSplitter
from sgl.lang.tools import calls_of
from sgl.runtime.server.protocol import ChatBody, ChosenTool, Message, Tool
from sgl.runtime.text.tokenizer import Tokenizer

_QUOTE = re.compile("\ue000([0-9]+)\ue001")  # private-use characters: no template trims or rewrites them
_MARKER = re.compile(r"<\|.*\|>", re.DOTALL)
_CALL_TAG = "<tool_call>"


def prompt_ids(tokenizer: Tokenizer, template: str | None, body: ChatBody, limit: int | None = None) -> list[int]:
    """The conversation in the form that the model was trained on. Raises InvalidRequest, and ContextTooLong where it
    is plain that there are more than `limit` tokens."""
    quotes: list[str] = []
    quote = _quoter(tokenizer, quotes)
    messages = [_message(message, quote) for message in body.messages]
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if "chat_template" in variables:
        message = "a chat template is code: the server's own is used, see --chat-template"
        raise InvalidRequest(message, param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if template is not None:
        variables["chat_template"] = template
    if body.tools and body.tool_choice != "none":
        variables["tools"] = [_each_text(tool.model_dump(exclude_none=True), quote) for tool in body.tools]
    if body.continue_final_message:
        if messages[-1]["role"] != "assistant":
            raise InvalidRequest("continue_final_message needs an assistant message at the end", param="messages")
        variables["continue_final_message"] = True
    else:
        variables["add_generation_prompt"] = True
    text = tokenizer.apply_chat_template(messages, **variables)
    parts = [
        tokenizer.encode(
            quotes[int(part)] if i % 2 else part, add_special_tokens=False, allow_special=i % 2 == 0, limit=limit
        )
        for i, part in enumerate(_QUOTE.split(text))
    ]
    ids: list[int] = np.concatenate(parts).tolist()
    return ids


def _quoter(tokenizer: Tokenizer, quotes: list[str]) -> Callable[[str], str]:
    """A function that puts a placeholder where a text spells a control token, and the spelling into `quotes`."""
    added = tokenizer.hf.added_tokens_decoder.values()
    control = [token.content for token in added if token.special or _MARKER.fullmatch(token.content)]
    pattern = re.compile("|".join([_QUOTE.pattern, *map(re.escape, sorted(control, key=len, reverse=True))]))

    def replace(match: re.Match[str]) -> str:
        quotes.append(match.group())
        return f"\ue000{len(quotes) - 1}\ue001"

    return lambda text: pattern.sub(replace, text)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each_text(item, change) for item in value]
    if isinstance(value, dict):
        return {_each_text(key, change): _each_text(item, change) for key, item in value.items()}
    return value


def _message(message: Message, quote: Callable[[str], str]) -> dict[str, Any]:
    """As templates expect messages: content a text, arguments of calls an object."""
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise InvalidRequest(f"this model takes texts only, not {part.type!r}", param="messages")
        content = "".join(part.text or "" for part in content)
    role = "system" if message.role == "developer" else message.role
    given: dict[str, Any] = {"role": role, "content": content or ""}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            given[name] = value
    if message.tool_calls:
        given["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _loaded(call)},
            }
            for call in message.tool_calls
        ]
    changed: dict[str, Any] = _each_text(given, quote)
    return changed


def _loaded(call: Any) -> Any:
    try:
        return json.loads(call.function.arguments)
    except ValueError as error:
        message = f"arguments of the call of {call.function.name!r} are not JSON: {error}"
        raise InvalidRequest(message, param="messages") from None


def forced_call_schema(body: ChatBody) -> dict[str, Any] | None:
    """The JSON Schema of an answer that must be tool calls: a list of them, or one call if one was named."""
    tools = body.tools or []
    if isinstance(body.tool_choice, ChosenTool):
        name = body.tool_choice.function.name
        for tool in tools:
            if tool.function.name == name:
                return _call_schema(tool)
        hint = nearest_name(name, [tool.function.name for tool in tools])
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools{hint}", param="tool_choice")
    if body.tool_choice != "required":
        return None
    if not tools:
        raise InvalidRequest("tool_choice is required, and there are no tools", param="tool_choice")
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": [_call_schema(tool) for tool in tools]}}
    return schema | {"minItems": 1} | ({"maxItems": 1} if body.parallel_tool_calls is False else {})


def _call_schema(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    properties = {"name": {"const": tool.function.name}, "arguments": parameters}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


@dataclass(slots=True)
class Piece:
    """What a piece of output brings to the answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class AnswerSplitter:
    """Splits the text of one answer, in any pieces. From where a tool call may begin, text is held back until the
    answer ends and shows what it is."""

    def __init__(self, reasoning_format: str | None, *, has_tools: bool) -> None:
        self._reasoning = None if reasoning_format is None else ReasoningSplitter(reasoning_format)
        self._has_tools = has_tools
        self._held = ""
        self._is_call = False
        self._has_begun = False

    def feed(self, text: str, *, final: bool = False) -> Piece:
        """What the next text brings; `final` lets go of what was held back."""
        piece = Piece(content=text)
        if self._reasoning is not None:
            piece.reasoning, piece.content = self._reasoning.feed(text, final=final)
        if not self._has_tools:
            return piece
        self._held += piece.content
        piece.content = self._free_text(final=final)
        if final and self._held:
            piece.calls = _calls(self._held)
            if not piece.calls:
                piece.content += self._held
            self._held = ""
        return piece

    def _free_text(self, *, final: bool) -> str:
        """Text that belongs to no call, taken from what is held."""
        if self._is_call:
            return ""
        start = self._held.lstrip()
        if not self._has_begun:
            if not start and not final:
                return ""
            if start.startswith(("{", "[", "```")):  # a call without a tag is the whole answer
                self._is_call = True
                return ""
            self._has_begun = bool(start)
        before, tag, _ = self._held.partition(_CALL_TAG)
        if tag:
            self._is_call = True
        elif not final:
            before = self._held[: len(self._held) - _half_tag(self._held)]
        self._held = self._held[len(before) :]
        return before


def _calls(text: str) -> list[dict[str, Any]]:
    """The calls in the text, as the API writes them; none if any of them is malformed."""
    found = calls_of(text, {})
    if any(call.error is not None for call in found):
        return []
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in found
    ]


def _half_tag(text: str) -> int:
    lengths: Sequence[int] = range(min(len(_CALL_TAG) - 1, len(text)), 0, -1)
    return next((n for n in lengths if _CALL_TAG.startswith(text[-n:])), 0)
