"""Waiting for futures without a thread that waits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

_LONGEST = 86_400.0  # seconds; compiling has long ended by then


async def all_done(futures: Sequence[Future[Any]], since: float, timeout: Any) -> None:
    """As `when_done`; raises what one of them has ended in by then."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def settle() -> None:
        if not done.done():  # whoever awaited it may have left
            done.set_result(None)

    def act() -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(settle)

    when_done(futures, since, timeout, act)
    await done
    check(futures)


def check(futures: Sequence[Future[Any]]) -> None:
    """Raises what one of those that are done ended in."""
    for future in filter(Future.done, futures):
        future.result()


def when_done(futures: Sequence[Future[Any]], since: float, timeout: Any, action: Callable[[], object]) -> None:
    """Call `action` once: when all futures are done, or `timeout` seconds after `since` in monotonic seconds; a timeout
    that is no number is another's to refuse. It is called by whichever thread notices, at once by this one if there is
    nothing to wait for, and must not block."""
    turns = itertools.count()  # its next() is atomic

    def act() -> None:
        if next(turns) == 0:
            action()

    waiting = [future for future in futures if not future.done()]
    if not waiting:
        act()
        return
    timer = None
    if isinstance(timeout, int | float) and timeout < _LONGEST:
        timer = threading.Timer(max(0.0, since + timeout - time.monotonic()), act)
        timer.daemon = True
        timer.start()
    left = itertools.count(1)

    def is_done(_: Future[Any]) -> None:
        if next(left) == len(waiting):
            if timer is not None:
                timer.cancel()
            act()

    for future in waiting:
        future.add_done_callback(is_done)
