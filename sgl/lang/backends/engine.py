"""Runs programs on an `Engine` in this process: no HTTP, no JSON.

An engine that executes programs gets segments as they are; one that only generates gets single calls. It knows the
engine's public methods and imports nothing of the runtime.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from sgl.lang import ir
from sgl.lang.backends.base import Backend, Session
from sgl.lang.choices import Scores
from sgl.lang.steps import Completion, GenParams, Prompt, TextBackend


def engine_backend(engine: Any) -> Backend:
    """The backend of an engine; the same one each time."""
    known = getattr(engine, "_sgl_backend", None)
    if known is None:
        known = ProgramEngineBackend(engine) if hasattr(engine, "open_program") else EngineBackend(engine)
        engine._sgl_backend = known
    return known  # type: ignore[no-any-return]


class ProgramEngineBackend(Backend):
    """An engine with `open_program(program, sink) -> session`, an executor beside its scheduler."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def chat_template(self) -> Any:
        return getattr(self._engine, "chat_template", None)

    def open(self, program: ir.Program, sink: ir.Sink) -> Session:
        session: Session = self._engine.open_program(program, sink)
        return session

    def flush_cache(self) -> bool:
        return bool(self._engine.flush_cache())

    def get_server_info(self) -> dict[str, Any] | None:
        return dict(self._engine.get_server_info())

    def shutdown(self) -> None:
        self._engine.shutdown()


class EngineBackend(TextBackend):
    """An engine used call by call."""

    constraints: ClassVar[frozenset[str]] = frozenset({"regex", "json", "ebnf"})  # the engine refuses what it cannot

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.chat_template = getattr(engine, "chat_template", None)
