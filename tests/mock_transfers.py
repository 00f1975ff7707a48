"""Prefill and decode engines of the mock model, and reads between them that end, break and write late by chance.

A read writes page after page, and goes on for a while after it was cut or its time is up, as remote memory access does:
if a page were given to anybody else before it is quiet, that one's tokens would come out wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sgl.runtime.cache.pages import NeighbourPool
from sgl.runtime.scheduler.exports import EngineAddress, Exports
from sgl.runtime.scheduler.imports import Imports
from sgl.runtime.scheduler.transfers import Transfers
from sgl.runtime.transfer.offers import Offer, Offers
from sgl.runtime.transfer.params import PageLayout, TransferParams
from sgl.runtime.transfer.reader import Read
from tests.scheduler_driver import Driver, Setting

SECRET = b"a secret of the tests"
LEASE_SECONDS = 4.0


def layout_of(setting: Setting) -> PageLayout:
    return PageLayout(
        model="mock",
        dtype="int64",
        kv_cache_dtype="int64",
        page_size=setting.page_size,
        page_bytes=8 * setting.page_size,
        tp_size=1,
        pp_size=1,
    )


def prefill_driver(setting: Setting, name: str = "p") -> Driver:
    """An engine that offers prompts."""

    def make(driver: Driver) -> Transfers:
        assert setting.buffer_pages is not None
        pool, layout = NeighbourPool(setting.buffer_pages + 1, setting.page_size), layout_of(setting)
        offers = Offers(lambda: driver.now)
        exports = Exports(
            offers, None, EngineAddress(name, "127.0.0.1", 1), layout, SECRET, pool, driver.first_row, LEASE_SECONDS
        )
        return Transfers(pool, layout, SECRET, exports=exports)

    return Driver(setting, make)


def decode_driver(setting: Setting, reader: MockReader) -> Driver:
    """An engine that pulls prompts."""

    def make(driver: Driver) -> Transfers:
        assert setting.buffer_pages is not None
        pool, layout = NeighbourPool(setting.buffer_pages + 1, setting.page_size), layout_of(setting)
        reader.memory = driver.mover.memory
        imports = Imports(reader, layout, pool, driver.first_row, lambda: driver.now)
        return Transfers(pool, layout, SECRET, imports=imports)

    return Driver(setting, make)


@dataclass(eq=False)
class _Running:
    read: Read
    owner: Driver
    offer: Offer
    cut: Callable[[], None]
    at: int = 0
    left_after_cut: int = 0
    ended: bool = False


class MockReader:
    """See `reader.Reader`. engines: the prefill engines that live, by name."""

    def __init__(self, engines: dict[str, Driver], rng: random.Random) -> None:
        self.engines = engines
        self.memory = np.zeros((0, 0), np.uint8)
        self.running: list[_Running] = []
        self._rng = rng

    def read(self, params: TransferParams, prompt: bytes, first: int, pages: list[int]) -> Read:
        read = Read(params, prompt, first, pages, 0.0)
        engine = self.engines.get(params.engine)
        offers = None if engine is None else engine.scheduler.memory.transfers.exports.offers  # type: ignore[union-attr]
        offer = None if offers is None else offers.begin_read(bytes.fromhex(params.lease), prompt, read.cut)
        if engine is None or offer is None:
            read.error, read.is_done, read.is_quiet = "gone", True, True
            return read
        assert first + len(pages) <= len(offer.pages)
        running = _Running(read, engine, offer, read.cut, left_after_cut=self._rng.choice([0, 0, 1, 3]))
        self.running.append(running)
        return read

    def go_on(self) -> None:
        """Each read may move by a page."""
        for each in list(self.running):
            if self._rng.random() < 0.5:
                self._move(each)

    def _move(self, each: _Running) -> None:
        read, offer = each.read, each.offer
        lives = self.engines.get(read.params.engine) is each.owner
        if not each.ended and (read.is_cut or not lives):
            read.error, read.is_done = "cut", True
            self._end(each, is_last=False)
        if each.ended:
            if each.left_after_cut and each.at < len(read.pages):
                each.left_after_cut -= 1
                self.memory[read.pages[each.at]] = 255  # what a read that nobody checks leaves
                each.at += 1
                return
            read.is_quiet = True
            self.running.remove(each)
            return
        if not offer.is_copied.is_set():
            return
        if each.at < len(read.pages):
            source = offer.pages[read.first + each.at]
            self.memory[read.pages[each.at]] = each.owner.mover.memory[source]
            each.at += 1
            read.num_good = each.at
            return
        read.is_done = read.is_quiet = True
        self._end(each, is_last=True)
        self.running.remove(each)

    def _end(self, each: _Running, *, is_last: bool) -> None:
        each.ended = True
        exports = each.owner.scheduler.memory.transfers.exports  # type: ignore[union-attr]
        exports.offers.end_read(each.offer, each.cut, each.at, is_last=is_last)  # type: ignore[union-attr]

    def close(self) -> None:
        for each in self.running:
            each.read.cut()
