"""Publishes what an engine's cache stores and drops, by the protocol of vLLM's KV events, which routers read.

A PUB socket sends frames (topic, number, batch): the number counts batches from 0, in 8 bytes, most significant first,
and a batch is msgpack of [seconds, [event, …], rank], an event an array that begins with its name. A ROUTER socket
sends kept batches again, from the number that it is asked for, and ends with -1. Blocks are pages, named by a hash
of all tokens up to their end and of what keeps prompts apart.

A thread of its own hashes and sends; it wakes every 20 ms."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
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


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Blocks were computed: consecutive ones, the first after `parent_block_hash` (None: a prompt's first)."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None


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


class KvEvents:
    """Publishes one engine's until `close`."""

    def __init__(
        self, recorded: PageEvents, page_size: int, endpoint: str, replay: str | None = None, rank: int = 0
    ) -> None:
        """endpoint, replay: tcp://HOST:PORT of the two sockets; port 0 takes a free one, others count up with `rank`.
        Raises ConfigError, and MissingExtra without ZeroMQ."""
        with needs_extra("gateway", "kv_events", option="kv_events"):
            import zmq
        self._zmq = zmq
        self._recorded, self._page_size, self._rank = recorded, page_size, rank
        self._context = zmq.Context()
        self._out = self._bound(zmq.PUB, "kv_events", endpoint)
        self._replay = None if replay is None else self._bound(zmq.ROUTER, "kv_events_replay", replay)
        self.endpoints: dict[str, str | None] = {
            "kv_events": self._out.getsockopt_string(zmq.LAST_ENDPOINT),
            "kv_events_replay": None if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT),
        }
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
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.SNDHWM, _QUEUED)
        socket.setsockopt(self._zmq.LINGER, 100)
        try:
            number = int(port)
            socket.bind(f"{host}:{number + self._rank if number else '*'}")
        except (ValueError, self._zmq.ZMQError) as error:
            socket.close()
            text = f"{option}={endpoint!r}: cannot listen there ({error}); give tcp://HOST:PORT"
            raise ConfigError(text, option=option) from error
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
            while self._replay.poll(0):
                self._send_again(self._replay.recv_multipart())

    def _send_again(self, asked: list[bytes]) -> None:
        if len(asked) != 3 or len(asked[2]) != 8 or self._replay is None:
            return
        client, empty, first = asked[0], asked[1], int.from_bytes(asked[2], "big")
        for number, data in self._kept:
            if number >= first:
                self._replay.send_multipart((client, empty, number.to_bytes(8, "big"), data))
        self._replay.send_multipart((client, empty, END, b""))

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
        if recorded.parent is not None:
            adapter = self._adapters.get(recorded.parent)
        else:
            adapter = recorded.namespace[0] if isinstance(recorded.namespace, tuple) else None
        if adapter is not None:
            self._adapters.update(dict.fromkeys(recorded.pages.tolist(), adapter))
        return [BlockStored(hashes, parent, tokens, self._page_size, adapter, "GPU")]


def _hash(state: int, data: bytes) -> int:
    digest = hashlib.blake2b(state.to_bytes(8, "big") + data, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
