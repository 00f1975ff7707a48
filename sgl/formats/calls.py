"""The formats of calls, by family and by the names of parsers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from sgl.errors import InvalidRequest, nearest_name
from sgl.formats.call_format import Arguments, Blocks, CallFormat


def _json(
    name: str, before: str = "", behind: str = "", *, arguments: str = "arguments", **more: Any
) -> CallFormat:
    """Each call as a JSON object between two marks. arguments: the key of its arguments."""
    return CallFormat(name, f'{before}{{"name": "', f'", "{arguments}": ', f"}}{behind}", **more)


def _tagged(name: str, tag: str, parsers: str = "") -> CallFormat:
    """Each call as JSON in a tag of its own."""
    return _json(name, f"<{tag}>\n", f"\n</{tag}>", separator="\n", parsers=parsers)


def _array(name: str, opening: str, closing: str = "]", **more: Any) -> CallFormat:
    """Calls as a JSON array behind a mark."""
    return _json(name, opening=opening, separator=", ", closing=closing, **more)


def _section(
    name: str, tag: str, begin: str, middle: str, end: str, arguments: Arguments, parsers: str = ""
) -> CallFormat:
    """Calls in lines of their own, in a tag around all of them."""
    opening, closing = f"<{tag}>\n", f"\n</{tag}>"
    return CallFormat(name, begin, middle, end, arguments, opening, "\n", closing, parsers=parsers)


def _invoked(name: str, mark: str, tag: str, arguments: Arguments, parsers: str = "") -> CallFormat:
    """Calls as XML. mark: what the names of its tags begin with."""
    begin, end = f'<{mark}invoke name="', f"\n</{mark}invoke>"
    return _section(name, mark + tag, begin, '">', end, arguments, parsers)


def _coder(name: str, tag: str, parsers: str = "") -> CallFormat:
    """Each call as a function in a tag of its own."""
    begin, end = f"<{tag}>\n<function=", f"\n</function>\n</{tag}>"
    return CallFormat(name, begin, ">", end, "qwen_xml", separator="\n", parsers=parsers)


def _hunyuan(name: str, suffix: str, arguments: Arguments) -> CallFormat:
    call = f"tool_call{suffix}"
    middle = f"<tool_sep{suffix}>"
    return _section(name, f"tool_calls{suffix}", f"<{call}>", middle, f"\n</{call}>", arguments, "hunyuan hy_v3")


def _cohere(name: str, said: str, *, says_first: bool) -> CallFormat:
    thought = "<|START_THINKING|>", "<|END_THINKING|>"
    return CallFormat(
        name,
        '{"tool_call_id": "',
        '", "parameters": ',
        "}",
        number_mark='", "tool_name": "',
        opening="<|START_ACTION|>[\n    ",
        separator=",\n    ",
        closing="\n]<|END_ACTION|>",
        has_channels=True,
        blocks=Blocks(thought, (f"<|START_{said}|>", f"<|END_{said}|>"), says_first=says_first),
    )


HERMES: Final = _tagged("hermes", "tool_call", "hermes qwen qwen25 granite4 ernie45 trinity")
MISTRAL: Final = _array("mistral", "[TOOL_CALLS] [")
_LLAMA3: Final = _json(
    "llama3", arguments="parameters", separator="; ", prefix="<|python_tag|>", parsers="llama3 llama3_json"
)
_MISTRAL_ARGS: Final = CallFormat("mistral_args", "[TOOL_CALLS]", "[ARGS]", "", parsers="mistral")
_GPT_OSS: Final = CallFormat(
    "gpt-oss",
    "<|start|>assistant<|channel|>commentary to=functions.",
    " <|constrain|>json<|message|>",
    "<|call|><|end|><|return|>",
    trigger="<|start|>assistant",
    has_channels=True,
    parsers="gpt-oss openai",
)
_KIMI_K3: Final = CallFormat(
    "kimi_k3",
    '<|open|>call tool="',
    '"<|sep|>',
    "<|close|>call<|sep|>",
    "kimi_xml",
    id_mark='" index="',
    has_number=True,
    opening="<|open|>tools<|sep|>",
    closing="<|close|>tools<|sep|>",
    trigger="<|open|>tools<|sep|>",
    has_channels=True,
    blocks=Blocks(
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        "<|close|>message<|sep|>",
        says_first=True,
    ),
)
_PYTHONIC: Final = CallFormat(
    "pythonic",
    "",
    "(",
    ")",
    "pythonic",
    "[",
    ", ",
    "]",
    prefix="<|python_start|>",
    parsers="pythonic llama4_pythonic",
)
_LFM2: Final = replace(
    _PYTHONIC, name="lfm2", opening="<|tool_call_start|>[", closing="]<|tool_call_end|>", prefix="", parsers=""
)
ARRAY: Final = CallFormat("array", '{"name":"', '","arguments":', "}", opening="[", separator=",", closing="]")
"""Calls as a JSON array, for models of which no format is known."""
OBJECT: Final = CallFormat("object", '{"name":"', '","arguments":', "}")
"""One call, likewise."""

_FORMATS: Final = (
    HERMES,
    _coder("qwen3_coder", "tool_call", "qwen3_coder qwen3_xml mimo step3p5"),
    CallFormat(
        "glm45",
        "<tool_call>",
        "",
        "\n</tool_call>",
        "glm_xml",
        separator="\n",
        parsers="glm glm45 glm47 poolside_v1 ling3 spark25",
    ),
    _LLAMA3,
    # As its template writes calls, with their text between these:
    replace(_LLAMA3, name="llama4", prefix="<|python_start|><|python_end|>", parsers="llama4_json"),
    MISTRAL,
    _MISTRAL_ARGS,
    replace(_MISTRAL_ARGS, name="mistral_ids", id_mark="[CALL_ID]"),
    CallFormat(
        "deepseekv3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        opening="<｜tool▁calls▁begin｜>",
        separator="\n",
        closing="<｜tool▁calls▁end｜>",
        parsers="deepseekv3 deepseek_v3",
    ),
    CallFormat(
        "deepseekv31",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
        parsers="deepseekv31 deepseek_v31",
    ),
    _invoked("deepseekv32", "｜DSML｜", "function_calls", "deepseek_xml", "deepseekv32 deepseek_v32"),
    _invoked("deepseekv4", "｜DSML｜", "tool_calls", "deepseek_xml", "deepseekv4 deepseek_v4"),
    CallFormat(
        "kimi_k2",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
        writes_id=True,
    ),
    _coder("seed_oss", "seed:tool_call"),
    _invoked("minimax_m2", "", "minimax:tool_call", "minimax_xml", "minimax-m2 minimax_m2"),
    CallFormat(
        "step3",
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        '">',
        "\n</steptml:invoke><｜tool_call_end｜>",
        "step_xml",
        opening="<｜tool_calls_begin｜>\n",
        separator="\n",
        closing="\n<｜tool_calls_end｜>",
    ),
    _GPT_OSS,
    _cohere("cohere_command3", "RESPONSE", says_first=False),
    _cohere("cohere_command4", "TEXT", says_first=True),
    _KIMI_K3,
    _array("nemotron_json", "<TOOLCALL>[", "]</TOOLCALL>"),
    _array("apriel", "<tool_calls>[", "]</tool_calls>", parsers="apriel hunyuan_a13b jamba"),
    _array("granite", "<|tool_call|>["),
    _array("phi4_mini_json", "functools[", trigger="functools["),
    _json(
        "internlm",
        "<|action_start|><|plugin|>\n",
        "<|action_end|>",
        arguments="parameters",
        parsers="internlm interns1",
    ),
    _tagged("longcat", "longcat_tool_call"),
    _array("xlam", "["),
    _PYTHONIC,
    _LFM2,
    replace(
        _LFM2,
        name="minicpm3",
        opening="<|tool_call_start|>\n```python\n",
        separator="\n",
        closing="\n```\n<|tool_call_end|>",
    ),
    CallFormat(
        "minicpm5",
        '<function name="',
        '">',
        "</function>",
        "minicpm_xml",
        separator="\n",
        trigger="<function name=",
    ),
    CallFormat(  # the tools' names are keys
        "apertus",
        '{"',
        '": ',
        "}",
        opening="<|tools_prefix|>[",
        separator=", ",
        closing="]<|tools_suffix|>",
        parsers="apertus apertus2509",
    ),
    _invoked("dots", "", "dots_function_call", "minimax_xml"),
    _json("gigachat3", "<|message_sep|>\n\nfunction call<|role_sep|>\n"),  # a message behind that of the text
    _json("gigachat31", "<|function_call|>", parsers="gigachat3"),
    _invoked("gigachat35", "｜GCML｜", "tool_calls", "gcml_xml"),
    _tagged("function_call", "function_call"),  # begins as the next one, and has an end
    _json("granite-20b-fc", "<function_call> "),
    _section("k2_horizon", "ifm|tool_calls", "<ifm|tool_call>", "", "\n</ifm|tool_call>", "ifm_xml", "k2_horizon"),
    _json(
        "k2_horizon_json",
        "<ifm|tool_call>",
        "</ifm|tool_call>",
        opening="<ifm|tool_calls>\n",
        separator="\n",
        closing="\n</ifm|tool_calls>",
        parsers="k2_horizon",
    ),
    CallFormat("solar_open2", "<|tool_call:start|>", "", "\n<|tool_call:end|>", "solar_xml", separator="\n"),
    _section("olmo3", "function_calls", "", "(", ")", "pythonic"),
    CallFormat("gemma4", "<|tool_call>call:", "{", "}<tool_call|>", "gemma4"),
    CallFormat("functiongemma", "<start_function_call>call:", "{", "}<end_function_call>", "functiongemma"),
    _hunyuan("hy_v3_open", ":opensource", "hy_xml"),  # as the published models' tokens are called
    _hunyuan("hy_v3", "", "glm_xml"),
)
FORMATS: Final = tuple(sorted(_FORMATS, key=lambda each: not each.trigger))
"""Those without a trigger last: others' calls may hold what looks like theirs."""
_NAMES: Final = dict.fromkeys(name for each in _FORMATS for name in each.parser_names)
PARSERS: Final = {name: tuple(each for each in _FORMATS if name in each.parser_names) for name in _NAMES}
"""By --tool-call-parser, as SGLang and vLLM name it: the formats among which the chat template decides, the first one
where it does not."""


def formats_of(parser: str) -> tuple[CallFormat, ...]:
    """The formats of a parser's name. Raises InvalidRequest."""
    if parser not in PARSERS:
        hint = nearest_name(parser, PARSERS)
        known = ", ".join(PARSERS)
        raise InvalidRequest(
            f"no format of tool calls is called {parser!r}{hint}; there are {known}", param="parser"
        )
    return PARSERS[parser]


def channels_of(reasoning_parser: str) -> CallFormat | None:
    """The format whose channels hold the reasoning of that parser's name, if its answers stand in channels."""
    found = PARSERS.get({"openai_gptoss": _GPT_OSS.name}.get(reasoning_parser, reasoning_parser))
    return found[0] if found is not None and found[0].has_channels else None
