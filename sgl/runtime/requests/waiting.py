"""Waits for futures without a waiting thread."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

_LONGEST = 86_400.0  # seconds; compiling ends long before


def settled(futures: Sequence[Future[Any]], deadline: float | None) -> Future[None]:
    """Done when all futures are, or at the deadline in monotonic seconds. Callbacks may run in any thread, even at
    once, and must not block."""
    done: Future[None] = Future()
    waiting = [future for future in futures if not future.done()]
    counted = itertools.count(1)  # its next() is atomic

    def settle() -> None:
        with suppress(InvalidStateError):  # last future or deadline: one comes first
            done.set_result(None)

    def is_done(_: Future[Any]) -> None:
        if next(counted) == len(waiting):
            settle()

    if not waiting:
        settle()
    elif deadline is not None and deadline - time.monotonic() < _LONGEST:
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), settle)
        timer.daemon = True
        done.add_done_callback(lambda _: timer.cancel())
        timer.start()
    for future in waiting:
        future.add_done_callback(is_done)
    return done


def check(futures: Sequence[Future[Any]]) -> None:
    """Raise the error of any finished future."""
    for future in filter(Future.done, futures):
        future.result()
