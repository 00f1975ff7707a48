"""Prefill apart from decode: what one engine offers, or pulls, and the buffer that it goes through."""

from __future__ import annotations

import statistics
from typing import Any

from sgl.runtime.batch import Int32Array, Mover, PageMoves, joined
from sgl.runtime.cache.in_flight import InFlight
from sgl.runtime.cache.ledger import check
from sgl.runtime.cache.node import Node
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.scheduler.exports import Exports
from sgl.runtime.scheduler.imports import POLL_SECONDS, Imports
from sgl.runtime.scheduler.leases import Leases
from sgl.runtime.scheduler.request import Request
from sgl.runtime.transfer.params import PageLayout

NO_TRANSFERS = dict.fromkeys(
    (
        *("transfer_total_tokens", "transfer_used_tokens", "num_transfer_leases", "num_transfers_offered"),
        *("num_transfers_refused", "num_transfers_expired", "transfer_offered_tokens", "transfer_sent_tokens"),
        *("transfer_sent_bytes", "num_transfers_pulled", "num_transfers_failed", "transfer_pulled_tokens"),
        *("transfer_pulled_bytes", "transfer_pull_seconds"),
    ),
    0,
)
"""`Transfers.state` without any."""


class Transfers:
    """Of one scheduler. Single-threaded. A prefill engine has `exports`, a decode engine `imports`."""

    def __init__(
        self,
        pool: PagePool,
        layout: PageLayout,
        secret: bytes,
        exports: Exports | None = None,
        imports: Imports | None = None,
    ) -> None:
        """pool: of the buffer. secret: what `kv_transfer_params` are signed with."""
        self.layout = layout
        self.secret = secret
        self.exports = exports
        self.imports = imports
        self._sides = [side for side in (imports, exports) if side is not None]
        self._pool = pool

    def attach(self, cache: RadixCache, in_flight: InFlight, leases: Leases) -> None:
        """The device's side."""
        if self.exports is not None:
            self.exports.attach(cache)
        if self.imports is not None:
            self.imports.attach(cache, in_flight, leases)

    @property
    def poll_seconds(self) -> float | None:
        """How soon `poll` wants to be called again; None: there is nothing under way."""
        if self.is_busy:
            return POLL_SECONDS
        return None if self.exports is None else self.exports.poll_seconds

    @property
    def is_busy(self) -> bool:
        """Whether a pull is under way."""
        return self.imports is not None and self.imports.is_busy

    def poll(self) -> None:
        """Take up what has ended. Before a step is scheduled."""
        for side in self._sides:
            side.poll()

    def launch(self, mover: Mover) -> None:
        """Have pages copied. After a step is scheduled and before it is launched."""
        saves = [] if self.exports is None else self.exports.take()
        loads = [] if self.imports is None else self.imports.take()
        if saves or loads:
            move = mover.move(PageMoves(joined(saves), joined(loads)))
            for side in self._sides:
                side.launched(move)

    def left_queue(self, request: Request) -> None:
        """A request has a row, or has ended."""
        if self.imports is not None:
            self.imports.left_queue(request)

    def clear(self) -> None:
        """Hold nothing for prompts that are to come."""
        if self.imports is not None:
            self.imports.clear()

    def state(self) -> dict[str, Any]:
        """For users: what moved since the start, and what is under way."""
        size, exports, imports = self._pool.page_size, self.exports, self.imports
        state: dict[str, Any] = {
            **NO_TRANSFERS,
            "transfer_total_tokens": (self._pool.num_pages - 1) * size,
            "transfer_used_tokens": (self._pool.num_pages - 1 - self._pool.num_free) * size,
        }
        if exports is not None:
            state |= {
                "num_transfer_leases": len(exports.offers),
                "num_transfers_offered": exports.num_offered,
                "num_transfers_refused": exports.num_refused,
                "num_transfers_expired": exports.num_expired,
                "transfer_offered_tokens": exports.offered_pages * size,
                "transfer_sent_tokens": exports.offers.num_read_pages * size,
                "transfer_sent_bytes": exports.offers.num_read_pages * self.layout.page_bytes,
            }
        if imports is not None:
            counts = imports.counts
            state |= {
                "num_transfers_pulled": counts.num_pulls,
                "num_transfers_failed": counts.num_failed,
                "transfer_pulled_tokens": counts.pages * size,
                "transfer_pulled_bytes": counts.pages * self.layout.page_bytes,
                "transfer_pull_seconds": counts.seconds,
                "transfer_pull_parts": {
                    name: statistics.median(parts[name] for parts in counts.parts if name in parts)
                    for name in dict.fromkeys(name for parts in counts.parts for name in parts)
                },
            }
        return state

    def close(self) -> None:
        """End all leases, and all reads. After the last step. Idempotent."""
        for side in reversed(self._sides):
            side.close()

    def incoming(self) -> list[Int32Array]:
        """Device pages that are under way, for the ledger."""
        return [] if self.imports is None else self.imports.incoming()[0]

    def locked(self) -> list[Node]:
        """The device nodes that are held, for the ledger."""
        return [node for side in self._sides for node in side.locked()]

    def check(self) -> list[str]:
        """Breaches of ownership of the buffer's pages."""
        private = [] if self.exports is None else self.exports.private()
        incoming = [] if self.imports is None else self.imports.incoming()[1]
        problems = check(self._pool, RadixCache(self._pool), private, [], incoming)
        return [f"transfer buffer: {problem}" for problem in problems]
