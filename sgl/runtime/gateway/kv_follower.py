"""Follows workers' KV events: which beginnings of token ids each has computed, as far as a request's names reach.

A thread of its own receives, replays what was missed, and names blocks as requests' are named; the event loop gets what
changed, in small parts. A worker may send anything: who sends what is no event is followed no longer, nobody is read
faster than half a core, and what is kept of each is bounded."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from yarl import URL

from sgl.numerals import port
from sgl.runtime.gateway.index import PrefixIndex, namespace_of
from sgl.runtime.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from sgl.runtime.server.kv_stream import KvStream, News, Source
from sgl.runtime.server.placement import BLOCK_IDS, MOST_BLOCKS, first_name, next_name

logger = logging.getLogger(__name__)

MOST_PAGES = 100_000
"""Kept of a worker. Further ones are unknown."""
MOST_ENGINES = 64
"""Of a worker."""

_PAUSE_SECONDS = 0.2  # until new workers are noticed
_MOST_PAUSE = 0.5
_PART = 1000  # names that the event loop takes at once
_PARTS = 8  # that wait for it


def sources_of(info: Mapping[str, Any], url: str) -> list[Source]:
    """Of what a server says of itself: an engine each. They are at the server's own host, whatever it says."""
    host = URL(url).raw_host or ""
    host = f"[{host}]" if ":" in host else host

    def at(endpoint: Any) -> str | None:
        start, _, its = str(endpoint).rpartition(":")
        number = port(its) if start.startswith("tcp://") else None
        return f"tcp://{host}:{number}" if number else None

    states = [each for each in info["internal_states"] if isinstance(each, dict)]
    found = [(at(each.get("kv_events")), at(each.get("kv_events_replay"))) for each in states[:MOST_ENGINES]]
    return list(dict.fromkeys(Source(events, replay) for events, replay in found if events is not None))


@dataclass(slots=True)
class _Page:
    """A page's place in a chain: the name of the last whole block, the ids after it, and which blocks it completes."""

    state: int
    left: tuple[int, ...]
    depth: int
    names: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Engine:
    """One engine that is followed."""

    stream: KvStream
    most: int  # pages
    has_told: bool = False  # else it may be no engine, and what was sent there counts
    pages: dict[int, _Page] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Followed:
    """What is known of a worker's streams."""

    worker: str
    batches: int = 0
    gaps: int = 0
    blocks: int = 0
    engines: list[_Engine] = field(default_factory=list)  # the thread's own
    names: Counter[int] = field(default_factory=Counter)  # likewise


