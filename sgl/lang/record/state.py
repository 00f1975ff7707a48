"""Program states: the `s` of bodies. Two facades over one stream, blocking for `def` and awaitable for `async def`.

Appending never waits; reading sends what is recorded and waits. `sgl.lang.record.stream` has the logic."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Literal, Self, overload

from typing_extensions import TypeVar

from sgl.lang.aio import Wait, drive, drive_async, spare
from sgl.lang.ir import nodes as ir
from sgl.lang.record import shown
from sgl.lang.record.cell import Cell, Chunk, Failure, Lazy, cells_of
from sgl.lang.record.expr import role_turn
from sgl.lang.record.open_runs import Hold
from sgl.lang.record.place import misuse
from sgl.lang.record.run import Run
from sgl.lang.record.stream import Stream
from sgl.lang.record.values import cost_of, meta_of, object_of

R = TypeVar("R", default=Any)  # what the body returns
S = TypeVar("S", bound="Recording[Any]")
T = TypeVar("T")
JOIN_MODES: dict[str, Literal["gather", "append"]] = {"gather_variable": "gather", "concate_and_append": "append"}


class Recording(Generic[R]):
    """The recording part of both states. `is_observer`: outside a body that runs elsewhere; reading then waits for what
    the body has yet to record."""

    def __init__(self, run: Run, stream: Stream, *, is_observer: bool = False, hold: Hold | None = None) -> None:
        """`hold`: shared by outside states; the run ends with the last."""
        self._run = run
        self._stream = stream
        self._is_observer = is_observer
        self._hold = hold
        self.ret_value: R = None  # type: ignore[assignment]  # until the body returns

    def __iadd__(self, expr: object) -> Self:
        """Append text or an expression. Never waits; raises an earlier node's failure."""
        if expr is None:
            raise misuse("None cannot be appended")
        self._stream.append(expr)
        return self

    def __setitem__(self, name: str, value: Any) -> None:
        self._stream.set(name, value)

    set_var = __setitem__

    def __contains__(self, name: object) -> bool:
        """Whether the variable is set so far; its value may be pending."""
        return isinstance(name, str) and name in self._stream.names

    def ref(self, name: str) -> ir.Ref | ir.Text:
        """A variable's text, to append without reading it: `s += s.ref("x").strip()`."""
        value = self._stream.names.get(name)
        if isinstance(value, str):
            return ir.Text(value)
        address = value.address if isinstance(value, Cell | Lazy) else None
        if address is None:
            raise misuse(f"{name!r} is not a variable whose text can be appended", variable=name)
        return ir.Ref(*address)

    def system(self, expr: ir.Node | str | None = None) -> Any:
        """Append a system turn; without `expr`, of what the `with` block appends."""
        return self._role("system", expr)

    def user(self, expr: ir.Node | str | None = None) -> Any:
        """Append a user turn; without `expr`, of what the `with` block appends."""
        return self._role("user", expr)

    def assistant(self, expr: ir.Node | str | None = None) -> Any:
        """Append an assistant turn; without `expr`, of what the `with` block appends."""
        return self._role("assistant", expr)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """Set variable `name` to the text of the `with` block."""
        self._stream.append(ir.ScopeBegin(name))
        yield
        self._stream.append(ir.ScopeEnd(name))

    @contextmanager
    def copy(self) -> Iterator[Self]:
        """A branch whose variables, not text, return to this state."""
        [branch] = self._fork(1)
        yield branch
        self._stream.join([branch._stream], "absorb")

    def cancel(self) -> None:
        """Give up the program, also on the backend."""
        self._run.cancel()

    @property
    def root(self) -> Stream:
        """This state's stream."""
        return self._stream

    @property
    def seed(self) -> int:
        """The program's seed; another run with it gives the same texts."""
        return self._run.program.seed

    @property
    def usage(self) -> dict[str, Any]:
        """The program's cost so far: `requests`, and sums over gens and selects: `prompt_tokens` (of them
        `cached_tokens`), `completion_tokens` (of them `forced_tokens`, not sampled), and, if the backend tells,
        `queue_seconds` and `compute_seconds`."""
        totals = Counter[str](requests=self._run.requests)
        for cell in self._run.cells():
            totals.update(cost_of(cell.meta))
        return dict(totals)

    def when_done(self, call: Callable[[], object]) -> None:
        """Call `call` once the program is done or failed: now, or on the finishing thread. Keeps the state alive."""
        self._run.when_done(lambda _state=self: call())  # type: ignore[misc]  # mypy knows no default of a lambda

    def failed(self) -> BaseException | None:
        """The failure so far, as `error()` returns it; never waits."""
        failure = self._failure()
        return failure.exception() if failure else None

    def _failure(self) -> Failure | None:
        return self._run.failed() if self._stream is self._run.root else self._stream.failure

    def __repr__(self) -> str:
        text = self._stream.shown()
        if failure := self._failure():
            text += f"; failed: {failure.text()}"
        elif not self._run.is_over:
            text += "; running"
        model = self._run.backend.model_name
        return f"ProgramState({text}{f'; model: {model}' if model else ''})"

    def timeline(self) -> dict[str, Any]:
        """The program so far, for `sgl.lang.view`; never waits."""
        return shown.timeline(self._run, self._stream)

    def _repr_html_(self) -> str:
        return shown.html(self._run, self._stream)

    def _ipython_display_(self) -> None:
        shown.display(self._run, self._stream, repr(self))

    def __rich__(self) -> Any:
        return shown.terminal(self._run, self._stream)

    def _role(self, role: str, expr: ir.Node | str | None) -> Any:
        return self._turn(role) if expr is None else self._stream.append(role_turn(role, expr))

    @contextmanager
    def _turn(self, role: str) -> Iterator[None]:
        self._stream.append(ir.RoleBegin(role))
        yield
        self._stream.append(ir.RoleEnd(role))

    def _fork(self, size: int) -> list[Self]:
        if not isinstance(size, int) or size < 1:
            raise misuse(f"fork needs a number of branches, at least one, not {size!r}")
        return [type(self)(self._run, stream, hold=self._hold) for stream in self._stream.fork(size)]

    def _meta(self, name: str) -> Generator[Wait, None, Any]:
        if self._is_observer:
            yield from self._stream.named(name)
        variable = self._stream.names.get(name, "")
        yield from self._stream.ready(cells_of((variable,)))
        return meta_of(variable)

    def parsed(self, key: str | ir.Node, schema: Any = None) -> Generator[Wait, None, Any]:
        """The steps of `value`."""
        name = getattr(key, "name", None) if isinstance(key, ir.Node) else key
        if name is None:
            raise misuse("value() takes the name of a variable, or a gen or select that has one")
        variable = yield from self._variable(name)
        return (yield from object_of(self._run, self._stream, variable, name, schema=schema))

    def _named(self) -> Generator[Wait, None, list[tuple[str, Any]]]:
        """Names and variables, in the order in which they were first set; waits for a body that runs elsewhere."""
        if self._is_observer and not self._run.is_over:
            yield self._run, lambda: self._run.is_over or self._run.failure is not None
        return [(name, variable) for name, variable in list(self._stream.names.items()) if name is not None]

    def _texts(self) -> Generator[Wait, None, dict[str, Any]]:
        found = {}
        for name, variable in (yield from self._named()):
            found[name] = yield from self._stream.value(variable)
        return found

    def _plain(self) -> Generator[Wait, None, dict[str, Any]]:
        found = {}
        for name, variable in (yield from self._named()):
            found[name] = yield from object_of(self._run, self._stream, variable, name, is_plain=True)
        return found

    def _found(self, name: str, default: Any) -> Generator[Wait, None, Any]:
        if self._is_observer:
            yield from self._stream.named(name)
        is_known = name in self._stream.names or self._stream.failure is not None
        return (yield from self.observed(name)) if is_known else default

    def observed(self, name: str) -> Generator[Wait, None, Any]:
        """The steps of `s[name]`."""
        variable = yield from self._variable(name)
        return (yield from self._stream.value(variable))

    def _variable(self, name: str) -> Generator[Wait, None, Any]:
        if self._is_observer:
            yield from self._stream.named(name)
        return self._stream.variable(name)

    def _whole(self, steps: Generator[Wait, None, T]) -> Generator[Wait, None, T]:
        """The steps, after a body that runs elsewhere has ended."""
        yield from self._named()
        return (yield from steps)

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """`ProgramState.text_iter` for event loops."""
        for step in self._stream.chunks(var_name, to_the_end=self._is_observer):
            if isinstance(step, Chunk):
                yield (step.text, step.meta) if return_meta_data else step.text
            else:
                watched, is_ready = step
                await watched.wait_async(is_ready)

    def _error(self) -> Generator[Wait, None, BaseException | None]:
        failure = yield from self._whole(self._stream.settle())
        run = self._run
        if failure is None and run.is_over and self._stream is run.root:  # all recorded nodes are in its branches
            if not run.is_done:
                yield run, lambda: run.is_done
            failure = run.failed()
        return failure.exception() if failure else None

    def _sync(self) -> Generator[Wait, None, None]:
        if error := (yield from self._error()):
            raise error


