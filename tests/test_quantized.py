"""Quantised checkpoints equal transformers with the dequantised weights; damaged ones are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl.errors import ConfigError, ModelError, UnsupportedModel, WeightsError
from sgl.kernels import limits
from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.runtime.engine import Engine
from sgl.runtime.model import loader, weights
from sgl.runtime.model.choice import ModelImpl
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.model.quantized.codes import Codes, dequantize_mxfp4
from sgl.runtime.model.quantized.pack import grouped
from sgl.runtime.model.shard import Shard
from tests.test_gdn_models import tiny_hybrid
from tests.test_hf_models import OPTIONS
from tests.test_models import Paged, at_once, check, in_chunks, mixed, random_sequences, reference_logits
from tests.tiny_models import edit_json, tiny_checkpoint
from tests.tiny_quantized import (
    AWQ,
    CONFIGS,
    FLOAT,
    GPTQ,
    Tensors,
    compressed,
    quantize_folder,
    tiny_quantized,
    weights_of,
)
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer
from tests.transformers_reference import Reference

FAMILIES = {"llama": {}, "mistral": {}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {}}
LAYOUTS = [name for name in CONFIGS if name != "mxfp4"]  # which only experts have
UNPACKED = {"fp8-block", "nvfp4", "nvfp4-modelopt"}  # in groups of 40 or 16, which have no whole units,
UNPACKED |= {"nf4", "nf4-plain", "fp4"}  # or by tables of numbers
PACKED = CONFIGS["packed"]
Q_PROJ = "model.layers.1.self_attn.q_proj"


def load(folder: Path) -> Any:
    return load_decoder(ModelConfig.from_pretrained(folder), dtype="float32")


@pytest.mark.parametrize(
    ("name", "family"),
    [(name, list(FAMILIES)[index % len(FAMILIES)]) for index, name in enumerate(LAYOUTS)],
)
def test_quantized_checkpoints_equal_transformers_with_dequantized_weights(
    name: str, family: str, tmp_path: Path
) -> None:
    folder, dense = tiny_quantized(tmp_path, name, family, **FAMILIES[family])
    decoder = load(folder)
    sequences = random_sequences(decoder.config.vocab_size)
    expected = reference_logits(dense, sequences)
    check(Paged(decoder, sequences, page_size=16).run(at_once(sequences)), expected)
    check(Paged(decoder, sequences, page_size=4).run(mixed(sequences)), expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_matrices_stay_packed_where_kernels_multiply_with_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and cut among ranks. test_grouped_matrices.py has the kernels."""
    folder, dense = tiny_quantized(tmp_path, name, num_hidden_layers=1, intermediate_size=192)
    monkeypatch.setattr(loader, "keeps_groups", lambda device: True)
    config, plain = (ModelConfig.from_pretrained(path) for path in (folder, dense))
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        ours, theirs = (
            loader._load_weights(its, torch.float32, torch.device("cpu"), shard).layers[0]
            for its in (config, plain)
        )
        for matrix in weights.MATRICES:
            packed, expected = getattr(ours, matrix), getattr(theirs, matrix)
            if not isinstance(packed, torch.Tensor):
                assert packed.shape == expected.shape
                packed = packed.dequantized(torch.float32)
            elif shard.size == 1:
                assert name in UNPACKED
            assert torch.equal(packed, expected)


