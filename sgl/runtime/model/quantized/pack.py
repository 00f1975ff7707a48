"""Matrices as they are stored, packed for kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sgl.kernels import limits
from sgl.kernels.layers.grouped import UNIT, GroupedMatrix
from sgl.runtime.model.quantized.codes import Codes


def grouped(parts: Sequence[Codes]) -> GroupedMatrix | None:
    """The rows of several matrices as one. None: they have codes of different kinds, or that no kernel of their device
    reads, or such groups of columns.

    Where the columns of a group are apart (activation order), columns are sorted by group. Where a rank has a part of a
    group, or matrices have different groups, smaller ones have the same scales.
    """
    first = parts[0]
    k = first.codes.shape[1]
    if len({(its.codes.dtype, its.bits, its.codes.shape[1]) for its in parts}) > 1 or first.bits > 8:
        return None
    if first.codes.dtype == torch.float8_e4m3fn and not limits.reads_e4m3(first.codes.device):
        return None
    order, size = None, k
    if any((its.groups.diff() < 0).any() for its in parts):
        if not all(torch.equal(its.groups, first.groups) for its in parts):
            return None
        order = first.groups.argsort(stable=True)
    sorted_groups = [its.groups if order is None else its.groups[order] for its in parts]
    for groups in sorted_groups:
        size = math.gcd(size, *(groups.diff().nonzero().flatten() + 1).tolist())
    if size % UNIT or k % UNIT:
        return None
    codes = torch.cat([its.codes.view(torch.uint8) for its in parts]).view(first.codes.dtype)
    scales = torch.cat([its.scales[:, groups[::size]] for its, groups in zip(parts, sorted_groups, strict=True)])
    zeros = None
    if first.zeros.shape[1]:
        found = torch.cat([its.zeros[:, groups[::size]] for its, groups in zip(parts, sorted_groups, strict=True)])
        zeros = None if (found == 1 << (first.bits - 1)).all() else found
    if order is not None:
        codes = codes.view(torch.uint8)[:, order].view(first.codes.dtype)
    order = None if order is None else order.int()
    return GroupedMatrix.of(codes, scales, zeros, bits=first.bits, order=order)
