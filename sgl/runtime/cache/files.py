"""Cached pages in files, that outlast the engine.

A page's name is a hash of the model, its weights, the namespace and all tokens up to the page's end, so nothing finds a
page of anything else. Pages are appended to segments:

    <folder>/<model>/part-<n>/<number>.pages     header, then records of one size

    header   magic, version, the model's hash, size of a page, checksum
    record   the page's name, checksum of name and page, checksum of the record's header; the page

A record is complete or it is not found: a new engine reads the headers of whole records only, never appends to what
another one wrote, and every read compares name and checksum. The least recently used segments are removed as a whole.
One engine at a time has a part, by a lock on its file: further engines have parts of their own.

One thread reads and writes, reads first; it knows host memory, and no trees. A disk that takes no writes is tried again
after a while; one that does not answer holds up that thread alone.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import struct
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from sgl.errors import ConfigError
from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.keys import TOKEN_BYTES, Namespace
from sgl.runtime.cache.parts import claim, tidy

logger = logging.getLogger(__name__)

_MAGIC: Final = b"sglpages"
_VERSION: Final = 1
_NAME: Final = 32  # bytes
_HEADER: Final = struct.Struct("<8sI32sQI")  # magic, version, model, bytes of a page, checksum of these
_RECORD: Final = struct.Struct("<32sII")  # name, checksum of name and page, checksum of these
_SEGMENT_BYTES: Final = 256 << 20
_LEAST_SEGMENTS: Final = 8  # that the bound is divided into
_MOST_SEGMENTS: Final = 256  # each is an open file, and a process may often have 1,024, its clients' among them
_MOST_RECORDS: Final = 1 << 20  # of all segments: their names take some 200 bytes each in memory
_SYNC_BYTES: Final = 64 << 20  # written between two fsyncs
CLOSING_SECONDS: Final = 2.0
"""For which an engine that ends writes what was asked for."""
_STUCK_SECONDS: Final = 5.0  # that it waits beyond, for a disk that does not answer
_FIRST_PAUSE: Final = 5.0  # seconds between a write that failed and the next; doubled while they fail
_LONGEST_PAUSE: Final = 300.0

Memory = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class Transfer:
    """Pages on their way from or to files. `num_good`, of the first, arrived."""

    names: list[bytes]
    pages: list[int]  # of host memory
    is_write: bool
    num_good: int = 0
    seconds: float = 0.0
    is_done: bool = False
    is_unwanted: bool = False
    """Nobody waits for it any more: no further page is read. Its pages are taken until it is done."""

    @property
    def num_pages(self) -> int:
        """How many were asked for."""
        return len(self.pages)


@dataclass(slots=True, eq=False)
class _Segment:
    number: int
    file: int  # descriptor
    names: list[bytes] = field(default_factory=list)  # of its records, in order


class PageFiles:
    """Pages of one model on files below `folder`, at most `max_bytes` of them. Methods are the loop thread's.

    memory: uint8 [pages, bytes of a page], the host pages that are read into and written, of page_size tokens. model:
    32 bytes, a hash of all that a page's contents depend on besides tokens. Raises ConfigError if the folder cannot be
    used.
    """

    def __init__(
        self,
        folder: Path,
        model: bytes,
        memory: Memory,
        page_size: int,
        max_bytes: int,
        *,
        segment_bytes: int = _SEGMENT_BYTES,
    ) -> None:
        self._memory = memory
        self._page_size = page_size
        self._model = model
        self._page_bytes = memory.shape[1]
        self._record_bytes = _RECORD.size + self._page_bytes
        self.max_bytes = min(max_bytes, _MOST_RECORDS * self._record_bytes)
        least = max(self.max_bytes // _MOST_SEGMENTS, self._record_bytes)
        self._segment_bytes = max(min(segment_bytes, self.max_bytes // _LEAST_SEGMENTS), least)
        self.num_bytes = 0
        """Of all segments."""
        self.num_bad = 0
        """Records that were read and are not what was written."""
        self.num_failed = 0
        """Writes that the disk refused."""
        self.error: Exception | None = None
        """Why nothing is written at present."""
        self._pause = _FIRST_PAUSE
        self._writes_again = -math.inf  # monotonic seconds, from which a write is tried
        self._index: dict[bytes, tuple[_Segment, int]] = {}
        self._segments: OrderedDict[int, _Segment] = OrderedDict()  # least recently used first
        self._current: _Segment | None = None
        self._next = 0
        self._unsynced = 0
        self._asked: set[bytes] = set()  # names that are to be written
        self._lock = -1
        try:
            self._part, self._lock = claim(folder / model.hex()[:24])
            tidy(folder, self._part, self.max_bytes)
            self._open_all()
        except OSError as error:
            self._let_go()
            raise ConfigError(
                f"hicache_storage_dir={str(folder)!r} cannot be used: {error.strerror or error}",
                option="hicache_storage_dir",
            ) from error
        self._reads: deque[Transfer] = deque()
        self._writes: deque[Transfer] = deque()
        self._has_work = threading.Condition()
        self._is_closing = False
        self._ends = math.inf  # monotonic seconds, after which nothing is begun
        self._clears = False
        self._thread = threading.Thread(target=self._run, name="sgl-page-files", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._index)

    def outdate(self) -> None:
        """Name later pages so that they meet none of before."""
        self._model = hashlib.blake2b(self._model + os.urandom(_NAME), digest_size=32).digest()

    # ── names ───────────────────────────────────────────────────────────────────────────────────────────────────

    def names(self, key: bytes, namespace: Namespace, start: int = 0) -> list[bytes]:
        """The names of the pages of a key's tokens from `start` on, as far as other engines would name them so. None of
        adapters, whose numbers are one engine's own; none behind an image, for its number in the key is, too."""
        if isinstance(namespace, tuple):
            return []
        ids = np.frombuffer(key, np.int32)
        images = np.flatnonzero(ids < 0)
        num_pages = (len(ids) if not len(images) else int(images[0])) // self._page_size
        name = hashlib.blake2b(self._model + repr(namespace).encode(), digest_size=_NAME).digest()
        names = []
        size = self._page_size * TOKEN_BYTES
        for at in range(0, num_pages * size, size):
            name = hashlib.blake2b(name + key[at : at + size], digest_size=_NAME).digest()
            names.append(name)
        return names[start // self._page_size :]

    def stored(self, key: bytes, namespace: Namespace, start: int) -> list[bytes]:
        """The names of the pages from token `start` on that lie in files, up to the first that does not."""
        return self.leading(self.names(key, namespace, start)) if self._index else []

    def leading(self, names: Sequence[bytes]) -> list[bytes]:
        """The first of these names, up to one whose page lies in no file."""
        return list(takewhile(self._index.__contains__, names))

    def has(self, name: bytes) -> bool:
        """Whether the page lies in a file, or will."""
        return name in self._index or name in self._asked

    # ── transfers ───────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, names: Sequence[bytes], pages: Int32Array) -> Transfer:
        """Start to read pages into these host pages, which are nobody else's until it is done."""
        return self._begin(self._reads, Transfer(list(names), pages.tolist(), is_write=False))

    def write(self, names: Sequence[bytes], pages: Int32Array) -> Transfer:
        """Start to write these host pages, which nobody changes until it is done."""
        self._asked.update(names)
        return self._begin(self._writes, Transfer(list(names), pages.tolist(), is_write=True))

    def clear(self) -> None:
        """Remove all pages; what is still to be written is not."""
        with self._has_work:
            self._clears = True
            self._index.clear()
            self._has_work.notify()

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Write what was asked for, for so many seconds, and let others have the part. Idempotent."""
        with self._has_work:
            self._is_closing = True
            self._ends = min(self._ends, time.monotonic() + seconds)
            self._has_work.notify()
        self._thread.join(max(self._ends - time.monotonic(), 0.0) + _STUCK_SECONDS)
        if self._thread.is_alive():  # its files stay open: another's could have their numbers when it goes on
            logger.warning("%s does not answer: cached pages that were to be written there are not", self._part)
        else:
            self._let_go()

    def _let_go(self) -> None:
        for segment in self._segments.values():
            os.close(segment.file)
        self._segments.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _begin(self, waiting: deque[Transfer], transfer: Transfer) -> Transfer:
        with self._has_work:
            if self._is_closing:
                self._end(transfer)
            else:
                waiting.append(transfer)
                self._has_work.notify()
        return transfer

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # of any class: serving goes on without files
            logger.exception("cached pages are neither written to files nor read any more")
            self.error = error
        with self._has_work:
            self._is_closing = True
            for transfer in (*self._reads, *self._writes):
                self._end(transfer)
            self._index.clear()

    def _work(self) -> None:
        while True:
            with self._has_work:
                while not (self._reads or self._writes or self._clears or self._is_closing):
                    self._has_work.wait()
                clears, self._clears = self._clears, False
                if clears:
                    for transfer in self._writes:
                        self._end(transfer)
                    self._writes.clear()
                elif not (self._reads or self._writes) or time.monotonic() > self._ends:
                    break
            if clears:
                self._remove_all()
                continue
            transfer = self._reads[0] if self._reads else self._writes[0]
            if not transfer.is_write:
                self._read_all(transfer)
                self._reads.popleft()
            elif not self._write_some(transfer):
                self._writes.popleft()
                self._end(transfer)
        if self._current is not None:
            self._sync()

    def _end(self, transfer: Transfer) -> None:
        self._asked.difference_update(transfer.names)
        transfer.is_done = True

    def _read_all(self, transfer: Transfer) -> None:
        began = time.monotonic()
        for name, page in zip(transfer.names, transfer.pages, strict=True):
            if transfer.is_unwanted or not self._read(name, page):
                break
            transfer.num_good += 1
        transfer.seconds = time.monotonic() - began
        transfer.is_done = True

    def _read(self, name: bytes, page: int) -> bool:
        place = self._index.get(name)
        if place is None:
            return False
        segment, number = place
        target = self._memory[page]
        head = bytearray(_RECORD.size)
        try:
            size = os.preadv(segment.file, [head, memoryview(target)], _HEADER.size + number * self._record_bytes)
        except OSError as error:
            logger.warning("a cached page cannot be read: %s", error)
            size = 0
        stored, checksum, _ = _RECORD.unpack(head)
        is_its = size == self._record_bytes and stored == name
        if not is_its or checksum != zlib.crc32(memoryview(target), zlib.crc32(name)):
            if not self.num_bad:
                logger.warning("a page in %s is damaged: it is computed again, as others will be", self._part)
            self.num_bad += 1
            self._index.pop(name, None)
            return False
        if segment.number in self._segments:
            self._segments.move_to_end(segment.number)
        return True

    def _write_some(self, transfer: Transfer) -> bool:
        """Write a transfer's next page; False if there is none, or nothing can be written at present."""
        if time.monotonic() < self._writes_again or transfer.num_good == transfer.num_pages:
            return False
        name, page = transfer.names[transfer.num_good], transfer.pages[transfer.num_good]
        if name not in self._index:
            try:
                self._append(name, self._memory[page])
            except OSError as error:
                logger.warning("cached pages are not written to files for %g seconds: %s", self._pause, error)
                self.num_failed += 1
                self.error, self._writes_again = error, time.monotonic() + self._pause
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                return False
            if self.error is not None:
                logger.warning("cached pages are written to files again")
                self.error, self._pause = None, _FIRST_PAUSE
        transfer.num_good += 1
        return True

    def _append(self, name: bytes, page: Memory) -> None:
        segment = self._current
        if segment is None or (len(segment.names) + 1) * self._record_bytes > self._segment_bytes:
            segment = self._begin_segment()
        data = page.tobytes()
        checksum = zlib.crc32(data, zlib.crc32(name))
        head = _RECORD.pack(name, checksum, zlib.crc32(name + checksum.to_bytes(4, "little")))
        try:
            write_all(segment.file, head + data)
        except OSError:
            self._cut(segment)
            raise
        self._index[name] = segment, len(segment.names)
        segment.names.append(name)
        self.num_bytes += self._record_bytes
        self._unsynced += self._record_bytes
        if self._unsynced > _SYNC_BYTES:
            self._sync()

    def _cut(self, segment: _Segment) -> None:
        """Take off what was written of a record: all behind it would be out of place."""
        end = _HEADER.size + len(segment.names) * self._record_bytes
        self._current = None
        with suppress(OSError):  # then nothing is appended to it any more
            os.ftruncate(segment.file, end)
            self._current = segment
        self.num_bytes += os.fstat(segment.file).st_size - end

    def _sync(self) -> None:
        assert self._current is not None, "something was written"
        os.fdatasync(self._current.file)
        self._unsynced = 0

    def _begin_segment(self) -> _Segment:
        if self._current is not None:
            self._sync()
        while self._segments and (
            self.num_bytes + self._segment_bytes > self.max_bytes or len(self._segments) >= _MOST_SEGMENTS
        ):
            self._remove(next(iter(self._segments.values())))
        number, self._next = self._next, self._next + 1
        path = self._part / f"{number:08}.pages"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            write_all(file, _header(self._model, self._page_bytes))
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        segment = self._current = self._segments[number] = _Segment(number, file)
        self.num_bytes += _HEADER.size
        return segment

    def _remove(self, segment: _Segment) -> None:
        for number, name in enumerate(segment.names):
            if self._index.get(name) == (segment, number):
                del self._index[name]
        del self._segments[segment.number]
        if segment is self._current:
            self._current = None
        self.num_bytes -= os.fstat(segment.file).st_size
        os.close(segment.file)
        (self._part / f"{segment.number:08}.pages").unlink(missing_ok=True)

    def _remove_all(self) -> None:
        for segment in list(self._segments.values()):
            self._remove(segment)

    # ── at the start ────────────────────────────────────────────────────────────────────────────────────────────

    def _open_all(self) -> None:
        """Take over the part's segments, in order; remove those without a whole record."""
        for path in sorted(self._part.glob("*.pages")):
            if not path.stem.isdecimal():
                continue
            self._next = max(self._next, int(path.stem) + 1)
            if len(self._segments) >= _MOST_SEGMENTS:  # each start begins another, however little it writes
                self._remove(next(iter(self._segments.values())))
            segment = _Segment(int(path.stem), os.open(path, os.O_RDWR | os.O_CLOEXEC))
            self._segments[segment.number] = segment
            self.num_bytes += os.fstat(segment.file).st_size
            self._read_names(segment)
            if not segment.names:
                self._remove(segment)
        while self._segments and self.num_bytes > self.max_bytes:
            self._remove(next(iter(self._segments.values())))

    def _read_names(self, segment: _Segment) -> None:
        if os.pread(segment.file, _HEADER.size, 0) != _header(self._model, self._page_bytes):
            return
        num_records = (os.fstat(segment.file).st_size - _HEADER.size) // self._record_bytes
        for number in range(num_records):
            head = os.pread(segment.file, _RECORD.size, _HEADER.size + number * self._record_bytes)
            name, checksum, own = _RECORD.unpack(head)
            if own != zlib.crc32(name + checksum.to_bytes(4, "little")):
                break
            self._index[name] = segment, number
            segment.names.append(name)


def write_all(file: int, data: bytes) -> None:
    """Append bytes to a file. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _header(model: bytes, page_bytes: int) -> bytes:
    fields = (_MAGIC, _VERSION, model, page_bytes)
    return _HEADER.pack(*fields, zlib.crc32(_HEADER.pack(*fields, 0)))
