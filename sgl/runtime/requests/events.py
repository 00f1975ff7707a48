"""The events of a streamed call, for a thread that iterates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from sgl.runtime.requests.results import PreparedCall
from sgl.runtime.requests.router import ThreadSink


class Events(Iterator[dict[str, Any]]):
    """The events of a call. Exhausting, closing or dropping it abandons the call."""

    def __init__(self, call: PreparedCall, sink: ThreadSink, abandon: Callable[[PreparedCall], None]) -> None:
        self._call = call
        self._sink = sink
        self._finalizer = weakref.finalize(self, abandon, call)

    def __next__(self) -> dict[str, Any]:
        if not self._call.unfinished or not self._finalizer.alive:
            self.close()
            raise StopIteration
        try:
            output = self._sink.get()
            self._call.absorb(output)
            return self._call.event(output.uid)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort unfinished requests. Idempotent."""
        self._finalizer()
