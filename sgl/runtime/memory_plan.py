"""How a device's memory is shared out: weights, recurrent states, KV pages. Decides and logs the limits that follow."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from sgl.errors import ConfigError
from sgl.kernels.attention.base import AttentionShape
from sgl.runtime.adapter_choice import slot_bytes
from sgl.runtime.cache.windows import pages_in_window
from sgl.runtime.config import EngineConfig
from sgl.runtime.devices import kv_dtype
from sgl.runtime.model.base import Config, Model, RecurrentModel, SizedModel
from sgl.runtime.model.choice import vision_of
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.kv_cache import KVCache, WindowedLayers
from sgl.runtime.model.loader import dtype_name
from sgl.runtime.model.shard import Shard
from sgl.runtime.platform.checked import checked, is_memory
from sgl.runtime.platform.registry import platform_of

logger = logging.getLogger(__name__)

_STATES_FRACTION = 0.5  # of what weights leave, for recurrent states
_CHECKPOINTS_A_ROW = 2
_MIN_TOKENS_A_ROW = 64  # by default fewer rows, rather than less KV for each
_MB = 10**6
_BUFFER_SHARE = 0.5  # of the KV pages' memory
_MAPPED_SHARE = 0.1  # likewise, where it is the same memory
_MOST_BUFFER = 4096 * _MB
_WINDOWS_FRACTION = 0.5  # of KV, for the windows of as many requests as may run, however short


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """What a drafter holds beside the model, in bytes."""

    weight_bytes: int = 0
    token_bytes: int = 0  # of each slot of pages for all tokens


NO_DRAFTER = DrafterMemory()


@dataclass(frozen=True, slots=True)
class KVPlan:
    """Pages of KV, including each pool's dummy page."""

    num_pages: int
    window: int | None
    """Tokens before which no layer attends, or with two pools no layer with a window; None: some attend to all."""
    num_window_pages: int = 0
    """Of the pool of layers with a window; 0: there is one pool."""
    num_host_pages: int = 0
    """Of host memory for copies, also with an unused one."""
    num_host_states: int = 0
    """Of host memory for copies of checkpoints of recurrent states."""
    num_host_window_pages: int = 0
    """Of host memory for copies of the second pool's pages."""
    num_transfer_pages: int = 0
    """Of memory that pages to and from other engines go through, with an unused one, numbered behind
    num_host_pages."""
    has_mapped_transfers: bool = False
    """Those lie in the device's memory; else with the host pages."""

    def windowed(self, model: SizedModel) -> WindowedLayers | None:
        """The layers of this rank that have the second pool."""
        if self.window is None or not self.num_window_pages:
            return None
        return WindowedLayers(_windowed(model.windows, model), self.window, self.num_window_pages)

    def attention_shape(self, config: EngineConfig, model: Model) -> AttentionShape:
        """What attention over this rank's pages has to compute."""
        assert config.page_size is not None, "it is decided"
        shape, windowed = model.attention_shape(config.page_size, kv_dtype(config)), self.windowed(model)
        if windowed is None:
            return shape
        pooled = (window for window in shape.windows if window is not None and window <= windowed.window)
        return replace(shape, pooled_windows=tuple(pooled))


def kv_bytes(config: EngineConfig, model: SizedModel, plan: KVPlan) -> int:
    """What the pages of this rank take; of one pool, in the stage with the most layers."""
    assert config.page_size is not None
    if not plan.num_window_pages:
        return plan.num_pages * config.page_size * token_bytes(config, model)
    layer_bytes = config.page_size * _layer_bytes(config, model)
    number = sum(_windowed(model.windows, model))
    return layer_bytes * (plan.num_pages * (len(model.windows) - number) + plan.num_window_pages * number)


def page_bytes(config: EngineConfig, model: SizedModel, plan: KVPlan) -> tuple[int, int]:
    """What a page of each pool takes, of this rank's layers."""
    assert config.page_size is not None
    layer_bytes, windowed = config.page_size * _layer_bytes(config, model), 0
    if plan.num_window_pages:
        windowed = sum(_windowed(model.windows, model))
    return layer_bytes * (model.most_layers - windowed), layer_bytes * windowed


def _windowed(windows: tuple[int | None, ...], model: SizedModel) -> list[bool]:
    """Which layers have a window that is narrower than the context."""
    return [window is not None and window < model.max_positions for window in windows]


def _layer_bytes(config: EngineConfig, model: SizedModel) -> int:
    return KVCache.layer_bytes(model.config, kv_dtype(config) or model.dtype)


