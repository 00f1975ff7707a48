"""Reads one engine's KV events (kv_events.py): each batch once and in order, with those that were missed.

Nothing waits. Who owns a stream polls its sockets, calls `receive` with those that are ready, and at least a few times
a second with none. A batch that comes out of turn is held until what is before it was sent again, or cannot be had."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from sgl.runtime.kv_events import END, EventBatch

logger = logging.getLogger(__name__)

REPLAY_SECONDS = 5.0
"""Without a batch, after which a replay is given up."""

_MOST_BYTES = 16 << 20  # of a message
_QUEUED = 16  # messages, of any size: an engine that sends faster than they are read waits


@dataclass(frozen=True, slots=True)
class Source:
    """Where an engine publishes, and sends batches again."""

    events: str
    replay: str | None


class News(enum.Enum):
    """What a stream says beside its batches."""

    MISSED = enum.auto()
    """Batches did not come: they are asked for."""
    LOST = enum.auto()
    """They cannot be had: what was told before holds no longer."""
    RESTARTED = enum.auto()
    """The engine has ended, or begins again: it has dropped everything."""


class KvStream:
    """One engine's. Call it on one thread."""

    def __init__(self, context: zmq.Context[Any], source: Source, *, ends_with_connection: bool = False) -> None:
        """ends_with_connection: an engine that cannot be reached has ended. Raises ZMQError for an address that is
        none."""
        self.source = source
        self.next = 0
        """Number of the batch to come."""
        self.lost = 0
        """Batches that could not be had, since the engine began."""
        self._context = context
        self._seen = -1  # number of the latest batch that was published
        self._tried = -1  # number before which a replay has been tried
        self._held: tuple[int, bytes] | None = None  # what came before a gap was filled
        self._replay: Any = None
        self._since = 0.0  # when its latest batch came
        self._monitor: Any = None
        self._socket = self._opened(zmq.SUB)
        if ends_with_connection:
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(source.events)
            self._socket.subscribe(b"")
            self._ask()
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def sockets(self) -> list[Any]:
        """Those to poll now. They change by `receive`."""
        return [self._replay or self._socket, *([] if self._monitor is None else [self._monitor])]

    def receive(self, ready: Container[Any]) -> Iterator[EventBatch | News]:
        """Take a message, if its socket is ready. Raises ValueError, MsgspecError and ZMQError for what is no event."""
        if self._monitor in ready and list(_messages(self._monitor)):
            for _ in _messages(self._socket):  # the last words of an engine that has ended
                pass
            yield from self._ended()
            return
        socket = self._replay or self._socket
        frames = next(_messages(socket), None) if socket in ready else None
        if frames is not None:
            if len(frames) != 3 or len(frames[1]) != 8:
                raise ValueError(f"{len(frames)} frames, where there should be three")
            _, number, data = frames
            taken = self._replayed if socket is self._replay else self._published
            yield from taken(number, data)
        if self._replay is not None and time.monotonic() - self._since > REPLAY_SECONDS:
            logger.warning("%s does not send KV events again", self.source.replay)
            yield from self._filled()

    def close(self) -> None:
        """Close its sockets."""
        self._end_replay()
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._socket.close(0)

    def _opened(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        for option, value in ((zmq.MAXMSGSIZE, _MOST_BYTES), (zmq.RCVHWM, _QUEUED), (zmq.LINGER, 0), (zmq.IPV6, 1)):
            socket.setsockopt(option, value)
        return socket

    def _published(self, packed: bytes, data: bytes) -> Iterator[EventBatch | News]:
        number = int.from_bytes(packed, "big")
        if number <= self._seen:
            yield from self._ended()
        self._seen = number
        if number > self.next and self._tried < number:
            yield News.MISSED
            self._tried = number
            self._ask()
            if self._replay is not None:
                self._held = number, data
                return
        yield from self._take(number, data)

    def _ask(self) -> None:
        """For what was published before."""
        if self.source.replay is not None:
            self._replay, self._since = self._opened(zmq.DEALER), time.monotonic()
            self._replay.connect(self.source.replay)
            self._replay.send_multipart((b"", self.next.to_bytes(8, "big")), zmq.DONTWAIT)

    def _replayed(self, packed: bytes, data: bytes) -> Iterator[EventBatch | News]:
        number = int.from_bytes(packed, "big")
        if packed == END:
            yield from self._filled()
        elif number >= self.next:
            self._since = time.monotonic()
            yield from self._take(number, data)

    def _filled(self) -> Iterator[EventBatch | News]:
        """All that could be had again has come."""
        self._end_replay()
        if self._held is not None:
            held, self._held = self._held, None
            yield from self._take(*held)

    def _take(self, number: int, data: bytes) -> Iterator[EventBatch | News]:
        """A batch, unless it was taken before."""
        if number < self.next:
            return
        lost, self.next = number - self.next, number + 1
        if lost:
            self.lost += lost
            yield News.LOST
        yield _batch(data)

    def _ended(self) -> Iterator[EventBatch | News]:
        self._end_replay()
        self._held = None
        self._seen = self._tried = -1
        self.next = self.lost = 0
        yield News.RESTARTED

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.close(0)
            self._replay = None


_batch = msgspec.msgpack.Decoder(EventBatch).decode


def _messages(socket: Any) -> Iterator[list[bytes]]:
    """Those that have come."""
    while True:
        try:
            frames = socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        yield frames
