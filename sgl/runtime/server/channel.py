"""A duplex channel between event loop and engine process: batched messages as frames. Sending never blocks."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from sgl.runtime.framing import Frames, packed

Message = tuple[Any, ...]

_READ_BYTES = 1 << 18
_MESSAGES = 16
"""In one frame of the engine's at most: the event loop takes a frame at a time."""


class LoopChannel(asyncio.Protocol):
    """The event loop's end; use it on the loop only."""

    def __init__(
        self,
        receive: Callable[[LoopChannel, list[Message]], None],
        closed: Callable[[LoopChannel], None],
    ) -> None:
        """`receive` gets messages; `closed` is called once when either side closes."""
        self._receive = receive
        self._closed = closed
        self._frames = Frames()
        self._outbox: list[Message] = []
        self._transport: asyncio.WriteTransport | None = None

    async def open(self, end: socket.socket) -> None:
        """Open this end of a socket pair."""
        end.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=end)

    def send(self, message: Message) -> None:
        """Send with the loop's other messages of this turn; lost if the peer is gone."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def close(self) -> None:
        """Flush and close. Idempotent."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes arrived."""
        for messages in self._frames.feed(data):
            self._receive(self, messages())

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: closed."""
        self._closed(self)

    def _flush(self) -> None:
        if self._outbox and self._transport is not None and not self._transport.is_closing():
            self._transport.write(packed(self._outbox))
        self._outbox = []


class ThreadChannel:
    """The threaded end. One thread reads; the sender writes what fits, and a writer thread the rest."""

    def __init__(
        self, end: socket.socket, receive: Callable[[list[Message]], None], closed: Callable[[], None]
    ) -> None:
        """`receive` and finally `closed` run on the reading thread."""
        self._socket = end
        self._receive = receive
        self._closed = closed
        self._outbox: deque[Message] = deque()
        self._writing = threading.Lock()  # held for a whole frame
        self._unsent: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="sgl-channel-out", daemon=True)
        threading.Thread(target=self._read, name="sgl-channel-in", daemon=True).start()
        self._writer.start()

    def post(self, message: Message) -> None:
        """Queue a message for the next send."""
        self._outbox.append(message)

    def send(self, message: Message) -> None:
        """Send a message; lost if the peer is gone."""
        self._outbox.append(message)
        self._flush()

    def close(self) -> None:
        """Close once the peer has taken everything, for which it has five seconds. Idempotent."""
        self._unsent.put(None)
        self._writer.join(5.0)

    def _flush(self) -> None:
        while self._outbox and self._writing.acquire(blocking=False):  # otherwise the writer will see it
            frame = memoryview(self._frame())
            try:
                sent = self._socket.send(frame, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:
                sent = len(frame)
            if sent < len(frame):
                self._unsent.put(frame[sent:])
                return
            self._writing.release()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (rest := self._unsent.get()) is not None:
                self._socket.sendall(rest)
                while self._outbox:
                    self._socket.sendall(self._frame())
                self._writing.release()
                self._flush()
        self._socket.close()

    def _frame(self) -> bytes:
        """The first of the queued messages; the caller holds the lock."""
        return packed([self._outbox.popleft() for _ in range(min(len(self._outbox), _MESSAGES))])

    def _read(self) -> None:
        frames = Frames()
        with contextlib.suppress(OSError):
            while data := self._socket.recv(_READ_BYTES):
                for messages in frames.feed(data):
                    self._receive(messages())
        self._closed()
