"""A program's run on the client: sends recorded nodes and delivers the backend's answers.

Nodes are sent as one segment when Python reads a value, the body ends, the segment grows long, or the body is busy
elsewhere. Executing bodies is `sgl.lang.record.function`'s part."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any

from sgl.errors import BackendError, RequestAborted, RequestTimeout
from sgl.lang.aio import Watched, io
from sgl.lang.backends.base import Backend, Session
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.interpreter import as_known
from sgl.lang.ir.turns import first_of
from sgl.lang.record.cell import Cell, Failure
from sgl.lang.record.open_runs import Group, current_group, everything
from sgl.lang.record.place import Place, add_place, misuse
from sgl.lang.record.stream import Stream
from sgl.lang.typed import tools

logger = logging.getLogger(__name__)

MAX_NODES = 10_000  # ends loops that never read a value
MAX_STREAMS = 4_097
SEGMENT_NODES = 2_000  # sends longer segments early
_ENDING_SECONDS = 0.5  # at exit, for what is answered
IDLE_S = 0.1  # sends nodes of a body busy elsewhere

current_run: ContextVar[Run | None] = ContextVar("current_run", default=None)
_reserved_seed: ContextVar[tuple[Run, int] | None] = ContextVar("reserved_seed", default=None)


class Run(Watched):
    """One execution of one program. `requests` counts calls to the backend."""

    def __init__(self, program: ir.Program, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.program = program
        self.is_over = False  # the body has ended
        self.is_done = False  # finished or failed
        self.failure: Failure | None = None
        self._handled: list[Failure] = []  # branch failures that the body survived
        self.user_loop: asyncio.AbstractEventLoop | None = None
        self._on_done: deque[Callable[[], object]] = deque()
        self.segments = 0
        self.nested = 0
        self._session: Session | None = None
        self._calls: int | None = None  # of a finished session of single calls
        self._streams: list[Stream] = []
        self._unsent: deque[tuple[int, ir.Node]] = deque()
        self._begun: dict[int, list[ir.Node]] = {}
        """By stream: an assistant's turn of which nothing tells yet how it begins, held back until something does."""
        self._num_nodes = 0
        self._lock = threading.Lock()
        self._deadline: asyncio.TimerHandle | None = None
        self._tool_tasks: set[asyncio.Task[None]] = set()
        self._group = current_group.get()
        self._inner = Group(self._group)  # programs that the body calls
        self.root = Stream(self, None, "")
        self._group.add(self)

    @property
    def requests(self) -> int:
        """Round trips so far: segments, or single calls."""
        calls: int | None = getattr(self._session, "requests", self._calls)
        return self.segments if calls is None else calls

    # Called by streams

    def add_stream(self, stream: Stream) -> int:
        """Add a stream; returns its number."""
        with self._lock:
            if len(self._streams) >= MAX_STREAMS:
                raise misuse(f"a program can have at most {MAX_STREAMS - 1} forked branches")
            self._streams.append(stream)
            return len(self._streams) - 1

    def record(self, stream: int, node: ir.Node) -> None:
        """Add a stream's node."""
        with self._lock:
            nodes = [*self._begun.pop(stream, ()), node]
            for branch in node.children if isinstance(node, ir.Join) else ():
                self._unsent.extend((branch, each) for each in self._begun.pop(branch, ()))
            if _is_open(nodes) and first_of(nodes[1:], self.program.args) is None:
                self._begun[stream] = nodes
            else:
                self._unsent.extend((stream, each) for each in nodes)
        self._num_nodes += 1
        if 0 < len(self._unsent) <= len(nodes):
            idle_watch.add(self)
        elif len(self._unsent) >= SEGMENT_NODES:
            self.flush()
        if self._num_nodes > MAX_NODES:
            raise misuse(f"a program can have at most {MAX_NODES} nodes; does a loop never end?")

    def flush(self, cell: Cell | None = None, *, final: bool = False) -> None:
        """Send what is recorded, also a begun turn if its cell is waited for. Any thread; never blocks."""
        is_whole = final or (cell is not None and self._holds(cell))
        if not self._unsent and not is_whole:
            return
        with self._lock:  # segments keep the nodes' order
            while is_whole and self._begun:
                stream, held = self._begun.popitem()
                self._unsent.extend((stream, node) for node in held)
            nodes = []
            while self._unsent:
                nodes.append(self._unsent.popleft())
            if nodes or final:
                self.segments += 1
                io.post(self._send, ir.Segment(tuple(nodes), final=final))

    def _holds(self, cell: Cell) -> bool:
        return any(cell is self._streams[stream].parts[-len(held)] for stream, held in list(self._begun.items()))

    def cells(self) -> Iterator[Cell]:
        """All streams' answers, pending ones included."""
        for stream in list(self._streams):
            yield from stream.cells()

    def stream(self, index: int) -> Stream:
        """The stream of that number."""
        return self._streams[index]

    def failed(self) -> Failure | None:
        """The failure of the run, or of a branch that the body has not looked at."""
        if self.root.failure or not self.is_over:
            return self.root.failure
        failures = [stream.failure for stream in list(self._streams)]
        return next((failure for failure in failures if failure and failure not in self._handled), None)

    # The body's life

    @contextmanager
    def body(self) -> Iterator[None]:
        """Execute the body inside; programs that it calls join this run. If it raises, so do reads, and work ends."""
        token, group_token = current_run.set(self), current_group.set(self._inner)
        try:
            yield
        except BaseException as error:
            self.body_ended(error)
            raise
        finally:
            current_run.reset(token)
            current_group.reset(group_token)
        self.body_ended()

    def body_ended(self, error: BaseException | None = None) -> None:
        """Send the rest; or give up, if the body raised `error`."""
        if error is not None:
            self.is_over = True
            add_place(error)
            self.fail(error, is_body=True)
            self._inner.cancel()
            return
        failures = [stream.failure for stream in self._streams]
        self._handled = [failure for failure in failures if failure is not None and failure.is_seen]
        self.is_over = True
        self.flush(final=True)
        self._wake_all()

    def cancel(self) -> None:
        """Give up the run, also on the backend. Reads raise; `error()` is `RequestAborted`."""
        self.fail(RequestAborted("the program was cancelled"))
        self._inner.cancel()

    def drop(self) -> None:
        """Give up a run without states. Takes no lock: any thread may be interrupted here."""
        io.post(self._drop)

    def _drop(self) -> None:
        if not self.is_answered:
            self.fail(RequestAborted("the program was given up: nobody holds its state any more"))

    @property
    def is_answered(self) -> bool:
        """Whether the backend has nothing left to compute, even if unconfirmed."""
        return self.is_done or (self.is_over and all(cell.done for cell in self.cells()))

    def detach(self) -> None:
        """In a forked child: the session is the parent's."""
        self.is_done = True
        self._session = self._deadline = None

    def forsake(self) -> None:
        """In a forked child: fail the parent's run, which continues there."""
        self._on_done.clear()
        self._unsent.clear()
        self._begun.clear()
        self._lock = threading.Lock()
        self.forget_waiters()
        for stream in self._streams:
            stream.forget_waiters()
            for cell in stream.cells():
                cell.forget_waiters()
        cause = BackendError("it runs in the process that this one was forked from: run it anew to have it here")
        self.failure = Failure(f"program {self.program.name!r}", cause)
        for stream in self._streams:
            stream.fail(0, self.failure)

    def fail(self, error: BaseException, *, is_body: bool = False) -> None:
        """Fail everything unfinished. Any thread."""
        if self.is_done:
            return
        what = f"program {self.program.name!r}"
        self.failure = Failure(None, error) if is_body else Failure(what, error, place=self._reached())
        for stream in list(self._streams):
            stream.fail(0, self.failure)
        io.post(self._close)
        self._finish()

    def leave(self) -> None:
        """Give up at exit. Tell only the backend: daemon readers would print tracebacks."""
        if not self.is_done:
            io.post(self._close)
            self._finish()

    def _reached(self) -> Place | None:
        """Where the first unanswered node was recorded."""
        for stream in list(self._streams):
            for part, place in zip(stream.parts, stream.places, strict=False):
                if isinstance(part, Cell) and not part.done:
                    return place
        return None

    def when_done(self, call: Callable[[], object]) -> None:
        """Call `call` once when done: now, or on the finishing thread."""
        self._on_done.append(call)
        if self.is_done:
            self._call_on_done()

    def _call_on_done(self) -> None:
        while self._on_done:
            try:
                call = self._on_done.popleft()
            except IndexError:  # the other thread took it
                return
            try:
                call()
            except Exception:  # printing may fail, and others wait
                logger.exception("what was to follow program %r failed", self.program.name)

    # On the io thread

    def _send(self, segment: ir.Segment) -> None:
        if self.is_done:
            return
        try:
            if self._session is None:
                self._session = self.backend.open(self.program, self.on_event)
                if seconds := self.program.deadline_s:
                    error = RequestTimeout(f"not finished within {seconds:g} s", seconds=seconds)
                    self._deadline = io.loop().call_later(seconds, self.fail, error)
            self._session.send(segment)
        except Exception as error:  # the state raises it
            self.fail(as_known(error))

    def _close(self) -> None:
        for task in self._tool_tasks:
            task.cancel()
        if self._session is not None:
            self._session.cancel()
            self._release()

    def _release(self) -> None:
        """Drop the session, which refers to this run."""
        self._calls = getattr(self._session, "requests", None)
        self._session = None

    def on_event(self, event: ir.Event) -> None:
        """Deliver an event: any thread, in order, one at a time."""
        if isinstance(event, ir.Done):
            self._fail_unanswered()
            self._release()
            self._finish()
        elif isinstance(event, ir.NodeFailed):
            if event.stream is None or event.index is None:
                self.fail(event.error)
            else:
                stream = self._streams[event.stream]
                what, variable = stream.describe(event.index)
                path = ir.node_path(stream.path, event.index)
                stream.fail(event.index, Failure(what, event.error, path, variable, stream.places[event.index]))
                self._wake_all()
        else:
            cell = self._streams[event.stream].parts[event.index]
            assert isinstance(cell, Cell), "the backend answered a node that has no answer"
            if isinstance(event, ir.NodeDone):
                cell.resolve(event)
            elif isinstance(event, ir.Delta):
                cell.add(event)
            else:
                io.post(self._start_tools, event)

    def _fail_unanswered(self) -> None:
        """Have nobody wait for what a broken backend ended without."""
        error = BackendError("the backend ended the program before it had answered")
        if not self.is_over and not self.is_done:
            self.fail(error)
        for stream in list(self._streams):
            for index, part in enumerate(stream.parts):
                if isinstance(part, Cell) and not part.done:
                    failure = Failure(stream.describe(index)[0], error, place=stream.places[index])
                    stream.fail(index, failure)
                    part.fail(failure)

    def _finish(self) -> None:
        self.is_done = True
        self._group.remove(self)
        self._call_on_done()
        if self._deadline:
            io.post(self._deadline.cancel)
        self._wake_all()

    def _wake_all(self) -> None:
        self.wake()
        for stream in self._streams:
            stream.wake()

    def _start_tools(self, need: ir.Need) -> None:
        task = io.loop().create_task(self._answer_tools(need))
        self._tool_tasks.add(task)
        task.add_done_callback(self._tool_tasks.discard)

    async def _answer_tools(self, need: ir.Need) -> None:
        current_run.set(self)  # tools' programs join this run
        stream = self._streams[need.stream]
        node = stream.nodes[need.index]
        assert isinstance(node, ir.ToolResults)
        gen, cell = stream.nodes[node.index], stream.parts[node.index]
        assert isinstance(gen, ir.Gen)
        assert isinstance(cell, Cell)
        try:
            calls = tools.calls_of(cell.text, cell.meta)
            await tools.run_calls(calls, gen.client.tools, self.user_loop)
            cell.meta["calls"] = calls
            in_chat = not isinstance(stream.nodes[node.index + 1], ir.ToolResults)  # the turn's end follows
            turns = tuple(tools.turn_of(call, in_chat=in_chat) for call in calls)
        except Exception as error:  # a tool's: told as the node's
            self.on_event(ir.NodeFailed(need.stream, need.index, error))
            return
        with self._lock:
            self.segments += 1
        self._send(ir.Segment(answers=((need.stream, need.index, turns),)))


