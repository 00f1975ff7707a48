"""Checkpoints that cannot be served are refused by name before memory is taken; whatever way they are cut, the good
ones load to the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl.errors import ModelError, UnsupportedModel, WeightsError
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.model.weights import checkpoint_tensors
from tests.tiny_models import edit_json, tiny_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good Llama checkpoint in one file."""
    return tiny_checkpoint(tmp_path)


def load(folder: Path) -> Decoder:
    return load_decoder(ModelConfig.from_pretrained(folder))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_same_weights(left: Decoder, right: Decoder) -> None:
    others = checkpoint_tensors(right.config, right.weights)
    for name, tensor in checkpoint_tensors(left.config, left.weights).items():
        assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            UnsupportedModel,
            ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3"],
        ),
        ({"architectures": ...}, UnsupportedModel, ["supported: LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, UnsupportedModel, ["gelu"]),
        ({"quantization_config": {"quant_method": "eetq"}}, UnsupportedModel, ["quantized", "eetq"]),
        ({"num_local_experts": 8}, UnsupportedModel, ["mixture of experts"]),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ModelError, ["'short_factor' is None"]),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0, 1.0]}},
            ModelError,
            ["short_factor and long_factor", "8 numbers each"],
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            UnsupportedModel,
            ["partial_rotary_factor"],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            UnsupportedModel,
            ["rope of its own for each layer type"],
        ),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ModelError, ["factor"]),
        ({"torch_dtype": "int8", "dtype": "int8"}, UnsupportedModel, ["int8"]),
        ({"hidden_size": ...}, ModelError, ["no 'hidden_size'"]),
        ({"hidden_size": "64"}, ModelError, ["hidden_size", "'64'", "number"]),
        ({"num_hidden_layers": 2.5}, ModelError, ["num_hidden_layers", "whole"]),
        ({"num_key_value_heads": 3}, ModelError, ["4 is no multiple", "3"]),
        ({"tie_word_embeddings": "yes"}, ModelError, ["tie_word_embeddings", "neither true nor false"]),
    ],
)
def test_a_config_that_cannot_be_served_says_why(
    folder: Path, changes: dict[str, Any], error: type[ModelError], words: list[str]
) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(error) as caught:
        ModelConfig.from_pretrained(folder)
    assert all(word in str(caught.value) for word in [str(folder), *words]), str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff"])
def test_a_config_that_cannot_be_read_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_pretrained(folder)


def test_a_path_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_pretrained(tmp_path)
    with pytest.raises(ModelError, match="nowhere/at/all is neither a checkpoint folder"):
        ModelConfig.from_pretrained("nowhere/at/all")
    with pytest.raises(ModelError, match="neither a checkpoint folder"):
        ModelConfig.from_pretrained(tmp_path / "absent")


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(32)


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop, ["lacks 1 tensor", "model.layers.1.mlp.up_proj.weight [96, 64]"]),
        (reshape, ["model.norm.weight", "[32]", "[64]"]),
        (add, ["1 tensor", "no place for", "model.layers.0.self_attn.q_proj.bias [64]"]),
        (integers, ["model.norm.weight", "I32", "BF16"]),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None], words: list[str]
) -> None:
    edit_weights(folder, change)
    with pytest.raises(WeightsError) as caught:
        load(folder)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("kept", [0, 4, 100, 5000, -1])
def test_a_truncated_weight_file_is_named_with_its_size(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()[:kept]
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=rf"model\.safetensors \({len(content)} bytes\) is truncated"):
        load(folder)


def test_a_missing_weight_file_is_named_with_what_lies_there_instead(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"model\.safetensors is missing; only .* not pytorch_model\.bin"):
        load(folder)


def test_shards_load_to_the_same_weights_as_one_file(tmp_path: Path) -> None:
    one = load(tiny_checkpoint(tmp_path / "one"))
    folder = tiny_checkpoint(tmp_path / "many", max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert_same_weights(one, load(folder))


def test_a_shard_that_is_missing_or_lacks_what_the_index_says_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, max_shard_size="100KB")
    index = json.loads((folder / INDEX).read_text())
    name, shard = next(iter(index["weight_map"].items()))
    elsewhere = next(other for other in index["weight_map"].values() if other != shard)
    (folder / INDEX).write_text(json.dumps({**index, "weight_map": {**index["weight_map"], name: elsewhere}}))
    with pytest.raises(WeightsError, match=rf"{elsewhere} lacks the tensor {name}"):
        load(folder)
    (folder / INDEX).write_text("{")
    with pytest.raises(WeightsError, match="index"):
        load(folder)
    (folder / INDEX).write_text(json.dumps(index))
    (folder / shard).unlink()
    with pytest.raises(WeightsError, match=rf"{shard} is missing"):
        load(folder)


def test_a_tied_head_is_the_embedding_also_where_the_checkpoint_repeats_it(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    tied = load(folder)
    assert tied.weights.lm_head is tied.weights.embedding
    edit_weights(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 0})
    )
    assert load(folder).weights.lm_head is not tied.weights.lm_head
    repeated = load(folder)
    assert repeated.weights.lm_head is repeated.weights.embedding
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    different = load(folder)
    assert different.weights.lm_head is not different.weights.embedding, (
        "as in transformers, a head of its own counts"
    )


def test_random_weights_need_only_a_config_and_are_the_same_each_time(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    config = ModelConfig.from_pretrained(folder)
    first, second = (load_decoder(config, load_format="dummy") for _ in range(2))
    assert_same_weights(first, second)
    assert float(first.weights.embedding.std()) == pytest.approx(config.initializer_range, rel=0.1)


def test_ends_of_generation_come_from_both_configs(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[2, 7])
    assert ModelConfig.from_pretrained(folder).eos_token_ids == (2, 7)
    (folder / "generation_config.json").unlink()
    assert ModelConfig.from_pretrained(folder).eos_token_ids == (2,)


def test_a_path_to_the_config_is_the_folder(folder: Path) -> None:
    assert ModelConfig.from_pretrained(folder / "config.json") == ModelConfig.from_pretrained(folder)
