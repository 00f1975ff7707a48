"""Several engine processes that serve as one: each request, each prompt of a list and each program goes to one of them
(`placement`), and the others' answers are put together."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sgl.errors import EngineDead, InvalidRequest, SglError
from sgl.lang.ir import nodes as ir
from sgl.runtime.config import EngineConfig
from sgl.runtime.requests.arguments import has_list_of_prompts, part_of, samples_of
from sgl.runtime.server.engine_process import EngineProcess, RemoteSession
from sgl.runtime.server.methods import UPDATES, Method
from sgl.runtime.server.placement import Placement, future_of, future_of_program, future_of_prompts
from sgl.runtime.text.tokenizer import Tokenizer

_Begin = Callable[[ir.Program, ir.Sink, ir.Segment], tuple[RemoteSession, Callable[[], None]]]
_MOST_PLACED = 64  # bundles of prompts of one call
_RETRY_SECONDS = 0.1
_SEEDS_APART = 1 << 40
"""Requests without a seed of their own draw differently on each engine."""


@dataclass(slots=True)
class _Part:
    """What one engine gets of a call; of a list, these prompts, whose results have these places."""

    engine: int
    work: float
    prompts: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


def added(counts: list[Any]) -> Any:
    """Of several engines: numbers' sum, also of each name's where they have names, of truths whether one is, and lists
    one after the other."""
    if isinstance(counts[0], dict):
        together: Counter[str] = Counter()
        for its in counts:
            together.update(its)
        return dict(together)
    if isinstance(counts[0], list):
        return [one for its in counts for one in its]
    return any(counts) if isinstance(counts[0], bool) else sum(counts)


class Replicas:
    """`dp_size` engine processes, with the methods of one. They run on the event loop that called `start`."""

    def __init__(
        self, config: EngineConfig, *, configure: Callable[[], None], watchdog_timeout: float = 300.0
    ) -> None:
        """See EngineProcess."""
        self._engines = [
            EngineProcess(
                _replica(config, rank),
                configure=configure,
                watchdog_timeout=watchdog_timeout,
                name=f"engine {rank + 1} of {config.dp_size}",
                on_restart=partial(self._restarted, rank),
            )
            for rank in range(config.dp_size)
        ]
        self._placement = Placement(config.dp_size)
        self._rids: set[tuple[str | None, str]] = set()  # in use, with their owners
        self._updating = asyncio.Lock()  # an update is held by all before any writes it

    @property
    def config(self) -> EngineConfig:
        """The first engine's."""
        return self._engines[0].config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The one of all."""
        return self._engines[0].tokenizer

    async def start(self) -> None:
        """Start them all. Raises what the first of them raises that fails."""
        first, *others = self._engines
        try:
            await asyncio.gather(first.start(), *(engine.start(with_tokenizer=False) for engine in others))
        except BaseException:
            await self.close()
            raise
        for engine in others:
            engine.tokenizer = first.tokenizer

    async def generate(self, **arguments: Any) -> Any:
        """See EngineProcess. A list of prompts is shared out."""
        with self._naming(arguments):
            return await self._generate(arguments)

    async def _generate(self, arguments: dict[str, Any]) -> Any:
        parts = self._parts(arguments)
        if len(parts) == 1:
            with self._working(parts[0]):
                return await self._engines[parts[0].engine].generate(**arguments)
        together: list[Any] = [None] * sum(len(part.places) for part in parts)

        async def run(part: _Part) -> None:
            results = await self._engines[part.engine].generate(**part_of(arguments, part.prompts))
            for place, result in zip(part.places, results, strict=True):
                together[place] = result

        try:
            async with asyncio.TaskGroup() as tasks:
                for part in parts:
                    self._until_done(tasks.create_task(run(part)), part)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return together

    async def stream(self, **arguments: Any) -> AsyncGenerator[dict[str, Any], None]:
        """See EngineProcess. A list of prompts is shared out."""
        with self._naming(arguments):
            async with aclosing(self._stream(arguments)) as events:
                async for event in events:
                    yield event

    async def _stream(self, arguments: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        parts = self._parts(arguments)
        if len(parts) == 1:
            with self._working(parts[0]):
                async with aclosing(self._engines[parts[0].engine].stream(**arguments)) as events:
                    async for event in events:
                        yield event
            return
        # events, the first error, or None: a part has ended. Full, it makes the engines' events fewer and longer.
        arrived: asyncio.Queue[Any] = asyncio.Queue(len(parts))

        async def run(part: _Part) -> None:
            try:
                stream = self._engines[part.engine].stream(**part_of(arguments, part.prompts))
                async with aclosing(stream) as events:
                    async for event in events:
                        await arrived.put({**event, "index": part.places[event.get("index", 0)]})
            except Exception as error:  # the reader raises it
                await arrived.put(error)
            else:
                await arrived.put(None)

        tasks = [self._until_done(asyncio.ensure_future(run(part)), part) for part in parts]
        try:
            ended = 0
            while ended < len(tasks):
                came = await arrived.get()
                if isinstance(came, Exception):
                    raise came
                if came is None:
                    ended += 1
                else:
                    yield came
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def open_program(self, program: ir.Program, sink: ir.Sink) -> PlacedSession:
        """See EngineProcess. Its first segment decides where it runs."""
        return PlacedSession(self._begin_program, program, sink)

    async def call(self, method: Method, *arguments: Any, **options: Any) -> Any:
        """Call a method of all engines, as of one."""
        if method == "hold_prefix":  # kept where it was computed
            _, ids, extra_key = (*arguments, None)[:3]
            future = future_of(list(ids), None, extra_key)
            best = max(self._up(), key=lambda i: self._placement.found(i, future), default=0)
            return await self._engines[best].call(method, *arguments)
        if method == "init_weights_update_group":
            return await self._enter_group(options)
        try:
            if method in (*UPDATES, "release_memory_occupation"):
                async with self._updating:
                    run = self._update if method in UPDATES else self._of_all
                    answers = await run(method, *arguments, **options)
            else:
                answers = await self._of_all(method, *arguments, **options)
        except SglError:
            known = [its.lora_name for its in self.config.lora_paths or ()]
            if method == "load_lora_adapter" and arguments[0] not in known:
                with contextlib.suppress(SglError):  # by all or by none
                    await self._of_all("unload_lora_adapter", arguments[0])
            raise
        finally:
            # Also if one failed: the others' caches are empty.
            if method.startswith(("flush_cache", "update_weights", "release_memory")):
                for engine in range(len(self._engines)):
                    self._placement.forget(engine)
        if method == "check_ledger":
            return [f"engine {i + 1}: {breach}" for i, its in answers for breach in its]
        each = [its for _, its in answers]
        if method == "get_server_info":
            return {**each[0], "internal_states": [state for its in each for state in its["internal_states"]]}
        return _TOGETHER.get(method, _first)(each)

    async def _update(self, method: Method, **options: Any) -> list[tuple[int, Any]]:
        """Have all take an update, or none: each checks it first. One that is restarted meanwhile has the weights of
        its checkpoint."""
        first = next(iter(self._up()), 0)

        def of(engine: int) -> dict[str, Any]:
            is_copy = {"is_copy": engine != first} if method == "update_weights_from_tensor" else {}
            return {**options, "hold": True, **is_copy}

        try:
            held = [i for i, _ in await self._of_each(method, of)]
        except BaseException:
            with contextlib.suppress(SglError):
                await self._of_all("drop_update")
            raise
        found = await asyncio.gather(
            *(self._engines[i].call("commit_update") for i in held), return_exceptions=True
        )
        answers = [(i, each) for i, each in zip(held, found, strict=True) if not isinstance(each, BaseException)]
        for each in found if not answers else ():
            assert isinstance(each, BaseException), "all failed"
            raise each
        return answers

    async def _enter_group(self, place: dict[str, Any]) -> tuple[bool, str] | None:
        """Each rank of each engine enters, engine by engine: all or none."""
        if len(self._up()) < len(self._engines):
            raise EngineDead(f"{len(self._up())} of {len(self._engines)} engines are running, and a group has all")
        rank, size = place["rank_offset"], place["world_size"]
        ranks = [rank] * len(self._engines)
        if type(rank) is type(size) is int:  # else each refuses it
            ranks = [rank + i * self.config.num_ranks for i in range(len(self._engines))]
            if ranks[-1] + self.config.num_ranks > size:  # before any waits for others
                number = len(self._engines) * self.config.num_ranks
                message = f"rank_offset={rank}: {number} ranks of all engines from there on are more than {size}"
                raise InvalidRequest(message, param="world_size")
        method: Method = "init_weights_update_group"
        calls = (
            its.call(method, **place | {"rank_offset": first})
            for its, first in zip(self._engines, ranks, strict=True)
        )
        entering = [asyncio.ensure_future(call) for call in calls]
        done, _ = await asyncio.wait(entering, return_when=asyncio.FIRST_EXCEPTION)
        if not (failed := [task for task in done if task.exception() is not None]):
            return None
        leaving = {task for task in entering if task not in failed}
        while leaving:  # also those that still enter, and would wait for all
            for its, task in zip(self._engines, entering, strict=True):
                if task in leaving:
                    with contextlib.suppress(SglError):  # it may not have begun
                        await its.call("destroy_weights_update_group", place["group_name"])
            _, leaving = await asyncio.wait(leaving, timeout=_RETRY_SECONDS)
        errors = await asyncio.gather(*entering, return_exceptions=True)
        raise next(each for each, task in zip(errors, entering, strict=True) if task is failed[0])

    def note_adapter(self, method: Method, name: str, *about: Any) -> None:
        """See EngineProcess; also of those that are being restarted."""
        for engine in self._engines:
            engine.note_adapter(method, name, *about)

    def note_model(self, path: str) -> None:
        """See EngineProcess."""
        for engine in self._engines:
            engine.note_model(path)

    async def _of_all(self, method: Method, *arguments: Any, **options: Any) -> list[tuple[int, Any]]:
        return await self._of_each(method, lambda _: options, *arguments)

    async def _of_each(
        self, method: Method, options: Callable[[int], dict[str, Any]], *arguments: Any
    ) -> list[tuple[int, Any]]:
        """The answers of those that serve, and go on serving meanwhile. Raises EngineDead if none does."""
        up = self._up() or [0]
        calls = (self._engines[i].call(method, *arguments, **options(i)) for i in up)
        found = await asyncio.gather(*calls, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, EngineDead):
                raise each
        answers = [(i, each) for i, each in zip(up, found, strict=True) if not isinstance(each, BaseException)]
        if not answers:
            raise EngineDead("no engine is running: they are starting, or being restarted")
        return answers

    def heartbeat_age(self) -> float:
        """The longest of those that serve; infinite if none does."""
        return max((self._engines[i].heartbeat_age() for i in self._up()), default=math.inf)

    def silence(self) -> float:
        """The longest of those that serve."""
        return max((self._engines[i].silence() for i in self._up()), default=math.inf)

    async def close(self) -> None:
        """Stop them all. Idempotent."""
        await asyncio.gather(*(engine.close() for engine in self._engines))

    def _up(self) -> list[int]:
        return [i for i, engine in enumerate(self._engines) if engine.is_up and engine.heartbeat_age() < math.inf]

    def _parts(self, arguments: dict[str, Any]) -> list[_Part]:
        """What each engine gets of a call. Neighbours in a long list stay together, so that placing them takes a
        bounded time. Raises EngineDead."""
        up, extra_key, params = self._up(), arguments.get("extra_key"), arguments.get("sampling_params")
        if isinstance(adapter := arguments.get("lora_path"), str):  # shares nothing with others
            extra_key = f"{adapter}\0{extra_key}"
        prompt = arguments.get("prompt") if arguments.get("input_ids") is None else arguments["input_ids"]
        context = self.config.context_length
        if not has_list_of_prompts(arguments):
            return [_Part(*self._placement.place(future_of(prompt, params, extra_key, context), up))]
        prompts = prompt or []
        samples = self._samples(arguments) if len(prompts) <= self.config.max_requests_per_call else None
        if not samples:  # an engine refuses it
            return [_Part(*self._placement.place(future_of(None, None), up))]
        size = -(-len(prompts) // _MOST_PLACED)
        bundles = [range(first, min(first + size, len(prompts))) for first in range(0, len(prompts), size)]
        futures = []
        for its in bundles:
            of_it = slice(its.start, its.stop)
            its_params = params[of_it] if isinstance(params, (list, tuple)) else params
            futures.append(future_of_prompts(prompts[of_it], its_params, samples[of_it], extra_key, context))
        parts: dict[int, _Part] = {}
        place = 0
        for its, (engine, work) in zip(bundles, self._placement.place_all(futures, up), strict=True):
            part = parts.setdefault(engine, _Part(engine, 0.0))  # its prompts stay in order
            part.work += work
            part.prompts += its
            place, first = place + sum(samples[its.start : its.stop]), place
            part.places += range(first, place)
        return list(parts.values())

    def _samples(self, arguments: dict[str, Any]) -> list[int] | None:
        """The number of samples of each prompt; None for what an engine refuses as a whole."""
        samples, rids = samples_of(arguments), arguments.get("rid")
        limits = self.config.max_requests_per_call, self.config.max_queued_requests
        if samples is None or any(most is not None and sum(samples) > most for most in limits):
            return None
        return None if isinstance(rids, list) and len(_names(rids)) < len(rids) else samples

    def _until_done(self, task: asyncio.Task[None], part: _Part) -> asyncio.Task[None]:
        """Count a part's work until then, also if the task is cancelled before it begins."""
        task.add_done_callback(lambda _: self._placement.end(part.engine, part.work))
        return task

    @contextlib.contextmanager
    def _naming(self, arguments: dict[str, Any]) -> Iterator[None]:
        """While the caller's rids are in use. Raises InvalidRequest for one that is already, on any engine."""
        rids, owner = arguments.get("rid"), arguments.get("owner")
        names = {(owner, rid) for rid in _names(rids if isinstance(rids, list) else [rids])}
        for _, rid in names & self._rids:
            raise InvalidRequest(f"rid {rid!r} is in use by another unfinished request", param="rid")
        self._rids |= names
        try:
            yield
        finally:
            self._rids -= names

    @contextlib.contextmanager
    def _working(self, part: _Part) -> Iterator[None]:
        try:
            yield
        finally:
            self._placement.end(part.engine, part.work)

    def _begin_program(
        self, program: ir.Program, sink: ir.Sink, segment: ir.Segment
    ) -> tuple[RemoteSession, Callable[[], None]]:
        """Open it where it is going to run; also what to call when it has ended."""
        engine, work = self._placement.place(future_of_program(program, segment), self._up())
        has_ended = False

        def end() -> None:
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                self._placement.end(engine, work)

        def noted(event: ir.Event) -> None:
            if isinstance(event, ir.Done):
                end()
            sink(event)

        try:
            return self._engines[engine].open_program(program, noted), end
        except BaseException:
            end()
            raise

    def _restarted(self, rank: int) -> None:
        self._placement.forget(rank)


