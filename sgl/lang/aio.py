"""The one background event loop of the language, and waiting for it from threads and from other loops.

All sessions and all network traffic of a process live on the daemon thread `sgl-io`; user code never runs there.
`Watched` is how the rest waits for what that thread brings: a lock-free list of wake-up calls.
"""

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
"""A signal that comes just before a thread blocks, or that another thread takes, is handled when it next wakes."""


class IoLoop:
    """A daemon thread with an event loop, started by the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._selector: selectors.BaseSelector | None = None
        self._inbox: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_woken = False
        self._finishers: list[Callable[[], Coroutine[Any, Any, None]]] = []

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; any thread may ask."""
        if self._loop is None:
            with self._lock:
                if self._loop is None:
                    self._selector = selectors.DefaultSelector()
                    make = asyncio.SelectorEventLoop  # its sockets are known to the selector, for `begin_anew`
                    loop = contextvars.Context().run(make, self._selector)  # it would keep the caller's alive
                    threading.Thread(target=_run_for_good, args=(loop,), name="sgl-io", daemon=True).start()
                    self._loop = loop
        return self._loop

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function(*args)` on the loop soon, in the order of the posts. Any thread; never blocks."""
        self._inbox.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            self.loop().call_soon_threadsafe(self._drain)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; the future may be waited for from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop())

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns that the loop runs; it is cancelled if waiting for it is interrupted."""
        future = self.run(coroutine)
        try:
            while not futures.wait([future], _SIGNAL_SECONDS).done:
                pass
            return future.result()
        finally:
            future.cancel()  # nothing, once it is done

    def close_at_exit(self, closer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await `closer()` on the loop when the interpreter exits."""
        self._finishers.append(closer)

    def close(self) -> None:
        """Await what is to be closed, for a moment at most."""
        finishers, self._finishers = self._finishers, []
        if finishers:
            with contextlib.suppress(Exception, KeyboardInterrupt):
                self.run(_all_of([closer() for closer in finishers])).result(timeout=CLOSING_SECONDS)

    def begin_anew(self) -> None:
        """In a child process: the thread is the parent's, and so are the connections. The child lets go of its copies,
        without a word to the other side, so that they end when the parent ends them."""
        loop, selector = self._loop, self._selector
        _of_parents.append((loop, self._inbox))
        if loop is not None and selector is not None:
            loop.set_exception_handler(lambda loop, context: None)  # what is not finished is nobody's fault here
            nothing = os.open(os.devnull, os.O_RDWR)
            copies = [selector, *(selector.get_map() or ())]  # the first one too: to change it changes the parent's
            for copy in copies:  # their numbers stay taken: somebody may still close them
                os.dup2(nothing, copy if isinstance(copy, int) else copy.fileno(), inheritable=False)
            os.close(nothing)
        self.__init__()  # type: ignore[misc]

    def _drain(self) -> None:
        self._is_woken = False  # before the inbox is emptied, so that no post goes unseen
        while self._inbox:
            function, args = self._inbox.popleft()
            self.loop().call_soon(function, *args)  # what one of them raises keeps no other waiting


async def _all_of(works: list[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*works, return_exceptions=True)


def _run_for_good(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop that all programs share, whatever a backend's own code raises on it."""
    while True:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


CLOSING_SECONDS = 2.0  # at exit: for telling servers that nobody waits any more
_of_parents: list[
    object
] = []  # loops that stand still and their posts, kept from being closed or given up as garbage

io = IoLoop()
atexit.register(io.close)
os.register_at_fork(after_in_child=io.begin_anew)


class Watched:
    """Something that one thread changes and others wait for.

    A waiter puts its wake-up call on the list and then looks again; a change is made first and the list emptied
    afterwards. In every interleaving the waiter either sees the change or is woken, so no lock is needed."""

    __slots__ = ("_wakers",)

    def __init__(self) -> None:
        self._wakers: list[Callable[[], object]] = []

    def forget_waiters(self) -> None:
        """Wake nobody who waits now: they are of another process."""
        self._wakers = []

    def wake(self) -> None:
        """Let everyone who waits look again. Call it after each change."""
        wakers = self._wakers
        for _ in range(len(wakers)):  # who is still not content waits again behind these
            try:
                waker = wakers.pop(0)
            except IndexError:  # another change took the last one
                return
            waker()

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Block this thread until `is_ready()`. A worker of a batch lets another body run meanwhile."""
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
        """Suspend this task, on whatever loop it runs, until `is_ready()`."""
        while not is_ready():
            future = asyncio.get_running_loop().create_future()
            self._wakers.append(lambda future=future: _wake_future(future))  # type: ignore[misc]
            if is_ready():
                return
            await future


Wait: TypeAlias = tuple[Watched, Callable[[], bool]]


def drive(steps: Generator[Wait, None, T], give_up: Callable[[], object] = lambda: None) -> T:
    """Run steps that yield what to wait for; wait by blocking this thread. `give_up` is called if it is interrupted."""
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
    """Run steps that yield what to wait for; wait by suspending this task."""
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
    """Take from an error of ours the way it came through this package, which tells its reader nothing."""
    trace = error.__traceback__
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("sgl."):
        trace = trace.tb_next
    if trace is None and type(error).__module__ == "sgl.errors":
        error.__traceback__ = None


def outcome(work: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """What a user's function returns, where an event loop awaits it: there a StopIteration, of a next() that found
    nothing, would never arrive, and the CancelledError of a future that it waited for would cancel who awaits. They
    are raised as the RuntimeError that coroutines make of the former."""
    try:
        return work(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError("StopIteration was raised, as a next() does that finds nothing") from error
    except CancelledError as error:
        raise RuntimeError(f"a future that was waited for is cancelled: {error}") from error


_thread = threading.local()


@contextlib.contextmanager
def when_blocking(around: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """While this thread runs the block, each time it blocks on a `Watched` happens inside `around()`."""
    outer = getattr(_thread, "blocking", contextlib.nullcontext)
    _thread.blocking = around
    try:
        yield
    finally:
        _thread.blocking = outer


def _wake_future(future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
        future.get_loop().call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
