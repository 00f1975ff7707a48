"""Expressions to append: gen, select, roles, images. Each function checks its arguments and returns IR nodes."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, overload

from sgl.errors import InvalidRequest
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.choices import ChoicesSamplingMethod, method_named
from sgl.lang.ir.media import URLS
from sgl.lang.ir.reasoning import reasoning_format
from sgl.lang.ir.sampling import PARAMS, SampleOptions, check_regex, sampling_params
from sgl.lang.record.pictures import MAX_FRAMES, as_png, frames_of, image_bytes
from sgl.lang.typed.schema import json_constraint, typed
from sgl.lang.typed.tools import Tool, ToolCall, call_schema, tools_of

T = TypeVar("T")
_PARSERS: dict[Any, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: text.strip() == "True",
    "str": lambda text: text.strip()[1:-1],
}
_WAYS = "dtype", "regex", "json_schema", "schema", "ebnf"  # ways to constrain a text


@dataclass(frozen=True, slots=True)
class GenClient:
    """The client's part of a gen: its parser and tools."""

    parse: Callable[[str], Any] | None = None
    tools: Sequence[Tool] = ()


@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    regex: str | None = None,
    ebnf: str | None = None,
    **params: Unpack[SampleOptions],
) -> ir.Gen[str]: ...
@overload
def gen(
    name: str | None = None, max_tokens: int | None = None, *, schema: type[T], **params: Unpack[SampleOptions]
) -> ir.Gen[T]: ...
@overload
def gen(
    name: str | None = None, max_tokens: int | None = None, *, dtype: type[T], **params: Unpack[SampleOptions]
) -> ir.Gen[T]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    tools: Sequence[Callable[..., Any]],
    tool_choice: Literal["auto", "required"] = "auto",
    **params: Unpack[SampleOptions],
) -> ir.Gen[list[ToolCall]]: ...
@overload
def gen(
    name: str | None = None,
    *,
    choices: Sequence[str],
    choices_method: ChoicesSamplingMethod | str | None = None,
    temperature: float | None = None,
) -> ir.Select: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | str | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    *,
    schema: Any = None,
    ebnf: str | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    tool_choice: Literal["auto", "required"] = "auto",
    seed: int | None = None,
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    priority: int | None = None,
    timeout: float | None = None,
    extra: Mapping[str, Any] | None = None,
) -> ir.Gen[Any] | ir.Select: ...
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | str | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    *,
    schema: Any = None,
    ebnf: str | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    tool_choice: Literal["auto", "required"] = "auto",
    seed: int | None = None,
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    priority: int | None = None,
    timeout: float | None = None,
    extra: Mapping[str, Any] | None = None,
) -> ir.Gen | ir.Select:
    """Generate text into variable `name`. None inherits the run's value.

    At most one of dtype, regex, json_schema, schema, ebnf and required tools constrains it. `schema`: a type or JSON
    Schema; `s.value(name)` returns the object. `tools`: functions whose calls are run and answered after the turn.
    `choices` makes it a `select`, ignoring sampling parameters. `timeout`: seconds; `extra`: passed to the backend.
    Raises InvalidRequest or RegexSyntaxError."""
    given = dict(locals())
    ways = {key: given[key] for key in _WAYS if given[key] is not None}
    if choices is not None:
        _only([key for key in ("choices", *_WAYS, "tools") if given[key] is not None])
        return select(name, choices, temperature, choices_method)
    params = sampling_params(**{key: value for key, value in given.items() if key in PARAMS})
    if not ways and tools is None and tool_choice == "auto":
        return ir.Gen(name, params)
    if dtype in (int, float, bool, str):
        dtype = ways["dtype"] = getattr(dtype, "__name__", dtype)
    if not (dtype is None or dtype in tuple(_PARSERS)):
        raise InvalidRequest(f"dtype must be int, float, bool or str, not {dtype!r}", param="dtype")
    known_tools = tools_of(tools or ())
    constraint, parse = _constraint(ways, known_tools, tool_choice)
    return ir.Gen(
        name,
        params,
        constraint,
        dtype,  # type: ignore[arg-type]  # one of the words by now
        tools=tuple(tool.schema for tool in known_tools),
        client=GenClient(parse, known_tools),
    )


def gen_int(
    name: str | None = None, max_tokens: int | None = None, *, n: int | None = None, **params: Unpack[SampleOptions]
) -> ir.Gen[Any]:
    """A gen of dtype int with `gen`'s arguments."""
    return gen(name, max_tokens, n=n, dtype="int", **params)  # type: ignore[return-value]  # no choices


def gen_string(
    name: str | None = None, max_tokens: int | None = None, *, n: int | None = None, **params: Unpack[SampleOptions]
) -> ir.Gen[Any]:
    """A gen of dtype str, a double-quoted string, with `gen`'s arguments."""
    return gen(name, max_tokens, n=n, dtype="str", **params)  # type: ignore[return-value]  # no choices


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float | None = 0.0,
    choices_method: ChoicesSamplingMethod | str | None = None,
) -> ir.Select:
    """Append the choice that `choices_method` prefers. Deterministic: temperature must be 0."""
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise InvalidRequest(f"choices must be a list of strings, not {choices!r}", param="choices")
    choices = tuple(choices)
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequest("choices must hold strings, at least one, and no empty one", param="choices")
    if sampling_params(temperature=temperature).get("temperature", 0.0) > 1e-5:
        raise InvalidRequest("select is deterministic: temperature must be 0", param="temperature")
    return ir.Select(name, choices, method_named(choices_method).name)


