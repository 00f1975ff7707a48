"""What nodes mean, for every executor.

One generator per stream executes its nodes in order and yields where it must wait. `Interpreter` makes the generators,
`Turns` resumes them. Gens, selects and media are left to subclasses: `sgl.lang.backends.steps` (single calls) and
`sgl.runtime.program` (an engine)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeAlias, TypeVar

from sgl.errors import BackendError, InvalidRequest, ProgramError, QueueFull, SglError
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import ChatTemplate
from sgl.lang.ir.pool import Pool
from sgl.lang.ir.reasoning import ReasoningSplitter
from sgl.lang.ir.turns import begin_of

T = TypeVar("T")
S = TypeVar("S", bound="Stream")
Piece: TypeAlias = tuple[str, bool]  # text, and whether a chat template wrote it
Steps: TypeAlias = Generator[None, None, T]
"""A stream's work; yields to wait and checks again when resumed."""


class StreamFailedError(Exception):
    """The stream cannot go on; its cause has been reported."""


class Stream:
    """A text under execution. A branch copies its parent's state."""

    def __init__(self, stream_id: int, path: str, parent: Stream | None = None) -> None:
        self.id = stream_id
        self.path = path
        self.parent = parent
        self.queue: deque[ir.Node] = deque()
        self.steps: Steps[None] | None = None
        self.is_ready = False  # to be resumed
        self.is_closed = False  # joined: gets no more nodes
        self.is_drained = False  # nothing left to do
        self.is_failed = False
        self.position = 0
        self.written: list[Piece] = []  # since the fork
        self.num_written = 0  # characters in it
        self.scopes: list[tuple[int, int]] = []  # open scopes: index in `written`, and characters before
        self.roles: tuple[str, ...] = () if parent is None else parent.roles  # of closed turns
        self.role: str | None = None if parent is None else parent.role  # of the open turn
        self.thought = ""  # what the next gen begins with, and leaves out of the text

    def append(self, text: str, *, is_template: bool = False) -> None:
        """Add text."""
        if text:
            self.written.append((text, is_template))
            self.num_written += len(text)

    def text_since(self, start: int) -> str:
        """Text from entry `start` of `written` on."""
        return "".join(text for text, _ in self.written[start:])

    def splitter(self, format: str) -> ReasoningSplitter:
        """Tells the next gen's reasoning from its answer."""
        return ReasoningSplitter(format, is_inside=bool(self.thought) or None)

    def begin_turn(self, role: str) -> None:
        """Open a turn."""
        self.role = role

    def end_turn(self) -> dict[str, Any]:
        """Close the turn; returns it as a message."""
        message, self.role = {"role": self.role}, None
        return message

    def add_turn(self, message: dict[str, Any]) -> None:
        """Add a closed turn."""
        self.roles += (message["role"],)


class Turns(Generic[S]):
    """Schedules a program's streams."""

    def __init__(self, sink: ir.Sink) -> None:
        self.is_final = False  # the client sends no more
        self._sink = sink
        self._is_over = False
        self._ready: deque[S] = deque()
        self._undrained: set[S] = set()

    def emit(self, event: ir.Event) -> None:
        """Send an event to the client."""
        if not self._is_over:
            self._sink(event)

    def add(self, stream: S, steps: Steps[None]) -> None:
        """Schedule a stream's work."""
        self._undrained.add(stream)
        stream.steps = steps
        self.wake(stream)

    def wake(self, stream: S) -> None:
        """Resume a stream this turn, so that it checks what it waits for."""
        if not stream.is_ready and stream in self._undrained:
            stream.is_ready = True
            self._ready.append(stream)

    def _resume(self, stream: S) -> None:
        assert stream.steps is not None, "it has been added"
        stream.is_ready = False
        try:
            next(stream.steps)
            return
        except StopIteration:
            pass
        except StreamFailedError:
            stream.is_failed = True
        except Exception as error:  # told as the node's; other streams go on
            stream.is_failed = True
            self.emit(ir.NodeFailed(stream.id, stream.position, self._known(error)))
        self._drained(stream)

    def _drained(self, stream: S) -> None:
        """The stream has nothing left to do."""
        stream.is_drained = True
        self._undrained.discard(stream)
        if stream.parent is not None:
            self.wake(stream.parent)  # type: ignore[arg-type]  # it is of the same class

    def _known(self, error: Exception) -> SglError:
        """The error as one of ours."""
        return as_known(error)


