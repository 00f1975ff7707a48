"""The quantised modules of a checkpoint, as the matrices that they were made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from sgl.errors import WeightsError
from sgl.runtime.model.quantized.bitsandbytes import STATES, State, Wanted
from sgl.runtime.model.quantized.codes import Codes, dequantize_mxfp4, unpack
from sgl.runtime.model.quantized.scheme import Layout, QuantScheme

_FLOATS = ("F16", "BF16", "F32")
_SCALES = (*_FLOATS, "F8_E8M0")
_E4M3, _EXPONENTS = ("F8_E4M3",), ("U8", "F8_E8M0")
# of activations and KV caches, which are 16-bit numbers here
_OF_OTHERS = (
    *("input_scale", "input_zero_point", "input_scale_ub", "input_global_scale"),
    *("output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale"),
    *("k_zero_point", "v_zero_point", "q_zero_point"),
)
_SCALE_NAMES = ("weight_scale", "weight_scale_inv", "weight.absmax", "SCB", *STATES)
_FIRST = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "mxfp4": "_blocks"}
_FIRST |= dict.fromkeys(("nvfp4-packed", "mxfp4-packed"), "weight_packed")
_IN_PLACE = {
    "int8": "I8",
    "llm-int8": "I8",
    "fp8": "F8_E4M3",
    "nvfp4": "U8",
    "nf4": "U8",
    "fp4": "U8",
}  # those whose `weight` has such numbers
_STORED = _IN_PLACE | dict.fromkeys(("nvfp4-packed", "mxfp4-packed"), "U8")  # the first tensor's


class HasPlace(Protocol):
    """A tensor in a file."""

    @property
    def name(self) -> str:
        """There."""

    @property
    def file(self) -> Path:
        """That holds it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""

    @property
    def dtype(self) -> str:
        """Safetensors' name of it."""


Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Module:
    """A quantised matrix [n, k]."""

    name: str
    layout: Layout
    parts: dict[str, str]  # the tensors' last names and whole names
    shape: tuple[int, int]


