"""What `deterministic=True` needs: a request's bits may not depend on what else a step holds. Refuses what cannot be
had so."""

from __future__ import annotations

import torch

from sgl.errors import ConfigError
from sgl.kernels import cpu
from sgl.runtime.config import EngineConfig
from sgl.runtime.model.base import Config
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.families import FAMILIES


def check_deterministic(config: EngineConfig, model_config: Config, device: torch.device) -> None:
    """Raise ConfigError for a model, an option or a device whose sums depend on others."""
    obstacle = _of_model(config, model_config) or _of_device(config, device)
    if obstacle is not None:
        raise ConfigError(f"deterministic=True: {obstacle}", option="deterministic")


def _of_model(config: EngineConfig, model_config: Config) -> str | None:
    if not isinstance(model_config, ModelConfig):
        return (
            f"the layers of {model_config.architecture} are not computed row by row here; those of "
            f"{', '.join(name for name, family in FAMILIES.items() if family.vision is None)} are"
        )
    if model_config.media is not None:
        return f"{model_config.architecture} sees images, whose embeddings are computed several at once"
    if config.enable_lora or config.lora_paths:
        return "LoRA adapters are multiplied for all tokens of a step at once: merge the adapter into the model"
    return None


def _of_device(config: EngineConfig, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"it is for CPUs so far, and this is {device}"
    if config.dtype not in ("auto", "float32"):
        return f"it computes in float32, and dtype is {config.dtype!r}: leave it out"
    why_not = cpu.why_not()
    return None if why_not is None else f"it needs compiled products: {why_not}"
