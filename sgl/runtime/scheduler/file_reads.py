"""Prefixes in files on their way into host memory: what there is of one, and what was read of it.

Of a model with recurrent states, or with windows in some layers, others go on only where files or host memory have the
state, or the windowed pages that are seen, too: what is read ends there, and counts as read when all of that arrived.
Files that answer too late are not waited for: what they gave is used, and what they may still fill is nobody's until
they have answered.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.files import Item, Kind, PageFiles, Transfer
from sgl.runtime.cache.host import HostCache
from sgl.runtime.cache.keys import TOKEN_BYTES, Namespace
from sgl.runtime.cache.node import Match, Node
from sgl.runtime.cache.rates import Rates
from sgl.runtime.cache.windows import first_seen_page, usable_pages
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.saves import TierCounters
from sgl.runtime.scheduler.window_copies import insert_held

logger = logging.getLogger(__name__)

_MOST_NAMED = 32  # requests whose pages' names are kept
_LATE = 2.0  # times what computing would have taken, and
_LATE_SECONDS = 3.0  # on top: how long files are waited for
_NO_PAGES: Int32Array = np.empty(0, np.int32)


class Stored(NamedTuple):
    """What files have of a prefix beyond copies and the device."""

    end: int  # tokens, behind which others can go on
    names: list[bytes]  # of the pages to be read: the last ones up to there
    beside: list[tuple[Kind, bytes]]  # likewise what goes with them, by the page's name
    places: list[int]  # of windowed pages among these: the numbers of pages before
    num_tokens: int  # whose pages take as many bytes


@dataclass(slots=True, eq=False)
class Read:
    """Of one prefix. All places are private."""

    transfer: Transfer
    pages: Int32Array
    state: int | None
    windowed: Int32Array
    places: list[int]  # of these: the numbers of pages before
    held: Int32Array  # windowed copies that are there already


class FileReads:
    """Of one scheduler. Single-threaded."""

    def __init__(self, files: PageFiles, host: HostCache, rates: Rates, counters: TierCounters) -> None:
        self._files, self._host, self._rates, self._counters = files, host, rates, counters
        self._reading: list[Read] = []
        self._given_up: list[Read] = []
        self._named: OrderedDict[int, tuple[int, list[bytes]]] = OrderedDict()
        """By uid: how long a waiting request's key was, and the names of its pages."""

    def find(
        self, key: bytes, namespace: Namespace, match: Match, there: int, least: int, request: Request | None
    ) -> Stored | None:
        """The longest prefix of `key`, of more than `least` tokens, that is there once files are read. match: its
        copies. there: tokens that the device or host memory has."""
        if self._given_up or not len(self._files):
            return None
        size = self._host.page_size
        names = self._names(key, namespace, request)
        first = there // size
        reach = first + len(self._files.leading(names[first:]))
        if reach > len(names) or reach * size <= least:
            return None
        if self._host.states is not None:
            has, ends = self._files.has, range(reach, least // size, -1)
            end = next((end for end in ends if has(Kind.STATE, names[end - 1])), 0)
            return self._stored(end, names[first:end], [(Kind.STATE, names[end - 1])], []) if end else None
        if self._host.windows is not None:
            return self._find_windowed(match.node, names, first, reach, least)
        return self._stored(reach, names[first:reach], [], []) if reach > first else None

    def _find_windowed(self, copy: Node, names: list[bytes], first: int, reach: int, least: int) -> Stored | None:
        windows, size = self._host.windows, self._host.page_size
        assert windows is not None, "the model has windowed pages"
        start = min(first_seen_page(windows.window, size, least), reach)
        copied = np.zeros(reach, np.bool_)
        its = windows.pages_from(copy, 0)[:reach] != 0
        copied[: len(its)] = its
        there = copied.copy()
        there[:start] = True  # nothing behind `least` sees them
        for place in (start + np.flatnonzero(~there[start:])).tolist():
            there[place] = self._files.has(Kind.WINDOWED, names[place])
        end = usable_pages(there, windows.window, size)
        if end * size <= least:
            return None
        seen = first_seen_page(windows.window, size, end * size)
        places = (seen + np.flatnonzero(~copied[seen:end])).tolist()
        beside = [(Kind.WINDOWED, names[place]) for place in places]
        return self._stored(end, names[first:end], beside, places)

    def _stored(self, end: int, names: list[bytes], beside: list[tuple[Kind, bytes]], places: list[int]) -> Stored:
        num_tokens = self._files.in_tokens([*[Kind.PAGE] * len(names), *(kind for kind, _ in beside)])
        return Stored(end * self._host.page_size, names, beside, places, num_tokens)

    def _names(self, key: bytes, namespace: Namespace, request: Request | None) -> list[bytes]:
        """The names of a key's pages. They are hashes of all that comes before, and requests ask at each step: the
        latest ones' are kept."""
        if request is None:
            return self._files.names(key, namespace)
        named = self._named.pop(request.uid, None)
        if named is None or named[0] < len(key):
            named = len(key), self._files.names(key, namespace)
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
        names, windows = stored.names, self._host.windows
        kinds = [kind for kind, _ in stored.beside]
        held, windowed, state = _NO_PAGES, _NO_PAGES, None
        if windows is not None:  # before others make room for what is read
            seen = first_seen_page(windows.window, self._host.page_size, stored.end)
            held = windows.pages_from(copy, seen)
            held = held[held != 0]
            windows.hold_pages(held)
        pages = self._host.alloc(len(names))
        is_room = len(pages) == len(names) or (not kinds and len(pages) > 0)
        if is_room and Kind.STATE in kinds:
            assert self._host.states is not None, "files have some"
            state = self._host.states.alloc(spares_locked=True)
            is_room = state is not None
        if is_room and windows is not None:
            allocated = windows.alloc(len(stored.places))
            is_room, windowed = allocated is not None, _NO_PAGES if allocated is None else allocated
        if not is_room:
            self._free(pages, state, windowed, held)
            return None
        places = [state] if state is not None else windowed.tolist()
        items = [Item(Kind.PAGE, *each) for each in zip(names, pages.tolist(), strict=False)]
        items += [Item(kind, name, at) for (kind, name), at in zip(stored.beside, places, strict=True)]
        read = Read(self._files.read(items), pages, state, windowed, stored.places, held)
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
            if self._host.windows is not None:  # nobody locks their nodes any more
                self._host.windows.release(read.held, is_end=True)
                read.held = _NO_PAGES
            num_late, num_all = len(transfer.items) - transfer.num_good, len(transfer.items)
            logger.warning("files are late: %d of %d cached pages or states are computed", num_late, num_all)
            self._counters.num_late += 1
            transfer.is_unwanted = True
            self._given_up.append(read)
            return copy
        read_items = transfer.items[: transfer.num_good]
        self._rates.note_read(self._files.in_tokens([item.kind for item in read_items]), transfer.seconds)
        if transfer.num_good == len(transfer.items):
            self._insert(read, copy)
        self._release(read)
        return copy

    def _insert(self, read: Read, copy: Node) -> None:
        """What goes with the pages, of which all are there."""
        if read.state is not None:
            assert self._host.states is not None, "it is its"
            self._host.states.attach(copy, read.state)
            self._counters.read_states += 1
            read.state = None
        if len(read.windowed):
            assert self._host.windows is not None, "they are its"
            held = insert_held(self._host.windows, copy, np.array(read.places), read.windowed)
            self._host.windows.release(held, is_end=True)
            read.windowed = _NO_PAGES

    def _release(self, read: Read) -> None:
        self._free(read.pages, read.state, read.windowed, read.held)

    def _free(self, pages: Int32Array, state: int | None, windowed: Int32Array, held: Int32Array) -> None:
        self._host.pool.free(pages)
        if state is not None and self._host.states is not None:
            self._host.states.release(state)
        if self._host.windows is not None:
            self._host.windows.pool.free(windowed)
            self._host.windows.release(held, is_end=True)

    def poll(self) -> None:
        """Take back what late reads have."""
        for read in [read for read in self._given_up if read.transfer.is_done]:
            self._given_up.remove(read)
            self._release(read)

    # ── for the ledger ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _all(self) -> Iterator[Read]:
        yield from self._reading
        yield from self._given_up

    def private(self) -> list[Int32Array]:
        """Host pages that are read into."""
        return [read.pages for read in self._all]

    def states(self) -> list[int]:
        """The host's states that are read into."""
        return [read.state for read in self._all if read.state is not None]

    def windowed(self) -> tuple[Sequence[Int32Array], Sequence[Int32Array]]:
        """The host's windowed pages that are read into, and those that reads hold."""
        return [read.windowed for read in self._all], [read.held for read in self._all]
