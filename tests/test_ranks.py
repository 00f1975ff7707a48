"""An engine of several processes answers like one of a single process, and ends when one of them does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sgl
from sgl.errors import ConfigError, EngineDead, SglError
from sgl.runtime import startup
from sgl.runtime.config import EngineConfig
from sgl.runtime.devices import device_for
from sgl.runtime.engine import Engine
from sgl.runtime.parallel import group as group_module
from sgl.runtime.parallel import ring
from tests.patience import PATIENCE, wait_until
from tests.test_models import MODELS
from tests.test_server_process import Served, ranks_of
from tests.tiny_models import tiny_checkpoint

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_total_tokens": 2048,
    "max_running_requests": 24,
    "chunked_prefill_size": 64,
    "random_seed": 5,
    "check_ledger": True,
}
LONG = {"max_new_tokens": 900, "ignore_eos": True}


def followers(engine: Engine) -> list[int]:
    group = engine._started.group
    assert group is not None
    return [process.pid for process in group._processes.values()]


@pytest.mark.parametrize(
    ("name", "num_prompts"),
    [
        ("qwen2", 60),
        *(
            pytest.param(name, 200, marks=pytest.mark.slow)
            for name in ("llama-mqa-tied", "mistral-window", "qwen2", "qwen3", "gemma3", "qwen2-window")
        ),
    ],
)
def test_ranks_generate_what_one_process_does(name: str, num_prompts: int, tmp_path: Path) -> None:
    """Prompts, greedy, drawn and constrained, in small pages, chunks and batches, with retracts."""
    path = str(tiny_checkpoint(tmp_path, **MODELS[name], with_tokenizer=True, max_position_embeddings=256))
    rng = np.random.default_rng(7)
    prompts = [rng.integers(2, 300, rng.integers(1, 90)).tolist() for _ in range(num_prompts)]
    plain: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    kinds = [
        plain,
        {"regex": "([a-f]{2,5} )*[0-9]{3}"},
        {"temperature": 0.9, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.3},
        {"temperature": 0.9, "seed": 5, "regex": "[a-z]{9}", "top_k": 7},
    ]
    params = [{**plain, **kinds[i % 4]} for i in range(len(prompts))]

    def answers(**ranks: int) -> tuple[Any, Any]:
        with Engine(path, **ranks, **OPTIONS) as engine:
            results = engine.generate(input_ids=prompts, sampling_params=params)
            scored = engine.generate(
                input_ids=prompts[:20],
                sampling_params=plain,
                return_logprob=True,
                logprob_start_len=0,
                top_logprobs_num=3,
            )
            assert engine.check_ledger() == []
            return results, scored

    one, one_scored = answers()
    for ranks in ({"tp_size": 2}, {"pp_size": 2}):
        found, scored = answers(**ranks)
        assert [result["output_ids"] for result in found] == [result["output_ids"] for result in one], ranks
        for left, right in zip(one_scored, scored, strict=True):
            assert left["output_ids"] == right["output_ids"]
            for key in ("input_token_logprobs", "output_token_logprobs"):
                values = [[entry[0] for entry in each["meta_info"][key][1:]] for each in (left, right)]
                np.testing.assert_allclose(*values, atol=1e-4)


BOTH = pytest.param({"tp_size": 2, "pp_size": 2}, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[{"tp_size": 2}, {"pp_size": 3}, BOTH], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """An engine of one process, and one of several."""
    with Engine(random_seed=5, device="cpu") as one, Engine(random_seed=5, device="cpu", **request.param) as two:
        yield one, two


@pytest.mark.costly
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "seed": 3},
        {"temperature": 1e-3, "seed": 3},
        {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.2},
        {"temperature": 0.7, "seed": 3, "logit_bias": {"17": 5.0, "4000": 6.0}, "min_new_tokens": 25},
        {"temperature": 0.7, "seed": 3, "n": 4},
        {"temperature": 0.7, "seed": 3, "regex": r"[a-z]{3,9} [0-9]{2}"},
        {"temperature": 0.8, "seed": 3, "top_p": 0.9, "json_schema": '{"enum": ["red", "green", "blue", 17]}'},
        {"temperature": 0, "json_schema": '{"properties": {"name": {"type": "string", "maxLength": 9}}}'},
    ],
    ids=range(9),
)
def test_every_way_of_sampling_is_the_same(pair: tuple[Engine, Engine], params: dict[str, Any]) -> None:
    prompts = ["Once upon a time", 'The name is Ada. {"', "a b c d", "1 + 1 ="]
    one, two = (engine.generate(prompts, {"max_new_tokens": 30, **params}) for engine in pair)
    assert [each["output_ids"] for each in two] == [each["output_ids"] for each in one]


def test_rows_of_all_kinds_share_steps(pair: tuple[Engine, Engine]) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.8, "seed": 1, "top_p": 0.7},
        {"temperature": 0.8, "seed": 1, "regex": "(yes|no|perhaps)( indeed)*"},
        {"temperature": 0.8, "seed": 1, "top_k": 9, "regex": "[0-9]{12}"},
        {"temperature": 0, "repetition_penalty": 1.2},
    ]
    params = [{"max_new_tokens": 12, **kind} for kind in kinds * 5]
    prompts = [f"Line {i}:" for i in range(len(params))]
    one, two = (
        engine.generate(prompts, params, return_logprob=True, top_logprobs_num=2, token_ids_logprob=[5, 4090])
        for engine in pair
    )
    for left, right in zip(one, two, strict=True):
        assert left["output_ids"] == right["output_ids"]
        for key in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            for entries in zip(left["meta_info"][key], right["meta_info"][key], strict=True):
                several = [[each] if key == "output_token_logprobs" else each for each in entries]
                values = [[entry[0] for entry in each] for each in several]
                np.testing.assert_allclose(*values, atol=1e-4)


@sgl.function
def program(s: Any) -> None:
    s += "Name: " + sgl.gen("name", max_tokens=6, temperature=0)
    branches = s.fork(3)
    for i, branch in enumerate(branches):
        branch += f" {i}) " + sgl.gen("x", max_tokens=5, temperature=0.7)
    s += "".join(branch["x"] for branch in branches)
    s += sgl.select("colour", ["red", "green", "light blue"]) + " " + sgl.gen("age", regex="[1-9][0-9]?")


def test_programs_scores_and_embeddings_are_the_same(pair: tuple[Engine, Engine]) -> None:
    one, two = (program.run(backend=engine, seed=4) for engine in pair)
    assert one.text() == two.text()
    scored = [engine.score("The sky is", [" blue", " seven", " a"]) for engine in pair]
    for left, right in zip(*scored, strict=True):
        np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-4)
    vectors = [engine.encode(["hello there", "x"], pooling="mean") for engine in pair]
    for left, right in zip(*vectors, strict=True):
        np.testing.assert_allclose(left["embedding"], right["embedding"], atol=1e-5)
    counts = [engine.get_server_info()["num_weights"] for engine in pair]
    assert counts[0] == counts[1]


@pytest.mark.costly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    ("busy", "ranks"),
    [
        (True, {"tp_size": 2}),
        pytest.param(False, {"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param(True, {"pp_size": 3}, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_engine(
    number: signal.Signals, busy: bool, ranks: dict[str, int]
) -> None:
    with Engine(device="cpu", rank_timeout=PATIENCE, **ranks) as engine:  # type: ignore[arg-type]
        engine.generate("a", {"max_new_tokens": 1})
        pid, *others = followers(engine)
        size = 2 + len(others)
        group = engine._started.group
        assert group is not None
        folder = group._sender._folder
        answers: list[BaseException] = []

        def ask() -> None:
            try:
                engine.generate(["hello"] * 8, LONG)
            except SglError as error:
                answers.append(error)

        askers = [threading.Thread(target=ask) for _ in range(3 * busy)]
        for asker in askers:
            asker.start()
        time.sleep(random.random())  # at any moment of a step
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            group._silence = 5.0
        for asker in askers:
            asker.join(PATIENCE)
        wait_until(lambda: engine.heartbeat_age() == float("inf"), "the engine is dead")
        words = "ended and the engine with it" if number == signal.SIGKILL else "has not answered for 5 s"
        with pytest.raises(EngineDead, match=f"rank 1 of {size} {words}"):
            engine.generate("a")
        assert len(answers) == len(askers)
        assert all(isinstance(error, EngineDead) and f"rank 1 of {size}" in str(error) for error in answers)
    assert not any(Path(f"/proc/{each}").exists() for each in (pid, *others))
    assert not folder.exists()


@pytest.mark.slow
def test_ranks_that_do_not_listen_are_ended_all_the_same() -> None:
    with Engine(device="cpu", tp_size=2, rank_timeout=600.0) as engine:
        [pid] = followers(engine)
        os.kill(pid, signal.SIGSTOP)
        end = time.monotonic() + 0.5

        def enough() -> None:
            if time.monotonic() > end:
                raise TimeoutError

        with pytest.raises(TimeoutError):  # the ring is full
            engine._started.group._sender.put(bytes(ring.CAPACITY + 1), enough)  # type: ignore[union-attr]
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("work", ["time.sleep(600)", "[engine.generate(prompt='a') for _ in range(9999)]"])
def test_ranks_end_with_the_process_that_leads_them(work: str) -> None:
    code = (
        "import time; from sgl.runtime.engine import Engine\n"
        "engine = Engine(device='cpu', tp_size=2); group = engine._started.group\n"
        f"print(group._processes[1].pid, group._sender._folder, flush=True); {work}"
    )
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    pid, folder = leader.stdout.readline().split()
    assert Path(f"/proc/{pid}").exists()
    leader.kill()
    leader.wait()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the rank ends")
    wait_until(lambda: not Path(folder).exists(), "its folder is removed")


def test_a_rank_that_cannot_start_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(group_module, "_CODE", "raise SystemExit(3)")
    with pytest.raises(EngineDead, match=r"rank 1 of 2 ended while it was starting \(code 3\)"):
        Engine(device="cpu", tp_size=2)
    code = (
        "import os, sgl.runtime.rank_start as rank_start\n"
        "def load(*_): raise ValueError('no weights for me')\n"
        "rank_start.load = load\nfrom sgl.runtime.follower import main; main()"
    )
    monkeypatch.setattr(group_module, "_CODE", code)
    with pytest.raises(EngineDead, match=r"rank 1 of 2 ended .*ValueError: no weights for me"):
        Engine(device="cpu", tp_size=2)


def test_what_cannot_be_is_refused_before_any_process_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(group_module, "RankGroup", None)
    with pytest.raises(ConfigError, match="8 attention heads, which 3 ranks cannot share"):
        Engine(device="cpu", tp_size=3)
    with pytest.raises(ConfigError, match=r"pp_size=8: .* has 7 layers"):
        Engine(device="cpu", pp_size=8)
    with pytest.raises(ConfigError, match="tp_size=0"):
        Engine(device="cpu", tp_size=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"chip {index}")
    for name in ("tp_size", "pp_size"):
        few = rf"{name}=4.* take 4 GPUs, from cuda on; torch sees 3 here \(chip 0, chip 1, chip 2\)"
        with pytest.raises(ConfigError, match=few):
            startup.start(EngineConfig(device="cuda", **{name: 4}))  # type: ignore[arg-type]


def test_gpus_are_counted_engine_by_engine_and_rank_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")

    def of(rank: int, **options: Any) -> torch.device:
        return device_for(EngineConfig(**options), rank)

    assert [of(rank, device="cuda:1", tp_size=3) for rank in range(3)] == [
        torch.device("cuda", 1 + r) for r in range(3)
    ]
    second = {"device": "cuda", "tp_size": 2, "pp_size": 2, "dp_size": 2, "dp_rank": 1}
    assert [of(rank, **second) for rank in range(4)] == [torch.device("cuda", 4 + r) for r in range(4)]
    two_hosts = {"device": "cuda:4", "tp_size": 8, "nnodes": 2}  # each counts its own
    assert [of(rank, **two_hosts) for rank in range(8)] == 2 * [torch.device("cuda", 4 + r) for r in range(4)]
    assert of(0, device="cuda") == torch.device("cuda")


@pytest.mark.slow
def test_a_server_of_two_ranks_comes_back_when_one_is_killed() -> None:
    server = Served(Path("embedded"), "--tp", "2")
    try:
        body = {"text": "Once upon", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
        expected = server.generate(body).json()["text"]
        info = server.get("/server_info").json()
        assert info["tp_size"] == 2
        [engine] = server.engine_pids()
        [rank] = ranks_of(engine)
        failed: list[Any] = []
        long = {"text": "a", "sampling_params": LONG}
        asker = threading.Thread(target=lambda: failed.append(server.generate(long)))
        asker.start()
        wait_until(lambda: server.get("/server_info").json()["internal_states"][0]["num_running_reqs"])
        os.kill(rank, signal.SIGKILL)
        asker.join(PATIENCE)
        assert failed[0].status_code == 503 or failed[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
        wait_until(lambda: server.generate(body).json().get("text") == expected, "it serves again")
        [engine] = server.engine_pids()
        [rank] = ranks_of(engine)
        server.stop()
        wait_until(lambda: not Path(f"/proc/{rank}").exists(), "the rank ends with the server")
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()