def as_known(error: Exception) -> SglError:
    """The error as one of ours; other classes become a BackendError."""
    if isinstance(error, SglError):
        return error
    wrapped = BackendError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


class Quota:
    """One program's memory. Charged before it is allocated: nested scopes and refs could ask for any amount."""

    def __init__(self, together: SharedQuota | None = None, tenant: str | None = None) -> None:
        """`together`: the executor's total; `tenant`: the name charged there."""
        self._counts = {"characters": 0, "copied characters": 0, "tokens": 0}
        self._together = together
        self._tenant = tenant

    def charge(self, number: int, what: str = "characters") -> None:
        """Charge, unless it raises: InvalidRequest beyond the program's limit, QueueFull beyond the executor's."""
        total = self._counts[what] + number
        if total > _MOST[what]:
            message = f"{number} more {what} make {total} in this program, and the limit is {_MOST[what]}"
            raise InvalidRequest(message, param=what)
        if self._together is not None:
            self._together.charge(number, what, self._tenant)
        self._counts[what] = total

    def release(self) -> None:
        """Release everything. Idempotent."""
        together, self._together = self._together, None
        if together is not None:
            for what, number in self._counts.items():
                together.charge(-number, what, self._tenant)


class SharedQuota:
    """Memory of all programs of one executor; single-threaded."""

    def __init__(self) -> None:
        self._pools = {what: Pool() for what in _MOST_TOGETHER}

    def charge(self, number: int, what: str, tenant: str | None = None) -> None:
        """Charge or, below 0, release. Raises QueueFull and charges nothing if there is no room."""
        limit = _MOST_TOGETHER.get(what)
        if limit is None:
            return
        pool = self._pools[what]
        if number > 0 and number > pool.room(limit, tenant):
            held = f"the programs that are open hold {limit} {what} together"
            if tenant is not None:
                held = f"the programs of this key hold {pool.of(tenant)} {what} and may have as many as they leave free"
            raise QueueFull(f"{held}: there is no room for {number} more; try again later", limit=limit)
        pool.take(number, tenant)


_MOST = {
    "characters": ir.MAX_HELD_CHARACTERS,
    "copied characters": ir.MAX_COPIED_CHARACTERS,
    "tokens": ir.MAX_HELD_TOKENS,
}
_MOST_TOGETHER = {"characters": ir.MAX_CHARACTERS_TOGETHER, "tokens": ir.MAX_TOKENS_TOGETHER}
_ENTRY = 8  # characters that a list's entry counts


