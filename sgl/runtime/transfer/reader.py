"""A decode engine's end: reads pages that a prefill engine offers into its own buffer.

A read writes to its pages until it `is_quiet`, also after it failed or was cut: they are nobody else's before.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sgl.runtime.transfer.params import TransferParams
from sgl.runtime.transfer.wire import ANSWER, ASK, CHECKSUM, DONE, MAGIC, OK, PAGES, DeadlineSocket

Memory = npt.NDArray[np.uint8]
CONNECT_SECONDS = 3.0
_SILENT_SECONDS = 5.0
_POLL_SECONDS = 1e-4
_PATIENT_SECONDS = 2e-3  # between looks at what was given up
_ENDING_SECONDS = 2.0
_MUTE_SECONDS = 10.0  # between reads of an engine that did not answer: longer than such a read
_MOST_MUTE = 64  # engines that are known to be
MOST_READS = 16
"""At once; others wait, and their time runs."""
_MOST_SECONDS = 600


@dataclass(slots=True, eq=False)
class Read:
    """Pages under way. `num_good`, of the first, arrived, once it `is_done`."""

    params: TransferParams
    prompt: bytes  # the `prompt_hash` of the reader's own tokens
    first: int  # page of those on offer
    pages: list[int]  # rows of the own buffer
    end: float  # on time.monotonic
    num_good: int = 0
    seconds: float = 0.0  # from the server's answer on
    parts: dict[str, float] = field(default_factory=dict)
    """Where the time went, in seconds, and what else tells why."""
    noted: float = field(default_factory=time.monotonic)
    error: str | None = None
    is_done: bool = False
    is_quiet: bool = False
    is_cut: bool = False
    turn: float = 0.0  # of an engine that may be mute: when the next has one
    peer: DeadlineSocket | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, part: str) -> None:
        """Another part has ended."""
        before, self.noted = self.noted, time.monotonic()
        self.parts[part] = self.noted - before

    @contextlib.contextmanager
    def asking(self, peer: DeadlineSocket) -> Iterator[DeadlineSocket]:
        """Ask over another connection meanwhile, which `cut` ends, too. Raises TimeoutError."""
        with self.lock:
            if self.is_cut:
                raise TimeoutError("it was cut")
            before, self.peer = self.peer, peer
        try:
            yield peer
        finally:
            with self.lock:
                self.peer = before

    def cut(self) -> None:
        """End it early. Idempotent, from any thread."""
        with self.lock:
            self.is_cut = True
            if self.peer is not None:
                self.peer.cut()


class Reader(ABC):
    """Reads pages of other engines into rows of a buffer. Names the lease over TCP, by threads for several reads at
    once."""

    kind: bytes

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._threads = ThreadPoolExecutor(MOST_READS, thread_name_prefix="sgl-read")
        self._reads: set[Read] = set()
        self._mute: dict[str, float] = {}  # engines that did not answer, and when one read may try again
        self._lock = threading.Lock()
        self._is_closed = False

    def read(self, params: TransferParams, prompt: bytes, first: int, pages: list[int]) -> Read:
        """Start to read the pages on offer from the `first` on into these rows. With no pages: only end the lease."""
        read = Read(params, prompt, first, pages, time.monotonic() + min(params.lease_seconds, _MOST_SECONDS))
        with self._lock:
            if self._is_closed:
                read.is_done = read.is_quiet = True
                return read
            self._reads.add(read)
            self._threads.submit(self._run, read)
        return read

    def close(self) -> None:
        """Cut all reads, and wait until they are quiet. Idempotent."""
        with self._lock:
            self._is_closed = True
            reads = list(self._reads)
        for read in reads:
            read.cut()
        self._threads.shutdown()

    def _run(self, read: Read) -> None:
        try:
            self._connect(read)
        except (OSError, EOFError, ValueError) as error:
            read.error = read.error or f"{type(error).__name__}: {error}"
            self._failed(read, error)
        finally:
            read.is_done = True
            self._settle(read)
            with self._lock:
                self._reads.discard(read)

    def _failed(self, read: Read, error: Exception) -> None:
        """Reads of an engine that does not answer would hold the threads that reads of others need. One that refuses
        or closes holds none."""
        engine, now = read.params.engine, time.monotonic()
        with self._lock:
            if read.is_cut:  # it did not find out
                if self._mute.get(engine) == read.turn:
                    self._mute[engine] = now
            elif isinstance(error, TimeoutError):
                if "asked" not in read.parts and now < read.end:
                    self._mute = dict([*self._mute.items()][1 - _MOST_MUTE :])
                    self._mute.setdefault(engine, now + _MUTE_SECONDS)
            elif isinstance(error, ConnectionError) or read.peer is not None:
                self._mute.pop(engine, None)

    def _may_ask(self, read: Read) -> bool:
        """Whether its engine answers, as far as is known: of one that did not, one read finds out now and then."""
        engine, now = read.params.engine, time.monotonic()
        with self._lock:
            until = self._mute.get(engine, now)
            if engine in self._mute and until <= now:
                self._mute[engine] = read.turn = now + _MUTE_SECONDS
        return until <= now

    def _connect(self, read: Read) -> None:
        limit = min(CONNECT_SECONDS, read.end - time.monotonic())
        if read.is_cut or limit <= 0:
            raise EOFError("it was cut, or its time was up, before it began")
        if not self._may_ask(read):
            raise EOFError("the other engine has not answered others lately")
        with socket.create_connection((read.params.host, read.params.port), timeout=limit) as sock:
            peer = DeadlineSocket(sock, read.end, _SILENT_SECONDS)
            with read.lock:
                read.peer = peer
                if read.is_cut:
                    raise EOFError("it was cut")
            lease = bytes.fromhex(read.params.lease)
            peer.send(ASK.pack(MAGIC, self.kind, lease, read.prompt, read.first, len(read.pages)))
            status, page_bytes = ANSWER.unpack(peer.receive(ANSWER.size))
            with self._lock:
                self._mute.pop(read.params.engine, None)
            if status != OK:
                raise ValueError(
                    "the lease has ended" if status == 1 else "the other engine does not send pages so"
                )
            if page_bytes != self.page_bytes:
                raise ValueError(f"its pages have {page_bytes} bytes, and this engine's {self.page_bytes}")
            read.note("asked")
            began = read.noted
            try:
                self._receive(read, peer)
            finally:
                read.seconds = time.monotonic() - began
            read.is_done = True
            self._settle(read)
            with contextlib.suppress(OSError):  # nobody waits for it
                peer.send(DONE)

    @abstractmethod
    def _receive(self, read: Read, peer: DeadlineSocket) -> None:
        """Fill the pages, and count the good ones. Raises OSError, EOFError and ValueError."""

    def _has_ended(self, read: Read) -> bool:
        """Whether nothing writes to the pages any more. Raises ConnectionError if it has ended and does not count."""
        return True

    def _let_go(self, read: Read) -> None:
        """It has ended: nothing holds its pages any more."""
        read.is_quiet = True

    def _await(self, read: Read, seconds: float) -> None:
        """Until it has ended, for so long at most. Raises ConnectionError and TimeoutError."""
        end = min(read.end, time.monotonic() + seconds)
        while not self._has_ended(read):
            if read.is_cut or time.monotonic() > end:
                raise TimeoutError("it was cut, or took too long")
            time.sleep(_POLL_SECONDS)

    def _settle(self, read: Read) -> None:
        """Wait until it has ended; once this is closed, for some seconds."""
        ending: float | None = None
        with contextlib.suppress(ConnectionError):
            while not self._has_ended(read):
                ending = ending or (time.monotonic() if self._is_closed else None)
                if ending is not None and time.monotonic() - ending > _ENDING_SECONDS:
                    read.is_quiet = True
                    return
                time.sleep(_PATIENT_SECONDS)
        self._let_go(read)


class TcpReader(Reader):
    """Has the pages sent over TCP to rows of `memory`, uint8 [rows, page_bytes]."""

    kind = PAGES

    def __init__(self, memory: Memory, fit: Callable[[int, TransferParams], None]) -> None:
        """fit: turns what arrived in a row, from an engine of such sizes, into the own engine's page."""
        super().__init__(memory.shape[1])
        self.memory = memory
        self._fit = fit

    def _take(self, read: Read, page: int, checksum: int) -> None:
        """A page is there. Raises ValueError."""
        if zlib.crc32(memoryview(self.memory[page])) != checksum:
            raise ValueError("a page arrived damaged")
        self._fit(page, read.params)
        read.num_good += 1

    def _receive(self, read: Read, peer: DeadlineSocket) -> None:
        for page in read.pages:
            (checksum,) = CHECKSUM.unpack(peer.receive(CHECKSUM.size))
            peer.receive_into(memoryview(self.memory[page]))
            self._take(read, page, checksum)
