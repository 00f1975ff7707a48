"""Reads fields of a config.json, with errors that name file and architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl.errors import ModelError, UnsupportedModel
from sgl.runtime.model.families import FAMILIES

_MOST = 1 << 53  # numbers of a config are exact
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


class Fields:
    """A config.json, with path and architecture for errors; null counts as absent. Raises ModelError."""

    def __init__(self, path: str, data: Mapping[str, Any], architecture: str | None = None) -> None:
        self.path = path
        self.data = data
        self.architecture = architecture

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"config.json has no {key!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
            raise self.error(f"{key!r} is {value!r:.100}, not a number above 0")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self.number(key, default)
        if value != int(value):
            raise self.error(f"{key!r} is {value!r}, not a whole number")
        return int(value)

    def optional(self, key: str) -> float | None:
        """A number above 0, or None."""
        return None if self.data.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{key!r} is {value!r}, neither true nor false")
        return default if value is None else value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object, empty if absent."""
        value = self.data.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.error(f"{key!r} is {value!r:.100}, not an object")
        return value

    def listed(self, key: str, kind: type) -> list[Any] | None:
        """A list of names or numbers; None if absent."""
        value = self.data.get(key)
        if value is not None and not (isinstance(value, list) and all(type(each) is kind for each in value)):
            raise self.error(f"{key!r} is {value!r:.100}, not a list of {'names' if kind is str else 'numbers'}")
        return value

    def heads(self, hidden_size: int) -> tuple[int, int, int]:
        """How many of queries, how many of keys and values, and the width of each."""
        num_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise self.error(
                f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        head_dim = self.integer("head_dim", default=hidden_size // num_heads)
        if head_dim % 2:
            raise self.unsupported(f"an odd head_dim, {head_dim}")
        return num_heads, num_kv_heads, head_dim

    def section(self, data: Mapping[str, Any]) -> Fields:
        """Fields of a part of it."""
        return Fields(self.path, data, self.architecture)

    def error(self, message: str) -> ModelError:
        """For a missing or inconsistent field."""
        return ModelError(f"{self.path}: {message}", path=self.path)

    def unsupported(self, feature: str) -> UnsupportedModel:
        """For a feature that our own layers lack."""
        return UnsupportedModel(
            f"{self.path}: {feature} is not supported ({self.architecture})",
            architecture=self.architecture,
            supported=tuple(FAMILIES),
            path=self.path,
        )


def read_config_json(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json, with the `quantization_config` that some writers put beside it. Raises ModelError,
    and UnsupportedModel for what no decoder does."""
    data = read_json(folder / "config.json")
    text = data.get("text_config")
    sections = (data, text if isinstance(text, dict) else {})
    if any(its.get("is_causal") is False for its in sections):  # of models that embed texts
        name = str(data.get("architectures"))
        feature = f"{folder}: attention to later tokens (is_causal) is not supported ({name})"
        raise UnsupportedModel(feature, architecture=name, supported=tuple(FAMILIES), path=str(folder))
    if not any(its.get("quantization_config") for its in sections):
        for name, method in _BESIDE.items():
            if (folder / name).is_file():
                return {**data, "quantization_config": {"quant_method": method, **read_json(folder / name)}}
    return data


def read_json(path: Path) -> dict[str, Any]:
    """A checkpoint's JSON object. Raises ModelError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is no checkpoint: it has no {path.name}", path=str(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}", path=str(path)) from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds no JSON object", path=str(path))
    return data
