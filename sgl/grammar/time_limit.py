"""How long work on a grammar may take: set by whoever starts it, checked by whatever may run for long.

Grammars come from users, and a small one can be made to take for ever. The limit belongs to the thread that set it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from sgl.errors import GrammarTooLarge


class _Limit(threading.local):
    seconds: float = 0.0
    until: float = float("inf")


_limit = _Limit()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Within the block `check_time` raises once `seconds` have passed. A limit that ends sooner stays in force."""
    outer_seconds, outer_until = _limit.seconds, _limit.until
    until = monotonic() + seconds
    if until < outer_until:
        _limit.seconds, _limit.until = seconds, until
    try:
        yield
    finally:
        _limit.seconds, _limit.until = outer_seconds, outer_until


class OutOfTime(GrammarTooLarge):
    """The work took more than `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the grammar took more than {seconds:g} s", states=0, limit=0)
        self.seconds = seconds

    def __reduce__(self) -> tuple[object, ...]:
        return (OutOfTime, (self.seconds,))


def check_time() -> None:
    """Raises OutOfTime if the time is up."""
    if monotonic() > _limit.until:
        raise OutOfTime(_limit.seconds)
