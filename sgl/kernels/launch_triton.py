"""Launches small kernels of every step without Triton's look-up of what was compiled, which takes a host 40 of 50 µs.
Imported only where Triton is."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch

_ALIGNMENT = 16  # bytes, of which kernels make use
_IS_AMD = torch.version.hip is not None
_NEAR = 1 << 31  # bytes of memory that AMD's kernels reach by shorter offsets


class Launcher:
    """Of one kernel whose arguments seldom change but for their addresses."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}  # by all that Triton compiles for

    def __call__(self, grid: tuple[int, int, int], *args: Any, any_value: int = -1, **options: Any) -> None:
        """args: of all of the kernel's parameters, in order. any_value: index of an integer for whose value nothing is
        compiled (`do_not_specialize`). options: those of the launch, always the same."""
        key = tuple(
            (arg.dtype, arg.get_device(), arg.data_ptr() % _ALIGNMENT == 0)
            if isinstance(arg, torch.Tensor)
            else arg
            for arg in args
        )
        if any_value >= 0:
            key = key[:any_value] + key[any_value + 1 :]
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*args)
            return
        compiled = self._kernel[grid](*args, **options)
        if compiled is not None:  # the interpreter compiles nothing
            self._compiled[key] = compiled


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    is_near = _IS_AMD and tensor.untyped_storage().nbytes() < _NEAR
    return tensor.dtype, tensor.get_device(), tensor.data_ptr() % _ALIGNMENT == 0, is_near
