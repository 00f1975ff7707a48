"""What transformers' modules cannot be served with is refused by its name, before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sgl.errors import ConfigError, ModelError, UnsupportedModel, WeightsError
from sgl.runtime.engine import Engine
from sgl.runtime.model.choice import read_config
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.hf.config import TransformersConfig
from tests.tiny_models import edit_json, tiny_checkpoint
from tests.tiny_transformers import ARCHITECTURES, SIZES, tiny_transformer

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "BartForCausalLM": ({}, "an encoder-decoder"),
    "BertLMHeadModel": ({}, "a mask that is neither causal nor a sliding window"),
    "BloomForCausalLM": ({}, "a mask that its own code reads"),
    "DiffLlamaForCausalLM": ({}, "attention that is computed twice with the same weights"),
    "DogeForCausalLM": ({"num_experts": 64}, "a mask that its own code reads"),
    "FalconForCausalLM": ({}, "attention that does not go through"),
    "Lfm2ForCausalLM": ({"full_attn_idxs": [0]}, "recurrent layers (conv)"),
    "Llama4ForCausalLM": (
        {"num_local_experts": 4, "layer_types": ["full_attention"] * 3, "no_rope_layers": [1, 1, 0]},
        "a layer that depends on how many tokens it has cached",
    ),
    "MambaForCausalLM": ({}, "recurrent layers"),
    "MiniMaxForCausalLM": ({"num_local_experts": 4}, "recurrent layers (linear_attention)"),
    "OpenAIGPTLMHeadModel": ({"n_positions": 64}, "attention that does not go through"),
    "Qwen3NextForCausalLM": ({"num_experts": 4}, "a model with only linear_attention layers"),
    "RwkvForCausalLM": ({"context_length": 64, "attention_hidden_size": 64}, "recurrent layers"),
}


def write_config(path: Path, architecture: str, **fields: Any) -> Path:
    """A config.json without weights."""
    config = getattr(transformers, architecture).config_class(**{**SIZES, **fields})
    config.architectures = [architecture]
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_our_attention_cannot_do_is_named(architecture: str, tmp_path: Path) -> None:
    fields, named = REFUSED[architecture]
    path = write_config(tmp_path, architecture, **fields)
    with pytest.raises(UnsupportedModel) as caught:
        read_config(str(path), "auto")
    assert named in str(caught.value)
    assert caught.value.architecture == architecture
    assert str(path) in str(caught.value)


def test_an_unknown_architecture_says_what_it_needs(tmp_path: Path) -> None:
    path = write_config(tmp_path, "LlamaForCausalLM")
    edit_json(path / "config.json", architectures=["FooForCausalLM"], auto_map={"AutoModel": "foo.Foo"})
    with pytest.raises(
        UnsupportedModel, match=r"needs a transformers that has it .*auto_map\) is never run"
    ) as caught:
        read_config(str(path), "auto")
    assert caught.value.architecture == "FooForCausalLM"
    with pytest.raises(UnsupportedModel, match="supported: LlamaForCausalLM"):
        read_config(str(path), "sgl")


def test_classes_that_write_no_text_are_named(tmp_path: Path) -> None:
    path = write_config(tmp_path, "LlamaForCausalLM")
    edit_json(path / "config.json", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(UnsupportedModel, match="no causal language model"):
        read_config(str(path), "auto")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GemmaForCausalLM"])
def test_unknown_quantisations_are_named(architecture: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, architecture)
    edit_json(path / "config.json", quantization_config={"quant_method": "quanto"})
    with pytest.raises(UnsupportedModel, match="quantized with quant_method 'quanto'"):
        read_config(str(path), "auto")


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_local_experts"])
def test_numbers_of_modules_are_bounded(key: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, "MixtralForCausalLM")
    edit_json(path / "config.json", **{key: 10**9})
    with pytest.raises(ModelError, match=f"{key!r} is 1000000000"):
        read_config(str(path), "auto")


def test_what_transformers_refuses_is_a_model_error(tmp_path: Path) -> None:
    path = write_config(tmp_path, "GemmaForCausalLM")
    edit_json(path / "config.json", hidden_size="wide")
    with pytest.raises(ModelError, match="cannot build GemmaForCausalLM"):
        read_config(str(path), "auto")


def test_an_implementation_can_be_asked_for(tmp_path: Path) -> None:
    llama = str(tiny_checkpoint(tmp_path / "llama"))
    gemma = str(tiny_transformer(tmp_path / "gemma", "GemmaForCausalLM", head_dim=16))
    assert isinstance(read_config(llama, "auto"), ModelConfig)
    assert isinstance(read_config(llama, "sgl"), ModelConfig)
    assert isinstance(read_config(llama, "transformers"), TransformersConfig)
    assert isinstance(read_config(gemma, "auto"), TransformersConfig)
    with pytest.raises(UnsupportedModel, match="GemmaForCausalLM is not supported"):
        read_config(gemma, "sgl")


def test_a_feature_that_our_layers_lack_falls_back(tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, "LlamaForCausalLM", hidden_act="gelu")
    assert isinstance(read_config(str(path), "auto"), TransformersConfig)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"tp_size": 2}, "tp_size"),
        ({"pp_size": 2}, "pp_size"),
        ({"quantization": "fp8"}, "quantization"),
        ({"context_length": 257}, "context_length"),
    ],
)
def test_options_that_do_not_suit_are_named(options: dict[str, Any], option: str, tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, "GemmaForCausalLM", **ARCHITECTURES["GemmaForCausalLM"])
    with pytest.raises(ConfigError) as caught:
        Engine(str(path), device="cpu", skip_tokenizer_init=True, max_total_tokens=64, **options)
    assert caught.value.option == option


def started(path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 64}
    with Engine(str(path), model_impl="transformers", **options):
        pass


def test_weights_that_do_not_fit_the_config_are_named(tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, "MixtralForCausalLM", **ARCHITECTURES["MixtralForCausalLM"])
    file = path / "model.safetensors"
    whole = load_file(file)
    expert = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    norm = "model.layers.0.input_layernorm.weight"

    def refused(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, file)
        with pytest.raises(WeightsError) as caught:
            started(path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    assert f"lacks 1 tensor that its config.json calls for: {norm} [64]" in refused(
        {name: its for name, its in whole.items() if name != norm}
    )
    assert "model.layers.1.mlp.experts" in refused({name: its for name, its in whole.items() if name != expert})
    assert "has 1 tensor that its config.json has no place for: model.more" in refused(
        {**whole, "model.more": torch.zeros(1)}
    )
    assert f"{norm} of {path} is [63]; its config.json makes it [64]" in refused({**whole, norm: torch.zeros(63)})
    assert "int64" in refused({**whole, norm: torch.zeros(64, dtype=torch.int64)}).lower().replace("i64", "int64")
    save_file(whole, file)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(WeightsError, match="truncated"):
        started(path)
    file.unlink()
    with pytest.raises(WeightsError, match="is missing"):
        started(path)


def test_checkpoints_of_any_floats_in_several_files_are_read(tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path / "one", "MixtralForCausalLM", **ARCHITECTURES["MixtralForCausalLM"])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "some", max_shard_size="50KB")
    assert len(list((tmp_path / "some").glob("*.safetensors"))) > 3
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "some", dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([[5, 6, 7]])).logits[0, -1].log_softmax(-1).max()
    with Engine(str(tmp_path / "some"), device="cpu", skip_tokenizer_init=True, max_total_tokens=64) as engine:
        params = {"max_new_tokens": 1, "temperature": 0.0}
        result = engine.generate(input_ids=[5, 6, 7], sampling_params=params, return_logprob=True)
    assert abs(result["meta_info"]["output_token_logprobs"][0][0] - float(expected)) < 1e-4


def test_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, "GPT2LMHeadModel", **ARCHITECTURES["GPT2LMHeadModel"])
    file = path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): its for name, its in load_file(file).items()}
    old = {"h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file({**tensors, **old}, file)
    started(path)
    save_file({**tensors, **old, "h.0.attn.more": torch.ones(2, dtype=torch.int64)}, file)
    with pytest.raises(WeightsError, match=r"no place for: .*h\.0\.attn\.more"):
        started(path)


def test_tied_weights_are_held_once_and_may_be_stored_twice(tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, "SmolLM3ForCausalLM", tie_word_embeddings=True)
    file = path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors

    def logprob() -> float:
        with Engine(str(path), device="cpu", skip_tokenizer_init=True, max_total_tokens=64) as engine:
            info = engine.get_server_info()
            params = {"max_new_tokens": 1, "temperature": 0.0}
            result = engine.generate(input_ids=[5, 6, 7], sampling_params=params, return_logprob=True)
            assert info["weight_bytes"] < 4 * info["num_weights"] + 4096  # and a few buffers
            return float(result["meta_info"]["output_token_logprobs"][0][0])

    once = logprob()
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert logprob() == once
    save_file({name: its for name, its in tensors.items() if "embed" not in name}, file)
    with pytest.raises(WeightsError, match=r"lacks 2 tensors|lacks 1 tensor"):
        started(path)


def test_random_weights_need_only_a_config(tmp_path: Path) -> None:
    path = write_config(tmp_path, "MixtralForCausalLM", **ARCHITECTURES["MixtralForCausalLM"])

    def generated() -> list[int]:
        options: dict[str, Any] = {"skip_tokenizer_init": True, "max_total_tokens": 64, "load_format": "dummy"}
        with Engine(str(path), device="cpu", **options) as engine:
            params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
            return list(engine.generate(input_ids=[5, 6, 7], sampling_params=params)["output_ids"])

    assert generated() == generated()


def test_the_server_says_whose_layers_compute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_transformer(tmp_path, "PhiForCausalLM")
    with caplog.at_level("INFO"), Engine(str(path), device="cpu", skip_tokenizer_init=True) as engine:
        info = engine.get_server_info()
    assert info["model_impl"] == "transformers"
    assert info["architecture"] == "PhiForCausalLM"
    assert "PhiForCausalLM by transformers' modules" in caplog.text
    assert json.loads((path / "config.json").read_text())["model_type"] == "phi"
