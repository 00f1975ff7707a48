"""Threads that read images: fetching and decoding them takes long, and other requests wait for neither."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

THREADS = ThreadPoolExecutor(4, thread_name_prefix="sgl-images")  # they start when needed


def has_images(arguments: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments brings some."""
    return any(arguments.get(name) is not None for name in ("image_data", "video_data"))


def pool_for(arguments: Mapping[str, Any], otherwise: Executor) -> Executor:
    """Where such a call is prepared."""
    return THREADS if has_images(arguments) else otherwise
