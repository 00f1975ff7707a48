"""Which device an engine computes on, and whether it can do what the options ask for."""

from __future__ import annotations

import torch

from sgl.errors import ConfigError, SglError
from sgl.kernels.layers.grouped import UNIT
from sgl.runtime.config import EngineConfig
from sgl.runtime.model.base import Config
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.families import FAMILIES
from sgl.runtime.model.loader import dtype_name, resolve_dtype
from sgl.runtime.platform.base import Platform
from sgl.runtime.platform.checked import checked, fault
from sgl.runtime.platform.registry import parsed, platform_of


def device_for(config: EngineConfig, rank: int = 0) -> torch.device:
    """The device of an engine, or of one of its ranks. Raises ConfigError."""
    its, first = parsed(config.device)
    try:
        if its.is_shared and not its.is_available():
            raise ConfigError(f"device={its.name!r}: there is none on this machine", option="device")
        device: object = its.device(first) if its.is_shared else _own(config, its, first, rank)
    except SglError:
        raise
    except Exception as error:  # what another package's platform raises is not known
        message = f"device={its.name!r}: {type(its).__name__} does not find it ({type(error).__name__}: {error})"
        raise ConfigError(message, option="device") from error
    if not isinstance(device, torch.device):
        message = f"device={its.name!r}: {type(its).__name__}.device gave {device!r}, which is no torch.device"
        raise ConfigError(message, option="device")
    return device


def laid_out(platform: Platform, matrix: torch.Tensor) -> torch.Tensor:
    """A weight matrix as the device likes it. Raises ConfigError: another shape
    would end in an error that names nobody."""
    found = checked(platform, platform.lay_out, matrix, fits=lambda its: isinstance(its, torch.Tensor))
    if found.shape == matrix.shape:
        return found
    raise fault(platform, f"{type(platform).__name__}.lay_out gave no tensor of its matrix's shape")


def _own(config: EngineConfig, its: Platform, given: int | None, rank: int) -> torch.device:
    """This rank's of the devices that begin with the given one: engine by engine, rank by rank."""
    names, first = its.names(), given or 0
    num_ranks = config.num_ranks // config.nnodes  # on this host
    wanted = num_ranks * config.dp_size
    if first + wanted > len(names):
        here, device = ", ".join(names) or "none", its.option(its.device(given))
        if wanted == 1:
            message = f"device={device!r}: {its.seen_by} sees {len(names)} {its.kind} here ({here})"
            raise ConfigError(message, option="device")
        raise ConfigError(
            f"tp_size={config.tp_size}, pp_size={config.pp_size} and dp_size={config.dp_size} take {wanted} "
            f"{'GPUs' if its.is_gpu else its.kind}, from {device} on; {its.seen_by} sees {len(names)} here ({here})",
            option=next(name for name in ("tp_size", "pp_size", "dp_size") if getattr(config, name) > 1),
        )
    if wanted == 1:
        return its.device(given)
    return its.device(first + (config.dp_rank or 0) * num_ranks + rank % num_ranks)


def device_name(config: EngineConfig) -> str:
    """Of an engine's first device, for people."""
    its, first = parsed(config.device)
    return checked(its, its.device_name, its.device(first), fits=lambda found: isinstance(found, str))


def kv_dtype(config: EngineConfig) -> torch.dtype | None:
    """The dtype of keys and values, if not the model's."""
    return None if config.kv_cache_dtype == "auto" else torch.float8_e4m3fn


def check_kv_dtype(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError if the device cannot hold such keys and values."""
    if config.kv_cache_dtype != "auto":
        _check_fp8(config, "kv_cache_dtype", config.kv_cache_dtype, device)


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
        _check_fp8(config, "quantization", config.quantization, device)
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


def _check_fp8(config: EngineConfig, option: str, value: str, device: torch.device) -> None:
    its = platform_of(config.device or device.type)
    obstacle = checked(its, its.why_no_fp8, device, fits=lambda found: found is None or isinstance(found, str))
    if obstacle is not None:
        raise ConfigError(f"{option}={value!r} {obstacle}", option=option)
