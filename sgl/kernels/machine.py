"""Where what is measured or compiled once on a machine is kept."""

from __future__ import annotations

from pathlib import Path


def cache_folder() -> Path | None:
    """The user's; it may not exist yet. None: there is no home."""
    try:
        return Path.home() / ".cache" / "sgl"
    except RuntimeError:
        return None
