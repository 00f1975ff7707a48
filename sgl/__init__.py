"""sgl: a structured-generation language, and the runtime that executes it.

Every name is loaded at its first use: importing the package costs next to nothing and never loads torch. Names that
need an extra which is not installed raise MissingExtra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sgl.compat import names
from sgl.errors import needs_extra

if TYPE_CHECKING:
    from sgl import errors as errors
    from sgl import grammar as grammar
    from sgl.lang.api import *  # noqa: F403 - all of its names, for type checkers
    from sgl.lang.backends.launch import Runtime as Runtime
    from sgl.lang.backends.openai import Anthropic as Anthropic
    from sgl.lang.backends.openai import Crusoe as Crusoe
    from sgl.lang.backends.openai import LiteLLM as LiteLLM
    from sgl.lang.backends.openai import OpenAI as OpenAI
    from sgl.lang.backends.openai import VertexAI as VertexAI
    from sgl.lang.backends.server import RuntimeEndpoint as RuntimeEndpoint
    from sgl.runtime.config import EngineConfig as EngineConfig
    from sgl.runtime.config import EngineConfig as ServerArgs  # noqa: F401 - the name of the original
    from sgl.runtime.engine import Engine as Engine

__version__ = "0.1.0"

names.install()

_LANGUAGE = """AsyncProgramState ProgramState SglFunction agent assistant assistant_begin assistant_end
describe_tools flush_cache function gen gen_int gen_string get_server_info global_config greedy_token_selection
image load select separate_reasoning session set_default_backend system system_begin system_end token_length_normalized
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


if not TYPE_CHECKING:  # to type checkers it would be a module of any names

    def __getattr__(name: str) -> Any:
        if name not in _HOME and name not in _SUBMODULES:
            raise AttributeError(f"module 'sgl' has no attribute {name!r}")
        with needs_extra("engine", f"sgl.{name}"):
            home = importlib.import_module(_HOME.get(name, f"sgl.{name}"))
        if name in _SUBMODULES:
            return home
        value = getattr(home, "EngineConfig" if name == "ServerArgs" else name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
