"""State shared by one server's handlers."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib.metadata
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from sgl.errors import EngineDead, GrammarError, InvalidRequest
from sgl.formats.calls import FORMATS, channels_of, formats_of
from sgl.formats.detect import CallStyle, call_style, shows_tools
from sgl.runtime.config import ServerConfig
from sgl.runtime.lora_options import LoraPath
from sgl.runtime.metrics import ServerMetrics
from sgl.runtime.requests.arguments import has_list_of_prompts
from sgl.runtime.requests.results import failure_of
from sgl.runtime.requests.threads import in_turns
from sgl.runtime.server.bodies import Body
from sgl.runtime.server.deadline import Deadline, deadline
from sgl.runtime.server.engine_process import EngineProcess
from sgl.runtime.server.errors import Forbidden
from sgl.runtime.server.history import History, note
from sgl.runtime.server.identity import Caller, current_caller
from sgl.runtime.server.reader import BodyReader, is_small
from sgl.runtime.server.replicas import Replicas, added
from sgl.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # needs an extra
    from sgl.runtime.server.tracing import Tracer

logger = logging.getLogger(__name__)

T = TypeVar("T")
VERSION = importlib.metadata.version("sgl")

_Ways = Iterator[tuple[frozenset[str], dict[str, Any]]]
Looser = Callable[[], _Ways]
"""Makes sampling parameters that hold fewer tools to their schemas, each with the names of those that are loosened."""
_LOOSER = "arguments of tools that are not strict may be any, since schemas cannot be enforced, of these: %s: %s"


@dataclass
class Service:
    """One server's state."""

    config: ServerConfig
    engine: EngineProcess | Replicas
    chat_template: str | None = None  # overrides the model's
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    """What completions and chats are sampled with where they do not say."""
    tracer: Tracer | None = None
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    started: float = field(default_factory=time.time)
    history: History = field(default_factory=History)
    is_draining: bool = False
    grpc_port: int | None = None
    _constants: dict[str, Any] | None = None  # not asked for yet
    abort_programs: Callable[[Caller], None] = lambda caller: None
    """Fails a caller's programs."""

    @cached_property
    def reader(self) -> BodyReader:
        """The reader of request bodies."""
        return BodyReader(self.config)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the chat template tells the model of tools; says in the log, once, that it does not."""
        is_shown = shows_tools(self._render)
        if not is_shown:
            logger.warning(
                "the chat template does not show tools: the model %s is not told of those that requests have. "
                "A template that does can be given as --chat-template",
                self.model_name,
            )
        return is_shown

    @cached_property
    def call_style(self) -> CallStyle | None:
        """How the model writes calls: by --tool-call-parser and the chat template, which is read. Reasoning in
        harmony's channels is told by who reads these."""
        parser = self.config.tool_call_parser
        channels = channels_of(self.config.reasoning_parser or "")
        formats = FORMATS if channels is None else (channels,)
        if parser is not None:
            formats = formats_of(parser)
        found = call_style(self._render, formats)
        return CallStyle(formats[0]) if found is None and formats is not FORMATS else found

    @property
    def _render(self) -> Callable[..., str]:
        own: dict[str, Any] = {} if self.chat_template is None else {"chat_template": self.chat_template}
        return partial(self.tokenizer.apply_chat_template, **own)

    @property
    def model_name(self) -> str:
        """The model's name in the OpenAI API."""
        return self.config.served_model_name or self.engine.config.model_name

    @property
    def adapters(self) -> tuple[LoraPath, ...]:
        """The LoRA adapters that requests may name."""
        return self.engine.config.lora_paths or ()

    def has_adapter(self, name: str) -> bool:
        """Whether there is one of this name."""
        return any(its.lora_name == name for its in self.adapters)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises InvalidRequest without one."""
        if self.engine.tokenizer is None:
            raise InvalidRequest("this server runs without a tokenizer: send input_ids to /generate")
        return self.engine.tokenizer

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its output, at most."""
        length = self.engine.config.context_length
        assert length is not None, "options were resolved"
        return length

    def check_is_up(self, *, within: float = math.inf, heard_within: float = math.inf) -> None:
        """Raise EngineDead if the engine is gone, at a step for `within` seconds, or silent for `heard_within`."""
        if self.is_draining:
            raise EngineDead("the server is shutting down")
        age = self.engine.heartbeat_age()
        if age == math.inf:
            raise EngineDead("the engine is not running")
        if age > within:
            raise EngineDead(f"the engine has been at one step for {age:.0f} s")
        if self.engine.silence() > heard_within:
            raise EngineDead(f"nothing was heard of the engine's process for {self.engine.silence():.0f} s")

    def check_admin(self, caller: Caller) -> None:
        """Raise Forbidden if an admin key exists and the caller has another."""
        if self.config.admin_api_key is not None and not caller.is_admin:
            raise Forbidden("this is for the admin's key")

    async def body(self, request: web.Request, model: type[Body]) -> Body:
        """Read the JSON body (`BodyReader.read`) and start its `timeout`."""
        body = await self.reader.read(request, model, self.context_length)
        if (due := deadline.get()) is not None:
            due.set(getattr(body, "timeout", None))
        return body

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a thread; small requests have their own pool."""
        pool = self._threads[is_small.get()]
        call = partial(contextvars.copy_context().run, function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    @cached_property
    def _threads(self) -> dict[bool, ThreadPoolExecutor]:
        names = {True: "sgl-small", False: "sgl-large"}
        return {which: ThreadPoolExecutor(4, thread_name_prefix=name) for which, name in names.items()}

    def close(self) -> None:
        """End pools and processes."""
        self.reader.close()
        for pool in self._threads.values():
            pool.shutdown(wait=False)

    async def generate(self, *, otherwise: Any = None, **arguments: Any) -> Any:
        """EngineProcess.generate, counted. otherwise: a Looser, for where the constraint of the arguments cannot be
        enforced."""
        self.check_is_up()
        self.history.generates()
        if otherwise is None:
            results = await self.engine.generate(**_of_client(arguments))
        else:
            results = await self._generated(arguments, otherwise)
        async for result in in_turns(results if isinstance(results, list) else [results]):
            self.finished(result["meta_info"])
        return results

    async def _generated(self, arguments: dict[str, Any], otherwise: Looser) -> Any:
        left = otherwise()
        while True:
            try:
                results = await self.engine.generate(**_of_client(arguments))
                for failure in map(failure_of, results if isinstance(results, list) else [results]):
                    if isinstance(failure, GrammarError):
                        raise failure
            except GrammarError as error:
                arguments = await self._looser(arguments, left, error)
            else:
                return results

    async def _streamed(self, arguments: dict[str, Any], otherwise: Looser) -> AsyncGenerator[dict[str, Any], None]:
        left = otherwise()
        has_begun = False
        while True:
            try:
                async with contextlib.aclosing(self.engine.stream(**_of_client(arguments))) as events:
                    async for event in events:
                        if not has_begun and isinstance(failure := failure_of(event), GrammarError):
                            raise failure
                        has_begun = True
                        yield event
            except GrammarError as error:
                if has_begun:
                    raise
                arguments = await self._looser(arguments, left, error)
            else:
                return

    async def _looser(self, arguments: dict[str, Any], left: _Ways, error: GrammarError) -> dict[str, Any]:
        """Arguments with the next looser constraint. Raises the error if there is none."""
        found = await self.in_thread(next, left, None)
        if found is None:
            raise error
        names, params = found
        logger.warning(_LOOSER, ", ".join(sorted(names)), error)
        return {**arguments, "sampling_params": params}

    async def stream(self, *, otherwise: Any = None, **arguments: Any) -> AsyncGenerator[dict[str, Any], None]:
        """EngineProcess.stream, timed and counted. otherwise: as for `generate`."""
        self.check_is_up()
        self.history.generates()
        began = time.monotonic()
        latest: dict[int, float] = {}
        due = deadline.get() or Deadline()
        if otherwise is None:
            source = self.engine.stream(**_of_client(arguments))
        else:
            source = self._streamed(arguments, otherwise)
        async with contextlib.aclosing(source) as events:
            async for event in due.each(events) if due.is_set else events:
                now, index = time.monotonic(), event.get("index", 0)
                if index in latest:
                    self.metrics.inter_token_latency.observe(now - latest[index])
                else:
                    self.metrics.time_to_first_token.observe(now - began)
                latest[index] = now
                if event["meta_info"]["finish_reason"] is not None:
                    self.finished(event["meta_info"])
                yield event

    @property
    def max_total_tokens(self) -> int:
        """Tokens of KV of all engines."""
        config = self.engine.config
        assert config.max_total_tokens is not None, "options were resolved"
        return config.max_total_tokens * config.dp_size

    async def info(self) -> dict[str, Any]:
        """What the engine says of itself. Raises EngineDead."""
        info: dict[str, Any] = await self.engine.call("get_server_info")
        return info

    async def engine_state(self) -> dict[str, Any]:
        """The counts of all engines right now. Raises EngineDead."""
        states = (await self.info())["internal_states"]
        if len(states) == 1:
            return dict(states[0])
        together = {name: added([its[name] for its in states]) for name in states[0]}
        prompts = together["prompt_tokens"]
        return {**together, "cache_hit_rate": together["cached_tokens"] / prompts if prompts else 0.0}

    async def constant(self, name: str) -> Any:
        """What the engine says of its model. Raises EngineDead."""
        if self._constants is None:
            self._constants = await self.info()
        return self._constants[name]

    async def takes_images(self) -> bool:
        """Whether the model does. Raises EngineDead."""
        return bool(await self.constant("has_image_understanding"))

    async def abort(self, rid: str | None, caller: Caller) -> None:
        """Abort a rid's requests, or with None all of the caller's. Raises Forbidden; see `check_admin`."""
        if rid is None and not caller.is_admin:
            self.check_admin(caller)
            self.abort_programs(caller)
        await self.engine.call("abort", rid, None if caller.is_admin else caller.owner)

    def finished(self, meta: dict[str, Any], *, name: str = "generate", parent: Any = None) -> None:
        """Count and trace a finished generation; see Tracer.generation."""
        if "e2e_latency" in meta:  # scoring candidates is no request of its own
            self.metrics.finished(meta)
        if (current := note.get()) is not None:
            current.finished(meta)
        if self.tracer is not None:
            self.tracer.generation(meta, name=name, parent=parent)


def _of_client(arguments: dict[str, Any]) -> dict[str, Any]:
    """Add owner and time left to a call's arguments. Raises RequestTimeout."""
    arguments = {**arguments, "owner": current_caller.get().owner}
    due = deadline.get()
    left = None if due is None else due.left(is_list=has_list_of_prompts(arguments))
    return arguments if left is None else {**arguments, "timeout": left}
