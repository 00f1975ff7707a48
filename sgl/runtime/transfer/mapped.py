"""Pages that a decode engine copies itself, from memory of the prefill engine that it has opened: from GPU to GPU.

The connection of `wire` stays: by it the lease is named, and told in which rows the pages lie. How to open the memory
is told once, over a connection of kind HELD, which lasts as long as the mapping: when either engine ends, however it
does, the other one notices, and memory of an engine that is gone is not kept.

There are no checksums. What was copied counts if nobody wrote to those rows meanwhile, which the memory itself tells:
no thread of the other engine, which may be busy or stand still, has to answer for that. A copy that is given up goes on
for some milliseconds: it is quiet when it has ended, and the pages wait.
"""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import threading
import time
from dataclasses import dataclass
from typing import Annotated, Any, Final, Protocol

import msgspec

from sgl.runtime.transfer.reader import CONNECT_SECONDS, Read, Reader
from sgl.runtime.transfer.server import Remote
from sgl.runtime.transfer.wire import ANSWER, ASK, HELD, MAGIC, MAPPED, OK, DeadlineSocket, description

_SILENT_SECONDS: Final = 5.0
_SLOWEST: Final = 1e9  # bytes a second, below which a read is given up
_WATCH_SECONDS: Final = 0.2


class Copying(Protocol):
    """Rows of another engine on their way to own ones."""

    num_runs: int

    @property
    def seconds(self) -> float:
        """What the copies took on a GPU, when they have ended."""
        ...

    def has_ended(self) -> bool:
        """Whether nothing is written any more. Raises ConnectionError if it has ended and does not count."""
        ...


class Rows(Protocol):
    """Memory of which other processes read rows. `mark` tells it from any other."""

    page_bytes: int
    mark: bytes

    @property
    def handle(self) -> list[Any]:
        """By which others open it."""
        ...

    def number(self, pages: list[int]) -> tuple[list[int], int]:
        """Rows as others count them, and a stamp that they have until something else is written there."""
        ...

    def open(self, handle: list[Any], mark: bytes) -> Any:
        """Another engine's. Raises ConnectionError."""
        ...

    def forget(self, theirs: Any) -> None:
        """Close it, when nothing reads it any more; or after some time keep it."""

    def read(self, theirs: Any, rows: list[int], stamp: int, own: list[int]) -> Copying:
        """Start to copy rows that have this stamp. Raises ConnectionError."""
        ...

    def close(self) -> None:
        """Nobody opens it any more, and what is being copied does not count. Idempotent."""


class _Introduction(msgspec.Struct, frozen=True):
    """How to open an engine's memory."""

    mark: bytes
    handle: list[Any]


class _Described(msgspec.Struct, frozen=True):
    """Which rows to copy."""

    mark: bytes
    rows: list[Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]]
    stamp: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class MappedRemote(Remote):
    """A prefill engine's end, see `Remote`. Whoever may read a page can read all of the buffer."""

    kind = MAPPED

    def __init__(self, rows: Rows, secret: bytes) -> None:
        """secret: that engines share."""
        self._rows, self._secret = rows, secret

    def describe(self, pages: list[int], checksums: list[int]) -> bytes:
        return msgspec.msgpack.encode(_Described(self._rows.mark, *self._rows.number(pages)))

    def introduce(self, lease: bytes, proof: bytes) -> bytes | None:
        if not hmac.compare_digest(proof, _proof(self._secret, lease)):
            return None
        return msgspec.msgpack.encode(_Introduction(self._rows.mark, self._rows.handle))

    def close(self) -> None:
        self._rows.close()


@dataclass(slots=True, eq=False)
class _Peer:
    """An engine whose memory is open."""

    rows: Any
    held: socket.socket  # readable when the other engine has ended
    reads: int = 0

    @property
    def is_gone(self) -> bool:
        ended = select.poll()
        ended.register(self.held, select.POLLIN)
        return bool(ended.poll(0))


