"""Renders conversations to token ids with the model's chat template. User text never becomes control tokens. Turns
of programs are rendered one by one instead, by `sgl.lang.ir.chat_template`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from sgl.errors import ContextTooLong, InvalidRequest
from sgl.formats.detect import CallStyle
from sgl.runtime.server.bodies import load_json
from sgl.runtime.server.custom_tools import arguments_of, function_of
from sgl.runtime.server.images import image_of
from sgl.runtime.server.protocol import ChatBody, CustomToolCall, FunctionCallParam, Message, Part, ToolCall
from sgl.runtime.text.tokenizer import Tokenizer

_ROLES = {"developer": "system", "function": "tool"}  # old or new names of roles
_MAY_SAY_NOTHING = frozenset({"assistant", "tool", "function"})
_TAKEN = frozenset(
    {"self", "cls", "messages", "conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors"}
    | {"return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "loop", "raise_exception", "strftime_now"}
)
"""Names taken by the template or its renderer."""
_QUOTE = re.compile("\ue000([0-9]+)\ue001")  # private-use characters, which templates leave alone

_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


def prompt_ids(
    tokenizer: Tokenizer,
    template: str | None,
    body: ChatBody,
    limit: int | None = None,
    style: CallStyle | None = None,
) -> list[int]:
    """The conversation's token ids, with a placeholder for each image. `style`: how the template takes calls. Raises
    InvalidRequest, and ContextTooLong early if there are more than twice as many as `limit`."""
    quotes: list[str] = []
    quote = _quoter(tokenizer, quotes)
    for index, each in enumerate(body.messages):
        if each.content is None and each.role not in _MAY_SAY_NOTHING:
            place = f"messages.{index}.content"
            raise InvalidRequest(f"{place} is needed: a text, or a list of parts", param=place)
    messages = [_message(message, quote, style) for message in body.messages]
    variables = _variables(body.chat_template_kwargs or {}, quote)
    thinks = body.enable_thinking
    if body.thinking is not None and body.thinking.type != "auto":
        asked, thinks = thinks, body.thinking.type == "enabled"
        if asked not in (None, thinks):
            raise InvalidRequest(f"thinking says another thing than enable_thinking={asked}", param="thinking")
    if thinks is not None:
        variables = {"enable_thinking": thinks, "thinking": thinks, **variables}
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = _each_text(body.reasoning_effort, quote)
        if body.reasoning_effort == "none":  # templates use one of these names
            variables = {"enable_thinking": False, "thinking": False, **variables}
    if body.documents is not None:
        variables["documents"] = _each_text(body.documents, quote)
    if template is not None:
        variables["chat_template"] = template
    if body.tools and body.tool_choice != "none":
        functions = [function_of(tool).model_dump(exclude_none=True) for tool in body.tools]
        variables["tools"] = _each_text([{"type": "function", "function": each} for each in functions], quote)
    if body.continue_final_message:
        if messages[-1]["role"] != "assistant":
            raise InvalidRequest("continue_final_message needs an assistant message at the end", param="messages")
        if isinstance(last := body.messages[-1].content, list) and last and image_of(last[-1]) is not None:
            message = "continue_final_message continues a text, and the final message ends with an image"
            raise InvalidRequest(message, param="messages")
        if body.add_generation_prompt:
            message = "continue_final_message excludes add_generation_prompt: the answer's turn has begun"
            raise InvalidRequest(message, param="add_generation_prompt")
        variables["continue_final_message"] = True
    else:
        variables["add_generation_prompt"] = body.add_generation_prompt is not False
    text = tokenizer.apply_chat_template(messages, **variables)
    parts, number = [], 0
    given_parts = _QUOTE.split(text)  # a million, if all that users say is spelled control tokens
    for i, part in enumerate(given_parts):
        given = quotes[int(part)] if i % 2 else part
        parts.append(tokenizer.encode(given, add_special_tokens=False, allow_special=i % 2 == 0, limit=limit))
        number += len(parts[-1])
        if limit is not None and number > 2 * limit and i + 1 < len(given_parts):
            raise ContextTooLong.of(number, limit, seen=f"the first {i + 1} parts of its text")
    ids: list[int] = np.concatenate(parts).tolist()
    return ids


def _variables(given: dict[str, Any], quote: Callable[[str], str]) -> dict[str, Any]:
    """The client's variables. Raises InvalidRequest for reserved names."""
    for name in given:
        if name == "chat_template":
            message = "a chat template is code: the server's own is used, see --chat-template"
            raise InvalidRequest(message, param="chat_template_kwargs")
        if name in _TAKEN or not name.isidentifier():
            message = (
                f"chat_template_kwargs cannot set {name!r:.80}: it is no variable that a template has for clients"
            )
            raise InvalidRequest(message, param="chat_template_kwargs")
    variables: dict[str, Any] = _each_text(given, quote)
    return variables


