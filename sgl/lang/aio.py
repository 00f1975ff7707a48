"""The language's background event loop, and waiting for it from threads and other loops.

All sessions and network traffic live on the daemon thread `sgl-io`; user code never runs there. Others wait by
`Watched`, a lock-free list of wake-up calls."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent import futures
from concurrent.futures import CancelledError, Future
from typing import Any, TypeAlias, TypeVar, cast

T = TypeVar("T")
_SIGNAL_SECONDS = 0.5
"""Poll for signals that arrived just before blocking or on another thread."""


class IoLoop:
    """A daemon thread with an event loop, started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._selector: selectors.BaseSelector | None = None
        self._inbox: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_woken = False
        self._finishers: list[Callable[[], Coroutine[Any, Any, None]]] = []

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop. Any thread."""
        if self._loop is None:
            with self._lock:
                if self._loop is None:
                    self._selector = selectors.DefaultSelector()
                    make = asyncio.SelectorEventLoop  # its sockets are in the selector, for `begin_anew`
                    loop = contextvars.Context().run(make, self._selector)  # not to keep the caller's context alive
                    threading.Thread(target=_run_for_good, args=(loop,), name="sgl-io", daemon=True).start()
                    self._loop = loop
        return self._loop

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function(*args)` on the loop, in order. Any thread; never blocks."""
        self._inbox.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            self.loop().call_soon_threadsafe(self._drain)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; wait for the future anywhere."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop())

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result; interrupting cancels it."""
        future = self.run(coroutine)
        try:
            while not futures.wait([future], _SIGNAL_SECONDS).done:
                pass
            return future.result()
        finally:
            future.cancel()  # no effect once done

    def close_at_exit(self, closer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await `closer()` on the loop at exit."""
        self._finishers.append(closer)

    def close(self) -> None:
        """Await the closers for a moment."""
        finishers, self._finishers = self._finishers, []
        if finishers:
            with contextlib.suppress(Exception, KeyboardInterrupt):  # at exit nobody is left to tell
                self.run(_all_of([closer() for closer in finishers])).result(timeout=CLOSING_SECONDS)

    def begin_anew(self) -> None:
        """In a forked child: drop the parent's thread and connections without closing them for the parent."""
        loop, selector = self._loop, self._selector
        _of_parents.append((loop, self._inbox))
        if loop is not None and selector is not None:
            loop.set_exception_handler(lambda loop, context: None)  # unfinished work is the parent's
            nothing = os.open(os.devnull, os.O_RDWR)
            # the selector first: changing it would change the parent's
            copies = [selector, *(selector.get_map() or ())]
            for copy in copies:  # the numbers stay taken: someone may still close them
                os.dup2(nothing, copy if isinstance(copy, int) else copy.fileno(), inheritable=False)
            os.close(nothing)
        self.__init__()  # type: ignore[misc]

    def _drain(self) -> None:
        self._is_woken = False  # before emptying, so that no post is missed
        while self._inbox:
            function, args = self._inbox.popleft()
            self.loop().call_soon(function, *args)  # isolates their exceptions


async def _all_of(works: list[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*works, return_exceptions=True)


def _run_for_good(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop whatever a backend's code raises on it."""
    while True:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


CLOSING_SECONDS = 2.0  # to tell servers at exit
_of_parents: list[object] = []  # stopped loops and posts, kept from garbage collection

io = IoLoop()
atexit.register(io.close)
os.register_at_fork(after_in_child=io.begin_anew)


class Watched:
    """Something that others wait for to change.

    A waiter adds its wake-up call and then checks; a change happens first and then empties the list. So a waiter sees
    the change or is woken, without a lock."""

    __slots__ = ("_wakers",)

    def __init__(self) -> None:
        self._wakers: list[Callable[[], object]] = []

    def forget_waiters(self) -> None:
        """Drop waiters: they are the parent process's."""
        self._wakers = []

    def wake(self) -> None:
        """Let all waiters check again. Call after each change."""
        wakers = self._wakers
        for _ in range(len(wakers)):  # those still waiting queue up behind
            try:
                waker = wakers.pop(0)
            except IndexError:  # another change took it
                return
            waker()

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Block until `is_ready()`. A batch's worker lets another body run meanwhile."""
        if is_ready():
            return
        with getattr(_thread, "blocking", contextlib.nullcontext)():
            while not is_ready():
                event = threading.Event()
                self._wakers.append(event.set)
                if is_ready():
                    return
                while not event.wait(_SIGNAL_SECONDS):
                    pass

    async def wait_async(self, is_ready: Callable[[], bool]) -> None:
        """Suspend this task, on any loop, until `is_ready()`."""
        while not is_ready():
            future = asyncio.get_running_loop().create_future()
            self._wakers.append(lambda future=future: _wake_future(future))  # type: ignore[misc]
            if is_ready():
                return
            await future


Wait: TypeAlias = tuple[Watched, Callable[[], bool]]


def drive(steps: Generator[Wait, None, T], give_up: Callable[[], object] = lambda: None) -> T:
    """Run steps, blocking this thread for what they yield. Calls `give_up` on interrupt."""
    with contextlib.closing(steps):
        try:
            while True:
                watched, is_ready = next(steps)
                watched.wait(is_ready)
        except StopIteration as stop:
            return cast(T, stop.value)
        except (KeyboardInterrupt, SystemExit):
            give_up()
            raise
        except Exception as error:
            spare(error)
            raise


async def drive_async(steps: Generator[Wait, None, T]) -> T:
    """Run steps, suspending this task for what they yield."""
    with contextlib.closing(steps):
        try:
            while True:
                watched, is_ready = next(steps)
                await watched.wait_async(is_ready)
        except StopIteration as stop:
            return cast(T, stop.value)
        except Exception as error:
            spare(error)
            raise


def spare(error: Exception) -> None:
    """Drop our own frames from an error of ours."""
    trace = error.__traceback__
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("sgl."):
        trace = trace.tb_next
    if trace is None and type(error).__module__ == "sgl.errors":
        error.__traceback__ = None


def outcome(work: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call a user's function for an event loop, where StopIteration and CancelledError must become RuntimeError."""
    try:
        return work(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError("StopIteration was raised, as a next() does that finds nothing") from error
    except CancelledError as error:
        raise RuntimeError(f"a future that was waited for is cancelled: {error}") from error


_thread = threading.local()


@contextlib.contextmanager
def when_blocking(around: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `around()` whenever this thread blocks on a `Watched`."""
    outer = getattr(_thread, "blocking", contextlib.nullcontext)
    _thread.blocking = around
    try:
        yield
    finally:
        _thread.blocking = outer


def _wake_future(future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # its loop is closed
        future.get_loop().call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