class PoolSizes:
    """How full and windowed pages share memory. `is_mixed`: whether a model has both; without, `window` is that of all
    its layers."""

    def __init__(
        self,
        config: EngineConfig,
        model: SizedModel,
        model_config: Config,
        page_size: int,
        rows: int,
        step_tokens: int,
        drafter_memory: DrafterMemory,
    ) -> None:
        """model_config: that of all layers. rows: requests that may run at once."""
        windows = model_config.windows if isinstance(model_config, ModelConfig) else model.windows
        widths = [window for window in windows if window is not None and window < model.max_positions]
        self.window = max(widths, default=None)
        self.is_mixed = False
        self._context_pages = -(-model.max_positions // page_size)
        if self.window is None:
            return
        self._ratio = config.swa_full_tokens_ratio
        self._each = pages_in_window(self.window, page_size, step_tokens=1)
        self.is_mixed = 0 < len(widths) < len(windows) and self._each < self._context_pages
        if len(widths) < len(windows) and not self.is_mixed:
            self.window = None
        if step_tokens == -1:
            step_tokens = model.max_positions
        self._a_step = -(-min(step_tokens, model.max_positions) // page_size)
        self._at_once = rows * self._each + self._a_step
        page_bytes = page_size * _layer_bytes(config, model)
        parts = (Shard(stage=stage, stages=config.pp_size).layers(model_config) for stage in range(config.pp_size))
        stages = [windows[part.start : part.stop] for part in parts]
        counts = [sum(_windowed(stage, model)) for stage in stages]
        self._bytes = [
            (page_bytes * (len(stage) - count) + page_size * drafter_memory.token_bytes, page_bytes * count)
            for stage, count in zip(stages, counts, strict=True)
        ]
        """Of a page of each pool, by stage."""

    def num_windowed(self, num_pages: int, available: float | None = None) -> int:
        """Windowed pages beside so many full ones: what requests of the whole context need that these hold, or more,
        up to half of what is available, if as many requests may run at once."""
        if self._ratio is not None:
            return min(num_pages, max(math.ceil(num_pages * self._ratio), self._each))
        share = -(-num_pages * self._each // self._context_pages) + self._a_step
        at_once = self._at_once
        if available is not None:
            most = max(windowed for _, windowed in self._bytes)
            at_once = min(at_once, int(available * _WINDOWS_FRACTION / most))
        return min(num_pages, max(share, at_once, self._each))

    def num_pages(self, available: float, most: int) -> int:
        """Full pages, at most so many, that fit there together with their windowed pages."""

        def fits(number: int) -> bool:
            windowed = self.num_windowed(number, available)
            return all(number * full + windowed * its <= available for full, its in self._bytes)

        return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def plan_memory(
    config: EngineConfig, model: SizedModel, model_config: Config, drafter_memory: DrafterMemory = NO_DRAFTER
) -> tuple[EngineConfig, KVPlan]:
    """The KV pages, and the options with every None resolved that follows. A request needs pages for its context, or
    if all layers have one for its window. model_config: that of all layers. Raises ConfigError."""
    device, context = model.device, model.max_positions
    platform = platform_of(config.device or str(device))
    bytes_of_token = token_bytes(config, model) + drafter_memory.token_bytes
    page_size = config.page_size or platform.page_size
    weight_bytes = held_bytes(model) + slot_bytes(config, model) + drafter_memory.weight_bytes
    rows = config.max_running_requests or platform.max_rows
    page_bytes = bytes_of_token * page_size
    sharing = config.num_ranks // config.nnodes * config.dp_size
    total_memory, memory_name = checked(platform, platform.total_memory, device, sharing, fits=is_memory)
    fraction = config.mem_fraction_static or platform.memory_fraction
    available = total_memory * fraction - weight_bytes
    left = checked(platform, platform.memory_left, device, fits=lambda its: its is None or isinstance(its, int))
    if left is not None:
        available = min(available, left)
    available -= _mapped_bytes(config, available)
    num_bytes = model.state_bytes if isinstance(model, RecurrentModel) else 0
    if num_bytes:
        rows, checkpoints = _plan_states(config, rows, available / num_bytes)
        config = replace(config, max_running_requests=rows, state_checkpoints=checkpoints)
        num_bytes *= rows + 1 + checkpoints
    step_tokens = config.chunked_prefill_size or checked(
        platform,
        platform.step_tokens,
        device,
        model.weights.num_multiplied,
        fits=lambda its: isinstance(its, int) and its > 0,
    )
    pools = PoolSizes(config, model, model_config, page_size, rows, step_tokens, drafter_memory)
    most_pages = rows * -(-context // page_size)
    if config.max_total_tokens is not None:
        num_pages = -(-config.max_total_tokens // page_size)
    elif pools.is_mixed:
        num_pages = pools.num_pages(available, most_pages)
    else:
        num_pages = min(int((available - num_bytes) // page_bytes), most_pages)
    if num_pages < 1:
        raise ConfigError(
            f"no memory is left for KV pages, of which one takes {gib(page_bytes)}: weights take "
            f"{gib(weight_bytes)} and recurrent states {gib(num_bytes)} of the {gib(total_memory * fraction)} that "
            f"mem_fraction_static={fraction} allows of {memory_name}",
            option="mem_fraction_static",
        )
    if config.max_running_requests is None:
        rows = max(1, min(rows, num_pages * page_size // _MIN_TOKENS_A_ROW))
    if not pools.is_mixed and (config.swa_full_tokens_ratio or 1.0) < 1.0:
        raise ConfigError(
            f"swa_full_tokens_ratio={config.swa_full_tokens_ratio}: in a context of {model.max_positions} tokens, "
            f"{model_config.architecture} has not both layers that see all of it and layers that see a part",
            option="swa_full_tokens_ratio",
        )
    window = pools.window
    if window is None or pools.is_mixed or num_pages < pages_in_window(window, page_size, step_tokens=1):
        context = min(context, num_pages * page_size)
    num_windowed = 0
    if pools.is_mixed:
        is_given = config.max_total_tokens is not None
        num_windowed = pools.num_windowed(num_pages, None if is_given else available)
    plan = KVPlan(num_pages + 1, window, num_windowed + (num_windowed > 0))
    resolved = replace(
        config,
        device=platform.option(device),
        dtype=dtype_name(model.dtype),
        page_size=page_size,
        context_length=context,
        max_running_requests=rows,
        max_total_tokens=num_pages * page_size,
        mem_fraction_static=fraction,
        chunked_prefill_size=step_tokens,
        disable_overlap_schedule=(
            not platform.runs_ahead if config.disable_overlap_schedule is None else config.disable_overlap_schedule
        ),
    )
    _log_plan(resolved, model, plan, weight_bytes, num_bytes)
    return resolved, plan


def has_mapped_transfers(config: EngineConfig) -> bool:
    """Whether pages to and from other engines go through the device's memory."""
    is_apart = config.disaggregation_mode not in (None, "null")
    return is_apart and config.disaggregation_transport == "cuda_ipc"


def transfer_bytes(config: EngineConfig, kv_bytes: float) -> int:
    """What pages to and from other engines go through, beside so much KV."""
    if config.disaggregation_buffer_mb is not None:
        return config.disaggregation_buffer_mb * _MB
    share = _MAPPED_SHARE if has_mapped_transfers(config) else _BUFFER_SHARE
    return min(int(share * kv_bytes), _MOST_BUFFER)


def _mapped_bytes(config: EngineConfig, available: float) -> int:
    """Of the device's memory, where so much is left for that and for KV pages. Raises ConfigError."""
    if not has_mapped_transfers(config):
        return 0
    num_bytes = transfer_bytes(config, available / (1 + _MAPPED_SHARE))
    if config.disaggregation_buffer_mb is not None and num_bytes >= available > 0:
        raise ConfigError(
            f"disaggregation_buffer_mb={config.disaggregation_buffer_mb} leaves nothing for KV pages of the "
            f"{gib(available)} that mem_fraction_static allows beside the weights: with "
            "disaggregation_transport='cuda_ipc' it is of the same memory",
            option="disaggregation_buffer_mb",
        )
    return num_bytes


def _log_plan(config: EngineConfig, model: SizedModel, plan: KVPlan, weight_bytes: float, state_bytes: int) -> None:
    logger.info(
        "%s (%s) on %s in %s: weights %s, KV %s (%d tokens in pages of %d), context %d, at most %d requests at once",
        config.model_name,
        model.config.checkpoint_format,
        config.device,
        config.dtype,
        gib(weight_bytes),
        gib(kv_bytes(config, model, plan)),
        config.max_total_tokens,
        config.page_size,
        config.context_length,
        config.max_running_requests,
    )
    if plan.num_window_pages:
        windowed = (plan.num_window_pages - 1) * (config.page_size or 1)
        logger.info(
            "layers with a window of %d tokens have pages of their own, for %d tokens", plan.window, windowed
        )
    if state_bytes:
        rows, checkpoints = config.max_running_requests, config.state_checkpoints
        logger.info("states of %d requests and %d checkpoints: %s", rows, checkpoints, gib(state_bytes))


def _plan_states(config: EngineConfig, rows: int, available: float) -> tuple[int, int]:
    """Requests at once, at most `rows`, and checkpoints, of a model of which memory could hold `available` states."""
    most = int(available * _STATES_FRACTION) - 1
    checkpoints, each = config.state_checkpoints, 0 if config.disable_radix_cache else _CHECKPOINTS_A_ROW
    if config.max_running_requests is None:
        rows = max(1, min(rows, (most - (checkpoints or 0)) // (1 + (checkpoints is None and each))))
    return rows, max(0, min(each * rows, most - rows)) if checkpoints is None else checkpoints


@contextmanager
def room_on(device: torch.device) -> Iterator[None]:
    """For a start: raises ConfigError, not OutOfMemoryError, where something else holds the device's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"weights, KV pages and graphs do not fit: {gib(free)} of the {gib(total)} of {device} are free "
            f"({error}). End what else holds them, or set a lower mem_fraction_static or max_total_tokens",
            option="mem_fraction_static",
        ) from error


def gib(num_bytes: float) -> str:
    """For people."""
    return f"{num_bytes / 2**30:.2f} GiB"


def token_bytes(config: EngineConfig, model: SizedModel) -> int:
    """Of the stage with the most layers: all have the same pages."""
    return _layer_bytes(config, model) * model.most_layers


def held_bytes(model: SizedModel) -> int:
    """Of a model, with a vision tower and the embeddings that it may keep."""
    vision = vision_of(model)
    num_bytes: int = sum(its.nbytes for its in model.weights.tensors())
    return num_bytes + (0 if vision is None else vision.num_bytes)