def _quoter(tokenizer: Tokenizer, quotes: list[str]) -> Callable[[str], str]:
    """Makes a function that replaces spelled control tokens by placeholders and appends them to `quotes`."""
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


def _message(message: Message, quote: Callable[[str], str], style: CallStyle | None) -> dict[str, Any]:
    """A message as templates expect it: content as text, call arguments as objects unless the template wants text."""
    content = message.content
    shown: str | list[dict[str, Any]] = content if isinstance(content, str) else ""
    if isinstance(content, list):
        parts = [{"type": "image"} if image_of(part) else _text_part(part) for part in content]
        shown = parts if any(each["type"] == "image" for each in parts) else "".join(each["text"] for each in parts)
    role = _ROLES.get(message.role, message.role)
    given: dict[str, Any] = {"role": role, "content": shown or message.refusal or ""}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            given[name] = value
    if "tool_call_id" in given:
        given["tool_call_id"] = _id(given["tool_call_id"], style)
    if message.reasoning is not None:
        given.setdefault("reasoning_content", message.reasoning)
    calls = [(call.id, _called(call)) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append((None, message.function_call))
    has_channels = style is not None and style.format.has_channels
    if has_channels and "reasoning_content" in given and not (calls and shown):  # templates refuse both then
        given["thinking"] = given["reasoning_content"]
    if calls:
        as_text = style is not None and style.as_text
        if style is not None and style.without_content and not given["content"]:
            given["content"] = None
        given["tool_calls"] = [
            {
                "id": _id(call_id, style),
                "type": "function",
                "function": {"name": called.name, "arguments": _arguments(called, as_text=as_text)},
            }
            for call_id, called in calls
        ]
    changed: dict[str, Any] = _each_text(given, quote)
    return changed


def _id(given: str | None, style: CallStyle | None) -> str | None:
    """A call's id as the template takes it: the same short one for the same long one."""
    if given is None or style is None or not style.short_ids or _SHORT_ID.fullmatch(given):
        return given
    return hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()[:9]


def _text_part(part: Part) -> dict[str, str]:
    texts = {"text": part.text, "refusal": part.refusal}
    if (text := texts.get(part.type)) is None:
        if part.type in texts:
            raise InvalidRequest(f"a part of type {part.type} needs its {part.type}", param="messages")
        raise InvalidRequest(f"messages have texts and images, not {part.type!r:.80}", param="messages")
    return {"type": "text", "text": text}


def _called(call: ToolCall | CustomToolCall) -> FunctionCallParam:
    if isinstance(call, ToolCall):
        return call.function
    return FunctionCallParam(name=call.custom.name, arguments=arguments_of(call.custom.input))


def _arguments(called: FunctionCallParam, *, as_text: bool) -> Any:
    """A call's arguments. Those of a call that was cut off, which agents send back, end where they were cut."""
    given = called.arguments or {}
    if not isinstance(given, str):
        return json.dumps(given, ensure_ascii=False) if as_text else given
    what = f"arguments of the call of {called.name!r:.80}"
    try:
        loaded = load_json(given, what, param="messages")
    except InvalidRequest:
        loaded = load_json(given, what, param="messages", may_be_cut=True)
        given = json.dumps(loaded, ensure_ascii=False)
    if not isinstance(loaded, dict):
        raise InvalidRequest(f"{what} are an object in JSON, not {given!r:.80}", param="messages")
    return given if as_text else loaded
