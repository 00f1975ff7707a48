"""Limits of time and size for work on grammars, which come from users. A limit belongs to the thread that set it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep, thread_time

from sgl.errors import GrammarTooLarge

_REST_AFTER, _REST = 0.002, 0.001  # seconds


_Limit = tuple[Callable[[], float], float, float, float]
"""Clock, end, seconds, and `collected` at the start."""


class _Limits(threading.local):
    def __init__(self) -> None:
        self.rested: float | None = None  # monotonic seconds; None: no resting
        self.found: list[_Limit] = []
        self.collected = 0.0  # CPU seconds of garbage collections in this thread
        self.collecting_since = 0.0


_limits = _Limits()


@contextmanager
def time_limit(
    seconds: float, clock: Callable[[], float] = monotonic, *, too_long: str | None = None
) -> Iterator[None]:
    """Inside, `check_time` raises after `seconds` by the clock; outer limits still apply. Garbage collections do not
    count: they visit everybody's objects.

    `too_long`: the message of a GrammarTooLarge raised for a limit on part of the work, so that outer limits do not
    take the OutOfTime for theirs."""
    if _note_collection not in gc.callbacks:
        gc.callbacks.append(_note_collection)
    limit = (clock, clock() + seconds, seconds, _limits.collected)
    _limits.found.append(limit)
    try:
        yield
    except OutOfTime as error:
        if too_long is None or error.which is not limit:
            raise
        raise GrammarTooLarge(too_long, states=0, limit=0) from error
    finally:
        _limits.found.pop()


class OutOfTime(GrammarTooLarge):
    """The work took more than `seconds`."""

    def __init__(self, seconds: float, which: object = None) -> None:
        super().__init__(f"the grammar took more than {seconds:g} s", states=0, limit=0)
        self.seconds = seconds
        self.which = which  # limit

    def __reduce__(self) -> tuple[object, ...]:
        return (OutOfTime, (self.seconds,))


@contextmanager
def resting() -> Iterator[None]:
    """Inside, `check_time` sleeps now and then: a thread that never releases the GIL stalls others for 5 ms at each
    switch."""
    _limits.rested = monotonic()
    try:
        yield
    finally:
        _limits.rested = None


def check_time() -> None:
    """Raise OutOfTime if a limit has passed."""
    if _limits.rested is not None and monotonic() - _limits.rested > _REST_AFTER:
        sleep(_REST)
        _limits.rested = monotonic()
    for limit in _limits.found:
        clock, until, seconds, collected = limit
        if clock() > until + _limits.collected - collected:
            raise OutOfTime(seconds, limit)


def collection_time() -> float:
    """CPU seconds of garbage collections in this thread, since the first limit."""
    return _limits.collected


def _note_collection(phase: str, _: object) -> None:
    if phase == "start":
        _limits.collecting_since = thread_time()
    else:
        _limits.collected += thread_time() - _limits.collecting_since


def check_size(size: int, limit: int, what: str) -> None:
    """Raise GrammarTooLarge beyond the limit; `what` has a place for it: "{} states"."""
    if size > limit:
        raise GrammarTooLarge(what.format(limit), states=size, limit=limit)
