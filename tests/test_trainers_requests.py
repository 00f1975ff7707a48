"""The requests of trainers' rollout code, in its order and with its bodies: slime, miles, verl's server adapter and
AReaL, each of which raises at any status but 200."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import torch

from sgl import Engine
from sgl.runtime.server import native
from tests.live_server import LiveServer, served, slow_steps, state_of
from tests.patience import PATIENCE, wait_until
from tests.test_server_training import NORM, norm, shared
from tests.tiny_models import tiny_checkpoint

PROMPT = [5, 17, 30, 8, 100, 41]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), vocab_size=259, with_tokenizer=True)
    with Engine(folder, device="cpu", max_total_tokens=2048, check_ledger=True) as engine:
        yield engine


@pytest.fixture
def server(engine: Engine) -> Iterator[LiveServer]:
    before = norm(engine)
    with served(engine) as server:
        yield server
        engine.update_weights({NORM: before}, weight_version="default")


class Trainer:
    """Whoever calls a server, and takes nothing but 200."""

    def __init__(self, server: LiveServer) -> None:
        self.url = server.url

    def post(self, path: str, body: Any = None) -> Any:
        answer = requests.post(f"{self.url}/{path}", json=body or {}, timeout=PATIENCE)
        assert answer.status_code == 200, (path, answer.text)
        return answer.json()

    def get(self, path: str) -> requests.Response:
        answer = requests.get(f"{self.url}/{path}", timeout=PATIENCE)
        assert answer.status_code == 200, (path, answer.text)
        return answer


def flattened(named: dict[str, torch.Tensor]) -> str:
    """A bucket of tensors, as SGLang's FlattenedTensorBucket has it and a trainer ships it."""
    from tests.test_server_training import FlattenedTensorMetadata

    places, start = [], 0
    for name, tensor in named.items():
        end = start + tensor.numel() * tensor.element_size()
        places.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, tensor.numel()))
        start = end
    whole = torch.cat([tensor.flatten().view(torch.uint8) for tensor in named.values()])
    return shared({"flattened_tensor": whole, "metadata": places})


def slimes_body(num_tokens: int) -> dict[str, Any]:
    """A rollout as slime asks for it, with its defaults."""
    return {
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": num_tokens,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "sampling_seed": 42,
        },
        "return_logprob": True,
        "input_ids": PROMPT,
    }


