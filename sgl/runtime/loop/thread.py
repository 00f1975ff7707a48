"""The one thread in which an engine uses torch.

OpenMP gives every thread that runs parallel regions its own workers. With more workers than cores, waking them
takes longer than most regions.
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
    """A daemon thread that runs functions in turn until closed or dropped. It takes its creator's number of torch
    threads, lest another engine's setting for a small step apply."""

    def __init__(self) -> None:
        import torch  # here: the server's process imports this file without torch

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
        """Run a function there and return its result. On an error or interrupt the thread ends first: an
        interpreter that exits beside it would abort."""
        try:
            return self.start(function).result()
        except BaseException:
            self.close()
            self.join()
            raise

    def close(self) -> None:
        """End after the functions queued so far. Idempotent."""
        self._work.put(None)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `timeout` seconds; does nothing in the thread itself."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()


def settle(future: Future[T], function: Callable[[], T]) -> None:
    """Run a function and put its result or error into the future."""
    try:
        future.set_result(function())
    except BaseException as error:  # the future raises it
        future.set_exception(error)


def _run(queued: _Work, num_threads: int) -> None:
    import torch

    torch.get_num_threads()  # a thread's first use of torch adopts the process's number
    torch.set_num_threads(num_threads)
    for work in iter(queued.get, None):
        work()
        del work  # free what it holds while idle