class QuantizedCheckpoint:
    """Finds the quantised modules among a checkpoint's tensors, and reads their matrices."""

    def __init__(self, scheme: QuantScheme | None, entries: Mapping[str, HasPlace], read: Read) -> None:
        """Raises WeightsError for tensors that make no matrix of the scheme."""
        self._entries = entries
        self._read = read
        self.others: set[str] = set()
        """Tensors that are no weights, or whose modules are quantised."""
        self._modules: dict[str, _Module] = {}
        self._experts: dict[str, tuple[str, str]] = {}
        for name in entries if scheme is not None else ():
            assert scheme is not None
            stem, _, last = name.rpartition(".")
            if last in _OF_OTHERS:
                self.others.add(name)
            elif name.endswith(_FIRST["mxfp4"]) and any(its.kind == "mxfp4" for its in scheme.layouts):
                self._add_experts(name.removesuffix(_FIRST["mxfp4"]))
            elif (
                layout := scheme.layout(stem, entries[name].name.rpartition(".")[0])
            ) is not None and self._is_first(layout, stem, last):
                self._add(stem, layout)

        self.shapes: dict[str, tuple[int, ...]] = {name: its.shape for name, its in self._modules.items()}
        """Of the matrices, by the names that they had."""
        for name, (blocks, _) in self._experts.items():
            *lead, n, groups, half = entries[blocks].shape
            self.shapes[name] = (*lead, groups * half * 2, n)

    def file(self, name: str) -> Path:
        """Which holds a matrix, or its first part."""
        module = self._modules.get(name)
        first = self._experts[name][0] if module is None else next(iter(module.parts.values()))
        return self._entries[first].file

    def adds_nothing(self, name: str) -> bool:
        """Whether a tensor is the bias of zeros that GPTQ's writers give to matrices without one."""
        stem, _, last = name.rpartition(".")
        return last == "bias" and f"{stem}.weight" in self._modules and not self._read(name).any()

    def codes(self, name: str, part: tuple[slice, ...] = ()) -> Codes:
        """A matrix [n, k] of `shapes`, none of experts in one tensor, as it is stored, or a part of it. Raises
        WeightsError."""
        module = self._modules[name]
        tensors = {last: self._read(whole) for last, whole in module.parts.items()}
        rows, columns = (*part, slice(None), slice(None))[:2]
        try:
            return unpack(module.layout, tensors, module.shape).part(rows, columns)
        except ValueError as error:
            last, what = error.args
            self._fail(module.parts[last], what)

    def blocks(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and exponents of a tensor of experts in MXFP4, see `dequantize_mxfp4`."""
        blocks, exponents = (self._read(tensor) for tensor in self._experts[name])
        if int(exponents.max()) == 255:
            self._fail(self._experts[name][1], "has a scale of 255, which is no number")
        return blocks, exponents

    def dequantized(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """float32, or a part of it. Raises WeightsError."""
        if name in self._experts:
            blocks, scales = self.blocks(name)
            return torch.stack(
                [dequantize_mxfp4(*both).t() for both in zip(blocks, scales, strict=True)]
                if blocks.dim() == 4
                else [dequantize_mxfp4(blocks, scales).t()]
            )[part]
        return self.codes(name, part).dequantized()

    def _is_first(self, layout: Layout, stem: str, last: str) -> bool:
        if layout.kind in _FIRST:
            return last == _FIRST[layout.kind]
        has_scales = any(f"{stem}.{scale}" in self._entries for scale in _SCALE_NAMES)
        return last == "weight" and (has_scales or self._entries[f"{stem}.weight"].dtype == _IN_PLACE[layout.kind])

    def _add(self, stem: str, layout: Layout) -> None:
        last = _FIRST.get(layout.kind, "weight")
        entry = self._entries[f"{stem}.{last}"]
        per_word = 32 // layout.bits
        if len(entry.shape) != 2 or 0 in entry.shape:
            self._fail(f"{stem}.{last}", f"is {list(entry.shape)}, not a matrix")
        rows, columns = entry.shape
        n, k = rows, columns
        if layout.kind == "awq":
            n, k = columns * per_word, rows
        elif layout.kind == "gptq":
            n, k = columns, rows * per_word
        elif layout.kind == "packed":
            n, k = self._whole_shape(stem, rows, columns, per_word)
        elif layout.is_e2m1:
            k = columns * 2
        parts = {last: f"{stem}.{last}"}
        if layout.is_blockwise:
            stored, state = self._state(stem)
            parts[stored] = f"{stem}.{stored}"
            (n, k), wanted = state.shape, state.wanted(entry.dtype)
        else:
            wanted = self._wanted(stem, layout, n, k)
            wanted[last] = ([entry.shape], (_STORED.get(layout.kind, "I32"),))
        for piece, (shapes, dtypes) in wanted.items():
            whole = f"{stem}.{piece}"
            found = self._entries.get(whole)
            if found is None:
                raise WeightsError(
                    f"{entry.file} has {stem}.{last} without {whole}, which {layout} calls for",
                    path=str(entry.file),
                    tensor=whole,
                )
            if found.shape not in shapes:
                self._fail(whole, f"is {list(found.shape)}; {layout} of [{n}, {k}] makes it {list(shapes[0])}")
            if found.dtype not in dtypes:
                self._fail(whole, f"is {found.dtype}; expected one of {', '.join(dtypes)}")
            parts[piece] = whole
        self.others |= {*parts.values(), *(f"{stem}.{name}" for name in ("qzeros", "weight_shape"))}
        self._modules[f"{stem}.weight"] = _Module(f"{stem}.weight", layout, parts, (n, k))

    def _state(self, stem: str) -> tuple[str, State]:
        """How bitsandbytes stored a matrix, and the last part of the name of the tensor that says so."""
        stored = next((its for its in STATES if f"{stem}.{its}" in self._entries), None)
        if stored is None:
            self._fail(f"{stem}.weight", f"has no {stem}.{STATES[0]}, nor __fp4, to say how it is stored")
        whole = f"{stem}.{stored}"
        found = self._entries[whole]
        if found.dtype != "U8" or len(found.shape) != 1:
            self._fail(whole, f"is {found.dtype} {list(found.shape)}, not bytes [n]")
        try:
            return stored, State.read(self._read(whole))
        except ValueError as error:
            self._fail(whole, str(error))

    def _wanted(self, stem: str, layout: Layout, n: int, k: int) -> Wanted:
        """Shapes and dtypes of the other tensors of a matrix [n, k]."""
        num_groups = 1
        if layout.group is not None:
            if k % layout.group:
                self._fail(
                    f"{stem}.{_FIRST.get(layout.kind, 'weight')}",
                    f"has {k} columns, which groups of {layout.group} do not divide",
                )
            num_groups = k // layout.group
        words = -(-n * layout.bits // 32)
        wanted: Wanted = {}
        if layout.kind in ("awq", "gptq"):
            wanted["scales"] = ([(num_groups, n)], _FLOATS)
            if layout.has_zeros or layout.kind == "gptq":
                wanted["qzeros"] = ([(num_groups, words)], ("I32",))
            if layout.has_index or f"{stem}.g_idx" in self._entries:
                wanted["g_idx"] = ([(k,)], ("I32", "I64"))
        elif layout.is_e2m1:
            wanted["weight_scale"] = ([(n, num_groups)], _EXPONENTS if layout.kind == "mxfp4-packed" else _E4M3)
            if layout.kind != "mxfp4-packed":
                last = "weight_scale_2" if layout.kind == "nvfp4" else "weight_global_scale"
                wanted[last] = ([(), (1,)], ("F32",))
        elif layout.kind == "llm-int8":
            wanted["SCB"] = ([(n,)], ("F32",))
            if f"{stem}.weight_format" in self._entries:
                wanted["weight_format"] = ([()], ("U8",))
        else:
            scale, other = ("weight_scale_inv", "weight_scale")[:: 1 if layout.block is not None else -1]
            scale = other if f"{stem}.{other}" in self._entries else scale
            shapes: list[tuple[int, ...]] = [(n, num_groups)]
            if layout.block is not None:
                shapes = [tuple(-(-size // side) for size, side in zip((n, k), layout.block, strict=True))]
            elif layout.group is None:
                shapes += [(n,), (1, 1), (1,), ()]
            wanted[scale] = (shapes, (*_SCALES, "U8") if layout.kind == "fp8" and layout.group else _SCALES)
            zero = self._entries.get(f"{stem}.weight_zero_point")
            if layout.has_zeros and layout.kind == "packed" and (zero is None or zero.dtype != "I8"):
                wanted["weight_zero_point"] = ([(words, num_groups)], ("I32",))
            elif layout.has_zeros:
                wanted["weight_zero_point"] = (shapes, ("I8",))
            if layout.has_index or f"{stem}.weight_g_idx" in self._entries:
                wanted["weight_g_idx"] = ([(k,)], ("I32", "I64"))
        return wanted

    def _whole_shape(self, stem: str, rows: int, words: int, per_word: int) -> tuple[int, int]:
        """Of a packed matrix, whose last word of a row may be filled up."""
        name = f"{stem}.weight_shape"
        if name not in self._entries:
            return rows, words * per_word
        if self._entries[name].shape != (2,) or self._entries[name].dtype not in ("I32", "I64"):
            self._fail(name, "is not two whole numbers")
        n, k = self._read(name).tolist()
        if n != rows or -(-k // per_word) != words:
            self._fail(name, f"says [{n}, {k}], and weight_packed is [{rows}, {words}]")
        return n, k

    def _add_experts(self, name: str) -> None:
        blocks, scales = name + "_blocks", name + "_scales"
        shape = self._entries[blocks].shape
        if len(shape) not in (3, 4) or 0 in shape or shape[-1] != 16 or self._entries[blocks].dtype != "U8":
            self._fail(blocks, f"is {self._entries[blocks].dtype} {list(shape)}, not bytes [..., 16]")
        if scales not in self._entries:
            file = self._entries[blocks].file
            raise WeightsError(f"{file} has {blocks} without {scales}", path=str(file), tensor=scales)
        if self._entries[scales].shape != shape[:-1] or self._entries[scales].dtype != "U8":
            found = self._entries[scales]
            self._fail(scales, f"is {found.dtype} {list(found.shape)}; its blocks make it bytes {list(shape[:-1])}")
        self.others |= {blocks, scales}
        self._experts[name] = blocks, scales

    def _fail(self, name: str, what: str) -> NoReturn:
        file = str(self._entries[name].file)
        raise WeightsError(f"{name} in {file} {what}", path=file, tensor=name)
