"""Executes programs node by node, for backends that only know single calls.

`TextBackend` is the base of such backends: generate, stream, score. `StepSession` interprets segments for them on
the io thread, one task per stream, with the same semantics as the executor beside the scheduler. State is text:
prompts are sent whole, and what they share is left to the server's cache.
"""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from sgl.errors import BackendError, InvalidRequest, ProgramError, RequestTimeout, SglError
from sgl.lang import ir
from sgl.lang.backends.base import Backend, Session
from sgl.lang.chat import ChatTemplate, as_template
from sgl.lang.choices import Scores, method_named
from sgl.lang.reasoning import ReasoningSplitter, split_reasoning

TURN_TRIES = 3  # for a chat model to write a turn as the program has begun it


@dataclass(slots=True)
class Prompt:
    """What a gen continues: the whole text, the same as closed turns plus the text of the open turn, and the same
    as pieces, each with whether a template wrote it (only those may hold control tokens)."""

    text: str
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    role: str | None = None
    turn: str = ""
    images: list[ir.Media] = field(default_factory=list)


@dataclass(slots=True)
class GenParams:
    """One gen, resolved. `sampling` has every key of `ir.DEFAULTS`; `seeds` has one entry per sample; `constraint`
    is (kind, value), dtype included."""

    sampling: dict[str, Any]
    seeds: list[int]
    node: ir.Gen
    constraint: tuple[str, Any] | None = None


@dataclass(slots=True)
class Completion:
    """A sample's text, without the stop that ended it, and its meta info (`completion_tokens`, `finish_reason` …).
    While streaming: the next piece of the text, and the meta info that came with it."""

    text: str
    meta: dict[str, Any] = field(default_factory=dict)


class TextBackend(Backend):
    """A backend of single calls, all awaited on the io thread. `constraints`: the kinds it enforces itself;
    `checks_dtypes`: where it cannot, a gen with a dtype takes the beginning of its text that fits, or fails;
    `writes_whole_turns`: it cannot go on with a turn that the program has begun."""

    chat_template: ChatTemplate | str | None = None
    constraints: ClassVar[frozenset[str]] = frozenset()
    checks_dtypes: ClassVar[bool] = False
    writes_whole_turns: bool = False

    @abstractmethod
    async def generate(self, prompt: Prompt, params: GenParams) -> list[Completion]:
        """n samples of a continuation of the prompt, in order."""

    async def stream(self, prompt: Prompt, params: GenParams) -> AsyncIterator[Completion]:
        """The pieces of one sample as they come. Here: the whole sample as one piece."""
        for completion in await self.generate(prompt, params):
            yield completion

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> list[Scores]:
        """The log-probabilities of each choice's tokens after the prompt; with `unconditional`, also without it."""
        raise BackendError(f"{type(self).__name__} cannot score choices, which select needs")

    async def choose(self, prompt: Prompt, node: ir.Select) -> Completion:
        """The choice that the node's method prefers."""
        method = method_named(node.method)
        scores = await self.score(prompt, node.choices, unconditional=method.requires_unconditional_logprobs)
        decision = method(node.choices, scores)
        return Completion(decision.decision, decision.meta_info)

    def open(self, program: ir.Program, sink: ir.Sink) -> Session:
        return StepSession(self, program, sink)


class _Failed(Exception):
    """The stream cannot go on; whoever caused it has been told."""


class _Stream:
    """The executor's state of one stream."""

    def __init__(self, stream_id: int, path: str) -> None:
        self.id = stream_id
        self.path = path
        self.queue: deque[ir.Node] = deque()
        self.task: asyncio.Task[None] | None = None
        self.news: asyncio.Future[None] | None = None  # while the task has nothing to do
        self.is_closed = False
        self.is_drained = False
        self.is_failed = False
        self.position = 0
        self.text = ""
        self.pieces: list[tuple[str, bool]] = []
        self.base_text_length = 0
        self.roles: tuple[str, ...] = ()
        self.messages: list[dict[str, Any]] = []
        self.role: str | None = None
        self.turn_start = 0
        self.images: list[ir.Media] = []
        self.scopes: list[int] = []
        self.tool_calls: list[Any] | None = None
        self.speculated = ""

    def branch(self, stream_id: int, path: str) -> _Stream:
        child = _Stream(stream_id, path)
        child.text, child.base_text_length, child.turn_start = self.text, len(self.text), self.turn_start
        child.roles, child.role, child.pieces = self.roles, self.role, list(self.pieces)
        child.messages, child.images = list(self.messages), list(self.images)
        return child

    def tell(self) -> None:
        """Let the task look again."""
        if self.news is not None and not self.news.done():
            self.news.set_result(None)

    def prompt(self) -> Prompt:
        turn = self.text[self.turn_start :]
        return Prompt(self.text, self.pieces, self.messages, self.role, turn, self.images)


