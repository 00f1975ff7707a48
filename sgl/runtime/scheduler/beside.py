"""What a prefix needs beside its pages to be taken over, on its way between the device, host memory and files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.checkpoints import Checkpoints
from sgl.runtime.cache.files import Kind
from sgl.runtime.cache.host import HostCache
from sgl.runtime.cache.ledger import check_states
from sgl.runtime.cache.node import NO_PAGES, Node
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.scheduler.counters import TierCounters


class Beside:
    """Nothing, as in most models: others can go on behind any page. Rows are places in memory: slots of states, or
    windowed pages. Of one scheduler. Single-threaded."""

    kind = Kind.PAGE
    """Of its records in files."""
    pools: tuple[PagePool, ...] = ()
    """The device's, of its own."""

    def usable(self, node: Node) -> int:
        """Tokens up to a device node that can be taken over."""
        return node.length

    def copied(self, copy: Node) -> Node:
        """The end of what can be taken over up to a node of copies."""
        return copy

    def is_end(self, node: Node) -> bool:
        """Whether others go on at this device node's end, and not anywhere before."""
        return False

    def cut(self, node: Node) -> None:
        """See `radix.EndWatcher`; of the device's tree."""

    # ── to host memory ──────────────────────────────────────────────────────────────────────────────────────────

    def save(self, node: Node, copy: Node) -> Int32Array | None:
        """Copy what goes with the end of a `copy` of a device node's prefix. Returns rows, for `saved`, with the copy
        locked; None if there is nothing to do, or no room."""
        return None

    def saved(self, rows: Int32Array) -> None:
        """A save has ended."""

    # ── to files, and from there ────────────────────────────────────────────────────────────────────────────────

    def hold(self, copy: Node) -> tuple[Sequence[int], Int32Array]:
        """What has arrived in host memory, and goes with the path to a locked node, held until `release_copies`: the
        numbers of pages before each, and the rows."""
        return [], NO_PAGES

    def hold_seen(self, copy: Node, length: int) -> Int32Array:
        """Hold what there is on the path to a locked node of what a token behind so many others sees."""
        return NO_PAGES

    def release_copies(self, rows: Int32Array) -> None:
        """Undo `hold`, or `hold_seen`."""

    def find(self, copy: Node, least: int, reach: int, has: Callable[[int], bool]) -> tuple[int, list[int]]:
        """How many of the first `reach` pages can be taken over once files are read, if more than `least`, and the
        numbers of pages before what is to be read for that; has: whether a file has what goes with such a page."""
        return reach, []

    def alloc_copies(self, number: int) -> Int32Array | None:
        """Private rows of host memory; None if others need all room."""
        return NO_PAGES

    def free_copies(self, rows: Int32Array) -> None:
        """Undo `alloc_copies`."""

    def insert_copies(self, copy: Node, places: Sequence[int], rows: Int32Array) -> None:
        """Pass what was read to the path to a locked node; places: as `find` says."""

    # ── to the device ───────────────────────────────────────────────────────────────────────────────────────────

    def load(self, node: Node, copy: Node) -> Any:
        """Bring what goes with the end of `copy`, and the device lacks; both nodes are locked, and `node` ends there or
        before. None if there is no room."""
        return ()

    def cancel(self, load: Any) -> None:
        """Undo the last `load`, before it is taken."""

    def arrived(self, load: Any, node: Node) -> Int32Array:
        """A load that ends at a device node has ended. Returns windowed pages, held."""
        return NO_PAGES

    def take(self) -> dict[str, Int32Array]:
        """Fields of `PageMoves`, for the next move."""
        return {}

    # ── for the ledger ──────────────────────────────────────────────────────────────────────────────────────────

    def private(self) -> list[Int32Array]:
        """The device's rows of loads."""
        return []

    def held(self) -> list[Int32Array]:
        """The device's rows that loads hold."""
        return []

    def check(self, private: Iterable[Int32Array], held: Iterable[Int32Array]) -> list[str]:
        """Breaches of ownership of host memory; private: rows that are read into; held: for files."""
        return []


