"""Families with layers of sgl's own whose checkpoints, ropes or norms are unlike Llama's: in an engine, against
transformers; how their configs are spelled; and on a GPU's path for single tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tests.interpreter  # noqa: F401 - mends it
from sgl import Engine
from sgl.errors import UnsupportedModel, WeightsError
from sgl.kernels.attention.base import AttentionStep
from sgl.kernels.attention.torch import TorchAttention
from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.model.rotary import rotary_order
from sgl.runtime.model.tokens import Tokens
from tests import test_lora
from tests.test_hf_models import check_served
from tests.test_models import LONGROPE, Paged, at_once, check, mixed, random_sequences, reference_logits
from tests.tiny_adapters import ALL, ATTENTION, merged, tiny_adapter
from tests.tiny_models import edit_json, tiny_checkpoint
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer


@pytest.mark.parametrize(
    "architecture",
    [
        "Gemma3ForCausalLM",
        "GptOssForCausalLM",
        pytest.param("Gemma3ForConditionalGeneration", marks=pytest.mark.slow),
        pytest.param("Phi3ForCausalLM", marks=pytest.mark.slow),
        pytest.param("Gemma2ForCausalLM", marks=pytest.mark.slow),
        pytest.param("Glm4ForCausalLM", marks=pytest.mark.slow),
        pytest.param("GlmForCausalLM", marks=pytest.mark.slow),
        pytest.param("Olmo2ForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_tokens_and_logprobs_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, architecture, **ARCHITECTURES[architecture])
    check_served(path, architecture, "sgl")


@pytest.mark.parametrize(("context", "lengths"), [(None, (50, 90, 33)), (32, (20, 32, 23))])
def test_longrope_follows_the_context(context: int | None, lengths: tuple[int, ...], tmp_path: Path) -> None:
    """Beyond the original one or within it; transformers takes each step's."""
    options: dict[str, Any] = {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32}
    path = tiny_checkpoint(tmp_path, "phi3", **options)
    sequences = random_sequences(384, lengths)
    expected = reference_logits(path, sequences)
    decoder = load_decoder(ModelConfig.from_pretrained(path), max_positions=context)
    for page_size, steps in ((16, at_once(sequences)), (4, mixed(sequences))):
        check(Paged(decoder, sequences, page_size).run(steps), expected)


def test_older_spellings_of_ropes_are_read(tmp_path: Path) -> None:
    gemma = tiny_checkpoint(tmp_path / "gemma", "gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    edit = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "sliding_window_pattern": 3, "layer_types": ...}
    edit_json(
        gemma / "config.json", **edit, rope_parameters=..., rope_scaling={"rope_type": "linear", "factor": 8.0}
    )
    config = ModelConfig.from_pretrained(gemma)
    assert (config.rope.type, config.rope.theta, config.rope.factor) == ("linear", 5e5, 8.0)
    assert config.local_rope is not None
    assert (config.local_rope.type, config.local_rope.theta) == ("default", 2e4)
    assert config.context_length == 256
    assert config.windows == (24, 24, None, 24)
    sequences = random_sequences(384)
    check(Paged(load_decoder(config), sequences, 4).run(mixed(sequences)), reference_logits(gemma, sequences))
    edit_json(gemma / "config.json", use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModel, match="later tokens"):
        ModelConfig.from_pretrained(gemma)

    phi = tiny_checkpoint(tmp_path / "phi", "phi3", rope_scaling=LONGROPE, original_max_position_embeddings=64)
    now = ModelConfig.from_pretrained(phi).rope
    for kind in ("su", "yarn"):
        scaling = {"type": kind, **{key: its for key, its in LONGROPE.items() if key != "rope_type"}}
        edit_json(phi / "config.json", rope_parameters=..., rope_scaling=scaling)
        assert ModelConfig.from_pretrained(phi).rope == now


def test_fused_projections_of_another_size_are_named(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "phi3")
    tensors, name = load_file(path / "model.safetensors"), "model.layers.1.self_attn.qkv_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, path / "model.safetensors")
    with pytest.raises(
        WeightsError, match=r"qkv_proj.weight .* is \[127, 64\]; its config.json makes it \[128, 64\]"
    ):
        load_decoder(ModelConfig.from_pretrained(path))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("glm4", (*ATTENTION, "gate_up_proj")),
        ("phi3", ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")),
        ("gemma3", ALL),
        ("olmo2", ALL),
    ],
)
def test_an_adapter_equals_the_merged_model(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", family)
    adapter = tiny_adapter(tmp_path / "adapter", model, targets=targets)
    with Engine(model_path=model, lora_paths={"its": adapter}, **test_lora.OPTIONS) as engine:
        result = test_lora.ask(engine, test_lora.PROMPT, "its")
    test_lora.check(result, merged(model, adapter), test_lora.PROMPT)


@pytest.mark.parametrize("family", ["phi3", "glm4"])
def test_packed_rows_get_the_order_of_plain_ones(family: str, tmp_path: Path) -> None:
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path, family, partial_rotary_factor=0.5))
    weights, order = load_decoder(config).weights, rotary_order(config)
    layer = weights.layers[1]
    assert isinstance(layer.qkv, torch.Tensor)
    layer.qkv = packed = GroupedMatrix.rounded(layer.qkv)
    expected = packed.dequantized(torch.float32).view(-1, config.head_dim, config.hidden_size)
    expected[: config.num_heads + config.num_kv_heads] = expected[: config.num_heads + config.num_kv_heads, order]
    weights.arrange(config)
    assert torch.equal(packed.dequantized(torch.float32).view_as(expected), expected)


@pytest.mark.costly
@pytest.mark.usefixtures("plain_torch")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py runs them")
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma3", "gpt-oss"),
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("gemma2", "phi3", "olmo2", "glm4")),
    ],
)
def test_a_gpus_path_of_a_single_token_equals_that_of_many(family: str, tmp_path: Path) -> None:
    """In Triton's interpreter."""
    decoder = load_decoder(ModelConfig.from_pretrained(tiny_checkpoint(tmp_path, family, tie_word_embeddings=True)))
    ids, hidden = torch.tensor([5, 9, 200, 7]), []
    for is_single in (False, True):
        kv = KVCache(decoder.config, 2, 16, decoder.dtype, decoder.device)
        attention = TorchAttention(decoder.attention_shape(16))
        places = torch.arange(4)
        for some in (slice(0, 3), slice(3, 4)):
            now, pages = np.array([some.stop], np.int32), np.ones((1, 1), np.int32)
            attention.plan(AttentionStep(now - some.start, now, pages))
            given = ids[some], places[some], places[some] + 16
            if is_single and some.start:
                with torch.inference_mode():
                    out = decoder._forward_single(decoder.embed(Tokens(*given)), kv, attention)
            else:
                out = decoder.forward(Tokens(*given), kv, attention)
        hidden.append(out[-1])
    torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-4, atol=1e-4)
