"""Runs programs on an `Engine` in this process, without HTTP or JSON."""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any

from sgl.errors import needs_extra
from sgl.lang.backends.base import Backend, Session
from sgl.lang.ir import nodes as ir

_locks: dict[int, threading.Lock] = {}  # by process: another thread may hold the parent's lock at a fork


def backend_of_model(model: str) -> Backend:
    """The default backend: one engine per process, with that model."""
    with _locks.setdefault(os.getpid(), threading.Lock()):
        return _started(model)


@cache
def _started(model: str) -> Backend:
    with needs_extra("engine", f"a program on {model}"):
        from sgl.runtime.engine import Engine

    return engine_backend(Engine(model))


def engine_backend(engine: Any) -> Backend:
    """An engine's backend; always the same object."""
    known: Backend | None = getattr(engine, "_sgl_backend", None)
    if known is None:
        known = engine._sgl_backend = EngineBackend(engine)
    return known


class EngineBackend(Backend):
    """An engine with `open_program(program, sink) -> session`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.chat_template = engine.chat_template
        self.model_name = getattr(getattr(engine, "config", None), "model_name", None)

    def open(self, program: ir.Program, sink: ir.Sink) -> Session:
        session: Session = self._engine.open_program(program, sink)
        return session

    def flush_cache(self) -> bool:
        return bool(self._engine.flush_cache())

    def get_server_info(self) -> dict[str, Any] | None:
        return dict(self._engine.get_server_info())

    def shutdown(self) -> None:
        self._engine.shutdown()
