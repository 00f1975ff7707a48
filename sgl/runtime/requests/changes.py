"""What came of a change of the engine's weights; without torch, for the server's process."""

from __future__ import annotations

from typing import NamedTuple


class WeightsUpdate(NamedTuple):
    """What came of an update, in the original's words."""

    success: bool
    message: str