@pytest.mark.parametrize("name", ["float8-block", "fp8-tensor", "packed"])
def test_e4m3_is_dequantized_where_kernels_cannot_read_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on an A100; four bits stay."""
    caplog.set_level("WARNING", logger="sgl")  # another test may have logged less
    folder, dense = tiny_quantized(tmp_path, name, num_hidden_layers=1, intermediate_size=192)
    monkeypatch.setattr(loader, "keeps_groups", lambda device: True)
    monkeypatch.setattr(limits, "is_nvidia", lambda device: True)
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config, plain = (ModelConfig.from_pretrained(path) for path in (folder, dense))
    ours, theirs = (loader.load_decoder(its, dtype="float32").weights.layers[0] for its in (config, plain))
    for matrix in weights.MATRICES:
        found = getattr(ours, matrix)
        assert isinstance(found, torch.Tensor) == (name != "packed")
        assert name == "packed" or torch.equal(found, getattr(theirs, matrix))
    assert ("compute capability 8.9 and above" in caplog.text) == (name != "packed")
    capability = (8, 9)
    assert not isinstance(loader.load_decoder(config, dtype="float32").weights.layers[0].qkv, torch.Tensor)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        *("awq", "gptq-order", "packed-8-bit", "float8-block", "fp8-block"),
        *("nvfp4", "nf4", "mxfp8", "mxfp4-packed", "llm-int8"),
    ],
)
def test_quantized_checkpoints_on_a_gpu(name: str, tmp_path: Path) -> None:
    """Single tokens, several, and graphs."""
    folder, dense = tiny_quantized(tmp_path, name, max_position_embeddings=2048)
    sequences = random_sequences(384)
    expected = reference_logits(dense, sequences)
    decoder = load_decoder(ModelConfig.from_pretrained(folder), device="cuda", dtype="float32")
    actual = Paged(decoder, sequences, page_size=16).run(in_chunks(sequences, 4))
    torch.testing.assert_close(torch.cat(actual), torch.cat(expected), atol=1e-3, rtol=1e-5)
    kinds = {type(getattr(layer, name)) for layer in decoder.weights.layers for name in weights.MATRICES}
    assert kinds == ({torch.Tensor} if name in UNPACKED else {GroupedMatrix})
    options: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_total_tokens": 4096}
    options |= {"max_running_requests": 4, "chunked_prefill_size": 32}  # few kernels are compiled
    prompts = [sequence[:20] for sequence in sequences if len(sequence) > 20]
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    tokens = {}
    for device in ("cuda", "cpu"):
        with Engine(str(folder), device=device, **options) as engine:
            tokens[device] = [engine.generate(input_ids=prompts[0], sampling_params=params)["output_ids"]]
            tokens[device] += [
                each["output_ids"] for each in engine.generate(input_ids=prompts, sampling_params=params)
            ]
    assert tokens["cuda"] == tokens["cpu"]


def test_columns_in_different_orders_make_no_common_matrix() -> None:
    parts = [
        Codes(
            torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.uint8), groups, 4
        )
        for groups in (torch.arange(64) // 32, torch.arange(64) % 2, torch.arange(63, -1, -1) // 32)
    ]
    assert all(grouped([part]) is not None for part in parts)
    assert grouped(parts) is None
    assert grouped([parts[0], parts[0].part(slice(1), slice(None))]) is not None
    assert grouped([parts[0].part(slice(None), slice(16, 48))]) is None, "a unit has one scale"


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_rounded_to_four_bits(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, intermediate_size=192)
    config = ModelConfig.from_pretrained(folder)
    plain = load_decoder(config).weights
    plain.quantize("int4")
    rounded = load_decoder(config, quantization="int4").weights
    for ours, theirs in zip(rounded.tensors(), plain.tensors(), strict=True):
        assert torch.equal(ours, theirs)
    with Engine(str(folder), **{**OPTIONS, "model_impl": "auto"}, quantization="int4") as engine:
        assert engine.get_server_info()["quantization"] == "int4"
        assert engine.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 3})["output_ids"]


def test_quantizing_what_is_quantized_is_refused(tmp_path: Path) -> None:
    folder, _ = tiny_quantized(tmp_path, "awq")
    for options in ({"quantization": "int4"}, {"quantization": "fp8"}):
        with pytest.raises(ConfigError, match=r"is quantised already \(AWQ, 4 bits, groups of 32, zero points"):
            Engine(str(folder), **{**OPTIONS, "model_impl": "auto"}, **options)
    odd = tiny_checkpoint(tmp_path / "odd", intermediate_size=80)
    with pytest.raises(ConfigError, match="multiples of 32"):
        Engine(str(odd), **{**OPTIONS, "model_impl": "auto"}, quantization="int4")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_family_in_every_layout(name: str, family: str, tmp_path: Path) -> None:
    test_quantized_checkpoints_equal_transformers_with_dequantized_weights(name, family, tmp_path)


@pytest.mark.parametrize(
    ("name", "architecture", "impl"),
    [
        ("awq", "Gemma2ForCausalLM", "transformers"),
        ("awq", "Gemma2ForCausalLM", "sgl"),
        ("gptq-zeros", "Phi3ForCausalLM", "sgl"),
        ("packed", "Glm4ForCausalLM", "sgl"),
        ("gptq-order", "MixtralForCausalLM", "transformers"),
        ("packed-zeros", "MixtralForCausalLM", "sgl"),
        ("fp8-block", "Qwen3MoeForCausalLM", "sgl"),
        ("fp8-block", "DeepseekV3ForCausalLM", "sgl"),
        ("awq", "Qwen3NextForCausalLM", "sgl"),
        ("mxfp4", "GptOssForCausalLM", "auto"),
        ("nvfp4", "MixtralForCausalLM", "sgl"),
        ("nvfp4-modelopt", "Qwen3MoeForCausalLM", "transformers"),
        ("nvfp4-modelopt", "Phi3ForCausalLM", "sgl"),
        ("mxfp4-packed", "Qwen3MoeForCausalLM", "sgl"),
        ("nf4", "Qwen3MoeForCausalLM", "sgl"),
        ("nf4", "Phi3ForCausalLM", "sgl"),
        ("llm-int8", "Gemma2ForCausalLM", "transformers"),
        ("fp4", "DeepseekV3ForCausalLM", "sgl"),
    ],
)
def test_quantized_checkpoints_of_other_decoders(
    name: str, architecture: str, impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantised, and packed where our kernels can."""
    if architecture == "Qwen3NextForCausalLM":
        dense, _ = tiny_hybrid(tmp_path / "dense", "next", hidden_size=96, moe_intermediate_size=32)
    else:
        dense = tiny_transformer(tmp_path / "dense", architecture, **ARCHITECTURES[architecture])
    kept = ("lm_head", "attn", "shared_expert") if name == "mxfp4" or "Next" in architecture else ("lm_head",)
    folder = quantize_folder(
        tmp_path / "quantized", dense, name, is_quantized=lambda module: not any(its in module for its in kept)
    )
    prompt = random_sequences(384, lengths=(40, 20))[0]
    expected = Reference(dense, architecture).logprobs(prompt)
    for is_packed in (False,) if impl == "transformers" else (False, True):
        monkeypatch.setattr(loader, "keeps_groups", lambda device, is_packed=is_packed: is_packed)
        with Engine(str(folder), **{**OPTIONS, "model_impl": impl}) as engine:
            assert engine.get_server_info()["checkpoint_format"].startswith("safetensors: ")
            result = engine.generate(
                input_ids=prompt, sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
            )
        given = torch.tensor([each[0] for each in result["meta_info"]["input_token_logprobs"][1:]])
        torch.testing.assert_close(given, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["awq", "gptq", "packed", "fp8-block"])
