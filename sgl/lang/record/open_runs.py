"""Unfinished runs, and giving them up: at exit, on interrupt, or when nobody holds their states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol
from weakref import WeakValueDictionary


class _Open(Protocol):
    """The part of `Run` used here."""

    is_done: bool

    def cancel(self) -> None: ...
    def drop(self) -> None: ...


class Group:
    """Runs given up together; they also belong to the parent group. Thread-safe."""

    def __init__(self, parent: Group | None = None) -> None:
        self._parent = parent
        self._runs: WeakValueDictionary[int, _Open] = WeakValueDictionary()

    def add(self, run: _Open) -> None:
        """Add a run."""
        group: Group | None = self
        while group is not None:
            group._runs[id(run)] = run
            group = group._parent

    def remove(self, run: _Open) -> None:
        """Remove a finished run."""
        group: Group | None = self
        while group is not None:
            group._runs.pop(id(run), None)
            group = group._parent

    def runs(self) -> list[_Open]:
        """Unfinished runs."""
        runs = [ref() for ref in self._runs.valuerefs()]  # atomic: other threads add runs
        return [run for run in runs if run is not None]

    def cancel(self) -> None:
        """Give up all of them."""
        for run in self.runs():
            run.cancel()


everything = Group()
"""All runs of this process."""
current_group: ContextVar[Group] = ContextVar("current_group", default=everything)


@contextmanager
def together() -> Iterator[None]:
    """Give up the runs begun inside, in this context on any thread, if the block raises."""
    group = Group(current_group.get())
    token = current_group.set(group)
    try:
        yield
    except BaseException:
        group.cancel()
        raise
    finally:
        current_group.reset(token)


class Hold:
    """Shared by a run's states alone: the run is given up with the last."""

    def __init__(self, run: _Open) -> None:
        self._run = run

    def __del__(self) -> None:
        if not self._run.is_done:
            self._run.drop()
