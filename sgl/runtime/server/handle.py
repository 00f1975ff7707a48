"""What the server asks of an engine, and the engine of its own process that answers it.

`sgl.runtime.server.process` has the other implementation, for an engine in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Literal, Protocol

from sgl.lang import ir
from sgl.runtime.config import EngineConfig
from sgl.runtime.engine import Engine
from sgl.runtime.text.tokenizer import Tokenizer

Method = Literal["abort", "flush_cache", "get_server_info", "check_ledger"]


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

    async def close(self) -> None:
        """Stop the engine: whoever still waits gets EngineDead. Idempotent."""


class LocalEngine:
    """An engine in the server's own process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.config = engine.config
        self.tokenizer = engine.tokenizer

    async def generate(self, **arguments: Any) -> Any:
        """See EngineHandle."""
        return await self._engine.async_generate(**arguments)

    async def stream(self, **arguments: Any) -> AsyncGenerator[dict[str, Any], None]:
        """See EngineHandle."""
        events = await self._engine.async_generate(**arguments, stream=True)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    def open_program(self, program: ir.Program, sink: ir.Sink) -> ProgramSession:
        """See EngineHandle."""
        loop = asyncio.get_running_loop()

        def on_loop(event: ir.Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(sink, event)

        return self._engine.open_program(program, on_loop)

    async def call(self, method: Method, *arguments: Any) -> Any:
        """See EngineHandle."""
        return await asyncio.to_thread(getattr(self._engine, method), *arguments)

    def heartbeat_age(self) -> float:
        """See EngineHandle."""
        return self._engine.heartbeat_age()

    async def close(self) -> None:
        """See EngineHandle."""
        await asyncio.to_thread(self._engine.shutdown)
