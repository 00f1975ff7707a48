"""Matrices in a few bits as codes and scales, unpacked from the tensors of each layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sgl.runtime.model.quantized import bitsandbytes
from sgl.runtime.model.quantized.scheme import Layout

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of eight columns that follow each other
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below zero
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_E8M0_BIAS, _E8M0_NONE = 127, 255


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix [n, k] of (code - zero) * scale."""

    codes: torch.Tensor  # uint8, float8_e4m3fn, or float32 where a table makes numbers of codes [n, k]
    scales: torch.Tensor  # a float [n, groups]
    zeros: torch.Tensor  # uint8 [n, groups]; of floats [n, 0]: there are none
    groups: torch.Tensor  # int64 [k], the group of each column
    bits: int  # of a code

    def part(self, rows: slice, columns: slice) -> Codes:
        """Some of it."""
        part = self.codes[rows, columns], self.scales[rows], self.zeros[rows], self.groups[columns]
        return Codes(*part, self.bits)

    def dequantized(self) -> torch.Tensor:
        """float32 [n, k]."""
        wide = self.codes.float()
        if self.zeros.shape[1]:
            wide -= self.zeros.float()[:, self.groups]
        return wide.mul_(self.scales.float()[:, self.groups])


def unpack(layout: Layout, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> Codes:
    """A module's matrix of this shape from its tensors, by the last parts of their names. Raises ValueError with the
    name and what is wrong: a column of a group that there is not, or a scale that is no number."""
    n, k = shape
    middle = 1 << (layout.bits - 1)
    if layout.is_e2m1:
        return _e2m1(layout, tensors, shape)
    if layout.is_blockwise:
        values = bitsandbytes.dequantized(tensors, shape)
        groups = torch.zeros(k, dtype=torch.int64, device=values.device)
        return Codes(values, values.new_ones(n, 1), values.new_empty(n, 0, dtype=torch.uint8), groups, 32)
    if layout.kind == "awq":
        codes = _awq(tensors["qweight"]).t()
        scales = tensors["scales"].t()
        zeros = _awq(tensors["qzeros"]).t() if layout.has_zeros else None
    elif layout.kind == "gptq":
        codes = _bytes(tensors["qweight"].t(), layout.bits)
        scales = tensors["scales"].t()
        zeros = _bytes(tensors["qzeros"], layout.bits).t()[:n]
        if (
            not layout.has_zeros
            and int(zeros.min()) == int(zeros.max())
            and int(zeros[0, 0]) in (middle - 1, middle)
        ):
            zeros = None  # some writers call a checkpoint v1 whose zeros are v2's
        else:
            zeros = (zeros + layout.zero_offset) & (2 * middle - 1)
    else:
        return _scaled(layout, tensors, shape)
    zeros = torch.full_like(scales, middle, dtype=torch.uint8) if zeros is None else zeros
    groups = _groups(tensors, "g_idx", torch.arange(k, device=scales.device) // (k // scales.shape[1]), scales)
    return Codes(codes.contiguous(), scales.contiguous(), zeros.contiguous(), groups, layout.bits)


def _scaled(layout: Layout, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> Codes:
    """Of a `weight`, whole or packed, with scales for all of it, for rows, groups or blocks."""
    n, k = shape
    middle = 1 << (layout.bits - 1)
    if (form := tensors.get("weight_format")) is not None and int(form):
        raise ValueError("weight_format", f"is {int(form)}, not 0: it is stored for one kind of GPU, not by rows")
    name = next(its for its in ("weight_scale", "weight_scale_inv", "SCB") if its in tensors)
    stored = _exponents(name, tensors[name]) if tensors[name].dtype in _E8M0 else tensors[name]
    scales = _spread(stored / 127 if name == "SCB" else stored, layout, n)
    groups = torch.arange(k, device=scales.device) // (layout.block[1] if layout.block else k // scales.shape[1])
    groups = _groups(tensors, "weight_g_idx", groups, scales)
    if layout.kind == "fp8":
        return Codes(tensors["weight"], scales.float(), scales.new_empty(n, 0, dtype=torch.uint8), groups, 8)
    if layout.kind == "packed":
        codes = _bytes(tensors["weight_packed"], layout.bits)[:, :k]
    else:
        codes = tensors["weight"].view(torch.uint8) ^ 0x80  # from -128 to 127
    zeros = torch.full_like(scales, middle, dtype=torch.uint8)
    if layout.has_zeros:
        zero = tensors["weight_zero_point"]
        if zero.dtype == torch.int32:
            zeros = _bytes(zero.t(), layout.bits).t()[:n]
        else:
            zeros = _spread((zero.int() + middle).to(torch.uint8), layout, n)
    return Codes(codes.contiguous(), scales, zeros.contiguous(), groups, layout.bits)


def _spread(stored: torch.Tensor, layout: Layout, n: int) -> torch.Tensor:
    """[n, groups]."""
    if layout.block is not None:
        return stored.repeat_interleave(layout.block[0], 0)[:n].contiguous()
    return (stored.reshape(-1, 1) if layout.group is None else stored).expand(n, -1).contiguous()


def _groups(
    tensors: Mapping[str, torch.Tensor], name: str, groups: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Of each column, if that tensor does not name others."""
    groups = tensors.get(name, groups)
    if int(groups.min()) < 0 or int(groups.max()) >= scales.shape[1]:
        raise ValueError(name, f"names the group {int(groups.max())} of {scales.shape[1]}")
    return groups.long()


def _exponents(name: str, stored: torch.Tensor) -> torch.Tensor:
    """Scales that are powers of two."""
    exponents = stored.view(torch.uint8)
    if int(exponents.max()) == _E8M0_NONE:
        raise ValueError(name, f"has a scale of {_E8M0_NONE}, which is no number")
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - _E8M0_BIAS)


def _e2m1(layout: Layout, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> Codes:
    """Of two numbers in e2m1 a byte, which e4m3 has, too. ModelOpt multiplies with the scale of a matrix by which
    compressed-tensors divides."""
    n, k = shape
    packed = tensors["weight" if layout.kind == "nvfp4" else "weight_packed"]
    positive = torch.tensor(_E2M1, device=packed.device)
    table = torch.cat((positive, -positive)).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = table[_nibbles(packed).int()].view(torch.float8_e4m3fn)
    scales = tensors["weight_scale"]
    if layout.kind == "mxfp4-packed":
        scales = _exponents("weight_scale", scales)
    else:
        name = "weight_scale_2" if layout.kind == "nvfp4" else "weight_global_scale"
        of_all = tensors[name].reshape(())
        if not 0 < float(of_all) < math.inf:
            raise ValueError(name, f"is {float(of_all)}, not a number above 0")
        scales = scales.float() * of_all if layout.kind == "nvfp4" else scales.float() / of_all
    groups = torch.arange(k, device=scales.device) // (k // scales.shape[1])
    return Codes(codes, scales, scales.new_empty(n, 0, dtype=torch.uint8), groups, 8)


def _nibbles(whole: torch.Tensor) -> torch.Tensor:
    """[..., 2 * n] of uint8 [..., n], the low half of each first."""
    return torch.stack((whole & 15, whole >> 4), -1).flatten(-2)


def _bytes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [a, b * 32 / bits] of int32 [a, b], from the lowest bits on."""
    whole = packed.contiguous().view(torch.uint8)
    return whole if bits == 8 else _nibbles(whole)


def _awq(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [a, 8 * b] of int32 [a, b]."""
    places = _bytes(packed, 4).reshape(len(packed), -1, 8)
    return places[..., _AWQ_PLACES].flatten(-2)


def dequantize_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Matrices [..., n, k] in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss has them.

    blocks: uint8 [..., n, k / 32, 16], two e2m1 numbers a byte, the low half first. scales: uint8 [..., n, k / 32],
    exponents (e8m0).
    """
    positive = torch.tensor(_E2M1, dtype=dtype, device=blocks.device)
    table = torch.cat((positive, -positive))
    numbers = table[_nibbles(blocks).int()]
    exponents = scales.int() - _E8M0_BIAS
    return torch.ldexp(numbers, exponents[..., None]).to(dtype).flatten(-2)
