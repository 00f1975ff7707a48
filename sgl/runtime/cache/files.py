"""Cached pages in files, that outlast the engine.

A page's name is a hash of the model, its weights, the namespace and all tokens up to the page's end, so nothing finds a
page of anything else. What others need beside pages to go on there, a recurrent state or the windowed page of the same
tokens, has the same name but for its kind. All lie in segments (`Segments`) of

    <folder>/<model>/part-<n>

One engine at a time has a part, by a lock on its file: further engines have parts of their own.

One thread reads and writes, reads first; it knows host memory, and no trees. A disk that takes no writes is tried again
after a while; one that does not answer holds up that thread alone.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from sgl.errors import ConfigError
from sgl.runtime.cache.keys import TOKEN_BYTES, Namespace
from sgl.runtime.cache.parts import claim
from sgl.runtime.cache.segments import NAME_BYTES, SEGMENT_BYTES, Memory, Segments

logger = logging.getLogger(__name__)

CLOSING_SECONDS: Final = 2.0
"""For which an engine that ends writes what was asked for."""
_STUCK_SECONDS: Final = 5.0  # that it waits beyond, for a disk that does not answer
_FIRST_PAUSE: Final = 5.0  # seconds between a write that failed and the next; doubled while they fail
_LONGEST_PAUSE: Final = 300.0


class Kind(IntEnum):
    """What a record has, of the tokens of one page or of all up to its end."""

    PAGE = 0
    STATE = 1
    WINDOWED = 2


class Item(NamedTuple):
    """Something on its way from or to a file."""

    kind: Kind
    name: bytes  # of the page
    place: int  # in host memory: the row

    @property
    def record(self) -> bytes:
        """The name of its record."""
        return record_name(self.kind, self.name)


def record_name(kind: Kind, name: bytes) -> bytes:
    """Of something beside a page of this name."""
    return bytes((name[0] ^ kind,)) + name[1:]


@dataclass(slots=True, eq=False)
class Transfer:
    """Pages, then what goes with them, on their way from or to files. `num_good`, of the first, arrived."""

    items: list[Item]
    is_write: bool
    num_good: int = 0
    seconds: float = 0.0
    is_done: bool = False
    is_unwanted: bool = False
    """Nobody waits for it any more: nothing further is read. Its places are taken until it is done."""
    num_pages: int = field(init=False)
    """How many were asked for."""

    def __post_init__(self) -> None:
        self.num_pages = sum(item.kind is Kind.PAGE for item in self.items)

    @property
    def num_good_pages(self) -> int:
        """How many arrived, of the first."""
        return min(self.num_good, self.num_pages)


class PageFiles:
    """Pages of one model on files below `folder`, at most `max_bytes` of them. Methods are the loop thread's.

    memory: uint8 [pages, bytes of a page], the host pages that are read into and written, of page_size tokens. beside:
    likewise of what is not pages, each in several parts. arrived: called when something was read to a place. model: 32
    bytes, a hash of all that contents depend on besides tokens. Raises ConfigError if the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        model: bytes,
        memory: Memory,
        page_size: int,
        max_bytes: int,
        *,
        beside: Mapping[Kind, Sequence[Memory]] | None = None,
        arrived: Callable[[Kind, int], None] | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._memory = {Kind.PAGE: [memory], **(beside or {})}
        self._arrived = arrived
        self._page_size = page_size
        self._model = model
        self._sizes: dict[Kind, int] = {
            kind: sum(int(part.shape[1]) for part in parts) for kind, parts in self._memory.items()
        }
        self.num_failed = 0
        """Writes that the disk refused."""
        self.error: Exception | None = None
        """Why nothing is written at present."""
        self._pause = _FIRST_PAUSE
        self._writes_again = -math.inf  # monotonic seconds, from which a write is tried
        self._asked: set[bytes] = set()  # records that are to be written
        self._lock = -1
        try:
            self._part, self._lock = claim(folder, model.hex()[:24], max_bytes)
            self._segments = Segments(self._part, model, set(self._sizes.values()), max_bytes, segment_bytes)
        except OSError as error:
            self._unlock()
            of = f" ({error.filename})" if error.filename else ""
            raise ConfigError(
                f"hicache_storage_dir={str(folder)!r} cannot be used: {error.strerror or error}{of}",
                option="hicache_storage_dir",
            ) from error
        self._index = self._segments.index
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

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return self._segments.num_bytes

    @property
    def num_bad(self) -> int:
        """Records that were read and are not what was written."""
        return self._segments.num_bad

    def outdate(self) -> None:
        """Name later pages so that they meet none of before."""
        self._model = hashlib.blake2b(self._model + os.urandom(NAME_BYTES), digest_size=NAME_BYTES).digest()
        self._segments.outdate(self._model)

    # ── names ───────────────────────────────────────────────────────────────────────────────────────────────────

    def names(self, key: bytes, namespace: Namespace) -> list[bytes]:
        """The names of the pages of a key's tokens, as far as other engines would name them so. None of
        adapters, whose numbers are one engine's own; none behind an image, for its number in the key is, too."""
        if isinstance(namespace, tuple):
            return []
        ids = np.frombuffer(key, np.int32)
        images = np.flatnonzero(ids < 0)
        num_pages = (len(ids) if not len(images) else int(images[0])) // self._page_size
        name = hashlib.blake2b(self._model + repr(namespace).encode(), digest_size=NAME_BYTES).digest()
        names = []
        size = self._page_size * TOKEN_BYTES
        for at in range(0, num_pages * size, size):
            name = hashlib.blake2b(name + key[at : at + size], digest_size=NAME_BYTES).digest()
            names.append(name)
        return names

    def leading(self, names: Sequence[bytes]) -> list[bytes]:
        """The first of these names, up to one whose page lies in no file."""
        return list(takewhile(self._index.__contains__, names))

    def has(self, kind: Kind, name: bytes) -> bool:
        """Whether that of the page's tokens lies in a file."""
        return record_name(kind, name) in self._index

    def is_kept(self, item: Item) -> bool:
        """Whether it lies in a file, or will."""
        return (record := item.record) in self._index or record in self._asked

    def in_tokens(self, kinds: Sequence[Kind]) -> int:
        """Tokens whose pages take as many bytes as these."""
        num_bytes = sum(map(self._sizes.__getitem__, kinds))
        return num_bytes * self._page_size // self._sizes[Kind.PAGE]

    # ── transfers ───────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, items: Sequence[Item]) -> Transfer:
        """Start to read into these places of host memory, which are nobody else's until it is done."""
        return self._begin(self._reads, Transfer(list(items), is_write=False))

    def write(self, items: Sequence[Item]) -> Transfer:
        """Start to write what host memory has in these places, which nobody changes until it is done."""
        self._asked.update(item.record for item in items)
        return self._begin(self._writes, Transfer(list(items), is_write=True))

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
            self._segments.close()
            self._unlock()

    def _unlock(self) -> None:
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
                self._segments.remove_all()
                continue
            transfer = self._reads[0] if self._reads else self._writes[0]
            if not transfer.is_write:
                self._read_all(transfer)
                self._reads.popleft()
            elif not self._write_some(transfer):
                self._writes.popleft()
                self._end(transfer)
        self._segments.sync()

    def _end(self, transfer: Transfer) -> None:
        if transfer.is_write:
            self._asked.difference_update(item.record for item in transfer.items)
        transfer.is_done = True

    def _read_all(self, transfer: Transfer) -> None:
        began = time.monotonic()
        for item in transfer.items:
            if transfer.is_unwanted or not self._read(item):
                break
            transfer.num_good += 1
        transfer.seconds = time.monotonic() - began
        transfer.is_done = True

    def _read(self, item: Item) -> bool:
        is_good = self._segments.read(item.record, self._parts(item))
        if is_good and self._arrived is not None:
            self._arrived(item.kind, item.place)
        return is_good

    def _parts(self, item: Item) -> list[Memory]:
        return [memory[item.place] for memory in self._memory[item.kind]]

    def _write_some(self, transfer: Transfer) -> bool:
        """Write a transfer's next record; False if there is none, or nothing can be written at present."""
        if time.monotonic() < self._writes_again or transfer.num_good == len(transfer.items):
            return False
        item = transfer.items[transfer.num_good]
        if item.record not in self._index:
            try:
                self._segments.append(item.record, self._parts(item))
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
