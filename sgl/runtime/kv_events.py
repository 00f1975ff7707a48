"""Publishes what an engine's cache stores and drops, by the protocol of vLLM's KV events, which routers read.

A PUB socket sends frames (topic, number, batch): the number counts batches from 0, in 8 bytes, most significant first,
and a batch is msgpack of [seconds, [event, …], rank], an event an array that begins with its name. A ROUTER socket
sends kept batches again, from the number that it is asked for, and ends with -1: `REPLAY_BYTES` a second at most, to
all clients together. Blocks are pages, named by a hash of all tokens up to their end and of what keeps prompts apart.

A thread of its own hashes and sends; it wakes every 20 ms."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from sgl.errors import ConfigError, needs_extra
from sgl.runtime.cache.keys import TOKEN_BYTES
from sgl.runtime.cache.page_events import Lost, PageEvents, Removed, Stored

KEPT = 10_000
"""Batches that can be sent again."""
END = (-1).to_bytes(8, "big", signed=True)

_PAUSE_SECONDS = 0.02
_QUEUED = 100_000  # batches for a slow subscriber
_QUEUED_AGAIN = 256  # batches for a slow client that asked for them
REPLAY_BYTES = 32_000_000
"""Sent again in a second at most, to all clients together."""
_MOST_ASKS = 64  # answered at once; others wait in their sockets
_ASK_BYTES = 1024  # of a frame that a client sends, at most
_ASK_SECONDS = 10.0  # for which a client may read nothing of an answer


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Blocks were computed: consecutive ones, the first after `parent_block_hash` (None: a prompt's first)."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """Of each block, what else it depends on. Here: of a prompt's first one, its extra_key, after a LoRA adapter's
    name."""


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Blocks were dropped."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Nothing is stored, or nobody knows what."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in order; `ts`: seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass(slots=True)
class _ReplayRequest:
    """A client's wish for batches from a number on."""

    client: bytes
    empty: bytes
    next: int
    latest: float  # seconds, when something was sent


