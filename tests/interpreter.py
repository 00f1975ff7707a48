"""Mends Triton's interpreter: with NumPy 2.4 its loops refuse bounds that a kernel has loaded, and a comparison of two
numbers becomes a block of integers, which Triton 3.9's loads refuse as a mask. Imported for that by tests that run
such kernels."""

from __future__ import annotations

import importlib.util
from typing import Any

if importlib.util.find_spec("triton") is not None:
    from triton.language import int1
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor
    _splat = interpreter.InterpreterBuilder.create_splat

    def _patch_and_mend(tensor: Any, scope: Any) -> None:
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def _splat_and_mend(self: Any, block: Any, scalar: Any) -> Any:
        if scalar.data.dtype == bool:
            scalar = interpreter.TensorHandle(scalar.data, int1)
        return _splat(self, block, scalar)

    interpreter._patch_lang_tensor = _patch_and_mend
    interpreter.InterpreterBuilder.create_splat = _splat_and_mend
