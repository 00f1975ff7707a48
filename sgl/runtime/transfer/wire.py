"""What two engines say to each other over one connection for each read.

    reader    ASK: magic, kind, lease, prompt_hash, first page, number of pages
    server    ANSWER: a status, bytes of a page
              kind PAGES:  each page's CHECKSUM and content
              kind REMOTE: a length, then MessagePack by which the reader reads the buffer itself (see nixl.py)
              kind MAPPED: likewise (see mapped.py)
    reader    DONE, once it has what it wants: the lease ends

Of kind HELD, with a proof that an engine asks in place of the prompt_hash, told is how to open the buffer, and that it
is there while the connection is.

A connection that ends early ends the read, and nothing else. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Final, TypeVar

import msgspec

MAGIC: Final = b"sglpage1"
ASK: Final = struct.Struct("<8sc16s32sII")
ANSWER: Final = struct.Struct("<BI")
CHECKSUM: Final = struct.Struct("<I")
LENGTH: Final = struct.Struct("<I")
PAGES, REMOTE, MAPPED, HELD = b"P", b"R", b"M", b"H"
DONE: Final = b"D"
OK, GONE, NOT_SERVED = 0, 1, 2
"""Statuses: the pages follow; no such lease, or not of this prompt or these pages; not by this kind."""

_MOST_BYTES: Final = 8 << 20  # of a description
Told = TypeVar("Told")


class DeadlineSocket:
    """A connected socket with an end to all waiting."""

    def __init__(self, sock: socket.socket, end: float, silence: float) -> None:
        """end: on time.monotonic. silence: seconds for which the peer may do nothing."""
        self.sock = sock
        self._end = end
        self._silence = silence
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes | memoryview) -> None:
        """Send all of it. Raises OSError."""
        view = memoryview(data)
        while view:
            self._limit()
            view = view[self.sock.send(view) :]

    def receive_into(self, view: memoryview) -> None:
        """Fill it. Raises OSError, and EOFError if the peer has ended."""
        while view:
            self._limit()
            count = self.sock.recv_into(view)
            if not count:
                raise EOFError("the other engine closed the connection")
            view = view[count:]

    def receive(self, size: int) -> bytes:
        """So many bytes. Raises OSError and EOFError."""
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return bytes(data)

    def cut(self) -> None:
        """End it from any thread: whoever waits gets an error."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _limit(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for this transfer is up")
        self.sock.settimeout(min(left, self._silence))


def description(peer: DeadlineSocket, kind: type[Told]) -> Told:
    """What a server tells in MessagePack. Raises OSError, EOFError and ValueError."""
    (size,) = LENGTH.unpack(peer.receive(LENGTH.size))
    if size > _MOST_BYTES:
        raise ValueError(f"a description of {size} bytes is too long")
    try:
        return msgspec.msgpack.decode(peer.receive(size), type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"where the pages lie cannot be read: {error}") from error