def test_slimes_colocated_step(server: LiveServer, engine: Engine) -> None:
    """The engine gives its memory to the trainer, gets weights while its KV is still away, and goes on."""
    trainer, before = Trainer(server), norm(engine)
    trainer.get("health_generate")
    info = trainer.get("server_info").json()
    assert (info["tp_size"], info["pp_size"], info["disaggregation_mode"]) == (1, 1, None)
    answer = trainer.post("generate", slimes_body(12))
    tokens = [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert tokens == answer["output_ids"]
    assert answer["meta_info"]["finish_reason"]["type"] in ("length", "stop")
    assert answer["meta_info"]["weight_version"] == "default"

    trainer.get("flush_cache")
    trainer.post("release_memory_occupation")
    trainer.post("resume_memory_occupation", {"tags": ["weights"]})
    trainer.post("pause_generation")
    trainer.get("flush_cache")
    parts = [flattened({NORM: before + 1}), flattened({"model.embed_tokens.weight": torch.rand(259, 64)})]
    for part in parts:
        body = {"serialized_named_tensors": [part], "load_format": "flattened_bucket", "flush_cache": False}
        assert trainer.post("update_weights_from_tensor", {**body, "weight_version": "1"})["success"]
    trainer.post("continue_generation")
    trainer.post("resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})

    assert trainer.get("get_weight_version").json()["weight_version"] == "1"
    torch.testing.assert_close(norm(engine), before + 1)
    assert trainer.post("generate", slimes_body(12))["meta_info"]["weight_version"] == "1"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def num_requests(trainer: Trainer) -> int:
    """As slime counts what a server has to do."""
    loads = trainer.get("v1/loads?include=core").json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def test_loads_have_sections_and_ranks(server: LiveServer) -> None:
    found = Trainer(server).get("v1/loads").json()
    assert (found["dp_rank_count"], found["aggregate"]["total_reqs"]) == (1, 0)
    [load] = found["loads"]
    assert load["memory"]["token_capacity"] == load["max_total_num_tokens"] == 2048
    [load] = Trainer(server).get("v1/loads?dp_rank=0&include=core,queues").json()["loads"]
    assert ("memory" in load, load["queues"]) == (False, {"waiting": 0})
    for query, said in (
        ("dp_rank=1", "there are 1 engines"),
        ("dp_rank=-1", "a number from 0"),
        ("include=queue", "did you mean 'queues'"),
        ("format=prometheus", "/metrics"),
    ):
        answer = server.get(f"/v1/loads?{query}")
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_slime_aborts_until_a_server_is_idle(
    server: LiveServer, engine: Engine, threads: ThreadPoolExecutor
) -> None:
    """Partial rollouts: each has the tokens that it got, and goes on from them later."""
    trainer = Trainer(server)
    with slow_steps(engine):
        rollouts = [threads.submit(trainer.post, "generate", slimes_body(400)) for _ in range(4)]
        wait_until(lambda: state_of(engine)["num_running_reqs"] == 4)
        assert num_requests(trainer) == 4
        trainer.post("abort_request", {"abort_all": True})
    assert num_requests(trainer) == 0
    for rollout in rollouts:
        meta = rollout.result()["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] < 400
        going_on = slimes_body(400 - meta["completion_tokens"])
        going_on["input_ids"] = PROMPT + [entry[1] for entry in meta["output_token_logprobs"]]
        going_on["sampling_params"]["max_new_tokens"] = 2
        assert trainer.post("generate", going_on)["meta_info"]["completion_tokens"] == 2


def events_of(trainer: Trainer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with requests.post(
        trainer.url + "/generate", json={**body, "stream": True}, stream=True, timeout=PATIENCE
    ) as got:
        assert got.status_code == 200
        for line in got.iter_lines():
            if line.startswith(b"data:") and line != b"data: [DONE]":
                yield json.loads(line[5:])


def test_slimes_streaming_rollouts_read_all_logprobs_from_each_event(engine: Engine) -> None:
    body = slimes_body(12)
    body |= {"top_logprobs_num": 2, "logprob_start_len": 0}
    body["sampling_params"] |= {"temperature": 0, "ignore_eos": True, "n": 2}
    with served(engine, parity_logprobs=True) as server:
        trainer = Trainer(server)
        whole = trainer.post("generate", body)
        for i, result in enumerate(whole):
            events = [event for event in events_of(trainer, body) if event["index"] == i]
            assert len(events) > 3
            for event in events:
                meta, length = event["meta_info"], len(event["output_ids"])
                assert meta["output_token_logprobs_length"] == len(meta["output_token_logprobs"]) == length
                assert [entry[1] for entry in meta["output_token_logprobs"]] == event["output_ids"]
                assert len(meta["output_top_logprobs"]) == length
                assert len(meta["input_token_logprobs"]) == len(PROMPT)
            assert event["output_ids"] == result["output_ids"]
            names = [name for name in meta if name.endswith("_logprobs")]
            assert [len(meta[name]) for name in names] == [len(result["meta_info"][name]) for name in names]


def test_events_with_all_logprobs_have_a_limit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "MAX_LOGPROBS", 40)
    with served(engine, parity_logprobs=True) as server:
        *some, last = events_of(Trainer(server), areals_body(60, PROMPT))
        assert len(some) > 3
        assert "more than 40 log-probabilities" in last["error"]["message"]


def areals_body(num_tokens: int, input_ids: list[int]) -> dict[str, Any]:
    sampling_params = {
        "top_p": 1.0,
        "top_k": 100_000_000,
        "max_new_tokens": num_tokens,
        "temperature": 1.0,
        "stop_token_ids": [],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "frequency_penalty": 0.0,
    }
    body = {"input_ids": input_ids, "image_data": [], "sampling_params": sampling_params}
    return {**body, "return_logprob": True, "stream": False}


def test_areals_interrupted_rollouts(server: LiveServer, engine: Engine, threads: ThreadPoolExecutor) -> None:
    """A pause aborts what runs and what waits; each rollout goes on from its tokens, of which there may be none."""
    trainer = Trainer(server)
    trainer.get("health")

    def rollout() -> tuple[list[int], list[float], int]:
        tokens, logprobs, interruptions, reason = list[int](), list[float](), -1, ""
        while reason not in ("stop", "tool_calls", "length"):
            interruptions += 1
            meta = trainer.post("generate", areals_body(60 - len(tokens), PROMPT + tokens))["meta_info"]
            reason, message = meta["finish_reason"]["type"], meta["finish_reason"].get("message", "")
            if reason == "abort" and message.startswith("Abort before prefill"):
                continue
            tokens += [entry[1] for entry in meta["output_token_logprobs"]]
            logprobs += [entry[0] for entry in meta["output_token_logprobs"]]
        return tokens, logprobs, interruptions

    with slow_steps(engine):
        rollouts = [threads.submit(rollout) for _ in range(4)]
        wait_until(lambda: state_of(engine)["num_running_reqs"] == 4)
        trainer.post("pause_generation")
        wait_until(lambda: state_of(engine)["num_queue_reqs"] == 4)  # they came back
        trainer.post("pause_generation")  # of those that wait
        wait_until(lambda: state_of(engine)["num_queue_reqs"] == 4)
    trainer.post("update_weights_from_tensor", {"serialized_named_tensors": [shared([(NORM, norm(engine) + 1)])]})
    trainer.post("continue_generation")
    for each in rollouts:
        tokens, logprobs, interruptions = each.result()
        assert len(tokens) == len(logprobs) == 60
        assert interruptions >= 2


def test_verls_server_adapter(server: LiveServer, engine: Engine, threads: ThreadPoolExecutor) -> None:
    """Its methods, in the order of a step."""
    trainer, before = Trainer(server), norm(engine)
    trainer.get("health_generate")
    trainer.get("flush_cache")
    body = {"sampling_params": {"n": 1, "max_new_tokens": 8}, "input_ids": PROMPT, "return_logprob": True}
    assert len(trainer.post("generate", {**body, "image_data": []})["output_ids"]) <= 8
    trainer.post("abort_request", {"rid": "", "abort_all": True})
    trainer.post("abort_request", {"rid": "none", "abort_all": False})
    trainer.post("release_memory_occupation", {"tags": ["kv_cache"]})
    trainer.post("resume_memory_occupation", {"tags": ["weights"]})
    update = {"serialized_named_tensors": [shared([(NORM, before + 2)])], "load_format": None, "flush_cache": False}
    assert trainer.post("update_weights_from_tensor", update)["success"]
    trainer.get("flush_cache")
    trainer.post("resume_memory_occupation", {"tags": ["kv_cache"]})
    torch.testing.assert_close(norm(engine), before + 2)
    assert trainer.post("generate", body)["meta_info"]["cached_tokens"] == 0


def test_miles_series_of_updates(server: LiveServer, engine: Engine) -> None:
    """What runs is computed anew under the new weights."""
    trainer, before = Trainer(server), norm(engine)
    trainer.post("pause_generation", {"mode": "retract"})
    trainer.get("flush_cache")
    assert trainer.post("begin_weight_update", {"selector": "target"})["success"]
    update = {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": "3", "selector": "target"}
    update["serialized_named_tensors"] = [flattened({NORM: before + 3})]
    assert trainer.post("update_weights_from_tensor", update)["success"]
    assert trainer.post("end_weight_update")["success"]
    trainer.post("update_weight_version", {"new_version": "4", "abort_all_requests": False})
    trainer.post("continue_generation")
    torch.testing.assert_close(norm(engine), before + 3)
    assert trainer.get("model_info").json()["weight_version"] == "4"
    for path, body in (("begin_weight_update", {}), ("update_weights_from_tensor", update)):
        answer = server.post(f"/{path}", {**body, "selector": "draft"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "selector")


def test_a_series_begins_where_updates_are_taken() -> None:
    with Engine(device="cpu", quantization="int4", max_total_tokens=512) as engine, served(engine) as server:
        for path in ("begin_weight_update", "end_weight_update", "post_process_weights"):
            answer = server.post(f"/{path}", {})
            assert (answer.status_code, answer.json()["success"]) == (400, False)
            assert "quantised weights" in answer.json()["message"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/update_weights_from_ipc", "/update_weights_from_tensor"),
        ("/weights_checker", "/get_weights_by_name"),
        ("/load_lora_adapter_from_tensors", "/load_lora_adapter"),
        ("/get_load", "/v1/loads"),
        ("/open_session", "what prompts share is cached"),
    ],
)
def test_what_is_not_there_says_what_is(server: LiveServer, path: str, said: str) -> None:
    answer = server.post(path, {})
    assert answer.status_code == 404
    assert said in answer.json()["error"]["message"]