class ProgramState(Recording[R], Mapping[str, Any]):
    """A running or finished program: a mapping of variables to what `s[name]` gives. Reads block; interrupting one, or
    losing all states, gives the program up."""

    __eq__, __hash__ = object.__eq__, object.__hash__  # a state is itself, not its variables

    def __getitem__(self, name: str) -> Any:
        """A variable's value: text, or a list after n > 1 or a join."""
        return drive(self.observed(name), self.cancel)

    get_var = __getitem__

    def __iter__(self) -> Iterator[str]:
        """The variables' names, in the order in which they were first set; of a streaming run, all to its end."""
        return iter([name for name, _ in drive(self._named(), self.cancel)])

    def __len__(self) -> int:
        return len(drive(self._named(), self.cancel))

    def __bool__(self) -> bool:
        return True  # also without variables

    def get(self, name: str, default: Any = None) -> Any:
        """The variable's value, or `default` if the program never sets it."""
        return drive(self._found(name, default), self.cancel)

    @overload
    def value(self, name: ir.Gen[T]) -> T: ...
    @overload
    def value(self, name: str | ir.Node, schema: type[T]) -> T: ...
    @overload
    def value(self, name: str | ir.Node, schema: Any = None) -> Any: ...
    def value(self, name: str | ir.Node, schema: Any = None) -> Any:
        """The object of a gen with schema or dtype, calls of one with tools, else the text. `name`: of the variable, or
        the gen itself. `schema`: a type as which to parse the text, whatever was asked for."""
        return drive(self.parsed(name, schema), self.cancel)

    def variables(self) -> dict[str, Any]:
        """Every variable's `s[name]`; of a streaming run, to its end."""
        return drive(self._texts(), self.cancel)

    def to_dict(self) -> dict[str, Any]:
        """Every variable's value as JSON has it: typed ones parsed, the others texts."""
        return drive(self._plain(), self.cancel)

    def text(self) -> str:
        """All text so far with templates; of a streaming run, to its end."""
        return drive(self._whole(self._stream.text()), self.cancel)

    def messages(self) -> list[dict[str, Any]]:
        """The closed turns."""
        return drive(self._whole(self._stream.messages()), self.cancel)

    def get_meta_info(self, name: str) -> Any:
        """The backend's meta info of a gen; None for other variables."""
        return drive(self._meta(name), self.cancel)

    def sync(self) -> None:
        """Wait for everything recorded. Raises its failure."""
        drive(self._sync(), self.cancel)

    def error(self) -> BaseException | None:
        """`sync`, but returns the failure."""
        return drive(self._error(), self.cancel)

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ProgramStateGroup:
        """`size` parallel branches from here. (`position_ids_offset` is the original's and has no effect.)"""
        return ProgramStateGroup(self, self._fork(size))

    def text_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> Iterator[Any]:
        """New text, in non-empty pieces: of a variable, or of everything recorded; of a streaming run, to its end. A
        join's list comes branch by branch. `return_meta_data` yields pairs of text and meta info; info after the last
        piece joins it."""
        try:
            for step in self._stream.chunks(var_name, to_the_end=self._is_observer):
                if isinstance(step, Chunk):
                    yield (step.text, step.meta) if return_meta_data else step.text
                else:
                    watched, is_ready = step
                    watched.wait(is_ready)
        except (KeyboardInterrupt, SystemExit):
            self._run.cancel()
            raise
        except Exception as error:
            spare(error)
            raise


