"""What is read of an adapter's folder, and what is refused of it, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl.errors import AdapterError
from sgl.runtime.model.adapter import LoraConfig, read_adapter
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.lora import LoraSlots
from sgl.runtime.model.lora_products import decoder_modules, decoder_products
from sgl.runtime.model.shard import WHOLE, Shard
from tests.tiny_adapters import ALL, tiny_adapter
from tests.tiny_models import tiny_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("files") / "model", num_hidden_layers=2)


def slots_for(model: Path, shard: Shard = WHOLE, dtype: torch.dtype = torch.float32) -> LoraSlots:
    config = ModelConfig.from_pretrained(model)
    known, layers = decoder_modules(config), decoder_products(config, shard)
    return LoraSlots(known, layers, num_slots=1, rank=8, targets=ALL, dtype=dtype, device=CPU)


def refused(model: Path, folder: Path, words: str) -> AdapterError:
    with pytest.raises(AdapterError, match=words) as error:
        read_adapter(str(folder), slots_for(model))
    assert error.value.path is not None
    return error.value


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "x" * 300])
def test_a_path_that_none_can_be_is_refused(model: Path, path: str) -> None:
    with pytest.raises(AdapterError, match="is no adapter's folder"):
        read_adapter(path, slots_for(model))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "use_dora is true"),
        ({"bias": "lora_only"}, 'bias is "lora_only"'),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules has model.embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has lm_head"),
        ({"target_modules": ".*"}, "target_modules has model.embed_tokens"),
        ({"target_modules": ["c_attn"]}, "in none of the model"),
        ({"target_modules": "(q_proj"}, "no regular expression"),
        ({"target_modules": 7}, "must be a list of names"),
        ({"r": 0}, "r=0"),
        ({"r": "4"}, "an integer from 1 to"),
        ({"r": 16}, "max_lora_rank is 8"),
        ({"lora_alpha": None, "rank_pattern": []}, "lora_alpha=null"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern"),
        ({"lora_alpha": 10**400}, "lora_alpha=1000"),
        ({"r": 10**400}, "r=1000"),
        ({"layers_to_transform": [0], "layers_pattern": "h"}, "layers_pattern"),
    ],
)
def test_a_config_that_asks_for_more_is_refused_by_name(
    model: Path, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    refused(model, tiny_adapter(tmp_path, model, **fields), words)


@pytest.mark.parametrize("fields", [{"use_dora": False, "modules_to_save": None, "bias": "none", "unknown": 1}, {}])
def test_fields_that_change_nothing_are_read_over(model: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    read_adapter(str(tiny_adapter(tmp_path, model, **fields)), slots_for(model))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "cannot read"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot read"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "not a JSON object"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "is missing"),
        (
            lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
            "no pickle of tensors alone",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99), "no safetensors"),
    ],
)
def test_damaged_folders(model: Path, tmp_path: Path, change: Callable[[Path], Any], words: str) -> None:
    change(tiny_adapter(tmp_path, model))
    refused(model, tmp_path, words)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "model.layers.1.mlp.up_proj.lora_A",
            torch.zeros(3, 64),
            r"\[3, 64\]; the model and rank 4 make it \[4, 64\]",
        ),
        ("model.layers.1.mlp.up_proj.lora_B", torch.zeros(96, 5), r"make it \[96, 4\]"),
        ("model.layers.0.self_attn.q_proj.lora_A", torch.zeros(4, 64, dtype=torch.int32), "floats are expected"),
        ("model.layers.0.self_attn.q_proj.lora_A", torch.full((4, 64), torch.nan), "not finite"),
        ("model.layers.0.self_attn.q_proj.lora_A", None, "lacks"),
        ("model.layers.9.self_attn.q_proj.lora_A", torch.zeros(4, 64), "no matrix of a module"),
        ("model.embed_tokens.lora_embedding_A", torch.zeros(4, 64), "adapters of embedding and head"),
    ],
)
def test_wrong_tensors(model: Path, tmp_path: Path, name: str, value: torch.Tensor | None, words: str) -> None:
    file = tiny_adapter(tmp_path, model) / "adapter_model.safetensors"
    tensors = load_file(file)
    name = f"base_model.model.{name}.weight"
    tensors.pop(name, None)
    save_file(tensors if value is None else {**tensors, name: value}, file)
    assert refused(model, tmp_path, words).tensor == name


@pytest.mark.parametrize(("alpha", "dtype"), [(1e30, torch.float32), (1e6, torch.float16)])
def test_what_the_models_dtype_cannot_hold_is_refused(
    model: Path, tmp_path: Path, alpha: float, dtype: torch.dtype
) -> None:
    adapter = tiny_adapter(tmp_path, model, lora_alpha=alpha)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    tensors[name] = tensors[name] * 1e10 if dtype == torch.float32 else tensors[name]
    save_file(tensors, file)
    with pytest.raises(AdapterError, match=r"lora_B.* too large for the model's torch\.float"):
        read_adapter(str(adapter), slots_for(model, dtype=dtype))
    if dtype == torch.float16:
        assert read_adapter(str(adapter), slots_for(model, dtype=torch.bfloat16)).flat.isfinite().all()


def test_an_adapter_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", hidden_size=32, num_hidden_layers=2)
    refused(model, tiny_adapter(tmp_path / "adapter", other), "make it")


def test_experts_are_changed_by_their_matrices_not_their_names(tmp_path: Path) -> None:
    mixture = tiny_checkpoint(tmp_path / "mixture", "qwen3-moe", num_hidden_layers=2)
    file = tiny_adapter(tmp_path / "experts", mixture, targets=("q_proj", "up_proj")) / "adapter_model.safetensors"
    slots = slots_for(mixture)
    read_adapter(str(file.parent), slots)  # the names of experts alone change nothing
    assert slots.product(0, "down") is None
    matrix = {"base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight": torch.zeros(4, 64)}
    save_file({**load_file(file), **matrix}, file)
    refused(mixture, file.parent, "has experts, and lora_target_modules are .*start with all of them")


def test_ranks_and_scales_by_module(model: Path, tmp_path: Path) -> None:
    folder = tiny_adapter(
        tmp_path,
        model,
        targets=("q_proj", "up_proj"),
        rank=4,
        lora_alpha=8,
        rank_pattern={r"layers\.1\..*q_proj": 2, "q_proj": 3},
        alpha_pattern={"up_proj": 1},
        layers_to_transform=1,
    )
    lora = LoraConfig.read(str(folder))
    known = decoder_modules(ModelConfig.from_pretrained(model))
    assert lora.modules(known) == {"model.layers.1.self_attn.q_proj": 2, "model.layers.1.mlp.up_proj": 4}
    assert lora.scale("model.layers.1.self_attn.q_proj", 2) == 4.0
    assert lora.scale("model.layers.1.mlp.up_proj", 4) == 0.25
    given = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps({**given, "use_rslora": True, "exclude_modules": ["up_proj"]})
    )
    lora = LoraConfig.read(str(folder))
    assert list(lora.modules(known)) == ["model.layers.1.self_attn.q_proj"]
    assert lora.scale("model.layers.1.self_attn.q_proj", 4) == 4.0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_an_adapter_are_cut_like_the_model(model: Path, tmp_path: Path, size: int) -> None:
    folder = tiny_adapter(tmp_path, model)
    whole = slots_for(model)
    whole.place(0, read_adapter(str(folder), whole))
    parts = [slots_for(model, Shard(rank, size)) for rank in range(size)]
    for part in parts:
        part.place(0, read_adapter(str(folder), part))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))

    def product(slots: LoraSlots, name: str, x: torch.Tensor) -> torch.Tensor:
        stacked = slots.product(1, name)
        assert stacked is not None
        shrunk = (x @ stacked.a[0].T).chunk(len(stacked.parts), dim=1)
        pairs = zip(shrunk, torch.split(stacked.b[0], list(stacked.parts)), strict=True)
        return torch.cat([narrow @ wide.T for narrow, wide in pairs], dim=1)

    gate_up = [product(part, "gate_up", x).chunk(2, dim=1) for part in parts]
    together = torch.cat([torch.cat([each[which] for each in gate_up], dim=1) for which in (0, 1)], dim=1)
    torch.testing.assert_close(together, product(whole, "gate_up", x))
    inner = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    summed = sum(product(part, "down", its) for part, its in zip(parts, inner.chunk(size, dim=1), strict=True))
    torch.testing.assert_close(summed, product(whole, "down", inner))
