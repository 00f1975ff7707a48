"""The caches' events by gRPC: a relay of what the engines of a server publish over ZeroMQ (option `kv_events`).

A thread reads the engines' batches and keeps the latest, and which blocks each engine has. A subscriber gets what is
kept from its place on, as fast as it reads. Who comes without a place, or has fallen behind all that is kept, gets a
snapshot of the blocks first, one that all share while what came after it is kept. The batches of all engines have one
row of numbers, which begins at the time of the start: what an earlier server gave away as a place is none of these.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import zmq
from smg_grpc_proto.generated import common_pb2 as pb

from sgl.errors import EngineDead, QueueFull, SglError
from sgl.runtime.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from sgl.runtime.server.kv_stream import KvStream, News, Source
from sgl.runtime.server.service import Service

logger = logging.getLogger(__name__)

MOST_SUBSCRIBERS: Final = 64
KEPT_BATCHES, KEPT_BYTES = 10_000, 32 << 20
"""Of the latest events, for subscribers that read slowly or come back."""
MOST_BLOCKS: Final = 1 << 18
"""Kept of an engine. Further ones are not told."""
_BATCH_TOKENS: Final = 1 << 15  # of a message; gRPC's clients take up to 4 MB
_POLL_MS: Final = 200
_LOOK_SECONDS: Final = 0.5  # between looks whether the server ends
_FIND_SECONDS: Final = 5.0  # between looks where an engine publishes, which changes when it is started again


class _Space(NamedTuple):
    """What keeps prompts apart that begin alike."""

    adapter: int | None
    name: str | None  # its
    salt: str | None


class _Block(NamedTuple):
    parent: int | None
    ids: bytes  # int32
    space: _Space


@dataclass(slots=True, eq=False)
class _Engine:
    rank: int
    stream: KvStream
    blocks: dict[int, _Block] = field(default_factory=dict)  # parents before children


class KvRelay:
    """Of one server. `batches` is the event loop's."""

    def __init__(self, service: Service) -> None:
        """Needs a running event loop."""
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._subscribers: set[asyncio.Event] = set()
        self._sources: dict[int, Source] = {}  # wanted, by rank
        self._engines: list[_Engine] = []
        self._lock = threading.Lock()  # of what follows, and the engines' blocks
        self._last = int(time.time()) << 20  # number of the latest batch
        self._kept: deque[bytes] = deque()  # packed: a message in memory takes several times as much
        self._bytes = self._events = 0
        self._latest_snapshot: tuple[int, list[Callable[[], bytes]]] = -1, []
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._finding = asyncio.ensure_future(self._find())
        self._thread = threading.Thread(target=self._run, name="sgl-kv-relay", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """End the thread."""
        self._finding.cancel()
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 5.0)

    async def _find(self) -> None:
        while True:
            with contextlib.suppress(SglError):  # no engine runs: it is started again
                self._sources = sources_of(await self._service.info())
            await asyncio.sleep(_FIND_SECONDS)

    # ── subscribers ─────────────────────────────────────────────────────────────────────────────────────────────

    async def batches(self, start: int, ends: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Batches from that number on, packed, until `ends`. Raises QueueFull, and EngineDead if nothing is read any
        more."""
        if len(self._subscribers) >= MOST_SUBSCRIBERS:
            raise QueueFull(
                f"{MOST_SUBSCRIBERS} subscribers follow this server's KV events already", limit=MOST_SUBSCRIBERS
            )
        news = asyncio.Event()
        self._subscribers.add(news)
        try:
            while not ends():
                news.clear()
                if self._error is not None:
                    raise EngineDead("KV events are not read any more: the log says why") from self._error
                found = self._from(start)
                if found is None:
                    last, chunks = self._snapshot()
                    for chunk in chunks:
                        yield await asyncio.to_thread(chunk)
                        if self._from(last + 1) is None:  # what came after it is kept no longer: another
                            break
                    start = last + 1
                    continue
                for message in found:
                    yield message
                start += len(found)
                if not found:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_SECONDS):
                            await news.wait()
        finally:
            self._subscribers.discard(news)
            if not self._subscribers:
                self._latest_snapshot = -1, []

    def _from(self, number: int) -> list[bytes] | None:
        """Some of the kept batches from that number on; None if that is no place among them."""
        with self._lock:
            first = self._last + 1 - len(self._kept)
            if not first <= number <= self._last + 1:
                return None
            end = min(number + 16, self._last + 1)
            return [self._kept[at - first] for at in range(number, end)]

    def _snapshot(self) -> tuple[int, list[Callable[[], bytes]]]:
        """The number that it is of, and what makes its messages."""
        if self._from(self._latest_snapshot[0] + 1) is not None:
            return self._latest_snapshot
        with self._lock:
            last = self._last
            taken = [(each.rank, each.stream.lost, list(each.blocks.items())) for each in self._engines]
        chunks: list[Callable[[int], bytes]] = []
        for rank, unknown, blocks in taken or [(0, 0, [])]:
            cuts = _cut(blocks)
            for index, (begin, end) in enumerate(cuts):
                about = pb.KvSnapshotChunk(index=index, count=len(cuts), blocks=len(blocks), unknown_before=unknown)
                chunks.append(partial(_chunk, rank, about, blocks[begin:end]))
        first = last + 1 - len(chunks)
        self._latest_snapshot = last, [partial(chunk, number) for number, chunk in enumerate(chunks, first)]
        return self._latest_snapshot

    def _wake(self) -> None:
        for news in self._subscribers:
            news.set()

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            with zmq.Context() as context:
                try:
                    while not self._stop.is_set():
                        self._turn(context)
                finally:
                    for engine in self._engines:
                        self._drop(engine)
        except Exception as error:  # subscribers get it
            logger.exception("KV events are not relayed by gRPC any more")
            self._error = error
        self._soon()

    def _soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake)

    def _turn(self, context: Any) -> None:
        """Read what has come."""
        wanted = self._sources
        for engine in [each for each in self._engines if wanted.get(each.rank) != each.stream.source]:
            self._drop(engine)
        for rank in wanted.keys() - {each.rank for each in self._engines}:
            engine = _Engine(rank, KvStream(context, wanted[rank], ends_with_connection=True))
            with self._lock:
                self._engines = sorted([*self._engines, engine], key=lambda its: its.rank)
        poller = zmq.Poller()
        for engine in self._engines:
            for socket in engine.stream.sockets:
                poller.register(socket, zmq.POLLIN)
        if not self._engines:
            self._stop.wait(_POLL_MS / 1000)
        ready = dict(poller.poll(_POLL_MS))
        for engine in self._engines:
            for news in engine.stream.receive(ready):
                if isinstance(news, EventBatch):
                    self._take(engine, news)
                elif news is not News.MISSED:
                    self._forget(engine)

    def _take(self, engine: _Engine, batch: EventBatch) -> None:
        with self._lock:
            messages = (message for event in batch.events for message in _applied(engine.blocks, event))
            self._add(engine.rank, batch.ts, messages)

    def _forget(self, engine: _Engine) -> None:
        """It has none of its blocks any more, or nobody knows."""
        with self._lock:
            if engine.blocks:
                engine.blocks.clear()
                self._add(engine.rank, time.time(), [_cleared()])

    def _add(self, rank: int, ts: float, events: Iterable[Any]) -> None:
        """Batches of events that are not too long."""
        whole, size = list[Any](), 0
        for event in events:
            tokens = _tokens(event)
            if whole and size + tokens > _BATCH_TOKENS:
                self._keep(rank, ts, whole)
                whole, size = [], 0
            self._events += 1
            event.event_id = self._events
            whole.append(event)
            size += tokens
        if whole:
            self._keep(rank, ts, whole)
        while len(self._kept) > KEPT_BATCHES or self._bytes > KEPT_BYTES:
            self._bytes -= len(self._kept.popleft())
        self._soon()

    def _keep(self, rank: int, ts: float, events: list[Any]) -> None:
        self._last += 1
        self._kept.append(_packed(self._last, ts, rank, events))
        self._bytes += len(self._kept[-1])

    def _drop(self, engine: _Engine) -> None:
        self._forget(engine)
        engine.stream.close()
        with self._lock:
            self._engines = [each for each in self._engines if each is not engine]


def sources_of(info: dict[str, Any]) -> dict[int, Source]:
    """By rank, of what the engines of this machine that run say of themselves."""

    def at(endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        return f"tcp://{host}:{port}"

    states = info["internal_states"]
    return {its["dp_rank"]: Source(str(at(its["kv_events"])), at(its["kv_events_replay"])) for its in states}


def _applied(blocks: dict[int, _Block], event: Any) -> list[Any]:
    """Note what an event says of an engine's blocks. Returns it as messages."""
    if isinstance(event, AllBlocksCleared):
        blocks.clear()
        return [_cleared()]
    if isinstance(event, BlockRemoved):
        for name in event.block_hashes:
            blocks.pop(name, None)
        names = event.block_hashes
        return [_removed(names[at : at + _BATCH_TOKENS]) for at in range(0, len(names), _BATCH_TOKENS)]
    assert isinstance(event, BlockStored), "there are three kinds"
    space = _space(blocks, event)
    if space is None:
        return []
    data, size = np.array(event.token_ids, np.int32).tobytes(), 4 * event.block_size
    parent, found = event.parent_block_hash, list[tuple[int, _Block]]()
    for number, name in enumerate(event.block_hashes):
        found.append((name, _Block(parent, data[number * size : (number + 1) * size], space)))
        parent = name
    found = found[: max(0, MOST_BLOCKS - len(blocks))]
    for name, block in found:
        blocks.setdefault(name, block)
    return [_stored(found[begin:end]) for begin, end in _cut(found)] if found else []


def _space(blocks: dict[int, _Block], event: BlockStored) -> _Space | None:
    """None: what is above was not told."""
    if event.parent_block_hash is not None:
        above = blocks.get(event.parent_block_hash)
        return None if above is None else above.space
    first = (event.extra_keys or [None])[0]
    return _Space(event.lora_id, event.lora_name, first[-1] if first else None)


def _cut(blocks: Sequence[tuple[int, _Block]]) -> list[tuple[int, int]]:
    """Begin and end of parts that a message has room for; one that is empty if there are no blocks."""
    size = max(1, _BATCH_TOKENS // (len(blocks[0][1].ids) // 4)) if blocks else 1
    return [(begin, min(begin + size, len(blocks))) for begin in range(0, max(1, len(blocks)), size)]


def _stored(chain: Sequence[tuple[int, _Block]]) -> Any:
    """Blocks, each the parent of the next, as an event."""
    first = chain[0][1]
    stored = pb.KvBlocksStored(
        blocks=[
            pb.KvBlock(
                block_hash=name,
                token_ids=np.frombuffer(its.ids, np.uint32).tolist(),  # those of images are above all of texts
                block_size=len(its.ids) // 4,
                lora_id=its.space.adapter,
                cache_level=0,
            )
            for name, its in chain
        ],
        parent_block_hash=first.parent,
        tier=pb.KV_CACHE_TIER_DEVICE,
        medium="GPU",
        lora_name=first.space.name,
        cache_salt=first.space.salt,
    )
    return pb.KvCacheEvent(stored=stored)


def _removed(names: list[int]) -> Any:
    removed = pb.KvBlocksRemoved(block_hashes=names, cache_level=0, tier=pb.KV_CACHE_TIER_DEVICE)
    return pb.KvCacheEvent(removed=removed)


def _cleared() -> Any:
    return pb.KvCacheEvent(cleared=pb.KvCacheCleared())


def _chunk(rank: int, about: Any, blocks: Sequence[tuple[int, _Block]], number: int) -> bytes:
    """A message of a snapshot."""
    events = [] if about.index else [_cleared()]
    begin = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at][1].parent != blocks[at - 1][0]:
            events.append(_stored(blocks[begin:at]))
            begin = at
    return _packed(number, time.time(), rank, events, snapshot=about)


def _packed(number: int, ts: float, rank: int, events: list[Any], **snapshot: Any) -> bytes:
    message = pb.KvEventBatch(sequence_number=number, timestamp=ts, events=events, dp_rank=rank, **snapshot)
    return bytes(message.SerializeToString())


def _tokens(event: Any) -> int:
    """As many as the event's message is long."""
    return sum(len(block.token_ids) for block in event.stored.blocks) + len(event.removed.block_hashes)
