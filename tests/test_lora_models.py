"""LoRA adapters of every kind of model equal the merged weights: alone, in chunks, cached, and side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sgl import Engine
from sgl.errors import AdapterError
from tests.test_gdn_models import tiny_hybrid
from tests.test_lora import OPTIONS, PROMPT, ask, check
from tests.test_mla import MODELS as LATENT_MODELS
from tests.tiny_adapters import ALL, ATTENTION, MLP, greedy, merged, tiny_adapter
from tests.tiny_models import tiny_checkpoint
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer
from tests.tiny_vision import tiny_vision

LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", *MLP)
SHARED = ("shared_experts.up_proj", "shared_experts.down_proj")
DELTA = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


def _latent(name: str) -> Callable[[Path], Path]:
    return lambda path: tiny_transformer(path, LATENT_MODELS[name][0], **LATENT_MODELS[name][1])


def _any(architecture: str) -> Callable[[Path], Path]:
    return lambda path: tiny_transformer(path, architecture, **ARCHITECTURES[architecture])


def _hybrid(name: str) -> Callable[[Path], Path]:
    return lambda path: tiny_hybrid(path, name)[0]


MODELS: dict[str, tuple[Callable[[Path], Path], str, tuple[str, ...]]] = {
    "qwen3-moe": (lambda path: tiny_checkpoint(path, "qwen3-moe"), "sgl", ATTENTION),
    "qwen2-moe": (lambda path: tiny_checkpoint(path, "qwen2-moe"), "sgl", ALL),
    "mixtral": (lambda path: tiny_checkpoint(path, "mixtral"), "sgl", ATTENTION),
    "gpt-oss": (lambda path: tiny_checkpoint(path, "gpt-oss"), "sgl", ATTENTION),
    "gemma2": (lambda path: tiny_checkpoint(path, "gemma2"), "sgl", ALL),
    "glm": (lambda path: tiny_checkpoint(path, "glm"), "sgl", (*ATTENTION, "gate_up_proj", "down_proj")),
    "phi3": (
        lambda path: tiny_checkpoint(path, "phi3"),
        "sgl",
        ("qkv_proj", "gate_up_proj", "o_proj", "down_proj"),
    ),
    "gemma3 that sees": (_any("Gemma3ForConditionalGeneration"), "sgl", ALL),
    "deepseek-v2-lite": (_latent("v2-lite"), "sgl", LATENT),
    "deepseek-v2": (_latent("v2"), "sgl", LATENT),
    "deepseek-v3": (_latent("v3"), "sgl", LATENT),
    "deepseek-v3, its heads by halves": (_latent("v3-halves"), "sgl", LATENT),
    "qwen3-next": (_hybrid("next"), "sgl", (*ALL, *DELTA)),
    "qwen3-next, some dense": (_hybrid("next-mixed"), "sgl", (*ALL, *DELTA)),
    "qwen3.5": (_hybrid("3.5"), "sgl", (*ALL, *DELTA)),
    "qwen3.5-moe": (_hybrid("3.5-moe"), "sgl", (*ALL, *DELTA)),
    "qwen2.5-vl": (lambda path: tiny_vision(path, "Qwen2_5_VLForConditionalGeneration"), "sgl", ALL),
    "qwen3-vl": (lambda path: tiny_vision(path, "Qwen3VLForConditionalGeneration"), "sgl", ALL),
    "gpt2": (_any("GPT2LMHeadModel"), "transformers", ("c_attn", "c_proj", "c_fc")),
    "deepseek-v2 by transformers": (_any("DeepseekV2ForCausalLM"), "transformers", (*LATENT, "kv_b_proj", *SHARED)),
    "cohere": (_any("CohereForCausalLM"), "transformers", ALL),
    "phi": (_any("PhiForCausalLM"), "transformers", (*ATTENTION[:3], "dense", "fc1", "fc2")),
    "ernie-moe": (_any("Ernie4_5_MoeForCausalLM"), "transformers", ATTENTION),
    "smollm3": (_any("SmolLM3ForCausalLM"), "transformers", ALL),
    "neox": (_any("GPTNeoXForCausalLM"), "transformers", ("query_key_value", "dense", "dense_h_to_4h")),
}
ALWAYS = ("qwen2-moe", "deepseek-v3", "qwen3-next", "gpt2", "smollm3", "qwen2.5-vl")
SOME = ("o_proj", "out_proj", "c_attn", "query_key_value", "fc1")


@pytest.mark.costly
@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_adapters_equal_the_merged_models(name: str, tmp_path: Path) -> None:
    make, impl, targets = MODELS[name]
    model = make(tmp_path / "model")
    adapters = {
        "all": tiny_adapter(tmp_path / "all", model, seed=1, targets=targets),
        "some": tiny_adapter(
            tmp_path / "some",
            model,
            seed=2,
            rank=2,
            lora_alpha=5,
            targets=tuple(its for its in targets if its in SOME),
        ),
    }
    oracles = {None: merged(model, None), **{each: merged(model, path) for each, path in adapters.items()}}
    options = {**OPTIONS, "lora_paths": adapters, "model_impl": impl}
    for chunk in (-1, 1, 7, 64):
        with Engine(model_path=model, **{**options, "chunked_prefill_size": chunk}) as engine:
            assert engine.config.model_impl == impl
            check(ask(engine, PROMPT, "all", 4), oracles["all"], PROMPT)
            if chunk not in (-1, 7):
                continue
            check(ask(engine, PROMPT, "all", 4), oracles["all"], PROMPT)  # its beginning is cached
            names = [None, "all", "some", "all", None]
            prompts = [PROMPT[i : i + 9 + i] for i in range(len(names))]
            params = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
            results = engine.generate(input_ids=prompts, sampling_params=params, lora_path=names)
            for each, prompt, result in zip(names, prompts, results, strict=True):
                assert result["output_ids"] == greedy(oracles[each], prompt, 6)
                alone = engine.generate(input_ids=prompt, sampling_params=params, lora_path=each)
                assert alone["output_ids"] == result["output_ids"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "option"),
    [
        *((name, "tp_size") for name in ("deepseek-v2", "qwen2-moe", "phi3")),
        *((name, "tp_size") for name in ("qwen3-next", "qwen3-next, some dense", "qwen3.5")),
        ("deepseek-v2", "pp_size"),
        ("qwen3-next, some dense", "pp_size"),
    ],
)
def test_adapters_among_ranks(name: str, option: str, tmp_path: Path) -> None:
    make, _, targets = MODELS[name]
    model = make(tmp_path / "model")
    adapter = tiny_adapter(tmp_path / "all", model, targets=targets)
    with Engine(model_path=model, **OPTIONS, lora_paths={"all": adapter}, **{option: 2}) as engine:
        check(ask(engine, PROMPT, "all"), merged(model, adapter), PROMPT)


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("deepseek-v3", "kv_b_proj", "kv_b_proj.*adapters of it need model_impl='transformers'"),
        ("deepseek-v3", "shared_experts.gate_proj", "adapters of shared experts need model_impl='transformers'"),
        ("qwen3-next", "shared_expert_gate", "gate of a shared expert"),
        ("qwen3-next", "lm_head", "adapters of embedding and head"),
        ("qwen3-vl", "visual.blocks.0.attn.qkv", "of what sees"),
        ("smollm3", "lm_head", "adapters of embedding and head"),
    ],
)
def test_what_adapters_may_not_change_is_named(name: str, target: str, words: str, tmp_path: Path) -> None:
    make, impl, _ = MODELS[name]
    model = make(tmp_path / "model")
    adapter = tiny_adapter(tmp_path / "adapter", model, targets=("o_proj", target))
    with pytest.raises(AdapterError, match=words):
        Engine(model_path=model, **OPTIONS, lora_paths={"its": adapter}, model_impl=impl)
