"""Decoders with latent attention against transformers: the same tokens and logprobs, however the requests are cut,
cached, forked or retracted, with one latent a token in the cache."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.gpu.latent import V2_LITE
from benchmarks.gpu.workloads import Multiplied
from sgl.errors import ConfigError, ModelError, UnsupportedModel, WeightsError
from sgl.kernels.attention.base import AttentionBackend, AttentionShape, AttentionStep
from sgl.kernels.attention.flashinfer_modules import PrefillKernel
from sgl.kernels.attention.torch import TorchAttention
from sgl.kernels.latent.attention import LatentAttention, TritonPrompts
from sgl.kernels.latent.flashinfer import FlashInferPrompts
from sgl.runtime.engine import Engine
from sgl.runtime.model.choice import count_weights, read_config
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.mla.config import LatentConfig
from sgl.runtime.model.mla.loader import load_latent
from sgl.runtime.model.mla.model import LatentDecoder
from sgl.runtime.model.mla.weights import allocate_weights
from sgl.runtime.model.tokens import Tokens
from tests.test_hf_models import OPTIONS, check_served
from tests.tiny_transformers import LATENT, SHARED, tiny_transformer

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
LITE = {**LATENT, **SHARED, "q_lora_rank": None, "n_shared_experts": 2, "num_experts_per_tok": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": (V2, {**LITE, "rope_parameters": YARN}),
    "v2": (
        V2,
        {
            **LATENT,
            **SHARED,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 3.0,
            "attention_bias": True,
        },
    ),
    "v3": (V3, {**LATENT, **SHARED, "rope_parameters": YARN, "topk_group": 2, "n_group": 4}),
    "v3-halves": (V3, {**LITE, "rope_interleave": False, "norm_topk_prob": False, "attention_bias": True}),
    "v3-dense": (V3, {**LATENT, **SHARED, "first_k_dense_replace": 3, "tie_word_embeddings": True}),
    "v2-sparse": (V2, {**LITE, "first_k_dense_replace": 0, "n_shared_experts": 1}),
}
ALWAYS = ("v2-lite", "v3")


@pytest.mark.costly
@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_tokens_and_logprobs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, overrides = MODELS[name]
    path = biased(tiny_transformer(tmp_path, architecture, **overrides))
    check_served(path, architecture, "sgl")


def biased(path: Path) -> Path:
    """With biases of the experts' choice, which transformers makes zeros."""
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def written(path: Path, **fields: Any) -> Path:
    """A config.json alone, of the shape of DeepSeek-V2-Lite."""
    (path / "config.json").write_text(json.dumps({**V2_LITE, **fields}))
    return path


def test_a_token_takes_what_its_latents_take(tmp_path: Path) -> None:
    config = read_config(str(written(tmp_path)), "auto")
    assert isinstance(config, LatentConfig)
    assert KVCache.bytes_per_token(config, torch.bfloat16) == 27 * 576 * 2
    assert count_weights(config) == 15_706_484_224
    assert config.scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    cache = KVCache(config, 3, 4, torch.float32, torch.device("cpu"))
    assert cache.keys[0].shape == (3, 4, 1, 576)
    assert cache.values[0].shape == (3, 4, 1, 512)
    assert cache.values[26].data_ptr() == cache.keys[26].data_ptr()


@pytest.mark.parametrize("name", ["v2-lite", "v2", "v3-dense"])
def test_floors_of_benchmarks_count_what_a_token_is_multiplied_with(name: str, tmp_path: Path) -> None:
    architecture, overrides = MODELS[name]
    config = LatentConfig.from_pretrained(tiny_transformer(tmp_path, architecture, **overrides))
    weights = load_latent(config).weights
    assert Multiplied.of(config).by_token == weights.num_multiplied
    tensors = {tensor.data_ptr() for tensor in weights.tensors()}
    assert len(tensors) == len(list(weights.tensors()))


def test_an_engine_reserves_memory_for_latents_alone(tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, V3, **LATENT, **SHARED)
    with Engine(str(path), **{**OPTIONS, "model_impl": "sgl", "page_size": 8}) as engine:
        latent, rotated = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
        assert engine._started.kv_bytes == (1024 + 8) * 3 * (latent + rotated) * 4


def test_dummy_weights_are_the_same_for_the_same_config(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 128, "n_routed_experts": 8}
    path = written(tmp_path, **small, moe_intermediate_size=32, intermediate_size=96)
    outputs = []
    for _ in range(2):
        options = {**OPTIONS, "model_impl": "auto", "load_format": "dummy"}
        with Engine(str(path), **options) as engine:
            assert engine.config.model_impl == "sgl"
            greedy = {"max_new_tokens": 4, "temperature": 0.0}
            outputs.append(engine.generate(input_ids=[3, 4, 5], sampling_params=greedy)["output_ids"])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"mlp_bias": True}, "a bias in the MLP"),
        ({"num_key_value_heads": 4}, "fewer key-value heads"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ({"quantization_config": {"quant_method": "eetq"}}, "quantized with quant_method 'eetq'"),
    ],
)
def test_what_is_missing_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_config(str(written(tmp_path, **fields)), "sgl")


