"""Reads LoRA adapters as peft saves them: adapter_config.json and adapter_model.safetensors in one folder.

What a config asks for beyond low-rank matrices on the layers' products is refused by its name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sgl.errors import AdapterError, ModelError
from sgl.runtime.bounded_regex import RegexRefused
from sgl.runtime.lora_options import ALL_LINEAR
from sgl.runtime.model.adapter_names import Patterns, Values, body_of, ends_of, spelled
from sgl.runtime.model.checkpoint import checkpoint_folder, local_path
from sgl.runtime.model.lora import Adapter, LoraSlots, Modules, Pair, Shape, is_of_expert, parts_of
from sgl.runtime.model.weight_files import FLOAT_DTYPES, opened, read

CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "modules_to_save": ([],),
    "lora_bias": (False,),
    "layer_replication": ([],),
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
_LAYER, _OF_LAYERS = re.compile(r".*\.[^.]*\.(\d+)\."), re.compile(r".*\.layers\.(\d+)\.")
"""Where a module's layer is: by default its last number, also that of an expert."""
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_MOST_BYTES = 1 << 20  # of a config
_MOST_RANK, _MOST_ALPHA = 1 << 20, 1e30  # any that could be meant


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """An adapter_config.json."""

    folder: Path
    rank: int
    alpha: float
    has_rslora: bool
    ranks: Values
    alphas: Values
    targets: str | frozenset[str]
    excluded: str | frozenset[str]
    parameters: tuple[str, ...]
    """The ends of those of fused experts."""
    layers: frozenset[int] | None
    """None: all."""
    layer_of: re.Pattern[str]
    of_experts: frozenset[str]
    """Modules of single experts that its file has matrices of: where experts are fused, `targets` are no experts."""
    body: str | None
    """Where its file has the layers, and its patterns expect them."""
    patterns: Patterns

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
            right = f"must be an integer from 1 to {_MOST_RANK} and a number"
            raise _wrong(folder, f"r={_shown(rank)} and lora_alpha={_shown(alpha)} {right}")
        ranks, alphas = (given.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
        if not isinstance(ranks, dict) or not all(map(_is_rank, ranks.values())):
            raise _wrong(folder, "rank_pattern must give positive integers by module")
        if not isinstance(alphas, dict) or not all(map(_is_number, alphas.values())):
            raise _wrong(folder, "alpha_pattern must give numbers by module")
        parameters = given.get("target_parameters") or []
        if not isinstance(parameters, list) or not all(isinstance(each, str) and each for each in parameters):
            raise _wrong(folder, f"target_parameters is {_shown(parameters)}, which are no names")
        layers = given.get("layers_to_transform")
        layers = [layers] if isinstance(layers, int) else layers or []
        if not isinstance(layers, list) or not all(type(each) is int and each >= 0 for each in layers):
            raise _wrong(folder, f"layers_to_transform is {_shown(layers)}, which are no numbers of layers")
        if layers and given.get("layers_pattern") not in (None, [], "layers", ["layers"]):
            raise _wrong(
                folder, f"layers_pattern is {_shown(given['layers_pattern'])}, and layers are in 'layers' here"
            )
        there, patterns = _modules_there(folder), Patterns()
        return LoraConfig(
            folder,
            rank,
            float(alpha),
            bool(given.get("use_rslora")),
            Values("rank_pattern", ranks, patterns),
            Values("alpha_pattern", alphas, patterns),
            _modules(folder, "target_modules", given),
            _modules(folder, "exclude_modules", given),
            tuple(parameters),
            None if not layers else frozenset(layers),
            _OF_LAYERS if given.get("layers_pattern") else _LAYER,
            frozenset(filter(is_of_expert, there)),
            body_of(there),
            patterns,
        )

    def modules(self, known: Modules) -> dict[str, int]:
        """The model's modules that it changes, as `model.layers.0.self_attn.q_proj`, with their ranks. Raises
        AdapterError for none, or others than those known."""
        wanted = [
            module
            for module in known.shapes
            if (self.spelled(module) in self.of_experts or not is_of_expert(module)) and self._is_target(module)
        ]
        fused = {
            module: rank
            for parameter, rank in self.fused(known).items()
            for modules in known.fused[parameter].experts
            for module in modules
        }
        if self.targets != ALL_LINEAR:
            for place, why in known.ends.items():
                if self._is_target(place):
                    raise _wrong(self.folder, f"target_modules has {place}: {why}")
        if twice := next((module for module in wanted if module in fused), None):
            raise _wrong(self.folder, f"target_modules and target_parameters both have {twice}")
        if not (wanted or fused):
            names = ", ".join(known.names)
            targets = self.targets if isinstance(self.targets, str) else sorted(self.targets)
            raise _wrong(self.folder, f"{_shown(targets)} is in none of the model's layers: they have {names}")
        return {module: self._rank(module) for module in wanted} | fused

    def fused(self, known: Modules) -> dict[str, int]:
        """The parameters of experts that it changes, with their ranks. Raises AdapterError for others."""
        ends = {end for its in known.fused for end in ends_of(self.spelled(its))}
        for target in self.parameters:
            if target not in ends:
                its = ", ".join(dict.fromkeys(f"experts.{its.rpartition('.')[2]}" for its in known.fused)) or "none"
                why = known.reason(f".{target}.") or f"of the model's parameters, adapters may change {its}"
                raise _wrong(self.folder, f"target_parameters has {_shown(target)}: {why}")
        parameters = frozenset(self.parameters)
        return {its: self._rank(its) for its in known.fused if self._means("target_parameters", parameters, its)}

    def scale(self, module: str, rank: int) -> float:
        """What B A x is multiplied with."""
        with self._naming():
            alpha: float = self.alphas.value(self.spelled(module), self.alpha)
        return alpha / (math.sqrt(rank) if self.has_rslora else rank)

    def spelled(self, module: str) -> str:
        """The name of one of the model's modules in this adapter's file, which an older transformers may have given."""
        return spelled(module, self.body)

    def _is_target(self, module: str) -> bool:
        if self._means("exclude_modules", self.excluded, module):
            return False
        layer = self.layer_of.match(module)
        if self.layers is not None and (layer is None or int(layer[1]) not in self.layers):
            return False
        return self.targets == ALL_LINEAR or self._means("target_modules", self.targets, module)

    def _means(self, field: str, modules: str | frozenset[str], module: str) -> bool:
        with self._naming():
            return self.patterns.means(field, modules, self.spelled(module))

    def _rank(self, module: str) -> int:
        with self._naming():
            rank: int = self.ranks.value(self.spelled(module), self.rank)
        return rank

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except RegexRefused as error:
            raise _wrong(self.folder, str(error)) from error


def read_adapter(path: str, slots: LoraSlots) -> Adapter:
    """An adapter's folder, for these slots. Raises AdapterError, also for what has no room in them. Safe from any
    thread."""
    lora = LoraConfig.read(path)
    check_room(lora, slots.known, slots.most_rank, slots.targets)
    return slots.packed(path, read_pairs(lora, slots.known, slots.modules, slots.dtype))


def check_room(lora: LoraConfig, known: Modules, rank: int, targets: Collection[str]) -> None:
    """Raise AdapterError for an adapter of a higher rank or with other targets."""
    modules = lora.modules(known)
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


def read_pairs(lora: LoraConfig, known: Modules, wanted: Container[str], dtype: torch.dtype) -> dict[str, Pair]:
    """The matrices of the wanted modules, whole, float32 on the CPU. dtype: what they will be held in. Raises
    AdapterError, also for wrong ones of others."""
    fused = lora.fused(known)
    of_fused = {module for parameter in fused for its in known.fused[parameter].experts for module in its}
    singles = {module: rank for module, rank in lora.modules(known).items() if module not in of_fused}
    file = _weights_file(lora.folder)
    if file is None:
        missing = lora.folder / WEIGHTS[0]
        raise AdapterError(f"{missing} is missing, and so is {WEIGHTS[1]}", path=str(missing))
    with _as_adapters(file), opened(file) as tensors:
        holders = {*singles, *(_holder(parameter, fused) for parameter in fused)}
        names, pairs = _found(tensors, {lora.spelled(its): its for its in holders}, known, file), {}
        for module, rank in singles.items():
            its = _checked(
                tensors, (names[module, "A"], names[module, "B"]), known.shapes[module], rank, rank, file
            )
            if module in wanted:
                pairs[module] = _read(tensors, its, lora.scale(module, rank), dtype, file)
        for parameter, rank in fused.items():
            holder, (experts, is_turned) = _holder(parameter, fused), known.fused[parameter]
            out, width = known.shapes[experts[0][0]]
            whole = out * len(experts[0]), width
            its = _checked(
                tensors, (names[holder, "A"], names[holder, "B"]), whole, rank * len(experts), rank, file
            )
            if experts[0][0] in wanted:
                a, b = _read(tensors, its, lora.scale(parameter, rank), dtype, file)
                # rows of A are by expert, columns of B by rank
                by_expert = zip(
                    experts, torch.split(a, rank), torch.unflatten(b, 1, (rank, -1)).unbind(2), strict=True
                )
                for modules, of_a, of_b in by_expert:
                    parts = of_b.reshape((out, -1, rank) if is_turned else (-1, out, rank))
                    each = zip(modules, parts.unbind(1 if is_turned else 0), strict=True)
                    pairs |= {module: Pair(of_a, rows) for module, rows in each}
    return pairs


def _checked(
    tensors: Any, names: tuple[str, str], shape: Shape, width: int, rank: int, file: Path
) -> tuple[str, str]:
    """The names of A [width, in] and B [out, width], if they are so. Raises AdapterError."""
    for name, expected in zip(names, ((width, shape[1]), (shape[0], width)), strict=True):
        header = tensors.get_slice(name)
        shape_there, dtype = tuple(header.get_shape()), str(header.get_dtype())
        if shape_there != expected:
            raise _wrong_tensor(
                file, name, f"{list(shape_there)}; the model and rank {rank} make it {list(expected)}"
            )
        if dtype not in FLOAT_DTYPES:
            raise _wrong_tensor(file, name, f"of {dtype}, and floats are expected")
    return names


def _read(tensors: Any, names: tuple[str, str], scale: float, dtype: torch.dtype, file: Path) -> Pair:
    a, b = (read(tensors, name, file).float() for name in names)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise _wrong_tensor(file, names[0], "not finite, or its B is not")
    b = b * scale
    for name, its in zip(names, (a, b), strict=True):
        if its.numel() and its.abs().max() > torch.finfo(dtype).max:
            raise _wrong_tensor(file, name, f"too large for the model's {dtype}, its B times {scale:g}")
    return Pair(a, b)


def _holder(parameter: str, fused: Container[str]) -> str:
    """What has the matrices of a parameter: the last one's wrapper is around the one before."""
    experts, _, name = parameter.rpartition(".")
    is_inside = name == "gate_up_proj" and f"{experts}.down_proj" in fused
    return f"{experts}.base_layer" if is_inside else experts


def _weights_file(folder: Path) -> Path | None:
    return next((file for name in WEIGHTS if (file := folder / name).is_file()), None)


def _modules_there(folder: Path) -> list[str]:
    """The modules in an adapter's file, if there is one."""
    file = _weights_file(folder)
    if file is None:
        return []
    with _as_adapters(file), opened(file) as tensors:
        return [its["module"] for its in map(_NAME.fullmatch, tensors.keys()) if its is not None]


def _found(tensors: Any, modules: Mapping[str, str], known: Modules, file: Path) -> dict[tuple[str, str], str]:
    """The names of the file's tensors by module, and A or B. modules: by their names there. Raises AdapterError unless
    these are all."""
    names: dict[tuple[str, str], str] = {}
    for name in tensors.keys():  # noqa: SIM118 - not a mapping
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in modules:
            if (why := known.reason(name)) == "":
                continue
            why = why or "it is no matrix of a module that its config targets"
            raise AdapterError(f"{file} has the tensor {name}: {why}", path=str(file), tensor=name)
        names[modules[match["module"]], match["which"]] = name
    for there, module in modules.items():
        for which in "AB":
            if (module, which) not in names:
                name = f"base_model.model.{there}.lora_{which}.weight"
                raise AdapterError(f"{file} lacks {name}, which its config calls for", path=str(file), tensor=name)
    return names


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
    try:
        local = local_path(path)
        if local.is_dir():
            return local
        if local.exists() or not _HUB_ID.fullmatch(path):
            raise AdapterError(f"{path} is neither an adapter's folder nor a hub id", path=path)
        return checkpoint_folder(path)
    except AdapterError:
        raise
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


def _modules(folder: Path, field: str, given: Mapping[str, Any]) -> str | frozenset[str]:
    value = given.get(field) or ()
    if isinstance(value, str):
        return ALL_LINEAR if value.lower() == ALL_LINEAR else value  # as peft reads it
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise _wrong(folder, f"{field} must be a list of names, a regular expression or {ALL_LINEAR!r}")
    return frozenset(value)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_RANK


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST_ALPHA


def _wrong(folder: Path, what: str) -> AdapterError:
    return AdapterError(f"{folder / CONFIG}: {what}", path=str(folder / CONFIG))


def _wrong_tensor(file: Path, name: str, what: str) -> AdapterError:
    return AdapterError(f"{name} in {file} is {what}", path=str(file), tensor=name)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:80]}…"
