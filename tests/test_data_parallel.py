"""`sgl serve --dp 2`: two engines that look like one."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch

import sgl
from sgl.errors import ConfigError
from sgl.runtime import devices
from sgl.runtime.config import EngineConfig
from sgl.runtime.engine import Engine
from sgl.runtime.server.replicas import added
from tests.patience import PATIENCE, wait_until
from tests.test_server_process import Served, ranks_of

EMBEDDED = Path("embedded")
GREEDY = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served(EMBEDDED, "--dp", "2", "--max-total-tokens", "16384", "--random-seed", "3")
    yield served
    served.stop()
    served.process.communicate()


@pytest.fixture(scope="module")
def one() -> Iterator[Engine]:
    with Engine(device="cpu", random_seed=3) as engine:
        yield engine


def finished(server: Served) -> list[int]:
    return [state["finished"] for state in server.get("/server_info").json()["internal_states"]]


def post(server: Served, path: str, body: Any, **options: Any) -> requests.Response:
    return requests.post(server.url + path, json=body, timeout=PATIENCE, **options)


def test_a_list_of_prompts_is_shared_out_and_comes_back_in_order(server: Served, one: Engine) -> None:
    prompts = [f"Line {i}: once" for i in range(20)]
    params: list[dict[str, Any]] = [{**GREEDY, "n": 1 + i % 3} for i in range(20)]
    before = finished(server)
    body = {"text": prompts, "sampling_params": params, "return_logprob": [i % 2 == 0 for i in range(20)]}
    found = post(server, "/generate", body).json()
    expected = one.generate(prompts, params)
    assert [each["text"] for each in found] == [each["text"] for each in expected]
    assert ["output_token_logprobs" in each["meta_info"] for each in found] == [
        i % 2 == 0 for i in range(20) for _ in range(1 + i % 3)
    ]
    shares = [now - then for now, then in zip(finished(server), before, strict=True)]
    assert sum(shares) == len(found)
    assert min(shares) > len(found) // 4


def test_streams_of_a_list_keep_their_numbers(server: Served, one: Engine) -> None:
    prompts = [f"{i} and" for i in range(6)]
    params = [{**GREEDY, "n": 1 + (i == 2)} for i in range(6)]
    texts: dict[int, str] = {}
    with post(
        server, "/generate", {"text": prompts, "sampling_params": params, "stream": True}, stream=True
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                texts[event["index"]] = event["text"]
    assert [texts[i] for i in range(7)] == [each["text"] for each in one.generate(prompts, params)]


def test_what_one_engine_refuses_is_refused(server: Served) -> None:
    for body, words in [
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid 'x' is given to two requests"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid has 1 values for 2 prompts"),
        ({"text": [], "sampling_params": {}}, "the list of prompts is empty"),
        ({"text": ["a", "b"], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": ["a"] * 700, "sampling_params": {"n": 100}}, "70000 requests"),
        ({"text": ["a", "b", "c"], "sampling_params": [{}, {}, {"top_p": 7}]}, "top_p"),
        ({"text": ["a", "b"], "sampling_params": {"n": "two"}}, "n must be"),
    ]:
        answer = post(server, "/generate", body)
        assert answer.status_code == 400, body
        assert words in answer.json()["error"]["message"]
    assert post(server, "/generate", {"text": "a", "sampling_params": GREEDY}).status_code == 200


def test_a_rid_is_one_requests_on_all_engines_and_aborts_it(server: Served) -> None:
    long = {"max_new_tokens": 900, "ignore_eos": True}
    answers: list[Any] = []
    body = {"text": ["a", "b"], "rid": ["mine", "yours"], "sampling_params": long}
    asker = threading.Thread(target=lambda: answers.append(post(server, "/generate", body).json()))
    asker.start()
    wait_until(lambda: server.get("/v1/status").json()["engine"]["num_running_reqs"] == 2, "both run")
    for _ in range(2):  # on either engine
        taken = post(server, "/generate", {"text": "c", "rid": "mine", "sampling_params": GREEDY})
        assert (taken.status_code, "rid 'mine' is in use" in taken.text) == (400, True)
    assert post(server, "/abort_request", {"rid": "mine"}).status_code == 200
    wait_until(lambda: server.get("/v1/status").json()["engine"]["num_running_reqs"] == 1, "one is left")
    assert post(server, "/abort_request", {"abort_all": True}).status_code == 200
    asker.join(PATIENCE)
    assert [each["meta_info"]["finish_reason"]["type"] for each in answers[0]] == ["abort", "abort"]


def test_conversations_stay_where_their_turns_are_cached(server: Served) -> None:
    chats = [[{"role": "user", "content": f"{i}: " + "tell me more of the sea " * 8}] for i in range(6)]
    for turn in range(3):
        for chat in chats:
            prompt = "".join(f"<{m['role']}>{m['content']}\n" for m in chat)
            result = post(server, "/generate", {"text": prompt, "sampling_params": GREEDY}).json()
            if turn:
                assert result["meta_info"]["cached_tokens"] > 0.6 * result["meta_info"]["prompt_tokens"]
            chat += [{"role": "assistant", "content": result["text"]}, {"role": "user", "content": f"go on {turn}"}]


@sgl.function
def program(s: Any, topic: str) -> None:
    s += "A line on " + topic + ": " + sgl.gen("line", max_tokens=8, temperature=0)
    branches = s.fork(2)
    for branch in branches:
        branch += " and" + sgl.gen("more", max_tokens=4, temperature=0.8)
    if branches[0]["more"] != "never":  # read: what follows is another segment
        s += branches[0]["more"] + sgl.select("mood", ["glad", "sad"])


def test_programs_run_on_one_engine_each_and_write_the_same(server: Served, one: Engine) -> None:
    backend = sgl.RuntimeEndpoint(server.url)
    rows = [{"topic": f"number {i}"} for i in range(12)]
    before = finished(server)
    found = program.run_batch(rows, backend=backend, seed=7)
    expected = program.run_batch(rows, backend=one, seed=7)
    assert [state.text() for state in found] == [state.text() for state in expected]
    shares = [now - then for now, then in zip(finished(server), before, strict=True)]
    assert min(shares) > sum(shares) // 4


def test_embeddings_and_counts_are_put_together(server: Served, one: Engine) -> None:
    answer = post(server, "/v1/embeddings", {"input": ["one", "two", "three", "four"]}).json()
    expected = one.encode(["one", "two", "three", "four"])
    for left, right in zip(answer["data"], expected, strict=True):
        np.testing.assert_allclose(left["embedding"], right["embedding"], atol=1e-5)
    info = server.get("/server_info").json()
    assert (info["dp_size"], info["tp_size"], len(info["internal_states"])) == (2, 1, 2)
    status = server.get("/v1/status").json()
    assert status["max_total_tokens"] == 2 * info["max_total_tokens"]
    assert status["engine"]["released_memory"] == {}
    assert status["engine"]["is_paused"] is False
    assert status["engine"]["finished"] == sum(state["finished"] for state in info["internal_states"])
    metrics = server.get("/metrics").text
    assert f'sgl:max_total_num_tokens{{model_name="embedded"}} {float(status["max_total_tokens"])}' in metrics
    assert post(server, "/flush_cache", {}).status_code == 200
    states = server.get("/server_info").json()["internal_states"]
    assert [state["kv_evictable_tokens"] for state in states] == [0, 0]


def test_requests_without_seeds_differ_on_the_engines(server: Served) -> None:
    body = {"text": "Once upon", "sampling_params": {"max_new_tokens": 24, "temperature": 1.5}}
    assert len({post(server, "/generate", body).json()["text"] for _ in range(6)}) == 6


def test_the_other_engine_serves_while_one_is_restarted(server: Served) -> None:
    pids = server.engine_pids()
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGKILL)
    served = 0
    while len(set(server.engine_pids()) - set(pids)) < 1 or served < 20:
        answer = post(server, "/generate", {"text": f"{served} times", "sampling_params": GREEDY})
        served += answer.status_code == 200
        assert answer.status_code in (200, 503)  # what was under way there
    wait_until(lambda: len(server.get("/server_info").json()["internal_states"]) == 2, "both serve again")
    assert server.get("/health").status_code == 200


@pytest.mark.slow
def test_replicas_of_ranks() -> None:
    server = Served(EMBEDDED, "--dp", "2", "--tp", "2", "--max-total-tokens", "4096")
    try:
        info = server.get("/server_info").json()
        assert (info["dp_size"], info["tp_size"], len(info["internal_states"])) == (2, 2, 2)
        ranks = [pid for engine in server.engine_pids() for pid in ranks_of(engine)]
        assert len(ranks) == 2
        texts = post(server, "/generate", {"text": ["a b c", "1 2 3"], "sampling_params": GREEDY}).json()
        with Engine(device="cpu") as engine:
            assert [each["text"] for each in texts] == [
                each["text"] for each in engine.generate(["a b c", "1 2 3"], GREEDY)
            ]
        server.stop()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), "all ranks end")
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


def test_an_engine_alone_is_no_replica() -> None:
    for options in ({"dp_size": 2}, {"dp_size": 2, "dp_rank": 2}, {"dp_rank": 1}):
        with pytest.raises(ConfigError, match=r"a server runs several engines \(`sgl serve --dp`\)"):
            Engine(device="cpu", **options)  # type: ignore[arg-type]


def test_too_few_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    for options, words, option in [
        (
            {"tp_size": 4},
            r"tp_size=4, pp_size=1 and dp_size=1 take 4 GPUs, from cuda on; torch sees 2 here \(H200, H200\)",
            "tp_size",
        ),
        ({"dp_size": 3, "dp_rank": 0}, "dp_size=3 take 3 GPUs", "dp_size"),
        ({"dp_size": 2, "dp_rank": 0, "device": "cuda:1"}, "take 2 GPUs, from cuda:1 on", "dp_size"),
        ({"device": "cuda:2"}, "device='cuda:2': torch sees 2", "device"),
    ]:
        with pytest.raises(ConfigError, match=words) as refused:
            devices.device_for(EngineConfig(**{"device": "cuda", **options}))  # type: ignore[arg-type]
        assert refused.value.option == option
    for rank in range(2):
        device = devices.device_for(EngineConfig(device="cuda", dp_size=2, dp_rank=rank))
        assert (device.index or 0) == rank


def test_counts_of_engines_are_added_by_name() -> None:
    assert added([{"kv_cache": 3}, {"kv_cache": 4, "weights": 5}]) == {"kv_cache": 7, "weights": 5}
    assert (added([True, False]), added([1, 2]), added([{}, {"a": 0}])) == (True, 3, {"a": 0})
