"""The original language's module of that name."""

from __future__ import annotations

from sgl.lang.state import ProgramState, ProgramStateGroup

__all__ = ["ProgramState", "ProgramStateGroup"]
