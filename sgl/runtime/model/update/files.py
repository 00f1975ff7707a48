"""New weights from the files of a checkpoint: their headers first, and then each tensor when it is its turn."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from sgl.errors import ModelError, WeightsError
from sgl.runtime.model.base import Model
from sgl.runtime.model.checkpoint import find_checkpoint
from sgl.runtime.model.choice import ModelImpl, read_config
from sgl.runtime.model.update.writer import Given, Writer
from sgl.runtime.model.weight_files import FLOAT_DTYPES, model_headers, opened, read

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FREE = (
    *("path", "dtype", "checkpoint_format", "bos_token_id", "eos_token_ids", "context_length", "cached_head_dim"),
    *("original_context_length", "tie_word_embeddings", "media"),
)
"""Fields of a config in which a checkpoint of the same model may differ."""


class Files:
    """Of a checkpoint of a model that is loaded."""

    def __init__(self, path: str, model: Model, model_impl: ModelImpl) -> None:
        """Raises ModelError where there is none, or one of another model."""
        config = read_config(path, model_impl)
        own: Any = getattr(model, "whole_config", model.config)
        if type(config) is not type(own):
            raise ModelError(
                f"{path} is a {config.architecture}, and this engine has a {own.architecture}", path=path
            )
        if getattr(config, "scheme", None) is not None:
            raise WeightsError(f"{path} is quantised, and this engine's weights are not", path=path)
        if (name := _first_difference(config, own)) is not None:
            wrong = (
                f"{getattr(config, name)!r}, and this engine's model {getattr(own, name)!r}: it is another model"
            )
            raise ModelError(f"{path} has {name}={wrong}", path=path)
        self._path, self._model = path, model
        self._tensors: dict[str, Any] = {}
        self._file: tuple[Path, Any] | None = None  # the latest, opened

    def given(self, writer: Writer) -> dict[str, Given]:
        """The tensors, as far as they are for the writer. Raises WeightsError."""
        from_module = self._converted()
        if from_module is not None:
            self._tensors = from_module
            return {name: Given(tuple(its.shape), its.dtype) for name, its in from_module.items()}
        self._tensors = model_headers(Path(find_checkpoint(self._path)))
        found = {}
        for name, its in self._tensors.items():
            if writer.ignores(writer.name(name)):
                continue
            if its.dtype not in FLOAT_DTYPES:
                raise WeightsError(
                    f"{name} in {its.file} is {its.dtype}, and no float's", path=str(its.file), tensor=name
                )
            found[name] = Given(its.shape, _DTYPES[its.dtype])
        return found

    def get(self, name: str) -> torch.Tensor:
        """One of them. Raises WeightsError."""
        its = self._tensors[name]
        if isinstance(its, torch.Tensor):
            return its
        if self._file is None or self._file[0] != its.file:
            self._file = its.file, opened(its.file)
        return read(self._file[1], its.name, its.file)

    def _converted(self) -> dict[str, torch.Tensor] | None:
        """transformers' tensors by the names that its modules have, which its loader knows how to make; None for models
        of sgl's own."""
        # imported only where it serves: transformers takes seconds
        if type(self._model).__name__ != "TransformersModel":
            return None
        from sgl.runtime.model.hf import weights
        from sgl.runtime.model.hf.attention import NAME
        from sgl.runtime.model.hf.config import empty_module, plain_config, tensor_prefixes

        cpu, dtype = torch.device("cpu"), self._model.dtype
        folder = Path(find_checkpoint(self._path))
        architecture = self._model.config.architecture
        module = empty_module(plain_config(str(folder)), architecture, NAME, dtype)
        weights.load(module, folder, dtype, cpu, prefixes=tensor_prefixes(architecture))
        return {name: its.detach() for name, its in module.state_dict().items() if its.is_floating_point()}


def _first_difference(config: Any, own: Any) -> str | None:
    """A field that makes another model."""
    for field in fields(own):
        if field.name not in _FREE and not _alike(getattr(config, field.name), getattr(own, field.name)):
            return field.name
    return None


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):  # a GGUF file has rounded ones
        return math.isclose(one, other, rel_tol=1e-5)
    if is_dataclass(one) and type(one) is type(other):
        return _first_difference(one, other) is None
    return bool(one == other)
