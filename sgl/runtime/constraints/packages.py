"""The packages that grammar backends are in."""

from __future__ import annotations

from importlib.util import find_spec

from sgl.errors import MissingExtra
from sgl.runtime.config import GrammarBackend

_PACKAGES: dict[GrammarBackend, tuple[str, tuple[str, ...]]] = {  # extra and modules
    "sgl": ("", ()),
    "outlines": ("engine", ("outlines_core", "interegular")),
    "llguidance": ("ebnf", ("llguidance",)),
}


def check_backend(backend: GrammarBackend) -> None:
    """Raise MissingExtra for a grammar_backend whose packages are not installed."""
    extra, packages = _PACKAGES[backend]
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtra.of(extra, f"grammar_backend={backend!r}", " and ".join(missing), "grammar_backend")
