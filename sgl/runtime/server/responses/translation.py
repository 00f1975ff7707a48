"""Responses' items as messages of a chat, and their bodies as a ChatBody."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sgl.errors import ContextTooLong, InvalidRequest
from sgl.runtime.server.constrained import ResponseFormat
from sgl.runtime.server.images import content_of
from sgl.runtime.server.protocol import (
    AllowedToolChoice,
    AllowedTools,
    ChatBody,
    ChosenCustom,
    ChosenName,
    ChosenTool,
    CustomCallParam,
    CustomToolCall,
    Function,
    FunctionCallParam,
    Message,
    Part,
    TemplateFields,
    Tool,
    ToolCall,
)
from sgl.runtime.server.protocol import CustomTool as ChatCustomTool
from sgl.runtime.server.responses.body import (
    AllowedNames,
    CallItem,
    CallOutputItem,
    Content,
    CustomCallItem,
    CustomTool,
    FunctionTool,
    InputBody,
    Item,
    MessageItem,
    ReasoningItem,
    ReferenceItem,
    ResponsesBody,
    TextFormat,
    ToolName,
)


def chat_of(body: InputBody, items: list[Item]) -> ChatBody:
    """The chat of all items: those of earlier responses, then the body's own, without references."""
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    messages += _messages(items)
    if not messages:
        raise InvalidRequest("input is needed: a text or a list of items", param="input")
    fields: dict[str, Any] = {
        **body.engine_fields(),
        **{name: getattr(body, name) for name in TemplateFields.model_fields},
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
    if isinstance(body, ResponsesBody):
        wants_logprobs = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
        fields |= {"max_completion_tokens": body.max_output_tokens, "stop": body.stop, "stream": body.stream}
        fields |= {"logprobs": wants_logprobs, "top_logprobs": body.top_logprobs}
    return ChatBody.model_construct(**fields)


def truncated(body: ChatBody, prompt_ids: Callable[[ChatBody], list[int]], context: int) -> ChatBody:
    """The chat without its oldest turns, as few as make it fit into the context."""
    messages = body.messages
    first = next((i for i, message in enumerate(messages) if message.role not in ("system", "developer")), 0)
    starts = [i for i in range(first, len(messages)) if messages[i].role == "user"] or [first]

    def shortened(start: int) -> ChatBody:
        return body.model_copy(update={"messages": messages[:first] + messages[start:]})

    def fits(chat: ChatBody) -> bool:
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


def _messages(items: Iterable[Item]) -> list[Message]:
    """Messages of a chat. Reasoning, text and calls that follow each other are one turn of the assistant."""
    messages: list[Message] = []
    for number, item in enumerate(items):
        last = messages[-1] if messages and messages[-1].role == "assistant" else None
        if isinstance(item, MessageItem):
            content = _content(item.content, f"input.{number}")
            if item.role == "assistant" and last is not None and not (last.content or last.tool_calls):
                last.content = content
            else:
                messages.append(Message(role=item.role, content=content))
        elif isinstance(item, CallItem | CustomCallItem):
            call = _call(item)
            if last is None:
                last = Message(role="assistant")
                messages.append(last)
            if last.tool_calls is None:
                last.tool_calls = []
            last.tool_calls.append(call)
        elif isinstance(item, CallOutputItem):
            content = _content(item.output, f"input.{number}")
            messages.append(Message(role="tool", content=content, tool_call_id=item.call_id))
        elif isinstance(item, ReasoningItem):
            text = "\n".join(part.text for part in item.content or item.summary or ())
            messages.append(Message(role="assistant", reasoning_content=text))
        else:
            assert not isinstance(item, ReferenceItem), "references are resolved"
    return [message for message in messages if message.role != "assistant" or _says_anything(message)]


def _says_anything(message: Message) -> bool:
    return bool(message.content is not None or message.tool_calls or message.reasoning_content)


def _content(content: Content, param: str) -> str | list[Part]:
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type == "input_image" and part.image_url:
            parts.append(Part(type="image_url", image_url=part.image_url))
        elif text is None or part.type not in ("input_text", "output_text", "text", "refusal"):
            message = f"{param}: messages have texts and images with an image_url, not {part.type!r:.80}"
            raise InvalidRequest(message, param=param)
        else:
            parts.append(Part(type="text", text=text))
    return content_of(parts)


def _call(item: CallItem | CustomCallItem) -> ToolCall | CustomToolCall:
    if isinstance(item, CallItem):
        return ToolCall(id=item.call_id, function=FunctionCallParam(name=item.name, arguments=item.arguments))
    return CustomToolCall(id=item.call_id, type="custom", custom=CustomCallParam(name=item.name, input=item.input))


def _tool(tool: FunctionTool | CustomTool) -> Tool | ChatCustomTool:
    if isinstance(tool, FunctionTool):
        is_strict = tool.strict is not False
        about: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return Tool(function=Function(**about, strict=is_strict))
    wanted = tool.format
    custom: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if wanted is not None and wanted.type == "grammar":
        if wanted.syntax is None or wanted.definition is None:
            message = f"the format of {tool.name!r} needs a syntax and a definition"
            raise InvalidRequest(message, param="tools")
        grammar = {"syntax": wanted.syntax, "definition": wanted.definition}
        custom["format"] = {"type": "grammar", "grammar": grammar}
    return ChatCustomTool.model_validate({"type": "custom", "custom": custom})


def _choice(choice: Any) -> Any:
    if isinstance(choice, ToolName):
        return _chosen(choice)
    if isinstance(choice, AllowedNames):
        tools = [_chosen(tool) for tool in choice.tools]
        return AllowedToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=tools))
    return choice


def _chosen(tool: ToolName) -> ChosenTool | ChosenCustom:
    name = ChosenName(name=tool.name)
    return ChosenTool(function=name) if tool.type == "function" else ChosenCustom(type="custom", custom=name)


def _format(wanted: TextFormat) -> ResponseFormat:
    if wanted.type != "json_schema":
        return ResponseFormat.model_validate({"type": wanted.type})
    if wanted.schema_ is None:
        raise InvalidRequest("text.format.schema is needed", param="text.format.schema")
    return ResponseFormat.model_validate({"type": "json_schema", "schema": wanted.schema_})