class Interpreter(ABC, Generic[S]):
    """Executes one program's checked segments and emits the events of `ir`."""

    def __init__(
        self, program: ir.Program, template: ChatTemplate | None, turns: Turns[S], quota: Quota | None = None
    ) -> None:
        self._program = program
        self._quota = quota or Quota()
        self._template = template
        self._turns = turns
        self._streams: dict[int, S] = {}
        self._early: dict[int, deque[ir.Node]] = {}  # nodes of streams not forked yet
        self._values: dict[tuple[int, int], str] = {}  # texts that refs may read
        self._awaited: dict[int, dict[int, list[S]]] = {}  # streams waiting for nodes, by the nodes' stream
        self._answers: dict[tuple[int, int], tuple[ir.Turn, ...]] = {}  # to tool_results

    @abstractmethod
    def _new_stream(self, stream_id: int, path: str, parent: S | None) -> S:
        """A stream of this executor's kind."""

    @abstractmethod
    def _gen(self, stream: S, node: ir.Gen) -> Steps[None]: ...

    @abstractmethod
    def _select(self, stream: S, node: ir.Select) -> Steps[None]: ...

    @abstractmethod
    def _media(self, stream: S, node: ir.Media) -> Steps[None]: ...

    def _receive(self, segment: ir.Segment) -> None:
        if not self._streams:
            self._add(self._new_stream(0, "", None))
        for stream_id, node in segment.nodes:
            stream = self._streams.get(stream_id)
            if stream is None:
                self._early.setdefault(stream_id, deque()).append(node)
            else:
                stream.queue.append(node)
                self._turns.wake(stream)
                if stream.is_failed:
                    self._fail_dependents(stream)
        for stream_id, index, turns in segment.answers:
            self._answers[stream_id, index] = turns
            if stream_id in self._streams:
                self._turns.wake(self._streams[stream_id])
        if segment.final:
            self._turns.is_final = True
            for stream in self._streams.values():
                self._turns.wake(stream)

    def _add(self, stream: S) -> None:
        self._streams[stream.id] = stream
        stream.queue.extend(self._early.pop(stream.id, ()))
        self._turns.add(stream, self._steps(stream))

    def _steps(self, stream: S) -> Steps[None]:
        """Execute nodes until the stream is closed or the program ends."""
        try:
            while True:
                while stream.queue:
                    yield from self._execute(stream, stream.queue.popleft())
                    stream.position += 1
                if stream.is_closed or self._turns.is_final:
                    return
                yield
        except Exception:  # of any class: raised again, once those who wait for it know
            stream.is_failed = True
            self._fail_dependents(stream)
            raise

    def _fail_dependents(self, stream: S) -> None:
        """Wake streams that wait for a failed one, and fail the branches it would have forked."""
        failing = [stream]
        while failing:
            failed = failing.pop()
            for waiting in self._awaited.pop(failed.id, {}).values():
                for other in waiting:
                    self._turns.wake(other)
            while failed.queue:
                node = failed.queue.popleft()
                for child in node.children if isinstance(node, ir.Fork) else ():
                    branch = self._streams[child] = self._new_stream(child, "", None)
                    branch.is_failed = branch.is_drained = True
                    branch.queue = self._early.pop(child, branch.queue)
                    failing.append(branch)

    def _execute(self, stream: S, node: ir.Node) -> Steps[None]:
        match node:
            case ir.Text():
                self._append(stream, node.text)
            case ir.Arg():
                self._append(stream, self._program.args[node.name])
            case ir.Gen():
                yield from self._gen(stream, node)
            case ir.Select():
                yield from self._select(stream, node)
            case ir.RoleBegin():
                self._role_begin(stream, node.role)
            case ir.RoleEnd():
                self._role_end(stream, node.role)
            case ir.Media():
                yield from self._media(stream, node)
            case ir.Ref():
                yield from self._ref(stream, node)
            case ir.ScopeBegin():
                stream.scopes.append((len(stream.written), stream.num_written))
            case ir.ScopeEnd():
                start, before = stream.scopes.pop()
                self._quota.charge(stream.num_written - before + _ENTRY * (len(stream.written) - start))
                self._set_value(stream, stream.text_since(start))
            case ir.SetVar():
                pass
            case ir.Fork():
                # In an engine, branches share the parent's tokens and KV pages: see runtime/program/stream.py.
                self._quota.charge(len(node.children) * len(stream.path))
                self._quota.charge(len(node.children) * self._copied_by_branch(stream), "copied characters")
                for i, child in enumerate(node.children):
                    path = ir.branch_path(stream.path, stream.position, i)
                    self._add(self._new_stream(child, path, stream))
            case ir.Join():
                yield from self._join(stream, node)
            case ir.ToolResults():
                yield from self._tool_results(stream)
            case _:
                raise AssertionError(f"{node!r} was checked on arrival")

    def _params_and_seeds(self, stream: S, node: ir.Gen) -> tuple[dict[str, Any], list[int]]:
        """See `nodes.params_and_seeds`."""
        stops = self._template.stops if self._template is not None and stream.role is not None else ()
        return ir.params_and_seeds(self._program, node, ir.node_path(stream.path, stream.position), stops)

    def _append(self, stream: S, text: str, *, is_template: bool = False) -> None:
        """Add text. Raises InvalidRequest beyond the program's limit."""
        self._quota.charge(len(text))
        stream.append(text, is_template=is_template)

    def _copied_by_branch(self, stream: S) -> int:
        """Characters that a branch copies."""
        return _ENTRY * len(stream.roles)

    def _emitter(self, stream: S, node: ir.Gen) -> Callable[[str, dict[str, Any]], None]:
        """A callback that emits deltas for pieces of a gen's text and meta info."""
        splitter = stream.splitter(node.reasoning) if node.reasoning is not None else None

        def emit(piece: str, meta: dict[str, Any]) -> None:
            reasoning, answer = splitter.feed(piece) if splitter is not None else ("", piece)
            if reasoning:
                self._turns.emit(ir.Delta(stream.id, stream.position, reasoning, meta, reasoning=True))
            says_more = meta.get("finish_reason") or any(key.endswith("logprobs") for key in meta)
            if answer or (says_more and not reasoning):  # keep meta info without text
                self._turns.emit(ir.Delta(stream.id, stream.position, answer, meta))

        return emit

    def _outcome(
        self, stream: S, node: ir.Gen, texts: list[str], metas: list[dict[str, Any]]
    ) -> tuple[Any, dict[str, Any]]:
        """The gen's value (a text without reasoning, or several) and meta info."""
        meta = dict(metas[0]) if len(metas) == 1 else {"samples": metas, **metas[0]}
        if node.reasoning is not None:
            split = [stream.splitter(node.reasoning).feed(text, final=True) for text in texts]
            texts, meta["reasoning_content"] = [answer for _, answer in split], split[0][0]
        return texts[0] if len(texts) == 1 else texts, meta

    def _done(self, stream: S, text: str, value: str | list[str], meta: dict[str, Any]) -> None:
        """Keep the node's text and emit NodeDone."""
        self._quota.charge(len(text))
        stream.thought = ""
        self._set_value(stream, text)
        self._turns.emit(ir.NodeDone(stream.id, stream.position, text, value, meta))

    def _write(
        self, stream: S, text: str, meta: dict[str, Any] | None = None, *, is_template: bool = False
    ) -> None:
        """Append the node's whole text."""
        self._append(stream, text, is_template=is_template)
        self._done(stream, text, text, meta or {})

    def _set_value(self, stream: S, text: str) -> None:
        key = (stream.id, stream.position)
        self._values[key] = text
        for waiting in self._awaited.get(stream.id, {}).pop(stream.position, ()):
            self._turns.wake(waiting)

    def _role_begin(self, stream: S, role: str) -> None:
        if self._template is None:
            raise InvalidRequest("roles need a chat template and there is none: pass chat_template=")
        begin, thought = begin_of(self._template, stream.roles, role, stream.queue, self._program.args)
        if begin.system is not None:
            stream.add_turn({"role": "system", "content": begin.system})
        self._write(stream, begin.text, {} if begin.system is None else {"system": begin.system}, is_template=True)
        stream.begin_turn(role)
        stream.thought = thought

    def _role_end(self, stream: S, role: str) -> None:
        assert self._template is not None, "a turn is open"
        message = stream.end_turn()
        self._write(stream, self._template.end(stream.roles, role), is_template=True)
        stream.add_turn(message)

    def _ref(self, stream: S, node: ir.Ref) -> Steps[None]:
        key = (node.stream, node.index)
        while key not in self._values:
            target = self._streams.get(node.stream)
            if target is not None and target.is_failed:
                raise ProgramError("the node it refers to failed")
            self._awaited.setdefault(node.stream, {}).setdefault(node.index, []).append(stream)
            yield
        text = self._values[key]
        self._quota.charge(len(text) * len(node.functions), "copied characters")
        self._write(stream, ir.apply_functions(text, node.functions))

    def _join(self, stream: S, node: ir.Join) -> Steps[None]:
        children = [self._streams[child] for child in node.children]
        for child in children:
            child.is_closed = True
            self._turns.wake(child)
        for child in children:  # one by one: checking all each time would be quadratic
            while not child.is_drained:
                yield
        if any(child.is_failed for child in children):
            raise StreamFailedError
        if node.mode == "append":
            self._quota.charge(sum(child.num_written for child in children))
            for text, is_template in [piece for child in children for piece in child.written]:
                stream.append(text, is_template=is_template)

    def _tool_results(self, stream: S) -> Steps[None]:
        key = (stream.id, stream.position)
        self._turns.emit(ir.Need(*key))
        while key not in self._answers:
            yield
        start = len(stream.written)
        messages = []
        for turn in self._answers.pop(key):
            if turn.role is None or self._template is None:
                self._append(stream, turn.content)
                continue
            self._append(stream, self._template.begin(stream.roles, turn.role).text, is_template=True)
            self._append(stream, turn.content)
            self._append(stream, self._template.end(stream.roles, turn.role), is_template=True)
            message = {"role": turn.role, "content": turn.content, "name": turn.name, "tool_call_id": turn.call_id}
            messages.append({name: value for name, value in message.items() if value is not None})
            stream.add_turn(messages[-1])
        text = stream.text_since(start)
        self._done(stream, text, text, {"messages": messages})