class PlacedSession:
    """A program of one of several engines; see lang.backends.base.Session."""

    def __init__(self, begin: _Begin, program: ir.Program, sink: ir.Sink) -> None:
        self._begin = partial(begin, program, sink)
        self._context = contextvars.copy_context()  # its opener's
        self._session: RemoteSession | None = None
        self._end: Callable[[], None] = lambda: None
        self._is_cancelled = False

    def send(self, segment: ir.Segment) -> None:
        """Send the next segment; the first one opens the program. Raises what opening raises."""
        if self._is_cancelled:
            return
        if self._session is None:
            self._session, self._end = self._context.run(self._begin, segment)
        self._session.send(segment)

    def cancel(self) -> None:
        """Cancel the program. Idempotent."""
        self._is_cancelled = True
        self._end()
        if self._session is not None:
            self._session.cancel()


def _first(answers: list[Any]) -> Any:
    return answers[0]


_TOGETHER: dict[Method, Callable[[list[Any]], Any]] = {
    "flush_cache": all,
    "continue_generation": all,
    "release_memory_occupation": added,
    "end_kv_transfer": added,  # a lease is one engine's
    "stop_profile": ", ".join,
}
"""What several engines' answers to a method are together, unless it is the first one's."""


def _replica(config: EngineConfig, rank: int) -> EngineConfig:
    seed = None if config.random_seed is None else config.random_seed + rank * _SEEDS_APART
    return replace(config, dp_rank=rank, random_seed=seed)


def _names(rids: list[Any]) -> set[str]:
    return {rid for rid in rids if isinstance(rid, str)}
