"""The formats of calls, by family and by the names of parsers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sgl.errors import InvalidRequest, nearest_name
from sgl.formats.call_format import Blocks, CallFormat


def _tagged(name: str, tag: str) -> CallFormat:
    """Each call as JSON in a tag of its own."""
    begin, end = f'<{tag}>\n{{"name": "', f"}}\n</{tag}>"
    return CallFormat(name, begin, '", "arguments": ', end, separator="\n", trigger=f"<{tag}>")


def _array(name: str, trigger: str, closing: str = "]", *, blank: str = "") -> CallFormat:
    """Calls as a JSON array behind a mark."""
    opening = f"{trigger}{blank}["
    return CallFormat(
        name,
        '{"name": "',
        '", "arguments": ',
        "}",
        opening=opening,
        separator=", ",
        closing=closing,
        trigger=trigger,
    )


HERMES: Final = _tagged("hermes", "tool_call")
LLAMA3: Final = CallFormat(
    "llama3", '{"name": "', '", "parameters": ', "}", separator="; ", prefix="<|python_tag|>"
)
LLAMA4: Final = replace(LLAMA3, name="llama4", prefix="<|python_start|><|python_end|>")
"""As its template writes calls, with their text between these."""
MISTRAL: Final = _array("mistral", "[TOOL_CALLS]", blank=" ")
MISTRAL_ARGS: Final = CallFormat("mistral_args", "[TOOL_CALLS]", "[ARGS]", "", trigger="[TOOL_CALLS]")
MISTRAL_IDS: Final = CallFormat(
    "mistral_ids", "[TOOL_CALLS]", "[ARGS]", "", id_mark="[CALL_ID]", trigger="[TOOL_CALLS]"
)
DEEPSEEK_V3: Final = CallFormat(
    "deepseekv3",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    opening="<｜tool▁calls▁begin｜>",
    separator="\n",
    closing="<｜tool▁calls▁end｜>",
    trigger="<｜tool▁calls▁begin｜>",
)
DEEPSEEK_V31: Final = CallFormat(
    "deepseekv31",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    trigger="<｜tool▁calls▁begin｜>",
)
KIMI_K2: Final = CallFormat(
    "kimi_k2",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    trigger="<|tool_calls_section_begin|>",
    writes_id=True,
)
QWEN3_CODER: Final = CallFormat(
    "qwen3_coder",
    "<tool_call>\n<function=",
    ">",
    "\n</function>\n</tool_call>",
    arguments="qwen_xml",
    separator="\n",
    trigger="<tool_call>",
)
GLM45: Final = CallFormat(
    "glm45", "<tool_call>", "", "\n</tool_call>", arguments="glm_xml", separator="\n", trigger="<tool_call>"
)
SEED_OSS: Final = CallFormat(
    "seed_oss",
    "<seed:tool_call>\n<function=",
    ">",
    "\n</function>\n</seed:tool_call>",
    arguments="qwen_xml",
    separator="\n",
    trigger="<seed:tool_call>",
)
MINIMAX_M2: Final = CallFormat(
    "minimax_m2",
    '<invoke name="',
    '">',
    "\n</invoke>",
    arguments="minimax_xml",
    opening="<minimax:tool_call>\n",
    separator="\n",
    closing="\n</minimax:tool_call>",
    trigger="<minimax:tool_call>",
)
DEEPSEEK_V32: Final = CallFormat(
    "deepseekv32",
    '<｜DSML｜invoke name="',
    '">',
    "\n</｜DSML｜invoke>",
    arguments="deepseek_xml",
    opening="<｜DSML｜function_calls>\n",
    separator="\n",
    closing="\n</｜DSML｜function_calls>",
    trigger="<｜DSML｜function_calls>",
)
DEEPSEEK_V4: Final = replace(
    DEEPSEEK_V32,
    name="deepseekv4",
    opening="<｜DSML｜tool_calls>\n",
    closing="\n</｜DSML｜tool_calls>",
    trigger="<｜DSML｜tool_calls>",
)
GIGACHAT35: Final = replace(
    DEEPSEEK_V32,
    name="gigachat35",
    begin='<｜GCML｜invoke name="',
    end="\n</｜GCML｜invoke>",
    arguments="gcml_xml",
    opening="<｜GCML｜tool_calls>\n",
    closing="\n</｜GCML｜tool_calls>",
    trigger="<｜GCML｜tool_calls>",
)
DOTS: Final = replace(
    MINIMAX_M2,
    name="dots",
    opening="<dots_function_call>\n",
    closing="\n</dots_function_call>",
    trigger="<dots_function_call>",
)
HY_V3: Final = CallFormat(
    "hy_v3",
    "<tool_call>",
    "<tool_sep>",
    "\n</tool_call>",
    arguments="glm_xml",
    opening="<tool_calls>\n",
    separator="\n",
    closing="\n</tool_calls>",
    trigger="<tool_calls>",
)
HY_V3_OPEN: Final = replace(
    HY_V3,
    name="hy_v3_open",
    begin="<tool_call:opensource>",
    middle="<tool_sep:opensource>",
    end="\n</tool_call:opensource>",
    arguments="hy_xml",
    opening="<tool_calls:opensource>\n",
    closing="\n</tool_calls:opensource>",
    trigger="<tool_calls:opensource>",
)
"""As the published models' tokens are called."""
K2_HORIZON: Final = replace(
    HY_V3,
    name="k2_horizon",
    begin="<ifm|tool_call>",
    middle="",
    end="\n</ifm|tool_call>",
    arguments="ifm_xml",
    opening="<ifm|tool_calls>\n",
    closing="\n</ifm|tool_calls>",
    trigger="<ifm|tool_calls>",
)
K2_HORIZON_JSON: Final = replace(
    K2_HORIZON,
    name="k2_horizon_json",
    begin='<ifm|tool_call>{"name": "',
    middle='", "arguments": ',
    end="}</ifm|tool_call>",
    arguments="json",
)
SOLAR_OPEN2: Final = replace(
    GLM45,
    name="solar_open2",
    begin="<|tool_call:start|>",
    end="\n<|tool_call:end|>",
    arguments="solar_xml",
    trigger="<|tool_call:start|>",
)
MINICPM5: Final = CallFormat(
    "minicpm5",
    '<function name="',
    '">',
    "</function>",
    arguments="minicpm_xml",
    separator="\n",
    trigger="<function name=",
)
STEP3: Final = CallFormat(
    "step3",
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
    '">',
    "\n</steptml:invoke><｜tool_call_end｜>",
    arguments="step_xml",
    opening="<｜tool_calls_begin｜>\n",
    separator="\n",
    closing="\n<｜tool_calls_end｜>",
    trigger="<｜tool_calls_begin｜>",
)
TOOLCALL: Final = _array("nemotron_json", "<TOOLCALL>", "]</TOOLCALL>")
TOOL_CALLS: Final = _array("apriel", "<tool_calls>", "]</tool_calls>")
GRANITE: Final = _array("granite", "<|tool_call|>")
FUNCTION_CALL: Final = _tagged("function_call", "function_call")
"""Which begins as the next one and has an end."""
GRANITE_20B: Final = CallFormat(
    "granite-20b-fc", '<function_call> {"name": "', '", "arguments": ', "}", trigger="<function_call>"
)
APERTUS: Final = CallFormat(
    "apertus",
    '{"',
    '": ',
    "}",
    opening="<|tools_prefix|>[",
    separator=", ",
    closing="]<|tools_suffix|>",
    trigger="<|tools_prefix|>",
)
"""The tools' names are keys."""
GIGACHAT3: Final = CallFormat(
    "gigachat3",
    '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "',
    '", "arguments": ',
    "}",
    trigger="<|message_sep|>",
)
"""A message of its own, behind the end of the answer's text."""
GIGACHAT31: Final = replace(
    GIGACHAT3, name="gigachat31", begin='<|function_call|>{"name": "', trigger="<|function_call|>"
)
FUNCTOOLS: Final = replace(_array("phi4_mini_json", "functools["), opening="functools[")
LONGCAT: Final = _tagged("longcat", "longcat_tool_call")
XLAM: Final = _array("xlam", "")
INTERNLM: Final = CallFormat(
    "internlm",
    '<|action_start|><|plugin|>\n{"name": "',
    '", "parameters": ',
    "}<|action_end|>",
    trigger="<|action_start|>",
)
PYTHONIC: Final = CallFormat(
    "pythonic",
    "",
    "(",
    ")",
    arguments="pythonic",
    opening="[",
    separator=", ",
    closing="]",
    prefix="<|python_start|>",
)
LFM2: Final = replace(
    PYTHONIC,
    name="lfm2",
    opening="<|tool_call_start|>[",
    closing="]<|tool_call_end|>",
    trigger="<|tool_call_start|>",
    prefix="",
)
MINICPM3: Final = replace(
    LFM2,
    name="minicpm3",
    opening="<|tool_call_start|>\n```python\n",
    separator="\n",
    closing="\n```\n<|tool_call_end|>",
)
OLMO3: Final = replace(
    LFM2,
    name="olmo3",
    opening="<function_calls>\n",
    separator="\n",
    closing="\n</function_calls>",
    trigger="<function_calls>",
)
GEMMA4: Final = CallFormat(
    "gemma4", "<|tool_call>call:", "{", "}<tool_call|>", arguments="gemma4", trigger="<|tool_call>"
)
FUNCTIONGEMMA: Final = CallFormat(
    "functiongemma",
    "<start_function_call>call:",
    "{",
    "}<end_function_call>",
    arguments="functiongemma",
    trigger="<start_function_call>",
)
COHERE3: Final = CallFormat(
    "cohere_command3",
    '{"tool_call_id": "',
    '", "parameters": ',
    "}",
    number_mark='", "tool_name": "',
    opening="<|START_ACTION|>[\n    ",
    separator=",\n    ",
    closing="\n]<|END_ACTION|>",
    trigger="<|START_ACTION|>",
    has_channels=True,
    blocks=Blocks(("<|START_THINKING|>", "<|END_THINKING|>"), ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
)
COHERE4: Final = replace(
    COHERE3,
    name="cohere_command4",
    blocks=Blocks(("<|START_THINKING|>", "<|END_THINKING|>"), ("<|START_TEXT|>", "<|END_TEXT|>"), says_first=True),
)
KIMI_K3: Final = CallFormat(
    "kimi_k3",
    '<|open|>call tool="',
    '"<|sep|>',
    "<|close|>call<|sep|>",
    arguments="kimi_xml",
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
GPT_OSS: Final = CallFormat(
    "gpt-oss",
    "<|start|>assistant<|channel|>commentary to=functions.",
    " <|constrain|>json<|message|>",
    "<|call|><|end|><|return|>",
    trigger="<|start|>assistant",
    has_channels=True,
)
ARRAY: Final = CallFormat(
    "array",
    '{"name":"',
    '","arguments":',
    "}",
    opening="[",
    separator=",",
    closing="]",
)
"""Calls as a JSON array, for models of which no format is known."""
OBJECT: Final = CallFormat("object", '{"name":"', '","arguments":', "}")
"""One call, likewise."""

_NAMES: Final[tuple[tuple[str, tuple[CallFormat, ...]], ...]] = (
    ("hermes qwen qwen25 granite4 ernie45 trinity", (HERMES,)),
    ("qwen3_coder qwen3_xml mimo step3p5", (QWEN3_CODER,)),
    ("glm glm45 glm47 poolside_v1 ling3 spark25", (GLM45,)),
    ("llama3 llama3_json", (LLAMA3,)),
    ("llama4_json", (LLAMA4,)),
    ("mistral", (MISTRAL, MISTRAL_ARGS, MISTRAL_IDS)),
    ("deepseekv3 deepseek_v3", (DEEPSEEK_V3,)),
    ("deepseekv31 deepseek_v31", (DEEPSEEK_V31,)),
    ("deepseekv32 deepseek_v32", (DEEPSEEK_V32,)),
    ("deepseekv4 deepseek_v4", (DEEPSEEK_V4,)),
    ("kimi_k2", (KIMI_K2,)),
    ("seed_oss", (SEED_OSS,)),
    ("minimax-m2 minimax_m2", (MINIMAX_M2,)),
    ("step3", (STEP3,)),
    ("gpt-oss openai", (GPT_OSS,)),
    ("cohere_command3", (COHERE3,)),
    ("cohere_command4", (COHERE4,)),
    ("kimi_k3", (KIMI_K3,)),
    ("nemotron_json", (TOOLCALL,)),
    ("apriel hunyuan_a13b jamba", (TOOL_CALLS,)),
    ("granite", (GRANITE,)),
    ("phi4_mini_json", (FUNCTOOLS,)),
    ("internlm interns1", (INTERNLM,)),
    ("longcat", (LONGCAT,)),
    ("xlam", (XLAM,)),
    ("pythonic llama4_pythonic", (PYTHONIC,)),
    ("lfm2", (LFM2,)),
    ("minicpm3", (MINICPM3,)),
    ("minicpm5", (MINICPM5,)),
    ("apertus apertus2509", (APERTUS,)),
    ("dots", (DOTS,)),
    ("gigachat3", (GIGACHAT3, GIGACHAT31)),
    ("gigachat35", (GIGACHAT35,)),
    ("function_call", (FUNCTION_CALL,)),
    ("granite-20b-fc", (GRANITE_20B,)),
    ("k2_horizon", (K2_HORIZON, K2_HORIZON_JSON)),
    ("solar_open2", (SOLAR_OPEN2,)),
    ("olmo3", (OLMO3,)),
    ("gemma4", (GEMMA4,)),
    ("functiongemma", (FUNCTIONGEMMA,)),
    ("hunyuan hy_v3", (HY_V3_OPEN, HY_V3)),
)
FORMATS: Final = tuple(
    sorted(dict.fromkeys(format for _, formats in _NAMES for format in formats), key=lambda each: not each.trigger)
)
"""Those without a trigger last: others' calls may hold what looks like theirs."""
PARSERS: Final = {name: formats for names, formats in _NAMES for name in names.split()}
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
    found = PARSERS.get({"openai_gptoss": GPT_OSS.name}.get(reasoning_parser, reasoning_parser))
    return found[0] if found is not None and found[0].has_channels else None
