"""Reads LoRA adapters as peft saves them: adapter_config.json and adapter_model.safetensors in one folder.

What a config asks for beyond low-rank matrices on the layers' products is refused by its name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sgl.errors import AdapterError, ModelError
from sgl.runtime.lora_options import LORA_FUSED
from sgl.runtime.model.checkpoint import checkpoint_folder
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.families import FAMILIES
from sgl.runtime.model.loader import FLOAT_DTYPES, opened, read
from sgl.runtime.model.lora import TARGETS, Adapter, LoraSlots, Pair
from sgl.runtime.model.shard import Shard

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OTHERS = ("model.embed_tokens", "lm_head")
_ALL_LINEAR = "all-linear"
_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "modules_to_save": ([],),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "alora_invocation_tokens": ([],),
    "arrow_config": ({},),
    "monteclora_config": ({},),
    "velora_config": ({},),
}
"""Fields of a config that change what is computed, with the values that do not; null does not either."""
_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that changed the base's weights, too."""
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_MOST_BYTES = 1 << 20  # of a config


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """An adapter_config.json."""

    folder: Path
    rank: int
    alpha: float
    has_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: frozenset[int] | None
    """None: all."""

    @staticmethod
    def read(path: str) -> LoraConfig:
        """Of an adapter's folder, or of one on the hub. Raises AdapterError."""
        folder = _folder(path)
        given = _json(folder / CONFIG)
        kind = given.get("peft_type")
        if kind != "LORA":
            raise _wrong(folder, f"peft_type is {kind!r}, and only 'LORA' is served")
        for name, harmless in _REFUSED.items():
            value = given.get(name)
            if value is not None and value not in harmless:
                raise _wrong(folder, f"{name} is {_shown(value)}, which is not supported")
        how = given.get("init_lora_weights")
        if isinstance(how, str) and how.lower().startswith(_OTHER_BASES):
            raise _wrong(folder, f"init_lora_weights={how!r} changed the base's weights: convert it to plain LoRA")
        rank, alpha = given.get("r", 8), given.get("lora_alpha", 8)
        if not _is_rank(rank) or not _is_number(alpha):
            raise _wrong(
                folder, f"r={_shown(rank)} and lora_alpha={_shown(alpha)} must be a positive integer and a number"
            )
        ranks, alphas = (given.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
        if not isinstance(ranks, dict) or not all(map(_is_rank, ranks.values())):
            raise _wrong(folder, "rank_pattern must give positive integers by module")
        if not isinstance(alphas, dict) or not all(map(_is_number, alphas.values())):
            raise _wrong(folder, "alpha_pattern must give numbers by module")
        layers = given.get("layers_to_transform")
        layers = [layers] if isinstance(layers, int) else layers or []
        if not isinstance(layers, list) or not all(type(each) is int and each >= 0 for each in layers):
            raise _wrong(folder, f"layers_to_transform is {_shown(layers)}, which are no numbers of layers")
        if layers and given.get("layers_pattern") not in (None, [], "layers", ["layers"]):
            raise _wrong(
                folder, f"layers_pattern is {_shown(given['layers_pattern'])}, and layers are in 'layers' here"
            )
        return LoraConfig(
            folder,
            rank,
            float(alpha),
            bool(given.get("use_rslora")),
            ranks,
            alphas,
            _modules(folder, "target_modules", given),
            _modules(folder, "exclude_modules", given),
            None if not layers else frozenset(layers),
        )

    def modules(self, config: ModelConfig) -> dict[str, int]:
        """The model's modules that it changes, as `model.layers.0.self_attn.q_proj`, with their ranks. Raises
        AdapterError for none, or others than the layers' products."""
        found: dict[str, int] = {}
        wanted = self.layers or range(config.num_layers)
        names = _module_names(config)
        for layer in (its for its in range(config.num_layers) if its in wanted):
            for name in names:
                inside = TARGETS[parts_of(name)[0]]
                module = f"{_body(config)}.layers.{layer}.{inside}.{name}"
                if inside == "mlp" and config.has_experts(layer):
                    self._refuse_experts(module.removesuffix(f".{name}"), name)
                elif self._is_target(module):
                    found[module] = self._of(self.rank_pattern, module, self.rank)
        if self.targets != _ALL_LINEAR:
            for module in _OTHERS:
                if self._is_target(module):
                    raise _wrong(
                        self.folder, f"target_modules has {module}, and only {', '.join(names)} are supported"
                    )
        if not found:
            raise _wrong(
                self.folder,
                f"{_shown(self.targets)} is in none of {config.num_layers} layers: they have {', '.join(names)}",
            )
        return found

    def _refuse_experts(self, mlp: str, name: str) -> None:
        for module in (f"{mlp}.experts.0.{name}", f"{mlp}.shared_expert.{name}"):
            if self.targets != _ALL_LINEAR and self._is_target(module):
                raise _wrong(self.folder, f"target_modules has {module}, and experts are not supported")

    def scale(self, module: str, rank: int) -> float:
        """What B A x is multiplied with."""
        alpha: float = self._of(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.has_rslora else rank)

    def _is_target(self, module: str) -> bool:
        if _names(self.excluded, module, self.folder):
            return False
        return self.targets == _ALL_LINEAR or _names(self.targets, module, self.folder)

    def _of(self, patterns: Mapping[str, Any], module: str, default: Any) -> Any:
        for pattern, value in patterns.items():
            if _fullmatch(rf"(.*\.)?({pattern})", module, self.folder):
                return value
        return default


def parts_of(module: str) -> tuple[str, ...]:
    """The products that a module computes, of `TARGETS`."""
    name = module.rpartition(".")[2]
    return LORA_FUSED.get(name, (name,))


def read_adapter(path: str, slots: LoraSlots) -> Adapter:
    """An adapter's folder, for these slots. Raises AdapterError, also for what has no room in them. Safe from any
    thread."""
    lora = LoraConfig.read(path)
    check_room(lora, slots.config, slots.most_rank, slots.targets)
    return slots.packed(path, read_pairs(lora, slots.config, slots.shard))


def check_room(lora: LoraConfig, config: ModelConfig, rank: int, targets: Collection[str]) -> None:
    """Raise AdapterError for an adapter of a higher rank or with other targets."""
    modules = lora.modules(config)
    highest = max(modules.values())
    if highest > rank:
        raise AdapterError(
            f"{lora.folder} has rank {highest}, and max_lora_rank is {rank}: start with a higher one",
            path=str(lora.folder),
        )
    others = sorted({part for module in modules for part in parts_of(module)} - set(targets))
    if others:
        raise AdapterError(
            f"{lora.folder} has {', '.join(others)}, and lora_target_modules are {', '.join(sorted(targets))}: start "
            "with all of them",
            path=str(lora.folder),
        )


def read_pairs(lora: LoraConfig, config: ModelConfig, shard: Shard) -> dict[str, Pair]:
    """The matrices of a part of the model, float32 on the CPU, by module. config: the whole model's. Raises
    AdapterError."""
    modules = lora.modules(config)
    file = lora.folder / WEIGHTS
    if not file.is_file():
        others = sorted(path.name for path in lora.folder.glob("adapter_model*"))
        hint = f"; only safetensors are read, not {', '.join(others)}" if others else ""
        raise AdapterError(f"{file} is missing{hint}", path=str(file))
    with _as_adapters(file), opened(file) as tensors:
        names = _found(tensors, modules, file)
        layers = shard.layers(config)
        pairs = {}
        for module, rank in modules.items():
            parts = parts_of(module)
            shapes = [_shape(part, config) for part in parts]
            wide, deep = sum(rows for rows, _ in shapes), shapes[0][1]
            for which, shape in (("A", (rank, deep)), ("B", (wide, rank))):
                header = tensors.get_slice(names[module, which])
                shape_there, dtype = tuple(header.get_shape()), str(header.get_dtype())
                if shape_there != shape:
                    raise _wrong_tensor(
                        file,
                        names[module, which],
                        f"{list(shape_there)}; the model and rank {rank} make it {list(shape)}",
                    )
                if dtype not in FLOAT_DTYPES:
                    raise _wrong_tensor(file, names[module, which], f"of {dtype}, and floats are expected")
            layer = int(module.split(".")[-3])
            if layer not in layers:
                continue
            a, b = (read(tensors, names[module, which], file).float() for which in "AB")
            if not (a.isfinite().all() and b.isfinite().all()):
                raise _wrong_tensor(file, names[module, "A"], "not finite, or its B is not")
            scaled = torch.split(b * lora.scale(module, rank), [rows for rows, _ in shapes])
            for part, its in zip(parts, scaled, strict=True):
                name = f"model.layers.{layer}.{TARGETS[part]}.{part}"
                rows, columns = (*shard.part(f"{name}.weight", config), slice(None), slice(None))[:2]
                pairs[name] = Pair(a[:, columns], its[rows])
    return pairs


def _found(tensors: Any, modules: Mapping[str, int], file: Path) -> dict[tuple[str, str], str]:
    """The names of the file's tensors by module, and A or B. Raises AdapterError unless these are all."""
    names: dict[tuple[str, str], str] = {}
    for name in tensors.keys():  # noqa: SIM118 - not a mapping
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in modules:
            raise AdapterError(
                f"{file} has the tensor {name}, which is no matrix of a module that its config targets",
                path=str(file),
                tensor=name,
            )
        names[match["module"], match["which"]] = name
    for module in modules:
        for which in "AB":
            if (module, which) not in names:
                name = f"base_model.model.{module}.lora_{which}.weight"
                raise AdapterError(f"{file} lacks {name}, which its config calls for", path=str(file), tensor=name)
    return names


def _module_names(config: ModelConfig) -> list[str]:
    """What transformers calls the products of a layer, some of them together."""
    fused = FAMILIES[config.architecture].fused_modules
    within = {part for name in fused for part in LORA_FUSED[name]}
    return [*fused, *(name for name in TARGETS if name not in within)]


def _body(config: ModelConfig) -> str:
    """Where transformers has the layers."""
    return "model" if FAMILIES[config.architecture].vision is None else "model.language_model"


def _shape(product: str, config: ModelConfig) -> tuple[int, int]:
    """[out, in] of a product's matrix."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return {
        "q_proj": (heads, hidden),
        "k_proj": (kv_heads, hidden),
        "v_proj": (kv_heads, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }[product]


@contextmanager
def _as_adapters(file: Path) -> Iterator[None]:
    """Errors of a checkpoint's file are the adapter's."""
    try:
        yield
    except AdapterError:
        raise
    except ModelError as error:
        raise AdapterError(str(error), path=str(file), tensor=getattr(error, "tensor", None)) from error


def _folder(path: str) -> Path:
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.exists() or not _HUB_ID.fullmatch(path):
        raise AdapterError(f"{path} is neither an adapter's folder nor a hub id", path=path)
    try:
        return checkpoint_folder(path)
    except ModelError as error:
        raise AdapterError(f"{path} is no adapter's folder: {error}", path=path) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"cannot read {path}: {error}", path=str(path)) from error
    if not isinstance(given, dict):
        raise AdapterError(f"{path} is not a JSON object", path=str(path))
    return given


def _modules(folder: Path, field: str, given: Mapping[str, Any]) -> str | tuple[str, ...]:
    value = given.get(field) or ()
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise _wrong(folder, f"{field} must be a list of names, a regular expression or {_ALL_LINEAR!r}")
    return tuple(sorted(value))


def _names(modules: str | Iterable[str], module: str, folder: Path) -> bool:
    """Whether peft means this module: a text is a regular expression, names in a list are endings."""
    if isinstance(modules, str):
        return bool(modules) and _fullmatch(modules, module, folder)
    return any(module == each or module.endswith(f".{each}") for each in modules)


def _fullmatch(pattern: str, module: str, folder: Path) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise _wrong(folder, f"{pattern!r} is no regular expression: {error}") from error


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _wrong(folder: Path, what: str) -> AdapterError:
    return AdapterError(f"{folder / CONFIG}: {what}", path=str(folder / CONFIG))


def _wrong_tensor(file: Path, name: str, what: str) -> AdapterError:
    return AdapterError(f"{name} in {file} is {what}", path=str(file), tensor=name)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:80]}…"