class AsyncProgramState(Recording[R]):
    """The state of an `async def` program; reads are awaited: `await s["x"]`."""

    def __getitem__(self, name: str) -> Awaitable[Any]:
        """A variable's value: text, or a list after n > 1 or a join."""
        return drive_async(self.observed(name))

    get_var = __getitem__

    @overload
    def value(self, name: ir.Gen[T]) -> Awaitable[T]: ...
    @overload
    def value(self, name: str | ir.Node, schema: type[T]) -> Awaitable[T]: ...
    @overload
    def value(self, name: str | ir.Node, schema: Any = None) -> Awaitable[Any]: ...
    def value(self, name: str | ir.Node, schema: Any = None) -> Awaitable[Any]:
        """`ProgramState.value`, to be awaited."""
        return drive_async(self.parsed(name, schema))

    def get(self, name: str, default: Any = None) -> Awaitable[Any]:
        """The variable's value, or `default` if the program never sets it."""
        return drive_async(self._found(name, default))

    def variables(self) -> Awaitable[dict[str, Any]]:
        """Every variable's `await s[name]`."""
        return drive_async(self._texts())

    def to_dict(self) -> Awaitable[dict[str, Any]]:
        """Every variable's value as JSON has it: typed ones parsed, the others texts."""
        return drive_async(self._plain())

    def text(self) -> Awaitable[str]:
        """All text so far with templates."""
        return drive_async(self._whole(self._stream.text()))

    def messages(self) -> Awaitable[list[dict[str, Any]]]:
        """The closed turns."""
        return drive_async(self._whole(self._stream.messages()))

    def get_meta_info(self, name: str) -> Awaitable[Any]:
        """The backend's meta info of a gen; None for other variables."""
        return drive_async(self._meta(name))

    def sync(self) -> Awaitable[None]:
        """Wait for everything recorded. Raises its failure."""
        return drive_async(self._sync())

    def error(self) -> Awaitable[BaseException | None]:
        """`sync`, but returns the failure."""
        return drive_async(self._error())

    def fork(self, size: int = 1) -> AsyncProgramStateGroup:
        """`size` parallel branches from here; `async with` joins them at its end."""
        return AsyncProgramStateGroup(self, self._fork(size))

    text_iter = Recording.text_async_iter


