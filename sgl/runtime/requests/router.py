"""Carries outputs from the loop's thread to callers in threads or event loops."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from typing import Protocol

from sgl.errors import EngineDead
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.loop.submission import Output

_POLL_SECONDS = 1.0  # between checks whether the loop lives


class Sink(Protocol):
    """Where the outputs of one call go. The loop's thread calls `put`, which must not block."""

    def put(self, outputs: list[Output]) -> None:
        """Take outputs of one step."""


class ThreadSink(Sink):
    """For a caller that blocks its thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._queue: queue.SimpleQueue[Output] = queue.SimpleQueue()

    def put(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._queue.put(output)

    def get(self) -> Output:
        """The next output. Raises EngineDead if the loop ended without one."""
        self._loop.process.check()
        while True:
            try:
                return self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._loop.has_ended and self._queue.empty():
                    raise EngineDead("the engine stopped without an answer") from None


class AsyncSink(Sink):
    """For a caller in an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[Output] = asyncio.Queue()

    def put(self, outputs: list[Output]) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's event loop is closed
            self._loop.call_soon_threadsafe(self._put_all, outputs)

    def _put_all(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._queue.put_nowait(output)

    async def get(self) -> Output:
        """The next output."""
        return await self._queue.get()


class OutputRouter:
    """Maps requests to the sinks of their calls."""

    def __init__(self) -> None:
        self._sinks: dict[int, Sink] = {}

    def expect(self, uids: list[int], sink: Sink) -> None:
        """Send outputs of these requests to the sink."""
        for uid in uids:
            self._sinks[uid] = sink

    def forget(self, uids: list[int]) -> None:
        """Drop outputs of these requests."""
        for uid in uids:
            self._sinks.pop(uid, None)

    def deliver(self, outputs: list[Output]) -> None:
        """Hand out one step's outputs, grouped by sink."""
        by_sink: dict[Sink, list[Output]] = {}
        for output in outputs:
            sink = self._sinks.get(output.uid)
            if sink is not None:
                by_sink.setdefault(sink, []).append(output)
        for sink, its in by_sink.items():
            sink.put(its)
