"""sgl: a structured-generation language, and the runtime that executes it.

Every name is loaded at its first use: importing the package costs next to nothing and never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl.lang.api import AsyncProgramState as AsyncProgramState
    from sgl.lang.api import ProgramState as ProgramState
    from sgl.lang.api import SglFunction as SglFunction
    from sgl.lang.api import agent as agent
    from sgl.lang.api import assistant as assistant
    from sgl.lang.api import assistant_begin as assistant_begin
    from sgl.lang.api import assistant_end as assistant_end
    from sgl.lang.api import describe_tools as describe_tools
    from sgl.lang.api import flush_cache as flush_cache
    from sgl.lang.api import function as function
    from sgl.lang.api import gen as gen
    from sgl.lang.api import gen_int as gen_int
    from sgl.lang.api import gen_string as gen_string
    from sgl.lang.api import get_server_info as get_server_info
    from sgl.lang.api import global_config as global_config
    from sgl.lang.api import greedy_token_selection as greedy_token_selection
    from sgl.lang.api import image as image
    from sgl.lang.api import select as select
    from sgl.lang.api import separate_reasoning as separate_reasoning
    from sgl.lang.api import set_default_backend as set_default_backend
    from sgl.lang.api import system as system
    from sgl.lang.api import system_begin as system_begin
    from sgl.lang.api import system_end as system_end
    from sgl.lang.api import token_length_normalized as token_length_normalized
    from sgl.lang.api import unconditional_likelihood_normalized as unconditional_likelihood_normalized
    from sgl.lang.api import user as user
    from sgl.lang.api import user_begin as user_begin
    from sgl.lang.api import user_end as user_end
    from sgl.lang.api import video as video
    from sgl.lang.backends.launch import Runtime as Runtime
    from sgl.lang.backends.openai import Anthropic as Anthropic
    from sgl.lang.backends.openai import Crusoe as Crusoe
    from sgl.lang.backends.openai import LiteLLM as LiteLLM
    from sgl.lang.backends.openai import OpenAI as OpenAI
    from sgl.lang.backends.openai import VertexAI as VertexAI
    from sgl.lang.backends.server import RuntimeEndpoint as RuntimeEndpoint
    from sgl.runtime.engine import Engine as Engine

__version__ = "0.1.0"

_LANGUAGE = """AsyncProgramState ProgramState SglFunction agent assistant assistant_begin assistant_end
describe_tools flush_cache function gen gen_int gen_string get_server_info global_config greedy_token_selection
image select separate_reasoning set_default_backend system system_begin system_end token_length_normalized
unconditional_likelihood_normalized user user_begin user_end video"""

_HOME = {
    **dict.fromkeys(_LANGUAGE.split(), "sgl.lang.api"),
    **dict.fromkeys(("OpenAI", "Anthropic", "Crusoe", "LiteLLM", "VertexAI"), "sgl.lang.backends.openai"),
    "Engine": "sgl.runtime.engine",
    "EngineConfig": "sgl.runtime.config",
    "Runtime": "sgl.lang.backends.launch",
    "RuntimeEndpoint": "sgl.lang.backends.server",
    "ServerArgs": "sgl.runtime.config",
}
_SUBMODULES = frozenset({"errors", "grammar", "lang", "runtime", "test", "utils"})

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"sgl.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'sgl' has no attribute {name!r}")
    home = importlib.import_module(_HOME[name])
    value = getattr(home, "EngineConfig" if name == "ServerArgs" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
