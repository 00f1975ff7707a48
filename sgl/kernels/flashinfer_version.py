"""Which FlashInfer is installed, and whether its calls are known: most that we use are no public API."""

from __future__ import annotations

import importlib.util

Version = tuple[int, ...]

OLDEST: Version = (0, 6, 6)
FIRST_UNKNOWN: Version = (0, 8)
"""FlashInfer's supported versions: from OLDEST, below FIRST_UNKNOWN, as in the extra sgl[cuda]."""


def why_not() -> str | None:
    """Why it cannot be used; None: it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed (pip install 'sgl[cuda]')"
    from flashinfer import __version__

    if not OLDEST <= installed() < FIRST_UNKNOWN:
        oldest, unknown = (".".join(map(str, version)) for version in (OLDEST, FIRST_UNKNOWN))
        return f"version {__version__} is installed, and {oldest} or later is needed, but below {unknown}"
    return None


def installed() -> Version:
    """Three numbers: more would tell builds of a release apart."""
    from flashinfer import __version__

    return tuple(int(part) for part in __version__.split("+")[0].split(".")[:3] if part.isdecimal())
