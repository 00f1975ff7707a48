"""Executes programs by single calls: generate, stream, score (`TextBackend`). `StepSession` runs the nodes on the io
thread. State is text; whole prompts are sent, for the server's cache to share."""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from sgl.errors import BackendError, InvalidRequest, RequestTimeout
from sgl.lang.backends.base import Backend, Session
from sgl.lang.ir import interpreter as nodes
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import ChatTemplate, as_template
from sgl.lang.ir.choices import Scores, method_named
from sgl.lang.ir.interpreter import Interpreter, Piece, Steps, Turns

T = TypeVar("T")
TURN_TRIES = 3  # tries for a chat model to continue a turn


@dataclass(slots=True)
class Prompt:
    """What a gen continues: the text; its closed turns and the open turn's text; and its pieces, each with whether a
    template wrote it (only those hold control tokens)."""

    text: str
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    role: str | None = None
    turn: str = ""
    images: list[ir.Media] = field(default_factory=list)


@dataclass(slots=True)
class GenParams:
    """A resolved gen: all of PARAMS, a seed per sample, its constraint or dtype as (kind, value), and which of PARAMS
    the program gives itself."""

    sampling: dict[str, Any]
    seeds: list[int]
    node: ir.Gen
    constraint: tuple[str, Any] | None = None
    given: frozenset[str] = frozenset()


@dataclass(slots=True)
class Completion:
    """A sample's text without its stop, and its meta info (`finish_reason` …); while streaming, the next piece."""

    text: str
    meta: dict[str, Any] = field(default_factory=dict)


class TextBackend(Backend):
    """A backend of single calls, awaited on the io thread. `constraints`: kinds it enforces. `checks_dtypes`: otherwise
    a gen's dtype keeps the fitting start of its text, or fails. `writes_whole_turns`: it cannot continue a turn."""

    chat_template: ChatTemplate | str | None = None
    constraints: ClassVar[frozenset[str]] = frozenset()
    checks_dtypes: ClassVar[bool] = False
    writes_whole_turns: bool = False

    @abstractmethod
    async def generate(self, prompt: Prompt, params: GenParams) -> list[Completion]:
        """n samples, in order."""

    async def stream(self, prompt: Prompt, params: GenParams) -> AsyncIterator[Completion]:
        """One sample's pieces; by default a single one."""
        for completion in await self.generate(prompt, params):
            yield completion

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> list[Scores]:
        """Log-probabilities of each choice's tokens after the prompt; if `unconditional`, also without."""
        raise BackendError(f"{type(self).__name__} cannot score choices, which select needs")

    async def choose(self, prompt: Prompt, node: ir.Select) -> Completion:
        """The choice that the node's method prefers."""
        method = method_named(node.method)
        scores = await self.score(prompt, node.choices, unconditional=method.requires_unconditional_logprobs)
        decision = method(node.choices, scores)
        return Completion(decision.decision, decision.meta_info)

    def open(self, program: ir.Program, sink: ir.Sink) -> Session:
        return StepSession(self, program, sink)


