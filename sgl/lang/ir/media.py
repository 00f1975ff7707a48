"""Where a program's images are."""

from __future__ import annotations

from sgl.lang.ir.nodes import Media

URLS = ("http://", "https://")


def is_elsewhere(media: Media) -> bool:
    """Whether its data is an image's URL."""
    return media.kind == "image" and media.data.startswith(URLS)


def url_of(media: Media) -> str:
    """Its URL, or a data: URL of what it holds."""
    return media.data if is_elsewhere(media) else f"data:image/jpeg;base64,{media.data}"
