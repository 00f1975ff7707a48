"""Tools: functions that a model may call; their schemas, constraints and execution, and calls found in text."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl.errors import InvalidRequest, nearest_name
from sgl.formats.value_types import parsed
from sgl.lang.aio import outcome
from sgl.lang.ir import nodes as ir


@dataclass(slots=True)
class ToolCall:
    """A model's call; after it ran, with `result` or `error`."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    result: Any = None
    error: BaseException | None = None

    def content(self) -> str:
        """The model's view of the result."""
        if self.error is not None:
            return f"error: {type(self.error).__name__}: {self.error}"
        return self.result if isinstance(self.result, str) else json.dumps(self.result, default=str)

    def to_dict(self) -> dict[str, Any]:
        """The call as JSON has it."""
        return {"name": self.name, "arguments": self.arguments, "content": self.content()}


@dataclass(frozen=True)
class Tool:
    """A function and its JSON Schema."""

    function: Callable[..., Any]
    schema: Mapping[str, Any] = field(hash=False)
    model: Any

    @property
    def name(self) -> str:
        """The name in calls."""
        return str(self.schema["name"])

    def arguments(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Checked and converted arguments. Raises pydantic's error."""
        checked = self.model.model_validate(raw)
        return {name: getattr(checked, name) for name in checked.model_fields_set}


def tools_of(functions: Sequence[Callable[..., Any]]) -> list[Tool]:
    """Make tools of functions. Raises InvalidRequest for non-functions and duplicate names."""
    if not isinstance(functions, Iterable):
        raise InvalidRequest(f"tools must be a list of functions, not {functions!r}", param="tools")
    tools = [_tool_of(function) for function in functions]
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidRequest(f"two tools are named {twice!r}", param="tools")
    return tools


def _tool_of(function: Callable[..., Any]) -> Tool:
    """Read signature and docstring. Unannotated parameters accept anything."""
    import pydantic

    from sgl.lang.typed.exact_schema import NO_SCHEMA, ExactJsonSchema, why_none

    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str):
        raise InvalidRequest(f"a tool must be a function with a name, not {function!r}", param="tools")
    described = _parameter_docs(function.__doc__ or "")
    fields: dict[str, Any] = {}
    try:
        hints = inspect.get_annotations(function, eval_str=True)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                message = f"tool {name!r} takes {parameter}, which has no name to pass it by: name its parameters"
                raise InvalidRequest(message, param="tools")
            default = ... if parameter.default is parameter.empty else parameter.default
            info = pydantic.Field(default, description=described.get(parameter.name))
            fields[parameter.name] = (hints.get(parameter.name, Any), info)
        model = pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
        parameters = model.model_json_schema(schema_generator=ExactJsonSchema)
    except InvalidRequest:
        raise
    except (ValueError, *NO_SCHEMA) as error:  # built-in types have no signature
        message = f"the signature of tool {name!r} has no JSON Schema: {why_none(error)}"
        raise InvalidRequest(message, param="tools") from error
    parameters.pop("title", None)
    parameters.setdefault("properties", {})
    for item in parameters["properties"].values():
        item.pop("title", None)
    schema = {"name": name, "description": _summary(function), "parameters": parameters}
    return Tool(function, schema, model)


