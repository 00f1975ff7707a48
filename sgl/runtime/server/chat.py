"""Conversations to token ids, in the form that the model's chat template gives them.

Nothing that a user wrote becomes a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from sgl.errors import InvalidRequest
from sgl.runtime.server.protocol import ChatBody, Message
from sgl.runtime.text.tokenizer import Tokenizer

_QUOTE = re.compile("\ue000([0-9]+)\ue001")  # private-use characters: no template trims or rewrites them


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
    control = sorted(tokenizer.control_tokens, key=len, reverse=True)
    pattern = re.compile("|".join([_QUOTE.pattern, *map(re.escape, control)]))

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
