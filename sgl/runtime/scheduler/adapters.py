"""Which LoRA adapters have a slot on the device, and who uses them. Adapters are numbers; 0 is none.

Running requests hold their adapter's slot. A slot that nobody holds keeps its adapter until another one needs it: of
those, the one least recently given back goes first, and never a pinned one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sgl.errors import InvalidRequest
from sgl.runtime.batch import Batch, Int32Array


class AdapterSlots:
    """`num_slots` slots. Single-threaded."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[int, int] = {}  # by adapter, the one least recently given back first
        self._pinned: dict[int, bool] = {}  # by adapter, all that are loaded
        self._waiting_or_running: Counter[int] = Counter()  # requests by adapter
        self._running: Counter[int] = Counter()
        self._leaving: dict[int, Callable[[], None]] = {}
        self._writes: list[tuple[int, int]] = []

    def add(self, adapter: int, *, pinned: bool = False) -> None:
        """Requests may use this adapter now. pinned: once in a slot, it stays there."""
        self._pinned[adapter] = pinned

    def remove(self, adapter: int, then: Callable[[], None]) -> None:
        """Call `then` when no request has this adapter, which none may begin to use."""
        del self._pinned[adapter]
        self._leaving[adapter] = then
        self._end(adapter)

    def enter(self, adapter: int) -> None:
        """A request with this adapter is queued. Raises InvalidRequest if it was unloaded meanwhile."""
        if not adapter:
            return
        if adapter not in self._pinned:
            raise InvalidRequest("the request's LoRA adapter was unloaded", param="lora_path")
        self._waiting_or_running[adapter] += 1

    def leave(self, adapter: int) -> None:
        """A request with this adapter has ended."""
        if adapter:
            self._waiting_or_running[adapter] -= 1
            self._end(adapter)

    def has_room(self, adapter: int) -> bool:
        """Whether this adapter has a slot, or can get one now."""
        return not adapter or adapter in self._slots or bool(self._free) or self._idle() is not None

    def take(self, adapter: int) -> int:
        """The slot of an adapter that has room, for one more running request; -1 for none."""
        if not adapter:
            return -1
        if adapter not in self._slots:
            idle = None if self._free else self._idle()
            slot = self._free.pop() if idle is None else self._slots.pop(idle)
            self._slots[adapter] = slot
            self._writes = [write for write in self._writes if write[0] != slot] + [(slot, adapter)]
        self._running[adapter] += 1
        return self._slots[adapter]

    def give_back(self, adapter: int) -> None:
        """A request with this adapter runs no longer."""
        if adapter:
            self._running[adapter] -= 1
            self._slots[adapter] = self._slots.pop(adapter)  # the last one to be taken

    def note(self, batch: Batch, slots: Int32Array) -> None:
        """Complete a batch by its rows' slots and by what is to be copied into them. slots: int32 by request row."""
        if self._running.total():
            of_rows = slots[batch.rows]
            batch.adapters = of_rows if (of_rows >= 0).any() else None
        batch.adapter_writes, self._writes = self._writes, []

    def _idle(self) -> int | None:
        """The adapter whose slot another one may have."""
        return next((its for its in self._slots if not self._running[its] and not self._pinned.get(its)), None)

    def _end(self, adapter: int) -> None:
        if adapter in self._leaving and not self._waiting_or_running[adapter]:
            del self._waiting_or_running[adapter], self._running[adapter]
            slot = self._slots.pop(adapter, None)
            if slot is not None:
                self._free.append(slot)
                self._writes = [write for write in self._writes if write[0] != slot]
            self._leaving.pop(adapter)()
