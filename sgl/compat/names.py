"""The original language's module names. Importing one gives our module with its contents, loaded on demand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib import util
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, Final

MODULES: Final = {
    "sgl.lang.backend": "sgl.compat",
    "sgl.lang.backend.base_backend": "sgl.lang.backends.legacy",
    "sgl.lang.backend.runtime_endpoint": "sgl.lang.backends.launch",
    "sgl.lang.chat_template": "sgl.lang.ir.chat_template",
    "sgl.lang.choices": "sgl.lang.ir.choices",
    "sgl.lang.interpreter": "sgl.lang.record.state",
    "sgl.test": "sgl.compat",
    "sgl.test.test_programs": "sgl.compat.test_programs",
    "sgl.test.test_utils": "sgl.compat.test_utils",
    "sgl.utils": "sgl.compat.utils",
}
"""The original's name, and ours."""


class _Names:
    """The modules' finder and loader for `sys.meta_path`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in MODULES:
            return None
        own = util.find_spec(MODULES[name])
        origin = None if own is None else own.origin  # for `pytest --pyargs`
        return ModuleSpec(name, self, origin=origin)  # type: ignore[arg-type]  # a loader by its methods

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MODULES[spec.name])
        spec.loader_state = module.__spec__  # importlib overwrites it with `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "importlib has just set it"
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, name: str) -> CodeType | None:
        """Our module's code, for `python -m`."""
        own = util.find_spec(MODULES[name])
        return own.loader.get_code(MODULES[name]) if own and isinstance(own.loader, SourceFileLoader) else None


def install() -> None:
    """Register the names."""
    finders: list[Any] = sys.meta_path
    if not any(isinstance(finder, _Names) for finder in finders):
        finders.insert(0, _Names())