def test_some_modules_are_not_quantized(name: str, tmp_path: Path) -> None:
    """Layers, and single ones of matrices that are fused."""
    folder, dense = tiny_quantized(
        tmp_path,
        name,
        is_quantized=lambda module: ".0." not in module and not module.endswith(("k_proj", "up_proj")),
    )
    sequences = random_sequences(384)
    check(Paged(load(folder), sequences, page_size=16).run(at_once(sequences)), reference_logits(dense, sequences))


@pytest.mark.parametrize("name", ["gptq", "packed-zeros"])
def test_a_head_may_be_quantized(name: str, tmp_path: Path) -> None:
    folder, dense = tiny_quantized(tmp_path, name, is_quantized=lambda module: True, num_hidden_layers=1)
    sequences = random_sequences(384, lengths=(20, 20))
    check(Paged(load(folder), sequences, page_size=16).run(at_once(sequences)), reference_logits(dense, sequences))


def test_the_first_group_whose_targets_hold_a_module_says_its_layout(tmp_path: Path) -> None:
    folder, dense = tiny_quantized(
        tmp_path, "packed", is_quantized=lambda module: "down" not in module and module != "lm_head"
    )
    config = compressed(weights_of(4, "group", group_size=32), "pack-quantized")
    config["config_groups"]["others"] = {
        "targets": ["re:.*down_proj", "model.norm"],
        "weights": weights_of(8, "channel", type="float"),
        "format": "float-quantized",
    }
    edit_json(folder / "config.json", quantization_config=config)
    sequences = random_sequences(384)
    check(Paged(load(folder), sequences, page_size=16).run(at_once(sequences)), reference_logits(dense, sequences))
    assert "4 bits, groups of 32" in ModelConfig.from_pretrained(folder).checkpoint_format


