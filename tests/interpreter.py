"""Mends Triton's interpreter: with NumPy 2.4 its loops refuse bounds that a kernel has loaded, and a comparison of two
numbers becomes a block of integers, which Triton 3.9's loads refuse as a mask. And it leaves out work without effect:
every call of a function within a kernel looks through the whole language for what is to be replaced, though the
kernel's launch has replaced it, and all arithmetic of integers is done again in 64 bits for an assertion that is never
made without `debug`; each took a fifth of the time of such tests. Imported for that by tests that run such kernels."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

if importlib.util.find_spec("triton") is not None:
    from triton import language
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

    _replace = interpreter._patch_lang
    _replaced: set[int] = set()  # modules of the language, by the launch that runs

    class _Launch(interpreter._LangPatchScope):  # type: ignore[misc, name-defined]
        """What is put back when a launch is over: also what functions replaced that its kernel called."""

        def restore(self) -> None:
            super().restore()
            _replaced.clear()

    _launch = _Launch()

    def _replace_once(fn: Any) -> Any:
        modules = {id(value) for value in fn.__globals__.values() if value is language or value is language.core}
        if not modules <= _replaced:
            _launch._changes += _replace(fn)._changes
            _replaced.update(modules)
        return _launch

    _builder = interpreter.interpreter_builder
    if not _builder.options.debug:
        _builder.options = replace(_builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _replace_once
    interpreter._patch_lang_tensor = _patch_and_mend
    interpreter.InterpreterBuilder.create_splat = _splat_and_mend
