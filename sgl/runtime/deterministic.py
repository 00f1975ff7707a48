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
    """Raise ConfigError for a model, an option or a device whose sums depend on others. On rank 0, for all."""
    obstacle = _of_model(config, model_config) or _of_device(config, model_config, device)
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


def _of_device(config: EngineConfig, model_config: Config, device: torch.device) -> str | None:
    if device.type not in ("cpu", "cuda"):
        return f"it is for CPUs and CUDA GPUs, and this is {device}"
    if device.type == "cpu":
        if config.dtype not in ("auto", "float32"):
            return f"on a CPU it computes in float32, and dtype is {config.dtype!r}: leave it out"
        why_not = cpu.why_not()
        return None if why_not is None else f"on a CPU it needs compiled products: {why_not}"
    if config.quantization is not None or getattr(model_config, "scheme", None) is not None:
        return (
            "products with quantised matrices depend on the number of rows on a GPU: take a checkpoint in 16 bits"
        )
    if config.attention_backend == "flashinfer":
        return "attention_backend='flashinfer' cuts keys by what a step holds: leave it out, or take 'triton'"
    return None