@pytest.mark.parametrize("has_formats", [True, False])
def test_groups_of_several_formats_are_read_each_in_its_own(has_formats: bool, tmp_path: Path) -> None:
    """As llm-compressor writes `mixed-precision`: older versions name no format for each group."""
    dense = tiny_checkpoint(tmp_path / "dense")
    layouts = {"packed": ("q", "k", "v"), "float8": ("o",), "nvfp4": ("down",), "mxfp4-packed": ("gate",)}
    merged, before = load_file(dense / "model.safetensors"), dense
    for name, modules in layouts.items():

        def is_its(module: str, modules: tuple[str, ...] = modules) -> bool:
            return module.split(".")[-1].removesuffix("_proj") in modules

        folder = quantize_folder(tmp_path / name, before, name, is_quantized=is_its)
        read = load_file(before / "model.safetensors")  # what the quantised ones say, and the others
        merged |= {key: its for key, its in read.items() if is_its(key.removesuffix(".weight"))}
        before = folder
    save_file(merged, dense / "model.safetensors", metadata={"format": "pt"})
    groups = {}
    for name, modules in layouts.items():
        config = CONFIGS[name]
        targets = [f"re:.*[._]{its}_proj$" for its in modules]
        own = {"format": config["format"]} if has_formats else {}
        groups[name] = {**config["config_groups"]["group_0"], "targets": targets, **own}
    config = {**PACKED, "format": "mixed-precision", "config_groups": groups, "ignore": ["re:.*up_proj", "lm_head"]}
    edit_json(folder / "config.json", quantization_config=config)
    sequences = random_sequences(384)
    check(Paged(load(folder), sequences, page_size=16).run(at_once(sequences)), reference_logits(dense, sequences))
    found = ModelConfig.from_pretrained(folder).checkpoint_format
    assert all(words in found for words in ("4 bits, groups of 32", "e4m3, a scale a row", "NVFP4", "MXFP4"))


@pytest.mark.parametrize("actorder", [None, False, "weight", "static"])
def test_a_strategy_follows_from_the_size_of_groups(actorder: object, tmp_path: Path) -> None:
    """And an order that the writer alone had needs no index."""
    folder, dense = tiny_quantized(tmp_path, "packed")
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "actorder": actorder}
    edit_json(folder / "config.json", quantization_config=compressed(weights, "pack-quantized"))
    sequences = random_sequences(384, lengths=(20, 20))
    check(Paged(load(folder), sequences, page_size=16).run(at_once(sequences)), reference_logits(dense, sequences))


def test_groups_of_activations_alone_change_no_weights(tmp_path: Path) -> None:
    """And scales and zeros of queries, keys and values that stand beside them are for others."""

    def add(tensors: Tensors) -> None:
        for name in ("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"):
            tensors[f"model.layers.0.self_attn.{name}"] = torch.tensor([0.1])

    folder, dense = tiny_quantized(tmp_path, "packed", change=add)
    activations = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config = {**PACKED, "kv_cache_scheme": activations}
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": activations}
    edit_json(
        folder / "config.json",
        quantization_config={**config, "config_groups": {"a": attention, **PACKED["config_groups"]}},
    )
    sequences = random_sequences(384)
    check(Paged(load(folder), sequences, page_size=16).run(at_once(sequences)), reference_logits(dense, sequences))


def test_targets_may_be_names_in_the_file_of_a_model_that_sees(tmp_path: Path) -> None:
    """Which are not those of its language model alone."""
    name = "Gemma3ForConditionalGeneration"
    dense = tiny_transformer(tmp_path / "dense", name, **ARCHITECTURES[name])
    folder = quantize_folder(
        tmp_path / "quantized", dense, "packed", is_quantized=lambda module: "language_model" in module
    )
    config = {**PACKED, "config_groups": {"a": {**PACKED["config_groups"]["group_0"]}}}
    config["config_groups"]["a"]["targets"] = ["re:.*language_model.*_proj$"]
    edit_json(folder / "config.json", quantization_config=config)
    found = [
        load_decoder(ModelConfig.from_pretrained(its), dtype="float32").weights.layers[1].qkv
        for its in (folder, dense)
    ]
    assert torch.equal(*found)


MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("gptq-zeros", "quantize_config.json", {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}),
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
        ("fp8-tensor", "hf_quant_config.json", MODELOPT),
        ("fp8-tensor", "config.json", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}),
        ("nf4", "config.json", {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}),
        ("llm-int8", "config.json", {"quantization_config": CONFIGS["llm-int8"]}),
        ("nvfp4-modelopt", "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}),
    ],
)
@pytest.mark.parametrize("model_impl", ["sgl", "transformers"])
def test_a_scheme_may_stand_in_a_file_of_its_own(
    name: str, file: str, content: dict[str, Any], model_impl: ModelImpl, tmp_path: Path
) -> None:
    """As older writers and ModelOpt have it."""
    folder, dense = tiny_quantized(tmp_path, name)
    edit_json(folder / "config.json", quantization_config=...)
    (folder / file).touch()
    if file == "config.json":
        edit_json(folder / file, **content)
    else:
        (folder / file).write_text(json.dumps(content))
    prompt = list(range(3, 40))
    with Engine(str(folder), **{**OPTIONS, "model_impl": model_impl}) as engine:
        result = engine.generate(input_ids=prompt, sampling_params={"temperature": 0.0, "max_new_tokens": 8})
    assert result["output_ids"] == Reference(dense).greedy(prompt, 8)


