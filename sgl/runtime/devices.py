"""Which device an engine computes on, and whether it can do what the options ask for."""

from __future__ import annotations

import contextlib
import platform
import re
from pathlib import Path

import torch

from sgl.errors import ConfigError
from sgl.kernels.layers.grouped import UNIT
from sgl.machine_limits import num_processors
from sgl.runtime.config import EngineConfig
from sgl.runtime.model.base import Config
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.families import FAMILIES
from sgl.runtime.model.loader import dtype_name, resolve_dtype


def device_for(config: EngineConfig, rank: int = 0) -> torch.device:
    """The device of an engine, or of one of its ranks. Raises ConfigError."""
    name = config.device
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be cpu, cuda or cuda:N, not {name!r}", option="device") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu, cuda or cuda:N, not {name!r}", option="device")
    return device if device.type == "cpu" else _gpu(config, device, rank)


def _gpu(config: EngineConfig, device: torch.device, rank: int) -> torch.device:
    """This rank's of the GPUs that begin at `device`: engine by engine, rank by rank."""
    found, first = torch.cuda.device_count(), device.index or 0
    num_ranks = config.num_ranks // config.nnodes  # on this host
    wanted = num_ranks * config.dp_size
    if first + wanted > found:
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(found)) or "none"
        if wanted == 1:
            message = f"device={str(device)!r}: torch sees {found} CUDA device(s) here ({names})"
            raise ConfigError(message, option="device")
        raise ConfigError(
            f"tp_size={config.tp_size}, pp_size={config.pp_size} and dp_size={config.dp_size} take {wanted} GPUs, from "
            f"{device} on; torch sees {found} here ({names})",
            option=next(name for name in ("tp_size", "pp_size", "dp_size") if getattr(config, name) > 1),
        )
    if wanted == 1:
        return device
    return torch.device("cuda", first + (config.dp_rank or 0) * num_ranks + rank % num_ranks)


def kv_dtype(config: EngineConfig) -> torch.dtype | None:
    """The dtype of keys and values, if not the model's."""
    return None if config.kv_cache_dtype == "auto" else torch.float8_e4m3fn


def check_kv_dtype(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError if the device cannot hold such keys and values."""
    if config.kv_cache_dtype != "auto":
        _check_fp8("kv_cache_dtype", config.kv_cache_dtype, device)


def check_quantization(config: EngineConfig, model: Config, device: torch.device) -> None:
    """Raise ConfigError if the device or the model does not suit the quantisation."""
    if config.quantization is None:
        return
    option = f"quantization={config.quantization!r}"
    if not isinstance(model, ModelConfig):
        raise ConfigError(
            f"{option} is for the layers of {', '.join(FAMILIES)}, and not for those that serve {model.architecture} "
            "here",
            option="quantization",
        )
    if model.experts is not None and config.quantization != "int4":
        raise ConfigError(
            f"{option} is for dense layers, and {model.path} has mixtures of experts: leave it out, or set "
            "quantization='int4'",
            option="quantization",
        )
    if model.scheme is not None:
        raise ConfigError(
            f"{option}: {model.path} is quantised already ({model.scheme}), and served so without this option",
            option="quantization",
        )
    side = 16
    if config.quantization == "int4":
        side = UNIT
    else:
        _check_fp8("quantization", config.quantization, device)
        dtype = resolve_dtype(model, config.dtype, device)
        if dtype != torch.bfloat16:
            raise ConfigError(
                f"{option} multiplies into bfloat16, and dtype is {dtype_name(dtype)}: set dtype='bfloat16'",
                option="quantization",
            )
    experts, of_heads = model.experts, model.num_heads * model.head_dim
    inner = [of_heads, *(() if experts is not None and all(experts.layers) else (model.intermediate_size,))]
    inner += [] if experts is None else [experts.intermediate_size, experts.shared_size or side]
    widths = (model.hidden_size, *(width // config.tp_size for width in inner))
    if any(width % side for width in (*widths, model.num_kv_heads * model.head_dim)):
        raise ConfigError(
            f"{option} needs matrices whose sides are multiples of {side}; {model.path} has {widths}",
            option="quantization",
        )


def _check_fp8(option: str, value: str, device: torch.device) -> None:
    if device.type != "cuda" or torch.version.hip is not None:
        raise ConfigError(f"{option}={value!r} needs an NVIDIA GPU, and this is {device}", option=option)
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(f"{option}={value!r} needs a GPU of compute capability 8.9 or above", option=option)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's with our number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = named[1] if named else name
    return f"{name}, {num_processors()} cores"
