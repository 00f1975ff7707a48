"""Prompts that a prefill engine has computed, on offer to decode engines.

An offer is a copy in the transfer buffer, under a lease: the device's pages are held only until they are copied. What
is offered is bounded by the buffer, and each lease by its time.
"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sgl.errors import QueueFull
from sgl.runtime.batch import Int32Array, PendingMoves
from sgl.runtime.cache.keys import TOKEN_BYTES
from sgl.runtime.cache.node import Node
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.scheduler.request import Request
from sgl.runtime.transfer.offers import Offer, Offers
from sgl.runtime.transfer.params import VERSION, PageLayout, TransferParams, prompt_hash

MOST_OFFERS = 4096
POLL_SECONDS = 0.02  # between looks at leases
COPYING_POLL_SECONDS = 3e-4  # likewise at copies


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine's offers are read."""

    engine: str
    host: str
    port: int


class Serving(Protocol):
    """What lets other engines read the offers."""

    def close(self) -> None:
        """End it. Idempotent."""


@dataclass(slots=True, eq=False)
class _Copying:
    """An offer whose pages are being copied from the device."""

    offer: Offer
    node: Node  # locked until then
    move: PendingMoves | None = None


class Exports:
    """Of one scheduler. Single-threaded, but for `offers`."""

    def __init__(
        self,
        offers: Offers,
        server: Serving | None,
        address: EngineAddress,
        layout: PageLayout,
        secret: bytes,
        pool: PagePool,
        first_row: int,
        lease_seconds: float,
    ) -> None:
        """pool: of the buffer's pages, whose rows follow first_row."""
        self.offers = offers
        self.address = address
        self.num_offered = 0
        self.offered_pages = 0
        self.num_refused = 0
        self.num_expired = 0
        self._server = server
        self._layout = layout
        self._secret = secret
        self._pool = pool
        self._first_row = first_row
        self._seconds = lease_seconds
        self._copying: list[_Copying] = []
        self._pairs: list[Int32Array] = []

    def attach(self, cache: RadixCache) -> None:
        """The device's side."""
        self._cache = cache

    def offer(self, request: Request) -> dict[str, Any]:
        """The `kv_transfer_params` of a request that has just ended and whose whole prompt is cached. Raises
        QueueFull if there is no room."""
        key = request.key()[: TOKEN_BYTES * request.prompt_len]
        match = self._cache.match(key, request.namespace)
        num_pages = match.length // self._pool.page_size
        prompt = prompt_hash(self._layout, request.namespace, key[: TOKEN_BYTES * match.length])
        lease = secrets.token_bytes(16) if num_pages else b""
        if num_pages:
            self._add(Offer(lease, prompt, self._rows(num_pages), self.offers.clock() + self._seconds), match.node)
        layout, seconds = self._layout, math.ceil(self._seconds)
        params = TransferParams(
            version=VERSION,
            engine=self.address.engine,
            host=self.address.host,
            port=self.address.port,
            lease=lease.hex(),
            lease_seconds=seconds,
            lease_end=int(time.time()) + seconds,
            num_tokens=match.length,
            num_pages=num_pages,
            prompt=prompt.hex(),
            model=layout.model,
            dtype=layout.dtype,
            kv_cache_dtype=layout.kv_cache_dtype,
            page_size=layout.page_size,
            page_bytes=layout.page_bytes,
            tp_size=layout.tp_size,
            pp_size=layout.pp_size,
        )
        return params.to_dict(self._secret)

    def _rows(self, num_pages: int) -> list[int]:
        self._free_ended()
        pages = None if len(self.offers) >= MOST_OFFERS else self._pool.alloc(num_pages)
        if pages is None:
            self.num_refused += 1
            size = self._pool.page_size
            raise QueueFull(
                f"no room for a prompt's {num_pages * size} tokens in the transfer buffer, which holds "
                f"{(self._pool.num_pages - 1) * size} and has {self._pool.num_free * size} free: try again later, or "
                "give the engine a larger disaggregation_buffer_mb",
                limit=(self._pool.num_pages - 1) * size,
            )
        return [self._first_row + page for page in pages.tolist()]

    def _add(self, offer: Offer, node: Node) -> None:
        self._cache.lock(node)
        self._copying.append(_Copying(offer, node))
        self._pairs.append(np.stack((node.pages_from(0), np.array(offer.pages, np.int32)), axis=1))
        self.offers.add(offer)
        self.num_offered += 1
        self.offered_pages += len(offer.pages)

    # ── between steps ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def poll_seconds(self) -> float | None:
        """How soon `poll` wants to be called again; None: there is nothing under way."""
        if self._copying:
            return COPYING_POLL_SECONDS  # a reader waits
        return POLL_SECONDS if self._pool.num_free < self._pool.num_pages - 1 else None

    def poll(self) -> None:
        """Take up what has ended."""
        for copying in list(self._copying):
            if copying.move is not None and copying.move.is_saved():
                self._copying.remove(copying)
                self._cache.unlock(copying.node)
                copying.offer.is_copied.set()
        self._free_ended()

    def take(self) -> list[Int32Array]:
        """The (device page, row) pairs of the next move."""
        pairs, self._pairs = self._pairs, []
        return pairs

    def launched(self, move: PendingMoves) -> None:
        """What was taken is under way."""
        for copying in self._copying:
            copying.move = copying.move or move

    def _free_ended(self) -> None:
        for offer in self.offers.take_over():
            self.num_expired += offer.end <= self.offers.clock()
            self._pool.free(np.array(offer.pages, np.int32) - self._first_row)

    def close(self) -> None:
        """End all leases, and let nobody connect. Idempotent."""
        self.offers.clear()
        if self._server is not None:
            self._server.close()

    def private(self) -> list[Int32Array]:
        """Pages of the buffer that are taken, for the ledger."""
        return [np.array(offer.pages, np.int32) - self._first_row for offer in self.offers.held()]

    def locked(self) -> list[Node]:
        """The device nodes that are being copied, for the ledger."""
        return [copying.node for copying in self._copying]
