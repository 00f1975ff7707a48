"""What came of a change of the engine's weights; without torch, for the server's process."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from sgl.errors import InvalidRequest
from sgl.lang.ir.sampling import shown


class WeightsUpdate(NamedTuple):
    """What came of an update, in the original's words."""

    success: bool
    message: str


def checked_path(param: str, value: Any) -> str:
    """A path as text. Raises InvalidRequest."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidRequest(f"{param} must be a path, not {shown(value)}", param=param)
    return path
