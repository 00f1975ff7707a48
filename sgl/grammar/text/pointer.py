"""JSON pointers."""

from __future__ import annotations

import re

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}").fullmatch


def member(value: object, part: str) -> str | int | None:
    """The key or index of what a pointer's part names in a value; None: nothing."""
    name = part.replace("~1", "/").replace("~0", "~")
    if isinstance(value, list):
        return int(name) if _INDEX(name) and int(name) < len(value) else None
    return name if isinstance(value, dict) and name in value else None