def system(expr: ir.Node | str | None = None) -> ir.Exprs:
    """A system turn."""
    return role_turn("system", expr)


def user(expr: ir.Node | str | None = None) -> ir.Exprs:
    """A user turn."""
    return role_turn("user", expr)


def assistant(expr: ir.Node | str | None = None) -> ir.Exprs:
    """An assistant turn."""
    return role_turn("assistant", expr)


def role_turn(role: str, expr: ir.Node | str | None) -> ir.Exprs:
    """The nodes of a turn."""
    begin, end = ir.RoleBegin(role), ir.RoleEnd(role)
    return begin + end if expr is None else begin + expr + end


# Functions without arguments, for turns that are no expression or block.
system_begin, system_end = partial(ir.RoleBegin, "system"), partial(ir.RoleEnd, "system")
user_begin, user_end = partial(ir.RoleBegin, "user"), partial(ir.RoleEnd, "user")
assistant_begin, assistant_end = partial(ir.RoleBegin, "assistant"), partial(ir.RoleEnd, "assistant")


def image(expr: Any) -> ir.Media:
    """An image from a path, bytes, base64, PIL image or tensor (uint8 [height, width, channels] or float in 0..1
    [channels, height, width]; 1 or 3 channels), or from an http URL, which the model's server fetches."""
    if isinstance(expr, str) and expr.startswith(URLS):
        return ir.Media("image", expr)
    return ir.Media("image", base64.b64encode(image_bytes(expr)).decode())


def video(path: str | Path | Sequence[Any], num_frames: int = 8, fps: float | None = None) -> ir.Media:
    """`num_frames` evenly spaced frames of a video file, which takes OpenCV or PyAV; or all of a list of frames, each
    an image as `image` takes it. fps: how many of the frames make a second, if the file does not say."""
    if not isinstance(num_frames, int) or not 0 < num_frames <= MAX_FRAMES:
        raise InvalidRequest(f"num_frames must be from 1 to {MAX_FRAMES}, not {num_frames!r}", param="num_frames")
    if isinstance(path, str | Path):
        frames, found = frames_of(path, num_frames)
        fps = fps or found
    else:
        frames = [as_png(image_bytes(frame)) for frame in path]
    if not 0 < len(frames) <= MAX_FRAMES:
        raise InvalidRequest(f"a video has 1 to {MAX_FRAMES} frames, not {len(frames)}", param="path")
    return ir.Media("video", base64.b64encode(b"".join(frames)).decode(), fps)


def separate_reasoning(expr: ir.Node | str | None = None, model_type: str | None = None) -> ir.Exprs:
    """Separate the reasoning of `expr`'s gens into `<name>_reasoning_content`; variable and text keep the answer.
    `model_type`: one of `sgl.lang.ir.reasoning.FORMATS`."""
    reasoning_format(model_type)
    nodes = ir.nodes_of(expr) if isinstance(expr, ir.Node) else ()
    if not any(isinstance(node, ir.Gen | ir.Select) and node.name for node in nodes):
        raise InvalidRequest("separate_reasoning needs an expression with a named gen", param="expr")
    return ir.Exprs(
        tuple(replace(node, reasoning=model_type) if isinstance(node, ir.Gen) else node for node in nodes)
    )


def _constraint(
    ways: dict[str, Any], tools: list[Tool], tool_choice: str
) -> tuple[Mapping[str, Any] | None, Callable[[str], Any] | None]:
    """The constraint stated by one of `_WAYS` or by tools, and its parser."""
    if tool_choice not in ("auto", "required"):
        raise InvalidRequest(f"tool_choice must be 'auto' or 'required', not {tool_choice!r}", param="tool_choice")
    for name in ("regex", "ebnf"):
        if not isinstance(ways.get(name, ""), str):
            raise InvalidRequest(f"{name} must be a text, not {ways[name]!r}", param=name)
    if ways.keys() == {"dtype", "regex"}:
        import warnings

        warnings.warn("gen: dtype and regex given; dtype wins", stacklevel=3)
        del ways["regex"]
    if tool_choice == "required":
        if not tools:
            raise InvalidRequest("tool_choice is required, and there are no tools", param="tool_choice")
        ways["tools"] = tools
    _only([*ways])
    match ways:
        case {"dtype": dtype}:
            return None, _PARSERS[dtype]
        case {"regex": regex}:
            check_regex(regex)
            return {"regex": regex}, None
        case {"json_schema": schema}:
            return json_constraint(schema), json.loads
        case {"schema": schema}:
            wanted = typed(schema)
            return wanted.constraint, wanted.parse
        case {"ebnf": ebnf}:
            return {"ebnf": ebnf}, None
        case {"tools": _}:
            return {"json": call_schema([tool.schema for tool in tools])}, None
    return None, None


def _only(stated: list[str]) -> None:
    """Raise InvalidRequest for several ways to constrain a text."""
    if len(stated) > 1:
        raise InvalidRequest(f"{' and '.join(stated)} exclude each other", param=stated[0])


def parser_of(node: ir.Node, *, is_plain: bool = False) -> Callable[[str], Any]:
    """The parser of a gen's text; str without schema or dtype. `is_plain`: to what JSON has, not the user's types. A
    gen from a file has no parser of its own."""
    if not isinstance(node, ir.Gen):
        return str
    if not is_plain and node.client is not None:
        return node.client.parse or str
    if node.dtype is not None:
        return _PARSERS[node.dtype]
    return json.loads if node.constraint and "json" in node.constraint else str
