"""How a device's memory is shared out: weights, recurrent states, KV pages. Decides and logs the limits that follow."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from sgl.errors import ConfigError
from sgl.machine_limits import address_space_left, memory_limit
from sgl.runtime.adapter_choice import slot_bytes
from sgl.runtime.cache.windows import pages_in_window
from sgl.runtime.config import EngineConfig
from sgl.runtime.devices import kv_dtype
from sgl.runtime.model.base import Config, Model, RecurrentModel
from sgl.runtime.model.choice import eyes_of
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.loader import dtype_name

logger = logging.getLogger(__name__)

_DEFAULT_ROWS = {"cuda": 512, "cpu": 128}
_CPU_STEP_TOKENS = 2048
_TILE_TOKENS = 64  # for each multiprocessor: most products then fill whole waves of tiles
_LARGE_MODEL = 8_000_000_000  # weights; smaller models take more tiles: launching would take as long as the step
_MAX_TILES = 4  # for each multiprocessor
_DEFAULT_FRACTION = {"cuda": 0.88, "cpu": 0.3}
_DEFAULT_PAGE_SIZE = {"cuda": 16, "cpu": 8}
_ADDRESS_FRACTION = 0.5  # of what `ulimit -v` leaves after loading weights, for KV
_STATES_FRACTION = 0.5  # of what weights leave, for recurrent states
_CHECKPOINTS_A_ROW = 2
_MIN_TOKENS_A_ROW = 64  # by default fewer rows, rather than less KV for each


def window_of(model_config: Config, model: Model) -> int | None:
    """Tokens before which no layer attends; None where some attends to all. model_config: that of all layers."""
    windows = model_config.windows if isinstance(model_config, ModelConfig) else model.attention_shape(1).windows
    longest = max(model.max_positions if window is None else window for window in windows)
    return longest if longest < model.max_positions else None


def plan_memory(config: EngineConfig, model: Model, window: int | None) -> tuple[EngineConfig, int]:
    """The number of KV pages including the dummy page, and the options with every None resolved that follows. A
    request needs pages for its context, or for its `window`. Raises ConfigError."""
    device, context, bytes_of_token = model.device, model.max_positions, token_bytes(config, model)
    page_size = config.page_size or _DEFAULT_PAGE_SIZE[device.type]
    weight_bytes = held_bytes(model) + slot_bytes(config, model)
    rows = config.max_running_requests or _DEFAULT_ROWS[device.type]
    page_bytes = bytes_of_token * page_size
    total_memory, memory_name = _total_memory(device, config.num_ranks // config.nnodes * config.dp_size)
    fraction = config.mem_fraction_static or _DEFAULT_FRACTION[device.type]
    available = total_memory * fraction - weight_bytes
    if device.type == "cpu" and (left := address_space_left()) is not None:
        available = min(available, left * _ADDRESS_FRACTION)  # threads and compilers need some, too
    num_bytes = model.state_bytes if isinstance(model, RecurrentModel) else 0
    if num_bytes:
        rows, checkpoints = _plan_states(config, rows, available / num_bytes)
        config = replace(config, max_running_requests=rows, state_checkpoints=checkpoints)
        num_bytes *= rows + 1 + checkpoints
    if config.max_total_tokens is not None:
        num_pages = -(-config.max_total_tokens // page_size)
    else:
        num_pages = min(int((available - num_bytes) // page_bytes), rows * -(-context // page_size))
    if num_pages < 1:
        raise ConfigError(
            f"no memory is left for KV pages, of which one takes {gib(page_bytes)}: weights take "
            f"{gib(weight_bytes)} and recurrent states {gib(num_bytes)} of the {gib(total_memory * fraction)} that "
            f"mem_fraction_static={fraction} allows of {memory_name}",
            option="mem_fraction_static",
        )
    if config.max_running_requests is None:
        rows = max(1, min(rows, num_pages * page_size // _MIN_TOKENS_A_ROW))
    if window is None or num_pages < pages_in_window(window, page_size, step_tokens=1):
        context = min(context, num_pages * page_size)
    resolved = replace(
        config,
        device=str(device),
        dtype=dtype_name(model.dtype),
        page_size=page_size,
        context_length=context,
        max_running_requests=rows,
        max_total_tokens=num_pages * page_size,
        mem_fraction_static=fraction,
        chunked_prefill_size=config.chunked_prefill_size or _default_step_tokens(model),
        disable_overlap_schedule=(
            device.type == "cpu" if config.disable_overlap_schedule is None else config.disable_overlap_schedule
        ),
    )
    logger.info(
        "%s (%s) on %s in %s: weights %s, KV %s (%d tokens in pages of %d), context %d, at most %d requests at once",
        config.model_name,
        model.config.checkpoint_format,
        resolved.device,
        resolved.dtype,
        gib(weight_bytes),
        gib(num_pages * page_bytes),
        num_pages * page_size,
        page_size,
        resolved.context_length,
        rows,
    )
    if num_bytes:
        logger.info(
            "states of %d requests and %d checkpoints: %s", rows, resolved.state_checkpoints, gib(num_bytes)
        )
    return resolved, num_pages + 1


def _plan_states(config: EngineConfig, rows: int, available: float) -> tuple[int, int]:
    """Requests at once, at most `rows`, and checkpoints, of a model of which memory could hold `available` states."""
    most = int(available * _STATES_FRACTION) - 1
    checkpoints, each = config.state_checkpoints, 0 if config.disable_radix_cache else _CHECKPOINTS_A_ROW
    if config.max_running_requests is None:
        rows = max(1, min(rows, (most - (checkpoints or 0)) // (1 + (checkpoints is None and each))))
    return rows, max(0, min(each * rows, most - rows)) if checkpoints is None else checkpoints


def _default_step_tokens(model: Model) -> int:
    if model.device.type == "cpu":
        return _CPU_STEP_TOKENS
    processors = int(torch.cuda.get_device_properties(model.device).multi_processor_count)
    tiles = min(_MAX_TILES, max(1, _LARGE_MODEL // model.weights.num_multiplied))
    return _TILE_TOKENS * processors * tiles


def _total_memory(device: torch.device, sharing: int) -> tuple[int, str]:
    """Bytes for each of the processes that share a CPU's memory, and of what."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory), "the device's memory"
    limit = memory_limit()
    if sharing > 1:
        return limit.num_bytes // sharing, f"{limit.what}, shared by {sharing} processes"
    return limit.num_bytes, limit.what


def gib(num_bytes: float) -> str:
    """For people."""
    return f"{num_bytes / 2**30:.2f} GiB"


def token_bytes(config: EngineConfig, model: Model) -> int:
    """Of the stage with the most layers: all have the same pages."""
    num_bytes = KVCache.bytes_per_token(model.config, kv_dtype(config) or model.dtype)
    return num_bytes // model.config.num_layers * model.most_layers


def held_bytes(model: Model) -> int:
    """Of a model, with a vision tower and the embeddings that it may keep."""
    eyes = eyes_of(model)
    return sum(its.nbytes for its in model.weights.tensors()) + (0 if eyes is None else eyes.num_bytes)
