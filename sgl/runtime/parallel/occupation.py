"""The memory of all ranks, given back and taken again. Each of them says what it gave, so that rank 0 knows what is
missing anywhere, also where one of them failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from sgl.errors import EngineDead, InvalidRequest
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.parallel import wire
from sgl.runtime.parallel.group import RankGroup
from sgl.runtime.runner.occupation import PARTS, Occupation, Part

logger = logging.getLogger(__name__)

_FAILURES = RuntimeError, MemoryError, OSError  # torch's for memory is the first


class RankedOccupation:
    """Rank 0's; see `Occupation`. Raises EngineDead when a rank is gone."""

    def __init__(self, own: Occupation, group: RankGroup) -> None:
        self._own, self._group = own, group
        self.released: dict[Part, int] = {}
        """Bytes of all ranks."""

    @property
    def why_not(self) -> str | None:
        """See `Occupation`."""
        return self._own.why_not

    def parts(self) -> tuple[Part, ...]:
        """See `Occupation`."""
        return self._own.parts()

    def release(self, parts: Collection[Part]) -> dict[Part, int]:
        """See `Occupation`. Raises what this rank raises, and InvalidRequest for others."""
        before = set(self.released)
        self._do(wire.Release([*parts]), lambda: self._own.release(parts), "gave no memory back")
        return {part: number for part, number in self.released.items() if part not in before}

    def restore(self, parts: Collection[Part]) -> None:
        """See `Occupation`. Graphs are captured when all ranks have all else; after a failure until then, try again.
        A rank that cannot capture them ends the engine: the others wait for it amid theirs."""
        self._do(wire.Restore([*parts]), lambda: self._own.take(parts), "has no memory for what was released")
        if self.released.keys() == {"cuda_graph"}:
            self._group.send(wire.Capture())
            try:
                with self._group.failing():
                    self._own.capture()
            except EngineDead:
                raise
            except _FAILURES as error:
                raise self._group.end(f"rank 0 captured no CUDA graphs ({error})") from error
            self._meet(lambda: None, "captured no graphs")

    def _do(self, frame: wire.Frame, act: Callable[[], Any], failure: str) -> None:
        self._group.send(frame)
        self._meet(act, failure)

    def _meet(self, act: Callable[[], Any], failure: str) -> None:
        with self._group.failing():
            error, (num_failed, *state) = _done(act, self._own, self._group.ranks)
        counts, numbers = state[: len(PARTS)], state[len(PARTS) :]
        self.released = {part: its for part, count, its in zip(PARTS, counts, numbers, strict=True) if count}
        if error is not None:
            raise error
        if num_failed:
            message = f"{num_failed} of {self._group.size} ranks: one {failure}, as its log says; call again"
            raise InvalidRequest(message, param="tags")


def follow(frame: wire.Release | wire.Restore | wire.Capture, own: Occupation, ranks: Ranks) -> None:
    """Take part on a rank other than 0. Raises what ends it."""

    def act() -> None:
        if isinstance(frame, wire.Release):
            own.release(frame.parts)
        elif isinstance(frame, wire.Restore):
            own.take(frame.parts)

    if isinstance(frame, wire.Capture):
        own.capture()

    error, _ = _done(act, own, ranks)
    if error is not None:
        logger.error("%s: %s", type(frame).__name__, error, exc_info=error)


def _done(act: Callable[[], Any], own: Occupation, ranks: Ranks) -> tuple[Exception | None, list[int]]:
    """Why it failed here, if it did; and the sums of all ranks: failures, who gave each part back, and its bytes."""
    error = None
    try:
        act()
    except _FAILURES as its:
        error = its
    has = [part in own.released for part in PARTS]
    sizes = [max(own.released.get(part, 0), 0) for part in PARTS]
    return error, ranks.sum([error is not None, *has, *sizes], own.device)
