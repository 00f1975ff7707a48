"""Anthropic's messages and bodies as a ChatBody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl.errors import InvalidRequest
from sgl.runtime.server import protocol
from sgl.runtime.server.constrained import ResponseFormat
from sgl.runtime.server.images import content_of
from sgl.runtime.server.messages import body as bodies


def chat_of(body: bodies.CountBody) -> protocol.ChatBody:
    """The chat that a body asks for. Raises InvalidRequest."""
    messages = [message for turn in body.messages for message in _messages(turn)]
    if body.system:
        text = body.system if isinstance(body.system, str) else "\n\n".join(block.text for block in body.system)
        messages.insert(0, protocol.Message(role="system", content=text))
    fields: dict[str, Any] = {
        **body.engine_fields(),
        "messages": messages,
        "tools": None if body.tools is None else [protocol.Tool(function=_function(tool)) for tool in body.tools],
        "chat_template_kwargs": {**_thinking(body), **(body.chat_template_kwargs or {})} or None,
        "include_reasoning": None if body.thinking is None else body.thinking.display != "omitted",
    }
    if body.tool_choice is not None:
        fields["tool_choice"] = _choice(body.tool_choice)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.messages[-1].role == "assistant":  # the answer's beginning
        if messages[-1].tool_calls:
            raise InvalidRequest("the last message calls tools: their results are needed", param="messages")
        fields["continue_final_message"] = True
    if (wanted := _format(body)) is not None:
        if body.response_format is not None:
            message = "response_format is called output_config.format here: give one"
            raise InvalidRequest(message, param="response_format")
        fields["response_format"] = ResponseFormat.model_validate({"type": "json_schema", "schema": wanted.schema_})
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if isinstance(body, bodies.MessagesBody):
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "stream": body.stream}
    return protocol.ChatBody.model_construct(**fields)


def _messages(turn: bodies.Turn) -> Iterator[protocol.Message]:
    """A turn's messages: results of tools are messages of their own."""
    if isinstance(turn.content, str):
        yield protocol.Message(role=turn.role, content=turn.content)
        return
    parts: list[protocol.Part] = []
    reasoning: list[str] = []
    calls: list[protocol.AnyCall] = []
    for block in turn.content:
        if isinstance(block, bodies.ToolResultBlock):
            if parts:
                yield protocol.Message(role=turn.role, content=content_of(parts))
                parts = []
            yield protocol.Message(role="tool", content=_result(block), tool_call_id=block.tool_use_id)
        elif isinstance(block, bodies.TextBlock | bodies.ImageBlock):
            parts.append(_part(block))
        elif isinstance(block, bodies.ThinkingBlock):
            reasoning.append(block.thinking)
        elif isinstance(block, bodies.ToolUseBlock):
            calls.append(
                protocol.ToolCall(
                    id=block.id, function=protocol.FunctionCallParam(name=block.name, arguments=block.input)
                )
            )
    if parts or reasoning or calls or not turn.content:
        yield protocol.Message(
            role=turn.role,
            content=content_of(parts),
            reasoning_content="".join(reasoning) or None,
            tool_calls=calls or None,
        )


def _part(block: bodies.TextBlock | bodies.ImageBlock) -> protocol.Part:
    if isinstance(block, bodies.TextBlock):
        return protocol.Part(type="text", text=block.text)
    return protocol.Part(type="image_url", image_url=block.url)


def _result(block: bodies.ToolResultBlock) -> str | list[protocol.Part]:
    content = block.content or ""
    parts = [protocol.Part(type="text", text=content)] if isinstance(content, str) else [*map(_part, content)]
    return content_of([protocol.Part(type="text", text="error: "), *parts] if block.is_error else parts)


def _function(tool: bodies.ClientTool) -> protocol.Function:
    return protocol.Function.model_construct(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )


def _choice(choice: bodies.ToolChoice) -> Any:
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(
            "tool_choice has a name if it is of type tool, and only then", param="tool_choice.name"
        )
    if choice.name is not None:
        return protocol.ChosenTool(function=protocol.ChosenName(name=choice.name))
    return {"any": "required"}.get(choice.type, choice.type)


def _thinking(body: bodies.CountBody) -> dict[str, Any]:
    """Variables of templates, which use one of these names."""
    if body.thinking is None:
        return {}
    return dict.fromkeys(("enable_thinking", "thinking"), body.thinking.type != "disabled")


def _format(body: bodies.CountBody) -> bodies.OutputFormat | None:
    inside = None if body.output_config is None else body.output_config.format
    if inside is not None and body.output_format is not None:
        raise InvalidRequest(
            "output_format is an old name of output_config.format: give one", param="output_format"
        )
    return inside or body.output_format
