"""How long work on a grammar may take, set by whoever starts it, and how large it may grow: checked by what does it.

Grammars come from users, and a small one can be made to take for ever. A limit belongs to the thread that set it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep, thread_time

from sgl.errors import GrammarTooLarge

_REST_AFTER, _REST = 0.002, 0.001  # seconds


_Limit = tuple[Callable[[], float], float, float, float]
"""Clock, until when, seconds, and `collected` when it was set."""


class _Limits(threading.local):
    def __init__(self) -> None:
        self.rested: float | None = None  # monotonic seconds; None: this thread does not rest
        self.found: list[_Limit] = []
        self.collected = 0.0  # seconds of CPU time that collections of garbage took in this thread
        self.collecting_since = 0.0


_limits = _Limits()


@contextmanager
def time_limit(
    seconds: float, clock: Callable[[], float] = monotonic, *, too_long: str | None = None
) -> Iterator[None]:
    """Within the block `check_time` raises once `seconds` have passed by the clock; outer limits stay in force. What a
    collection of garbage takes in between does not count: it is of everybody's objects.

    too_long: a limit of a part of the work, which leaves the block as a GrammarTooLarge of this message: whoever limits
    the whole would take an OutOfTime for its own."""
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
        self.which = which  # of the limits in force

    def __reduce__(self) -> tuple[object, ...]:
        return (OutOfTime, (self.seconds,))


@contextmanager
def resting() -> Iterator[None]:
    """Within the block `check_time` rests now and then: to others, who wait for the interpreter's lock after each call
    that lets go of it, a thread that never does is a halt of 5 ms each time."""
    _limits.rested = monotonic()
    try:
        yield
    finally:
        _limits.rested = None


def check_time() -> None:
    """Raises OutOfTime if the time is up."""
    if _limits.rested is not None and monotonic() - _limits.rested > _REST_AFTER:
        sleep(_REST)
        _limits.rested = monotonic()
    for limit in _limits.found:
        clock, until, seconds, collected = limit
        if clock() > until + _limits.collected - collected:
            raise OutOfTime(seconds, limit)


def collection_time() -> float:
    """Seconds of CPU time that collections of garbage took in this thread, since the first limit was set."""
    return _limits.collected


def _note_collection(phase: str, _: object) -> None:
    if phase == "start":
        _limits.collecting_since = thread_time()
    else:
        _limits.collected += thread_time() - _limits.collecting_since


def check_size(size: int, limit: int, what: str) -> None:
    """Raises GrammarTooLarge if something is larger than its limit, for which `what` has a place: "{} states"."""
    if size > limit:
        raise GrammarTooLarge(what.format(limit), states=size, limit=limit)
