"""A server on a real socket in a thread of this process, and a tiny model for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import requests

from sgl.lang.ir import nodes as ir
from sgl.runtime.config import ServerConfig
from sgl.runtime.engine import Engine
from sgl.runtime.server.engine_process import EngineProcess
from sgl.runtime.server.methods import Method
from sgl.runtime.server.sampling_defaults import sampling_defaults
from sgl.runtime.server.serve import listen, listen_for_rpc, serving
from sgl.runtime.server.service import Service
from tests.patience import PATIENCE, wait_until
from tests.tiny_models import edit_json, tiny_checkpoint

CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}[tools]{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
OPTIONS: dict[str, Any] = {"device": "cpu", "max_total_tokens": 8192, "random_seed": 1, "check_ledger": True}


def chat_checkpoint(folder: Path, context: int = 512) -> Path:
    """A tiny random model whose tokenizer has a chat template."""
    path = tiny_checkpoint(folder, with_tokenizer=True, max_position_embeddings=context)
    edit_json(path / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    return path


def state_of(engine: Engine) -> dict[str, Any]:
    """What an engine says of itself right now."""
    state: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return state


@contextlib.contextmanager
def slow_steps(engine: Engine, seconds: float = 0.01) -> Iterator[None]:
    """Every step takes so much longer: what a test does while a request runs, it does in time on any machine."""
    runner: Any = engine._loop._runner
    forward = runner.forward

    def forward_later(*arguments: Any) -> Any:
        time.sleep(seconds)
        return forward(*arguments)

    runner.forward = forward_later
    try:
        yield
    finally:
        runner.forward = forward


class LocalEngine(EngineProcess):
    """An engine in the server's own process, so that tests may look into it; see EngineProcess."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.config = engine.config
        self.tokenizer = engine.tokenizer

    async def generate(self, **arguments: Any) -> Any:
        if "pooling" in arguments:  # no argument of `generate`
            call = await asyncio.to_thread(self._engine.prepare, **arguments)
            return await asyncio.to_thread(self._engine._collected, call)
        return await self._engine.async_generate(**arguments)

    async def stream(self, **arguments: Any) -> AsyncGenerator[dict[str, Any], None]:
        events = await self._engine.async_generate(**arguments, stream=True)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    def open_program(self, program: ir.Program, sink: ir.Sink) -> Any:
        loop = asyncio.get_running_loop()

        def on_loop(event: ir.Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(sink, event)

        return self._engine.open_program(program, on_loop)

    async def call(self, method: Method, *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self._engine, method), *arguments, **options)

    def note_model(self, path: str) -> None:
        self.config = self._engine.config

    def heartbeat_age(self) -> float:
        return self._engine.heartbeat_age()

    def silence(self) -> float:
        return 0.0

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.shutdown)


class LiveServer:
    """Serves an engine until `close`; `url` is where."""

    def __init__(self, engine: Engine, *, template: str | None = None, **options: Any) -> None:
        """template: what is in the file that chat_template names."""
        self.engine = engine
        config = ServerConfig.from_options(options)
        self.service = Service(
            config,
            LocalEngine(engine),
            chat_template=template,
            sampling_defaults=sampling_defaults(config, engine.config.model_path),
        )
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.url = ""
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    async def _serve(self) -> None:
        rpc = listen_for_rpc(self.service.config)
        self.service.grpc_port = None if rpc is None else rpc.port
        async with serving(self.service, listen("127.0.0.1", 0), rpc) as self.url:
            self._ready.set()
            await self._stop.wait()
        left = asyncio.all_tasks() - {asyncio.current_task()}  # or they would end as garbage, without a loop
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def close(self) -> None:
        """Stop listening; the engine stays."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE)
        self._loop.close()

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        """The answer to a JSON body."""
        return requests.post(self.url + path, json=body, timeout=PATIENCE, **options)

    def get(self, path: str, **options: Any) -> requests.Response:
        """The answer to a GET."""
        return requests.get(self.url + path, timeout=PATIENCE, **options)


@contextlib.contextmanager
def served(engine: Engine, **options: Any) -> Iterator[LiveServer]:
    """A server of the engine, in which nothing may be left of what was asked for."""
    server = LiveServer(engine, **options)
    try:
        yield server
    finally:
        server.close()
    wait_until(lambda: not engine._calls.rids)
    assert engine.check_ledger() == []
