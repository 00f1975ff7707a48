"""`@function`: a program and the ways to run it. Splits a call into arguments and options, executes the body once
around a `Run`, and returns the state. Batches are in `batch.py`, dry runs in `trace.py`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
import weakref
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, Unpack, overload

from typing_extensions import TypeVar

from sgl.errors import InvalidRequest, ProgramError, nearest_name
from sgl.lang.config import backend_of
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.sampling import PARAMS, RENAMED, sampling_params
from sgl.lang.record import batch
from sgl.lang.record.call import BatchOptions, Parameters, Row, Rows, RunOptions, takes_call
from sgl.lang.record.compiled import CompiledProgram, Uncompiled
from sgl.lang.record.open_runs import Hold, together
from sgl.lang.record.opening import opened, take_sampling
from sgl.lang.record.pool import BodyPool, on_own_thread
from sgl.lang.record.run import Run
from sgl.lang.record.state import AsyncProgramState, ProgramState
from sgl.lang.record.trace import Explanation, NestedCallError, Preview, Trace, explain

P = ParamSpec("P")
R = TypeVar("R", default=Any)
T = TypeVar("T")

SAMPLING_OPTIONS = PARAMS.keys() | RENAMED.keys()
RUN_OPTIONS = RunOptions.__annotations__.keys() - SAMPLING_OPTIONS

_body_pool = BodyPool(max_threads=1024)  # `def` bodies that stream or that event loops run
os.register_at_fork(after_in_child=_body_pool.reset)


@dataclass(slots=True)
class Call:
    """One call: the body's arguments and the run's options."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    sampling: dict[str, Any]


