"""Cached pages on their way down: to host memory when they have to give way on the device, and on to files.

A page is given to others as soon as its copy is asked for: the runner reads it before any step that is launched later.
What is copied is locked in host memory until it has arrived there, and until it is written.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from sgl.runtime.batch import Int32Array, PendingMoves
from sgl.runtime.cache.files import Item, Kind, PageFiles, Transfer
from sgl.runtime.cache.host import HostCache, cool, path_of
from sgl.runtime.cache.keys import Namespace
from sgl.runtime.cache.node import Node
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.cache.rates import Rates
from sgl.runtime.scheduler.beside import Beside
from sgl.runtime.scheduler.counters import TierCounters
from sgl.runtime.scheduler.leases import Lease

_MOST_WRITING = 0.25  # of the host's pages
_SOON = 0.25  # of the device's pages: with fewer free ones, what requests leave is copied
_MANY = 1 << 12  # prefixes to be copied when there is time; ids of nodes, beyond those that there are


@dataclass(slots=True, eq=False)
class _Save:
    """Pages on their way to host memory: its node is locked meanwhile."""

    node: Node
    beside: Int32Array | None = None  # rows of what goes with the pages, instead of these
    move: PendingMoves | None = None


@dataclass(slots=True, eq=False)
class _Write:
    """What is on its way to files: its node is locked meanwhile."""

    node: Node
    transfer: Transfer
    weight: int  # in pages
    held: Int32Array  # rows of what goes with pages


class Saves:
    """Of one scheduler. Single-threaded. It is the `radix.EndWatcher` of the device's tree, and what `Leases` demote
    with."""

    def __init__(
        self,
        cache: RadixCache,
        host: HostCache,
        rates: Rates,
        files: PageFiles | None,
        counters: TierCounters,
        beside: Beside,
        most: int,
    ) -> None:
        """cache: the device's. most: pages that are copied between two steps, at most."""
        self.is_paused = False
        """Nothing is saved."""
        self._cache, self._host, self._rates, self._files = cache, host, rates, files
        self._counters, self._beside, self._most = counters, beside, most
        self._pairs: list[Int32Array] = []  # for the next move
        self._num_pages = 0  # of these
        self._saving: list[_Save] = []
        self._writing: list[_Write] = []
        self._pinned: OrderedDict[Lease, Node] = OrderedDict()  # copies that someone will come back for
        self._later: deque[tuple[bytes, Namespace]] = deque()  # prefixes to be copied when there is time
        self._finished: set[int] = set()  # ids of device nodes that nobody is known to need

    def cut(self, node: Node) -> None:
        """Before a device node is evicted; see `radix.EndWatcher`."""
        if node.id in self._finished:
            self._finished.discard(node.id)
        elif self._wanted(node):
            self.save(node)
        self._beside.cut(node)

    def lose(self, node: Node) -> None:
        """Before a device node, which stays, loses its checkpoint or windowed pages."""
        if node.id not in self._finished and self._wanted(node):
            self.save(node)

    def _wanted(self, node: Node) -> bool:
        """Whether a copy of a device node's prefix may be of use."""
        return not self.is_paused and node.is_attached and (self._rates.pays or self._files is not None)

    def save(self, node: Node) -> bool:
        """Copy what is not copied yet of the prefix that ends at a device node, as far as others can go on from it;
        returns whether all of it is, or will be with the next move."""
        length = self._beside.usable(node)
        if not length:
            return True
        copy = self._save_pages(node, length)
        if copy is not None and (rows := self._beside.save(node, copy)) is not None:
            self._saving.append(_Save(copy, rows))
        return copy is not None

    def _save_pages(self, node: Node, length: int) -> Node | None:
        """The copy of a device node's first `length` tokens; None if only some will be there with the next move."""
        copy, pairs = self._host.add(node, self._most - self._num_pages, length)
        if not len(pairs) and copy.length < length:
            self._unpin((length - copy.length) // self._host.page_size)
            copy, pairs = self._host.add(node, self._most - self._num_pages, length)
        self.queue(copy, pairs)
        return copy if copy.length == length else None

    def save_later(self, node: Node) -> None:
        """`save`, also to a file, between later steps; what is evicted meanwhile is saved then."""
        if node.is_attached and len(self._later) < _MANY:
            self._later.append(path_of(node))

    def settle(self, node: Node) -> None:
        """`save_later`, of what a request leaves, if its pages will be needed soon: evicting them is free then."""
        pools = (self._cache.pool, *self._beside.pools)
        if any(pool.num_free < _SOON * pool.num_pages for pool in pools) and self._wanted(node):
            self.save_later(node)

    def save_all_later(self) -> None:
        """`save_later` for all that is cached, at each place where others can go on."""
        stack = list(self._cache.root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children or self._beside.is_end(node):
                self.save_later(node)

    def demote(self, lease: Lease, *, now: bool) -> bool:
        """Keep a copy of what a lease protects, which is about to lose it, until `forget_lease`. now: its pages are
        needed. Returns whether there is, or will be, a copy of some of it."""
        node = lease.node
        if not self._wanted(node):
            return False
        if not now:
            self.save_later(node)
            return True
        self.save(node)
        match = self._host.tree.match(*path_of(node))
        if match.length:
            self._host.tree.lock(match.node)
            self._pinned[lease] = match.node
        return match.length > 0

    def forget_lease(self, lease: Lease) -> None:
        """Nobody will come back for it, or somebody has."""
        node = self._pinned.pop(lease, None)
        if node is not None:
            self._host.tree.unlock(node)

    def finished(self, lease: Lease, length: int) -> None:
        """Nobody is known to need what a lease protected, or had a copy of, behind its first `length` tokens: it goes
        first on the device, without a copy, and copies of it go now."""
        length = -(-length // self._host.page_size) * self._host.page_size
        node, copy = lease.node, self._pinned.get(lease)
        self.forget_lease(lease)
        if node.is_attached and node.length > length:
            self._finished.update(cooled.id for cooled in cool(self._cache, node, length))
            if len(self._finished) > _MANY + 2 * self._cache.num_nodes:
                self._finished.clear()
            self._host.drop(*path_of(node), length)
        elif copy is not None and copy.length > length:
            self._host.drop(*path_of(copy), length)

    def _unpin(self, num_pages: int) -> None:
        """Let copies that are kept for leases give way, oldest first."""
        tree = self._host.tree
        while self._pinned and self._host.pool.num_free + tree.evictable_pages < num_pages:
            _, node = self._pinned.popitem(last=False)
            tree.unlock(node)

    def queue(self, copy: Node, pairs: Int32Array) -> None:
        """Copy (device page, host page) pairs with the next move, if there are any; `copy` is unlocked then."""
        if not len(pairs):
            return
        self._pairs.append(pairs)
        self._num_pages += len(pairs)
        self._counters.saved_pages += len(pairs)
        self._saving.append(_Save(copy))

    # ── between steps ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_busy(self) -> bool:
        """Whether `poll` will have something to do."""
        return bool(self._saving or self._writing or self._later)

    @property
    def is_copying(self) -> bool:
        """Whether pages are on their way to host memory."""
        return bool(self._saving)

    def poll(self) -> None:
        """Take up what has arrived, and what is to be copied when there is time."""
        self._saving = [save for save in self._saving if not self._is_saved(save)]
        self._end_writes()
        while self._later and not self._saving:
            key, namespace = self._later[0]
            match = self._cache.match(key, namespace)
            if match.length and not self.save(match.node) and self._num_pages >= self._most:
                break
            if self._files is not None and not self._saving:  # it was copied before
                copied = self._host.tree.match(key, namespace)
                if copied.length and not self._write(copied.node):
                    break
            self._later.popleft()

    def take(self) -> list[Int32Array]:
        """The (device page, host page) pairs of the next move."""
        pairs, self._pairs, self._num_pages = self._pairs, [], 0
        return pairs

    def launched(self, move: PendingMoves) -> None:
        """What was taken is under way."""
        for save in self._saving:
            save.move = save.move or move

    def _is_saved(self, save: _Save) -> bool:
        if save.move is None or not save.move.is_saved():
            return False
        if save.beside is not None:
            self._beside.saved(save.beside)
        if self._files is not None and not self._write(save.node):
            self.save_later(save.node)
        self._host.tree.unlock(save.node)
        return True

    def _write(self, copy: Node) -> bool:
        """Write what no file has of the prefix that ends at a host node, as far as it has arrived there; returns
        whether that is all of it."""
        assert self._files is not None, "there are files"
        files, (key, namespace) = self._files, path_of(copy)
        names = files.names(key, namespace)
        if not names:
            return True
        items = [Item(Kind.PAGE, *each) for each in zip(names, copy.pages_from(0).tolist(), strict=False)]
        places, held = self._beside.hold(copy)
        its = zip(places, held.tolist(), strict=True)
        items += [Item(self._beside.kind, names[place], row) for place, row in its if place < len(names)]
        missing = [item for item in items if not files.is_kept(item)]
        taken, weight = self._within_room(missing)
        if taken:
            self._host.tree.lock(copy)
            self._writing.append(_Write(copy, files.write(taken), weight, held))
        else:
            self._beside.release_copies(held)
        return len(taken) == len(missing)

    def _within_room(self, items: list[Item]) -> tuple[list[Item], int]:
        """The first of these that may be written now, and what they weigh in pages."""
        assert self._files is not None, "there are files"
        busy = sum(write.weight for write in self._writing)
        room = int(_MOST_WRITING * self._host.pool.num_pages) + 1 - busy
        taken, weight = 0, 0
        for item in items:
            its = -(-self._files.in_tokens([item.kind]) // self._host.page_size)
            if weight + its > room and (busy or taken):  # else one that is larger would never be written
                break
            taken, weight = taken + 1, weight + its
        return items[:taken], weight

    def _end_writes(self) -> None:
        for write in [write for write in self._writing if write.transfer.is_done]:
            self._writing.remove(write)
            self._beside.release_copies(write.held)
            self._host.tree.unlock(write.node)
            good = write.transfer.items[: write.transfer.num_good]
            self._counters.written_pages += write.transfer.num_good_pages
            self._counters.written_states += sum(item.kind is Kind.STATE for item in good)

    # ── all of it ───────────────────────────────────────────────────────────────────────────────────────────────

    def clear(self) -> None:
        """Forget what is to be copied, and whom copies are kept for."""
        self._later.clear()
        for lease in list(self._pinned):
            self.forget_lease(lease)

    def locked(self) -> Iterator[Node]:
        """A host node for each lock, for the ledger."""
        yield from (save.node for save in self._saving)
        yield from (write.node for write in self._writing)
        yield from self._pinned.values()

    def held(self) -> list[Int32Array]:
        """The host's rows of what goes with pages that are on their way to files, for the ledger."""
        return [write.held for write in self._writing]
