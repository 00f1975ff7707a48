"""Empties a server's prefix cache. Imports nothing: it also serves a process that has another's packages."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

TRIES, PAUSE_SECONDS = 50, 0.2


def flush_cache(url: str) -> None:
    """Empty the prefix cache of our server, of SGLang's or of vLLM's, once what ran there has let go of it. Raises
    SystemExit where it cannot be emptied."""
    said: dict[str, int] = {}  # status by path
    for _ in range(TRIES):
        said.clear()
        for path in ("/flush_cache", "/reset_prefix_cache"):
            try:
                with urllib.request.urlopen(urllib.request.Request(url + path, method="POST"), timeout=60):
                    return
            except urllib.error.HTTPError as error:  # another server's path, or busy
                said[path] = error.code
        if 400 not in said.values():
            break
        time.sleep(PAUSE_SECONDS)
    raise SystemExit(f"{url} does not empty its prefix cache: {said}; vLLM does with VLLM_SERVER_DEV_MODE=1")
