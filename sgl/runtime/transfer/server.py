"""A prefill engine's end: decode engines connect, name a lease, and are sent its pages."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
import zlib
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sgl.errors import ConfigError
from sgl.runtime.transfer.offers import Offer, Offers
from sgl.runtime.transfer.wire import (
    ANSWER,
    ASK,
    CHECKSUM,
    DONE,
    GONE,
    HELD,
    LENGTH,
    MAGIC,
    MAPPED,
    NOT_SERVED,
    OK,
    PAGES,
    REMOTE,
    DeadlineSocket,
)

logger = logging.getLogger(__name__)

Memory = npt.NDArray[np.uint8]
_MOST_CONNECTIONS = 64  # at once, and as many that are held
_ASK_SECONDS = 5.0  # for a connection to say what it wants
_SILENT_SECONDS = 5.0
_GO_ON_MS = 1


class Remote(Protocol):
    """Lets other engines read the buffer themselves."""

    kind: bytes
    """REMOTE; or MAPPED, and then the pages are not in the server's memory."""

    def describe(self, pages: list[int], checksums: list[int]) -> bytes:
        """What a reader needs to know for it. checksums: of kind REMOTE."""
        ...

    def introduce(self, lease: bytes, proof: bytes) -> bytes | None:
        """What a reader of kind MAPPED needs to know once. None: no engine asks."""
        ...

    def go_on(self) -> None:
        """Have reads go on that need this side, too. Never blocks. Raises OSError."""
        return

    def close(self) -> None:
        """Nobody can read it any more. Idempotent."""


class TransferServer:
    """Sends pages of `memory`, uint8 [rows, page_bytes], that are on offer. Raises ConfigError if it cannot listen."""

    def __init__(self, memory: Memory, offers: Offers, host: str, port: int, remote: Remote | None = None) -> None:
        self._memory = memory
        self._offers = offers
        self._remote = remote
        self._room, self._held = threading.Semaphore(_MOST_CONNECTIONS), threading.Semaphore(_MOST_CONNECTIONS)
        self._peers: set[DeadlineSocket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)
        except OSError as error:
            raise ConfigError(
                f"disaggregation_host={host!r}, disaggregation_port={port}: {error.strerror or error}",
                option="disaggregation_host",
            ) from error
        self.host = host
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="sgl-transfers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut all connections. Idempotent."""
        with self._lock:
            self._is_closed = True
            peers = list(self._peers)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in peers:
            peer.cut()
        self._thread.join()
        if self._remote is not None:
            self._remote.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if not self._is_closed:
                    time.sleep(0.05)  # such as too many open files
                continue
            if not self._room.acquire(blocking=False):
                sock.close()  # the reader computes instead
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), name="sgl-transfer", daemon=True).start()
            except RuntimeError as error:  # there are too many
                logger.warning("a transfer is not served: %s", error)
                self._room.release()
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        peer, taken = DeadlineSocket(sock, time.monotonic() + _ASK_SECONDS, _ASK_SECONDS), [self._room]
        with self._lock:
            self._peers.add(peer)
        try:
            if not self._is_closed:
                self._answer(peer, taken)
        except (OSError, EOFError) as error:
            logger.debug("a transfer ended: %s", error)
        finally:
            with self._lock:
                self._peers.discard(peer)
            sock.close()
            taken[0].release()

    def _answer(self, peer: DeadlineSocket, taken: list[threading.Semaphore]) -> None:
        magic, kind, lease, prompt, first, count = ASK.unpack(peer.receive(ASK.size))
        if magic != MAGIC or kind not in (PAGES, REMOTE, MAPPED, HELD):
            return
        remote, cut = self._remote, peer.cut
        if kind == HELD:
            self._hold(peer, taken, lease, prompt)
            return
        offer = self._offers.begin_read(lease, prompt, cut)
        if offer is None:
            peer.send(ANSWER.pack(GONE, 0))
            return
        num_sent, is_last = 0, False
        try:
            if first + count > len(offer.pages):
                peer.send(ANSWER.pack(GONE, 0))
                return
            peer = DeadlineSocket(peer.sock, offer.end, _SILENT_SECONDS)
            if count and not offer.is_copied.wait(max(0.0, offer.end - time.monotonic())):
                return
            if kind == PAGES and (remote is None or remote.kind != MAPPED):
                self._send(peer, offer, first, count)
            elif remote is None or remote.kind != kind:
                peer.send(ANSWER.pack(NOT_SERVED, 0))
                return
            else:
                left = offer.end - time.monotonic()
                peer = DeadlineSocket(peer.sock, offer.end, left)  # which is silent while the reader reads
                if offer.checksums is None and kind == REMOTE:
                    offer.checksums = [zlib.crc32(memoryview(self._memory[page])) for page in offer.pages]
                part = slice(first, first + count)
                self._tell(peer, remote.describe(offer.pages[part], (offer.checksums or [])[part]))
                readable = select.poll()
                readable.register(peer.sock, select.POLLIN)
                while kind == REMOTE and not readable.poll(_GO_ON_MS) and time.monotonic() < offer.end:
                    remote.go_on()
            is_last = peer.receive(1) == DONE
            num_sent = count if is_last else 0
        finally:
            self._offers.end_read(offer, cut, num_sent, is_last=is_last)

    def _hold(self, peer: DeadlineSocket, taken: list[threading.Semaphore], lease: bytes, proof: bytes) -> None:
        remote = self._remote
        told = None if remote is None or remote.kind != MAPPED else remote.introduce(lease, proof)
        if told is None or not self._held.acquire(blocking=False):
            peer.send(ANSWER.pack(NOT_SERVED, 0))
            return
        taken[0] = self._held
        self._room.release()
        self._tell(peer, told)
        ended = select.poll()
        ended.register(peer.sock, select.POLLIN)
        ended.poll()  # until either side ends

    def _send(self, peer: DeadlineSocket, offer: Offer, first: int, count: int) -> None:
        peer.send(ANSWER.pack(OK, self._memory.shape[1]))
        for page in offer.pages[first : first + count]:
            content = memoryview(self._memory[page])
            peer.send(CHECKSUM.pack(zlib.crc32(content)))
            peer.send(content)

    def _tell(self, peer: DeadlineSocket, described: bytes) -> None:
        peer.send(ANSWER.pack(OK, self._memory.shape[1]) + LENGTH.pack(len(described)) + described)
