"""LoRA adapters with random weights, as peft writes them, and a model with their weights merged: the oracle."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *MLP)


def tiny_adapter(
    path: Path,
    checkpoint: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: tuple[str, ...] = ALL,
    ranks: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    experts: Literal["single", "fused"] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter for a checkpoint to path, and return it. targets: the modules that get matrices, by their last
    names. ranks: of modules whose names a key ends. experts: of a mixture get matrices, too, each its own as of models
    that have them one by one, or all together as of models where they are one tensor. config: other fields of
    adapter_config.json."""
    modules = _linears(checkpoint)
    generator = torch.Generator().manual_seed(1000 + seed)
    tensors = {}
    for name, (wide, deep) in modules.items():
        if not f".{name}".endswith(tuple(f".{its}" for its in targets)):
            continue
        if any(part in name and not any(part in its for its in targets) for part in ("shared_experts.", "visual.")):
            continue  # only asked for by more than their last names
        own = next((its for key, its in (ranks or {}).items() if name.endswith(key)), rank)
        for which, shape, size in (("A", (own, deep), deep**-0.5), ("B", (wide, own), own**-0.5)):
            drawn = torch.randn(shape, generator=generator) * size
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = drawn.to(dtype)
    if experts is not None:
        names, drawn = _of_experts(checkpoint, rank, generator, is_fused=experts == "fused")
        tensors |= {name: its.to(dtype) for name, its in drawn.items()}
        fields = (
            {"target_parameters": list(names)} if experts == "fused" else {"target_modules": [*targets, *names]}
        )
        config = {**fields, **config}
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    return path


def merged(checkpoint: Path, adapter: Path | None) -> Any:
    """transformers' model with an adapter's weights added to its own, float32."""
    model = _class(checkpoint).from_pretrained(checkpoint, dtype=torch.float32)
    if adapter is None:
        return model.eval()
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name in [each for each in tensors if ".lora_A." in each]:
            a, b = tensors[name].float(), tensors[name.replace("lora_A", "lora_B")].float()
            module = re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name)
            assert module is not None
            if ".experts" in module[1]:
                _merge_experts(model, module[1], a, b, config)
                continue
            alphas = config.get("alpha_pattern", {}).items()
            alpha = next((its for key, its in alphas if module[1].endswith(key)), config["lora_alpha"])
            scale = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
            its = model.get_submodule(module[1])
            its.weight += scale * (b @ a if isinstance(its, torch.nn.Linear) else (b @ a).T)
    return model.eval()


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens one by one."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def logprobs(model: Any, ids: list[int]) -> list[float]:
    """Of each token after the first."""
    with torch.inference_mode():
        rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


def _merge_experts(model: Any, name: str, a: torch.Tensor, b: torch.Tensor, config: dict[str, Any]) -> None:
    """Add B A to transformers' fused experts."""
    is_fused = name.endswith((".experts", ".base_layer"))
    its = model.get_submodule(name.split(".experts")[0].replace("block_sparse_moe", "mlp") + ".experts")
    if is_fused:
        num_experts, scale = len(its.down_proj), config["lora_alpha"] / config["r"]
        into = "eio" if getattr(its, "is_transposed", False) else "eoi"
        of_a, of_b = a.view(num_experts, -1, a.shape[1]), b.view(len(b), -1, num_experts)
        weight = its.gate_up_proj if name.endswith("base_layer") else its.down_proj
        weight += scale * torch.einsum(f"ore,eri->{into}", of_b, of_a)
        return
    expert, part = int(name.split(".experts.")[1].split(".")[0]), name.rpartition(".")[2]
    weight, half = its.gate_up_proj[expert], its.gate_up_proj.shape[1] // 2
    places = {"gate_proj": weight[:half], "up_proj": weight[half:], "down_proj": its.down_proj[expert]}
    place = places[{"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(part, part)]
    place += config["lora_alpha"] / len(a) * (b @ a)


def _of_experts(
    checkpoint: Path, rank: int, generator: torch.Generator, *, is_fused: bool
) -> tuple[tuple[str, ...], dict[str, torch.Tensor]]:
    """What targets them, and their tensors."""
    with torch.device("meta"):
        model = _class(checkpoint)._from_config(AutoConfig.from_pretrained(checkpoint))
    is_mixtral = "Mixtral" in type(model).__name__
    block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if is_mixtral else ("mlp", MLP)
    tensors = {}
    for place, module in model.named_modules():
        if not place.endswith(".mlp.experts"):
            continue
        num_experts, hidden, size = module.down_proj.shape
        if getattr(module, "is_transposed", False):
            hidden, size = size, hidden
        shapes = {f"{place}.base_layer": (2 * size, hidden), place: (hidden, size)}
        if not is_fused:
            sizes = [(size, hidden), (size, hidden), (hidden, size)]
            one_by_one = place.replace(".mlp.", f".{block}.")
            shapes = {
                f"{one_by_one}.{expert}.{name}": shape
                for expert in range(num_experts)
                for name, shape in zip(names, sizes, strict=True)
            }
        wide = rank * num_experts if is_fused else rank
        for name, (out, width) in shapes.items():
            for which, shape, scale in (("A", (wide, width), width**-0.5), ("B", (out, wide), rank**-0.5)):
                drawn = torch.randn(shape, generator=generator) * scale
                tensors[f"base_model.model.{name}.lora_{which}.weight"] = drawn
    return ("mlp.experts.gate_up_proj", "mlp.experts.down_proj") if is_fused else names, tensors


def _linears(checkpoint: Path) -> dict[str, tuple[int, int]]:
    with torch.device("meta"):
        model = _class(checkpoint)._from_config(AutoConfig.from_pretrained(checkpoint))
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            found[name] = tuple(module.weight.shape)
        elif isinstance(module, Conv1D):
            found[name] = tuple(module.weight.T.shape)
    return found


def _class(checkpoint: Path) -> Any:
    return getattr(transformers, json.loads((checkpoint / "config.json").read_text())["architectures"][0])
