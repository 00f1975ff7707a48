"""The language in one module: what a program needs, and nothing that only some programs need."""

from __future__ import annotations

from sgl.lang.config import flush_cache, get_server_info, global_config, set_default_backend
from sgl.lang.ir.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sgl.lang.record.agent import agent
from sgl.lang.record.expr import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from sgl.lang.record.function import SglFunction, function
from sgl.lang.record.state import AsyncProgramState, ProgramState
from sgl.lang.typed.tools import describe_tools

__all__ = [
    "AsyncProgramState",
    "ProgramState",
    "SglFunction",
    "agent",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "describe_tools",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]
