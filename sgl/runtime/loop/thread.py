"""The thread in which an engine does all that takes torch's threads: loading, and then its steps.

OpenMP gives every thread that runs a parallel region workers of its own. With two such threads a process has more
workers than cores; they then sleep between regions, and waking them takes longer than most regions do.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_Work = queue.SimpleQueue[Callable[[], object] | None]


class EngineThread:
    """A daemon thread that runs one function after the other, until it is closed or dropped. It takes as many of
    torch's threads as the one that makes it: left alone, it would take what another engine set for a small step."""

    def __init__(self) -> None:
        import torch  # here: the server's own process imports this file, and does without

        self._work: _Work = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(self._work, torch.get_num_threads()), name="sgl-engine", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._work.put, None)

    def start(self, function: Callable[[], T]) -> Future[T]:
        """Run a function after those before it."""
        future: Future[T] = Future()
        self._work.put(lambda: settle(future, function))
        return future

    def call(self, function: Callable[[], T]) -> T:
        """The result of a function that is run there. If it raises, or waiting for it does, the thread ends first: an
        interpreter that exits beside it would abort."""
        try:
            return self.start(function).result()
        except BaseException:
            self.close()
            self.join()
            raise

    def close(self) -> None:
        """End when all that was asked for is done. Idempotent."""
        self._work.put(None)

    def join(self) -> None:
        """Wait for its end; not in the thread itself."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()


def settle(future: Future[T], function: Callable[[], T]) -> None:
    """Run a function and put into the future what it ends in."""
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _run(queued: _Work, num_threads: int) -> None:
    import torch

    torch.get_num_threads()  # a thread's first use of torch takes the process's number
    torch.set_num_threads(num_threads)
    for work in iter(queued.get, None):
        work()
        del work  # and what it holds, while there is nothing to do
