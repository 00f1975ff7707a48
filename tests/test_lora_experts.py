"""LoRA adapters of a mixture's experts: equal to merged weights, alone, in chunks, side by side and among ranks, with
matrices of single experts and of all in one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl import Engine
from sgl.errors import AdapterError
from tests.test_gdn_models import tiny_hybrid
from tests.test_lora import OPTIONS, PROMPT, ask, check
from tests.test_mla import MODELS as LATENT_MODELS
from tests.tiny_adapters import ALL, ATTENTION, greedy, merged, tiny_adapter
from tests.tiny_models import tiny_checkpoint
from tests.tiny_transformers import tiny_transformer
from tests.tiny_vision import tiny_vision

Form = Literal["single", "fused"]
PARAMS = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
MODELS: dict[str, Callable[[Path], Path]] = {
    **{
        name: lambda path, name=name: tiny_checkpoint(path, name, num_hidden_layers=2)  # type: ignore[misc]
        for name in ("qwen3-moe", "qwen2-moe", "mixtral", "gpt-oss")
    },
    "qwen3-vl-moe": lambda path: tiny_vision(path, "Qwen3VLMoeForConditionalGeneration"),
    "qwen3-next": lambda path: tiny_hybrid(path, "next-mixed")[0],
    "qwen3.5-moe": lambda path: tiny_hybrid(path, "3.5-moe")[0],
}
SHARED = ("qwen2-moe", "qwen3-next", "qwen3.5-moe")


def made(path: Path, name: str) -> tuple[Path, dict[str, Path]]:
    """A mixture, and adapters of its experts alone and with others, and of attention."""
    model = MODELS[name](path / "model")
    others = ALL if name in SHARED else ATTENTION  # what is called like an expert's is the shared one's, too
    adapters = {
        "fused": tiny_adapter(path / "fused", model, seed=2, rank=3, lora_alpha=5, targets=(), experts="fused"),
        "attention": tiny_adapter(path / "attention", model, seed=3, targets=ATTENTION),
    }
    if name != "gpt-oss":  # whose experts never were modules of their own
        adapters["single"] = tiny_adapter(path / "single", model, seed=1, targets=others, experts="single")
    return model, adapters


@pytest.mark.parametrize(
    "name", ["qwen3-moe", *(pytest.param(its, marks=pytest.mark.slow) for its in MODELS if its != "qwen3-moe")]
)
def test_adapters_of_experts_equal_the_merged_model(name: str, tmp_path: Path) -> None:
    model, adapters = made(tmp_path, name)
    oracles: dict[str | None, Any] = {None: merged(model, None)}
    oracles |= {each: merged(model, path) for each, path in adapters.items()}
    for chunk in (-1, 1, 7, 64):
        options = {**OPTIONS, "lora_paths": adapters, "chunked_prefill_size": chunk}
        with Engine(model_path=model, **options) as engine:
            for each in {"single", "fused"} & adapters.keys():
                check(ask(engine, PROMPT, each, 4), oracles[each], PROMPT)
            if chunk not in (-1, 7):
                continue
            names = [None, *adapters, *adapters, None]
            prompts = [PROMPT[i : i + 9 + i] for i in range(len(names))]
            results = engine.generate(input_ids=prompts, sampling_params=PARAMS, lora_path=names)
            for its, prompt, result in zip(names, prompts, results, strict=True):
                assert result["output_ids"] == greedy(oracles[its], prompt, 6)
                alone = engine.generate(input_ids=prompt, sampling_params=PARAMS, lora_path=its)
                assert alone["output_ids"] == result["output_ids"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("qwen3-moe", "tp_size"),
        *(pytest.param(its, "tp_size", marks=pytest.mark.slow) for its in MODELS if its != "qwen3-moe"),
        *(pytest.param(its, "pp_size", marks=pytest.mark.slow) for its in ("qwen3-moe", "qwen3.5-moe")),
    ],
)
def test_adapters_of_experts_among_ranks(name: str, option: str, tmp_path: Path) -> None:
    model, adapters = made(tmp_path, name)
    with Engine(model_path=model, **OPTIONS, lora_paths=adapters, **{option: 2}) as engine:
        for each in {"single", "fused"} & adapters.keys():
            check(ask(engine, PROMPT, each, 4), merged(model, adapters[each]), PROMPT)


@pytest.mark.parametrize("form", ["single", "fused"])
@pytest.mark.parametrize("impl", ["sgl", "transformers"])
def test_experts_of_other_models_are_refused(form: Form, impl: str, tmp_path: Path) -> None:
    architecture, changes = LATENT_MODELS["v3"]
    model = tiny_transformer(tmp_path / "model", architecture, **changes)
    adapter = tiny_adapter(tmp_path / "adapter", model, targets=("o_proj",), experts=form)
    with pytest.raises(AdapterError, match="adapters of its experts are not supported, of attention"):
        Engine(model_path=model, **OPTIONS, lora_paths={"its": adapter}, model_impl=impl)


def test_slots_have_room_for_experts_where_that_is_asked_for(tmp_path: Path) -> None:
    model, adapters = made(tmp_path, "qwen3-moe")
    with Engine(model_path=model, **OPTIONS) as engine:
        assert engine.config.lora_target_modules == ATTENTION
        with pytest.raises(
            AdapterError, match=r"has experts.*lora_target_modules are k_proj.*start with all of them"
        ):
            engine.load_lora_adapter("its", str(adapters["fused"]))
    with Engine(model_path=model, **OPTIONS, lora_target_modules="experts") as engine:
        engine.load_lora_adapter("its", str(adapters["fused"]))
        check(ask(engine, PROMPT, "its", 4), merged(model, adapters["fused"]), PROMPT)


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("single", {"layers.0.mlp.experts.1.up_proj.lora_B": None}, "lacks base_model.*experts.1.up_proj.lora_B"),
        ("single", {"layers.0.mlp.experts.1.up_proj.lora_B": (33, 4)}, r"\[33, 4\]; the model and rank 4 make it"),
        ("single", {"layers.0.mlp.gate.lora_A": (4, 64)}, "adapters of what chooses experts are not supported"),
        ("fused", {"layers.0.mlp.experts.lora_A": None}, "lacks base_model.*experts.lora_A"),
        ("fused", {"layers.0.mlp.experts.base_layer.lora_A": (8, 64)}, r"\[8, 64\]; the model and rank 4 make it"),
        ("fused", {"target_parameters": ["mlp.experts.gate_up_proj"]}, "base_layer.*no matrix of a module"),
        (
            "fused",
            {"target_parameters": ["mlp.experts.bias"]},
            "adapters may change experts.gate_up_proj, experts.down",
        ),
        ("fused", {"target_parameters": ["mlp.gate.weight"]}, "adapters of what chooses experts"),
        ("fused", {"target_parameters": "mlp.experts.down_proj"}, "which are no names"),
        ("single", {"target_parameters": ["experts.down_proj"]}, "target_modules and target_parameters both have"),
    ],
)
def test_wrong_adapters_of_experts(form: Form, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", "qwen3-moe", num_hidden_layers=2)
    folder = tiny_adapter(tmp_path / "adapter", model, targets=("q_proj",), experts=form)
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = load_file(file)
    for name, its in change.items():
        full = f"base_model.model.model.{name}.weight"
        if name == "target_parameters":
            config.write_text(json.dumps({**json.loads(config.read_text()), name: its}))
        elif its is None:
            del tensors[full]
        else:
            tensors[full] = torch.zeros(its)
    save_file(tensors, file)
    with pytest.raises(AdapterError, match=words):
        Engine(model_path=model, **OPTIONS, lora_paths={"its": folder})


def test_names_of_a_dense_part_change_no_experts(tmp_path: Path) -> None:
    """Where experts are one tensor, up_proj is the shared expert's."""
    model = tiny_checkpoint(tmp_path / "model", "qwen2-moe", num_hidden_layers=2)
    adapter = tiny_adapter(tmp_path / "adapter", model, targets=ALL)
    with Engine(model_path=model, **OPTIONS, lora_paths={"its": adapter}) as engine:
        assert "experts" not in engine.config.lora_target_modules
        check(ask(engine, PROMPT, "its", 4), merged(model, adapter), PROMPT)


def test_an_adapter_of_one_of_the_parameters(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", "qwen3-moe", num_hidden_layers=2)
    adapter = tiny_adapter(tmp_path / "adapter", model, targets=(), experts="fused")
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: its for name, its in tensors.items() if "base_layer" not in name}, adapter / "new")
    shutil.move(adapter / "new", adapter / "adapter_model.safetensors")
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "target_parameters": ["experts.down_proj"]}))
    with Engine(model_path=model, **OPTIONS, lora_paths={"its": adapter}) as engine:
        check(ask(engine, PROMPT, "its", 4), merged(model, adapter), PROMPT)
