"""How much of a prefix an engine shares."""

from __future__ import annotations

from sgl.runtime.engine import Engine


def in_whole_pages(engine: Engine, num_tokens: int) -> int:
    """So many of num_tokens fill pages."""
    page_size = engine.config.page_size
    assert page_size is not None, "an engine that runs has decided"
    return num_tokens // page_size * page_size
