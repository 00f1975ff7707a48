"""Slots of LoRA adapters under any sequence of admissions and ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sgl.errors import InvalidRequest
from sgl.runtime.batch import Batch
from sgl.runtime.scheduler.adapters import AdapterSlots

SLOTS, ROWS = 3, 8


class Machine(RuleBasedStateMachine):
    """A device whose slots hold what batches copied into them, and requests that check theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = AdapterSlots(SLOTS)
        self.device: dict[int, int] = {}
        self.loaded: set[int] = set()
        self.pinned: set[int] = set()
        self.freed: set[int] = set()
        self.leaving: set[int] = set()
        self.waiting: list[int] = []
        self.admitted: set[int] = set()  # ever: a pinned one then stays, though no step may have copied it yet
        self.running: dict[int, int] = {}  # adapter by row
        self.of_rows = np.full(ROWS, -1, np.int32)
        self.number = 0

    @precondition(lambda self: len(self.loaded) < 6)
    @rule(pinned=st.booleans())
    def load(self, pinned: bool) -> None:
        self.number += 1
        pinned = pinned and len(self.pinned) < SLOTS - 1
        self.slots.add(self.number, pinned=pinned)
        self.loaded.add(self.number)
        if pinned:
            self.pinned.add(self.number)

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from([0, *sorted(self.loaded)]))
        self.slots.enter(adapter)
        self.waiting.append(adapter)

    @precondition(lambda self: self.waiting and len(self.running) < ROWS)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from(self.waiting))
        others = {its for its in self.running.values() if its} - {adapter}
        held = others | ((self.pinned & self.admitted) - {adapter})
        if not self.slots.has_room(adapter):
            assert len(held) >= SLOTS
            return
        row = min(set(range(ROWS)) - self.running.keys())
        self.of_rows[row] = self.slots.take(adapter)
        self.waiting.remove(adapter)
        self.running[row] = adapter
        self.admitted.add(adapter)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), retracts=st.booleans())
    def stop(self, data: st.DataObject, retracts: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.running)))
        adapter = self.running.pop(row)
        self.slots.give_back(adapter)
        if retracts:
            self.waiting.append(adapter)
        else:
            self.slots.leave(adapter)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(adapter)
        self.slots.leave(adapter)

    @precondition(lambda self: self.loaded)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from(sorted(self.loaded)))
        self.loaded.remove(adapter)
        self.pinned.discard(adapter)
        self.leaving.add(adapter)
        self.slots.remove(adapter, lambda: self.freed.add(adapter))
        with pytest.raises(InvalidRequest):
            self.slots.enter(adapter)

    @precondition(lambda self: self.running)
    @rule()
    def step(self) -> None:
        rows = np.array(sorted(self.running), np.int32)
        ones, empty = np.ones(len(rows), np.int32), np.empty((0, 3), np.int32)
        batch = Batch(rows, ones, ones, ones, empty, ones > 0, -ones, -ones)
        self.slots.note(batch, self.of_rows)
        for slot, adapter in batch.adapter_writes:
            assert adapter not in self.freed
            self.device[slot] = adapter
        of_rows = [-1] * len(rows) if batch.adapters is None else batch.adapters.tolist()
        assert (batch.adapters is None) == (not any(self.running.values()))
        for row, slot in zip(rows.tolist(), of_rows, strict=True):
            assert (self.device[slot] if slot >= 0 else 0) == self.running[row]

    @invariant()
    def freed_when_nobody_has_it(self) -> None:
        used = {*self.waiting, *self.running.values()}
        assert {its for its in self.leaving if its not in used} == self.freed


TestAdapterSlots = Machine.TestCase
TestAdapterSlots.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
