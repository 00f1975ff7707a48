"""Reads JSON bodies: small ones in place, others in processes, of which few run at once. So no body, however large or
strange, holds up other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from sgl.runtime.server.bodies import check_number, most_values
from sgl.runtime.server.body_process import BodyProcesses

T = TypeVar("T")

SMALL_BYTES, SMALL_VALUES = 1 << 20, 1 << 14
"""Bodies below both limits take a millisecond, or a few."""
AT_ONCE = 2
"""Processes."""

_FEW_BYTES = 4096  # hold few values


class Reader:
    """Of one gateway."""

    def __init__(self) -> None:
        self._processes = BodyProcesses(
            [f"sgl.runtime.gateway.{name}" for name in ("demands", "openings", "pairs", "replies")]
        )
        self.turns = asyncio.Semaphore(AT_ONCE)
        self.num_reading = 0
        """Bodies that are read in a process, or wait for one."""

    async def read(self, function: Callable[..., T], data: bytes | bytearray, *arguments: Any) -> T:
        """What a module's function gives for a body and more. Raises InvalidRequest, if it does, or the body takes too
        much time or memory."""
        if len(data) <= _FEW_BYTES or (len(data) <= SMALL_BYTES and most_values(data) <= SMALL_VALUES):
            return function(data, *arguments)
        self.num_reading += 1
        try:
            return await self._processes.run(self.turns, _called, data, function, *arguments)
        finally:
            self.num_reading -= 1

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def _called(data: bytes, function: Callable[..., T], *arguments: Any) -> T:
    check_number(data)
    return function(data, *arguments)
