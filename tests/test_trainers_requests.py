"""The requests of trainers' rollout code, in its order and with its bodies: slime, miles, verl's server adapter and
AReaL, each of which raises at any status but 200."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import torch

from sgl import Engine
from tests.live_server import LiveServer, served
from tests.patience import PATIENCE
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