def test_symmetric_gptq_of_either_version_has_its_zeros_in_the_middle(tmp_path: Path) -> None:
    """Some writers call a checkpoint `gptq` whose zeros are 8, as v2's are."""

    def as_in_v2(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("qzeros"):
                tensors[name] = tensors[name] + 0x11111111

    folder, dense = tiny_quantized(tmp_path, "gptq", change=as_in_v2)
    sequences = random_sequences(384, lengths=(20, 20))
    check(Paged(load(folder), sequences, page_size=16).run(at_once(sequences)), reference_logits(dense, sequences))


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ("awq", ModelError, ["not an object"]),
        ({}, UnsupportedModel, ["quant_method None", "awq, gptq"]),
        ({"quant_method": "quanto"}, UnsupportedModel, ["quanto", "awq, gptq"]),
        (
            {"quant_method": "bitsandbytes"},
            UnsupportedModel,
            ["bitsandbytes' 'fp4' (but nf4 and fp4 with load_in_4bit"],
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"},
            UnsupportedModel,
            ["bitsandbytes' 'af4' (but nf4"],
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": 1}, ModelError, ["load_in_8bit is 1, neither true nor"]),
        ({**AWQ, "bits": 3}, UnsupportedModel, ["3 bits"]),
        ({**AWQ, "version": "gemv"}, UnsupportedModel, ["gemv", "gemm"]),
        ({**AWQ, "group_size": 0}, ModelError, ["group_size", "0"]),
        ({**AWQ, "zero_point": "yes"}, ModelError, ["zero_point", "neither true nor false"]),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            UnsupportedModel,
            ["ModelOpt's 'W4A8_AWQ' (but FP8, MXFP8 and NVFP4)"],
        ),
        ({**GPTQ, "bits": 2}, UnsupportedModel, ["2 bits"]),
        ({**GPTQ, "bits": "4"}, ModelError, ["'4'", "whole number"]),
        ({**GPTQ, "checkpoint_format": "marlin"}, UnsupportedModel, ["marlin"]),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, UnsupportedModel, ["+:.*down.*"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ModelError, ["weight_block_size", "two"]),
        ({"quant_method": "compressed-tensors"}, ModelError, ["config_groups"]),
        (compressed(weights_of(2, "group"), "pack-quantized"), UnsupportedModel, ["2 bits"]),
        (
            compressed(weights_of(4, "group"), "nvfp4-pack-quantized"),
            UnsupportedModel,
            ["nvfp4", "'int' in 4 bits"],
        ),
        (
            compressed(weights_of(8, "group", **FLOAT), "nvfp4-pack-quantized"),
            UnsupportedModel,
            ["'float' in 8 bits"],
        ),
        (
            compressed(weights_of(4, "group", **FLOAT), "nvfp4-pack-quantized"),
            UnsupportedModel,
            ["strategy 'group'"],
        ),
        (compressed(weights_of(4, "tensor_group"), "pack-quantized"), UnsupportedModel, ["tensor_group"]),
        (
            compressed(weights_of(4, "group"), "pack-quantized", targets=["re:("]),
            ModelError,
            ["regular expression"],
        ),
        (compressed(None, "pack-quantized"), UnsupportedModel, ["without"]),
        (
            {**PACKED, "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
            UnsupportedModel,
            ["transforms (transform_config)"],
        ),
        ({**PACKED, "transform_config": "R1"}, ModelError, ["transform_config is 'R1', not an object"]),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, UnsupportedModel, ["sparse"]),
        ({**PACKED, "sparsity_config": ["dense"]}, ModelError, ["sparsity_config is ['dense'], not an object"]),
        ({**PACKED, "config_groups": {"group_0": {"targets": ["Linear"]}}}, ModelError, ["without `weights`"]),
        (compressed(weights_of(4, "channel"), "marlin-24"), UnsupportedModel, ["marlin-24"]),
        (compressed(weights_of(6, "group", **FLOAT), "mxfp6-pack-quantized"), UnsupportedModel, ["mxfp6"]),
        (
            compressed(weights_of(8, "block", block_structure="48by32"), "int-quantized"),
            ModelError,
            ["block_structure is '48by32', not two"],
        ),
        (
            {**CONFIGS["autoround"], "extra_config": {"a": {"bits": 8}}},
            UnsupportedModel,
            ["AutoRound with other options for some modules ('a')"],
        ),
        (
            {**CONFIGS["autoround"], "packing_format": "auto_round"},
            UnsupportedModel,
            ["'auto_round' (but auto_round:"],
        ),
        ({**CONFIGS["autoround"], "bits": 2, "extra_config": None}, UnsupportedModel, ["2 bits"]),
        (
            {**CONFIGS["autoround"], "rotation_config": {"block_size": 32, "hadamard_type": "hadamard"}},
            UnsupportedModel,
            ["AutoRound's rotations (rotation_config)"],
        ),
        (
            {**CONFIGS["autoround"], "spinquant_config": {"r1": True}},
            UnsupportedModel,
            ["AutoRound's rotations (spinquant_config)"],
        ),
        ({**GPTQ, "dynamic": 8}, ModelError, ["dynamic is 8, not an object"]),
    ],
)
def test_a_scheme_that_cannot_be_read_says_why(
    config: Any, error: type[ModelError], words: list[str], tmp_path: Path
) -> None:
    folder, _ = tiny_quantized(tmp_path, "awq", num_hidden_layers=1)
    edit_json(folder / "config.json", quantization_config=config)
    with pytest.raises(error) as caught:
        ModelConfig.from_pretrained(folder)
    assert all(word in str(caught.value) for word in [str(folder), *words]), str(caught.value)


