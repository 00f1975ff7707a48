"""Models that attend to a window in every layer: pages behind it are given back, and no token changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl.runtime.cache.windows import pages_in_window
from sgl.runtime.engine import Engine
from sgl.runtime.scheduler.scheduler import Scheduler
from tests.tiny_models import tiny_checkpoint
from tests.transformers_reference import Reference

WINDOW, CONTEXT = 16, 1024
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "check_ledger": True,
    "page_size": 4,
    "chunked_prefill_size": 24,
}
POOL = 16 * 4
"""Tokens of KV: fewer than a prompt has."""


class Windowed(Reference):
    """A checkpoint whose outputs do not end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.model.generation_config.eos_token_id = None
        rng = random.Random(1)
        self.prompts = [[rng.randrange(3, 384) for _ in range(length)] for length in (100, 3, 150)]
        self.prompts.append(self.prompts[2][:80] + self.prompts[1])
        self.outputs = [self.greedy(prompt, 500 if n == 0 else 60) for n, prompt in enumerate(self.prompts)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    shape = {"sliding_window": WINDOW, "max_position_embeddings": CONTEXT}
    return Windowed(tiny_checkpoint(tmp_path_factory.mktemp("window"), "mistral", **shape))


@pytest.fixture
def most_held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pages that any request held at most, after each step's schedule."""
    found = [0]
    schedule = Scheduler.schedule

    def noting(self: Scheduler) -> Any:
        step = schedule(self)
        rows = self.memory.rows
        found.extend(int(rows.num_pages[row] - rows.given_back[row]) for row in self.memory.running)
        return step

    monkeypatch.setattr(Scheduler, "schedule", noting)
    return found


def sampling(number: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": number, "ignore_eos": True}


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disable_overlap_schedule": False},
        {"disable_radix_cache": True, "chunked_prefill_size": 7},
        {"model_impl": "transformers"},
    ],
    ids=str,
)
def test_a_pool_that_holds_no_context_gives_the_tokens_of_transformers(
    reference: Windowed, most_held: list[int], device: str, options: dict[str, Any]
) -> None:
    backend = "torch" if device == "cuda" else None  # in float32
    options = {**OPTIONS, "max_total_tokens": POOL, "attention_backend": backend, **options}
    with Engine(reference.path, device=device, **options) as engine:
        assert engine.config.context_length == CONTEXT
        result = engine.generate(input_ids=reference.prompts[0], sampling_params=sampling(500))
        assert result["output_ids"] == reference.outputs[0]
        assert engine.check_ledger() == []
        state = engine.get_server_info()["internal_states"][0]
        assert state["kv_available_tokens"] + state["kv_evictable_tokens"] == POOL
        assert 6 < max(most_held) <= pages_in_window(WINDOW, 4, options["chunked_prefill_size"])


@pytest.mark.costly
@pytest.mark.parametrize("tokens", [POOL, 3 * POOL, 4096])
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_make_room_for_each_other_are_right(reference: Windowed, overlap: bool, tokens: int) -> None:
    options = {**OPTIONS, "max_total_tokens": tokens, "disable_overlap_schedule": not overlap}
    with Engine(reference.path, device="cpu", **options) as engine:
        prompts, params = reference.prompts[1:], sampling(60)
        for number in range(3):
            results = engine.generate(input_ids=prompts, sampling_params=params)
            assert [result["output_ids"] for result in results] == reference.outputs[1:]
            if number and tokens == 4096:  # all of it is still in the tree
                assert min(result["meta_info"]["cached_tokens"] for result in results[1:]) > 70
        again = [prompt + output[:-1] for prompt, output in zip(prompts, reference.outputs[1:], strict=True)]
        for prompt, output in zip(again, reference.outputs[1:], strict=True):
            result = engine.generate(input_ids=prompt, sampling_params=sampling(1))
            assert result["output_ids"] == output[-1:]
        assert engine.check_ledger() == []


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_logprobs_are_those_of_transformers(reference: Windowed, chunk: int) -> None:
    options = {**OPTIONS, "max_total_tokens": POOL + 64, "chunked_prefill_size": chunk}
    ids = reference.prompts[0]
    with Engine(reference.path, device="cpu", **options) as engine:
        result = engine.generate(
            input_ids=ids, sampling_params=sampling(1), return_logprob=True, logprob_start_len=0
        )
        found = [entry[0] for entry in result["meta_info"]["input_token_logprobs"][1:]]
        assert torch.allclose(torch.tensor(found), reference.logprobs(ids), atol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"disable_overlap_schedule": False}, {"model_impl": "transformers"}], ids=str
)
def test_a_window_of_one_token_sees_that_token_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    """So each token depends on the one before it. transformers' cache keeps all where it is to keep none."""
    one = Reference(tiny_checkpoint(tmp_path, "mistral", sliding_window=1))
    with torch.inference_mode():
        following = one.model(torch.arange(one.model.config.vocab_size)[:, None]).logits[:, -1].argmax(-1).tolist()
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 384) for _ in range(length)] for length in (100, 1, 30)]
    with Engine(one.path, device="cpu", **{**OPTIONS, "max_total_tokens": POOL, **options}) as engine:
        for prompt, result in zip(
            prompts, engine.generate(input_ids=prompts, sampling_params=sampling(40)), strict=True
        ):
            last, found = prompt[-1], result["output_ids"]
            assert found == [(last := following[last]) for _ in range(40)]
        assert engine.check_ledger() == []


@pytest.mark.gpu
def test_a_gpus_kernels_read_nothing_behind_the_window(reference: Windowed) -> None:
    outputs = []
    for tokens in (POOL, 4096):
        options = {**OPTIONS, "dtype": "bfloat16", "max_total_tokens": tokens}
        with Engine(reference.path, device="cuda", **options) as engine:
            result = engine.generate(input_ids=reference.prompts[0], sampling_params=sampling(500))
            outputs.append(result["output_ids"])
    assert outputs[0] == outputs[1]


def test_samples_of_one_prompt_share_what_is_in_the_window(reference: Windowed) -> None:
    params = {**sampling(60), "n": 3}
    with Engine(reference.path, device="cpu", **{**OPTIONS, "max_total_tokens": 3 * POOL}) as engine:
        results = engine.generate(input_ids=reference.prompts[2], sampling_params=params)
        assert [result["output_ids"] for result in results] == [reference.outputs[2]] * 3


def test_a_context_must_fit_where_some_layer_sees_all_of_it(tmp_path: Path) -> None:
    shape = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    path = tiny_checkpoint(tmp_path, "qwen2", max_position_embeddings=CONTEXT, **shape)
    with Engine(str(path), device="cpu", **{**OPTIONS, "max_total_tokens": POOL}) as engine:
        assert engine.config.context_length == POOL
