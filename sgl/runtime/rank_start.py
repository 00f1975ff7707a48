"""How one rank starts: its device, its part of the model, and its runner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from sgl.errors import ConfigError
from sgl.kernels.attention.base import AttentionBackend
from sgl.machine_limits import memory_limit, num_processors
from sgl.runtime.adapter_choice import adapter_slots
from sgl.runtime.attention_choice import choose_attention
from sgl.runtime.config import EngineConfig
from sgl.runtime.devices import check_kv_dtype, check_quantization, device_for, kv_dtype, laid_out
from sgl.runtime.draft_choice import check_drafts
from sgl.runtime.memory_plan import KVPlan, gib, kv_bytes, room_on
from sgl.runtime.model.base import Config, Model
from sgl.runtime.model.choice import load_model, read_config
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.gdn.config import HybridConfig
from sgl.runtime.model.gdn.parts import check_parts as check_hybrid_parts
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.mla.config import LatentConfig
from sgl.runtime.model.mla.parts import check_parts
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import Shard
from sgl.runtime.parallel.wire import Build
from sgl.runtime.platform.registry import platform_of
from sgl.runtime.runner.current import current
from sgl.runtime.runner.observer import Observer
from sgl.runtime.runner.own import OwnRunner
from sgl.runtime.runner.runner import ModelRunner
from sgl.runtime.runner.shared_rows import SharedHost
from sgl.runtime.shared_choice import shared_host
from sgl.runtime.speculate import choice as speculate


@contextlib.contextmanager
def device_of(config: EngineConfig, rank: int) -> Iterator[torch.device]:
    """Within it, the present thread is set up for a rank's device, and has errors for its memory. Raises
    ConfigError."""
    device = device_for(config, rank)
    if device.type == "cpu":
        threads = max(1, num_processors() // (config.num_ranks // config.nnodes * config.dp_size))
        torch.set_num_threads(min(torch.get_num_threads(), threads))
    with current(device), room_on(device):
        try:
            yield device
        except MemoryError as error:
            raise _out_of_memory(str(error) or "the system gave none") from error
        except RuntimeError as error:  # torch's way to say it on a CPU
            if "not enough memory" not in str(error):
                raise
            raise _out_of_memory(str(error)) from error


def _out_of_memory(what: str) -> ConfigError:
    limit = memory_limit()
    return ConfigError(
        f"the model does not fit into memory: {what}; there are {gib(limit.num_bytes)} ({limit.what})",
        option="mem_fraction_static",
    )


def checked_model(config: EngineConfig, device: torch.device) -> Config:
    """The model's config, if these options suit it. Raises ConfigError and ModelError."""
    model_config = read_config(config.model_path, config.model_impl)
    if isinstance(platform := platform_of(config.device), OwnRunner):
        platform.check(config, model_config)
    context_length = config.context_length or model_config.context_length
    if context_length > model_config.context_length:
        raise ConfigError(
            f"context_length={context_length} is longer than the model's {model_config.context_length}",
            option="context_length",
        )
    check_kv_dtype(config, device)
    if config.state_checkpoints is not None and not isinstance(model_config, HybridConfig):
        raise ConfigError(
            f"state_checkpoints={config.state_checkpoints}: {model_config.architecture} has no recurrent layers",
            option="state_checkpoints",
        )
    speculate.check(config, model_config.architecture, is_recurrent=isinstance(model_config, HybridConfig))
    check_drafts(config)
    shard = Shard(size=config.tp_size, stages=config.pp_size)
    if isinstance(model_config, ModelConfig):
        shard.check(model_config)
        check_quantization(config, shard.local(model_config), device)
        return model_config
    check_quantization(config, model_config, device)
    if isinstance(model_config, LatentConfig) and config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_cache_dtype={config.kv_cache_dtype!r}: latents of {model_config.architecture} are cached unrounded",
            option="kv_cache_dtype",
        )
    if isinstance(model_config, LatentConfig):
        check_parts(model_config, shard)
    elif isinstance(model_config, HybridConfig):
        check_hybrid_parts(model_config, shard)
    elif config.num_ranks > 1:
        option = "tp_size" if config.tp_size > 1 else "pp_size"
        raise ConfigError(
            f"{option}={getattr(config, option)}: {model_config.architecture} runs on transformers' modules, which are "
            "not cut among ranks; dp_size serves copies of it",
            option=option,
        )
    return model_config