class KvFollower:
    """Of one gateway. The thread starts with the first worker that tells."""

    def __init__(self, index: PrefixIndex) -> None:
        self.workers: dict[str, Followed] = {}
        """Those that are followed."""
        self._index = index
        self._sources: dict[str, list[Source]] = {}
        self._asked: deque[tuple[str, list[Source]]] = deque()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = threading.Semaphore(_PARTS)
        self._followed: dict[str, Followed] = {}  # the thread's own

    def follow(self, worker: str, sources: list[Source]) -> None:
        """From now on, at these; at none: no longer. Idempotent. Call it on the event loop."""
        if self._sources.get(worker, []) == sources:
            return
        self._sources[worker] = sources
        if not sources:
            del self._sources[worker]
            self.workers.pop(worker, None)
            self._index.tells_no_more(worker)
        self._asked.append((worker, sources))
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="sgl-kv-follower", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        with zmq.Context() as context:
            while not self._stop.is_set():
                while self._asked:
                    self._change(context, *self._asked.popleft())
                if not self._followed:
                    self._stop.wait(_PAUSE_SECONDS)
                    continue
                poller = zmq.Poller()
                for engine in (each for its in self._followed.values() for each in its.engines):
                    for socket in engine.stream.sockets:
                        poller.register(socket, zmq.POLLIN)
                ready = dict(poller.poll(int(_PAUSE_SECONDS * 1000)))
                began = time.monotonic()
                for its in list(self._followed.values()):
                    self._receive(its, ready)
                self._stop.wait(min(time.monotonic() - began, _MOST_PAUSE))
            for its in self._followed.values():
                for engine in its.engines:
                    engine.stream.close()

    def _change(self, context: Any, worker: str, sources: list[Source]) -> None:
        """Follow a worker there."""
        its, most = self._followed.get(worker) or Followed(worker), MOST_PAGES // max(1, len(sources))
        known = [engine for engine in its.engines if engine.stream.source in sources]
        if not known or any(len(engine.pages) > most for engine in known):
            self._drop(its)
            its, known = Followed(worker), []
        for engine in list(its.engines):
            engine.most = most
            if engine not in known:  # it is gone: another has taken its place, or will
                self._forget(its, engine)
                engine.stream.close()
                its.engines.remove(engine)
        try:
            for source in sources:
                if source not in [engine.stream.source for engine in known]:
                    its.engines.append(_Engine(KvStream(context, source, ends_with_connection=True), most))
        except zmq.ZMQError as error:
            logger.warning("worker %s: its KV events cannot be followed: %s", worker, error)
            self._drop(its)
        if its.engines:
            self._followed[worker] = its
            self._soon(lambda: self.workers.setdefault(worker, its))

    def _receive(self, its: Followed, ready: Mapping[Any, int]) -> None:
        """Take what has come. Drop the worker if it sends no events."""
        try:
            for engine in its.engines:
                for news in engine.stream.receive(ready):
                    if isinstance(news, EventBatch):
                        engine.has_told = True
                        self._take(its, engine, news)
                    elif news is News.MISSED:
                        its.gaps += 1
                    elif news is News.LOST:
                        self._forget(its, engine)
                    elif engine.has_told:
                        self._clear(its, engine)
        except (zmq.ZMQError, msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
            logger.warning("worker %s: what it sends are no KV events: %s", its.worker, error)
            self._drop(its)

    def _take(self, its: Followed, engine: _Engine, batch: EventBatch) -> None:
        changed = Counter[int]()
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._add(its, changed)
                changed = Counter()
                self._clear(its, engine)
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    if (page := engine.pages.pop(block, None)) is not None:
                        changed.subtract(page.names)
            else:
                _store(engine.pages, engine.most, event, changed)
        self._add(its, changed, batches=1)

    def _clear(self, its: Followed, engine: _Engine) -> None:
        """It has dropped everything, also what it has not told of."""
        self._forget(its, engine)
        if len(its.engines) == 1:
            self._apply(self._index.cleared, its.worker)

    def _forget(self, its: Followed, engine: _Engine) -> None:
        """What was told holds no longer."""
        changed = Counter[int]()
        for page in engine.pages.values():
            changed.subtract(page.names)
        engine.pages.clear()
        self._add(its, changed)

    def _add(self, its: Followed, changed: Counter[int], batches: int = 0) -> None:
        stored, removed = list[int](), list[int]()
        for name, number in changed.items():
            before, after = its.names[name], its.names[name] + number
            if after > 0:
                its.names[name] = after
            else:
                its.names.pop(name, None)
            if (before > 0) != (after > 0):
                (stored if after > 0 else removed).append(name)
        for function, found in ((self._index.stored, stored), (self._index.removed, removed)):
            for start in range(0, len(found), _PART):
                self._apply(function, its.worker, found[start : start + _PART])
        blocks = len(its.names)

        def note() -> None:  # once the index has them
            its.batches, its.blocks = its.batches + batches, blocks

        self._soon(note)

    def _drop(self, its: Followed) -> None:
        """Follow it no longer: what it was sent counts, as if it had told nothing."""
        for engine in its.engines:
            engine.stream.close()
        its.engines.clear()
        if self._followed.pop(its.worker, None) is not None:
            self._apply(self._index.tells_no_more, its.worker)
            self._soon(lambda: self.workers.pop(its.worker, None))

    def _apply(self, function: Any, worker: str, *arguments: Any) -> None:
        """On the event loop, which does not fall behind by more than a few parts."""
        while not self._room.acquire(timeout=_PAUSE_SECONDS):
            if self._stop.is_set():
                return

        def apply() -> None:
            self._room.release()
            if worker in self._sources:
                function(worker, *arguments)

        self._soon(apply)

    def _soon(self, function: Any) -> None:
        assert self._loop is not None, "the thread runs"
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # it is closed
            self._stop.set()


def _store(pages: dict[int, _Page], most: int, event: BlockStored, changed: Counter[int]) -> None:
    """Note an event's blocks. Raises ValueError if it contradicts itself."""
    size, ids = event.block_size, event.token_ids
    if size < 1 or len(ids) != size * len(event.block_hashes):
        raise ValueError(f"{len(event.block_hashes)} blocks of {size} tokens cannot have {len(ids)}")
    keys, adapter = event.extra_keys or [None] * len(event.block_hashes), event.lora_name
    if len(keys) != len(event.block_hashes):
        raise ValueError(f"{len(event.block_hashes)} blocks cannot have the extra keys of {len(keys)}")
    if event.medium not in (None, "GPU") or (event.lora_id is not None and adapter is None):
        return
    if event.parent_block_hash is None:
        first = [key for place, key in enumerate(keys[0] or ()) if place or key != adapter] if keys else []
        if len(first) > 1 or not all(isinstance(key, str) for key in first):
            return  # it depends on more than a request's blocks are named by
        last = _Page(first_name(BLOCK_IDS, namespace_of(first[0] if first else None, adapter)), (), 0, ())
        keys = [None, *keys[1:]]
    elif event.parent_block_hash in pages:
        last = pages[event.parent_block_hash]
    else:
        return  # what is above was not told, or reaches farther than a request's names
    for number, block in enumerate(event.block_hashes):
        if last.depth >= MOST_BLOCKS or len(pages) >= most or keys[number] not in (None, [], [adapter]):
            return
        state, left, names = last.state, (*last.left, *ids[number * size : (number + 1) * size]), list[int]()
        while len(left) >= BLOCK_IDS and last.depth + len(names) < MOST_BLOCKS:
            state = next_name(state, left[:BLOCK_IDS])
            left = left[BLOCK_IDS:]
            names.append(state)
        if (known := pages.get(block)) is not None:
            changed.subtract(known.names)
        last = pages[block] = _Page(state, left[:BLOCK_IDS], last.depth + len(names), tuple(names))
        changed.update(names)