def program_of(name: str, sampling: Mapping[str, Any], **fields: Any) -> ir.Program:
    """A run's header; `sampling` is checked and may hold seed and timeout."""
    defaults = dict(sampling)
    timeout, seed = defaults.pop("timeout", None), defaults.pop("seed", None)
    seed = random.getrandbits(63) if seed is None else seed
    return ir.Program(name, seed, defaults, deadline_s=timeout, **fields)


def _is_open(nodes: list[ir.Node]) -> bool:
    return isinstance(nodes[0], ir.RoleBegin) and nodes[0].role == "assistant"


class IdleWatch:
    """Sends a body's nodes when it turns to something slow."""

    def __init__(self) -> None:
        self._recording: dict[Run, int] = {}
        self._is_ticking = False
        self._lock = threading.Lock()

    def add(self, run: Run) -> None:
        """Watch a run that starts to record."""
        with self._lock:
            self._recording[run] = -1
            if self._is_ticking:
                return
            self._is_ticking = True
        io.post(self._start)

    def _start(self) -> None:
        io.loop().call_later(IDLE_S, self._tick)

    def _tick(self) -> None:
        for run, seen in self._recording.copy().items():  # atomic: other threads add runs
            waiting = len(run._unsent)
            if waiting == 0 or run.is_over:
                self._recording.pop(run, None)
            elif waiting == seen:
                run.flush()
            else:
                self._recording[run] = waiting
        with self._lock:
            self._is_ticking = bool(self._recording)
        if self._is_ticking:
            self._start()


