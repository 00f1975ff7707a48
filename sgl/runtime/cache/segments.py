"""Records by name in append-only files of one folder, that outlast the engine.

    <folder>/<number>.pages     header, then records of one size

    header   magic, version, the model's hash, bytes of a record's content, checksum
    record   its name, checksum of name and content, checksum of the record's header; the content

A record is complete or it is not found: whoever opens the folder reads the headers of whole records only, never appends
to what another one wrote, and every read compares name and checksum. The least recently used segments are removed as a
whole. Only the thread of `PageFiles` calls it once it is open.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import zlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

NAME_BYTES: Final = 32
_MAGIC: Final = b"sglpages"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sI32sQI")  # magic, version, model, bytes of a content, checksum of these
_RECORD: Final = struct.Struct("<32sII")  # name, checksum of name and content, checksum of these
SEGMENT_BYTES: Final = 256 << 20
_LEAST_SEGMENTS: Final = 8  # that the bound is divided into
_MOST_SEGMENTS: Final = 256  # each is an open file, and a process may often have 1,024, its clients' among them
_MOST_RECORDS: Final = 1 << 20  # of all segments: their names take some 200 bytes each in memory
_MOST_JOINED: Final = 4 << 20  # bytes that are copied for one write: meanwhile, no other thread runs
_SYNC_BYTES: Final = 64 << 20  # written between two fsyncs
_NAMED: Final = re.compile(r"[0-9]{8}\.pages").fullmatch  # others are nobody's here
_OPEN: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW

Memory = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class _Segment:
    number: int
    file: int  # descriptor
    size: int  # of a content
    names: list[bytes] = field(default_factory=list)  # of its records, in order

    @property
    def end(self) -> int:
        """Bytes of whole records."""
        return _HEADER.size + len(self.names) * (_RECORD.size + self.size)


class Segments:
    """Of one folder, which nobody else uses; at most max_bytes of them. Raises OSError."""

    def __init__(
        self, folder: Path, model: bytes, sizes: Collection[int], max_bytes: int, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """model: 32 bytes; segments of others are removed. sizes: bytes of contents that there are."""
        self.index: dict[bytes, tuple[_Segment, int]] = {}
        """Where each record lies."""
        self.num_bytes = 0
        """Of all segments."""
        self.num_bad = 0
        """Records that were read and are not what was written."""
        self.max_bytes = min(max_bytes, _MOST_RECORDS * (_RECORD.size + min(sizes)))
        least = max(self.max_bytes // _MOST_SEGMENTS, _RECORD.size + max(sizes))
        self._segment_bytes = max(min(segment_bytes, self.max_bytes // _LEAST_SEGMENTS), least)
        self._folder, self._model, self._sizes = folder, model, sizes
        self._segments: OrderedDict[int, _Segment] = OrderedDict()  # least recently used first
        self._current: dict[int, _Segment] = {}  # by size of a content: which is appended to
        self._next = 0
        self._unsynced = 0
        try:
            self._open_all()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of all files. Idempotent."""
        for segment in self._segments.values():
            os.close(segment.file)
        self._segments.clear()
        self._current.clear()

    def outdate(self, model: bytes) -> None:
        """Let no later engine find what is in new segments, unless it names this model."""
        self._model = model

    def read(self, name: bytes, parts: Sequence[Memory]) -> bool:
        """Read a record's content into these; False, with anything in them, if there is none or it is damaged."""
        place = self.index.get(name)
        if place is None:
            return False
        segment, number = place
        head, views = bytearray(_RECORD.size), [part.data for part in parts]
        whole = _RECORD.size + segment.size
        try:
            size = os.preadv(segment.file, [head, *views], _HEADER.size + number * whole)
        except OSError as error:
            logger.warning("a cached page cannot be read: %s", error)
            size = 0
        stored, checksum, _ = _RECORD.unpack(head)
        if size != whole or stored != name or checksum != _checksum(name, views):
            if not self.num_bad:
                logger.warning("a page in %s is damaged: it is computed again, as others will be", self._folder)
            self.num_bad += 1
            self.index.pop(name, None)
            return False
        if segment.number in self._segments:
            self._segments.move_to_end(segment.number)
        return True

    def append(self, name: bytes, parts: Sequence[Memory]) -> None:
        """Write a record. Raises OSError, and then there is none."""
        views = [part.data for part in parts]
        size = sum(view.nbytes for view in views)
        whole = _RECORD.size + size
        segment = self._current.get(size)
        if segment is None or (len(segment.names) + 1) * whole > self._segment_bytes:
            segment = self._begin(size)
        checksum = _checksum(name, views)
        head = _RECORD.pack(name, checksum, zlib.crc32(name + checksum.to_bytes(4, "little")))
        try:
            if size > _MOST_JOINED:
                write_all(segment.file, head)
                for view in views:
                    write_all(segment.file, view)
            else:
                write_all(segment.file, b"".join((head, *views)))
        except OSError:
            self._cut(segment)
            raise
        self.index[name] = segment, len(segment.names)
        segment.names.append(name)
        self.num_bytes += whole
        self._unsynced += whole
        if self._unsynced > _SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        """What was appended outlasts the machine, too. Raises OSError."""
        for segment in self._current.values():
            os.fdatasync(segment.file)
        self._unsynced = 0

    def remove_all(self) -> None:
        """Remove all records. Raises OSError."""
        for segment in list(self._segments.values()):
            self._remove(segment)

    def _cut(self, segment: _Segment) -> None:
        """Take off what was written of a record: all behind it would be out of place."""
        del self._current[segment.size]
        with suppress(OSError):  # then nothing is appended to it any more
            os.ftruncate(segment.file, segment.end)
            self._current[segment.size] = segment
        self.num_bytes += os.fstat(segment.file).st_size - segment.end

    def _begin(self, size: int) -> _Segment:
        if size in self._current:
            self.sync()
        while self._segments and (
            self.num_bytes + self._promised(size) > self.max_bytes or len(self._segments) >= _MOST_SEGMENTS
        ):
            self._remove(next(iter(self._segments.values())))
        number, self._next = self._next, self._next + 1
        path = self._folder / f"{number:08}.pages"
        file = os.open(path, _OPEN | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            write_all(file, _header(self._model, size))
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        segment = self._current[size] = self._segments[number] = _Segment(number, file, size)
        self.num_bytes += _HEADER.size
        return segment

    def _promised(self, size: int) -> int:
        """Bytes by which a new segment of these contents may grow, and the present ones of others."""
        whole = _HEADER.size + self._segment_bytes
        return whole + sum(whole - other.end for other in self._current.values() if other.size != size)

    def _remove(self, segment: _Segment) -> None:
        for number, name in enumerate(segment.names):
            if self.index.get(name) == (segment, number):
                del self.index[name]
        del self._segments[segment.number]
        if self._current.get(segment.size) is segment:
            del self._current[segment.size]
        self.num_bytes -= os.fstat(segment.file).st_size
        path = self._folder / f"{segment.number:08}.pages"
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # the folder takes no changes any more: what the file has goes nevertheless
            logger.warning("%s cannot be removed, and is emptied: %s", path, error)
            os.ftruncate(segment.file, 0)
        finally:
            os.close(segment.file)

    # ── at the start ────────────────────────────────────────────────────────────────────────────────────────────

    def _open_all(self) -> None:
        """Take over the segments, in order; remove those without a whole record, or that the disk cannot read."""
        for path in sorted(self._folder.glob("*.pages")):
            if not _NAMED(path.name):
                continue
            self._next = int(path.stem) + 1
            if len(self._segments) >= _MOST_SEGMENTS:  # each start begins another, however little it writes
                self._remove(next(iter(self._segments.values())))
            segment = _Segment(int(path.stem), os.open(path, _OPEN), 0)
            self._segments[segment.number] = segment
            self.num_bytes += os.fstat(segment.file).st_size
            try:
                self._read_names(segment)
            except OSError as error:
                logger.warning("%s cannot be read, and is removed: %s", path, error)
                segment.size = 0
            if not segment.size or not segment.names:
                self._remove(segment)
        while self._segments and self.num_bytes > self.max_bytes:
            self._remove(next(iter(self._segments.values())))

    def _read_names(self, segment: _Segment) -> None:
        header = os.pread(segment.file, _HEADER.size, 0)
        segment.size = next((size for size in self._sizes if header == _header(self._model, size)), 0)
        if not segment.size:
            return
        whole = _RECORD.size + segment.size
        num_records = (os.fstat(segment.file).st_size - _HEADER.size) // whole
        for number in range(num_records):
            head = os.pread(segment.file, _RECORD.size, _HEADER.size + number * whole)
            name, checksum, own = _RECORD.unpack(head)
            if own != zlib.crc32(name + checksum.to_bytes(4, "little")):
                break
            self.index[name] = segment, number
            segment.names.append(name)


def write_all(file: int, data: bytes | memoryview) -> None:
    """Append bytes to a file. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _checksum(name: bytes, parts: Sequence[memoryview]) -> int:
    checksum = zlib.crc32(name)
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _header(model: bytes, size: int) -> bytes:
    fields = (_MAGIC, _VERSION, model, size)
    return _HEADER.pack(*fields, zlib.crc32(_HEADER.pack(*fields, 0)))
