"""The interface between the language and what executes it: a `Backend` opens sessions, a `Session` takes segments and
emits events. Backends of single calls derive from `sgl.lang.backends.steps.TextBackend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from sgl.lang.ir import nodes as ir


class Session(Protocol):
    """A running program. Called on the io thread; must not block."""

    def send(self, segment: ir.Segment) -> None:
        """Take nodes or answers. Raises errors or emits `NodeFailed`."""

    def cancel(self) -> None:
        """Give up and release everything, silently. Idempotent; callable at any time."""


class Backend(ABC):
    """Executes programs. `model_name`: if known."""

    model_name: str | None = None

    @abstractmethod
    def open(self, program: ir.Program, sink: ir.Sink) -> Session:
        """Start a program, on the io thread. `sink` gets its events in order, one at a time, from any thread."""

    def flush_cache(self) -> bool:
        """Drop cached prefixes; returns whether there is such a cache."""
        return False

    def get_server_info(self) -> dict[str, Any] | None:
        """Information about itself."""
        return None

    def cache_prefix(self, text: str) -> None:  # noqa: B027 - most backends need no hint
        """A hint that many prompts begin with `text`."""

    def shutdown(self) -> None:  # noqa: B027 - most backends hold nothing
        """Release everything; running programs fail."""
