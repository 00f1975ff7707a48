"""A duplex channel between two processes: lists of messages over a pipe, sent and received by a thread each.

Sending never blocks, whatever the other side does. Messages are pickled: both ends are of this program.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Message = tuple[Any, ...]


class Channel:
    """One end. Messages sent in a burst travel together."""

    def __init__(
        self, connection: Connection, receive: Callable[[list[Message]], None], closed: Callable[[], None]
    ) -> None:
        """`receive` and then once `closed` are called on the reading thread."""
        self._connection = connection
        self._receive = receive
        self._closed = closed
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="sgl-channel-out", daemon=True)
        threading.Thread(target=self._read, name="sgl-channel-in", daemon=True).start()
        self._writer.start()

    def send(self, message: Message) -> None:
        """Queue a message; it is lost if the other side is gone."""
        self._outbox.put(message)

    def close(self, timeout: float = 5.0) -> None:
        """Send what is queued and close. Idempotent."""
        self._outbox.put(None)
        if threading.current_thread() is not self._writer:
            self._writer.join(timeout)

    def _write(self) -> None:
        messages: list[Message | None] = []
        with contextlib.suppress(OSError):
            while True:
                messages = [self._outbox.get()]
                with contextlib.suppress(queue.Empty):
                    while len(messages) < 1024:
                        messages.append(self._outbox.get_nowait())
                self._connection.send_bytes(pickle.dumps([m for m in messages if m is not None], protocol=5))
                if None in messages:
                    break
        self._connection.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._receive(pickle.loads(self._connection.recv_bytes()))
        self._closed()
