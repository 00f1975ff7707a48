"""Many runs of one program at once, from a thread (`run_batch`) or event loop (`arun_batch`). No body runs twice."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from sgl.errors import InvalidRequest
from sgl.lang.aio import Watched
from sgl.lang.record.open_runs import together
from sgl.lang.record.pool import BodyPool
from sgl.lang.record.run import context_of_row
from sgl.lang.record.state import ProgramState
from sgl.machine_limits import num_processors

T = TypeVar("T")
CHUNK = 200  # rows that generator_style runs at once
DEFAULT_CONCURRENCY = 10_000


def row_of(row: Any, parameters: Sequence[inspect.Parameter]) -> dict[str, Any]:
    """A row as a new dict of arguments. A tuple's values follow the parameters; defaults may be left out."""
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
    """Runs bodies on the calling thread, and on others while bodies wait."""

    def __init__(
        self,
        run: Callable[..., ProgramState],
        options: dict[str, Any],
        num_threads: int | Literal["auto"],
        progress_bar: bool,
        return_exceptions: bool,
    ) -> None:
        if num_threads != "auto" and (not isinstance(num_threads, int) or num_threads < 1):
            message = f"num_threads must be 'auto' or a number of at least 1, not {num_threads!r}"
            raise InvalidRequest(message, param="num_threads")
        self._run_one = run
        self._options = options
        self._max_threads = max(96, 16 * num_processors()) if num_threads == "auto" else num_threads
        self._has_bar = progress_bar
        self._return_exceptions = return_exceptions

    def __call__(self, rows: list[dict[str, Any]]) -> list[Any]:
        with self._progress(len(rows)) as progress:
            outcomes = self._run(rows, progress)
        if (failed := self._first_failed(outcomes)) is not None:
            raise noted(outcomes, failed, "run_batch")
        return outcomes

    def in_chunks(self, rows: list[dict[str, Any]]) -> Iterator[Any]:
        """Outcomes in order, `CHUNK` rows at a time."""
        with self._progress(len(rows)) as progress:
            for start in range(0, len(rows), CHUNK):
                outcomes = self._run(rows[start : start + CHUNK], progress)
                failed = self._first_failed(outcomes)
                yield from outcomes[:failed]
                if failed is not None:
                    raise noted(outcomes, failed, "run_batch", start)

    def _progress(self, num_rows: int) -> contextlib.AbstractContextManager[_Progress | None]:
        return contextlib.closing(_Progress(num_rows)) if self._has_bar else contextlib.nullcontext()

    def _run(self, rows: list[dict[str, Any]], progress: _Progress | None) -> list[ProgramState | BaseException]:
        """Each row's state or error, once all are done. An interrupt ends all rows."""
        batch = _Rows(len(rows), progress)
        try:
            with together():
                jobs = [partial(context_of_row().run, self._run_row, batch, i, row) for i, row in enumerate(rows)]
                BodyPool(self._max_threads).work(jobs)
                batch.wait(lambda: batch.interrupt is not None or batch.num_done == len(rows))
                if batch.interrupt is not None:
                    raise batch.interrupt
        except BaseException as error:
            batch.interrupt = error
            raise
        return batch.outcomes

    def _run_row(self, batch: _Rows, index: int, row: dict[str, Any]) -> None:
        if batch.interrupt is not None:
            return
        try:
            state = self._run_one(**row, **self._options)
        except KeyboardInterrupt as error:  # concerns all rows
            batch.interrupt = error
            batch.wake()
        except BaseException as error:  # the row's alone: whoever reads it meets it
            batch.finish(index, error)
        else:
            state.when_done(partial(batch.finish, index, state))

    def _first_failed(self, outcomes: list[Any]) -> int | None:
        """Index of the first error to raise, if any."""
        kept = Exception if self._return_exceptions else ()
        errors = (i for i, outcome in enumerate(outcomes) if isinstance(outcome, BaseException))
        return next((i for i in errors if not isinstance(outcomes[i], kept)), None)


def noted(outcomes: list[Any], index: int, method: str, start: int = 0) -> BaseException:
    """Row `start + index`'s error, with a note that names the row."""
    error: BaseException = outcomes[index]
    num_failed = sum(isinstance(outcome, BaseException) for outcome in outcomes)
    others = f", and {num_failed - 1} more failed" if num_failed > 1 else ""
    error.add_note(f"in row {start + index} of {method}{others}; return_exceptions=True keeps the other rows")
    return error


