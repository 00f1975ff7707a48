"""Special tokens: which they are, and the bytes that stand for one where a grammar asks for it.

Those bytes are its name between two that no UTF-8 has, so that no text is ever mistaken for a special token.
"""

from __future__ import annotations

import re
from typing import Final

MARK: Final = b"\xff"
_END: Final = b"\xfe"
_MARKER = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


def is_control(name: str, *, is_special: bool) -> bool:
    """Whether an added token controls the model: it is called special, or is written <|like this|>."""
    return is_special or _MARKER.fullmatch(name) is not None


def spelled(name: str) -> bytes:
    """What stands for a special token."""
    return MARK + name.encode() + _END


def is_text(data: bytes) -> bool:
    """Whether bytes may be part of a text."""
    return MARK not in data and _END not in data