def drop(part: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(f"{Q_PROJ}.{part}")


def put(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[f"{Q_PROJ}.{part}"] = change(tensors[f"{Q_PROJ}.{part}"])

    return apply


STATE = "weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> Callable[[Tensors], None]:
    """Other fields of how bitsandbytes stored it."""
    return put(
        STATE,
        lambda its: torch.tensor([*json.dumps({**json.loads(bytes(its.tolist())), **changes}).encode()]).byte(),
    )


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("awq", drop("scales"), [f"{Q_PROJ}.qweight without {Q_PROJ}.scales"]),
        ("awq", drop("qzeros"), ["qzeros"]),
        ("awq", drop("qweight"), [f"lacks 1 tensor that its config.json calls for: {Q_PROJ}.weight"]),
        ("awq", put("qweight", lambda its: its[:, :-1].contiguous()), ["scales", "[2, 64]", "[2, 56]"]),
        ("awq", put("qweight", lambda its: its.float()), ["qweight", "F32", "I32"]),
        ("awq", put("qweight", lambda its: its.flatten()), ["qweight", "[512]", "not a matrix"]),
        ("awq", put("scales", lambda its: its[:1].contiguous()), ["scales", "[1, 64]", "[2, 64]"]),
        ("awq", put("scales", lambda its: its.int()), ["scales", "I32", "F16"]),
        ("gptq-order", drop("g_idx"), ["g_idx"]),
        ("gptq-order", put("g_idx", lambda its: its + 1), ["g_idx", "group 2 of 2"]),
        ("gptq", put("qzeros", lambda its: its[:, :1].contiguous()), ["qzeros", "[2, 1]", "[2, 8]"]),
        ("gptq", put("bias", lambda its: its + 1), [f"{Q_PROJ}.bias", "no place"]),
        ("packed", put("weight_shape", lambda its: its * 2), ["weight_shape", "[128, 128]", "[64, 8]"]),
        ("packed-zeros", drop("weight_zero_point"), ["weight_zero_point"]),
        ("int8", drop("weight_scale"), ["weight_scale"]),
        ("int8", put("weight_scale", lambda its: its[:5].contiguous()), ["weight_scale", "[5, 1]", "[64, 1]"]),
        ("fp8-block", drop("weight_scale_inv"), ["weight_scale_inv"]),
        ("fp8-block", put("weight_scale_inv", lambda its: its.T.contiguous()), ["[2, 3]", "[3, 2]"]),
        ("fp8-block", put("weight", lambda its: its.view(torch.float8_e5m2)), ["F8_E5M2"]),
        ("nf4", drop(STATE), ["weight in", f"has no {Q_PROJ}.{STATE}, nor __fp4"]),
        ("nf4", put(STATE, lambda its: its[:-1].clone()), [f"{Q_PROJ}.{STATE}", "is no JSON"]),
        ("nf4", put(STATE, lambda its: torch.full((60000,), ord("["), dtype=torch.uint8)), [STATE, "is no JSON"]),
        ("nf4", put(STATE, lambda its: torch.zeros(70000, dtype=torch.uint8)), ["70000 bytes, more than 65536"]),
        ("nf4", put(STATE, lambda its: its.int()), [f"{Q_PROJ}.{STATE}", "is I32 [", "not bytes [n]"]),
        ("nf4", put(STATE, lambda its: its[None]), [f"{Q_PROJ}.{STATE}", "is U8 [1, ", "not bytes [n]"]),
        ("nf4", state(quant_type="af4"), ["has the quant_type 'af4'; these are read: nf4, fp4"]),
        ("nf4", state(shape=[64, 64, 1]), ["has the shape [64, 64, 1], not that of a matrix"]),
        ("nf4", state(shape=[64, -1]), ["has the shape -1, not a whole number"]),
        ("nf4", state(shape=[64, 32]), [f"{Q_PROJ}.weight in", "[2048, 1]", "NF4 of [64, 32] makes it [1024, 1]"]),
        ("nf4", state(blocksize=0), ["has the blocksize 0, not a whole number"]),
        ("nf4", state(nested_offset=float("nan")), ["has the nested_offset nan, no number"]),
        ("nf4", state(nested_blocksize=8), [f"{Q_PROJ}.weight.nested_absmax", "is [4]", "makes it [8]"]),
        ("nf4", drop("weight.absmax"), [f"weight without {Q_PROJ}.weight.absmax, which NF4 calls for"]),
        ("nf4", drop("weight.quant_map"), [f"weight without {Q_PROJ}.weight.quant_map"]),
        ("nf4", drop("weight.nested_quant_map"), [f"weight without {Q_PROJ}.weight.nested_quant_map"]),
        ("nf4", put("weight.absmax", lambda its: its.float()), ["weight.absmax", "F32; expected one of U8"]),
        ("nf4-plain", put("weight.absmax", lambda its: its[1:].clone()), ["weight.absmax", "is [63]", "it [64]"]),
        (
            "nf4-plain",
            put("weight", lambda its: its[1:].clone()),
            [f"{Q_PROJ}.weight in", "[2047, 1]", "[2048, 1]"],
        ),
        ("llm-int8", drop("SCB"), [f"weight without {Q_PROJ}.SCB"]),
        ("llm-int8", put("SCB", lambda its: its[1:].clone()), ["SCB", "is [63]", "makes it [64]"]),
        ("llm-int8", put("weight_format", lambda its: its + 2), ["weight_format", "is 2, not 0"]),
        ("nvfp4", drop("weight_global_scale"), [f"weight_packed without {Q_PROJ}.weight_global_scale", "NVFP4"]),
        ("nvfp4", drop("weight_scale"), [f"weight_packed without {Q_PROJ}.weight_scale"]),
        ("nvfp4", put("weight_scale", lambda its: its.float()), ["weight_scale", "F32; expected one of F8_E4M3"]),
        ("nvfp4", put("weight_scale", lambda its: its[:, :2].contiguous()), ["[64, 2]", "NVFP4", "[64, 4]"]),
        ("nvfp4", put("weight_packed", lambda its: its.int()), ["weight_packed", "I32; expected one of U8"]),
        (
            "nvfp4",
            put("weight_global_scale", lambda its: its * 0),
            ["weight_global_scale", "0.0, not a number above"],
        ),
        ("nvfp4", put("weight_global_scale", lambda its: its / 0), ["weight_global_scale", "inf, not a number"]),
        ("nvfp4-modelopt", drop("weight_scale_2"), [f"weight without {Q_PROJ}.weight_scale_2"]),
        ("nvfp4-modelopt", put("weight_scale_2", lambda its: its * float("nan")), ["weight_scale_2", "nan"]),
        ("nvfp4-modelopt", put("weight", lambda its: its.view(torch.int8)), ["weight", "I8; expected one of U8"]),
        ("mxfp8", put("weight_scale", lambda its: its | 255), ["weight_scale", "255, which is no number"]),
        ("mxfp8", put("weight_scale", lambda its: its[:, :1].contiguous()), ["is [64, 1]", "makes it [64, 2]"]),
        ("int8-block", drop("weight_zero_point"), ["weight_zero_point"]),
        ("int8-block", put("weight_zero_point", lambda its: its[:1].clone()), ["is [1, 2]", "makes it [2, 2]"]),
        ("packed-tensor-zeros", drop("weight_zero_point"), ["weight_zero_point"]),
        ("mxfp4-packed", put("weight_scale", lambda its: its | 255), ["weight_scale", "255, which is no number"]),
    ],
)
def test_tensors_that_make_no_matrix_are_named(
    name: str, change: Callable[[Tensors], None], words: list[str], tmp_path: Path
) -> None:
    folder, _ = tiny_quantized(tmp_path, name, change=change)
    with pytest.raises(WeightsError) as caught:
        load(folder)
    assert all(word in str(caught.value) for word in [Q_PROJ, *words]), str(caught.value)


