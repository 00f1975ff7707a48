"""Decides how much memory beyond the device's keeps cached pages, and opens it."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from sgl.machine_limits import memory_limit
from sgl.runtime.cache.files import Kind, PageFiles
from sgl.runtime.cache.host import HostCache
from sgl.runtime.cache.rates import Rates
from sgl.runtime.config import EngineConfig
from sgl.runtime.memory_plan import KVPlan, gib, page_bytes
from sgl.runtime.model.base import Model, RecurrentModel
from sgl.runtime.option_checks import wrong
from sgl.runtime.runner.host_pages import HostPages, most_saves
from sgl.runtime.runner.hybrid_host_memory import HybridHostMemory
from sgl.runtime.scheduler.tiers import Tiers

logger = logging.getLogger(__name__)

_GB = 10**9
_MOST_OF_MEMORY = 0.5  # of what the machine has, for what hicache_ratio asks for
_MEASURED_CPU_TOKENS = 256
_READ_BYTES_A_SECOND = 1.5e9  # until something was read
_BY_LENGTH = "longrope", "dynamic"  # ropes that turn by the length of the context
_CHUNK = 1 << 22  # words of weights that are hashed at once


class Measurable(Protocol):
    """A runner, for what concerns the tiers."""

    @property
    def host(self) -> HostPages | None:
        """Its host memory."""

    def weights_hash(self, hash_of: Callable[[Iterable[torch.Tensor]], bytes]) -> bytes:
        """A hash of all weights, of how each rank holds them."""

    @property
    def hybrid_host(self) -> HybridHostMemory:
        """Its host memory for states or windowed pages."""

    def measure(self, num_tokens: int) -> tuple[float, float]:
        """Seconds of a step of one token, and of a prompt of num_tokens."""


def plan_host(config: EngineConfig, model: Model, plan: KVPlan) -> KVPlan:
    """The plan with host memory for copies of KV pages, and of states where a model has some, if there are to be any.
    Raises ConfigError."""
    if not config.enable_hierarchical_cache:
        return plan
    state_bytes = model.state_bytes if isinstance(model, RecurrentModel) else 0
    num_states = config.state_checkpoints or 0
    if (isinstance(model, RecurrentModel) or plan.num_window_pages) and config.pp_size > 1:
        raise wrong(
            config,
            "pp_size",
            f"with enable_hierarchical_cache: {model.config.architecture} has two kinds of layers, and a stage may "
            "have but one of them; tp_size is fine",
        )
    if state_bytes and not num_states:
        raise wrong(config, "state_checkpoints", "leaves nothing from which enable_hierarchical_cache could go on")
    page_size = config.page_size
    assert page_size is not None, "it is decided"
    each, windowed = page_bytes(config, model, plan)
    device_bytes = plan.num_pages * each + plan.num_window_pages * windowed + num_states * state_bytes
    limit = memory_limit()
    sharing = config.num_ranks // config.nnodes * config.dp_size
    if config.hicache_size:
        num_bytes = config.hicache_size * _GB
        if num_bytes * sharing > limit.num_bytes:
            raise wrong(config, "hicache_size", f"is more than {gib(limit.num_bytes)} ({limit.what})")
    else:
        num_bytes = int(config.hicache_ratio * device_bytes)
        most = int(limit.num_bytes * _MOST_OF_MEMORY / sharing)
        if num_bytes > most:
            logger.warning("hicache_ratio=%g is cut to %s of host memory", config.hicache_ratio, gib(most))
            num_bytes = most
    states = num_bytes * num_states // device_bytes if state_bytes else 0  # of all, the same multiple
    windows = num_bytes * plan.num_window_pages // device_bytes
    pages = (num_bytes - states * state_bytes - windows * windowed) // each
    for what, number, its in (("page", pages, each), ("state", states, state_bytes), ("window", windows, windowed)):
        if its and number < 1:
            option = "hicache_size" if config.hicache_size else "hicache_ratio"
            raise wrong(config, option, f"holds no {what}, of which one takes {gib(its)}")
        if its:
            logger.info("copies of KV: %s of host memory, %d %ss", gib(number * its), number, what)
    return dataclasses.replace(
        plan, num_host_pages=pages + 1, num_host_states=states, num_host_window_pages=windows
    )


def open_tiers(config: EngineConfig, model: Model, runner: Measurable, plan: KVPlan, most_tokens: int) -> Tiers:
    """Host memory and files of an engine whose runner is ready. Raises ConfigError."""
    assert config.page_size is not None, "it is decided"
    assert config.context_length is not None, "it is decided"
    assert runner.host is not None, "it was made with host pages"
    whole, page_size = runner.host.whole, config.page_size
    num_tokens = min(most_tokens, config.context_length)
    if model.device.type == "cpu":
        num_tokens = min(num_tokens, _MEASURED_CPU_TOKENS)
    step, prompt = runner.measure(num_tokens)
    compute = max(prompt - step, prompt / 2) / num_tokens
    load = runner.host.page_seconds() / page_size
    rates = Rates(
        compute, load, whole.shape[1] / _READ_BYTES_A_SECOND / page_size, step, runner.hybrid_host.load_seconds()
    )
    files = None
    if config.hicache_storage_dir is not None:
        hosts = dict(zip((Kind.STATE, Kind.WINDOWED), runner.hybrid_host.hosts(), strict=True))
        hosts[Kind.PAGE] = [runner.host]

        def arrived(kind: Kind, place: int) -> None:
            for part in hosts[kind]:
                part.fill(place)

        weights = runner.weights_hash(weights_hash)
        if config.num_ranks > 1:  # a page lies otherwise
            weights += repr((config.tp_size, config.pp_size)).encode()
        files = PageFiles(
            Path(config.hicache_storage_dir).expanduser(),
            identity(config, model, model.config, weights),
            whole,
            page_size,
            config.hicache_storage_size * _GB,
            beside={kind: [part.whole for part in its] for kind, its in hosts.items() if its and kind},
            arrived=arrived,
        )
        logger.info("copies of KV in %s: %d are there", config.hicache_storage_dir, len(files))
    logger.info("a token takes %.2g s to compute and %.2g s to load", compute, load)
    most = most_saves(runner.host.memory.shape[1], model.device)
    windows = plan.num_host_window_pages, plan.window
    host = HostCache(plan.num_host_pages - 1, page_size, plan.num_host_states or None, *windows)
    return Tiers(host, rates, files=files, most_saves=most)


def identity(config: EngineConfig, model: Model, described: Any, weights: bytes) -> bytes:
    """32 bytes that differ for models, weights, dtypes and page sizes whose pages differ: by bits, in deterministic
    mode. The checkpoint's folder does not matter. described: the model's config. weights: a hash of them."""
    if dataclasses.is_dataclass(described) and not isinstance(described, type):
        fields = dataclasses.fields(described)
        described = {field.name: repr(getattr(described, field.name)) for field in fields if field.name != "path"}
    options: Any = (config.dtype, config.kv_cache_dtype, config.quantization, config.page_size, config.model_impl)
    if any(kind in repr(described) for kind in _BY_LENGTH):
        options = (*options, model.max_positions)
    if config.deterministic:  # to the bit
        threads = torch.get_num_threads() if model.device.type == "cpu" else 0
        options = (
            *options,
            torch.__version__,
            model.device.type,
            config.attention_backend,
            threads,
            config.tp_size,
        )
    return hashlib.blake2b(repr((described, options)).encode() + weights, digest_size=32).digest()


@torch.inference_mode()
def weights_hash(tensors: Iterable[torch.Tensor]) -> bytes:
    """A hash of tensors' contents, computed where they are: of sums of their words, plain and weighted by place."""
    whole = hashlib.blake2b(digest_size=32)
    weights: torch.Tensor | None = None
    for tensor in tensors:
        if tensor.is_mkldnn:  # packed for a CPU
            tensor = tensor.to_dense()
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if data.data_ptr() % 8:
            data = data.clone()
        num_words = len(data) // 8
        whole.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        whole.update(bytes(data[8 * num_words :].tolist()))
        words = data[: 8 * num_words].view(torch.int64) if num_words else data[:0].to(torch.int64)
        if weights is None or weights.device != words.device:
            weights = torch.arange(1, 2 * _CHUNK, 2, dtype=torch.int64, device=words.device) * 0x9E3779B97F4A7C1
        sums = [
            torch.stack((each.sum(), (each * weights[: len(each)]).sum())) for each in torch.split(words, _CHUNK)
        ]
        whole.update(torch.cat(sums).cpu().numpy().tobytes())
    return whole.digest()
