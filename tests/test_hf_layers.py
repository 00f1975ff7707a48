"""A model of transformers' modules step by step: frequencies, heads in the cache, dtypes, what can be captured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sgl.runtime.model.hf.attention import _store
from sgl.runtime.model.hf.config import TransformersConfig
from sgl.runtime.model.hf.model import TransformersModel, load_transformers
from sgl.runtime.model.kv_cache import KVCache
from tests.test_models import Paged, at_once, check, in_chunks, mixed, random_sequences
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer

FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.3 * i for i in range(8)]}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32, **FACTORS}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def compare(model: TransformersModel, path: Path, sequences: list[list[int]]) -> None:
    """With transformers, whole and cut."""
    architecture = model.config.architecture
    reference: Any = getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = [reference(torch.tensor([sequence])).logits[0] for sequence in sequences]
    for page_size, steps in ((16, at_once(sequences)), (4, mixed(sequences)), (1, in_chunks(sequences, 7))):
        check(Paged(model, sequences, page_size).run(steps), expected)


@pytest.mark.parametrize(
    ("architecture", "rope", "context", "lengths"),
    [
        ("Phi3ForCausalLM", LONG_ROPE, None, (50, 90, 33)),  # all longer than the original context
        ("Phi3ForCausalLM", LONG_ROPE, 32, (20, 32, 23)),
        ("SmolLM3ForCausalLM", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, None, (50, 90, 33)),
        ("ArceeForCausalLM", YARN, None, (50, 90, 33)),
    ],
)
def test_frequencies_follow_the_context_not_the_step(
    architecture: str, rope: dict[str, Any], context: int | None, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    more = {"original_max_position_embeddings": 32} if rope is LONG_ROPE else {}
    path = tiny_transformer(tmp_path, architecture, head_dim=16, rope_parameters=rope, **more)
    config = TransformersConfig.from_pretrained(path)
    assert config.context_length == 256
    compare(load_transformers(config, max_positions=context), path, random_sequences(384, lengths))


def test_layers_with_different_heads_share_a_cache(tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, "Gemma4ForCausalLM", **ARCHITECTURES["Gemma4ForCausalLM"])
    config = TransformersConfig.from_pretrained(path)
    assert {layer.key_dim for layer in config.layers} == {16, 32}
    assert config.head_dim == 32
    compare(load_transformers(config), path, random_sequences(384))


@pytest.mark.parametrize("first", ["sliding_attention", "full_attention"])
def test_fewer_heads_are_cached_several_times(first: str, tmp_path: Path) -> None:
    """Also where the first layer has them: a full one, of one head."""
    kinds = [first, "sliding_attention", "full_attention"]
    fields = {**ARCHITECTURES["Gemma4ForCausalLM"], "attention_k_eq_v": True, "layer_types": kinds}
    path = tiny_transformer(tmp_path, "Gemma4ForCausalLM", **fields)
    config = TransformersConfig.from_pretrained(path)
    assert {layer.num_kv_heads for layer in config.layers} == {1, 2}
    assert config.num_kv_heads == 2
    compare(load_transformers(config), path, random_sequences(384))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM"])
def test_heads_may_be_wider_in_the_cache(architecture: str, tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, architecture, **ARCHITECTURES[architecture])
    config = replace(TransformersConfig.from_pretrained(path), cached_head_dim=64)
    model = load_transformers(config)
    assert model.attention_shape(16).head_dim == 64
    compare(model, path, random_sequences(384))


def test_windows_are_found_by_layer(tmp_path: Path) -> None:
    fields = {**ARCHITECTURES["Gemma2ForCausalLM"], "sliding_window": 300}
    wide = TransformersConfig.from_pretrained(tiny_transformer(tmp_path / "wide", "Gemma2ForCausalLM", **fields))
    assert [layer.window for layer in wide.layers] == [None] * 3  # as wide as the context
    path = tiny_transformer(tmp_path / "narrow", "Gemma2ForCausalLM", **ARCHITECTURES["Gemma2ForCausalLM"])
    config = TransformersConfig.from_pretrained(path)
    assert [layer.window for layer in config.layers] == [20, None, 20]
    assert {layer.softcap for layer in config.layers} == {2.0}
    model = load_transformers(config, max_positions=20)
    assert model.attention_shape(4).windows == (None,)
    compare(model, path, random_sequences(384, (20, 13)))


def test_experts_are_captured_where_their_numbers_stay_on_the_device(tmp_path: Path) -> None:
    for architecture, dtype, captures in (
        ("MixtralForCausalLM", "float16", False),
        ("MixtralForCausalLM", "bfloat16", True),
        ("PhiForCausalLM", "float16", True),
    ):
        path = tiny_transformer(tmp_path / architecture, architecture, **ARCHITECTURES[architecture])
        model = load_transformers(TransformersConfig.from_pretrained(path), dtype=dtype)
        assert model.captures == captures


def test_a_cache_in_eight_bits_holds_rounded_numbers() -> None:
    cache, slots = torch.zeros(5, 2, 4).to(torch.float8_e4m3fn), torch.tensor([3, 1])
    rows = torch.tensor([1.0, -0.3, 1000.0, -1e9]).expand(2, 2, 4)
    _store(cache, slots, rows)
    expected = torch.tensor([1.0, -0.3125, 448.0, -448.0]).expand(2, 2, 4)
    torch.testing.assert_close(cache[slots].float(), expected)
    assert not cache[[0, 2, 4]].float().any()


def test_a_token_takes_as_many_bytes_as_the_cache_allocates(tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, "DeepseekV3ForCausalLM", **ARCHITECTURES["DeepseekV3ForCausalLM"])
    config = TransformersConfig.from_pretrained(path)
    kv = KVCache(config, num_pages=3, page_size=4, dtype=torch.float16, device=torch.device("cpu"))
    allocated = sum(tensor.nbytes for tensor in [*kv.keys, *kv.values])
    assert allocated == 3 * 4 * KVCache.bytes_per_token(config, torch.float16)
