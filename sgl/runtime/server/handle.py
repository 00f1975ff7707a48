"""What the server asks of an engine; `process` answers it by one in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal, Protocol

from sgl.lang import ir
from sgl.runtime.config import EngineConfig
from sgl.runtime.text.tokenizer import Tokenizer

Method = Literal["abort", "flush_cache", "get_server_info", "check_ledger", "start_profile", "stop_profile"]


class ProgramSession(Protocol):
    """A program under execution; neither method blocks."""

    def send(self, segment: ir.Segment) -> None:
        """Take the next segment. Raises InvalidRequest and EngineDead."""

    def cancel(self) -> None:
        """Give up and release everything. Idempotent."""


class EngineHandle(Protocol):
    """An engine as seen from the server's event loop."""

    config: EngineConfig  # with every "auto" decided
    tokenizer: Tokenizer | None

    async def generate(self, **arguments: Any) -> Any:
        """Engine.async_generate. Cancelling it aborts the requests. Raises what the engine raises; EngineDead
        while it is not there."""

    def stream(self, **arguments: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The events of Engine.async_generate(stream=True). Closing the generator aborts what is not finished."""

    def open_program(self, program: ir.Program, sink: ir.Sink) -> ProgramSession:
        """Engine.open_program, with events on the server's event loop. Raises InvalidRequest and EngineDead."""

    async def call(self, method: Method, *arguments: Any) -> Any:
        """A method of the engine that takes and returns plain data."""

    def heartbeat_age(self) -> float:
        """For how many seconds the engine has been silent or at its present step; infinite when it is dead."""

    def silence(self) -> float:
        """For how many seconds nothing was heard of the engine's process, busy or not: it is stopped, or its machine
        is worn out."""

    async def close(self) -> None:
        """Stop the engine: whoever still waits gets EngineDead. Idempotent."""
