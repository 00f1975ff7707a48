"""Looking at programs without running them: the body is executed once on a backend that generates nothing."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sgl.errors import ProgramError, SglError
from sgl.lang.backends.dry import DryBackend
from sgl.lang.config import backend_of, global_config
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.sampling import sampling_params
from sgl.lang.record.open_runs import Hold
from sgl.lang.record.place import Place
from sgl.lang.record.run import Run, program_of
from sgl.lang.record.state import ProgramState
from sgl.lang.record.stream import Stream


class _Program(Protocol):
    """The part of `SglFunction` used here."""

    __name__: str
    func: Callable[..., Any]
    bind_arguments: dict[str, Any]
    free: list[inspect.Parameter]
    is_async: bool

    def run(self, *args: Any, **kwargs: Any) -> ProgramState: ...


class NestedCallError(ProgramError):
    """A traced program calls another."""


class TraceState(ProgramState):
    """A state whose reads return lazy references."""

    def __getitem__(self, name: str) -> Any:
        value = self._stream.names.get(name)
        return self.ref(name) if value is not None and not isinstance(value, str | list) else value

    get_var = __getitem__


class TracedRun(Run):
    """A run that keeps all streams' recording order."""

    def __init__(self, program: _Program, args: Mapping[str, str]) -> None:
        self.recorded: list[tuple[int, ir.Node, Place | None]] = []
        super().__init__(ir.Program(program.__name__, 0, args=args), DryBackend())

    def record(self, stream: int, node: ir.Node) -> None:
        """Note the node and record it."""
        self.recorded.append((stream, node, self.stream(stream).places[-1]))
        super().record(stream, node)


@dataclass(frozen=True)
class Trace:
    """A body's record, with symbols for missing arguments."""

    state: ProgramState
    run: TracedRun

    @classmethod
    def of(cls, program: _Program, arguments: Mapping[str, Any]) -> Trace:
        """Execute the body once on symbols."""
        if program.is_async:
            raise ProgramError(f"program {program.__name__!r} is asynchronous; only `def` programs can be traced")
        given = {**arguments, **program.bind_arguments}
        symbols = {
            parameter.name: ir.Arg(parameter.name)
            for parameter in program.free
            if parameter.name not in given and parameter.default is parameter.empty
        }
        run = TracedRun(program, {name: "{" + name + "}" for name in symbols})
        state = TraceState(run, run.root)
        with run.body():
            state.ret_value = program.func(state, **given, **symbols)
        return cls(state, run)

    @property
    def ret_value(self) -> Any:
        """The body's result."""
        return self.state.ret_value

    @property
    def nodes(self) -> list[ir.Node]:
        """The root stream's nodes."""
        return self.run.root.nodes

    @property
    def variables(self) -> dict[str | None, Any]:
        """Variables by name."""
        return self.run.root.names

    @property
    def child_states(self) -> list[Stream]:
        """Streams forked from the root."""
        return self.run.root.children

    @property
    def last_node(self) -> Trace:
        """The original's way to `print_graph_dfs`."""
        return self

    def flatten_nodes(self) -> list[ir.Node]:
        """All streams' nodes, branches after their fork."""
        return [node for _, _, node in walk(self.run.root)]

    def print_graph_dfs(self) -> str:
        """A line per node, with its path."""
        return "\n".join(f"{path}: {node!r}" for path, _, node in walk(self.run.root))

    def constant_prefix(self) -> str:
        """Every run's first constant text."""
        prefix = ""
        for node in self.nodes:
            if not isinstance(node, ir.Text):
                break
            prefix += node.text
        return prefix