class MappedReader(Reader):
    """A decode engine's end."""

    kind = MAPPED

    def __init__(self, rows: Rows, secret: bytes) -> None:
        """secret: that engines share."""
        super().__init__(rows.page_bytes)
        self._rows, self._secret = rows, secret
        self._peers: dict[bytes, _Peer] = {}  # by their marks
        self._copies: dict[Read, tuple[_Peer, Copying | None]] = {}
        self._watching = threading.Thread(target=self._watch, name="sgl-mapped", daemon=True)
        self._ending = threading.Event()
        self._watching.start()

    def close(self) -> None:
        super().close()
        self._ending.set()
        self._watching.join()
        with self._lock:
            peers, self._peers = self._peers, {}
        for its in peers.values():
            self._forget(its)
        self._rows.close()

    def _receive(self, read: Read, peer: DeadlineSocket) -> None:
        told = description(peer, _Described)
        if len(told.rows) != len(read.pages):
            raise ValueError("other pages are described than were asked for")
        if not read.pages:
            return
        its = self._begin(read, told.mark) or self._meet(read, told.mark)
        read.note("told")
        copying = self._rows.read(its.rows, told.rows, told.stamp, read.pages)
        self._copies[read] = its, copying
        read.note("launched")
        self._await(read, _SILENT_SECONDS + len(read.pages) * self.page_bytes / _SLOWEST)
        if its.is_gone:
            raise ConnectionError("the other engine has ended")
        read.note("copied")
        read.parts |= {"on the device": copying.seconds, "runs": copying.num_runs}
        read.num_good = len(read.pages)

    def _has_ended(self, read: Read) -> bool:
        _, copying = self._copies.get(read, (None, None))
        return copying is None or copying.has_ended()

    def _let_go(self, read: Read) -> None:
        with self._lock:
            if (begun := self._copies.pop(read, None)) is not None:
                begun[0].reads -= 1
        super()._let_go(read)

    def _begin(self, read: Read, mark: bytes) -> _Peer | None:
        """The engine, which is not forgotten before the read is quiet; None: its memory is not open. Raises
        ConnectionError."""
        with self._lock:
            its = self._peers.get(mark)
            if its is not None:
                if its.is_gone:
                    raise ConnectionError("the other engine has ended")
                its.reads += 1
                self._copies[read] = its, None
            return its

    def _meet(self, read: Read, mark: bytes) -> _Peer:
        """Open an engine's memory, unless another read has by then, and begin. Raises OSError, EOFError and
        ValueError."""
        limit = min(CONNECT_SECONDS, read.end - time.monotonic())
        if limit <= 0:
            raise TimeoutError("its time was up")
        held = socket.create_connection((read.params.host, read.params.port), timeout=limit)
        try:
            with read.asking(DeadlineSocket(held, read.end, _SILENT_SECONDS)) as peer:
                lease = bytes.fromhex(read.params.lease)
                peer.send(ASK.pack(MAGIC, HELD, lease, _proof(self._secret, lease), 0, 0))
                if ANSWER.unpack(peer.receive(ANSWER.size))[0] != OK:
                    raise ConnectionError("the other engine does not let its memory be opened")
                told = description(peer, _Introduction)
            if told.mark != mark:
                raise ConnectionError("another engine answers there")
            its = _Peer(self._rows.open(told.handle, mark), held)
        except BaseException:
            held.close()
            raise
        with self._lock:
            first = self._peers.setdefault(mark, its)
        if first is not its:
            self._forget(its)
        begun = self._begin(read, mark)
        if begun is None:
            raise ConnectionError("the other engine has ended")
        return begun

    def _watch(self) -> None:
        """Forget engines that have ended."""
        while not self._ending.wait(_WATCH_SECONDS):
            with self._lock:
                marks = [mark for mark, its in self._peers.items() if its.is_gone and not its.reads]
                gone = [self._peers.pop(mark) for mark in marks]
            for its in gone:  # not under the lock, for which the scheduler waits
                self._forget(its)

    def _forget(self, its: _Peer) -> None:
        its.held.close()
        if not its.reads:  # else a copy does not end, and the memory stays until the process does
            self._rows.forget(its.rows)


def _proof(secret: bytes, lease: bytes) -> bytes:
    """That an engine asks, and not a client, who knows the lease as well."""
    return hmac.new(secret, b"held" + lease, hashlib.sha256).digest()
