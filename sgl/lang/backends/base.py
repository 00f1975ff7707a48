"""What a program runs on: the one interface between the language and whatever executes it.

A `Backend` opens sessions; a `Session` takes segments and answers with events. Backends that only know single calls
derive from `sgl.lang.backends.steps.TextBackend`, which interprets segments for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from sgl.lang.ir import nodes as ir


class Session(Protocol):
    """One program under execution. Both methods are called on the io thread and must not block."""

    def send(self, segment: ir.Segment) -> None:
        """Take the next nodes or answers. What goes wrong is raised here or reported as a `NodeFailed` event."""

    def cancel(self) -> None:
        """Give up and release everything; no events need follow. Safe to call at any time, also twice."""


class Backend(ABC):
    """Executes programs. `model_name`: what answers, where that is known."""

    model_name: str | None = None

    @abstractmethod
    def open(self, program: ir.Program, sink: ir.Sink) -> Session:
        """Start a program. Called on the io thread, must not block. Events go to `sink` from any thread, in order
        and one at a time: those of each node, then `Done` once the final segment is done or everything failed."""

    def flush_cache(self) -> bool:
        """Drop cached prefixes, where the backend has such a cache; returns whether it did."""
        return False

    def get_server_info(self) -> dict[str, Any] | None:
        """What the backend says about itself."""
        return None

    def cache_prefix(self, text: str) -> None:  # noqa: B027 - most backends need no hint
        """A hint that many prompts will begin with `text`."""

    def shutdown(self) -> None:  # noqa: B027 - most backends hold nothing
        """Release what the backend holds. Programs still running fail."""