class CompiledProgram:
    """A recorded program with holes for arguments. `trace` is None if it calls others: its runs execute the body."""

    def __init__(self, program: _Program, trace: Trace | None, backend: Any) -> None:
        self._program = program
        self._trace = trace
        self._backend = backend

    def print_graph(self) -> None:
        """Print every node with its path."""
        graph = self._trace.print_graph_dfs() if self._trace else f"{self._program.__name__} calls other programs"
        sys.stdout.write(graph + "\n")

    def run(self, *, backend: Any = None, **kwargs: Any) -> ProgramState:
        """Run with the open arguments' values; other keywords are sampling parameters."""
        if self._trace is None:
            return self._program.run(**kwargs, backend=backend or self._backend)
        holes = self._trace.run.program.args
        args = {name: kwargs.pop(name) for name in list(kwargs) if name in holes}
        if missing := sorted(holes.keys() - args.keys()):
            raise TypeError(f"program {self._program.__name__!r} lacks its arguments {', '.join(missing)}")
        if wrong := [name for name, value in args.items() if not isinstance(value, str)]:
            raise TypeError(f"the arguments of a compiled program are texts; {', '.join(wrong)} is not")
        program = program_of(self._program.__name__, sampling_params(**kwargs), args=args)
        run = Run(program, backend_of(backend or self._backend))
        streams = [run.root]
        for source, node, place in self._trace.run.recorded:
            if isinstance(node, ir.Fork):
                streams += streams[source].fork(len(node.children))
            elif isinstance(node, ir.Join):
                streams[source].join([streams[child] for child in node.children], node.mode)
            elif not isinstance(node, ir.ToolResults):  # recording the gen adds them
                streams[source].append(node, place)
        run.body_ended()
        return ProgramState(run, run.root, hold=Hold(run))

    def run_batch(
        self, rows: Sequence[Mapping[str, Any]], *, return_exceptions: bool = False, **options: Any
    ) -> list[Any]:
        """Run all rows to their ends. Raises the first error, unless `return_exceptions` leaves errors in the list."""
        states = [self.run(**row, **options) for row in rows]
        errors = [state.error() for state in states]
        if return_exceptions:
            return [error or state for error, state in zip(errors, states, strict=True)]
        for error in filter(None, errors):
            raise error
        return list(states)


@dataclass(frozen=True)
class Explanation:
    """A dry run's result. `requests`: round trips to an executor of programs; `stopped`: why it could not finish."""

    nodes: list[tuple[str, ir.Node]]
    requests: int
    text: str
    stopped: str | None = None

    def __str__(self) -> str:
        lines = [f"{path:>8}  {_shown(node)}" for path, node in self.nodes]
        count = f"{self.requests} request" + ("s" if self.requests != 1 else "")
        if self.stopped:
            count = f"at least {count}; with made-up values the body stopped: {self.stopped}"
        return "\n".join([*lines, count])


def explain(
    prepare: Callable[..., tuple[ProgramState, Callable[[], None]]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    backend: Any = None,
) -> Explanation:
    """Execute the prepared body once on made-up values and describe what it asks of a backend: of that in `kwargs`,
    else `backend`, else the default."""
    given = kwargs.get("backend") or backend or global_config.default_backend
    dry = DryBackend(getattr(getattr(given, "endpoint", given), "chat_template", None))
    state, execute = prepare(*args, **{**kwargs, "backend": dry})
    stopped = None
    try:
        execute()
        done = threading.Event()
        state.when_done(done.set)
        done.wait()
        state.sync()
    except SglError as error:
        stopped = str(error)
    except Exception as error:
        stopped = f"{type(error).__name__}: {error}"
    root = state.root
    return Explanation([(path, node) for path, _, node in walk(root)], dry.segments, root.partial_text(), stopped)


def walk(stream: Stream) -> Iterator[tuple[str, Stream, ir.Node]]:
    """(path, stream, node) of a stream, and of branches after their fork."""
    children = {child.id: child for child in stream.children}
    for index, node in enumerate(stream.nodes):
        yield ir.node_path(stream.path, index), stream, node
        if isinstance(node, ir.Fork):
            for child in node.children:
                yield from walk(children[child])


def _shown(node: ir.Node) -> str:
    data = ir.to_json(node)
    return " ".join([data.pop("op"), *(f"{key}={value!r}" for key, value in data.items())])
