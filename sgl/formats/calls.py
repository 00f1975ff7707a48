"""How model families write calls of tools: one description each, from which the constraint, the parser and the stream
parser all follow.

A call is `begin`, the tool's name, `middle`, the arguments, `end`. Several stand between `opening` and `closing`, with
`separator` between them. White space in these texts, and around JSON's punctuation, is what models are held to; what
is read may have any.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Final, Literal

from sgl.errors import InvalidRequest, nearest_name
from sgl.formats.arguments import XML_STYLES
from sgl.formats.literals import LITERAL_STYLES

Arguments = Literal[
    "json",
    "qwen_xml",
    "glm_xml",
    "minimax_xml",
    "step_xml",
    "deepseek_xml",
    "hy_xml",
    "pythonic",
    "gemma4",
    "functiongemma",
]
_NAME = re.compile(r"[\w./-]+")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The calls of one family."""

    name: str
    begin: str
    middle: str
    end: str
    arguments: Arguments = "json"
    opening: str = ""
    separator: str = ""
    closing: str = ""
    trigger: str = ""
    """What free text is interrupted by. Without one, calls are the whole answer or none of it: they begin as a text
    might."""
    prefix: str = ""
    """May stand before an answer that is calls."""
    id_mark: str = ""
    """Stands behind the name, before the call's id: nine letters and digits."""
    writes_id: bool = False
    """The name is written as the call's id: functions.NAME:NUMBER."""
    has_channels: bool = False
    """All of an answer is in channels, which `harmony.py` knows."""

    @property
    def quotes_name(self) -> bool:
        """Whether a name is a JSON string."""
        return self.arguments == "json" and self.middle.startswith('"')

    def written_name(self, name: str) -> str:
        """A tool's name as calls have it. Raises InvalidRequest where it would be read as something else."""
        if self.quotes_name:
            return json.dumps(name, ensure_ascii=False)[1:-1]
        if not _NAME.fullmatch(name):
            message = f"the name of the tool {name!r:.80} cannot be written in calls as the model writes them"
            raise InvalidRequest(f"{message}: letters, digits, '_', '-', '.' and '/' can", param="tools")
        return name

    def marks(self) -> tuple[str, ...]:
        """Everything written around names and arguments."""
        around = (self.prefix, self.opening, self.begin, self.id_mark, self.middle, self.end, self.separator)
        inside: tuple[str, ...] = ()
        if (xml := XML_STYLES.get(self.arguments)) is not None:
            inside = (xml.begin, xml.middle, xml.string_middle, xml.end)
        elif (literal := LITERAL_STYLES.get(self.arguments)) is not None:
            inside = literal.quotes
        return (*around, self.closing, *inside)


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

FORMATS: Final = (
    HERMES,
    QWEN3_CODER,
    GLM45,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_IDS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    SEED_OSS,
    MINIMAX_M2,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    STEP3,
    TOOLCALL,
    TOOL_CALLS,
    GRANITE,
    FUNCTOOLS,
    INTERNLM,
    LONGCAT,
    GPT_OSS,
    LFM2,
    OLMO3,
    GEMMA4,
    FUNCTIONGEMMA,
    HY_V3,
    HY_V3_OPEN,
    LLAMA3,  # these last: others' calls may hold what looks like theirs
    LLAMA4,
    XLAM,
    PYTHONIC,
)
PARSERS: Final[dict[str, tuple[CallFormat, ...]]] = {
    "hermes": (HERMES,),
    "qwen": (HERMES,),
    "qwen25": (HERMES,),
    "granite4": (HERMES,),
    "qwen3_coder": (QWEN3_CODER,),
    "qwen3_xml": (QWEN3_CODER,),
    "mimo": (QWEN3_CODER,),
    "step3p5": (QWEN3_CODER,),
    "glm": (GLM45,),
    "glm45": (GLM45,),
    "glm47": (GLM45,),
    "llama3": (LLAMA3,),
    "llama3_json": (LLAMA3,),
    "llama4_json": (LLAMA4,),
    "mistral": (MISTRAL, MISTRAL_ARGS, MISTRAL_IDS),
    "deepseekv3": (DEEPSEEK_V3,),
    "deepseek_v3": (DEEPSEEK_V3,),
    "deepseekv31": (DEEPSEEK_V31,),
    "deepseek_v31": (DEEPSEEK_V31,),
    "deepseekv32": (DEEPSEEK_V32,),
    "deepseek_v32": (DEEPSEEK_V32,),
    "deepseekv4": (DEEPSEEK_V4,),
    "deepseek_v4": (DEEPSEEK_V4,),
    "kimi_k2": (KIMI_K2,),
    "seed_oss": (SEED_OSS,),
    "minimax-m2": (MINIMAX_M2,),
    "minimax_m2": (MINIMAX_M2,),
    "step3": (STEP3,),
    "gpt-oss": (GPT_OSS,),
    "openai": (GPT_OSS,),
    "nemotron_json": (TOOLCALL,),
    "apriel": (TOOL_CALLS,),
    "hunyuan_a13b": (TOOL_CALLS,),
    "jamba": (TOOL_CALLS,),
    "granite": (GRANITE,),
    "phi4_mini_json": (FUNCTOOLS,),
    "internlm": (INTERNLM,),
    "interns1": (INTERNLM,),
    "longcat": (LONGCAT,),
    "xlam": (XLAM,),
    "pythonic": (PYTHONIC,),
    "llama4_pythonic": (PYTHONIC,),
    "lfm2": (LFM2,),
    "olmo3": (OLMO3,),
    "gemma4": (GEMMA4,),
    "functiongemma": (FUNCTIONGEMMA,),
    "ernie45": (HERMES,),
    "hunyuan": (HY_V3_OPEN, HY_V3),
    "hy_v3": (HY_V3_OPEN, HY_V3),
}
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
