"""An engine in the server's own process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from sgl.lang import ir
from sgl.runtime.engine import Engine
from sgl.runtime.server.handle import Method, ProgramSession


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

    def silence(self) -> float:
        """See EngineHandle."""
        return 0.0

    async def close(self) -> None:
        """See EngineHandle."""
        await asyncio.to_thread(self._engine.shutdown)
