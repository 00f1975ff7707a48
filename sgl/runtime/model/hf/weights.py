"""Fills a module of transformers from safetensors, or with random numbers.

transformers names and shapes some tensors otherwise than their checkpoints do (experts, for one). Its loader, which
knows how, runs twice: with the files' headers alone, before memory is taken, and with the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from sgl.errors import WeightsError
from sgl.runtime.model.loader import named, read_quantized, say_dequantized
from sgl.runtime.model.quantized.checkpoint import QuantizedCheckpoint
from sgl.runtime.model.quantized.scheme import QuantScheme
from sgl.runtime.model.weight_files import FLOAT_DTYPES, check_dtype, opened, read, read_headers

_OLD_BUFFERS = ("rotary_emb.inv_freq", "attn.masked_bias")  # in old checkpoints; they follow from the config
_OLD_OPTIONS: dict[str, Any] = (  # of older versions
    {"tp_plan": None} if "tp_plan" in signature(convert_and_load_state_dict_in_model).parameters else {}
)


def load(
    module: Any,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    scheme: QuantScheme | None = None,
    prefixes: tuple[str, ...] = ("",),
) -> None:
    """Read a checkpoint's tensors into a module that is on the meta device: those with one of these prefixes, without
    it; quantised ones are dequantised. Raises WeightsError."""
    found_entries = {
        name.removeprefix(prefix): entry
        for name, entry in read_headers(folder).items()
        for prefix in prefixes
        if name.startswith(prefix)
    }
    entries, quantized = read_quantized(found_entries, scheme, device)
    entries = {name: entry for name, entry in entries.items() if not quantized.adds_nothing(name)}
    meta = torch.device("meta")
    empty = {name: torch.empty(entry.shape, dtype=dtype, device=meta) for name, entry in entries.items()}
    # Old checkpoints have masks and positions, which are ignored.
    others = {name: empty[name] for name, entry in entries.items() if entry.dtype not in FLOAT_DTYPES}
    if others and _converted(module, others, dtype, meta).missing_keys != module.state_dict().keys():
        for name in others:
            check_dtype(name, entries[name])
    _check(module, _converted(module, empty, dtype, meta), folder)
    entries = {name: entry for name, entry in entries.items() if name not in others}
    files = {file: opened(file) for file in sorted({entry.file for entry in entries.values()})}
    tensors = {
        name: _Matrix(quantized, name)
        if name in quantized.shapes
        else _Tensor(files[entry.file], entry.name, entry.file)
        for name, entry in entries.items()
    }
    say_dequantized(quantized, scheme, dtype)
    found = _converted(module, tensors, dtype, device)
    if found.conversion_errors or found.mismatched_keys:
        raise WeightsError(f"cannot convert the weights of {folder}: {found.conversion_errors}", path=str(folder))
    _complete(module, found, dtype, device)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a file, read when transformers' loader asks for it by [...]."""

    tensors: Any
    name: str
    file: Path

    def __getitem__(self, _: Any) -> torch.Tensor:
        return read(self.tensors, self.name, self.file).clone()  # the file may change later


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A quantised one, likewise."""

    checkpoint: QuantizedCheckpoint
    name: str

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self.checkpoint.dequantized(self.name)


def fill(module: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Initialise as transformers does, equally on the same kind of device."""
    found = _converted(module, {}, dtype, device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        _complete(module, found, dtype, device)


def _converted(module: Any, tensors: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    """Convert tensors and put them into the module; returns transformers' report."""
    mapping: Any = get_model_conversion_mapping(module)
    options = LoadStateDictConfig(
        device_map={"": device}, dtype=dtype, dtype_plan=module._get_dtype_plan(dtype), weight_mapping=mapping
    )
    with _quiet():
        found, _ = convert_and_load_state_dict_in_model(module, dict(tensors), options, **_OLD_OPTIONS)
    return found


def _complete(module: Any, found: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Compute what no checkpoint holds, such as rotary frequencies, and tie weights."""
    options = LoadStateDictConfig(device_map={"": device}, dtype=dtype)
    with _quiet():
        type(module)._finalize_model_loading(module, options, found)


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers draws bars, and warns of what is meant here."""
    logging: Any = transformers_logging
    level, draws = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if draws:
            logging.enable_progress_bar()


def _check(module: Any, found: Any, folder: Path) -> None:
    """Raise WeightsError unless the checkpoint has exactly the needed tensors and shapes."""
    if found.conversion_errors:
        name, error = next(iter(found.conversion_errors.items()))
        raise WeightsError(
            f"{folder}: its tensors make no {name}: {error.splitlines()[-1]}", path=str(folder), tensor=name
        )
    for name, given, wanted in sorted(found.mismatched_keys):
        raise WeightsError(
            f"{name} of {folder} is {list(given)}; its config.json makes it {list(wanted)}",
            path=str(folder),
            tensor=name,
        )
    module._adjust_missing_and_unexpected_keys(found)
    shapes = {name: tuple(its.shape) for name, its in module.state_dict().items()}
    tied = module.all_tied_weights_keys
    missing = {
        name: shapes[name]
        for name in sorted(found.missing_keys)
        if name not in tied or tied[name] in found.missing_keys
    }
    missing = {
        name: shape
        for name, shape in missing.items()
        if not any(source == name and target not in found.missing_keys for target, source in tied.items())
    }
    if missing:
        count, first = named(missing)
        message = f"{folder} lacks {count} that its config.json calls for: {first}"
        raise WeightsError(message, path=str(folder), tensor=next(iter(missing)))
    if more := {name for name in found.unexpected_keys if not name.endswith(_OLD_BUFFERS)}:
        name, *_ = names = sorted(more)
        shown = ", ".join(names[:3])
        count = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
        message = f"{folder} has {count} that its config.json has no place for: {shown}"
        raise WeightsError(message, path=str(folder), tensor=name)