def test_codes_of_bitsandbytes_may_be_stored_as_wider_numbers(tmp_path: Path) -> None:
    """As FSDP wants them (`bnb_4bit_quant_storage`)."""

    def widen(tensors: Tensors) -> None:
        for name in tensors:
            if f"{name}.absmax" in tensors:
                tensors[name] = tensors[name].flatten().view(torch.bfloat16)[:, None]

    folder, dense = tiny_quantized(tmp_path, "nf4", change=widen)
    sequences = random_sequences(384, lengths=(20, 20))
    check(Paged(load(folder), sequences, page_size=16).run(at_once(sequences)), reference_logits(dense, sequences))


def test_groups_that_do_not_divide_the_columns_are_named(tmp_path: Path) -> None:
    folder, _ = tiny_quantized(tmp_path, "awq")
    edit_json(folder / "config.json", quantization_config={**AWQ, "group_size": 40})
    with pytest.raises(WeightsError, match="columns, which groups of 40 do not divide"):
        load(folder)


def test_matrices_of_another_size_than_the_config_says_are_named(tmp_path: Path) -> None:
    folder, _ = tiny_quantized(tmp_path, "awq")
    edit_json(folder / "config.json", intermediate_size=128)
    with pytest.raises(WeightsError, match=r"_proj\.weight .* its config\.json makes it \[(128, 64|64, 128)\]"):
        load(folder)


def test_mxfp4_equals_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (2, 6, 3), dtype=torch.uint8, generator=generator)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantize_mxfp4(blocks, scales).transpose(-1, -2), expected)
