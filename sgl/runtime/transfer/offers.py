"""Pages of a transfer buffer on offer to other engines, each prompt's under a lease.

The scheduler's thread adds offers and takes back those that are over; the server's threads read them. An offer's pages
are nobody else's until no read of it goes on: a lease that ends cuts its reads first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Offer:
    """Pages of one prompt."""

    lease: bytes  # 16 random bytes
    prompt: bytes  # its `prompt_hash`
    pages: list[int]  # rows of the buffer
    end: float  # on the clock
    is_copied: threading.Event = field(default_factory=threading.Event)
    """The pages hold what they should."""
    cuts: list[Callable[[], None]] = field(default_factory=list)  # one for each read that goes on: ends it
    checksums: list[int] | None = None  # of the pages, once somebody asked


class Offers:
    """Of one engine. Safe from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.num_read_pages = 0
        """That were sent to other engines."""
        self._lock = threading.Lock()
        self._offers: dict[bytes, Offer] = {}
        self._over: list[Offer] = []  # of which reads go on, or copies

    def __len__(self) -> int:
        return len(self._offers)

    def add(self, offer: Offer) -> None:
        """Begin a lease."""
        with self._lock:
            self._offers[offer.lease] = offer

    def begin_read(self, lease: bytes, prompt: bytes, cut: Callable[[], None]) -> Offer | None:
        """The offer under a lease, if it is of this prompt and not over. End it by `end_read`. cut: ends the read from
        another thread, when the lease ends."""
        with self._lock:
            offer = self._offers.get(lease)
            if offer is None or offer.prompt != prompt or offer.end <= self.clock():
                return None
            offer.cuts.append(cut)
            return offer

    def end_read(self, offer: Offer, cut: Callable[[], None], num_pages: int, *, is_last: bool) -> None:
        """A read has ended. num_pages: of them sent. is_last: the reader needs nothing more."""
        with self._lock:
            offer.cuts.remove(cut)
            self.num_read_pages += num_pages
            if is_last:
                self._end(offer)

    def take_over(self) -> list[Offer]:
        """Offers that are over and that nobody reads or copies any more, each once."""
        with self._lock:
            now = self.clock()
            for offer in [each for each in self._offers.values() if each.end <= now]:
                self._end(offer)
            free = [offer for offer in self._over if not offer.cuts and offer.is_copied.is_set()]
            self._over = [offer for offer in self._over if offer not in free]
            return free

    def end(self, lease: bytes) -> bool:
        """End a lease before its time is up; whether there was one."""
        with self._lock:
            offer = self._offers.get(lease)
            if offer is not None:
                self._end(offer)
            return offer is not None

    def clear(self) -> None:
        """End all leases."""
        with self._lock:
            for offer in list(self._offers.values()):
                self._end(offer)

    def held(self) -> list[Offer]:
        """All whose pages are taken, for the ledger."""
        with self._lock:
            return [*self._offers.values(), *self._over]

    def _end(self, offer: Offer) -> None:
        if self._offers.pop(offer.lease, None) is None:
            return
        self._over.append(offer)
        for cut in offer.cuts:
            cut()
