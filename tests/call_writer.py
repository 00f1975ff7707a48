"""Writes calls in every format, as models do: the tests' own reading of the published formats, none of the parser's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def hermes(calls: Sequence[Call], tag: str = "tool_call") -> str:
    return "\n".join(
        f'<{tag}>\n{{"name": {_json(name)}, "arguments": {_json(arguments)}}}\n</{tag}>'
        for name, arguments in calls
    )


def llama3(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": {_json(name)}, "parameters": {_json(arguments)}}}' for name, arguments in calls)


def _array(calls: Sequence[Call]) -> str:
    inner = ", ".join(f'{{"name": {_json(name)}, "arguments": {_json(arguments)}}}' for name, arguments in calls)
    return f"[{inner}]"


def mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS] {_array(calls)}"


def mistral_args(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def mistral_ids(calls: Sequence[Call]) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4{number}[ARGS]{_json(arguments)}"
        for number, (name, arguments) in enumerate(calls)
    )


def deepseekv3(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseekv31(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi_k2(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _tagged(
    calls: Sequence[Call],
    invoke: str,
    parameter: Callable[[str, Any], str],
    end: str,
) -> str:
    """Calls, each with a line of its own for each parameter."""
    return "\n".join(
        invoke.replace("NAME", name)
        + "\n"
        + "".join(f"{parameter(key, value)}\n" for key, value in arguments.items())
        + end
        for name, arguments in calls
    )


def seed_oss(calls: Sequence[Call]) -> str:
    return _tagged(
        calls,
        "<seed:tool_call>\n<function=NAME>",
        lambda key, value: f"<parameter={key}>\n{_plain(value)}\n</parameter>",
        "</function>\n</seed:tool_call>",
    )


def minimax_m2(calls: Sequence[Call], section: str = "minimax:tool_call") -> str:
    inner = _tagged(
        calls,
        '<invoke name="NAME">',
        lambda key, value: f'<parameter name="{key}">{_plain(value)}</parameter>',
        "</invoke>",
    )
    return f"<{section}>\n{inner}\n</{section}>"


def minicpm5(calls: Sequence[Call]) -> str:
    """Texts that look like tags between marks, as the model is taught to."""

    def value(each: Any) -> str:
        text = _plain(each)
        is_marked = isinstance(each, str) and any(mark in text for mark in "<>&")
        return f"<![CDATA[{text}]]>" if is_marked else text

    return "\n".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{key}">{value(each)}</param>' for key, each in arguments.items())
        + "</function>"
        for name, arguments in calls
    )


def solar_open2(calls: Sequence[Call]) -> str:
    return _tagged(
        calls,
        "<|tool_call:start|>NAME",
        lambda key, value: f"<|tool_arg:start|>{key}<|tool_arg:value|>{_plain(value)}<|tool_arg:end|>",
        "<|tool_call:end|>",
    )


def k2_horizon(calls: Sequence[Call]) -> str:
    inner = _tagged(
        calls,
        "<ifm|tool_call>NAME",
        lambda key, value: f"<ifm|arg_key>{key}</ifm|arg_key>\n<ifm|arg_value>{_plain(value)}</ifm|arg_value>",
        "</ifm|tool_call>",
    )
    return f"<ifm|tool_calls>\n{inner}\n</ifm|tool_calls>"


def _named(calls: Sequence[Call], begin: str, end: str = "", between: str = "") -> str:
    return between.join(
        f'{begin}{{"name": {_json(name)}, "arguments": {_json(arguments)}}}{end}' for name, arguments in calls
    )


def k2_horizon_json(calls: Sequence[Call]) -> str:
    inner = _named(calls, "<ifm|tool_call>", "</ifm|tool_call>", "\n")
    return f"<ifm|tool_calls>\n{inner}\n</ifm|tool_calls>"


def apertus(calls: Sequence[Call]) -> str:
    inner = ", ".join(f"{{{_json(name)}: {_json(arguments)}}}" for name, arguments in calls)
    return f"<|tools_prefix|>[{inner}]<|tools_suffix|>"


def deepseekv32(calls: Sequence[Call], section: str = "function_calls", language: str = "DSML") -> str:
    mark = f"｜{language}｜"

    def parameter(key: str, value: Any) -> str:
        is_text = _json(isinstance(value, str))
        return f'<{mark}parameter name="{key}" string="{is_text}">{_plain(value)}</{mark}parameter>'

    inner = _tagged(calls, f'<{mark}invoke name="NAME">', parameter, f"</{mark}invoke>")
    return f"<{mark}{section}>\n{inner}\n</{mark}{section}>"


def deepseekv4(calls: Sequence[Call], language: str = "DSML") -> str:
    return deepseekv32(calls, "tool_calls", language)


def step3(calls: Sequence[Call]) -> str:
    inner = _tagged(
        calls,
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">',
        lambda key, value: f'<steptml:parameter name="{key}">{_plain(value)}</steptml:parameter>',
        "</steptml:invoke><｜tool_call_end｜>",
    )
    return f"<｜tool_calls_begin｜>\n{inner}\n<｜tool_calls_end｜>"


def qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def glm45(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def hy_v3(calls: Sequence[Call], suffix: str = "") -> str:
    inner = "\n".join(
        f"<tool_call{suffix}>{name}<tool_sep{suffix}>\n"
        + "".join(
            f"<arg_key{suffix}>{key}</arg_key{suffix}>\n<arg_value{suffix}>{_plain(value)}</arg_value{suffix}>\n"
            for key, value in arguments.items()
        )
        + f"</tool_call{suffix}>"
        for name, arguments in calls
    )
    return f"<tool_calls{suffix}>\n{inner}\n</tool_calls{suffix}>"


def nemotron_json(calls: Sequence[Call]) -> str:
    return f"<TOOLCALL>{_array(calls)}</TOOLCALL>"


def apriel(calls: Sequence[Call]) -> str:
    return f"<tool_calls>{_array(calls)}</tool_calls>"


def granite(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>{_array(calls)}"


def phi4_mini_json(calls: Sequence[Call]) -> str:
    return f"functools{_array(calls)}"


def internlm(calls: Sequence[Call]) -> str:
    return "".join(
        f'<|action_start|><|plugin|>\n{{"name": {_json(name)}, "parameters": {_json(arguments)}}}<|action_end|>'
        for name, arguments in calls
    )


def longcat(calls: Sequence[Call]) -> str:
    return hermes(calls, "longcat_tool_call")


def xlam(calls: Sequence[Call]) -> str:
    return _array(calls)


def _in_python(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(_in_python, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_json(key)}:{_in_python(each)}" for key, each in value.items()) + "}"
    return _json(value) if isinstance(value, str) else str(value)


def pythonic(calls: Sequence[Call], separator: str = ", ") -> str:
    return separator.join(
        name + "(" + ", ".join(f"{key}={_in_python(value)}" for key, value in arguments.items()) + ")"
        for name, arguments in calls
    )


def _in_gemma(value: Any, quote: str) -> str:
    if isinstance(value, list):
        return "[" + ",".join(_in_gemma(each, quote) for each in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_in_gemma(each, quote)}" for key, each in value.items()) + "}"
    return f"{quote}{value}{quote}" if isinstance(value, str) else _json(value)


def gemma4(
    calls: Sequence[Call], begin: str = "<|tool_call>", end: str = "<tool_call|>", quote: str = '<|"|>'
) -> str:
    return "".join(f"{begin}call:{name}{_in_gemma(arguments, quote)}{end}" for name, arguments in calls)


def functiongemma(calls: Sequence[Call]) -> str:
    return gemma4(calls, "<start_function_call>", "<end_function_call>", "<escape>")


def gpt_oss(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


def cohere_command(calls: Sequence[Call]) -> str:
    inner = ",\n    ".join(
        f'{{"tool_call_id": "{number}", "tool_name": {_json(name)}, "parameters": {_json(arguments)}}}'
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n    {inner}\n]<|END_ACTION|>"


_KINDS = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


def kimi_k3(calls: Sequence[Call]) -> str:
    inner = "".join(
        f'<|open|>call tool="{name}" index="{number}"<|sep|>'
        + "".join(
            f'<|open|>argument key="{key}" type="{_KINDS[type(value)]}"<|sep|>{_plain(value)}<|close|>argument<|sep|>'
            for key, value in arguments.items()
        )
        + "<|close|>call<|sep|>"
        for number, (name, arguments) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": hermes,
    "llama3": llama3,
    "mistral": mistral,
    "mistral_args": mistral_args,
    "mistral_ids": mistral_ids,
    "deepseekv3": deepseekv3,
    "deepseekv31": deepseekv31,
    "kimi_k2": kimi_k2,
    "qwen3_coder": qwen3_coder,
    "glm45": glm45,
    "seed_oss": seed_oss,
    "minimax_m2": minimax_m2,
    "deepseekv32": deepseekv32,
    "deepseekv4": deepseekv4,
    "step3": step3,
    "hy_v3": hy_v3,
    "hy_v3_open": lambda calls: hy_v3(calls, ":opensource"),
    "llama4": llama3,
    "nemotron_json": nemotron_json,
    "apriel": apriel,
    "granite": granite,
    "phi4_mini_json": phi4_mini_json,
    "internlm": internlm,
    "longcat": longcat,
    "gpt-oss": gpt_oss,
    "cohere_command3": cohere_command,
    "cohere_command4": cohere_command,
    "kimi_k3": kimi_k3,
    "xlam": xlam,
    "pythonic": lambda calls: f"[{pythonic(calls)}]",
    "lfm2": lambda calls: f"<|tool_call_start|>[{pythonic(calls)}]<|tool_call_end|>",
    "olmo3": lambda calls: "<function_calls>\n" + pythonic(calls, "\n") + "\n</function_calls>",
    "gemma4": gemma4,
    "functiongemma": functiongemma,
    "minicpm3": lambda calls: (
        "<|tool_call_start|>\n```python\n" + pythonic(calls, "\n") + "\n```\n<|tool_call_end|>"
    ),
    "minicpm5": minicpm5,
    "apertus": apertus,
    "dots": lambda calls: minimax_m2(calls, "dots_function_call"),
    "gigachat3": lambda calls: _named(calls, "<|message_sep|>\n\nfunction call<|role_sep|>\n"),
    "gigachat31": lambda calls: _named(calls, "<|function_call|>"),
    "gigachat35": lambda calls: deepseekv4(calls, "GCML"),
    "function_call": lambda calls: hermes(calls, "function_call"),
    "granite-20b-fc": lambda calls: _named(calls, "<function_call> "),
    "k2_horizon": k2_horizon,
    "k2_horizon_json": k2_horizon_json,
    "solar_open2": solar_open2,
}
