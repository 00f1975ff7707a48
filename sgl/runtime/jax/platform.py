"""Devices that JAX computes on: TPUs, GPUs with its CUDA plug-in, CPUs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import torch

from sgl.errors import ConfigError, UnsupportedModel
from sgl.machine_limits import memory_limit
from sgl.runtime.config import EngineConfig
from sgl.runtime.jax.decoder import Decoder
from sgl.runtime.jax.mesh import Devices
from sgl.runtime.jax.runner import JaxRunner
from sgl.runtime.jax.weights import JaxWeights, placed
from sgl.runtime.model.base import Config, SizedModel
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.families import FAMILIES
from sgl.runtime.model.loader import load_weights, resolve_dtype
from sgl.runtime.model.shard import Shard
from sgl.runtime.runner.own import EngineRunner, OwnRunner

logger = logging.getLogger(__name__)

_CPU_FRACTION = 0.3  # of the machine's memory
_WITHOUT = {
    "quantization": "weights are not quantised there",
    "deterministic": "sums depend on how many tokens a step has there",
    "enable_lora": "LoRA adapters are not served there",
    "lora_paths": "LoRA adapters are not served there",
    "speculative_draft_model_path": "nobody drafts tokens there",
    "disaggregation_mode": "pages are not sent to other engines from there",
    "enable_hierarchical_cache": "cached pages are not copied to host memory there",
    "attention_backend": "attention is JAX's own there",
    "prefill_kernel": "attention is JAX's own there",
    "cuda_graph_max_bs": "steps are compiled there, not captured",
    "swa_full_tokens_ratio": "layers with a window have the pages of the others there",
}
"""Options that would do nothing, or that something is missing for, and why."""
_ALONE = {
    "pp_size": "layers are cut by tp_size alone there",
    "nnodes": "an engine's devices are those of one host there",
    "dp_size": "one process takes the devices there; several servers behind a gateway do the same",
}
"""Options that must be 1."""


@dataclass(slots=True)
class JaxModel:
    """A model on its devices; see `SizedModel`, for the part of one of them."""

    config: Config
    weights: JaxWeights
    device: torch.device
    dtype: torch.dtype
    max_positions: int
    windows: tuple[int | None, ...]
    most_layers: int
    whole_config: ModelConfig
    devices: Devices


class Jax(OwnRunner):
    """Devices of JAX's default backend; tp_size takes a mesh of several."""

    name = "jax"
    kind = "JAX devices"
    seen_by = "jax"

    def names(self) -> list[str]:
        """As JAX calls them."""
        return [str(each.device_kind) if each.platform != "cpu" else "cpu, by XLA" for each in jax.devices()]

    def device(self, index: int | None) -> torch.device:
        """Where torch reads checkpoints, with the number of the JAX device."""
        return torch.device("cpu") if index is None else torch.device("cpu", index)

    def total_memory(self, device: torch.device, sharing: int) -> tuple[int, str]:
        """Of the device, as far as XLA may take it; on a CPU a part of the machine's."""
        stats = jax.devices()[device.index or 0].memory_stats() or {}
        if "bytes_limit" in stats:
            return int(stats["bytes_limit"]), "the device's memory that XLA may take"
        limit = memory_limit()
        return int(limit.num_bytes * _CPU_FRACTION) // sharing, f"{_CPU_FRACTION} of {limit.what}"

    def check(self, config: EngineConfig, model: Config) -> None:
        """See `OwnRunner`. Layers of all decoders of `FAMILIES`, without images."""
        for option, reason in _WITHOUT.items():
            if getattr(config, option):
                raise self._refusal(config, option, reason)
        for option, reason in _ALONE.items():
            if getattr(config, option) > 1:
                raise self._refusal(config, option, reason)
        if config.speculative_algorithm not in (None, "off"):
            raise self._refusal(config, "speculative_algorithm", "nobody drafts tokens there")
        missing = None
        if not isinstance(model, ModelConfig):
            missing = f"{model.architecture} is not computed by device='jax'"
        elif model.media is not None:
            missing = f"{model.architecture} takes images, and device='jax' has no vision tower"
        elif model.scheme is not None:
            missing = f"{model.path} is quantised ({model.scheme}), and device='jax' multiplies unquantised weights"
        if missing is not None:
            known = tuple(name for name, family in FAMILIES.items() if family.vision is None)
            message = f"{missing}: it serves {', '.join(known)}"
            raise UnsupportedModel(message, architecture=model.architecture, supported=known, path=model.path)

    def _refusal(self, config: EngineConfig, option: str, reason: str) -> ConfigError:
        value = getattr(config, option)
        return ConfigError(f"{option}={value!r} with device={config.device!r}: {reason}", option=option)

    def load(self, config: EngineConfig, model: Config, device: torch.device) -> JaxModel:
        """See `OwnRunner`."""
        assert isinstance(model, ModelConfig), "others are refused"
        first = device.index or 0
        devices = Devices(jax.devices()[first : first + config.tp_size])
        on = device if jax.default_backend() == "cpu" else torch.device("meta")
        dtype = resolve_dtype(model, config.dtype, on)
        shard = Shard(size=config.tp_size)
        shard.check(model)
        max_positions = config.context_length or model.context_length
        every_token = (None,) * model.num_layers  # pages are kept of all
        weights = load_weights(model, dtype, torch.device("cpu"), config.load_format)
        return JaxModel(
            config=replace(shard.local(model), windows=every_token),
            weights=placed(weights, model, devices, max_positions),
            device=device,
            dtype=dtype,
            max_positions=max_positions,
            windows=every_token,
            most_layers=model.num_layers,
            whole_config=model,
            devices=devices,
        )

    def runner(
        self, config: EngineConfig, model: SizedModel, num_pages: int, eos_ids: frozenset[int]
    ) -> EngineRunner:
        """See `OwnRunner`. On a CPU nothing is compiled before it is needed."""
        assert isinstance(model, JaxModel), "it is of `load`"
        page_size, context, rows = config.page_size, config.context_length, config.max_running_requests
        assert page_size is not None and context is not None and rows is not None  # noqa: PT018
        whole, devices = model.whole_config, model.devices
        dtype: Any = jnp.dtype(str(model.dtype).removeprefix("torch."))
        heads = model.config.num_kv_heads * devices.size
        runner = JaxRunner(
            Decoder(whole, devices, dtype),
            model.weights,
            devices,
            page_shape=(num_pages, page_size, heads, whole.head_dim),
            num_layers=whole.num_layers,
            dtype=dtype,
            vocab_size=whole.vocab_size,
            max_rows=rows,
            max_pages=-(-context // page_size),
            eos_ids=eos_ids,
        )
        if jax.default_backend() != "cpu":
            step_tokens = config.chunked_prefill_size or -1
            runner.warm_up(step_tokens if step_tokens > 0 else context)
        return runner
