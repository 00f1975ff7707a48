"""Copies of the mock model's pages, executed late: some polls after their launch, in order, as a copy stream does.

What a move saves is read when it is launched; all else happens when it is executed.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from sgl.runtime.batch import PageMoves
from tests.mock_runner import MockRunner


class MockMoves:
    """See `batch.PendingMoves`."""

    def __init__(
        self, mover: MockMover, number: int, moves: PageMoves, saved: list[bytes], states: list[int]
    ) -> None:
        self.number = number
        self.moves = moves
        self.saved = saved
        self.states = states
        self.windowed: list[list[int]] = []
        self.executed = False
        self._mover = mover

    @property
    def load_seconds(self) -> float:
        assert len(self.moves.loads), "a move without loads of pages is not timed"
        return 0.0

    def is_loaded(self) -> bool:
        self._mover.go_on()
        return self.executed

    def is_saved(self) -> bool:
        return self.is_loaded()

    def comes_by_layer(self) -> bool:
        return self._mover.is_waited_for


class MockMover:
    """Host memory of uint8 arrays; a page has page_size numbers of 64 bits, a state has one, in two parts."""

    def __init__(
        self,
        runner: MockRunner,
        num_host_pages: int,
        rng: random.Random,
        lateness: float,
        num_states: int = 0,
        num_windowed: int = 0,
    ) -> None:
        self.is_waited_for = False
        """Each step waits for the loads that it needs, so that it may come before they are done."""
        self.memory = np.zeros((num_host_pages + 1, runner.page_size * 8), np.uint8)
        self.states = np.zeros((num_states, 3), np.uint8), np.zeros((num_states, 5), np.uint8)
        self.windowed = np.zeros((num_windowed + 1, runner.page_size * 8), np.uint8)
        self._runner = runner
        self._rng = rng
        self._lateness = lateness
        self._queue: deque[MockMoves] = deque()
        self._number = 0

    def move(self, moves: PageMoves) -> MockMoves:
        pairs = (
            moves.saves,
            moves.loads,
            moves.state_saves,
            moves.state_loads,
            moves.window_saves,
            moves.window_loads,
        )
        for pages in (each[:, 1] for each in pairs):
            assert len(set(pages.tolist())) == len(pages), "a page is copied to twice in one move"
        self._number += 1
        states = [self._runner.checkpoints[slot] for slot in moves.state_saves[:, 0].tolist()]
        saved = [self._read(page) for page in moves.saves[:, 0].tolist()]
        launched = MockMoves(self, self._number, moves, saved, states)
        launched.windowed = [self._windowed(page) for page in moves.window_saves[:, 0].tolist()]
        self._queue.append(launched)
        return launched

    def go_on(self) -> None:
        while self._queue and self._rng.random() >= self._lateness:
            self._execute()

    def wait(self, number: int) -> None:
        """For a step: until the first so many moves are done."""
        while self._queue and self._queue[0].number <= number:
            self._execute()

    def _execute(self) -> None:
        moves = self._queue.popleft()
        self._save(moves)
        self._load(moves)
        moves.executed = True

    def _save(self, moves: MockMoves) -> None:
        for page, content in zip(moves.moves.saves[:, 1].tolist(), moves.saved, strict=True):
            self.memory[page] = np.frombuffer(content, np.uint8)
        for host, state in zip(moves.moves.state_saves[:, 1].tolist(), moves.states, strict=True):
            content = np.array([state], np.int64).view(np.uint8)
            self.states[0][host], self.states[1][host] = content[:3], content[3:]
        for host, values in zip(moves.moves.window_saves[:, 1].tolist(), moves.windowed, strict=True):
            self.windowed[host] = np.array(values, np.int64).view(np.uint8)

    def _load(self, moves: MockMoves) -> None:
        size = self._runner.page_size
        for host, page in moves.moves.loads.tolist():
            self._runner.kv[page * size : (page + 1) * size] = self.memory[host].view(np.int64).tolist()
        for host, slot in moves.moves.state_loads.tolist():
            content = np.concatenate([part[host] for part in self.states])
            self._runner.checkpoints[slot] = content.view(np.int64).tolist()[0]
        for host, page in moves.moves.window_loads.tolist():
            values = self.windowed[host].view(np.int64).tolist()
            self._runner.window_kv[page * size : (page + 1) * size] = values

    def _windowed(self, page: int) -> list[int]:
        size = self._runner.page_size
        return self._runner.window_kv[page * size : (page + 1) * size]

    def _read(self, page: int) -> bytes:
        size = self._runner.page_size
        return np.array(self._runner.kv[page * size : (page + 1) * size], np.int64).tobytes()
