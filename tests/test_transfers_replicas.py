"""Servers of several engines on either side: each offers by its own address, and any pulls from any."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig
from sgl.runtime.engine import Engine
from sgl.runtime.server.replicas import Replicas
from tests.patience import PATIENCE, wait_until
from tests.ports import free_port
from tests.test_server_process import Served
from tests.tiny_models import tiny_checkpoint

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_total_tokens": 768,
    "max_running_requests": 4,
    "page_size": 8,
    "random_seed": 1,
    "check_ledger": True,
    "skip_tokenizer_init": True,
    "dp_size": 2,
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
OFFERED: dict[str, Any] = {"sampling_params": {"max_new_tokens": 0}, "return_kv_transfer_params": True}
_RNG = random.Random(3)
PROMPTS = [[_RNG.randrange(3, 300) for _ in range(90)] for _ in range(8)]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "key").write_text("0123456789abcdef0123456789abcdef")
    return {**OPTIONS, "model_path": str(tiny_checkpoint(folder)), "disaggregation_key_file": str(folder / "key")}


@pytest.fixture(params=["tcp", "cuda_ipc"])
def engines(options: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[Callable[[str], list[Engine]]]:
    """Makes both engines of a server."""
    with ExitStack() as stack:

        def make(mode: str) -> list[Engine]:
            port = {"disaggregation_port": free_port(2)} if mode == "prefill" else {}
            each = {**options, "disaggregation_mode": mode, "disaggregation_transport": request.param, **port}
            each["disaggregation_buffer_mb"] = 1  # as many as there are pages
            return [stack.enter_context(Engine(**each, dp_rank=rank)) for rank in range(2)]

        yield make


class Called:
    """An engine in this process, as the server's process calls it."""

    is_up = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def heartbeat_age(self) -> float:
        return 0.0

    async def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._engine, method)(*arguments)


def test_any_engine_pulls_from_any(engines: Callable[[str], list[Engine]], options: dict[str, Any]) -> None:
    prefill, decode = engines("prefill"), engines("decode")
    with Engine(**{**options, "dp_size": 1, "disaggregation_key_file": None}) as plain:
        expected = [its["output_ids"] for its in plain.generate(input_ids=PROMPTS, sampling_params=GREEDY)]
    ports = set()
    for prompt, wanted, (one, other) in zip(PROMPTS, expected, itertools.cycle(itertools.product(prefill, decode))):
        params = one.generate(input_ids=prompt, **OFFERED)["kv_transfer_params"]
        ports.add(params["port"])
        answer = other.generate(input_ids=prompt, sampling_params=GREEDY, kv_transfer_params=params)
        assert answer["output_ids"] == wanted
        assert answer["meta_info"]["cached_tokens"] == 88
    assert len(ports) == 2
    assert max(ports) == min(ports) + 1
    for engine in (*prefill, *decode):
        assert engine.check_ledger() == []


def test_a_lease_ends_whichever_engine_has_it(
    engines: Callable[[str], list[Engine]], options: dict[str, Any]
) -> None:
    prefill = engines("prefill")
    params = [
        engine.generate(input_ids=prompt, **OFFERED)["kv_transfer_params"]
        for prompt, engine in zip(PROMPTS, itertools.cycle(prefill), strict=False)
    ]
    server = Replicas(EngineConfig(**{**options, "dp_size": 2}), configure=print)
    server._engines = [Called(engine) for engine in prefill]  # type: ignore[misc]
    assert asyncio.run(server.call("end_kv_transfer", params[:5])) == 5
    assert asyncio.run(server.call("end_kv_transfer", params)) == 3
    states = [engine.get_server_info()["internal_states"][0] for engine in prefill]
    assert [state["num_transfer_leases"] for state in states] == [0, 0]


def test_ports_that_there_are_not_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="disaggregation_port=65535 leaves no port for each of 2 engines"):
        Engine(**options, dp_rank=0, disaggregation_mode="prefill", disaggregation_port=65535)


@pytest.mark.slow
def test_servers_of_several_engines_answer_like_one() -> None:
    flags = ("--device", "cpu", "--max-total-tokens", "4096", "--dp", "2", "--check-ledger")
    with Engine("embedded", device="cpu", max_total_tokens=4096) as engine:
        wanted = [each["output_ids"] for each in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]
    with ExitStack() as stack:
        prefill, decode = (
            Served(Path("embedded"), *flags, "--disaggregation-mode", mode) for mode in ("prefill", "decode")
        )
        for server in (prefill, decode):
            stack.callback(server.process.communicate)
            stack.callback(server.process.kill)

        def post(server: Served, path: str, **body: Any) -> requests.Response:
            return requests.post(server.url + path, json=body, timeout=PATIENCE)

        def states(server: Served) -> list[dict[str, Any]]:
            return list(server.get("/get_server_info").json()["internal_states"])

        def computed() -> list[Any]:
            found = post(prefill, "/generate", input_ids=PROMPTS, **OFFERED).json()
            return [each["kv_transfer_params"] for each in found]

        params = computed()
        assert len({each["port"] for each in params}) == 2, "prompts are shared out"
        body = {"input_ids": PROMPTS, "sampling_params": GREEDY}
        answers = post(decode, "/generate", **body, kv_transfer_params=params).json()
        assert [each["output_ids"] for each in answers] == wanted
        pulled = [state["num_transfers_pulled"] for state in states(decode)]
        assert (sum(pulled), min(pulled) > 0) == (len(PROMPTS), True)
        wait_until(lambda: not any(state["num_transfer_leases"] for state in states(prefill)), "all were pulled")
        assert post(prefill, "/end_kv_transfer", kv_transfer_params=computed()).json()["ended"] == len(PROMPTS)
        post(decode, "/flush_cache")
        params, pids = computed(), prefill.engine_pids()
        os.kill(pids[0], signal.SIGKILL)
        answers = post(decode, "/generate", **body, kv_transfer_params=params).json()
        assert [each["output_ids"] for each in answers] == wanted, "what the other has is pulled, the rest computed"
        assert sum(state["num_transfers_failed"] for state in states(decode)) > 0
        wait_until(lambda: len(states(prefill)) == 2, "both serve again")
