"""The original language's module of that name."""

from __future__ import annotations

from sgl.lang.backends.legacy import BaseBackend

__all__ = ["BaseBackend"]
