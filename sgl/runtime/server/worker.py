"""The engine process: an Engine at one end of a channel. Messages and their answers:

    ("generate", id, for, arguments) → ("accepted", id, is_list, headers) …, outputs …, or ("raised", id, error)
    ("abort", id)                    nothing more of that call is answered
    ("call", id, for, method, arguments, options) → ("returned", id, value) or ("raised", id, error)
    ("program", id, for, sender, program) → ("event", id, event) …, or ("raised", id, error)
    ("segment", id, segment), ("cancel", id)
    ("stop",)                        ends the process

`for` is the X-Request-Id for the log; `sender` names the program's opener. Unasked: ("ready", config) or ("failed",
error) once; ("beat", age) twice a second; ("outputs", [(id, output …) …]) after each step."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import faulthandler
import gc
import logging
import math
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from sgl.errors import SglError
from sgl.lang.ir import nodes as ir
from sgl.runtime.config import EngineConfig
from sgl.runtime.engine import Engine
from sgl.runtime.forks import fork_from_here, set_process_name
from sgl.runtime.loop.submission import Output
from sgl.runtime.parallel.group import FOLLOWER
from sgl.runtime.program.sender import Sender, current_sender
from sgl.runtime.program.session import ProgramSession
from sgl.runtime.requests.arguments import has_list_of_prompts
from sgl.runtime.requests.builder import check_num_logprobs, num_logprobs
from sgl.runtime.requests.images import has_images, pool_for
from sgl.runtime.requests.results import PreparedCall
from sgl.runtime.requests.waiting import check, settled
from sgl.runtime.sampling_params import CONSTRAINTS
from sgl.runtime.scheduler.request import FinishReason
from sgl.runtime.server.channel import Message, ThreadChannel
from sgl.runtime.server.identity import working_for
from sgl.runtime.server.methods import WAITING, Method

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
HEADERS = 512
"""Requests that one message accepts: the event loop makes results of them, while everybody else waits."""
_QUICK_LENGTH = 2048  # characters or token ids


def main() -> None:
    """Run the process. Arguments: its options and what sets up its logging, pickled, in base64; the channel's file
    descriptor."""
    set_process_name("sgl engine")
    config, configure = pickle.loads(base64.b64decode(sys.argv[1]))
    _run(socket.socket(fileno=int(sys.argv[2])), config, configure)


def _run(end: socket.socket, config: EngineConfig, configure: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the server drains first and says when
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    configure()
    if config.num_ranks > 1:
        fork_from_here(FOLLOWER)
    try:
        engine = Engine(**dataclasses.asdict(config))
    except SglError as error:
        channel = ThreadChannel(end, lambda _: None, lambda: None)
        channel.send(("failed", error))
        channel.close()
        return
    gc.collect()
    gc.freeze()  # exempt loaded objects from collections, which stop all threads
    _Worker(end, engine).run()


@dataclass(frozen=True, slots=True)
class _Call:
    id: int
    identity: str
    prepared: PreparedCall


class _Worker:
    def __init__(self, end: socket.socket, engine: Engine) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self._calls: dict[int, _Call | None] = {}  # None: being prepared
        self._call_of: dict[int, _Call] = {}  # by uid
        self._programs: dict[int, ProgramSession] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="sgl-worker")
        self._controls = ThreadPoolExecutor(2, thread_name_prefix="sgl-controls")  # never queue behind requests
        self._receiving = ThreadPoolExecutor(1, thread_name_prefix="sgl-receiving")  # in the order of the asks
        self._channel = ThreadChannel(end, self._receive, self._stop.set)

    def run(self) -> None:
        self._channel.send(("ready", self._engine.config))
        while not self._stop.wait(BEAT_SECONDS):
            age = self._engine.heartbeat_age()
            self._channel.send(("beat", age))
            if age == math.inf:  # dead: let a new process take over
                break
        with contextlib.suppress(SglError):
            self._engine.shutdown()
        self._channel.close()
        os._exit(0)  # even if other threads wait

    def _receive(self, messages: list[Message]) -> None:
        for kind, *arguments in messages:
            if kind == "stop":
                self._stop.set()
            else:
                getattr(self, f"_on_{kind}")(*arguments)

    def _on_generate(self, call_id: int, identity: str, arguments: dict[str, Any]) -> None:
        self._calls[call_id] = None
        if _is_quick(arguments):  # a thread switch would take longer
            self._generate(call_id, identity, arguments)
        else:
            pool_for(arguments, self._pool).submit(self._generate, call_id, identity, arguments)

    def _generate(self, call_id: int, identity: str, arguments: dict[str, Any]) -> None:
        """Prepare a call; submit it when its constraints are compiled or its deadline passes. Blocks no thread."""
        with working_for(identity), self._answering(call_id):
            prepared = self._engine.prepare(**arguments)
            submit = partial(self._submit, call_id, identity, prepared)
            if all(map(Future.done, prepared.compiling)):
                submit()
            else:
                compiled = settled(prepared.compiling, prepared.deadline)
                compiled.add_done_callback(lambda _: self._pool.submit(submit))

    def _submit(self, call_id: int, identity: str, prepared: PreparedCall) -> None:
        with working_for(identity), self._answering(call_id):
            check(prepared.compiling)
            check_num_logprobs(sum(num_logprobs(s.request, streams=s.stream) for s in prepared.submissions))
            headers = [result.header for result in prepared.results.values()]
            with self._lock:
                if call_id not in self._calls:
                    return
                self._calls[call_id] = call = _Call(call_id, identity, prepared)
                self._call_of |= dict.fromkeys(prepared.uids, call)
            for i in range(0, len(headers), HEADERS):
                part = [tuple(header) for header in headers[i : i + HEADERS]]
                self._channel.post(("accepted", call_id, prepared.is_list, part))
            tokens = sum(header.prompt_len for header in headers)
            logger.debug("accepted %s: %d prompt tokens", " ".join(header.rid for header in headers), tokens)
            self._engine.submit(prepared, self)
            if call_id not in self._calls:  # aborted meanwhile, or finished
                self._engine.abandon(prepared)

    def put(self, outputs: list[Output]) -> None:
        """Send a step's outputs, on the loop's thread; see router.Sink."""
        packed = []  # pickling the objects takes several times as long
        for o in outputs:
            call = self._call_of.get(o.uid)
            if call is not None:
                detail = None if o.detail is None else tuple(o.detail)
                packed.append((call.id, o.uid, o.text, o.token_ids, o.finish_reason, detail))
                if o.finish_reason is not None:
                    self._finished(call, o.uid, o.finish_reason)
        self._channel.send(("outputs", packed))

    def _finished(self, call: _Call, uid: int, reason: FinishReason) -> None:
        prepared = call.prepared
        prepared.results[uid].finish_reason = reason
        prepared.unfinished -= 1
        with working_for(call.identity):
            logger.debug("finished %s: %s", prepared.results[uid].header.rid, reason.type)
        if not prepared.unfinished:
            self._abandon(call.id)

    def _abandon(self, call_id: int) -> None:
        """Abandon a call and what still runs of it."""
        with self._lock:
            call = self._calls.pop(call_id, None)
        if call is not None:
            for uid in call.prepared.uids:
                del self._call_of[uid]
            self._engine.abandon(call.prepared)

    _on_abort = _abandon

    def _on_call(
        self, call_id: int, identity: str, method: Method, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        def call() -> None:
            with working_for(identity), self._answering(call_id):
                value = getattr(self._engine, method)(*arguments, **options)
                self._channel.send(("returned", call_id, value))

        if method == "update_weights_from_distributed":
            self._receiving.submit(call)
        elif method in WAITING:
            threading.Thread(target=call, name="sgl-waiting", daemon=True).start()
        else:
            self._controls.submit(call)

    def _on_program(self, call_id: int, identity: str, sender: tuple[Any, ...], program: ir.Program) -> None:
        def sink(event: ir.Event) -> None:
            if isinstance(event, ir.Done):
                self._programs.pop(call_id, None)
                with working_for(identity):
                    logger.debug("program %s is done", program.name)
            elif isinstance(event, ir.NodeFailed) and not isinstance(event.error, SglError):
                # other errors cannot be pickled
                event.error = RuntimeError(f"{type(event.error).__name__}: {event.error}")
            self._channel.send(("event", call_id, event))

        with working_for(identity), self._answering(call_id):
            current_sender.set(Sender(*sender))  # this thread opens nothing else
            self._programs[call_id] = self._engine.open_program(program, sink)

    def _on_segment(self, call_id: int, segment: ir.Segment) -> None:
        with self._answering(call_id):
            if call_id in self._programs:
                self._programs[call_id].send(segment)

    def _on_cancel(self, call_id: int) -> None:
        session = self._programs.pop(call_id, None)
        if session is not None:
            session.cancel()

    @contextlib.contextmanager
    def _answering(self, call_id: int) -> Any:
        try:
            yield
        except SglError as error:
            self._raised(call_id, error)
        except Exception as error:  # not every error can be pickled
            logger.exception("a request failed")
            self._raised(call_id, RuntimeError(f"{type(error).__name__}: {error}"))

    def _raised(self, call_id: int, error: Exception) -> None:
        self._abandon(call_id)
        if (session := self._programs.pop(call_id, None)) is not None:
            session.cancel()
        self._channel.send(("raised", call_id, error))


def _is_quick(arguments: dict[str, Any]) -> bool:
    """Whether preparing takes under a millisecond: one short prompt, no constraint."""
    given, params = arguments.get("prompt") or arguments.get("input_ids"), arguments.get("sampling_params") or {}
    return (
        isinstance(given, str | list)
        and len(given) <= _QUICK_LENGTH
        and not has_list_of_prompts(arguments)
        and not has_images(arguments)
        and isinstance(params, dict)
        and not any(params.get(name) is not None for name in CONSTRAINTS)
    )
