"""The engine process as the event loop sees it: started, watched, restarted. Without one, callers get EngineDead."""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import importlib
import itertools
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from sgl.errors import AdapterError, EngineDead, SglError
from sgl.lang.ir import nodes as ir
from sgl.runtime.config import EngineConfig
from sgl.runtime.forks import Fork, fork_from_here, forker
from sgl.runtime.loop.submission import Detail, Output
from sgl.runtime.lora_options import LoraPath
from sgl.runtime.model.checkpoint import find_checkpoint
from sgl.runtime.program.sender import current_sender
from sgl.runtime.requests.results import CallResults, Header, NativeResult
from sgl.runtime.server.channel import LoopChannel, Message
from sgl.runtime.server.identity import request_id, working_for
from sgl.runtime.server.methods import Method
from sgl.runtime.server.watchdog import TICK_SECONDS, Watchdog
from sgl.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SILENT_SECONDS = 2.0  # four beats missing
_ENDING_SECONDS = 5.0  # for a clean exit
_MAX_DELAY = 30.0  # seconds between restarts
_WORKER = "sgl.runtime.server.worker"
_CODE = f"from {_WORKER} import main; main()"


def prepare() -> None:
    """Import what an engine and a tokenizer need, and have engines forked from what this process is then: nothing is
    imported twice, and the next engine starts in a fraction of the time."""
    for module in (_WORKER, "transformers.models.auto.tokenization_auto"):
        importlib.import_module(module)
    fork_from_here(_WORKER)