class _Stream(nodes.Stream):
    """A stream as text and turns."""

    def __init__(self, stream_id: int, path: str, parent: _Stream | None) -> None:
        super().__init__(stream_id, path, parent)
        self._text: str = parent.text if parent else ""
        self._added: list[str] = []  # joined on demand: adding each would be quadratic
        self.length: int = len(self._text)
        self.pieces: list[Piece] = list(parent.pieces) if parent else []  # of the whole text
        self.messages: list[dict[str, Any]] = list(parent.messages) if parent else []
        self.turn_start: int = parent.turn_start if parent else 0
        self.images: list[ir.Media] = list(parent.images) if parent else []  # of the open turn
        self.tool_calls: list[Any] | None = None
        self.speculated = ""

    def append(self, text: str, *, is_template: bool = False) -> None:
        super().append(text, is_template=is_template)
        if text:
            self.speculated = self.speculated[len(text) :] if self.speculated.startswith(text) else ""
            self._added.append(text)
            self.length += len(text)
            self.pieces.append((text, is_template))

    @property
    def text(self) -> str:
        """The whole text."""
        if self._added:
            self._text += "".join(self._added)
            self._added.clear()
        return self._text

    def begin_turn(self, role: str) -> None:
        super().begin_turn(role)
        self.turn_start, self.images = self.length, []

    def end_turn(self) -> dict[str, Any]:
        message = super().end_turn() | {"content": self.text[self.turn_start :].lstrip()}
        message |= {"images": self.images} if self.images else {}
        message |= {"tool_calls": self.tool_calls} if self.tool_calls else {}
        self.images, self.tool_calls, self.speculated = [], None, ""
        return message

    def add_turn(self, message: dict[str, Any]) -> None:
        super().add_turn(message)
        self.messages.append(message)

    def prompt(self) -> Prompt:
        turn = self.text[self.turn_start :]
        pieces = [*self.pieces, (self.thought, True)] if self.thought else self.pieces
        return Prompt(self.text + self.thought, pieces, self.messages, self.role, turn, self.images)