def test_experts_that_cannot_be_chosen_are_an_error(tmp_path: Path) -> None:
    fields = {"topk_method": "group_limited_greedy", "n_group": 16, "topk_group": 1}
    with pytest.raises(ModelError, match="num_experts_per_tok 6 of n_routed_experts 64 in the best topk_group 1"):
        read_config(str(written(tmp_path, **fields)), "sgl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 3}, "16 attention heads, which 3 ranks cannot share equally"),
        ({"pp_size": 2}, "pp_size=2: .* has 1 layers, fewer than stages"),
        ({"quantization": "fp8"}, "not for those that serve DeepseekV2ForCausalLM"),
        ({"attention_backend": "cpu"}, "values apart from keys"),
    ],
)
def test_options_that_it_lacks_are_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path, num_hidden_layers=1, hidden_size=64, vocab_size=128, intermediate_size=96)
    with pytest.raises(ConfigError, match=message):
        Engine(str(path), **{**OPTIONS, "model_impl": "auto", "load_format": "dummy", **options})


def test_layers_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, V3, **LATENT, **SHARED)
    tensors = load_file(path / "model.safetensors")
    more = {name.replace(".2.", ".3."): its.clone() for name, its in tensors.items() if ".layers.2." in name}
    save_file(
        {**tensors, **more, "model.layers.3.eh_proj.weight": torch.zeros(64, 128)}, path / "model.safetensors"
    )
    load_latent(LatentConfig.from_pretrained(path))
    save_file({**tensors, "model.layers.2.eh_proj.weight": torch.zeros(64, 128)}, path / "model.safetensors")
    with pytest.raises(WeightsError, match="no place for"):
        load_latent(LatentConfig.from_pretrained(path))


GPU_SHAPE = {
    "num_hidden_layers": 3,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "vocab_size": 2048,
}


def gpu_attention(name: str, shape: AttentionShape) -> AttentionBackend:
    if name == "torch":
        return TorchAttention(shape)
    if name == "triton":
        return LatentAttention(shape, TritonPrompts(shape))
    pytest.importorskip("flashinfer")
    return LatentAttention(shape, FlashInferPrompts(shape, cast(PrefillKernel, name)))


@pytest.mark.gpu
@pytest.mark.parametrize("q_rank", [None, 256])
@pytest.mark.parametrize("name", ["triton", "fa2", "fa3"])
def test_hidden_states_on_a_gpu_are_near_those_in_float32(name: str, q_rank: int | None, tmp_path: Path) -> None:
    """A ragged step of prompts, one of decodes, and one of a single token."""
    if name == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 needs Hopper")
    config = LatentConfig.from_pretrained(written(tmp_path, **GPU_SHAPE, q_lora_rank=q_rank))
    config = replace(config, initializer_range=0.05)  # so that attention counts
    narrow = load_latent(config, device="cuda", dtype="bfloat16", load_format="dummy")
    weights = allocate_weights(config, torch.float32, torch.device("cpu"), tied=False)
    for ours, theirs in zip(weights.tensors(), narrow.weights.tensors(), strict=True):
        ours.copy_(theirs)
    wide = LatentDecoder(config, weights)
    backends = TorchAttention(wide.attention_shape(16)), gpu_attention(name, narrow.attention_shape(16))
    caches = [KVCache(config, 60, 16, its.dtype, its.device) for its in (wide, narrow)]
    tables = np.random.default_rng(0).permutation(60).reshape(3, 20).astype(np.int32)
    done = np.zeros(3, np.int32)
    for q_lens in ([130, 1, 40], [1, 1, 1], [1, 0, 0]):
        rows = [row for row in range(3) if q_lens[row]]
        lens = np.array(q_lens, np.int32)[rows]
        positions = np.concatenate([np.arange(done[row], done[row] + q_lens[row]) for row in rows])
        slots = np.concatenate(
            [16 * tables[row][np.arange(done[row], done[row] + q_lens[row]) // 16] for row in rows]
        )
        done = done + np.array(q_lens, np.int32)
        found = []
        for model, cache, backend in zip((wide, narrow), caches, backends, strict=True):
            backend.plan(AttentionStep(lens, done[rows], tables[rows]))
            ids = torch.arange(7, 7 + len(positions)) % 2048
            tensors = (ids, torch.from_numpy(positions).long(), torch.from_numpy(slots + positions % 16).long())
            ids, at, to = (its.to(model.device) for its in tensors)
            found.append(model.forward(Tokens(ids, at, to), cache, backend).float().cpu())
        error = (found[0] - found[1]).norm() / found[0].norm()
        assert error < 4e-2, f"{q_lens}: {error}"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_replayed_steps_give_the_tokens_of_launched_ones(backend: str, tmp_path: Path) -> None:
    if backend == "flashinfer":
        pytest.importorskip("flashinfer")
    path = written(tmp_path, **GPU_SHAPE)
    options = {**OPTIONS, "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "model_impl": "sgl"}
    outputs = []
    for disabled in (False, True):
        with Engine(
            str(path), **{**options, "attention_backend": backend, "disable_cuda_graph": disabled}
        ) as engine:
            greedy = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
            outputs.append(engine.generate(input_ids=list(range(5, 90)), sampling_params=greedy)["output_ids"])
            several = engine.generate(input_ids=[[9] * n for n in (3, 50, 20)], sampling_params=greedy)
            assert all(len(result["output_ids"]) == 40 for result in several)
    assert outputs[0] == outputs[1]