class SglFunction(Parameters[P], Generic[P, R]):
    """A program: a function of a state `s` and arguments P that returns R; see `@sgl.function`."""

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bind_arguments: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bind_arguments = dict(bind_arguments or {})
        self.options = dict(options or {})
        self.sampling = {name: value for name, value in self.options.items() if name in SAMPLING_OPTIONS}
        self.is_async = inspect.iscoroutinefunction(func)
        self.__doc__, self.__name__ = func.__doc__, func.__name__
        self.__module__, self.__wrapped__ = func.__module__, func
        parameters = list(inspect.signature(func).parameters.values())
        if not parameters or parameters[0].name != "s":
            raise InvalidRequest(f"the first parameter of program {func.__name__!r} must be named s", param="s")
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        known = [parameter for parameter in parameters[1:] if parameter.kind in named]
        self.arg_names = [parameter.name for parameter in known]
        self.free = [parameter for parameter in known if parameter.name not in self.bind_arguments]
        self._takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    def __repr__(self) -> str:
        return f"SglFunction({self.__name__})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By the name of its function, as functions are pickled. Raises InvalidRequest if that is not to be found."""
        if "cloudpickle" in sys._getframe(1).f_globals.get("__name__", ""):
            return super().__reduce_ex__(protocol)  # which sends functions themselves
        module, name = self.func.__module__, self.func.__qualname__
        if "<" in name:
            what = "a lambda" if name.endswith("<lambda>") else "defined inside a function"
            message = (
                f"program {name!r} is {what}, and programs are pickled by name: define it at the top of a module"
            )
            raise InvalidRequest(message, param="program")
        if _named(module, name).func is not self.func:
            raise InvalidRequest(f"{module}.{name} is another program than the one to be pickled", param="program")
        return _unpickled, (module, name, self.bind_arguments, self.options)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def bind(self, **kwargs: Any) -> SglFunction[..., R]:
        """The program with some arguments bound."""
        for name in kwargs:
            if name not in self.arg_names and not self._takes_any:
                raise self._unknown(name)
        return SglFunction(self.func, self.num_api_spec_tokens, {**self.bind_arguments, **kwargs}, self.options)

    def with_options(self, **options: Unpack[RunOptions]) -> SglFunction[P, R]:
        """The program with other defaults for the options of its runs, also for those that its arguments shadow."""
        for name in options:
            if name not in SAMPLING_OPTIONS and name not in RUN_OPTIONS:
                hint = nearest_name(name, {*SAMPLING_OPTIONS, *RUN_OPTIONS})
                raise TypeError(f"{name!r} is no option of a run{hint}")
        return SglFunction(self.func, self.num_api_spec_tokens, self.bind_arguments, {**self.options, **options})

    @takes_call
    def run(self, *args: Any, **kwargs: Any) -> ProgramState[R]:
        """Run the body in this thread and return its state before generation is done: reading waits.

        Keywords are program arguments first, then options: `backend`, `stream` (run the body in the background, stream
        gens), `chat_template`, `use_thread=False` (return when done), and sampling parameters that gens inherit:
        `temperature`, `max_new_tokens`, `stop`, `seed`, `timeout` … Those shadowed by program arguments go into
        `sampling={…}`. Raises what the body raises."""
        call = self._call(args, kwargs)
        if call.options.get("stream"):
            return self._stream(call)
        if self.is_async:
            return _from_sync(self._run_async(call))
        state, execute = self._prepared(call)
        execute()
        if not call.options.get("use_thread", True):
            state.sync()
        return state

    @takes_call
    def stream(self, *args: Any, **kwargs: Any) -> ProgramState[R]:
        """`run` with stream=True; returns at once, for `text_iter` and `text_async_iter`."""
        call = self._call(args, kwargs)
        call.options["stream"] = True
        return self._stream(call)

    @takes_call
    async def arun(self, *args: Any, **kwargs: Any) -> ProgramState[R]:
        """Run a `def` or `async def` program on an event loop until it is complete, with `run`'s arguments. Raises the
        body's or program's error; cancelling the task cancels the program."""
        return await self._run_async(self._call(args, kwargs))

    @overload
    def run_batch(self, batch_kwargs: Rows, **options: Unpack[BatchOptions]) -> list[ProgramState[R]]: ...
    @overload
    def run_batch(
        self, batch_kwargs: Rows, *, return_exceptions: Literal[True], **options: Unpack[BatchOptions]
    ) -> list[ProgramState[R] | Exception]: ...
    @overload
    def run_batch(
        self,
        batch_kwargs: Rows,
        *,
        generator_style: bool = False,
        return_exceptions: bool = False,
        **options: Unpack[BatchOptions],
    ) -> Any: ...
    def run_batch(
        self,
        batch_kwargs: Any,
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        return_exceptions: bool = False,
        **options: Any,
    ) -> Any:
        """Run the program for each row of arguments (dict or tuple), all at once. Returns the finished states in order.

        A row fails with its body's error, or one of its gens' or selects'; others continue. The first error is raised
        when all are done; `return_exceptions` leaves errors in the list. Bodies run in turn on this thread; up to
        `num_threads` overlap while waiting. `generator_style` yields states in order, some hundred rows at a time, and
        raises an error at its row."""
        if not isinstance(batch_kwargs, list | tuple):
            raise InvalidRequest("a batch must be a list of dicts or tuples", param="batch")
        rows = [batch.row_of(row, self.free) for row in batch_kwargs]
        run_rows = batch.SyncBatch(self.run, options, num_threads, progress_bar, return_exceptions)
        return run_rows.in_chunks(rows) if generator_style else run_rows(rows)

    @overload
    def arun_batch(
        self,
        rows: Iterable[Row] | AsyncIterable[Row],
        *,
        max_concurrency: int | None = None,
        return_exceptions: Literal[False] = False,
        **options: Unpack[RunOptions],
    ) -> batch.AsyncBatch[ProgramState[R]]: ...
    @overload
    def arun_batch(
        self,
        rows: Iterable[Row] | AsyncIterable[Row],
        *,
        max_concurrency: int | None = None,
        return_exceptions: bool,
        **options: Unpack[RunOptions],
    ) -> batch.AsyncBatch[ProgramState[R] | Exception]: ...
    def arun_batch(
        self,
        rows: Any,
        *,
        max_concurrency: int | None = None,
        return_exceptions: bool = False,
        **options: Any,
    ) -> batch.AsyncBatch[Any]:
        """Run the program for each row of a list or async iterator, at most `max_concurrency` at once. `await` gives
        all states in order; `async for` yields each when done. The first error is raised then, or at its row with
        `async for`, which gives up later rows."""
        return batch.AsyncBatch(self.arun, self.free, rows, options, max_concurrency, return_exceptions)

    def trace(self, *, backend: Any = None, **kwargs: Any) -> Trace:
        """Record the body once without running it; missing arguments are symbolic."""
        return Trace.of(self, kwargs)

    def compile(self, *, backend: Any = None, **kwargs: Any) -> CompiledProgram:
        """Record the body once; runs of the result fill in arguments. The body must not read values or compute with
        arguments. A body that calls other programs is executed by each run."""
        backend = self.options.get("backend") if backend is None else backend
        try:
            traced = Trace.of(self, kwargs).run
        except NestedCallError:
            return Uncompiled(self, kwargs, backend)
        if traced.problem:
            raise ProgramError(f"program {self.__name__!r} cannot be compiled: {traced.problem}")
        options = dict(self.options)
        header = ir.Program(
            self.__name__,
            0,
            sampling_params(**{**take_sampling(options), **self.sampling}),
            traced.program.args,
            chat_template=options.get("chat_template"),
            speculate_tokens=self.num_api_spec_tokens,
        )
        return CompiledProgram(header, traced.recorded, backend, (self, kwargs))

    @takes_call
    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """A run's nodes and number of requests. Runs the body once with made-up values."""
        return explain(self.prepare, args, kwargs, self.options.get("backend"))

    @takes_call
    def preview(self, *args: Any, **kwargs: Any) -> str:
        """A run's prompt with made-up values in braces. Runs the body once."""
        return Preview.of(explain(self.prepare, args, kwargs, self.options.get("backend")))

    def cache(self, backend: Any = None) -> None:
        """Cache every run's constant prefix on the backend, if longer than 64 characters."""
        prefix = Trace.of(self, {}).constant_prefix()
        if len(prefix) > 64:
            backend_of(backend).cache_prefix(prefix)

    @takes_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; within another's body, with its backend, parameters and seed. Await `async def`s."""
        run: Callable[..., Any] = self.arun if self.is_async else self.run
        return run(*args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[ProgramState, Callable[[], None]]:
        """A state, and the call that executes the body."""
        return self._prepared(self._call(args, kwargs))

    def _prepared(self, call: Call) -> tuple[ProgramState, Callable[[], None]]:
        run = self._new_run(call)
        state = _state_of(run)
        if self.is_async:
            return state, lambda: _from_sync(self._async_body(run, call, _keeper(state)))
        return state, lambda: self._body(run, call, state, _keeper(state))

    # One call

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        arguments = dict(self.bind_arguments)
        options = {name: value for name, value in self.options.items() if name in RUN_OPTIONS}
        sampling: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name in self.arg_names:
                arguments.setdefault(name, value)
            elif name in SAMPLING_OPTIONS:
                sampling[name] = value
            elif name in RUN_OPTIONS:
                options[name] = value
            elif self._takes_any:
                arguments[name] = value
            else:
                raise self._unknown(name)
        if self.bind_arguments and args:  # for unbound parameters
            arguments |= dict(zip([parameter.name for parameter in self.free], args, strict=False))
            args = args[len(self.free) :]
        return Call(args, arguments, options, {**self.sampling, **take_sampling(options), **sampling})

    def _new_run(self, call: Call) -> Run:
        return opened(
            self.__name__,
            call.sampling,
            backend=call.options.get("backend"),
            chat_template=call.options.get("chat_template"),
            stream=bool(call.options.get("stream")),
            speculate_tokens=self.num_api_spec_tokens,
        )

    def _body(self, run: Run, call: Call, s: ProgramState, keep: Callable[[Any], None]) -> None:
        """Execute a `def` body here; `keep` gets its result."""
        with run.body():
            keep(self.func(s, *call.args, **call.kwargs))

    def _stream(self, call: Call) -> ProgramState:
        run = self._new_run(call)
        state = _state_of(run, is_observer=True)
        if self.is_async:
            on_own_thread(asyncio.run, self._async_body(run, call, _keeper(state)))
        else:
            _body_pool.submit(self._body, run, call, ProgramState(run, run.root), _keeper(state))
        return state  # iterators and reads raise the body's errors

    async def _run_async(self, call: Call) -> ProgramState:
        run = self._new_run(call)
        run.user_loop = run.user_loop or asyncio.get_running_loop()
        state = _state_of(run)
        try:
            if self.is_async:
                await self._async_body(run, call, _keeper(state))
            else:
                await asyncio.wrap_future(_body_pool.submit(self._body, run, call, state, _keeper(state)))
            await run.wait_async(lambda: run.is_done)
        except asyncio.CancelledError:
            run.cancel()
            raise
        if failure := run.failed():
            raise failure.exception()
        return state

    async def _async_body(self, run: Run, call: Call, keep: Callable[[Any], None]) -> None:
        """Execute an `async def` body in this task; `keep` gets its result."""
        with run.body():
            keep(await self.func(AsyncProgramState(run, run.root), *call.args, **call.kwargs))

    def _unknown(self, name: str) -> TypeError:
        hint = nearest_name(name, {*self.arg_names, *SAMPLING_OPTIONS, *RUN_OPTIONS})
        return TypeError(f"program {self.__name__!r} has no argument {name!r}{hint}, and it is no option of a run")


@overload
def function(func: Callable[Concatenate[AsyncProgramState, P], Coroutine[Any, Any, R]]) -> SglFunction[P, R]: ...
@overload
def function(func: Callable[Concatenate[ProgramState, P], R]) -> SglFunction[P, R]: ...
@overload
def function(func: None = None, num_api_spec_tokens: int | None = None) -> _Decorator: ...
def function(func: Any = None, num_api_spec_tokens: Any = None) -> Any:
    """Make a function of `s` and arguments a program. `num_api_spec_tokens`: on backends of single calls, generate this
    many tokens ahead and serve later gens from them while the text agrees."""
    if func is None:
        return partial(function, num_api_spec_tokens=num_api_spec_tokens)
    if not hasattr(func, "__name__"):
        raise InvalidRequest(f"a program is a function, not {func!r}", param="func")
    if not isinstance(num_api_spec_tokens, int | None):
        message = f"num_api_spec_tokens must be a number of tokens, not {num_api_spec_tokens!r}"
        raise InvalidRequest(message, param="num_api_spec_tokens")
    return SglFunction(func, num_api_spec_tokens)


class _Decorator(Protocol):
    @overload
    def __call__(
        self, func: Callable[Concatenate[AsyncProgramState, P], Coroutine[Any, Any, R]], /
    ) -> SglFunction[P, R]: ...
    @overload
    def __call__(self, func: Callable[Concatenate[ProgramState, P], R], /) -> SglFunction[P, R]: ...


def _named(module: str, name: str) -> SglFunction[..., Any]:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, SglFunction):
        message = (
            f"{module}.{name} is no program, and programs are pickled by name: bind that name with @sgl.function"
        )
        raise InvalidRequest(message, param="program")
    return found


def _unpickled(
    module: str, name: str, bind_arguments: dict[str, Any], options: dict[str, Any]
) -> SglFunction[..., Any]:
    """A pickled program: the very object of that name, or one with its own arguments and options."""
    program = _named(module, name)
    if (bind_arguments, options) == (program.bind_arguments, program.options):
        return program
    return SglFunction(program.func, program.num_api_spec_tokens, bind_arguments, options)


def _state_of(run: Run, *, is_observer: bool = False) -> ProgramState:
    """The caller's state."""
    return ProgramState(run, run.root, is_observer=is_observer, hold=Hold(run))


def _keeper(state: ProgramState) -> Callable[[Any], None]:
    """A callback that stores the body's result in the state, without keeping it alive."""
    ref = weakref.ref(state)

    def keep(value: Any) -> None:
        if (state := ref()) is not None:
            state.ret_value = value

    return keep


def _from_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, even inside a running loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with together():
        result: T = on_own_thread(asyncio.run, coroutine).result()
        return result