def _forsake_all() -> None:
    """In a forked child: nothing ticks, and open runs are the parent's."""
    runs = [run for run in everything.runs() if isinstance(run, Run)]
    for run in runs:  # first: any object freed later may hold a last state
        run.detach()
    idle_watch.__init__()  # type: ignore[misc]
    for run in runs:
        run.forsake()
    everything.__init__()  # type: ignore[misc]


def _cancel_all() -> None:
    """At exit: stop what nobody will read. What is answered ends in a moment: left before, it looks like given up."""
    runs = [run for run in everything.runs() if isinstance(run, Run)]  # all are
    for run in runs:
        if not run.is_answered:
            run.leave()
    end = time.monotonic() + _ENDING_SECONDS
    while time.monotonic() < end and not all(run.is_done for run in runs):
        time.sleep(0.001)


idle_watch = IdleWatch()
os.register_at_fork(after_in_child=_forsake_all)
atexit.register(_cancel_all)  # runs before io's closing, so backends are told


def child_seed(run: Run) -> int:
    """The seed of the body's next program, or a reserved one."""
    reserved = _reserved_seed.get()
    if reserved is not None and reserved[0] is run:
        return reserved[1]
    run.nested += 1
    return ir.node_seed(run.program.seed, "call", run.nested)


def context_of_row() -> Context:
    """A context for a batch's row. Inside a body, reserves the row's seed, so that seeds follow row order."""
    context, run = copy_context(), current_run.get()
    if run is not None:
        context.run(_reserved_seed.set, (run, child_seed(run)))
    return context
