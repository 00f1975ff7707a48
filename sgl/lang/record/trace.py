"""Looking at programs without running them: the body is executed once on a backend that generates nothing."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sgl.errors import ProgramError, SglError
from sgl.lang.backends.dry import DryBackend
from sgl.lang.config import global_config
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.encoding import to_json
from sgl.lang.record.cell import Cell
from sgl.lang.record.place import Place
from sgl.lang.record.run import Run
from sgl.lang.record.state import ProgramState
from sgl.lang.record.stream import Stream


class _Program(Protocol):
    """The part of `SglFunction` used here."""

    __name__: str
    func: Callable[..., Any]
    bind_arguments: dict[str, Any]
    free: list[inspect.Parameter]
    is_async: bool


class NestedCallError(ProgramError):
    """A traced program calls another."""


class TraceState(ProgramState):
    """A state whose reads return lazy references."""

    def __getitem__(self, name: str) -> Any:
        value = self._stream.names.get(name)
        return self.ref(name) if value is not None and not isinstance(value, str | list) else value

    get_var = __getitem__

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(self._run, TracedRun) and not isinstance(value, str):
            self._run.problem = f"it sets {name!r} to {type(value).__name__}, and only texts are recorded"
        super().__setitem__(name, value)

    set_var = __setitem__


class TracedRun(Run):
    """A run that keeps all streams' recording order. `problem`: why the record is not all of the program, or None."""

    def __init__(self, program: _Program, args: Mapping[str, str]) -> None:
        self.recorded: list[tuple[int, ir.Node, Place | None]] = []
        self.problem: str | None = None
        self._thread = threading.get_ident()
        self._is_recording = False
        super().__init__(ir.Program(program.__name__, 0, args=args), DryBackend())

    def record(self, stream: int, node: ir.Node) -> None:
        """Note the node and record it."""
        self.recorded.append((stream, node, self.stream(stream).places[-1]))
        self._is_recording = True
        super().record(stream, node)
        self._is_recording = False

    def flush(self, cell: Cell | None = None, *, final: bool = False) -> None:
        """Send when the body looks at a made-up value or ends; not when it is busy with something else."""
        if threading.get_ident() != self._thread and not final:
            return
        if not (final or self._is_recording):
            self.problem = "it looks at what it generates, and is executed only once, before anything is generated"
        super().flush(cell, final=final)


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

    def __rich__(self) -> Any:
        from sgl.lang.view.nodes import table

        return table(*self._table())

    def _repr_html_(self) -> str:
        from sgl.lang.view.nodes import html_table

        return html_table(*self._table(), self.state.timeline())

    def _table(self) -> tuple[list[tuple[str, ir.Node]], str]:
        nodes = [(path, node) for path, _, node in walk(self.run.root)]
        return nodes, f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"

    def constant_prefix(self) -> str:
        """Every run's first constant text."""
        prefix = ""
        for node in self.nodes:
            if not isinstance(node, ir.Text):
                break
            prefix += node.text
        return prefix


@dataclass(frozen=True)
class Explanation:
    """A dry run's result. `requests`: round trips to an executor of programs; `stopped`: why it could not finish."""

    nodes: list[tuple[str, ir.Node]]
    requests: int
    text: str
    stopped: str | None = None
    timeline: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """For `sgl.lang.view`."""

    def __str__(self) -> str:
        lines = [f"{path:>8}  {_shown(node)}" for path, node in self.nodes]
        return "\n".join([*lines, self._count])

    def __rich__(self) -> Any:
        from sgl.lang.view.nodes import table

        return table(self.nodes, self._count)

    def _repr_html_(self) -> str:
        from sgl.lang.view.nodes import html_table

        return html_table(self.nodes, self._count, self.timeline)

    @property
    def _count(self) -> str:
        count = f"{self.requests} request" + ("s" if self.requests != 1 else "")
        return f"at least {count}; with made-up values the body stopped: {self.stopped}" if self.stopped else count


class Preview(str):
    """A prompt with made-up values, which rich and notebooks show in colours."""

    timeline: Mapping[str, Any]

    @classmethod
    def of(cls, explained: Explanation) -> Preview:
        """The prompt of a dry run."""
        preview = cls(explained.text)
        preview.timeline = explained.timeline
        return preview

    def __rich__(self) -> Any:
        from sgl.lang.view.terminal import text

        return text(self.timeline)

    def _repr_html_(self) -> str:
        from sgl.lang.view.html import notebook

        return notebook(self.timeline)


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
    except Exception as error:  # a program may raise anything, and the trace shows it
        stopped = f"{type(error).__name__}: {error}"
    root = state.root
    nodes = [(path, node) for path, _, node in walk(root)]
    return Explanation(nodes, dry.segments, root.partial_text(), stopped, state.timeline())


def walk(stream: Stream) -> Iterator[tuple[str, Stream, ir.Node]]:
    """(path, stream, node) of a stream, and of branches after their fork."""
    children = {child.id: child for child in stream.children}
    for index, node in enumerate(stream.nodes):
        yield ir.node_path(stream.path, index), stream, node
        if isinstance(node, ir.Fork):
            for child in node.children:
                yield from walk(children[child])


def _shown(node: ir.Node) -> str:
    data = to_json(node)
    return " ".join([data.pop("op"), *(f"{key}={value!r}" for key, value in data.items())])
