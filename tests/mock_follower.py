"""The mock model's ranks other than 0: they compute the same, and their copies end when they like.

As on a GPU, what a move saves is read when it is launched, and written to host memory in the order of the moves; loads
have an order of their own, and begin when what they load has been saved. A step waits for the loads that it needs.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from sgl.runtime.batch import Batch, PageMoves
from tests.mock_mover import MockMover, MockMoves
from tests.mock_runner import MockPending, MockRunner


class FollowingMover(MockMover):
    """Copies of one rank. is_waited_for: rank 0 takes its copies for done when these are, too."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._saves: deque[MockMoves] = deque()
        self._loads: deque[MockMoves] = deque()

    def move(self, moves: PageMoves) -> MockMoves:
        """As `host_pages._Streams`: loads of the same pages before are waited for."""
        for kind in ("", "state_", "window_"):
            saves = getattr(moves, f"{kind}saves")
            sources, targets = set(saves[:, 0].tolist()), set(saves[:, 1].tolist())
            for before in [*self._loads]:
                loads = getattr(before.moves, f"{kind}loads")
                if sources & set(loads[:, 1].tolist()) or targets & set(loads[:, 0].tolist()):
                    self.wait(before.number)
        launched = super().move(moves)
        self._queue.clear()
        self._saves.append(launched)
        self._loads.append(launched)
        return launched

    def wait(self, number: int) -> None:
        while self._loads and self._loads[0].number <= number:
            self._load_next()

    def go_on(self) -> None:
        while self._saves and self._rng.random() >= self._lateness:
            self._save_next()
        while self._loads and self._rng.random() >= self._lateness:
            self._load_next()

    def has_done(self, number: int) -> bool:
        """Whether the first so many moves have saved and loaded."""
        self.go_on()
        return all(not its or its[0].number > number for its in (self._saves, self._loads))

    def _save_next(self) -> None:
        self._save(self._saves.popleft())

    def _load_next(self) -> None:
        moves = self._loads.popleft()
        for kind in ("", "state_", "window_"):
            sources = set(getattr(moves.moves, f"{kind}loads")[:, 0].tolist())
            for save in [*self._saves]:
                if save.number <= moves.number and sources & set(
                    getattr(save.moves, f"{kind}saves")[:, 1].tolist()
                ):
                    while self._saves and self._saves[0].number <= save.number:
                        self._save_next()
        self._load(moves)


class LeadingMoves:
    """Copies of all ranks, of which rank 0 waits for all: they share host memory."""

    def __init__(self, own: MockMoves, others: list[FollowingMover]) -> None:
        self._own, self._others = own, others
        self.number = own.number

    @property
    def executed(self) -> bool:
        return self._own.executed

    @property
    def load_seconds(self) -> float:
        return self._own.load_seconds

    def is_loaded(self) -> bool:
        return self._own.is_loaded() and all(other.has_done(self.number) for other in self._others)

    def is_saved(self) -> bool:
        return self.is_loaded()

    def comes_by_layer(self) -> bool:
        return False


def lead(
    runner: MockRunner, mover: MockMover, others: list[tuple[MockRunner, FollowingMover]], *, shares: bool
) -> None:
    """Let rank 0 have others. shares: they share host memory."""
    forward, sample, move = runner.forward, runner.sample, mover.move

    def forward_all(batch: Batch) -> Any:
        if mover.is_waited_for:
            mover.wait(batch.moved)
        launched = forward(batch)
        for other, its_mover in others:
            its_mover.wait(batch.moved)
            its_mover.go_on()
            tokens = other.forward(batch)[1].next_tokens.tolist()
            assert tokens == launched[1].next_tokens.tolist(), "another rank read other pages"
        return launched

    def sample_all(launched: Any, masks: Any = None) -> MockPending:
        for other, _ in others:
            other.sample(launched)
        return sample(launched, masks)

    def move_all(moves: PageMoves) -> Any:
        for _, its_mover in others:
            its_mover.move(moves)
        own = move(moves)
        return LeadingMoves(own, [its_mover for _, its_mover in others]) if shares else own

    runner.forward, runner.sample, mover.move = forward_all, sample_all, move_all  # type: ignore[method-assign]
