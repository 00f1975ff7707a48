"""Responses' items as messages of a chat, and their bodies as a ChatBody."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sgl.errors import ContextTooLong, InvalidRequest
from sgl.runtime.server import protocol
from sgl.runtime.server.constrained import ResponseFormat
from sgl.runtime.server.images import content_of
from sgl.runtime.server.responses import body as bodies


def chat_of(body: bodies.InputBody, items: list[bodies.Item]) -> protocol.ChatBody:
    """The chat of all items: those of earlier responses, then the body's own, without references."""
    messages = [] if body.instructions is None else [protocol.Message(role="system", content=body.instructions)]
    messages += _messages(items)
    if not messages:
        raise InvalidRequest("input is needed: a text or a list of items", param="input")
    fields: dict[str, Any] = {
        **body.engine_fields(),
        **{name: getattr(body, name) for name in protocol.TemplateFields.model_fields},
        "messages": messages,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }
    if body.text is not None and body.text.format is not None:
        if body.response_format is not None:
            raise InvalidRequest("response_format is called text.format here: give one", param="response_format")
        fields["response_format"] = _format(body.text.format)
    if isinstance(body, bodies.ResponsesBody):
        wants_logprobs = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
        fields |= {"max_completion_tokens": body.max_output_tokens, "stop": body.stop, "stream": body.stream}
        fields |= {"logprobs": wants_logprobs, "top_logprobs": body.top_logprobs}
    return protocol.ChatBody.model_construct(**fields)


def truncated(
    body: protocol.ChatBody, prompt_ids: Callable[[protocol.ChatBody], list[int]], context: int
) -> protocol.ChatBody:
    """The chat without its oldest turns, as few as make it fit into the context."""
    messages = body.messages
    first = next((i for i, message in enumerate(messages) if message.role not in ("system", "developer")), 0)
    starts = [i for i in range(first, len(messages)) if messages[i].role == "user"] or [first]

    def shortened(start: int) -> protocol.ChatBody:
        return body.model_copy(update={"messages": messages[:first] + messages[start:]})

    def fits(chat: protocol.ChatBody) -> bool:
        try:
            return len(prompt_ids(chat)) < context
        except ContextTooLong:
            return False

    if fits(body):
        return body
    low, high = 0, len(starts) - 1  # later starts are shorter: find the first that fits
    while low < high:
        middle = (low + high) // 2
        if fits(shortened(starts[middle])):
            high = middle
        else:
            low = middle + 1
    return shortened(starts[low])


def _messages(items: Iterable[bodies.Item]) -> list[protocol.Message]:
    """Messages of a chat. Reasoning, text and calls that follow each other are one turn of the assistant."""
    messages: list[protocol.Message] = []
    for number, item in enumerate(items):
        last = messages[-1] if messages and messages[-1].role == "assistant" else None
        if isinstance(item, bodies.MessageItem):
            content = _content(item.content, f"input.{number}")
            if item.role == "assistant" and last is not None and not (last.content or last.tool_calls):
                last.content = content
            else:
                messages.append(protocol.Message(role=item.role, content=content))
        elif isinstance(item, bodies.CallItem | bodies.CustomCallItem):
            call = _call(item)
            if last is None:
                last = protocol.Message(role="assistant")
                messages.append(last)
            if last.tool_calls is None:
                last.tool_calls = []
            last.tool_calls.append(call)
        elif isinstance(item, bodies.CallOutputItem):
            content = _content(item.output, f"input.{number}")
            messages.append(protocol.Message(role="tool", content=content, tool_call_id=item.call_id))
        elif isinstance(item, bodies.ReasoningItem):
            text = "\n".join(part.text for part in item.content or item.summary or ())
            messages.append(protocol.Message(role="assistant", reasoning_content=text))
        else:
            assert not isinstance(item, bodies.ReferenceItem), "references are resolved"
    return [message for message in messages if message.role != "assistant" or _says_anything(message)]


def _says_anything(message: protocol.Message) -> bool:
    return bool(message.content is not None or message.tool_calls or message.reasoning_content)


def _content(content: bodies.Content, param: str) -> str | list[protocol.Part]:
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text
        if part.image_url and text:
            message = f"{param}: a part of type {part.type!r:.80} has a text or an image, not both"
            raise InvalidRequest(message, param=param)
        if part.type == "input_image" and part.image_url:
            parts.append(protocol.Part(type="image_url", image_url=part.image_url))
        elif text is None or part.type not in ("input_text", "output_text", "text", "refusal"):
            message = f"{param}: messages have texts and images with an image_url, not {part.type!r:.80}"
            raise InvalidRequest(message, param=param)
        else:
            parts.append(protocol.Part(type="text", text=text))
    return content_of(parts)


def _call(item: bodies.CallItem | bodies.CustomCallItem) -> protocol.ToolCall | protocol.CustomToolCall:
    if isinstance(item, bodies.CallItem):
        return protocol.ToolCall(
            id=item.call_id, function=protocol.FunctionCallParam(name=item.name, arguments=item.arguments)
        )
    return protocol.CustomToolCall(
        id=item.call_id, type="custom", custom=protocol.CustomCallParam(name=item.name, input=item.input)
    )


def _tool(tool: bodies.FunctionTool | bodies.CustomTool) -> protocol.Tool | protocol.CustomTool:
    if isinstance(tool, bodies.FunctionTool):
        is_strict = tool.strict is not False
        about: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return protocol.Tool(function=protocol.Function(**about, strict=is_strict))
    wanted = tool.format
    custom: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if wanted is not None and wanted.type == "grammar":
        if wanted.syntax is None or wanted.definition is None:
            message = f"the format of {tool.name!r} needs a syntax and a definition"
            raise InvalidRequest(message, param="tools")
        grammar = {"syntax": wanted.syntax, "definition": wanted.definition}
        custom["format"] = {"type": "grammar", "grammar": grammar}
    return protocol.CustomTool.model_validate({"type": "custom", "custom": custom})


def _choice(choice: Any) -> Any:
    if isinstance(choice, bodies.ToolName):
        return _chosen(choice)
    if isinstance(choice, bodies.AllowedNames):
        tools = [_chosen(tool) for tool in choice.tools]
        return protocol.AllowedToolChoice(
            type="allowed_tools", allowed_tools=protocol.AllowedTools(mode=choice.mode, tools=tools)
        )
    return choice


def _chosen(tool: bodies.ToolName) -> protocol.ChosenTool | protocol.ChosenCustom:
    name = protocol.ChosenName(name=tool.name)
    return (
        protocol.ChosenTool(function=name)
        if tool.type == "function"
        else protocol.ChosenCustom(type="custom", custom=name)
    )


def _format(wanted: bodies.TextFormat) -> ResponseFormat:
    if wanted.type != "json_schema":
        return ResponseFormat.model_validate({"type": wanted.type})
    if wanted.schema_ is None:
        raise InvalidRequest("text.format.schema is needed", param="text.format.schema")
    return ResponseFormat.model_validate({"type": "json_schema", "schema": wanted.schema_})