class _Turns(Turns[_Stream]):
    """Schedules a program on the io thread."""

    def __init__(self, sink: ir.Sink) -> None:
        super().__init__(sink)
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self) -> None:
        """Resume ready streams; the program ends with the last."""
        while self._ready and not self._is_over:
            self._resume(self._ready.popleft())
        if self.is_final and not self._undrained and not self._is_over:
            self.emit(ir.Done())
            self._is_over = True

    def wait(self, stream: _Stream, work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Steps[T]:
        """Await work on the event loop."""

        def come_back(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # unread if the program is over
            self.wake(stream)
            self.run()

        async def guarded() -> T:
            try:
                return await work(*args)
            except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
                if self._is_over:
                    raise
                # from the backend's code: it would end the shared loop, or go unseen
                raise BackendError(f"the backend raised {type(error).__name__}: {error}") from error

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(come_back)
        while not task.done():
            yield
        return task.result()

    def cancel(self) -> None:
        """End the program silently."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()


class StepSession(Interpreter[_Stream], Session):
    """A program on a `TextBackend`. `requests`: calls made."""

    def __init__(self, backend: TextBackend, program: ir.Program, sink: ir.Sink) -> None:
        template = program.chat_template or backend.chat_template
        self._io_turns = _Turns(sink)
        super().__init__(program, as_template(template) if template is not None else None, self._io_turns)
        self.requests = 0
        self._backend = backend

    def send(self, segment: ir.Segment) -> None:
        self._receive(segment)
        self._io_turns.run()

    def cancel(self) -> None:
        self._io_turns.cancel()

    def _new_stream(self, stream_id: int, path: str, parent: _Stream | None) -> _Stream:
        return _Stream(stream_id, path, parent)

    def _copied_by_branch(self, stream: _Stream) -> int:
        return super()._copied_by_branch(stream) + stream.length + 8 * (len(stream.pieces) + len(stream.messages))

    def _media(self, stream: _Stream, node: ir.Media) -> Steps[None]:
        stream.images.append(node)
        self._write(stream, self._template.image_token if self._template else "", is_template=True)
        yield from ()

    def _gen(self, stream: _Stream, node: ir.Gen) -> Steps[None]:
        constraint = ir.constraint_of(node)
        dtype = None  # checked here
        if constraint and constraint[0] not in self._backend.constraints:
            dtype = node.dtype if self._backend.checks_dtypes else None
            if dtype is None:
                name = type(self._backend).__name__
                raise InvalidRequest(f"{name} cannot enforce a {constraint[0]} constraint", param=constraint[0])
            constraint = None
        sampling, seeds = self._params_and_seeds(stream, node)
        given = frozenset((*self._program.defaults, *node.params))
        params = GenParams(sampling, seeds, node, constraint, given)
        can_stream = dtype is None and sampling["n"] == 1
        completions = yield from self._io_turns.wait(stream, self._in_time, stream, node, params, can_stream)
        texts = [_fitting(completion.text, dtype) if dtype else completion.text for completion in completions]
        value, meta = self._outcome(stream, node, texts, [completion.meta for completion in completions])
        text = value if isinstance(value, str) else value[0]
        stream.tool_calls = meta.get("tool_calls")
        self._append(stream, text)
        self._done(stream, text, value, meta)

    async def _in_time(
        self, stream: _Stream, node: ir.Gen, params: GenParams, can_stream: bool
    ) -> list[Completion]:
        seconds = params.sampling["timeout"]
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self._complete(stream, node, params, can_stream)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RequestTimeout(f"not finished within {seconds:g} s", seconds=seconds) from error

    async def _complete(
        self, stream: _Stream, node: ir.Gen, params: GenParams, can_stream: bool
    ) -> list[Completion]:
        is_plain = params.constraint is None and not node.tools and params.sampling["n"] == 1
        if self._program.speculate_tokens and is_plain:
            return [await self._speculate(stream, params)]
        self.requests += 1
        prompt = stream.prompt()
        if not (self._program.stream and can_stream):
            completions = await self._backend.generate(prompt, params)
            if len(completions) != params.sampling["n"]:
                raise BackendError(f"asked for {params.sampling['n']} samples, got {len(completions)}")
            return completions
        whole = Completion("")
        emit = self._emitter(stream, node)
        async for piece in self._backend.stream(prompt, params):
            whole.text += piece.text
            whole.meta = {**whole.meta, **piece.meta}
            emit(piece.text, piece.meta)
        return [whole]

    async def _speculate(self, stream: _Stream, params: GenParams) -> Completion:
        """Serve the gen from an earlier call's look-ahead, or make such a call."""
        stops, limit = params.sampling["stop"], params.sampling["max_tokens"]
        meta: dict[str, Any] = {"completion_tokens": 0}  # paid by the earlier call
        if not stream.speculated:
            stream.speculated, meta = await self._generate_ahead(stream, params)
        ends = [at for stop in stops if (at := stream.speculated.find(stop)) >= 0]
        text = stream.speculated[: min(ends)] if ends else stream.speculated if stops else stream.speculated[:limit]
        return Completion(text, {**meta, "finish_reason": {"type": "stop"}, "speculated": True})

    async def _generate_ahead(self, stream: _Stream, params: GenParams) -> tuple[str, dict[str, Any]]:
        """Generate ahead of the stream's text. Backends of whole turns retry until one begins as this turn has."""
        num_tokens = max(params.sampling["max_tokens"], self._program.speculate_tokens or 0)
        longer = dict(params.sampling, stop=[], max_tokens=num_tokens)
        prompt = stream.prompt()
        begun = prompt.turn.lstrip() if self._backend.writes_whole_turns else ""
        if begun:
            prompt = replace(prompt, text=prompt.text.removesuffix(prompt.turn), turn="")
        for attempt in range(TURN_TRIES if begun else 1):
            self.requests += 1
            seeds = [seed + attempt for seed in params.seeds]
            [ahead] = await self._backend.generate(
                prompt, GenParams(longer, seeds, params.node, given=params.given)
            )
            if not begun:
                return ahead.text, ahead.meta
            if ahead.text.lstrip().startswith(begun):
                return ahead.text.lstrip().removeprefix(begun), ahead.meta
        raise BackendError(f"in {TURN_TRIES} tries the model wrote no turn that begins with {begun!r}")

    def _select(self, stream: _Stream, node: ir.Select) -> Steps[None]:
        self.requests += 1
        chosen = yield from self._io_turns.wait(stream, self._backend.choose, stream.prompt(), node)
        self._write(stream, chosen.text, chosen.meta)


def _fitting(text: str, dtype: str) -> str:
    """The longest prefix of that dtype. Raises BackendError if none."""
    match = re.match(ir.DTYPE_REGEX[dtype], text.lstrip())
    if match is None:
        raise BackendError(f"the model wrote {text!r}, which is no {dtype}")
    return match.group()