class Group(Generic[S]):
    """A fork's branches, in order."""

    def __init__(self, parent: S, states: list[S]) -> None:
        self._parent = parent
        self.states = states

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> S:
        return self.states[index]

    def __setitem__(self, index: int, state: S) -> None:
        if state is not self.states[index]:
            raise misuse("a branch cannot be replaced; append to it with +=")

    def __iter__(self) -> Iterator[S]:
        return iter(self.states)

    def __iadd__(self, expr: str | ir.Node | Sequence[Any] | Callable[[int], Any]) -> Self:
        """Append the same to all branches, one list item each, or `expr(i)` to branch i."""
        if isinstance(expr, Sequence) and not isinstance(expr, str):
            if len(expr) != len(self.states):
                raise misuse(f"{len(expr)} items for {len(self.states)} branches")
            items = list(expr)
        else:
            items = [expr(i) if callable(expr) else expr for i in range(len(self.states))]
        for state, item in zip(self.states, items, strict=True):
            state += item
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Close the branches; never waits. "gather_variable": each variable set in branches becomes a list in the
        parent, in branch order, None where unset; a later round replaces it. "concate_and_append": append the branches'
        texts in order."""
        if mode not in JOIN_MODES:
            raise misuse(f"join mode must be one of {', '.join(JOIN_MODES)}, not {mode!r}")
        self._parent._stream.join([state._stream for state in self.states], JOIN_MODES[mode])


class ProgramStateGroup(Group[ProgramState]):
    """Branches of a `def` program."""


class AsyncProgramStateGroup(Group[AsyncProgramState]):
    """Branches of an `async def` program."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.join()