class EngineProcess:
    """An engine in its own process. Methods and callbacks run on the event loop that called `start`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        configure: Callable[[], None],
        watchdog_timeout: float = 300.0,
        name: str = "the engine",
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """`configure` sets up the process's logging; it must be importable there. `name`: in the log."""
        self.config = config  # with every "auto" decided once it runs
        self.tokenizer: Tokenizer | None = None
        self._configure = configure
        self._name = name
        self._on_restart = on_restart
        self._watchdog_timeout = watchdog_timeout
        self._watchdog = Watchdog()  # of the current process
        self._ids = itertools.count()
        self._waiting: dict[int, _Waiter | _ProgramWaiter] = {}
        self._process: Fork | None = None
        self._channel: LoopChannel | None = None
        self._is_up = False
        self._age, self._heard = math.inf, 0.0
        self._started: asyncio.Future[EngineConfig] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def is_up(self) -> bool:
        """Whether the process has started and not ended."""
        return self._is_up

    async def start(self, *, with_tokenizer: bool = True) -> None:
        """Start the process and load the model. Raises what Engine raises, and EngineDead."""
        loop = asyncio.get_running_loop()
        loading = None
        if with_tokenizer and not self.config.skip_tokenizer_init:
            loading = loop.run_in_executor(None, _tokenizer, self.config)
        try:
            self.config = await self._start()
        finally:
            if loading is not None:
                with contextlib.suppress(SglError):  # the engine reports it better
                    self.tokenizer = await loading
        self._spawn(self._watch())

    async def generate(self, **arguments: Any) -> Any:
        """Engine.async_generate; cancelling aborts the requests. Raises EngineDead."""
        async with self._call("generate", arguments) as waiter:
            while not waiter.is_complete:
                call, _ = await waiter.progress()
            return await call.async_result()

    async def stream(self, **arguments: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Events of Engine.async_generate(stream=True). Closing aborts what is unfinished."""
        async with self._call("generate", {**arguments, "stream": True}) as waiter:
            while not waiter.is_complete:
                # Outputs that queued up become one event a request: whoever falls behind does less.
                call, uids = await waiter.progress()
                for uid in uids:
                    yield await call.async_event(uid)

    def open_program(self, program: ir.Program, sink: ir.Sink) -> RemoteSession:
        """Engine.open_program with events on this loop. Raises InvalidRequest and EngineDead."""
        channel = self._up()
        call_id = next(self._ids)
        self._waiting[call_id] = waiter = _ProgramWaiter(sink, lambda: self._waiting.pop(call_id, None))
        channel.send(("program", call_id, waiter.identity, tuple(current_sender.get()), program))
        return RemoteSession(channel, call_id)

    async def call(self, method: Method, *arguments: Any, **options: Any) -> Any:
        """Call an engine method that takes and returns plain data."""
        async with self._call("call", method, arguments, options) as waiter:
            return (await waiter.items())[0]

    def note_adapter(self, method: Method, name: str, *about: Any) -> None:
        """Have the options say which LoRA adapters there are: a process that replaces this one loads them, too."""
        kept = [its for its in self.config.lora_paths or () if its.lora_name != name]
        added = [LoraPath(name, *about)] if method == "load_lora_adapter" else []
        self.config = replace(self.config, lora_paths=(*kept, *added))

    def note_model(self, path: str) -> None:
        """Have a process that replaces this one load the checkpoint that this one has the weights of now."""
        self.config = replace(self.config, model_path=path)

    def heartbeat_age(self) -> float:
        """Seconds that the engine has been silent or at its current step; infinite when dead."""
        if not self._is_up:
            return math.inf
        silent = self.silence()
        return self._age + silent if self._age > 0 or silent > _SILENT_SECONDS else 0.0

    def silence(self) -> float:
        """Seconds since the process was last heard; it beats even while busy."""
        return time.monotonic() - self._heard

    async def close(self) -> None:
        """Stop the engine; waiting callers get EngineDead. Idempotent."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._process is None:
            return
        if self._channel is not None:
            self._channel.send(("stop",))
        await self._ended(self._process)

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def _call(self, kind: str, *arguments: Any) -> Any:
        """Send a request and collect its answers; leaving early aborts it."""
        channel = self._up()
        call_id, waiter = next(self._ids), _Waiter(is_request=kind == "generate")
        self._waiting[call_id] = waiter
        channel.send((kind, call_id, waiter.identity, *arguments))
        try:
            yield waiter
        finally:
            if self._waiting.pop(call_id, None) is not None and kind == "generate" and not waiter.is_complete:
                channel.send(("abort", call_id))

    def _up(self) -> LoopChannel:
        if not self._is_up or self._channel is None:
            raise EngineDead("the engine is not running: it is starting, or being restarted")
        return self._channel

    def _receive(self, channel: LoopChannel, messages: list[Message]) -> None:
        if channel is not self._channel:
            return
        self._heard = time.monotonic()
        for kind, *rest in messages:
            if kind == "outputs":
                for call_id, uid, text, token_ids, reason, packed in rest[0]:
                    detail = None if packed is None else Detail(*packed)
                    self._answer(call_id, Output(uid, text, token_ids, reason, detail))
            elif kind == "accepted":
                self._accepted(*rest)
            elif kind == "beat":
                self._age = rest[0]
                self._watchdog.heard(rest[0])
            elif kind in ("ready", "failed"):
                assert self._started is not None
                if kind == "ready":
                    self._is_up, self._age, self._watchdog = True, 0.0, Watchdog()
                    self._started.set_result(rest[0])
                else:
                    self._started.set_exception(rest[0])
            else:
                self._answer(*rest)

    def _answer(self, call_id: int, item: Any) -> None:
        waiter = self._waiting.get(call_id)
        if waiter is not None:
            waiter.put(item)

    def _accepted(self, call_id: int, is_list: bool, headers: list[tuple[Any, ...]]) -> None:
        waiter = self._waiting.get(call_id)
        if isinstance(waiter, _Waiter):
            waiter.call = waiter.call or CallResults(is_list)  # several such messages may come
            for header in itertools.starmap(Header, headers):
                token_text = self.tokenizer.token_text if header.with_text and self.tokenizer is not None else None
                waiter.call.add(NativeResult(header, token_text, waiter.began, as_tuples=True))

    # ── the life of the process ─────────────────────────────────────────────────────────────────────────────────

    async def _start(self) -> EngineConfig:
        self._started = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        given = base64.b64encode(pickle.dumps((self.config, self._configure))).decode()
        with theirs:
            self._process = await asyncio.to_thread(lambda: forker(_WORKER).fork(_CODE, [given], theirs))
        atexit.register(self._process.kill)
        self._channel = LoopChannel(self._receive, self._lost)
        await self._channel.open(ours)
        return await self._started

    def _lost(self, channel: LoopChannel) -> None:
        """The process ended."""
        if channel is not self._channel:
            return
        channel.close()
        self._channel, was_up, self._is_up = None, self._is_up, False
        error = EngineDead("the engine process ended; it is being restarted")
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineDead("the engine process ended while it was starting"))
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting.values():
            waiter.put(error)
        if was_up and not self._is_closed:
            number = sum(waiter.is_request for waiter in waiting.values())
            with working_for(""):  # the current task may belong to a request
                logger.error("the process of %s ended: %d requests failed, restarting it", self._name, number)
                self._spawn(self._restart())

    async def _restart(self) -> None:
        for delay in itertools.chain((0.0, 1.0, 2.0, 4.0, 8.0, 16.0), itertools.repeat(_MAX_DELAY)):
            await asyncio.sleep(delay)
            process = self._process
            assert process is not None, "it was started"
            await self._ended(process)
            atexit.unregister(process.kill)
            logger.info("starting %s again (it ended with code %s)", self._name, process.poll())
            self._on_restart()
            try:
                await self._start()
            except SglError as error:
                logger.error("%s did not start: %s", self._name, error)
                if isinstance(error, AdapterError):  # its files have changed since it was loaded
                    gone = [
                        its for its in self.config.lora_paths or () if str(error.path).startswith(its.lora_path)
                    ]
                    for its in gone:
                        self.note_adapter("unload_lora_adapter", its.lora_name)
            else:
                logger.info("%s serves again", self._name)
                return

    async def _watch(self) -> None:
        """Kill a process stuck in a step. Keep its own watchdog: the process may be replaced while this waits."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            process, watchdog = self._process, self._watchdog
            stuck = watchdog.tick()
            if not self._is_up or stuck <= self._watchdog_timeout or process is None or process.poll() is not None:
                continue
            logger.error("%s made no step for %.0f s: its threads' stacks follow", self._name, stuck)
            os.kill(process.pid, signal.SIGUSR1)
            await asyncio.sleep(TICK_SECONDS)
            if watchdog.tick() > self._watchdog_timeout and watchdog is self._watchdog and process.poll() is None:
                process.kill()
                await asyncio.sleep(TICK_SECONDS)

    @staticmethod
    async def _ended(process: Fork) -> None:
        """Wait for a process whose channel is closed; kill it if it hangs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, _ENDING_SECONDS)
            return
        process.kill()
        await asyncio.to_thread(process.wait)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Waiter:
    """One request's answers, in order."""

    def __init__(self, *, is_request: bool) -> None:
        self.is_request = is_request  # not a look at the engine
        self.identity = request_id.get()
        self.began = time.monotonic()
        self.call: CallResults | None = None  # once accepted
        self._items: list[Any] = []
        self._arrived: asyncio.Future[None] | None = None  # resolved when something arrives

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def items(self) -> list[Any]:
        """What has arrived, at least one item. Raises the first error."""
        if not self._items:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        items, self._items = self._items, []
        for item in items:
            if isinstance(item, Exception):
                raise item
        return items

    async def progress(self) -> tuple[CallResults, list[int]]:
        """The call, and the uids of new outputs. Raises what ended the whole call."""
        outputs = await self.items()
        assert self.call is not None, "outputs follow"
        for output in outputs:
            self.call.absorb(output)
        return self.call, list(dict.fromkeys(output.uid for output in outputs))

    @property
    def is_complete(self) -> bool:
        """Whether all outputs have ended."""
        return self.call is not None and not self.call.unfinished


class _ProgramWaiter:
    """Forwards a program's events. An error ends it."""

    is_request = True

    def __init__(self, sink: ir.Sink, done: Callable[[], object]) -> None:
        self.identity = request_id.get()
        self._sink = sink
        self._done = done

    def put(self, item: Any) -> None:
        if isinstance(item, Exception):
            self._sink(ir.NodeFailed(None, None, item))
            item = ir.Done()
        if isinstance(item, ir.Done):
            self._done()
        self._sink(item)


class RemoteSession:
    """A program in the engine process; see lang.backends.base.Session."""

    def __init__(self, channel: LoopChannel, call_id: int) -> None:
        self._channel = channel
        self._call_id = call_id

    def send(self, segment: ir.Segment) -> None:
        """Send the next segment."""
        self._channel.send(("segment", self._call_id, segment))

    def cancel(self) -> None:
        """Cancel the program. Idempotent."""
        self._channel.send(("cancel", self._call_id))


def _tokenizer(config: EngineConfig) -> Tokenizer:
    """Load the engine's tokenizer here too. Raises ModelError."""
    return Tokenizer.load(config.tokenizer_path or find_checkpoint(config.model_path))
