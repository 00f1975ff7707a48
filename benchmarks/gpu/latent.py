"""Attention over latents at the shape of DeepSeek-V2-Lite: our decode kernel beside FlashInfer's for latent attention,
and prompts by FlashInfer's and Triton's.

    python -m benchmarks.gpu.latent [--heads 16] [--config FOLDER]

Each line has a step's rows and keys, microseconds of each kernel inside a CUDA graph (a layer, without plans), what
reading the keys takes at the bandwidth of a copy, and how many times faster than FlashInfer ours is. --config writes
the config.json that benchmarks.gpu.throughput takes for the whole model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.workloads import Machine
from sgl.kernels.attention.base import AttentionShape, AttentionStep
from sgl.kernels.attention.ragged import RaggedRows
from sgl.kernels.latent.attention import LatentAttention, Prompts, TritonPrompts
from sgl.kernels.latent.flashinfer import FlashInferPrompts

RANK, ROPE_DIM, PAGE_SIZE = 512, 64, 16
DECODES = [(1, 640), (1, 8192), (16, 640), (64, 640), (64, 4096), (256, 640), (256, 2048)]
PROMPTS = [(1, 512), (4, 2048), (64, 128)]
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--config", type=Path, help="a folder to write config.json to")
    arguments = parser.parse_args()
    if arguments.config is not None:
        arguments.config.mkdir(parents=True, exist_ok=True)
        (arguments.config / "config.json").write_text(json.dumps(V2_LITE, indent=1))
    shape = AttentionShape(
        num_heads=arguments.heads,
        num_kv_heads=1,
        head_dim=RANK + ROPE_DIM,
        page_size=PAGE_SIZE,
        scale=192**-0.5,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        latent_dim=RANK,
    )
    bandwidth = Machine.measure().bandwidth
    kernels = ("fa2", "fa3") if torch.cuda.get_device_capability()[0] == 9 else ("fa2",)
    theirs = {kernel: FlashInferPrompts(shape, kernel) for kernel in kernels}
    print(f"{'decodes':>18} {'ours':>8} {' '.join(f'{name:>8}' for name in theirs)} {'read':>8} {'times':>6}   µs")
    for rows, keys in DECODES:
        step, query, cache = _step(shape, [1] * rows, [keys] * rows)
        ours = LatentAttention(shape, TritonPrompts(shape))
        ours.plan(step)
        expected = ours.run(query, cache, cache)
        times = [_microseconds(lambda ours=ours, query=query, cache=cache: ours.run(query, cache, cache))]
        times += [_prompts(prompts, step, query, cache, expected) for prompts in theirs.values()]
        floor = 1e6 * rows * keys * 2 * (RANK + ROPE_DIM) / bandwidth
        print(f"{rows:8} x {keys:7} {_columns([*times, floor])} {min(times[1:]) / times[0]:6.2f}", flush=True)
    print(f"{'prompts':>18} {'triton':>8} {' '.join(f'{name:>8}' for name in theirs)}")
    for rows, tokens in PROMPTS:
        step, query, cache = _step(shape, [tokens] * rows, [tokens] * rows)
        expected = torch.empty(len(query), shape.num_heads, RANK, dtype=query.dtype, device=query.device)
        triton = TritonPrompts(shape)
        triton.plan(RaggedRows.of(step, slice(0, rows), PAGE_SIZE), step.q_lens)
        triton.run(query, cache, expected)
        times = [_prompts(prompts, step, query, cache, expected) for prompts in (triton, *theirs.values())]
        print(f"{rows:8} x {tokens:7} {_columns(times)}", flush=True)


def _step(
    shape: AttentionShape, q_lens: list[int], kv_lens: list[int]
) -> tuple[AttentionStep, torch.Tensor, torch.Tensor]:
    """With random pages, queries and latents."""
    pages = -(-max(kv_lens) // PAGE_SIZE)
    table = np.random.default_rng(0).permutation(len(kv_lens) * pages).reshape(len(kv_lens), pages)
    step = AttentionStep(np.array(q_lens, np.int32), np.array(kv_lens, np.int32), table.astype(np.int32))
    options = {"dtype": shape.dtype, "device": shape.device}
    query = torch.randn(sum(q_lens), shape.num_heads, shape.head_dim, **options)
    return step, query, torch.randn(len(kv_lens) * pages, PAGE_SIZE, 1, shape.head_dim, **options)


def _prompts(
    prompts: Prompts, step: AttentionStep, query: torch.Tensor, cache: torch.Tensor, expected: torch.Tensor
) -> float:
    """Microseconds, of results that are near the expected ones."""
    prompts.plan(RaggedRows.of(step, slice(0, len(step.q_lens)), PAGE_SIZE), step.q_lens)
    out = torch.empty_like(expected)
    prompts.run(query, cache, out)
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    assert error < 2e-2, f"{type(prompts).__name__} is off by {error:.3f}"
    return _microseconds(lambda: prompts.run(query, cache, out))


def _microseconds(work: Callable[[], object], count: int = 20) -> float:
    """Of one of `count` runs in a CUDA graph, the median of ten replays."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            work()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / count)
    return float(np.median(times[2:]))


def _columns(times: list[float]) -> str:
    return " ".join(f"{each:8.1f}" for each in times)


if __name__ == "__main__":
    main()