class _Progress:
    """A progress bar that also counts failed rows."""

    def __init__(self, num_rows: int) -> None:
        self._bar = _progress(num_rows)
        self._num_failed = 0
        self.close = self._bar.close

    def count(self, *, failed: bool) -> None:
        """Count a finished row."""
        if failed:
            self._num_failed += 1
            self._bar.set_postfix({"failed": self._num_failed}, refresh=False)
        self._bar.update(1)


class _Rows(Watched):
    """Rows' outcomes and their number."""

    def __init__(self, size: int, progress: _Progress | None) -> None:
        super().__init__()
        self.outcomes: list[Any] = [None] * size
        self.num_done = 0
        self.interrupt: BaseException | None = None
        """Ends all rows: no further one begins."""
        self._progress = progress
        self._lock = threading.Lock()

    def finish(self, index: int, outcome: ProgramState | BaseException) -> None:
        """Record a row's outcome."""
        if isinstance(outcome, ProgramState):
            outcome = outcome.failed() or outcome
        self.outcomes[index] = outcome
        with self._lock:
            self.num_done += 1
            if self._progress:
                with contextlib.suppress(Exception):  # its output may be closed
                    self._progress.count(failed=isinstance(outcome, BaseException))
        self.wake()


class AsyncBatch(Generic[T]):
    """Rows on an event loop: `await` for the list of states, or iterate with `async for`."""

    def __init__(
        self,
        arun: Callable[..., Awaitable[ProgramState]],
        parameters: Sequence[inspect.Parameter],
        rows: Iterable[Any] | AsyncIterable[Any],
        options: dict[str, Any],
        max_concurrency: int | None,
        return_exceptions: bool,
    ) -> None:
        if max_concurrency is not None and max_concurrency < 1:
            raise InvalidRequest("max_concurrency must be at least 1", param="max_concurrency")
        self._run_one = arun
        self._parameters = parameters
        self._rows = rows
        self._options = options
        self._max_concurrency = max_concurrency or DEFAULT_CONCURRENCY
        self._return_exceptions = return_exceptions

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self._all().__await__()

    async def _all(self) -> list[Any]:
        outcomes = [outcome async for outcome in self._outcomes()]
        failed = (i for i, outcome in enumerate(outcomes) if isinstance(outcome, Exception))
        if not self._return_exceptions and (first := next(failed, None)) is not None:
            raise noted(outcomes, first, "arun_batch")
        return outcomes

    async def __aiter__(self) -> AsyncIterator[T]:
        index = 0
        async with contextlib.aclosing(self._outcomes()) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome, Exception) and not self._return_exceptions:
                    raise noted([outcome], 0, "arun_batch", index)
                yield outcome
                index += 1

    async def _outcomes(self) -> AsyncGenerator[Any, None]:
        """Each row's state or error, in order. Closing gives up unfinished rows."""
        slots = asyncio.Semaphore(self._max_concurrency)
        outcomes: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue()
        feeder = asyncio.create_task(self._feed(slots, outcomes))
        tasks: list[asyncio.Task[Any]] = [feeder]
        try:
            while (task := await outcomes.get()) is not None:
                tasks.append(task)
                yield await task
                tasks.pop()
            await feeder  # raises what the rows' iterator raised
        finally:
            while not outcomes.empty():
                if left := outcomes.get_nowait():
                    tasks.append(left)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, slots: asyncio.Semaphore, outcomes: asyncio.Queue[asyncio.Task[Any] | None]) -> None:
        """Start a task per row as slots free up; queue the tasks in order."""
        try:
            async for row in _aiter(self._rows):
                await slots.acquire()
                task = asyncio.create_task(self._run_row(row_of(row, self._parameters)))
                task.add_done_callback(lambda _: slots.release())
                outcomes.put_nowait(task)
        finally:
            outcomes.put_nowait(None)

    async def _run_row(self, row: dict[str, Any]) -> Any:
        try:
            return await self._run_one(**row, **self._options)
        except Exception as error:  # the row's alone: whoever reads it meets it
            return error


async def _aiter(rows: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(rows, AsyncIterable):
        async for row in rows:
            yield row
    else:
        for row in rows:
            yield row


def _progress(total: int) -> Any:
    from tqdm import tqdm  # few ask for a bar

    return tqdm(total=total)