def load(config: EngineConfig, model_config: Config, device: torch.device, ranks: Ranks | None) -> Model:
    """This rank's part of the model. Raises ModelError."""
    model = load_model(
        model_config,
        device=device,
        dtype=config.dtype,
        load_format=config.load_format,
        max_positions=config.context_length or model_config.context_length,
        quantization=config.quantization,
        ranks=ranks,
        image_cache_bytes=config.image_cache_mb << 20,
        deterministic=config.deterministic,
    )
    platform = platform_of(config.device)
    for matrix in model.weights.tensors():
        if matrix.dim() == 2 and (found := laid_out(platform, matrix)) is not matrix:
            matrix.data = found
    return model


def follow(build: Build, model_config: Config, model: Model, shard: Shard) -> ModelRunner:
    """The runner of a rank other than 0, as rank 0 has decided."""
    config, plan = EngineConfig(**build.options), KVPlan(**build.plan)
    _, attention = choose_attention(config, plan.attention_shape(config, model))
    shared = shared_host(config, model_config, model, plan, build.shared, shard.size * shard.stage + shard.rank)
    return build_runner(config, model, attention, plan, frozenset(build.eos_ids), shared=shared)


def build_runner(
    config: EngineConfig,
    model: Model,
    attention: AttentionBackend,
    plan: KVPlan,
    eos_ids: frozenset[int],
    observer: Observer | None = None,
    shared: SharedHost | None = None,
) -> ModelRunner:
    """A runner with its KV pages, and host pages for copies; all ranks wait for each other. Raises ConfigError."""
    page_size = config.page_size
    assert page_size is not None
    assert config.context_length is not None
    assert config.max_running_requests is not None
    try:
        dtype = kv_dtype(config) or model.dtype
        kv = KVCache(model.config, plan.num_pages, page_size, dtype, model.device, plan.windowed(model))
    except MemoryError as error:
        limit = memory_limit()
        raise ConfigError(
            f"KV pages for {plan.num_pages * page_size} tokens take {gib(kv_bytes(config, model, plan))}, and there "
            f"are {gib(limit.num_bytes)} in all ({limit.what}): set a lower max_total_tokens or mem_fraction_static",
            option="max_total_tokens" if config.max_total_tokens is not None else "mem_fraction_static",
        ) from error
    max_tokens = most_tokens(config, plan.num_pages)
    if model.collectives is not None:
        model.collectives.fuse(model.config.hidden_size, model.dtype, max_tokens + config.max_running_requests)
    runner = ModelRunner(
        model,
        kv,
        attention,
        max_rows=config.max_running_requests,
        max_pages=-(-config.context_length // page_size),
        device=model.device,
        eos_ids=eos_ids,
        max_graph_rows=config.cuda_graph_max_bs or 0,
        max_graph_tokens=max_tokens,
        lora=adapter_slots(config, model),
        num_checkpoints=config.state_checkpoints or 0,
        host_pages=plan.num_host_pages + (0 if plan.has_mapped_transfers else plan.num_transfer_pages),
        mapped_rows=plan.num_transfer_pages if plan.has_mapped_transfers else 0,
        host_states=plan.num_host_states,
        host_window_pages=plan.num_host_window_pages,
        shared=shared,
        observer=observer,
        deterministic=config.deterministic,
    )
    if platform_of(config.device).is_gpu:
        runner.prepare(max_tokens)
        # Allocate small tensors for all later steps now: torch keeps freed memory.
        [torch.empty(1 << 19, dtype=torch.uint8, device=model.device) for _ in range(32)]
    if model.collectives is not None:
        model.collectives.sum(torch.zeros(1, device=model.device))
    if model.links is not None:
        model.links.send(torch.zeros(1, device=model.device))
        model.links.receive(torch.zeros(1, device=model.device))
    return runner


def most_tokens(config: EngineConfig, num_pages: int) -> int:
    """Of a step's prompts."""
    assert config.page_size is not None
    assert config.context_length is not None
    return min(step_tokens(config) or config.context_length, num_pages * config.page_size)


def step_tokens(config: EngineConfig) -> int | None:
    """Of a step; None: no limit."""
    assert config.chunked_prefill_size is not None
    return None if config.chunked_prefill_size == -1 else config.chunked_prefill_size
