"""Launches small kernels of every step without Triton's look-up of what was compiled, which takes a host 40 of 50 µs.
Imported only where Triton is."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch

_ALIGNMENT = 16  # bytes, of which kernels make use
_IS_AMD = torch.version.hip is not None
_PLAIN = frozenset((int, bool, type(None)))
_NEAR = 1 << 31  # bytes of memory that AMD's kernels reach by shorter offsets


class Launcher:
    """Of one kernel whose arguments seldom change but for their addresses."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}  # by all that Triton compiles for

    def __call__(
        self, grid: tuple[int, int, int], *args: Any, any_values: tuple[int, ...] = (), **options: Any
    ) -> None:
        """args: of all of the kernel's parameters, in order. any_values: indices of integers for whose values nothing
        is compiled (`do_not_specialize`). options: of the launch, always of the same names."""
        key = [arg if type(arg) in _PLAIN else _key(arg) for arg in args]
        for index in any_values:
            key[index] = None
        found = *key, *options.values()
        compiled = self._compiled.get(found)
        if compiled is not None:
            compiled[grid](*args)
            return
        compiled = self._kernel[grid](*args, **options)
        if compiled is not None:  # the interpreter compiles nothing
            self._compiled[found] = compiled


def _key(argument: Any) -> Any:
    """What is compiled for."""
    if isinstance(argument, tuple):
        return tuple([_key(its) for its in argument])
    if not isinstance(argument, torch.Tensor):
        return argument
    is_near = _IS_AMD and argument.untyped_storage().nbytes() < _NEAR
    return argument.dtype, argument.get_device(), argument.data_ptr() % _ALIGNMENT == 0, is_near
