"""The original language's module `lang.backend.runtime_endpoint`."""

from __future__ import annotations

from sgl.lang.backends.launch import Runtime
from sgl.lang.backends.server import RuntimeEndpoint

__all__ = ["Runtime", "RuntimeEndpoint"]
