"""Many runs of one program at the same time, from a thread (`run_batch`) or an event loop (`arun_batch`).

It knows rows and order; how one run works is `sgl.lang.function`'s business. No body is ever executed twice.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from sgl.errors import InvalidRequest, ProgramError
from sgl.lang.aio import Watched
from sgl.lang.pool import BodyPool
from sgl.lang.run import context_of_row
from sgl.lang.state import ProgramState
from sgl.lang.trace import Program

CHUNK = 200  # rows that generator_style runs at the same time
DEFAULT_CONCURRENCY = 10_000


def row_of(row: Any, parameters: Sequence[inspect.Parameter]) -> dict[str, Any]:
    """A row as keyword arguments; the caller's dict is never changed. Values of a tuple are for the parameters in
    order; those at the end that have defaults may be missing."""
    if isinstance(row, Mapping):
        return dict(row)
    if not isinstance(row, tuple | list):
        raise InvalidRequest(f"a row must be a dict or a tuple, not {type(row).__name__}", param="batch")
    names = [parameter.name for parameter in parameters]
    if not sum(parameter.default is parameter.empty for parameter in parameters) <= len(row) <= len(names):
        message = f"a row of {len(row)} values for the arguments {', '.join(names)}"
        raise InvalidRequest(message, param="batch")
    return dict(zip(names, row, strict=False))


class SyncBatch:
    """Runs rows with their bodies on the calling thread, and on others while bodies wait."""

    def __init__(
        self,
        program: Program,
        options: dict[str, Any],
        num_threads: int | Literal["auto"],
        progress_bar: bool,
        return_exceptions: bool,
    ) -> None:
        if num_threads != "auto" and (not isinstance(num_threads, int) or num_threads < 1):
            message = f"num_threads must be 'auto' or a number of at least 1, not {num_threads!r}"
            raise InvalidRequest(message, param="num_threads")
        self._program = program
        self._options = options
        self._max_threads = max(96, 16 * (os.cpu_count() or 1)) if num_threads == "auto" else num_threads
        self._progress_bar = progress_bar
        self._return_exceptions = return_exceptions

    def __call__(self, rows: list[dict[str, Any]]) -> list[Any]:
        batch = _Rows(len(rows), _progress(len(rows)) if self._progress_bar else None)
        jobs = [partial(context_of_row().run, self._run_row, batch, i, row) for i, row in enumerate(rows)]
        BodyPool(self._max_threads).work(jobs)
        batch.wait(lambda: batch.num_done == len(rows))
        if batch.progress:
            batch.progress.close()
        return [self._outcome(i, outcome) for i, outcome in enumerate(batch.outcomes)]

    def in_chunks(self, rows: list[dict[str, Any]]) -> Iterator[Any]:
        """The outcomes in order, computed `CHUNK` rows at a time."""
        for start in range(0, len(rows), CHUNK):
            yield from self(rows[start : start + CHUNK])

    def _run_row(self, batch: _Rows, index: int, row: dict[str, Any]) -> None:
        try:
            state = self._program.run(**row, **self._options)
        except BaseException as error:
            batch.finish(index, error)
        else:
            batch.outcomes[index] = state
            state.when_done(partial(batch.finish, index, state))

    def _outcome(self, index: int, outcome: Any) -> Any:
        if isinstance(outcome, ProgramState):
            return (outcome.failed() or outcome) if self._return_exceptions else outcome
        if self._return_exceptions and isinstance(outcome, Exception):
            return outcome
        outcome.add_note(f"in row {index} of run_batch; the other rows ran on (return_exceptions=True keeps them)")
        raise outcome


class _Rows(Watched):
    """The outcomes of rows, and how many there are."""

    def __init__(self, size: int, progress: Any) -> None:
        super().__init__()
        self.outcomes: list[Any] = [None] * size
        self.num_done = 0
        self.progress = progress
        self._lock = threading.Lock()

    def finish(self, index: int, outcome: Any) -> None:
        self.outcomes[index] = outcome
        with self._lock:
            self.num_done += 1
        try:
            if self.progress:
                self.progress.update(1)
        finally:
            self.wake()


class AsyncBatch:
    """Rows that an event loop runs: `await` it for the list of states, or iterate over them with `async for`."""

    def __init__(
        self,
        program: Program,
        rows: Iterable[Any] | AsyncIterable[Any],
        options: dict[str, Any],
        max_concurrency: int | None,
        return_exceptions: bool,
    ) -> None:
        if max_concurrency is not None and max_concurrency < 1:
            raise InvalidRequest("max_concurrency must be at least 1", param="max_concurrency")
        self._program = program
        self._rows = rows
        self._options = options
        self._max_concurrency = max_concurrency or DEFAULT_CONCURRENCY
        self._return_exceptions = return_exceptions

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._all().__await__()

    async def _all(self) -> list[Any]:
        return [outcome async for outcome in self]

    async def __aiter__(self) -> AsyncIterator[Any]:
        slots = asyncio.Semaphore(self._max_concurrency)
        outcomes: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue()
        feeder = asyncio.create_task(self._feed(slots, outcomes))
        tasks: list[asyncio.Task[Any]] = [feeder]
        try:
            while (task := await outcomes.get()) is not None:
                tasks.append(task)
                yield await task
                tasks.pop()
            await feeder  # the iterator of rows may have raised
        finally:
            while not outcomes.empty():
                if left := outcomes.get_nowait():
                    tasks.append(left)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, slots: asyncio.Semaphore, outcomes: asyncio.Queue[asyncio.Task[Any] | None]) -> None:
        """Start a task per row as slots become free; the queue has the tasks in order."""
        try:
            async for row in _aiter(self._rows):
                await slots.acquire()
                task = asyncio.create_task(self._run_row(row_of(row, self._program.free)))
                task.add_done_callback(lambda _: slots.release())
                outcomes.put_nowait(task)
        finally:
            outcomes.put_nowait(None)

    async def _run_row(self, row: dict[str, Any]) -> Any:
        try:
            return await self._program.arun(**row, **self._options)
        except Exception as error:
            if self._return_exceptions:
                return error
            raise


async def _aiter(rows: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(rows, AsyncIterable):
        async for row in rows:
            yield row
    else:
        for row in rows:
            yield row


def _progress(total: int) -> Any:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise ProgramError("progress_bar=True needs the package tqdm") from error
    return tqdm(total=total)
