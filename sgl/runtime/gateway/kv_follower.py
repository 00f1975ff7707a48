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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from yarl import URL

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
        return None if (port := _port(endpoint)) is None else f"tcp://{host}:{port}"

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

    worker: str
    stream: KvStream
    most: int  # pages
    has_told: bool = False  # else it may be no engine, and what was sent there counts
    pages: dict[int, _Page] = field(default_factory=dict)


@dataclass(slots=True)
class Followed:
    """What is known of a worker's stream."""

    batches: int = 0
    gaps: int = 0
    blocks: int = 0


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
        # the thread's own
        self._engines: list[_Engine] = []
        self._names: dict[str, Counter[int]] = {}

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
                self._take_asked(context)
                poller = zmq.Poller()
                for engine in self._engines:
                    for socket in engine.stream.sockets:
                        poller.register(socket, zmq.POLLIN)
                if not self._engines:
                    self._stop.wait(_PAUSE_SECONDS)
                    continue
                ready = dict(poller.poll(int(_PAUSE_SECONDS * 1000)))
                began = time.monotonic()
                for engine in list(self._engines):
                    self._receive(engine, ready)
                self._stop.wait(min(time.monotonic() - began, _MOST_PAUSE))
            for engine in self._engines:
                engine.stream.close()

    def _take_asked(self, context: Any) -> None:
        while self._asked:
            worker, sources = self._asked.popleft()
            most = MOST_PAGES // max(1, len(sources))
            known = {its.stream.source: its for its in self._of(worker) if its.stream.source in sources}
            if not known or any(len(engine.pages) > most for engine in known.values()):
                known.clear()
                self._drop(worker)
            for engine in self._of(worker):
                engine.most = most
                if engine.stream.source not in known:  # it is gone: another has taken its place, or will
                    self._forget(engine)
                    engine.stream.close()
                    self._engines.remove(engine)
            for source in sources:
                if source in known:
                    continue
                try:
                    stream = KvStream(context, source, ends_with_connection=True)
                except zmq.ZMQError as error:
                    logger.warning("worker %s: its KV events cannot be followed: %s", worker, error)
                    self._drop(worker)
                    break
                self._engines.append(_Engine(worker, stream, most))
            if self._of(worker):
                self._soon(lambda worker=worker: self.workers.setdefault(worker, Followed()))

    def _receive(self, engine: _Engine, ready: Mapping[Any, int]) -> None:
        """Take what has come. Drop the worker if it sends no events."""
        if engine not in self._engines:  # its worker was dropped meanwhile
            return
        try:
            for news in engine.stream.receive(ready):
                if isinstance(news, EventBatch):
                    engine.has_told = True
                    self._take(engine, news)
                elif news is News.MISSED:
                    self._tell(lambda its: setattr(its, "gaps", its.gaps + 1), engine.worker)
                elif news is News.LOST:
                    self._forget(engine)
                elif engine.has_told:
                    self._clear(engine)
        except (zmq.ZMQError, msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
            logger.warning("worker %s: what it sends are no KV events: %s", engine.worker, error)
            self._drop(engine.worker)

    def _take(self, engine: _Engine, batch: EventBatch) -> None:
        changed = Counter[int]()
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._add(engine.worker, changed)
                changed = Counter()
                self._clear(engine)
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    if (page := engine.pages.pop(block, None)) is not None:
                        changed.subtract(page.names)
            else:
                _store(engine.pages, engine.most, event, changed)
        self._add(engine.worker, changed, batches=1)

    def _clear(self, engine: _Engine) -> None:
        """It has dropped everything, also what it has not told of."""
        self._forget(engine)
        if len(self._of(engine.worker)) == 1:
            self._apply(self._index.cleared, engine.worker)

    def _forget(self, engine: _Engine) -> None:
        """What was told holds no longer."""
        changed = Counter[int]()
        for page in engine.pages.values():
            changed.subtract(page.names)
        engine.pages.clear()
        self._add(engine.worker, changed)

    def _add(self, worker: str, changed: Counter[int], batches: int = 0) -> None:
        names = self._names.setdefault(worker, Counter())
        stored, removed = list[int](), list[int]()
        for name, number in changed.items():
            before, after = names[name], names[name] + number
            if after > 0:
                names[name] = after
            else:
                names.pop(name, None)
            if (before > 0) != (after > 0):
                (stored if after > 0 else removed).append(name)
        for start in range(0, len(stored), _PART):
            self._apply(self._index.stored, worker, stored[start : start + _PART])
        for start in range(0, len(removed), _PART):
            self._apply(self._index.removed, worker, removed[start : start + _PART])
        blocks = len(names)

        def note(its: Followed) -> None:
            its.batches, its.blocks = its.batches + batches, blocks

        self._tell(note, worker)

    def _drop(self, worker: str) -> None:
        """Follow it no longer: what it was sent counts, as if it had told nothing."""
        engines = self._of(worker)
        for engine in engines:
            engine.stream.close()
            self._engines.remove(engine)
        self._names.pop(worker, None)
        if engines:
            self._apply(self._index.tells_no_more, worker)
            self._soon(lambda: self.workers.pop(worker, None))

    def _of(self, worker: str) -> Sequence[_Engine]:
        return [engine for engine in self._engines if engine.worker == worker]

    def _tell(self, note: Any, worker: str) -> None:
        self._soon(lambda: note(self.workers[worker]) if worker in self.workers else None)

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


def _port(endpoint: Any) -> int | None:
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return None
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16 else None
