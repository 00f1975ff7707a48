"""What is set once for all programs of a process: the default backend and how much is printed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sgl.errors import ProgramError
from sgl.lang.backends.base import Backend
from sgl.lang.backends.engine import embedded_backend, engine_backend


@dataclass
class GlobalConfig:
    """`verbosity` 2 prints each program's final text. The others are of the original API: what they switch off
    there costs nothing here, so they are accepted and change nothing."""

    verbosity: int = 0
    default_backend: Any = None
    skip_special_tokens_in_output: bool = True
    spaces_between_special_tokens_in_out: bool = True
    enable_precache_with_tracing: bool = True
    enable_parallel_encoding: bool = True


global_config = GlobalConfig()


def set_default_backend(backend: Any) -> None:
    """Run programs on `backend` where no `backend=` says otherwise."""
    global_config.default_backend = backend


def backend_of(value: Any = None) -> Backend:
    """A backend from what users pass as one: a `Backend`, an `Engine`, anything with an `endpoint`, or None for the
    default: the one that was set, or an engine with the embedded model, started at its first use."""
    if value is None:
        value = global_config.default_backend
    if value is None:
        return embedded_backend()
    value = getattr(value, "endpoint", value)
    if isinstance(value, Backend):
        return value
    if hasattr(value, "open_program"):
        return engine_backend(value)
    raise ProgramError(
        f"{value!r} is no backend: pass an sgl.Engine, sgl.RuntimeEndpoint(url), or one of sgl.lang.backends"
    )


def flush_cache(backend: Any = None) -> bool:
    """Drop the backend's cached prefixes; False without a backend or a cache."""
    if backend is None and global_config.default_backend is None:
        return False
    return backend_of(backend).flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any] | None:
    """What the backend says about itself; None without a backend."""
    if backend is None and global_config.default_backend is None:
        return None
    return backend_of(backend).get_server_info()


def environment(variable: str) -> str | None:
    """What the environment says of a key; the language reads it nowhere else."""
    return os.environ.get(variable)
