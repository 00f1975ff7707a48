"""What the server did lately, for its page: numbers over time, and requests. It keeps no texts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sgl.errors import SglError
from sgl.runtime.server.identity import Caller
from sgl.runtime.server.replies import RequestRecord, Sample

SECONDS: Final = 2.0
"""Between two samples."""
SAMPLES: Final = 300
ENDED: Final = 200
"""Requests of each key that are remembered after their end."""
_SHOWN_OPEN = 200
_NAMES = (
    "num_running_reqs",
    "num_queue_reqs",
    "kv_available_tokens",
    "kv_evictable_tokens",
    "prompt_tokens",
    "cached_tokens",
    "host_total_tokens",
    "host_used_tokens",
    "host_loaded_tokens",
    "transfer_total_tokens",
    "transfer_pulled_tokens",
    "transfer_sent_tokens",
    "generated_tokens",
    "finished",
)
"""Of the engine's state."""


@dataclass(slots=True)
class Note:
    """A request that generates, as its owner may see it."""

    id: str
    path: str
    owner: str | None
    started: float  # seconds since the epoch
    seconds: float | None = None  # None: it goes on
    status: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    outputs: int = 0  # finished
    is_kept: bool = False

    def finished(self, meta: Mapping[str, Any]) -> None:
        """One of its outputs has ended."""
        self.outputs += 1
        self.prompt_tokens += meta.get("prompt_tokens") or 0
        self.cached_tokens += meta.get("cached_tokens") or 0
        self.completion_tokens += meta.get("completion_tokens") or 0

    def shown(self) -> Any:
        """As JSON."""
        seconds = time.time() - self.started if self.seconds is None else self.seconds
        return {name: getattr(self, name) for name in RequestRecord.__annotations__} | {"seconds": seconds}


note: ContextVar[Note | None] = ContextVar("note", default=None)
"""Of the current task's request."""


class History:
    """Samples of the engine's state, and requests."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._open: dict[int, Note] = {}
        self._ended: defaultdict[str | None, deque[Note]] = defaultdict(partial(deque, maxlen=ENDED))
        """By owner, so that none pushes out another's."""

    def generates(self) -> None:
        """The current request generates: it is shown."""
        current = note.get()
        if current is not None and not current.is_kept:
            current.is_kept = True
            self._open[id(current)] = current

    def ended(self, current: Note, status: int) -> None:
        """A request was answered; 499: its client left."""
        if self._open.pop(id(current), None) is not None:
            current.seconds, current.status = time.time() - current.started, status
            self._ended[current.owner].append(current)

    def requests(self, caller: Caller) -> list[RequestRecord]:
        """The caller's, those that go on first, then the latest; each kind is bounded."""
        going = [each for each in self._open.values() if caller.may_reach(each.owner)][:_SHOWN_OPEN]
        ended = [each for owner, its in self._ended.items() if caller.may_reach(owner) for each in its]
        ended.sort(key=lambda each: each.started + (each.seconds or 0.0), reverse=True)
        return [each.shown() for each in [*going, *ended[:ENDED]]]

    def samples(self) -> list[Sample]:
        """The numbers of the last minutes, oldest first. One without an engine's numbers: it did not serve."""
        return list(self._samples)

    @contextlib.asynccontextmanager
    async def sampling(self, state: Callable[[], Awaitable[Mapping[str, Any]]]) -> AsyncIterator[None]:
        """Within the context, take a sample every so often."""
        task = asyncio.ensure_future(self._sample(state))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _sample(self, state: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        while True:
            sample: Sample = {"time": time.time(), "engine": None}
            with contextlib.suppress(SglError, TimeoutError):
                async with asyncio.timeout(SECONDS):  # `wait_for` may swallow a cancellation (Python 3.11)
                    found = await state()
                sample["engine"] = {name: found[name] for name in _NAMES}
            self._samples.append(sample)
            await asyncio.sleep(SECONDS)
