"""Decides what room LoRA adapters get: the options that are left open, and the slots."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig
from sgl.runtime.lora_options import ALL_LINEAR, LORA_EXPERTS
from sgl.runtime.model.adapter import LoraConfig, check_room
from sgl.runtime.model.base import Config, Model, SizedModel
from sgl.runtime.model.lora import LoraSlots, parts_of, slot_size
from sgl.runtime.model.lora_products import lora_modules, lora_products

logger = logging.getLogger(__name__)

_DEFAULT_RANK = 16


def choose_adapters(config: EngineConfig, model_config: Config) -> EngineConfig:
    """With every option for LoRA decided. Raises ConfigError and AdapterError."""
    paths = config.lora_paths or ()
    if not (bool(paths) if config.enable_lora is None else config.enable_lora):
        return replace(config, enable_lora=False)
    found = [LoraConfig.read(path.lora_path) for path in paths]
    known = lora_modules(model_config)
    modules = [lora.modules(known) for lora in found]
    rank = config.max_lora_rank or max((max(its.values()) for its in modules), default=_DEFAULT_RANK)
    used = {part for its in modules for module in its for part in parts_of(module)}
    asked = config.lora_target_modules or tuple(used)
    if unknown := [name for name in asked if name not in (*known.parts, ALL_LINEAR)]:
        raise ConfigError(
            f"lora_target_modules has {unknown[0]!r}, and {model_config.architecture} has {', '.join(known.parts)}",
            option="lora_target_modules",
        )
    # those of experts take most, and few adapters have them
    every = [name for name in known.parts if asked or name != LORA_EXPERTS]
    targets = tuple(name for name in every if name in asked or not asked or ALL_LINEAR in asked)
    for lora in found:
        check_room(lora, known, rank, targets)
    return replace(config, enable_lora=True, max_lora_rank=rank, lora_target_modules=targets)


def slot_bytes(config: EngineConfig, model: SizedModel) -> int:
    """That the slots of adapters take beside the weights."""
    if not config.enable_lora:
        return 0
    assert config.max_lora_rank is not None, "options were resolved"
    assert config.lora_target_modules is not None, "options were resolved"
    size = slot_size(lora_products(model), config.max_lora_rank, config.lora_target_modules, model.device)
    return config.max_loras_per_batch * size * model.dtype.itemsize


def adapter_slots(config: EngineConfig, model: Model) -> LoraSlots | None:
    """The slots, unless there are none. Raises ConfigError if they do not fit."""
    if not config.enable_lora:
        return None
    assert config.max_lora_rank is not None, "options were resolved"
    assert config.lora_target_modules is not None, "options were resolved"
    logger.info(
        "LoRA: %d slots of rank %d for %s, %.2f GiB",
        config.max_loras_per_batch,
        config.max_lora_rank,
        ", ".join(config.lora_target_modules),
        slot_bytes(config, model) / 2**30,
    )
    try:
        return LoraSlots(
            lora_modules(getattr(model, "whole_config", model.config)),
            lora_products(model),
            num_slots=config.max_loras_per_batch,
            rank=config.max_lora_rank,
            targets=config.lora_target_modules,
            dtype=model.dtype,
            device=model.device,
        )
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"max_loras_per_batch={config.max_loras_per_batch} adapters of rank {config.max_lora_rank} do not fit: "
            f"{error}",
            option="max_loras_per_batch",
        ) from error
