"""Mends Triton's interpreter: with NumPy 2.4 its loops refuse bounds that a kernel has loaded. Imported for that by
tests that run such kernels."""

from __future__ import annotations

import importlib.util
from typing import Any

if importlib.util.find_spec("triton") is not None:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_and_mend(tensor: Any, scope: Any) -> None:
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_and_mend
