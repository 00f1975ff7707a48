"""How a checkpoint's matrices are quantised, by the `quantization_config` of its config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from sgl.errors import ModelError, UnsupportedModel

_OfOne = Literal["awq", "gptq", "mxfp4", "nvfp4", "nf4", "fp4", "llm-int8"]
Kind = Literal[_OfOne, "packed", "int8", "fp8", "nvfp4-packed", "mxfp4-packed"]

_METHODS = "awq, gptq, auto-round, compressed-tensors, fp8, fbgemm_fp8, modelopt, mxfp4, bitsandbytes"
_KINDS: dict[tuple[str, str, int], Kind] = {
    ("pack-quantized", "int", 4): "packed",
    ("pack-quantized", "int", 8): "packed",
    ("int-quantized", "int", 8): "int8",
    ("float-quantized", "float", 8): "fp8",
    ("nvfp4-pack-quantized", "float", 4): "nvfp4-packed",
    ("mxfp4-pack-quantized", "float", 4): "mxfp4-packed",
    ("mxfp8-quantized", "float", 8): "fp8",
}
"""By format, type and bits of compressed-tensors."""
_PER_GROUP, _PER_BLOCK = "group", "block"
_STRATEGIES = {"nvfp4-packed": ("tensor_group",), "mxfp4-packed": (_PER_GROUP,)}
_OF_FOUR_BITS = {"nvfp4": 16, "nvfp4-packed": 16, "mxfp4-packed": 32}  # numbers in e2m1 that share a scale
_MOST = 1 << 20  # columns of a group, or sides of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How matrices [n, k] lie in their tensors."""

    kind: Kind
    bits: int = 8
    group: int | None = None
    """Columns that share a scale; None: all of a row, or by block."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale."""
    has_zeros: bool = False
    """Whether codes have other zeros than the one in the middle."""
    zero_offset: int = 0
    """What is to be added to stored zeros."""
    has_index: bool = False
    """Whether each column names its group (`desc_act`, `actorder`)."""
    targets: tuple[str, ...] = ()
    """The modules, by name, class or "re:…"; empty: all."""

    def __str__(self) -> str:
        number = "e2m1" if self.kind == "mxfp4" else "e4m3" if self.kind == "fp8" else f"{self.bits} bits"
        if self.is_e2m1:
            number = self.kind[:5].upper()
        if self.is_blockwise:
            return self.kind.upper()
        scales = f"groups of {self.group}" if self.group else "a scale a row"
        if self.block is not None:
            scales = f"blocks of {self.block[0]} x {self.block[1]}"
        more = (", zero points" if self.has_zeros else "") + (", activation order" if self.has_index else "")
        return f"{number}, {scales}{more}"

    @property
    def is_e2m1(self) -> bool:
        """Whether a byte holds two numbers in e2m1 of one module."""
        return self.kind in _OF_FOUR_BITS

    @property
    def is_blockwise(self) -> bool:
        """Whether a matrix is stored as bitsandbytes does in four bits."""
        return self.kind in ("nf4", "fp4")

    def holds(self, module: str) -> bool:
        """Whether the module is one of its targets."""
        return not self.targets or any(_matches(target, module) for target in self.targets)


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """The layouts of a checkpoint's modules. Which modules are quantised shows in the names of their tensors, so that
    lists of those that are not (`ignore`, `modules_to_not_convert`) are true without being read."""

    method: str
    layouts: tuple[Layout, ...]

    @staticmethod
    def of(config: object, path: str, architecture: str | None) -> QuantScheme:
        """Of a `quantization_config`. Raises UnsupportedModel for what is not read, ModelError for what makes no
        sense."""
        if not isinstance(config, Mapping):
            raise ModelError(f"{path}: quantization_config is {config!r:.200}, not an object", path=path)
        return _Reader(config, path, architecture).scheme()

    @property
    def checkpoint_format(self) -> str:
        """For users."""
        return f"safetensors: {self}"

    def layout(self, *names: str) -> Layout | None:
        """Of a module, by any of its names; the first whose targets hold it."""
        return next((layout for layout in self.layouts if any(map(layout.holds, names))), None)

    def __str__(self) -> str:
        return f"{self.method}, " + "; ".join(dict.fromkeys(map(str, self.layouts)))


