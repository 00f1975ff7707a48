"""Models with layers that attend to a window and others: windowed pages are given back, full pages stay, and no token
changes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kv_pools
from sgl.errors import ConfigError
from sgl.runtime.cache.windows import pages_in_window
from sgl.runtime.engine import Engine
from sgl.runtime.scheduler.scheduler import Scheduler
from tests import test_windows
from tests.test_windows import Windowed, sampling
from tests.tiny_models import tiny_checkpoint
from tests.tiny_transformers import tiny_transformer

WINDOW, CONTEXT = 16, 1024
OPTIONS = {**test_windows.OPTIONS, "max_running_requests": 4}


MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gemma3": {"num_hidden_layers": 7, "sliding_window_pattern": 3},
    "gpt-oss": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "Cohere2ForCausalLM": {"num_hidden_layers": 5},
    "Exaone4ForCausalLM": {"num_hidden_layers": 5},
}


@pytest.fixture(
    scope="module", params=["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in [*MODELS][1:])]
)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    make = tiny_transformer if request.param.endswith("LM") else tiny_checkpoint
    shape = {"sliding_window": WINDOW, "max_position_embeddings": CONTEXT, **MODELS[request.param]}
    return Windowed(make(tmp_path_factory.mktemp("window"), request.param, **shape))


@pytest.fixture
def most_held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The windowed pages that any request held at most, after each step's schedule."""
    found = [0]
    schedule = Scheduler.schedule

    def noting(self: Scheduler) -> Any:
        step, memory = schedule(self), self.memory
        assert memory.windows is not None
        found.extend(int(memory.rows.num_pages[row] - memory.windows.given_back[row]) for row in memory.running)
        return step

    monkeypatch.setattr(Scheduler, "schedule", noting)
    return found


@pytest.mark.slow
def test_a_long_generation_holds_the_windowed_pages_of_its_window(
    reference: Windowed, most_held: list[int]
) -> None:
    with Engine(reference.path, device="cpu", **OPTIONS) as engine:
        result = engine.generate(input_ids=reference.prompts[0], sampling_params=sampling(500))
        assert result["output_ids"] == reference.outputs[0]
        assert engine.check_ledger() == []
    assert 6 < max(most_held) <= pages_in_window(WINDOW, 4, OPTIONS["chunked_prefill_size"])


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "chunked_prefill_size": 7, "disable_overlap_schedule": False},
        {"swa_full_tokens_ratio": 0.01, "max_total_tokens": 4096},
        pytest.param({"disable_radix_cache": True, "chunked_prefill_size": 1}, marks=pytest.mark.slow),
        pytest.param({"chunked_prefill_size": 64, "page_size": 16}, marks=pytest.mark.slow),
        pytest.param({"model_impl": "transformers", "disable_overlap_schedule": False}, marks=pytest.mark.slow),
        pytest.param({"max_total_tokens": 300, "swa_full_tokens_ratio": 0.1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_requests_beside_each_other_and_their_continuations_are_right(
    reference: Windowed, options: dict[str, Any]
) -> None:
    """New, cached, forked, and retracted where pages are short."""
    with Engine(reference.path, device="cpu", **{**OPTIONS, **options}) as engine:
        prompts, outputs = reference.prompts[1:], reference.outputs[1:]
        for _ in range(2):
            results = engine.generate(input_ids=prompts, sampling_params=sampling(60))
            assert [result["output_ids"] for result in results] == outputs
        for prompt, output in zip(prompts, outputs, strict=True):
            for end in (59, 21):
                more = sampling(60 - end) | {"n": 2}
                results = engine.generate(input_ids=prompt + output[:end], sampling_params=more)
                assert [result["output_ids"] for result in results] == [output[end:]] * 2
        assert engine.check_ledger() == []


def test_a_prefix_is_taken_over_where_its_window_is_there(reference: Windowed) -> None:
    options = {**OPTIONS, "max_total_tokens": 4096, "swa_full_tokens_ratio": 0.06}
    with Engine(reference.path, device="cpu", **options) as engine:
        prompt, output = reference.prompts[2], reference.outputs[2]
        cached = []
        for ids, number in (
            (prompt, 20),
            (prompt, 20),
            (prompt + output, 20),
            ([7] * 200, 600),
            (prompt + output, 1),
        ):
            result = engine.generate(input_ids=ids, sampling_params=sampling(number))
            cached.append(result["meta_info"]["cached_tokens"])
        assert cached[1] == 148  # the whole pages of all but the last token
        assert cached[2] == 168  # what was generated, too
        assert cached[4] == 208  # what a long text has passed over gave way to it first


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_logprobs_are_those_of_transformers(reference: Windowed, chunk: int) -> None:
    ids = reference.prompts[0]
    with Engine(reference.path, device="cpu", **{**OPTIONS, "chunked_prefill_size": chunk}) as engine:
        result = engine.generate(
            input_ids=ids, sampling_params=sampling(1), return_logprob=True, logprob_start_len=0
        )
        found = [entry[0] for entry in result["meta_info"]["input_token_logprobs"][1:]]
        assert torch.allclose(torch.tensor(found), reference.logprobs(ids), atol=1e-4)


def test_the_same_memory_holds_more_tokens() -> None:
    """The figures of docs/guide/models.md; and what fits holds the windows of requests that run at once."""
    gemma = kv_pools.DEFAULTS
    assert kv_pools.sizes(Namespace(**gemma)) == (771_008, 2_621_456, 451_968)
    assert kv_pools.sizes(Namespace(**{**gemma, "rows": 64})) == (771_008, 4_694_976, 94_464)
    oss = {**gemma, "layers": 24, "every": 2, "kv_heads": 8, "head_dim": 64, "window": 128}
    assert kv_pools.sizes(Namespace(**oss)) == (2_184_528, 4_245_920, 123_136)
    short = {**gemma, "context": 2048, "rows": 8}
    assert kv_pools.sizes(Namespace(**short)) == (8 * 2048, 8 * 2048, 12_800)


def test_a_ratio_for_a_model_with_one_pool_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"swa_full_tokens_ratio=0\.5: in a context of 256 tokens, Llama"):
        Engine(str(path), device="cpu", **OPTIONS, swa_full_tokens_ratio=0.5)
