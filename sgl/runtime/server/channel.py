"""A duplex channel between the server (an event loop) and its engine's process (threads): lists of messages, as frames
over a socket pair. Sending never blocks; a burst travels together."""

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


class LoopChannel(asyncio.Protocol):
    """The end on an event loop; all of it is called there."""

    def __init__(
        self,
        receive: Callable[[LoopChannel, list[Message]], None],
        closed: Callable[[LoopChannel], None],
    ) -> None:
        """`receive` gets what arrives; `closed` is called once, when the other end is gone or this one was closed."""
        self._receive = receive
        self._closed = closed
        self._frames = Frames()
        self._outbox: list[Message] = []
        self._transport: asyncio.WriteTransport | None = None

    async def open(self, end: socket.socket) -> None:
        """Begin on this end of a socket pair."""
        end.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=end)

    def send(self, message: Message) -> None:
        """Send a message with the others of this turn of the loop; it is lost if the other side is gone."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def close(self) -> None:
        """Send what is due and close. Idempotent."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The end is open."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Some bytes arrived."""
        for messages in self._frames.feed(data):
            self._receive(self, messages())

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone, or this one was closed."""
        self._closed(self)

    def _flush(self) -> None:
        if self._outbox and self._transport is not None and not self._transport.is_closing():
            self._transport.write(packed(self._outbox))
        self._outbox = []


class ThreadChannel:
    """The end with threads: one reads. The sender writes what the socket takes at once, and a thread the rest."""

    def __init__(
        self, end: socket.socket, receive: Callable[[list[Message]], None], closed: Callable[[], None]
    ) -> None:
        """`receive` and then once `closed` are called on the reading thread."""
        self._socket = end
        self._receive = receive
        self._closed = closed
        self._outbox: deque[Message] = deque()
        self._writing = threading.Lock()  # held from the first byte of a frame to its last
        self._unsent: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="sgl-channel-out", daemon=True)
        threading.Thread(target=self._read, name="sgl-channel-in", daemon=True).start()
        self._writer.start()

    def post(self, message: Message) -> None:
        """Have a message travel with the next one that is sent."""
        self._outbox.append(message)

    def send(self, message: Message) -> None:
        """Send a message; it is lost if the other side is gone."""
        self._outbox.append(message)
        self._flush()

    def close(self, timeout: float = 5.0) -> None:
        """Close when the other side has taken what was sent. Idempotent."""
        self._unsent.put(None)
        self._writer.join(timeout)

    def _flush(self) -> None:
        while self._outbox and self._writing.acquire(blocking=False):  # else whoever writes sees it afterwards
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
        """What is due, for the one that holds the lock."""
        return packed([self._outbox.popleft() for _ in range(len(self._outbox))])

    def _read(self) -> None:
        frames = Frames()
        with contextlib.suppress(OSError):
            while data := self._socket.recv(_READ_BYTES):
                for messages in frames.feed(data):
                    self._receive(messages())
        self._closed()
