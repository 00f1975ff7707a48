"""Numbers in texts from outside, as ASCII digits: int() and float() also take `1_0`, ` 1`, other scripts' digits and
NaN, and raise for too many."""

from __future__ import annotations

import re

_DECIMAL = re.compile(r"([0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})([eE][+-]?[0-9]{1,3})?").fullmatch


def whole(text: str, most: int) -> int | None:
    """A number from 0 to `most`; None: it is none."""
    is_one = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    return int(text) if is_one and int(text) <= most else None


def decimal(text: str) -> float | None:
    """A number from 0, perhaps infinite; None: it is none."""
    return float(text) if _DECIMAL(text) else None


def port(text: str) -> int | None:
    """A port that can be connected to; None: it is none."""
    return whole(text, 65_535) or None
