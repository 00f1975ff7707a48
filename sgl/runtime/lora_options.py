"""What the options for LoRA adapters may be given as."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LoraPath:
    """A LoRA adapter to load: a name for requests, and a folder as peft saves it. pinned: it keeps its slot."""

    lora_name: str
    lora_path: str
    pinned: bool = False


LoraPaths = Mapping[str, str | os.PathLike[str]] | Sequence[str | Mapping[str, Any]]
"""What callers may give as `lora_paths`."""


def read_lora_paths(given: Any) -> Any:
    """Read `NAME=FOLDER` or `FOLDER` texts, a mapping, or what /load_lora_adapter takes, one or several. Raises
    ValueError."""
    if isinstance(given, Mapping) and "lora_path" not in given:
        given = [{"lora_name": name, "lora_path": path} for name, path in given.items()]
    elif isinstance(given, Mapping):
        given = [given]
    elif isinstance(given, str):
        given = [given] if given.startswith("{") else given.split()
    if not isinstance(given, (list, tuple)):
        return given
    found: dict[str, LoraPath] = {}
    for adapter in map(_read_lora_path, given):
        if adapter.lora_name in found:
            raise ValueError(f"there are two adapters {adapter.lora_name!r}")
        found[adapter.lora_name] = adapter
    return tuple(found.values())


def _read_lora_path(given: Any) -> LoraPath:
    if isinstance(given, str) and given.startswith("{"):
        given = json.loads(given)
    if isinstance(given, str):
        name, equals, path = given.partition("=")
        given = LoraPath(name, path if equals else name)
    elif isinstance(given, Mapping):
        fields = {name: os.fspath(its) if isinstance(its, os.PathLike) else its for name, its in given.items()}
        if not {"lora_name", "lora_path"} <= fields.keys() <= {"lora_name", "lora_path", "pinned"}:
            raise ValueError("an adapter has a lora_name, a lora_path, and perhaps pinned")
        given = LoraPath(**fields)
    if not isinstance(given, LoraPath):
        raise ValueError("an adapter is a NAME=FOLDER, or has a lora_name and a lora_path")
    if not all(isinstance(text, str) and text for text in (given.lora_name, given.lora_path)):
        raise ValueError("an adapter's name and folder are texts")
    if not isinstance(given.pinned, bool):
        raise ValueError("pinned is true or false")
    return given


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The products of a layer of most models that LoRA adapters may have matrices for."""
LORA_FUSED = {"qkv_proj": LORA_TARGETS[:3], "gate_up_proj": LORA_TARGETS[4:6]}
"""Of models that compute several of them at once."""
LORA_EXPERTS = "experts"
"""Every product of the experts of a mixture."""
ALL_LINEAR = "all-linear"
"""Every product."""


def read_lora_targets(given: Any) -> Any:
    """Names of products, also in the words of models that compute several at once. Raises ValueError."""
    if given is None:
        return None
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError("targets are names")
    names = [part for name in names for part in re.split(r"[\s,]+", name) if part]
    if {"all", ALL_LINEAR} & set(names):
        return (ALL_LINEAR,)
    if not names:
        raise ValueError("no target is named")
    return tuple(dict.fromkeys(part for name in names for part in LORA_FUSED.get(name, (name,))))