class KvEvents:
    """Publishes one engine's until `close`."""

    def __init__(
        self, recorded: PageEvents, page_size: int, endpoint: str, replay: str | None = None, rank: int = 0
    ) -> None:
        """endpoint, replay: tcp://HOST:PORT of the two sockets; port 0 takes a free one, others count up with `rank`.
        Raises ConfigError, and MissingExtra without ZeroMQ."""
        self.adapter_name: Callable[[int], str | None] = lambda _: None
        """Of a LoRA adapter's number; None: it is gone. Called by the thread."""
        with needs_extra("gateway", "kv_events", option="kv_events"):
            import zmq
        self._zmq = zmq
        self._recorded, self._page_size, self._rank = recorded, page_size, rank
        self._context = zmq.Context()
        self._out = self._bound(zmq.PUB, "kv_events", endpoint)
        self._replay = None if replay is None else self._bound(zmq.ROUTER, "kv_events_replay", replay)
        self._replays: dict[bytes, _ReplayRequest] = {}  # by client
        self._credit = 0.0  # bytes that may be sent again by now
        self.endpoints: dict[str, str | None] = {
            "kv_events": self._out.getsockopt_string(zmq.LAST_ENDPOINT),
            "kv_events_replay": self._replay and self._replay.getsockopt_string(zmq.LAST_ENDPOINT),
        }
        """Of this engine."""
        self._hashes: dict[int, int] = {}  # by page
        self._adapters: dict[int, int] = {}  # LoRA adapters' numbers by page, of those that have one
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._number = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sgl-kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what waits and end. Idempotent."""
        self._stop.set()
        self._thread.join(5.0)

    def _bound(self, kind: int, option: str, endpoint: str) -> Any:
        host, _, port = endpoint.rpartition(":")
        number = int(port)
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.SNDHWM, _QUEUED if kind == self._zmq.PUB else _QUEUED_AGAIN)
        socket.setsockopt(self._zmq.MAXMSGSIZE, _ASK_BYTES)
        if kind == self._zmq.ROUTER:
            socket.setsockopt(self._zmq.ROUTER_MANDATORY, 1)  # a full queue and a lost client are errors
        socket.setsockopt(self._zmq.LINGER, 100)
        try:
            socket.bind(f"{host}:{number + self._rank if number else '*'}")
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)  # an open socket would keep the process from ending
            raise ConfigError(
                f"{option}={endpoint!r}: cannot listen there ({error}); give an address of this machine, and a free "
                "port",
                option=option,
            ) from error
        return socket

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE_SECONDS):
            self._turn()
        self._turn()
        for socket in (self._out, self._replay):
            if socket is not None:
                socket.close()
        self._context.term()

    def _turn(self) -> None:
        events = [told for recorded in self._recorded.take() for told in self._told(recorded)]
        if events:
            data = self._encoder.encode(EventBatch(time.time(), events, self._rank))
            self._kept.append((self._number, data))
            self._out.send_multipart((b"", self._number.to_bytes(8, "big"), data))
            self._number += 1
        if self._replay is not None:
            self._answer(self._replay)

    def _answer(self, replay: Any) -> None:
        """Take asks, and send as much again as a turn may."""
        for _ in range(_MOST_ASKS):
            if len(self._replays) >= _MOST_ASKS or not replay.poll(0):
                break
            frames = replay.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                client, empty, first = frames[0], frames[1], int.from_bytes(frames[2], "big")
                # in place of an older one
                self._replays[client] = _ReplayRequest(client, empty, first, time.monotonic())
        self._credit = min(self._credit, 0.0) + REPLAY_BYTES * _PAUSE_SECONDS
        waiting = list(self._replays.values())
        while waiting and self._credit > 0:
            waiting = [ask for ask in waiting if self._credit > 0 and self._send_again(replay, ask)]
        for client, ask in list(self._replays.items()):
            if time.monotonic() - ask.latest > _ASK_SECONDS and self._credit > 0:
                del self._replays[client]

    def _send_again(self, replay: Any, ask: _ReplayRequest) -> bool:
        """Send one batch; returns whether the client may be sent another one now."""
        number, data = END, b""
        if self._kept and ask.next <= self._kept[-1][0]:
            ask.next = max(ask.next, self._kept[0][0])
            at, data = self._kept[ask.next - self._kept[0][0]]
            number = at.to_bytes(8, "big")
        try:
            replay.send_multipart((ask.client, ask.empty, number, data), flags=self._zmq.DONTWAIT)
        except self._zmq.Again:
            return False  # it reads slowly
        except self._zmq.ZMQError:
            number = END  # it is gone
        if number == END:
            del self._replays[ask.client]
            return False
        self._credit -= len(data)
        ask.next, ask.latest = ask.next + 1, time.monotonic()
        return True

    def _told(self, recorded: Stored | Removed | Lost) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        if isinstance(recorded, Lost):
            self._hashes.clear()
            self._adapters.clear()
            return [AllBlocksCleared()]
        if isinstance(recorded, Removed):
            pages = np.concatenate(recorded.pages).tolist()
            gone = [self._hashes.pop(page) for page in pages if page in self._hashes]
            for page in pages if self._adapters else ():
                self._adapters.pop(page, None)
            return [BlockRemoved(gone)] if gone else []
        if recorded.parent is not None and recorded.parent not in self._hashes:
            return []  # what is above was lost
        parent = None if recorded.parent is None else self._hashes[recorded.parent]
        state, size = parent, self._page_size * TOKEN_BYTES
        if state is None:
            state = _hash(0, repr(recorded.namespace).encode())
        hashes = []
        for place, page in enumerate(recorded.pages.tolist()):
            state = self._hashes[page] = _hash(state, recorded.key[place * size : (place + 1) * size])
            hashes.append(state)
        tokens = np.frombuffer(recorded.key, np.int32).tolist()
        namespace = recorded.namespace
        adapter, salt = namespace if isinstance(namespace, tuple) else (None, namespace)
        if recorded.parent is not None:
            adapter, salt = self._adapters.get(recorded.parent), None
        if adapter is not None:
            self._adapters.update(dict.fromkeys(recorded.pages.tolist(), adapter))
        name = None if adapter is None else self.adapter_name(adapter)
        first = [salt] if name is None else [name, salt]
        extra = None if salt is None else [first, *[None] * (len(hashes) - 1)]
        return [BlockStored(hashes, parent, tokens, self._page_size, adapter, "GPU", name, extra)]


def _hash(state: int, data: bytes) -> int:
    digest = hashlib.blake2b(state.to_bytes(8, "big") + data, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