class StepSession(Session):
    """A program on a `TextBackend`. `requests` counts the calls made to it."""

    def __init__(self, backend: TextBackend, program: ir.Program, sink: ir.Sink) -> None:
        self.requests = 0
        self._backend = backend
        self._program = program
        self._sink = sink
        self._streams: dict[int, _Stream] = {}
        self._early: dict[int, deque[ir.Node]] = {}  # nodes of streams whose fork has not been executed yet
        self._values: dict[tuple[int, int], str] = {}
        self._awaited: dict[tuple[int, int], asyncio.Future[None]] = {}  # nodes that refs wait for
        self._answers: dict[tuple[int, int], asyncio.Future[tuple[ir.Turn, ...]]] = {}
        self._is_final = False
        self._is_done = False
        template = program.chat_template or backend.chat_template
        self._template = as_template(template) if template is not None else None
        self._start(_Stream(0, ""))

    def send(self, segment: ir.Segment) -> None:
        touched = set()
        for stream_id, node in segment.nodes:
            stream = self._streams.get(stream_id)
            if stream is None:
                self._early.setdefault(stream_id, deque()).append(node)
            else:
                stream.queue.append(node)
                touched.add(stream)
                if stream.is_failed:
                    self._fail_waiters(stream)
        for stream_id, index, turns in segment.answers:
            answer = self._answers[stream_id, index]
            if not answer.done():
                answer.set_result(turns)
        self._is_final = self._is_final or segment.final
        for stream in self._streams.values() if segment.final else touched:
            stream.tell()
        self._finish_if_drained()

    def cancel(self) -> None:
        self._is_done = True
        for stream in self._streams.values():
            if stream.task is not None:
                stream.task.cancel()

    def _start(self, stream: _Stream) -> None:
        self._streams[stream.id] = stream
        stream.queue.extend(self._early.pop(stream.id, ()))
        stream.task = asyncio.get_running_loop().create_task(self._run(stream))

    async def _run(self, stream: _Stream) -> None:
        """Execute the stream's nodes in order, until it is closed or the program ends."""
        try:
            while True:
                while stream.queue:
                    await self._execute(stream, stream.queue.popleft())
                    stream.position += 1
                if stream.is_closed or self._is_final:
                    break
                stream.news = asyncio.get_running_loop().create_future()
                await stream.news
        except _Failed:
            stream.is_failed = True
        except Exception as error:
            stream.is_failed = True
            if not isinstance(error, SglError):
                wrapped = BackendError(f"{type(error).__name__}: {error}")
                wrapped.__cause__ = error
                error = wrapped
            self._sink(ir.NodeFailed(stream.id, stream.position, error))
        stream.is_drained = True
        if stream.is_failed:
            self._fail_waiters(stream)
        self._finish_if_drained()

    def _fail_waiters(self, stream: _Stream) -> None:
        for (stream_id, _), awaited in self._awaited.items():
            if stream_id == stream.id and not awaited.done():
                awaited.set_result(None)
        for node in stream.queue:
            if isinstance(node, ir.Fork):
                for child in node.children:
                    failed = _Stream(child, "")
                    failed.is_failed = True
                    failed.queue.extend(self._early.pop(child, ()))
                    failed.is_drained = True
                    self._streams[child] = failed
                    self._fail_waiters(failed)

    def _finish_if_drained(self) -> None:
        if not self._is_final or self._is_done:
            return
        if all(stream.is_drained for stream in self._streams.values()):
            self._is_done = True
            self._sink(ir.Done())

    # One method per kind of node

    async def _execute(self, stream: _Stream, node: ir.Node) -> None:
        match node:
            case ir.Text():
                self._append(stream, node.text)
            case ir.Arg():
                self._append(stream, self._program.args[node.name])
            case ir.Gen():
                await self._gen(stream, node)
            case ir.Select():
                await self._select(stream, node)
            case ir.RoleBegin():
                self._role_begin(stream, node.role)
            case ir.RoleEnd():
                self._role_end(stream, node.role)
            case ir.Media():
                stream.images.append(node)
                self._done(stream, self._template.image_token if self._template else "", is_template=True)
            case ir.Ref():
                await self._ref(stream, node)
            case ir.ScopeBegin():
                stream.scopes.append(len(stream.text))
            case ir.ScopeEnd():
                self._set_value(stream, stream.text[stream.scopes.pop() :])
            case ir.SetVar():
                pass
            case ir.Fork():
                for i, child in enumerate(node.children):
                    self._start(stream.branch(child, ir.branch_path(stream.path, stream.position, i)))
            case ir.Join():
                await self._join(stream, node)
            case ir.ToolResults():
                await self._tool_results(stream, node)
            case _:
                raise InvalidRequest(f"unknown node {node!r}", param="op")

    def _append(self, stream: _Stream, text: str, *, is_template: bool = False) -> None:
        if not text:
            return
        if stream.speculated:
            matches = stream.speculated.startswith(text)
            stream.speculated = stream.speculated[len(text) :] if matches else ""
        stream.text += text
        stream.pieces.append((text, is_template))

    def _done(
        self,
        stream: _Stream,
        text: str,
        value: Any = None,
        meta: dict[str, Any] | None = None,
        *,
        is_template: bool = False,
    ) -> None:
        """Append a node's text and tell the client."""
        self._append(stream, text, is_template=is_template)
        self._set_value(stream, text)
        self._sink(ir.NodeDone(stream.id, stream.position, text, text if value is None else value, meta or {}))

    def _set_value(self, stream: _Stream, text: str) -> None:
        """Keep the text of the current node, for those that refer to it."""
        key = (stream.id, stream.position)
        self._values[key] = text
        if (waiting := self._awaited.pop(key, None)) is not None and not waiting.done():
            waiting.set_result(None)

    async def _gen(self, stream: _Stream, node: ir.Gen) -> None:
        constraint = ir.constraint_of(node)
        dtype = None  # to be checked here
        if constraint and constraint[0] not in self._backend.constraints:
            dtype = node.dtype if self._backend.checks_dtypes else None
            if dtype is None:
                name = type(self._backend).__name__
                raise InvalidRequest(f"{name} cannot enforce a {constraint[0]} constraint", param=constraint[0])
            constraint = None
        path = ir.node_path(stream.path, stream.position)
        stops = self._template.stops if self._template and stream.role else ()
        sampling, seeds = ir.resolve(self._program, node, path, stops)
        params = GenParams(sampling, seeds, node, constraint)
        can_stream = dtype is None and sampling["n"] == 1
        work = self._complete(stream, node, params, can_stream=can_stream)
        completions = await self._in_time(work, sampling["timeout"])
        texts = [_fitting(completion.text, dtype) if dtype else completion.text for completion in completions]
        metas = [completion.meta for completion in completions]
        meta = metas[0] if len(metas) == 1 else {"samples": metas, **metas[0]}
        if node.reasoning is not None:
            split = [split_reasoning(text, node.reasoning) for text in texts]
            texts = [answer for _, answer in split]
            meta["reasoning_content"] = split[0][0]
        stream.tool_calls = meta.get("tool_calls")
        self._done(stream, texts[0], texts[0] if len(texts) == 1 else texts, meta)

    @staticmethod
    async def _in_time(work: Coroutine[Any, Any, list[Completion]], seconds: float | None) -> list[Completion]:
        if seconds is None:
            return await work
        try:
            return await asyncio.wait_for(work, seconds)
        except TimeoutError as error:
            raise RequestTimeout(f"not finished within {seconds:g} s", seconds=seconds) from error

    async def _complete(
        self, stream: _Stream, node: ir.Gen, params: GenParams, *, can_stream: bool
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
        splitter = ReasoningSplitter(node.reasoning) if node.reasoning else None
        async for piece in self._backend.stream(prompt, params):
            whole.text += piece.text
            whole.meta = {**whole.meta, **piece.meta}
            reasoning, answer = splitter.feed(piece.text) if splitter else ("", piece.text)
            if reasoning:
                self._sink(ir.Delta(stream.id, stream.position, reasoning, piece.meta, reasoning=True))
            if answer or not reasoning:  # no logprob is lost while text is held back
                self._sink(ir.Delta(stream.id, stream.position, answer, piece.meta))
        return [whole]

    async def _speculate(self, stream: _Stream, params: GenParams) -> Completion:
        """Take the gen from text that an earlier, longer call foresaw, or make such a call."""
        stops, limit = params.sampling["stop"], params.sampling["max_tokens"]
        meta: dict[str, Any] = {"completion_tokens": 0}  # what an earlier call foresaw, that call has paid for
        if not stream.speculated:
            stream.speculated, meta = await self._foresee(stream, params)
        ends = [at for stop in stops if (at := stream.speculated.find(stop)) >= 0]
        text = stream.speculated[: min(ends)] if ends else stream.speculated if stops else stream.speculated[:limit]
        return Completion(text, {**meta, "finish_reason": {"type": "stop"}, "speculated": True})

    async def _foresee(self, stream: _Stream, params: GenParams) -> tuple[str, dict[str, Any]]:
        """What may follow the stream's text. Where only whole turns are written, one that begins as this one has."""
        num_tokens = max(params.sampling["max_tokens"], self._program.speculate_tokens or 0)
        longer = dict(params.sampling, stop=[], max_tokens=num_tokens)
        prompt = stream.prompt()
        begun = prompt.turn.lstrip() if self._backend.writes_whole_turns else ""
        if begun:
            prompt = replace(prompt, text=prompt.text.removesuffix(prompt.turn), turn="")
        for attempt in range(TURN_TRIES if begun else 1):
            self.requests += 1
            seeds = [seed + attempt for seed in params.seeds]
            [ahead] = await self._backend.generate(prompt, GenParams(longer, seeds, params.node))
            if not begun:
                return ahead.text, ahead.meta
            if ahead.text.lstrip().startswith(begun):
                return ahead.text.lstrip().removeprefix(begun), ahead.meta
        raise BackendError(f"in {TURN_TRIES} tries the model wrote no turn that begins with {begun!r}")

    async def _select(self, stream: _Stream, node: ir.Select) -> None:
        self.requests += 1
        chosen = await self._backend.choose(stream.prompt(), node)
        self._done(stream, chosen.text, meta=chosen.meta)

    def _role_begin(self, stream: _Stream, role: str) -> None:
        if self._template is None:
            raise InvalidRequest("roles need a chat template and this backend has none: pass chat_template=")
        if stream.role is not None:
            raise InvalidRequest(f"a {role} turn cannot begin inside the open {stream.role} turn", param="role")
        begin = self._template.begin(stream.roles, role)
        if begin.system is not None:
            stream.roles += ("system",)
            stream.messages.append({"role": "system", "content": begin.system})
        meta = {} if begin.system is None else {"system": begin.system}
        self._done(stream, begin.text, meta=meta, is_template=True)
        stream.role, stream.turn_start, stream.images = role, len(stream.text), []

    def _role_end(self, stream: _Stream, role: str) -> None:
        if stream.role != role or self._template is None:
            raise InvalidRequest(f"no {role} turn is open here (open: {stream.role})", param="role")
        message: dict[str, Any] = {"role": role, "content": stream.text[stream.turn_start :].lstrip()}
        if stream.images:
            message["images"] = stream.images
        if stream.tool_calls:
            message["tool_calls"] = stream.tool_calls
        self._done(stream, self._template.end(stream.roles, role), is_template=True)
        stream.messages.append(message)
        stream.roles += (role,)
        stream.role, stream.images, stream.tool_calls, stream.speculated = None, [], None, ""

    async def _ref(self, stream: _Stream, node: ir.Ref) -> None:
        key = (node.stream, node.index)
        target = self._streams.get(node.stream)
        if key not in self._values and not (target and target.is_failed):
            if key not in self._awaited:
                self._awaited[key] = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._awaited[key])
        if key not in self._values:
            raise ProgramError("the node it refers to failed")
        self._done(stream, ir.apply_functions(self._values[key], node.functions))

    async def _join(self, stream: _Stream, node: ir.Join) -> None:
        for child_id in node.children:
            self._streams[child_id].is_closed = True
            self._streams[child_id].tell()
        for child_id in node.children:
            child = self._streams[child_id]
            if child.task is not None:
                await asyncio.wait([child.task])
            if child.is_failed:
                raise _Failed
            if node.mode == "append":
                self._append(stream, child.text[child.base_text_length :])

    async def _tool_results(self, stream: _Stream, node: ir.ToolResults) -> None:
        key = (stream.id, stream.position)
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        self._sink(ir.Need(*key))
        start = len(stream.text)
        messages = []
        for turn in await answer:
            if turn.role is None or self._template is None:
                self._append(stream, turn.content)
                continue
            self._append(stream, self._template.begin(stream.roles, turn.role).text, is_template=True)
            self._append(stream, turn.content)
            self._append(stream, self._template.end(stream.roles, turn.role), is_template=True)
            message = {"role": turn.role, "content": turn.content, "name": turn.name, "tool_call_id": turn.call_id}
            messages.append({key: value for key, value in message.items() if value is not None})
            stream.roles += (turn.role,)
        stream.messages += messages
        written = stream.text[start:]
        self._set_value(stream, written)
        self._sink(ir.NodeDone(*key, written, written, {"messages": messages}))


def _fitting(text: str, dtype: str) -> str:
    """The longest beginning of a text that is of that dtype. Raises if there is none."""
    match = re.match(ir.DTYPE_REGEX[dtype], text.lstrip())
    if match is None:
        raise BackendError(f"the model wrote {text!r}, which is no {dtype}")
    return match.group()
