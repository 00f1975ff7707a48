"""Prefixes in files on their way into host memory: what there is of one, and what was read of it.

Of a model with recurrent states, or with windows in some layers, others go on only where files or host memory have the
state, or the windowed pages that are seen, too: what is read ends there, and counts as read when all of that arrived.
Files that answer too late are not waited for: what they gave is used, and what they may still fill is nobody's until
they have answered.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.files import Item, Kind, PageFiles, Transfer
from sgl.runtime.cache.host import HostCache
from sgl.runtime.cache.keys import TOKEN_BYTES, Namespace
from sgl.runtime.cache.node import NO_PAGES, Node
from sgl.runtime.cache.rates import Rates
from sgl.runtime.scheduler.beside import Beside
from sgl.runtime.scheduler.counters import TierCounters
from sgl.runtime.scheduler.request import Request

logger = logging.getLogger(__name__)

_MOST_NAMED = 32  # requests whose pages' names are kept
_LATE = 2.0  # times what computing would have taken, and
_LATE_SECONDS = 3.0  # on top: how long files are waited for


class Stored(NamedTuple):
    """What files have of a prefix beyond copies and the device."""

    end: int  # tokens, behind which others can go on
    names: list[bytes]  # of the pages to be read: the last ones up to there
    beside: list[bytes]  # of the pages with which goes what else is to be read,
    places: list[int]  # and the numbers of pages before each
    num_tokens: int  # whose pages take as many bytes


@dataclass(slots=True, eq=False)
class Read:
    """Of one prefix. Its places in host memory are private."""

    transfer: Transfer
    pages: Int32Array
    rows: Int32Array  # for what goes with pages
    places: list[int]  # of these: the numbers of pages before
    held: Int32Array  # rows that are there already


class FileReads:
    """Of one scheduler. Single-threaded."""

    def __init__(
        self, files: PageFiles | None, host: HostCache, rates: Rates, counters: TierCounters, beside: Beside
    ) -> None:
        self._files, self._host, self._rates, self._counters, self._beside = files, host, rates, counters, beside
        self._reading: list[Read] = []
        self._given_up: list[Read] = []
        self._named: OrderedDict[int, tuple[int, list[bytes]]] = OrderedDict()
        """By uid: how long a waiting request's key was, and the names of its pages."""

    def find(
        self, key: bytes, namespace: Namespace, copy: Node, there: int, least: int, request: Request | None
    ) -> Stored | None:
        """The longest prefix of `key`, of more than `least` tokens, that is there once files are read. copy: the end of
        its copies. there: tokens that the device or host memory has."""
        files = self._files
        if files is None or self._given_up or not len(files):
            return None
        size, kind = self._host.page_size, self._beside.kind
        names = self._names(files, key, namespace, request)
        first = there // size
        reach = first + len(files.leading(names[first:]))
        if reach > len(names) or reach * size <= least:
            return None
        end, places = self._beside.find(copy, least // size, reach, lambda place: files.has(kind, names[place]))
        if end * size <= least:
            return None
        names, beside = names[first:end], [names[place] for place in places]
        num_tokens = files.in_tokens([*[Kind.PAGE] * len(names), *[kind] * len(beside)])
        return Stored(end * size, names, beside, places, num_tokens)

    def _names(self, files: PageFiles, key: bytes, namespace: Namespace, request: Request | None) -> list[bytes]:
        """The names of a key's pages. They are hashes of all that comes before, and requests ask at each step: the
        latest ones' are kept."""
        if request is None:
            return files.names(key, namespace)
        named = self._named.pop(request.uid, None)
        if named is None or named[0] < len(key):
            named = len(key), files.names(key, namespace)
        self._named[request.uid] = named
        if len(self._named) > _MOST_NAMED:
            self._named.popitem(last=False)
        return named[1][: len(key) // (TOKEN_BYTES * self._host.page_size)]

    def forget(self, request: Request) -> None:
        """It asks no more."""
        self._named.pop(request.uid, None)

    def clear(self) -> None:
        """Names may be others from now on."""
        self._named.clear()

    # ── reads ───────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, stored: Stored, copy: Node) -> Read | None:
        """Start to read; `copy` is locked, and ends where that begins or, if no pages are read, there. None if there
        is no room."""
        assert self._files is not None, "something is stored there"
        held = self._beside.hold_seen(copy, stored.end)  # before others make room for what is read
        pages = self._host.alloc(len(stored.names))
        is_room = len(pages) == len(stored.names) or (not stored.places and len(pages) > 0)
        rows = self._beside.alloc_copies(len(stored.places)) if is_room else None
        if rows is None:
            self._free(pages, NO_PAGES, held)
            return None
        items = [Item(Kind.PAGE, *each) for each in zip(stored.names, pages.tolist(), strict=False)]
        items += [Item(self._beside.kind, *each) for each in zip(stored.beside, rows.tolist(), strict=True)]
        read = Read(self._files.read(items), pages, rows, stored.places, held)
        self._reading.append(read)
        return read

    def has_ended(self, read: Read, seconds: float) -> bool:
        """Whether to wait no longer for a read that began so long ago."""
        transfer = read.transfer
        computing = transfer.num_pages * self._host.page_size * self._rates.compute.seconds
        return transfer.is_done or seconds > _LATE * computing + _LATE_SECONDS

    def end(self, read: Read, key: bytes, namespace: Namespace, copy: Node) -> Node:
        """Give what was read its place behind the locked `copy`, and what could not be read back; key: of what follows
        it. Returns the node in its place, locked."""
        assert self._files is not None, "they are read"
        transfer, tree = read.transfer, self._host.tree
        self._reading.remove(read)
        is_done = transfer.is_done  # asked once: the disk may answer meanwhile
        good = transfer.num_good_pages
        self._counters.read_pages += good
        if good:
            num_bytes = good * self._host.page_size * TOKEN_BYTES
            inserted = tree.insert(key[:num_bytes], read.pages[:good], namespace, after=copy)
            self._host.pool.free(inserted.duplicates)
            tree.move_lock(copy, inserted.node)
            copy = inserted.node
        read.pages = read.pages[good:]
        if not is_done:
            self._beside.release_copies(read.held)  # nobody locks their nodes any more
            read.held = NO_PAGES
            num_late, num_all = len(transfer.items) - transfer.num_good, len(transfer.items)
            logger.warning("files are late: %d of %d cached pages or states are computed", num_late, num_all)
            self._counters.num_late += 1
            transfer.is_unwanted = True
            self._given_up.append(read)
            return copy
        read_items = transfer.items[: transfer.num_good]
        self._rates.note_read(self._files.in_tokens([item.kind for item in read_items]), transfer.seconds)
        if transfer.num_good == len(transfer.items) and len(read.rows):
            self._beside.insert_copies(copy, read.places, read.rows)
            read.rows = NO_PAGES
        self._free(read.pages, read.rows, read.held)
        return copy

    def _free(self, pages: Int32Array, rows: Int32Array, held: Int32Array) -> None:
        self._host.pool.free(pages)
        self._beside.free_copies(rows)
        self._beside.release_copies(held)

    def poll(self) -> None:
        """Take back what late reads have."""
        for read in [read for read in self._given_up if read.transfer.is_done]:
            self._given_up.remove(read)
            self._free(read.pages, read.rows, read.held)

    # ── for the ledger ──────────────────────────────────────────────────────────────────────────────────────────

    def all(self) -> list[Read]:
        """Those that have not ended."""
        return [*self._reading, *self._given_up]