class _Reader:
    """A `quantization_config`, with path and architecture for errors."""

    def __init__(self, config: Mapping[str, Any], path: str, architecture: str | None) -> None:
        self._config = config
        self._path = path
        self._architecture = architecture

    def scheme(self) -> QuantScheme:
        method = self._config.get("quant_method")
        if method is None and (self._flag("load_in_4bit") or self._flag("load_in_8bit")):
            method = "bitsandbytes"  # which was the only one once
        readers: dict[object, tuple[str, Callable[[], tuple[Layout, ...]]]] = {
            "awq": ("AWQ", self._awq),
            "gptq": ("GPTQ", self._gptq),
            **dict.fromkeys(("auto-round", "intel/auto-round"), ("AutoRound", self._auto_round)),
            "compressed-tensors": ("compressed-tensors", self._compressed_tensors),
            "fp8": ("FP8", self._fp8),
            "fbgemm_fp8": ("FP8", lambda: (Layout(kind="fp8"),)),
            "modelopt": ("ModelOpt", self._modelopt),
            "mxfp4": ("MXFP4", lambda: (Layout(kind="mxfp4", bits=4, group=32),)),
            "bitsandbytes": ("bitsandbytes", self._bitsandbytes),
        }
        if not isinstance(method, str) or method not in readers:
            self._refuse(f"quant_method {method!r:.100} (but {_METHODS})")
        name, read = readers[method]
        return QuantScheme(name, read())

    def _awq(self) -> tuple[Layout, ...]:
        version = self._text("version", "format", default="gemm").lower()
        if version != "gemm":
            self._refuse(f"AWQ's version {version!r:.100} (but gemm)")
        bits = self._whole("bits", "w_bit", default=4)
        if bits != 4:
            self._refuse(f"AWQ in {bits} bits (but 4)")
        group = self._group("group_size", "q_group_size")
        return (Layout(kind="awq", bits=4, group=group, has_zeros=self._flag("zero_point", default=True)),)

    def _gptq(self) -> tuple[Layout, ...]:
        layout = self._text("checkpoint_format", "format", default="gptq").lower()
        if layout not in ("gptq", "gptq_v2"):
            self._refuse(f"GPTQ's checkpoint_format {layout!r:.100} (but gptq and gptq_v2)")
        bits = self._whole("bits", default=4)
        if bits not in (4, 8):
            self._refuse(f"GPTQ in {bits} bits (but 4 and 8)")
        if others := [name for name in self._section("dynamic") if not str(name).startswith("-:")]:
            self._refuse(f"GPTQ with other options for some modules ({others[0]!r:.100})")
        return (
            Layout(
                kind="gptq",
                bits=bits,
                group=self._group("group_size"),
                has_zeros=not self._flag("sym", default=True),
                zero_offset=0 if layout == "gptq_v2" else 1,
                has_index=self._flag("desc_act"),
            ),
        )

    def _auto_round(self) -> tuple[Layout, ...]:
        readers = {"auto_round:auto_gptq": self._gptq, "auto_round:auto_awq": self._awq}
        packing = self._text("packing_format", default="auto_round:auto_gptq")
        if packing not in readers:
            self._refuse(f"AutoRound's packing_format {packing!r:.100} (but {' and '.join(readers)})")
        for rotation in ("rotation_config", "spinquant_config"):  # inputs would have to be turned, too
            if self._section(rotation):
                self._refuse(f"AutoRound's rotations ({rotation})")
        for module, its in self._section("extra_config").items():
            own = its if isinstance(its, Mapping) else {"bits": its}
            same = all(own.get(name) in (None, self._config.get(name)) for name in ("bits", "group_size", "sym"))
            if not same and own.get("bits") not in (16, 32):
                self._refuse(f"AutoRound with other options for some modules ({module!r:.100})")
        return readers[packing]()

    def _fp8(self) -> tuple[Layout, ...]:
        if "weight_block_size" not in self._config:
            return (Layout(kind="fp8"),)
        sides = self._config["weight_block_size"]
        return (Layout(kind="fp8", block=None if sides is None else self._sides("weight_block_size", sides)),)

    def _modelopt(self) -> tuple[Layout, ...]:
        inner = self._config.get("quantization")  # of a file beside config.json
        config = inner if isinstance(inner, Mapping) else self._config
        algorithm = config.get("quant_algo")
        if algorithm == "NVFP4":
            group = _Reader(config, self._path, self._architecture)._whole("group_size", default=16)
            return (Layout(kind="nvfp4", bits=4, group=group),)
        if algorithm == "MXFP8":
            return (Layout(kind="fp8", group=32),)
        if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
            self._refuse(f"ModelOpt's {algorithm!r:.100} (but FP8, MXFP8 and NVFP4)")
        return (Layout(kind="fp8"),)

    def _bitsandbytes(self) -> tuple[Layout, ...]:
        if self._flag("load_in_8bit"):
            return (Layout(kind="llm-int8"),)
        kind = self._text("bnb_4bit_quant_type", default="fp4")
        if not self._flag("load_in_4bit") or kind not in ("nf4", "fp4"):
            self._refuse(f"bitsandbytes' {kind!r:.100} (but nf4 and fp4 with load_in_4bit, and load_in_8bit)")
        return (Layout(kind="nf4" if kind == "nf4" else "fp4", bits=4),)

    def _compressed_tensors(self) -> tuple[Layout, ...]:
        if self._section("sparsity_config").get("format", "dense") != "dense":
            self._refuse("sparse compressed-tensors")
        if self._section("transform_config").get("config_groups"):
            self._refuse("compressed-tensors' transforms (transform_config)")
        groups = self._config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            self._fail(f"config_groups is {groups!r:.100}, not an object of groups")
        common = self._text("format", default="pack-quantized")
        layouts = []
        for name, group in groups.items():
            weights = group.get("weights", ...) if isinstance(group, Mapping) else ...
            if weights is None:
                continue  # of activations alone, which stay in 16 bits
            if not isinstance(weights, Mapping):
                self._fail(f"config_groups[{name!r:.100}] is {group!r:.100}, without `weights`")
            layouts.append(_Reader(weights, self._path, self._architecture)._tensors(group, common))
        if not layouts:
            self._refuse("compressed-tensors without quantised weights")
        return tuple(sorted(layouts, key=lambda layout: not layout.targets))  # a class says less than a name

    def _tensors(self, group: Mapping[str, Any], common: str) -> Layout:
        """Of a config group, whose `weights` this reads."""
        bits, number = self._whole("num_bits", default=8), self._text("type", default="int")
        layout = str(group.get("format") or common)
        if layout == "mixed-precision":
            layout = "int-quantized" if bits == 8 else "pack-quantized"
            if number == "float":
                four = "mxfp4" if self._first("strategy") == _PER_GROUP else "nvfp4"
                layout = "float-quantized" if bits == 8 else f"{four}-pack-quantized"
        if layout == "naive-quantized":
            layout = "float-quantized" if number == "float" else "int-quantized"
        if layout == "int-quantized":
            bits = max(bits, 8)  # fewer have a byte each, too
        kind = _KINDS.get((layout, number, bits))
        if kind is None:
            self._refuse(f"compressed-tensors' format {layout!r:.100} with {number!r:.100} in {bits} bits")
        strategy = self._text(
            "strategy", default=_PER_GROUP if (self._first("group_size") or -1) != -1 else "channel"
        )
        if strategy not in _STRATEGIES.get(kind, ("tensor", "channel", _PER_GROUP, _PER_BLOCK)):
            self._refuse(f"compressed-tensors' strategy {strategy!r:.100}")
        targets = group.get("targets") or []
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            self._fail(f"targets is {targets!r:.100}, not a list of strings")
        for target in targets:
            try:
                _matches(target, "")
            except re.error as error:
                self._fail(f"the target {target!r:.100} is no regular expression: {error}")
        sides = self._config.get("block_structure")
        return Layout(
            kind=kind,
            bits=bits,
            group=self._group("group_size", default=_OF_FOUR_BITS.get(kind, 128))
            if strategy in (_PER_GROUP, "tensor_group")
            else None,
            block=self._sides("block_structure", sides) if strategy == _PER_BLOCK else None,
            has_zeros=not self._flag("symmetric", default=True),
            has_index=self._config.get("actorder") in (True, "group", "dynamic"),
            targets=() if "Linear" in targets else tuple(targets),
        )

    def _first(self, *names: str) -> Any:
        return next((self._config[name] for name in names if self._config.get(name) is not None), None)

    def _section(self, name: str) -> Mapping[str, Any]:
        value = self._config.get(name) or {}
        if not isinstance(value, Mapping):
            self._fail(f"{name} is {value!r:.100}, not an object")
        return value

    def _text(self, *names: str, default: str) -> str:
        value = self._first(*names)
        if value is not None and not isinstance(value, str):
            self._fail(f"{names[0]} is {value!r:.100}, not a string")
        return default if value is None else value

    def _flag(self, name: str, *, default: bool = False) -> bool:
        value = self._first(name)
        if value is not None and not isinstance(value, bool):
            self._fail(f"{name} is {value!r:.100}, neither true nor false")
        return default if value is None else value

    def _whole(self, *names: str, default: int | None = None) -> int:
        value = self._first(*names)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            self._fail(f"{names[0]} is {value!r:.100}, not a whole number from 1 to {_MOST}")
        return value

    def _group(self, *names: str, default: int = 128) -> int | None:
        return None if self._first(*names) == -1 else self._whole(*names, default=default)

    def _sides(self, name: str, value: object) -> tuple[int, int]:
        if isinstance(value, str) and (sides := re.fullmatch(r"(\d{1,7})x(\d{1,7})", value)):
            value = [*map(int, sides.groups())]
        if not isinstance(value, list) or len(value) != 2:
            self._fail(f"{name} is {value!r:.100}, not two whole numbers")
        rows, columns = (_Reader({name: side}, self._path, None)._whole(name) for side in value)
        return rows, columns

    def _refuse(self, feature: str) -> NoReturn:
        raise UnsupportedModel(
            f"{self._path}: a checkpoint quantized with {feature} is not supported ({self._architecture})",
            architecture=self._architecture,
            supported=tuple(_METHODS.split(", ")),
            path=self._path,
        )

    def _fail(self, message: str) -> NoReturn:
        raise ModelError(f"{self._path}: quantization_config: {message}", path=self._path)


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return module == target or module.endswith("." + target)
