"""Which implementation serves a checkpoint: the decoder of the families that sgl knows, the one with latent attention,
the one with gated delta nets, or transformers' modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, Unpack

import torch

from sgl.errors import ConfigError, UnsupportedModel
from sgl.runtime.gguf import is_gguf
from sgl.runtime.media.config import MediaConfig
from sgl.runtime.model.base import Config, Model, SizedModel
from sgl.runtime.model.checkpoint import find_checkpoint
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.families import FAMILIES
from sgl.runtime.model.gdn.config import HYBRIDS, HybridConfig
from sgl.runtime.model.gdn.model import load_hybrid
from sgl.runtime.model.gdn.weights import num_weights as num_hybrid_weights
from sgl.runtime.model.image_features import VisionEncoder
from sgl.runtime.model.loader import Loading, load_decoder, num_weights, resolve_dtype
from sgl.runtime.model.mla.config import LatentConfig, is_latent
from sgl.runtime.model.mla.loader import load_latent, num_latent_weights
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.weight_files import holds_pickles

ModelImpl = Literal["auto", "sgl", "transformers"]


def read_config(path: str, model_impl: ModelImpl) -> Config:
    """A checkpoint's config, whose class says who serves it. Raises ModelError, UnsupportedModel where it has none of
    the allowed implementations."""
    config = _read_config(path, model_impl)
    if holds_pickles(Path(config.path)):
        found = config.checkpoint_format.replace("safetensors", "pickles", 1)
        return replace(config, checkpoint_format=found)  # type: ignore[type-var]
    return config


def _read_config(path: str, model_impl: ModelImpl) -> Config:
    refusal = None
    if is_gguf(find_checkpoint(path)):
        if model_impl == "transformers":
            raise ConfigError(
                f"model_impl='transformers' reads safetensors, and {path} is a GGUF file: leave model_impl out",
                option="model_impl",
            )
        return ModelConfig.from_pretrained(path)
    if model_impl != "transformers":
        try:
            return LatentConfig.from_pretrained(path) if is_latent(path) else ModelConfig.from_pretrained(path)
        except UnsupportedModel as error:
            if error.architecture in HYBRIDS:
                return HybridConfig.from_pretrained(path)
            if model_impl == "sgl":
                raise
            refusal = error
    # imported only where it serves: transformers takes seconds
    from sgl.runtime.model.hf.config import TransformersConfig

    try:
        return TransformersConfig.from_pretrained(path)
    except UnsupportedModel:
        if refusal is not None and refusal.architecture in FAMILIES:
            raise refusal from None
        raise


def load_model(
    config: Config,
    *,
    quantization: Literal["fp8", "int4"] | None,
    ranks: Ranks | None,
    image_cache_bytes: int,
    deterministic: bool = False,
    **given: Unpack[Loading],
) -> Model:
    """See `load_decoder`; only its families know quantization, ranks and deterministic. image_cache_bytes: of
    embeddings that a vision tower keeps."""
    if given["load_format"] == "safetensors" and config.checkpoint_format.startswith("pickles"):
        message = f"load_format='safetensors': {config.path} holds PyTorch's pickles alone: leave load_format out"
        raise ConfigError(message, option="load_format")
    if isinstance(config, ModelConfig):
        vision: VisionEncoder | None = None
        if config.media is not None:
            from sgl.runtime.model.vision import SharedTower, load_tower  # imported only where it serves, as below

            device, dtype, tower = given["device"], given["dtype"], None
            if ranks is None or ranks.shard.rank == ranks.shard.stage == 0:
                tower = load_tower(
                    config,
                    device=device,
                    dtype=dtype,
                    load_format=given["load_format"],
                    max_bytes=image_cache_bytes,
                )
            vision = tower
            if ranks is not None and ranks.stage is not None and ranks.shard.stage == 0:
                like = torch.empty(0, dtype=resolve_dtype(config, dtype, device), device=device)
                vision = SharedTower(tower, config, ranks.stage, like)
        return load_decoder(
            config, quantization=quantization, ranks=ranks, vision=vision, deterministic=deterministic, **given
        )
    assert quantization is None, "startup refuses it"
    assert not deterministic, "startup refuses it"
    if isinstance(config, LatentConfig):
        return load_latent(config, ranks=ranks, **given)
    if isinstance(config, HybridConfig):
        return load_hybrid(config, ranks=ranks, **given)
    assert ranks is None, "startup refuses them"
    from sgl.runtime.model.hf.config import TransformersConfig
    from sgl.runtime.model.hf.model import load_transformers

    assert isinstance(config, TransformersConfig), "there is no other"
    return load_transformers(config, **given)


def media_of(config: Config) -> MediaConfig | None:
    """How a model takes images, if it does."""
    return config.media if isinstance(config, ModelConfig) else None


def vision_of(model: SizedModel) -> VisionEncoder | None:
    """A model's vision tower."""
    return model.vision if isinstance(model, Decoder) else None


def count_weights(config: Config) -> int:
    """Of the whole model."""
    if isinstance(config, ModelConfig):
        return num_weights(config)
    if isinstance(config, LatentConfig):
        return num_latent_weights(config)
    if isinstance(config, HybridConfig):
        return num_hybrid_weights(config)
    from sgl.runtime.model.hf.config import TransformersConfig

    assert isinstance(config, TransformersConfig), "there is no other"
    return config.num_weights
