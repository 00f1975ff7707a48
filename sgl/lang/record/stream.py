"""The client's mirror of a stream: its nodes, answers, variables and failure.

`Run` sends what it records and delivers answers; `ProgramState` and its async twin are facades. Methods that wait are
generators of what to wait for (see `sgl.lang.aio.drive`)."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, Protocol

from sgl.errors import nearest_name
from sgl.lang.aio import Wait, Watched
from sgl.lang.ir import nodes as ir
from sgl.lang.record.cell import Cell, Chunk, Failure, Lazy, Part, cells_of, gathered, has_news, text_of
from sgl.lang.record.messages import messages_of
from sgl.lang.record.place import Place, here, misuse


class _Recorder(Protocol):
    """The part of `Run` used here."""

    program: ir.Program
    is_over: bool

    def add_stream(self, stream: Stream) -> int: ...
    def record(self, stream: int, node: ir.Node) -> None: ...
    def flush(self, cell: Cell | None = None) -> None: ...


class Stream(Watched):
    """`parts[i]` is the text of `nodes[i]`, recorded at `places[i]`; before them come `base_length` nodes of `base`."""

    def __init__(self, run: _Recorder, base: Stream | None, path: str) -> None:
        super().__init__()
        self.run = run
        self.base = base
        self.base_length = len(base.nodes) if base else 0
        self.path = path
        self.nodes: list[ir.Node] = []
        self.parts: list[Part] = []
        self.places: list[Place | None] = []
        self._place: Place | None = None  # of the current recording
        self.names: dict[str | None, Any] = dict(base.names) if base else {}
        self.own_names: dict[str | None, None] = {}  # set since the fork, in order
        self.role: str | None = base.role if base else None
        self.failure: Failure | None = None
        self.is_closed = False
        self.joined_by: tuple[Stream, int] | None = None
        self.children: list[Stream] = []
        self._open_scopes: list[int] = []
        self._tool_gens: list[int] = []
        self.id = run.add_stream(self)

    # Recording

    def append(self, item: object, place: Place | None = None) -> None:
        """Record text, an expression or a list of them at `place`, by default the caller's."""
        self._place = here() if place is None else place
        self._append(item)

    def _append(self, item: object) -> None:
        if isinstance(item, str):
            self._record(ir.Text(item), item)
        elif isinstance(item, ir.Exprs):
            for node in item.items:
                self._append(node)
        elif isinstance(item, ir.Node):
            self._append_node(item)
        elif isinstance(item, list):
            for part in item:
                self._append(part)
        else:
            raise misuse(f"only text and expressions can be appended, not {type(item).__name__}")

    def _append_node(self, node: ir.Node) -> None:
        kind = type(node)
        if kind is ir.Gen or kind is ir.Select:
            self._append_gen(node)  # type: ignore[arg-type]
        elif kind is ir.Text:
            self._record(node, node.text)  # type: ignore[attr-defined]
        elif isinstance(node, ir.RoleBegin | ir.RoleEnd):
            if problem := ir.turn_problem(node.op, node.role, self.role):
                raise misuse(problem)
            self._record(node, Cell())
            self.role = node.role if isinstance(node, ir.RoleBegin) else None
            while self._tool_gens and self.role is None:
                self._record(ir.ToolResults(self._tool_gens.pop(0)), Cell())
        elif isinstance(node, ir.ScopeBegin):
            self._open_scopes.append(self._record(node, ""))
        elif isinstance(node, ir.ScopeEnd):
            self._end_scope(node)
        elif isinstance(node, ir.Arg):
            self._record(node, self.run.program.args[node.name])
        else:
            self._record(node, Cell() if isinstance(node, ir.ANSWERED) else "")

    def _append_gen(self, node: ir.Gen | ir.Select) -> None:
        cell = Cell((self.id, len(self.nodes)))
        index = self._record(node, cell)
        self._name(node.name, cell)
        if isinstance(node, ir.Gen):
            if node.reasoning is not None:
                name = f"{node.name}{ir.REASONING_SUFFIX}"
                self._name(name, Lazy((cell,), lambda: cell.meta.get("reasoning_content", ""), source=cell))
            if node.tools:
                if self.role is None:
                    self._record(ir.ToolResults(index), Cell())
                else:
                    self._tool_gens.append(index)  # results follow the turn
        self.wake()

    def _end_scope(self, node: ir.ScopeEnd) -> None:
        start = self._open_scopes.pop()
        parts = self.parts[start:]
        index = self._record(node, "")
        self._name(node.name, Lazy(cells_of(parts), lambda: text_of(parts), address=(self.id, index)))
        self.wake()

    def set(self, name: str, value: Any) -> None:
        """Set a variable to a Python value; recorded only while the stream is open."""
        if isinstance(value, str) and not (self.run.is_over or self.is_closed):
            self._place = here()
            self._record(ir.SetVar(name, value), "")
        self._name(name, value)
        self.wake()

    def _name(self, name: str | None, value: Any) -> None:
        self.names[name] = value
        self.own_names[name] = None

    def fork(self, size: int) -> list[Stream]:
        """Start `size` streams from here."""
        self._check_open()
        self._place = here()
        index = len(self.nodes)
        branches = [Stream(self.run, self, ir.branch_path(self.path, index, i)) for i in range(size)]
        for branch in branches:
            branch.base_length = index
        self._record(ir.Fork(tuple(branch.id for branch in branches)), "")
        self.children += branches
        return branches

    def join(self, branches: Sequence[Stream], mode: Literal["gather", "append", "absorb"]) -> None:
        """Close the branches. "gather": their variables become lists, in branch order, None where unset; the last round
        wins. "append": append their text. "absorb": take their variables as they are."""
        if any(branch.is_closed for branch in branches):
            raise misuse("these branches were joined already")
        self._place = here()
        parts = [part for branch in branches for part in branch.parts]
        node = ir.Join(tuple(branch.id for branch in branches), mode)
        # what follows waits for the branches
        self._record(node, Lazy(cells_of(parts), lambda: text_of(parts) if mode == "append" else ""))
        for branch in branches:
            branch.is_closed = True
            branch.joined_by = (self, len(self.nodes) - 1)
        if mode == "gather":
            for name in dict.fromkeys(name for branch in branches for name in branch.own_names):
                self._name(name, gathered([branch.names.get(name) for branch in branches]))
        elif mode == "absorb":
            for branch in branches:
                for name in branch.own_names:
                    self._name(name, branch.names[name])
        failure = next((branch.failure for branch in branches if branch.failure), None)
        if failure:
            self.fail(len(self.nodes) - 1, failure)
        self.wake()

    def tool_cells(self, gen: int) -> list[Cell]:
        """Pending results of a gen's tool calls."""
        parts = zip(self.nodes, self.parts, strict=False)
        return [
            part
            for node, part in parts
            if isinstance(node, ir.ToolResults) and node.index == gen and isinstance(part, Cell)
        ]

    def cells(self) -> list[Cell]:
        """Answers to this stream's nodes."""
        return [part for part in self.parts if isinstance(part, Cell)]

    def _record(self, node: ir.Node, part: Part) -> int:
        if self.failure or self.is_closed or self.run.is_over:
            self._check_open()
        index = len(self.nodes)
        self.nodes.append(node)
        self.parts.append(part)
        self.places.append(self._place)
        self.run.record(self.id, node)
        if self._wakers:
            self.wake()
        return index

    def _check_open(self) -> None:
        if self.failure:
            raise self.failure.exception()
        if self.is_closed:
            raise misuse("nothing can be appended to a branch that was joined")
        if self.run.is_over:
            raise misuse("nothing can be appended: the program has ended")

    # Answers

    def fail(self, index: int, failure: Failure) -> None:
        """Fail nodes from `index` on, later forks, and the stream that joined this one."""
        if self.failure:
            return
        self.failure = failure
        if self.joined_by:  # before waking cells' waiters, who may ask the parent
            parent, at = self.joined_by
            parent.fail(at, failure)
        for child in self.children:
            if child.base_length >= index:
                child.fail(0, failure)
        for part in self.parts[index:]:
            if isinstance(part, Cell):
                part.fail(failure)
        self.wake()

    def describe(self, index: int) -> tuple[str, str | None]:
        """A node's description for messages, and its variable."""
        node = self.nodes[index]
        name = getattr(node, "name", None)
        before = len(text_of([part for _, part in self.chain(index)]))
        where = f"node {ir.node_path(self.path, index)}, after {before} characters"
        return f"{node.op} {name!r} ({where})" if name else f"{node.op} ({where})", name

    # Reading

    def ready(self, cells: Iterable[Cell]) -> Generator[Wait, None, None]:
        """Send what is recorded if needed, and wait for the cells. Raises the first failure."""
        for cell in cells:
            if not cell.done:
                self.run.flush(cell)
                yield cell, cell.is_done
            if cell.failure:
                raise cell.failure.exception()

    def value(self, variable: Any) -> Generator[Wait, None, Any]:
        """The value behind a name."""
        if not isinstance(variable, Cell | Lazy):
            return variable
        yield from self.ready(variable.cells)
        return variable.get()

    def named(self, name: str | None) -> Generator[Wait, None, None]:
        """Wait until a body elsewhere sets the variable or ends."""
        if name not in self.names:
            yield self, lambda: name in self.names or self.run.is_over or self.failure is not None

    def variable(self, name: str | None) -> Any:
        """What a name stands for. Raises ProgramError if unset."""
        if name in self.names:
            return self.names[name]
        if self.failure:
            raise self.failure.exception()
        hint = nearest_name(str(name), [known for known in self.names if known])
        raise misuse(f"the program never set a variable {name!r}{hint}", variable=name)

    def text(self) -> Generator[Wait, None, str]:
        """All text so far."""
        parts = self.chain_parts()
        yield from self.ready(cells_of(parts))
        if self.failure:
            raise self.failure.exception()
        return text_of(parts)

    def settle(self) -> Generator[Wait, None, Failure | None]:
        """Wait until everything recorded is done or failed; raises nothing."""
        for cell in cells_of(self.chain_parts()):
            if not cell.done:
                self.run.flush(cell)
                yield cell, cell.is_done
        return self.failure

    def partial_text(self) -> str:
        """The text known now; never waits."""
        return text_of(self.chain_parts())

    def shown(self) -> str:
        """The text now, with marks for pending and failed nodes."""
        return "".join([_shown(node, part) for node, part in self.chain()])

    def messages(self) -> Generator[Wait, None, list[dict[str, Any]]]:
        """The closed turns; see `messages_of`."""
        yield from self.text()
        return messages_of(self.chain())

    def chunks(self, name: str | None, *, to_the_end: bool) -> Iterator[Chunk | Wait]:
        """New text of a variable or the whole stream. `to_the_end`: also wait for a body elsewhere."""
        if name is not None:
            if to_the_end:
                yield from self.named(name)
            yield from self._variable_chunks(name, self.variable(name))
            return
        position = 0
        while True:
            parts = self.chain_parts()
            for part in parts[position:]:
                yield from self._part_chunks(part, is_own=not to_the_end)
            position = len(parts)
            if not to_the_end or self.run.is_over or self.is_closed or self.failure:
                if self._chain_length() == position:
                    break
            else:
                yield self, partial(self._has_more, position)
        if self.failure:
            raise self.failure.exception()

    def _has_more(self, position: int) -> bool:
        return self._chain_length() > position or self.run.is_over or self.is_closed or self.failure is not None

    def _variable_chunks(self, name: str, variable: Any) -> Iterator[Chunk | Wait]:
        """New text of a variable; a join's list comes branch by branch."""
        if isinstance(variable, Lazy) and variable.items is not None:
            for item in variable.items:
                yield from self._variable_chunks(name, item)
        elif isinstance(variable, str | Cell | Lazy):
            yield from self._part_chunks(variable, name.endswith(ir.REASONING_SUFFIX))
        elif variable is not None:  # None: unset in that branch
            raise misuse(f"{name!r} is {variable!r}, which has no text to iterate over", variable=name)

    def _part_chunks(
        self, part: Part, is_reasoning: bool = False, *, is_own: bool = True
    ) -> Iterator[Chunk | Wait]:
        """is_own: nobody else goes on recording meanwhile."""
        source = part.source if isinstance(part, Lazy) else part
        if not isinstance(source, Cell):
            if isinstance(part, Lazy):
                yield from self.ready(part.cells)
            if text := text_of((part,)):
                yield Chunk(text, {})
            return
        sent = 0
        while True:
            is_done = source.done  # read first: the last chunks precede it
            new = source.chunks[sent:]
            sent += len(new)
            yield from [chunk for chunk in new if chunk.is_reasoning is is_reasoning]
            if is_done:
                break
            self.run.flush(source if is_own else None)
            yield source, partial(has_news, source, sent)
        yield from self.ready((source,))
        whole = source.meta.get("reasoning_content", "") if is_reasoning else source.text
        if not source.chunks and whole:
            yield Chunk(whole, source.meta)

    # The chain of base streams

    def chain_parts(self) -> list[Part]:
        """Parts of the whole text, bases included."""
        return [part for _, part in self.chain()]

    def chain(self, length: int | None = None) -> list[tuple[ir.Node, Part]]:
        """Nodes and parts of the whole text, bases included; the first `length` of its own."""
        own = list(zip(self.nodes[:length], self.parts[:length], strict=False))
        return [*self.base.chain(self.base_length), *own] if self.base else own

    def _chain_length(self) -> int:
        length = len(self.parts)
        stream = self
        while stream.base:
            length, stream = length + stream.base_length, stream.base
        return length


def _shown(node: ir.Node, part: Part) -> str:
    text = text_of((part,))
    if not isinstance(part, Cell) or (part.done and not part.failure):
        return text
    text = "".join([chunk.text for chunk in part.chunks if not chunk.is_reasoning])
    if isinstance(node, ir.RoleBegin | ir.RoleEnd):
        return text
    return f"{text}[{getattr(node, 'name', None) or node.op}: {'failed' if part.failure else 'pending'}]"
