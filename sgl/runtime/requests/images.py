"""Threads that read images: fetching and decoding them takes long, and other requests wait for neither."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SharedThreads:
    """Threads whose callers take turns. One caller has at most all but one of them, and waits behind itself only."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=name)  # they start when needed
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._running: Counter[str] = Counter()

    def of(self, caller: str | None) -> Executor:
        """An executor for one caller's work."""
        return _Share(self, caller or "")

    def submit(self, caller: str, work: Callable[[], T]) -> Future[T]:
        """Raises RuntimeError when the interpreter ends."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(caller, deque()).append((future, work))
            self._start()
        return future

    def _start(self) -> None:
        """Begin what may run, the caller first whose last turn is longest ago."""
        while self._running.total() < self._size:
            caller = next((each for each in self._waiting if self._running[each] < self._size - 1), None)
            if caller is None:
                return
            queue = self._waiting.pop(caller)
            future, work = queue.popleft()
            if queue:
                self._waiting[caller] = queue  # behind the others
            self._threads.submit(self._run, caller, future, work)
            self._running[caller] += 1

    def _run(self, caller: str, future: Future[Any], work: Callable[[], Any]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as error:  # the future raises it
                future.set_exception(error)
            else:
                future.set_result(result)
        with self._lock:
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]
            self._start()


class _Share(Executor):
    def __init__(self, threads: SharedThreads, caller: str) -> None:
        self._threads = threads
        self._caller = caller

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._threads.submit(self._caller, lambda: fn(*args, **kwargs))


THREADS = SharedThreads(8, "sgl-images")


def has_images(arguments: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments brings some."""
    return any(arguments.get(name) is not None for name in ("image_data", "video_data"))


def pool_for(arguments: Mapping[str, Any], otherwise: Executor) -> Executor:
    """Where such a call is prepared."""
    return THREADS.of(arguments.get("owner")) if has_images(arguments) else otherwise
