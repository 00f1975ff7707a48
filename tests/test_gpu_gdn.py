"""Hybrids of gated delta nets and attention on a GPU: replayed steps, launched ones, states kept and copied."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl import Engine
from sgl.runtime.batch import EMPTY_STATE, Batch
from sgl.runtime.model.gdn.config import HybridConfig
from sgl.runtime.model.gdn.model import Hybrid, load_hybrid
from tests.test_gdn_models import tiny_hybrid
from tests.test_gpu import Driver, error_of, no_waiting

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 6,  # all: rounding would choose others
}


@pytest.fixture(scope="module", params=["next", "3.5"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hybrid(tmp_path_factory.mktemp(str(request.param)), str(request.param), **SIZES)[0]


def load(path: Path, dtype: str) -> Hybrid:
    return load_hybrid(HybridConfig.from_pretrained(path), device="cuda", dtype=dtype)  # type: ignore[arg-type]


class HybridDriver(Driver):
    """Rows begin with empty states."""

    def __init__(self, model: Hybrid, prompts: list[list[int]], **options: Any) -> None:
        super().__init__(model, prompts, **options)  # type: ignore[arg-type]
        launch = self.runner.launch

        def begin(batch: Batch, *args: Any) -> Any:
            loads = [(EMPTY_STATE, setup.row) for setup in batch.setups]
            batch.state_loads = np.array(loads, np.int32).reshape(-1, 2)
            return launch(batch, *args)

        self.runner.launch = begin  # type: ignore[method-assign]


def test_replayed_steps_equal_launched_ones_and_the_float32_oracle(path: Path) -> None:
    rng = np.random.default_rng(0)
    model = load(path, "bfloat16")
    prompts = [rng.integers(3, 384, rng.integers(1, 100)).tolist() for _ in range(37)]
    everyone = [
        HybridDriver(model, prompts, graph_rows=37, torch_attention=False),
        HybridDriver(model, prompts, graph_rows=0, torch_attention=False),
        HybridDriver(load(path, "float32"), prompts, graph_rows=0, torch_attention=True),
    ]
    pending, *_ = [driver.step(range(37)) for driver in everyone]
    for count in (37, 36, 20, 3, 1, 37):
        tokens = pending.wait().next_tokens[:count].tolist()
        if len(tokens) < count:
            tokens += [5] * (count - len(tokens))
        pending, *_ = [driver.step(range(count), tokens) for driver in everyone]
        ours, same, exact = (driver.logits[-1] for driver in everyone)
        assert error_of(ours, exact) < 6e-2
        assert error_of(same, exact) < 6e-2


def test_the_float32_model_equals_that_on_a_cpu(path: Path) -> None:
    prompts = [[3 + (7 * k + 11 * j) % 380 for k in range(length)] for j, length in enumerate((90, 1, 64, 7))]
    on_gpu = HybridDriver(load(path, "float32"), prompts, graph_rows=0, torch_attention=True)
    on_gpu.step(range(4)).wait()
    options = {"device": "cpu", "skip_tokenizer_init": True}
    with Engine(str(path), **options) as engine:
        results = engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            return_logprob=True,
            token_ids_logprob=list(range(384)),
        )
    for row, result in enumerate(results):
        (given,) = result["meta_info"]["output_token_ids_logprobs"]
        expected = torch.tensor([its[0] for its in given])
        logprobs = on_gpu.logits[-1][row].log_softmax(-1).cpu()
        torch.testing.assert_close(logprobs, expected, atol=2e-3, rtol=0)


def test_a_step_never_waits_for_the_gpu(path: Path) -> None:
    prompts = [[3 + row] * (1 + 20 * row) for row in range(5)]
    driver = HybridDriver(load(path, "bfloat16"), prompts, graph_rows=5, torch_attention=False)
    for rows in ([0, 1, 2], [0, 3], [1, 2, 3, 4], range(5), [0]):
        with no_waiting():
            pending = driver.step(rows)
        pending.wait()


@pytest.mark.parametrize(
    "options", [{}, {"chunked_prefill_size": 50}, {"max_total_tokens": 640}, {"state_checkpoints": 3}]
)
def test_what_is_cached_forked_and_replayed_scores_as_what_is_computed_at_once(
    path: Path, options: dict[str, Any]
) -> None:
    """Outputs' logprobs against those of the same tokens as prompts without cache and graphs, in 16 bits."""
    rng = random.Random(0)
    stem = [rng.randrange(3, 384) for _ in range(100)]
    prompts = [stem[: rng.randrange(10, 100)] + [rng.randrange(3, 384) for _ in range(5)] for _ in range(12)]
    sampling = {"temperature": 1.0, "max_new_tokens": 80, "ignore_eos": True}
    common: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "device": "cuda",
        "random_seed": 0,
        "context_length": 256,
    }
    texts: list[list[int]] = []
    given: list[list[float]] = []
    with Engine(str(path), **common, **options, check_ledger=True) as engine:
        for _ in range(2):
            results = engine.generate(input_ids=prompts, sampling_params={**sampling, "n": 2}, return_logprob=True)
            for i, result in enumerate(results):
                texts.append(prompts[i // 2] + result["output_ids"])
                given.append([each[0] for each in result["meta_info"]["output_token_logprobs"]])
            prompts = texts[:24:2]
            sampling["max_new_tokens"] = 20
    with Engine(str(path), **common, disable_cuda_graph=True, disable_radix_cache=True) as engine:
        scored = engine.generate(
            input_ids=texts,
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
    errors = []
    for logprobs, result in zip(given, scored, strict=True):
        exact = [each[0] for each in result["meta_info"]["input_token_logprobs"]][-len(logprobs) :]
        errors += [abs(ours - theirs) for ours, theirs in zip(logprobs, exact, strict=True)]
    assert np.mean(errors) < 0.03
    assert np.max(errors) < 0.6
