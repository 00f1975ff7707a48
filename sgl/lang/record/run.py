"""One run of a program on the client: it ships what the streams record and delivers what the backend answers.

It knows the backend's session and the streams; it knows nothing of user-facing states or of how bodies are executed
(see `sgl.lang.record.function`). What is recorded is shipped as one segment when Python observes a value, when the body
ends, when a segment grows long, or when the body has been busy with something else for a while.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import random
import threading
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
from sgl.lang.record.cell import Cell, Failure
from sgl.lang.record.open_runs import Group, current_group, everything
from sgl.lang.record.place import Place, add_place, misuse
from sgl.lang.record.stream import Stream
from sgl.lang.typed import tools

logger = logging.getLogger(__name__)

MAX_NODES = 10_000  # of one run; a recorded loop that never observes ends here
MAX_STREAMS = 4_097
SEGMENT_NODES = 2_000  # a longer segment is shipped before anybody observes
IDLE_S = 0.1  # a body busy elsewhere for so long has its recorded nodes shipped

current_run: ContextVar[Run | None] = ContextVar("current_run", default=None)
_reserved_seed: ContextVar[tuple[Run, int] | None] = ContextVar("reserved_seed", default=None)


class Run(Watched):
    """One execution of one program. `requests` counts what went to the backend."""

    def __init__(self, program: ir.Program, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.program = program
        self.is_over = False  # the body has ended
        self.is_done = False  # the backend has finished, or the run failed
        self.failure: Failure | None = None
        self._handled: list[Failure] = []  # of branches, which the body has seen and gone on
        self.user_loop: asyncio.AbstractEventLoop | None = None
        self._on_done: deque[Callable[[], object]] = deque()
        self.segments = 0
        self.nested = 0
        self._session: Session | None = None
        self._calls: int | None = None  # of a session of single calls, once it is over
        self._streams: list[Stream] = []
        self._unsent: deque[tuple[int, ir.Node]] = deque()
        self._num_nodes = 0
        self._lock = threading.Lock()
        self._deadline: asyncio.TimerHandle | None = None
        self._tool_tasks: set[asyncio.Task[None]] = set()
        self._group = current_group.get()
        self._inner = Group(self._group)  # of the programs that the body calls
        self.root = Stream(self, None, "")
        self._group.add(self)

    @property
    def requests(self) -> int:
        """Round trips so far: segments, or calls where the backend knows no programs."""
        calls: int | None = getattr(self._session, "requests", self._calls)
        return self.segments if calls is None else calls

    # What streams ask for

    def add_stream(self, stream: Stream) -> int:
        """Take in a stream; returns its number."""
        with self._lock:
            if len(self._streams) >= MAX_STREAMS:
                raise misuse(f"a program can have at most {MAX_STREAMS - 1} forked branches")
            self._streams.append(stream)
            return len(self._streams) - 1

    def record(self, stream: int, node: ir.Node) -> None:
        """Take in a node that a stream recorded."""
        self._unsent.append((stream, node))
        self._num_nodes += 1
        if len(self._unsent) == 1:
            idle_watch.add(self)
        elif len(self._unsent) >= SEGMENT_NODES:
            self.flush()
        if self._num_nodes > MAX_NODES:
            raise misuse(f"a program can have at most {MAX_NODES} nodes; does a loop never end?")

    def flush(self, *, final: bool = False) -> None:
        """Ship what is recorded and not shipped yet. Any thread; never blocks."""
        if not self._unsent and not final:
            return
        with self._lock:  # segments must leave in the order in which their nodes were taken
            nodes = []
            while self._unsent:
                nodes.append(self._unsent.popleft())
            if nodes or final:
                self.segments += 1
                io.post(self._send, ir.Segment(tuple(nodes), final=final))

    def cells(self) -> Iterator[Cell]:
        """The answers to all nodes of all streams, pending ones too."""
        for stream in list(self._streams):
            yield from stream.cells()

    def stream(self, index: int) -> Stream:
        """The stream of that number."""
        return self._streams[index]

    def failed(self) -> Failure | None:
        """What the run has failed with so far: all of it, or a branch whose failure the body has not looked at."""
        if self.root.failure or not self.is_over:
            return self.root.failure
        failures = [stream.failure for stream in list(self._streams)]
        return next((failure for failure in failures if failure and failure not in self._handled), None)

    # The life of the body

    @contextmanager
    def body(self) -> Iterator[None]:
        """The body is executed within: programs that it calls are part of this run. If it raises, what is under way is
        given up, and reads of this run raise its error from now on."""
        token, group_token = current_run.set(self), current_group.set(self._inner)
        try:
            yield
        except BaseException as error:
            self.is_over = True
            add_place(error)
            self.fail(error, is_body=True)
            self._inner.cancel()
            raise
        finally:
            current_run.reset(token)
            current_group.reset(group_token)
        self.end()

    def end(self) -> None:
        """The body has ended well: ship the rest."""
        failures = [stream.failure for stream in self._streams]
        self._handled = [failure for failure in failures if failure is not None and failure.is_seen]
        self.is_over = True
        self.flush(final=True)
        self._wake_all()

    def cancel(self) -> None:
        """Give up the whole run, on the backend as well. Reads raise, `error()` is `RequestAborted`."""
        self.fail(RequestAborted("the program was cancelled"))
        self._inner.cancel()

    def drop(self) -> None:
        """Give up a run that nobody can look at. Whatever this thread was doing, it blocks on no lock."""
        io.post(self._drop)

    def _drop(self) -> None:
        if not self.is_answered:
            self.fail(RequestAborted("the program was given up: nobody holds its state any more"))

    @property
    def is_answered(self) -> bool:
        """Whether the backend has nothing more to compute, also if it has not said so yet."""
        return self.is_done or (self.is_over and all(cell.done for cell in self.cells()))

    def let_go(self) -> None:
        """In a child process: the backend's session is the parent's, and nothing here ends it any more."""
        self.is_done = True
        self._session = self._deadline = None

    def forsake(self) -> None:
        """Fail a run of the parent process, in a child: it goes on there, and who waited for it is not here."""
        self._on_done.clear()
        self._unsent.clear()
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
        """Fail everything that is not done. Any thread; a run that is done stays as it is."""
        if self.is_done:
            return
        what = f"program {self.program.name!r}"
        self.failure = Failure(None, error) if is_body else Failure(what, error, place=self._reached())
        for stream in list(self._streams):
            stream.fail(0, self.failure)
        io.post(self._close)
        self._finish()

    def leave(self) -> None:
        """Give it up where the process ends. Only the backend is told: daemon threads that still read would print
        tracebacks while the interpreter goes."""
        if not self.is_done:
            io.post(self._close)
            self._finish()

    def _reached(self) -> Place | None:
        """Where the first node without an answer was recorded."""
        for stream in list(self._streams):
            for part, place in zip(stream.parts, stream.places, strict=False):
                if isinstance(part, Cell) and not part.done:
                    return place
        return None

    def when_done(self, call: Callable[[], object]) -> None:
        """Call `call` once when the run is done: at once, or on whatever thread finishes it."""
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
            except Exception:  # it may print, to where nobody reads any more, and others wait
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
        except Exception as error:
            self.fail(as_known(error))

    def _close(self) -> None:
        for task in self._tool_tasks:
            task.cancel()
        if self._session is not None:
            self._session.cancel()
            self._release()

    def _release(self) -> None:
        """Let go of the session, which refers to this run."""
        self._calls = getattr(self._session, "requests", None)
        self._session = None

    def on_event(self, event: ir.Event) -> None:
        """Deliver an answer of the backend: from any thread, one at a time, in order."""
        if isinstance(event, ir.Done):
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
        current_run.set(self)  # programs that tools call are part of this run; the context is this task's own
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
            turns = tuple(tools.turn_of(call, in_chat=self._is_turn(stream, node.index)) for call in calls)
        except Exception as error:
            self.on_event(ir.NodeFailed(need.stream, need.index, error))
            return
        with self._lock:
            self.segments += 1
        self._send(ir.Segment(answers=((need.stream, need.index, turns),)))

    @staticmethod
    def _is_turn(stream: Stream, gen: int) -> bool:
        return not isinstance(stream.nodes[gen + 1], ir.ToolResults)


def program_of(name: str, sampling: Mapping[str, Any], **fields: Any) -> ir.Program:
    """How a run is opened; `sampling` is checked, and holds its seed, if that is not to be random, and timeout."""
    defaults = dict(sampling)
    timeout, seed = defaults.pop("timeout", None), defaults.pop("seed", None)
    seed = random.getrandbits(63) if seed is None else seed
    return ir.Program(name, seed, defaults, deadline_s=timeout, **fields)


class IdleWatch:
    """Ships what a body recorded before it turned to something that takes long."""

    def __init__(self) -> None:
        self._recording: dict[Run, int] = {}
        self._is_ticking = False
        self._lock = threading.Lock()

    def add(self, run: Run) -> None:
        """Watch a run that has begun to record."""
        with self._lock:
            self._recording[run] = -1
            if self._is_ticking:
                return
            self._is_ticking = True
        io.post(self._start)

    def _start(self) -> None:
        io.loop().call_later(IDLE_S, self._tick)

    def _tick(self) -> None:
        for run, seen in self._recording.copy().items():  # other threads add runs, also while a list would be made
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
    """In a child process: nobody ticks here, and what was under way is the parent's."""
    runs = [run for run in everything.runs() if isinstance(run, Run)]
    for run in runs:  # all of them first: what is freed from here on may be the last state of any
        run.let_go()
    idle_watch.__init__()  # type: ignore[misc]
    for run in runs:
        run.forsake()
    everything.__init__()  # type: ignore[misc]


def _cancel_all() -> None:
    """At exit: end what would be computed for nobody."""
    for run in everything.runs():
        assert isinstance(run, Run), "only runs are added"
        if not run.is_answered:
            run.leave()


idle_watch = IdleWatch()
os.register_at_fork(after_in_child=_forsake_all)
atexit.register(_cancel_all)  # and only then io closes: backends are told


def child_seed(run: Run) -> int:
    """The seed of the next program that the body of `run` calls, or the one that was reserved for it."""
    reserved = _reserved_seed.get()
    if reserved is not None and reserved[0] is run:
        return reserved[1]
    run.nested += 1
    return ir.node_seed(run.program.seed, "call", run.nested)


def context_of_row() -> Context:
    """A copy of this context, for a row of a batch. Within a body, rows get their seeds here: in their order, on
    whatever threads they begin."""
    context, run = copy_context(), current_run.get()
    if run is not None:
        context.run(_reserved_seed.set, (run, child_seed(run)))
    return context