class StateCopies(Beside):
    """Recurrent states: others can go on only where one was kept."""

    kind = Kind.STATE

    def __init__(self, device: Checkpoints, host: HostCache, counters: TierCounters) -> None:
        assert host.states is not None, "states have copies"
        self._device, self._copies, self._tree = device, host.states, host.tree
        self._page_size, self._counters = host.page_size, counters
        self._saves: list[tuple[int, int]] = []  # for the next move
        self._loads: list[tuple[int, int]] = []  # likewise
        self._saving: set[int] = set()  # copies
        self._loading: list[int] = []  # private checkpoints

    def usable(self, node: Node) -> int:
        return self._device.deepest(node).length

    def copied(self, copy: Node) -> Node:
        return self._copies.deepest(copy)

    def is_end(self, node: Node) -> bool:
        return node in self._device.of_node

    def cut(self, node: Node) -> None:
        self._device.cut(node)

    def save(self, node: Node, copy: Node) -> Int32Array | None:
        if copy in self._copies.of_node:
            return None
        self._tree.lock(copy)
        rows = self.alloc_copies(1)
        if rows is None:
            self._tree.unlock(copy)
            return None
        (state,) = rows.tolist()
        self._copies.attach(copy, state)
        self._saves.append((self._device.of_node[self._device.deepest(node)], state))
        self._saving.add(state)
        self._counters.saved_states += 1
        return rows

    def saved(self, rows: Int32Array) -> None:
        self._saving.difference_update(rows.tolist())

    def hold(self, copy: Node) -> tuple[Sequence[int], Int32Array]:
        places, rows, above = list[int](), list[int](), self.copied(copy)
        while above.parent is not None:
            if (state := self._copies.of_node[above]) not in self._saving:
                places.append(above.length // self._page_size - 1)
                rows.append(state)
            above = self.copied(above.parent)
        return places, np.array(rows, np.int32)

    def find(self, copy: Node, least: int, reach: int, has: Callable[[int], bool]) -> tuple[int, list[int]]:
        place = next((place for place in range(reach - 1, least - 1, -1) if has(place)), None)
        return (0, []) if place is None else (place + 1, [place])

    def alloc_copies(self, number: int) -> Int32Array | None:
        assert number == 1, "one state goes with a prefix"
        state = self._copies.alloc(spares_locked=True)
        return None if state is None else np.array([state], np.int32)

    def free_copies(self, rows: Int32Array) -> None:
        for state in rows.tolist():
            self._copies.release(state)

    def insert_copies(self, copy: Node, places: Sequence[int], rows: Int32Array) -> None:
        (state,) = rows.tolist()
        self._copies.attach(copy, state)
        self._counters.read_states += 1

    def load(self, node: Node, copy: Node) -> int | None:
        slot = self._device.alloc(spares_locked=True)  # a step that comes may read locked ones
        if slot is not None:
            self._loads.append((self._copies.use(copy), slot))
            self._loading.append(slot)
        return slot

    def cancel(self, load: int) -> None:
        self._loads.pop()
        self._loading.remove(load)
        self._device.release(load)

    def arrived(self, load: int, node: Node) -> Int32Array:
        self._loading.remove(load)
        self._device.attach(node, load)
        self._counters.loaded_states += 1
        return NO_PAGES

    def take(self) -> dict[str, Int32Array]:
        saves, loads, self._saves, self._loads = self._saves, self._loads, [], []
        moves = {"state_saves": saves, "state_loads": loads}
        return {name: np.array(pairs, np.int32).reshape(-1, 2) for name, pairs in moves.items()}

    def private(self) -> list[Int32Array]:
        return [np.array(self._loading, np.int32)]

    def check(self, private: Iterable[Int32Array], held: Iterable[Int32Array]) -> list[str]:
        return check_states(self._copies, self._tree, [row for rows in private for row in rows.tolist()])
