"""Chooses an attention backend for a model's shape, builds it, and logs why it is that one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch

from sgl.errors import ConfigError
from sgl.kernels import cpu
from sgl.kernels.attention import cpu as attention_cpu
from sgl.kernels.attention import flashinfer, flashinfer_modules
from sgl.kernels.attention.base import AttentionBackend, AttentionShape
from sgl.kernels.attention.pools import for_pools
from sgl.kernels.attention.torch import TorchAttention
from sgl.kernels.latent import flashinfer as latent_flashinfer
from sgl.kernels.latent.attention import LatentAttention, TritonPrompts
from sgl.kernels.latent.flashinfer import FlashInferPrompts
from sgl.runtime.config import EngineConfig
from sgl.runtime.platform.checked import checked
from sgl.runtime.platform.registry import platform_of

logger = logging.getLogger(__name__)

_Backend = Literal["torch", "cpu", "flashinfer", "triton"]
_BEST: tuple[_Backend, ...] = ("flashinfer", "cpu")  # if they can serve the model
_MAX_GRAPH_ROWS = 512
Built: TypeAlias = tuple[EngineConfig, AttentionBackend]


def choose_attention(config: EngineConfig, shape: AttentionShape) -> Built:
    """The backend that is asked for, or the fastest that can serve the shape, and the options it decides. Raises
    ConfigError."""
    platform = platform_of(config.device or str(shape.device))
    own = (
        checked(platform, platform.attention, shape, fits=_is_backend) if config.attention_backend is None else None
    )
    if own is not None:
        logger.info("attention: %s's own, without CUDA graphs", platform.name)
        return replace(config, cuda_graph_max_bs=None, disable_cuda_graph=True), own
    name, reason = _name_and_reason(config, shape)
    if config.prefill_kernel is not None and name != "flashinfer":
        raise ConfigError(
            f"prefill_kernel={config.prefill_kernel!r} is an option of attention_backend='flashinfer', and this is "
            f"{name!r} ({reason})",
            option="prefill_kernel",
        )
    if shape.cache_dtype != shape.dtype and (name == "torch" or config.prefill_kernel == "fa3"):
        what = "attention_backend='torch'" if name == "torch" else "prefill_kernel='fa3'"
        raise ConfigError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} needs attention_backend='triton', or 'flashinfer' with "
            f"prefill_kernel='fa2'; this is {what} ({reason})",
            option="kv_cache_dtype",
        )
    return _BUILDERS[name](config, shape, reason)


def _is_backend(found: Any) -> bool:
    return found is None or all(callable(getattr(found, name, None)) for name in ("plan", "run"))


def _name_and_reason(config: EngineConfig, shape: AttentionShape) -> tuple[_Backend, str]:
    """Which backend, and why."""
    name = config.attention_backend
    if name == "torch":
        return name, "as asked for"
    if name is not None:
        obstacle = _OBSTACLES[name](shape)
        if obstacle is not None:
            raise ConfigError(f"attention_backend={name!r}: {obstacle}", option="attention_backend")
        return name, "as asked for"
    if config.deterministic and shape.device.type == "cuda":
        return "triton", "the only one that is deterministic"
    obstacles = {best: _OBSTACLES[best](shape) for best in _BEST}
    for best, obstacle in obstacles.items():
        if obstacle is None:
            return best, "the fastest here"
    wanted: _Backend = "cpu" if shape.device.type == "cpu" else "flashinfer"
    return "torch", _fallback_reason(wanted, obstacles[wanted])


def _cpu_attention(config: EngineConfig, shape: AttentionShape, reason: str) -> Built:
    return _without_graphs(config, "cpu", reason, is_slow=False), for_pools(shape, attention_cpu.CpuAttention)


def _torch_attention(config: EngineConfig, shape: AttentionShape, reason: str) -> Built:
    obstacle = cpu.why_not() if shape.device.type == "cpu" and shape.dtype == torch.float32 else None
    if obstacle is not None and obstacle not in reason:
        reason = f"{reason}; nothing is compiled for this processor: {obstacle}"
    is_slow = shape.device.type == "cuda" or obstacle is not None
    return _without_graphs(config, "torch", reason, is_slow=is_slow), for_pools(
        shape, partial(TorchAttention, one_by_one=config.deterministic)
    )


def _triton_attention(config: EngineConfig, shape: AttentionShape, reason: str) -> Built:
    graph_rows = _graph_rows(config)
    bounds = {"max_graph_rows": graph_rows, "max_pages": _max_pages(config, shape)}
    queries = _max_queries(config)
    backend: AttentionBackend
    if shape.latent_dim:
        backend = LatentAttention(shape, TritonPrompts(shape), **bounds)
    else:
        # a CPU may have no Triton
        from sgl.kernels.attention.triton import InvariantAttention, TritonAttention

        if config.deterministic:
            backend = for_pools(shape, lambda its: InvariantAttention(its, **bounds))
            logger.info("attention: triton, deterministic (%s); %s", reason, _shown(config, graph_rows, backend))
            return replace(config, attention_backend="triton", cuda_graph_max_bs=graph_rows or None), backend
        backend = for_pools(shape, lambda its: TritonAttention(its, max_queries=queries, **bounds))
    logger.info("attention: triton (%s); %s", reason, _shown(config, graph_rows, backend))
    return replace(config, attention_backend="triton", cuda_graph_max_bs=graph_rows or None), backend


def _flashinfer_attention(config: EngineConfig, shape: AttentionShape, reason: str) -> Built:
    """torch's, or over latents Triton's, instead where FlashInfer's kernels cannot be compiled, unless that was asked
    for."""
    is_narrow = shape.cache_dtype != shape.dtype
    has_fa3 = flashinfer.has_fa3(shape)
    if config.prefill_kernel == "fa3" and not has_fa3:
        raise ConfigError("prefill_kernel='fa3' is for Hopper GPUs (compute capability 9)", option="prefill_kernel")
    kernel: flashinfer_modules.PrefillKernel = config.prefill_kernel or (
        "fa3" if has_fa3 and not is_narrow else "fa2"
    )
    graph_rows = _graph_rows(config)
    bounds = {"max_graph_rows": graph_rows, "max_pages": _max_pages(config, shape)}
    backend: AttentionBackend
    try:
        if shape.latent_dim:
            backend = LatentAttention(shape, FlashInferPrompts(shape, kernel), **bounds)
        else:
            bounds["max_queries"] = _max_queries(config)
            backend = for_pools(shape, lambda its: flashinfer.FlashInferAttention(its, prefill=kernel, **bounds))
    except flashinfer_modules.CannotCompile as error:
        if config.attention_backend is not None or config.prefill_kernel is not None or is_narrow:
            raise ConfigError(f"attention_backend='flashinfer': {error}", option="attention_backend") from error
        reason = _fallback_reason("flashinfer", str(error))
        if shape.latent_dim:
            return _triton_attention(config, shape, reason)
        return _without_graphs(config, "torch", reason, is_slow=True), for_pools(shape, TorchAttention)
    by_length = kernel == "fa3" and not shape.latent_dim
    prompts = "long prompts by fa3, short prompts by fa2" if by_length else f"prompts by {kernel}"
    shown = _shown(config, graph_rows, backend)
    logger.info("attention: flashinfer (%s), decodes by triton, %s; %s", reason, prompts, shown)
    config = replace(config, attention_backend="flashinfer", prefill_kernel=kernel)
    return replace(config, cuda_graph_max_bs=graph_rows or None), backend


def _graph_rows(config: EngineConfig) -> int:
    """Rows of the largest decode step that is captured; 0: none is."""
    assert config.max_running_requests is not None
    if config.disable_cuda_graph:
        return 0
    if config.pp_size > 1:
        if config.cuda_graph_max_bs:
            raise ConfigError(
                f"cuda_graph_max_bs={config.cuda_graph_max_bs}: with pp_size={config.pp_size}, steps are not captured",
                option="cuda_graph_max_bs",
            )
        return 0
    return min(config.cuda_graph_max_bs or _MAX_GRAPH_ROWS, config.max_running_requests)


def _max_pages(config: EngineConfig, shape: AttentionShape) -> int:
    assert config.context_length is not None
    return -(-config.context_length // shape.page_size)


def _max_queries(config: EngineConfig) -> int:
    """Tokens of a row in captured steps that verify drafts; 1: there are none."""
    return 1 if config.speculative_algorithm in (None, "off") else 8


def _shown(config: EngineConfig, graph_rows: int, backend: AttentionBackend) -> str:
    if not graph_rows:
        return "no CUDA graphs"
    lacks = _max_queries(config) > getattr(backend, "max_queries", 1)
    return f"CUDA graphs for decodes of up to {graph_rows} rows" + ", none for verifying drafts" * lacks


def _without_graphs(config: EngineConfig, name: _Backend, reason: str, *, is_slow: bool) -> EngineConfig:
    what = "" if name == "cpu" or config.device == "cpu" else ", without CUDA graphs"
    logger.log(logging.WARNING if is_slow else logging.INFO, "attention: %s%s (%s)", name, what, reason)
    return replace(config, attention_backend=name, cuda_graph_max_bs=None, disable_cuda_graph=True)


def _fallback_reason(name: _Backend, obstacle: str | None) -> str:
    advice = "; attention_backend='triton' has CUDA graphs" if name == "flashinfer" else ""
    return f"not {name}: {obstacle}{advice}"


def _why_not_triton(shape: AttentionShape) -> str | None:
    return None if shape.device.type == "cuda" else f"it needs a GPU, and this is {shape.device}"


def _why_not_flashinfer(shape: AttentionShape) -> str | None:
    return flashinfer.why_not(shape) or (latent_flashinfer.why_not(shape) if shape.latent_dim else None)


_OBSTACLES: dict[_Backend, Callable[[AttentionShape], str | None]] = {
    "cpu": attention_cpu.why_not,
    "flashinfer": _why_not_flashinfer,
    "triton": _why_not_triton,
}

_BUILDERS: dict[_Backend, Callable[[EngineConfig, AttentionShape, str], Built]] = {
    "torch": _torch_attention,
    "cpu": _cpu_attention,
    "flashinfer": _flashinfer_attention,
    "triton": _triton_attention,
}