def call_schema(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON Schema of a call of one of the functions, given as {"name", "parameters"}."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                # a document of its own: its references are relative to it
                "arguments": {"$id": f"urn:function:{number}", **function["parameters"]},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, function in enumerate(functions)
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


CALL_TAG = "<tool_call>"


def describe_tools(functions: Sequence[Callable[..., Any]]) -> str:
    """A system prompt describing tools, for models whose API lacks them."""
    listed = "\n".join(json.dumps(dict(tool.schema)) for tool in tools_of(functions))
    return (
        f"You may call these functions:\n<tools>\n{listed}\n</tools>\n"
        'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call> and nothing else. '
        "Several calls may follow each other. Answer in plain text when you need no function."
    )


def calls_of(text: str, meta: Mapping[str, Any]) -> list[ToolCall]:
    """Calls reported by the backend or found in text: <tool_call>{...}</tool_call>, [TOOL_CALLS][...], bare JSON."""
    if "calls" in meta:
        return list(meta["calls"])
    if reported := meta.get("tool_calls"):
        return [_call(item.get("function", item), item.get("id")) for item in reported]
    tagged = re.findall(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", text, re.DOTALL)
    if tagged:
        return [_call(_json(item), None) for item in tagged]
    body = text.strip().removeprefix("[TOOL_CALLS]").strip()
    fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", body, re.DOTALL)
    body = fenced.group(1) if fenced else body
    if not body.startswith(("{", "[")):
        return []
    try:
        found = parsed(body)
    except (ValueError, RecursionError):
        return []
    items = found if isinstance(found, list) else [found]
    return [_call(item, None) for item in items] if all(map(_is_call, items)) else []


async def run_calls(
    calls: Sequence[ToolCall], tools: Sequence[Tool], user_loop: asyncio.AbstractEventLoop | None
) -> None:
    """Run calls in parallel, coroutines on the program's loop if any, functions in threads.

    Exceptions and unknown functions become the call's error, so that the model may retry."""
    known = {tool.name: tool for tool in tools}
    await asyncio.gather(*(_run_call(call, known, user_loop) for call in calls))


async def _run_call(call: ToolCall, tools: Mapping[str, Tool], user_loop: asyncio.AbstractEventLoop | None) -> None:
    try:
        if call.error is not None:
            return
        if call.name not in tools:
            hint = nearest_name(call.name, tools)
            raise InvalidRequest(f"there is no function {call.name!r}{hint}", param="tools")
        tool = tools[call.name]
        arguments = tool.arguments(call.arguments)
        if not inspect.iscoroutinefunction(tool.function):
            call.result = await asyncio.to_thread(outcome, tool.function, **arguments)
        elif user_loop is None or user_loop.is_closed():
            call.result = await tool.function(**arguments)
        else:
            coroutine = tool.function(**arguments)
            call.result = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, user_loop))
    except BaseException as error:  # even SystemExit, which would end the shared loop
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        call.error = error


def turn_of(call: ToolCall, *, in_chat: bool) -> ir.Turn:
    """A call's answer: a tool turn in a chat, else a line."""
    if in_chat:
        return ir.Turn("tool", call.content(), call.name, call.id)
    return ir.Turn(None, f"\n{call.content()}\n")


def _is_call(data: Any) -> bool:
    """Whether untagged JSON is a call; answers may have names and more."""
    if not isinstance(data, dict) or not data.keys() <= {"name", "arguments", "parameters", "id", "type"}:
        return False
    return "name" in data and ("arguments" in data or "parameters" in data)


def _call(data: Any, call_id: str | None) -> ToolCall:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        error = ValueError(f"not a call of the form {{'name': ..., 'arguments': {{...}}}}: {data!r}")
        return ToolCall("", {}, call_id, error=error)
    arguments = data.get("arguments", data.get("parameters", {}))
    given = _json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(given, dict):
        return ToolCall(data["name"], {}, call_id, error=ValueError(f"arguments are not an object: {arguments!r}"))
    return ToolCall(data["name"], given, call_id)


def _json(text: str) -> Any:
    try:
        return parsed(text)
    except (ValueError, RecursionError):
        return text


def _summary(function: Callable[..., Any]) -> str:
    """The docstring before its parameters."""
    text = inspect.getdoc(function) or ""
    return re.split(r"\n\s*(?:Args|Arguments|Parameters|Returns|Raises):|\n\s*:param ", text)[0].strip()


def _parameter_docs(doc: str) -> dict[str, str]:
    """Parameter descriptions from `Args:` and `:param x:`."""
    found = dict(re.findall(r":param\s+(?:\w+\s+)?(\w+):\s*(.+)", doc))
    section = re.search(
        r"(?:Args|Arguments|Parameters):\s*\n(.*?)(?:\n\s*\n|\n\s*(?:Returns|Raises):|\Z)", doc, re.DOTALL
    )
    if section:
        found |= dict(re.findall(r"^\s*(\w+)(?:\s*\([^)]*\))?:\s*(.+)$", section.group(1), re.MULTILINE))
    return found
