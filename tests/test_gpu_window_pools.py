"""Layers with a window and pages of their own on a GPU: by every kernel, replayed and launched."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl import Engine
from sgl.kernels.attention.base import AttentionStep
from sgl.kernels.attention.flashinfer import FlashInferAttention
from sgl.kernels.attention.pools import PooledAttention
from sgl.kernels.attention.torch import TorchAttention
from sgl.kernels.attention.triton import TritonAttention
from tests.test_attention import PooledCase
from tests.test_gpu import error_of, no_waiting
from tests.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.gpu

WINDOW = 100
KINDS = {"flashinfer": FlashInferAttention, "triton": TritonAttention}


def near(case: PooledCase, backend: PooledAttention) -> None:
    oracle = PooledAttention(case.shape, TorchAttention)
    oracle.plan(case.step)
    for its, window in ((case.full, None), (case.windowed, WINDOW)):
        found, expected = (
            each.run(its.query, its.key_cache, its.value_cache, window, sinks=its.sinks)
            for each in (backend, oracle)
        )
        assert error_of(found, expected) < 1e-2


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_steps_with_prompts_equal_the_oracle(name: str, has_sinks: bool) -> None:
    rows = [(1, 1000), (1, 30), (1, 101), (7, 900), (300, 300), (200, 1200)]
    options: dict[str, Any] = {"head_dim": 64, "dtype": torch.bfloat16, "device": "cuda", "has_sinks": has_sinks}
    case = PooledCase(rows, WINDOW, **options)
    backend = PooledAttention(case.shape, KINDS[name])
    backend.plan(case.step)
    with no_waiting():
        backend.plan(case.step)
    near(case, backend)


@pytest.mark.parametrize("name", KINDS)
def test_captured_decodes_take_both_page_tables(name: str) -> None:
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
    case = PooledCase([(1, 1000)] * 30, WINDOW, **options)
    backend = PooledAttention(case.shape, lambda its: KINDS[name](its, max_graph_rows=30, max_pages=64))
    ones = np.ones(30, np.int32)
    first = AttentionStep(ones, ones, np.zeros((30, 1), np.int32))
    first.windowed = AttentionStep(ones, ones, np.zeros((30, 1), np.int32))
    both = (case.full, None), (case.windowed, WINDOW)

    def attend() -> list[torch.Tensor]:
        return [backend.run(its.query, its.key_cache, its.value_cache, window) for its, window in both]

    backend.plan_decode(first, 0, ())
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    oracle = PooledAttention(case.shape, TorchAttention)
    for longest in (1000, 1, 300):
        case.full.kv_lens[:] = case.windowed.kv_lens[:] = rng.integers(1, longest + 1, 30)
        with no_waiting():
            backend.plan_decode(case.step, 0, ())
            graph.replay()
        oracle.plan(case.step)
        for (its, window), mine in zip(both, found, strict=True):
            assert error_of(mine, oracle.run(its.query, its.key_cache, its.value_cache, window)) < 1e-2


@pytest.fixture(scope="module", params=["gemma3", "gpt-oss", "transformers"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each token has all experts of a mixture: rounding would choose others."""
    sizes: dict[str, Any] = {"head_dim": 64, "sliding_window": 64, "max_position_embeddings": 2048}
    sizes |= {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    family = "gemma3" if request.param == "transformers" else str(request.param)
    if family == "gpt-oss":
        sizes["num_experts_per_tok"] = 4
    return tiny_checkpoint(tmp_path_factory.mktemp(str(request.param)), family, **sizes)


@pytest.mark.parametrize("backend", ["torch", "triton", "flashinfer"])
def test_what_is_given_back_changes_no_token(path: Path, backend: str) -> None:
    """Against a pool in which all of it fits, in the same batches: equal to the last bit. And, with prefixes that are
    found again, no page is lost."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 384) for _ in range(length)] for length in (900, 3, 300, 40)]
    prompts += [prompts[0][:500] + prompts[1]]
    options: dict[str, Any] = {"device": "cuda", "attention_backend": backend, "max_total_tokens": 1 << 15}
    options |= {"chunked_prefill_size": 256, "check_ledger": True, "skip_tokenizer_init": True}
    if backend == "flashinfer":
        options["dtype"] = "bfloat16"  # it has no float32
    if "transformers" in str(path):
        options["model_impl"] = "transformers"
    params = {"temperature": 0.0, "max_new_tokens": 300, "ignore_eos": True}
    outputs = []
    for ratio, without_cache in ((1.0, True), (0.02, True), (0.02, False)):
        more = {"swa_full_tokens_ratio": ratio, "disable_radix_cache": without_cache}
        with Engine(str(path), **options, **more) as engine:
            outputs.append(
                [engine.generate(input_ids=ids, sampling_params=params)["output_ids"] for ids in prompts]
            )
            beside = engine.generate(input_ids=prompts, sampling_params=params)
            assert all(len(each["output_ids"]) == 300 for each in beside)
            assert engine.check_ledger() == []
            state = engine.get_server_info()["internal_states"][0]
            num_windowed = state["windowed_available_tokens"] + state["windowed_evictable_tokens"]
            assert num_windowed == (1 << 15 if ratio == 1.0 else 656)
    assert outputs[0] == outputs[1]
