"""Process-wide settings: default backend and verbosity."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from sgl.errors import ConfigError, MissingExtra, ProgramError, is_installed
from sgl.lang.backends.base import Backend
from sgl.lang.backends.engine import backend_of_model, engine_backend
from sgl.lang.environment import environment


class _Engine(Protocol):
    """An `sgl.Engine`."""

    def open_program(self, program: Any, sink: Any) -> Any: ...


class _Runtime(Protocol):
    """An `sgl.Runtime`, or anything else that has a backend."""

    @property
    def endpoint(self) -> Backend: ...


AnyBackend: TypeAlias = Backend | _Engine | _Runtime | None


@dataclass
class GlobalConfig:
    """`verbosity` 2 prints each program's final text. The other fields are the original's and have no effect."""

    verbosity: int = 0
    default_backend: Any = None
    skip_special_tokens_in_output: bool = True
    spaces_between_special_tokens_in_out: bool = True
    enable_precache_with_tracing: bool = True
    enable_parallel_encoding: bool = True


global_config = GlobalConfig()


def set_default_backend(backend: AnyBackend) -> None:
    """Run programs on `backend` unless a run names another."""
    global_config.default_backend = backend


def backend_of(value: Any = None) -> Backend:
    """The backend for a `Backend`, an `Engine` or anything with an `endpoint`. None: the default, or an engine started
    on first use with SGL_MODEL_PATH's model or the embedded one. Raises ConfigError if a choice is required, and
    MissingExtra without sgl[engine]."""
    if value is None:
        value = global_config.default_backend
    if value is None:
        return backend_of_model(fallback_model())
    value = getattr(value, "endpoint", value)
    if isinstance(value, Backend):
        return value
    if hasattr(value, "open_program"):
        return engine_backend(value)
    raise ProgramError(
        f"{value!r} is no backend: pass an sgl.Engine, sgl.RuntimeEndpoint(url), or one of sgl.lang.backends"
    )


def fallback_model() -> str:
    """The default model. Warns once if it is the embedded one. Raises ConfigError if SGL_REQUIRE_BACKEND=1, and
    MissingExtra without sgl[engine]."""
    global _has_warned
    if model := environment("SGL_MODEL_PATH"):
        return model
    ways = " ".join(_WAYS.split())
    if (environment("SGL_REQUIRE_BACKEND") or "0").lower() not in ("0", "false", "no"):
        raise ConfigError(f"no backend was chosen, and SGL_REQUIRE_BACKEND is set. {ways}", option="backend")
    with _lock:
        if not _has_warned:
            if not is_installed("torch"):
                why = "no backend was chosen, and the embedded model needs torch, which is not installed"
                message = f"{why}: pip install 'sgl[engine]'. {ways}"
                raise MissingExtra(message, extra="engine", option="backend")
            _has_warned = True
            sys.stderr.write(f"sgl: WARNING: no backend was chosen. {_TOY}\n     {_WAYS}\n     {_REQUIRE}\n")
            sys.stderr.flush()
    return "embedded"


_TOY = (
    "Programs run on the embedded model,\n     a toy of 6 million parameters that comes with the package: "
    "it is for trying sgl out, not for its answers."
)
_WAYS = (
    "Choose one: run(…, backend=…), sgl.set_default_backend(…), SGL_MODEL_PATH=MODEL,\n     "
    "or `sgl run --model MODEL` or `sgl run --url URL` with the program's file."
)
_REQUIRE = "SGL_REQUIRE_BACKEND=1 makes this an error."
_has_warned = False
_lock = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))


def flush_cache(backend: Any = None) -> bool:
    """Drop the backend's prefix cache; False without a backend or cache."""
    if backend is None and global_config.default_backend is None:
        return False
    return backend_of(backend).flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any] | None:
    """The backend's information about itself; None without a backend."""
    if backend is None and global_config.default_backend is None:
        return None
    return backend_of(backend).get_server_info()
