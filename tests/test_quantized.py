"""Quantised checkpoints equal transformers with the dequantised weights; damaged ones are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl.errors import ModelError, UnsupportedModel, WeightsError
from sgl.runtime.engine import Engine
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.model.quantized.codes import dequantize_mxfp4
from tests.test_hf_models import OPTIONS, Reference
from tests.test_models import Paged, at_once, check, mixed, random_sequences, reference_logits
from tests.tiny_models import edit_json
from tests.tiny_quantized import (
    AWQ,
    CONFIGS,
    GPTQ,
    Tensors,
    compressed,
    quantize_folder,
    tiny_quantized,
    weights_of,
)
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer

FAMILIES = {"llama": {}, "mistral": {}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {}}
LAYOUTS = [name for name in CONFIGS if name != "mxfp4"]  # which only experts have
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


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_family_in_every_layout(name: str, family: str, tmp_path: Path) -> None:
    test_quantized_checkpoints_equal_transformers_with_dequantized_weights(name, family, tmp_path)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("awq", "Gemma2ForCausalLM"),
        ("gptq-order", "MixtralForCausalLM"),
        ("fp8-block", "Qwen3MoeForCausalLM"),
        ("mxfp4", "GptOssForCausalLM"),
    ],
)
def test_quantized_checkpoints_of_other_decoders(name: str, architecture: str, tmp_path: Path) -> None:
    dense = tiny_transformer(tmp_path / "dense", architecture, **ARCHITECTURES[architecture])
    is_kept = "attn" if name == "mxfp4" else "nothing"
    folder = quantize_folder(tmp_path / "quantized", dense, name, is_quantized=lambda module: is_kept not in module)
    prompt = random_sequences(384, lengths=(40, 20))[0]
    expected = Reference(dense, architecture).logprobs(prompt)
    with Engine(str(folder), **OPTIONS) as engine:
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


def test_the_first_group_whose_targets_hold_a_module_says_its_layout(tmp_path: Path) -> None:
    folder, dense = tiny_quantized(tmp_path, "packed", is_quantized=lambda module: "down" not in module)
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
        ({"quant_method": "bitsandbytes"}, UnsupportedModel, ["bitsandbytes", "awq, gptq"]),
        ({**AWQ, "bits": 3}, UnsupportedModel, ["3 bits"]),
        ({**AWQ, "version": "gemv"}, UnsupportedModel, ["gemv", "gemm"]),
        ({**AWQ, "group_size": 0}, ModelError, ["group_size", "0"]),
        ({**AWQ, "zero_point": "yes"}, ModelError, ["zero_point", "neither true nor false"]),
        ({**GPTQ, "bits": 2}, UnsupportedModel, ["2 bits"]),
        ({**GPTQ, "bits": "4"}, ModelError, ["'4'", "whole number"]),
        ({**GPTQ, "checkpoint_format": "marlin"}, UnsupportedModel, ["marlin"]),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, UnsupportedModel, ["+:.*down.*"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ModelError, ["weight_block_size", "two"]),
        ({"quant_method": "compressed-tensors"}, ModelError, ["config_groups"]),
        (compressed(weights_of(2, "group"), "pack-quantized"), UnsupportedModel, ["2 bits"]),
        (compressed(weights_of(4, "group"), "nvfp4-pack-quantized"), UnsupportedModel, ["nvfp4"]),
        (compressed(weights_of(4, "tensor_group"), "pack-quantized"), UnsupportedModel, ["tensor_group"]),
        (
            compressed(weights_of(4, "group"), "pack-quantized", targets=["re:("]),
            ModelError,
            ["regular expression"],
        ),
        (compressed(None, "pack-quantized"), UnsupportedModel, ["without"]),
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
    ],
)
def test_tensors_that_make_no_matrix_are_named(
    name: str, change: Callable[[Tensors], None], words: list[str], tmp_path: Path
) -> None:
    folder, _ = tiny_quantized(tmp_path, name, change=change)
    with pytest.raises(WeightsError) as caught:
        load(folder)
    assert all(word in str(caught.value) for word in [Q_PROJ, *words]), str(caught.value)


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
