"""How much text a request may have tokenized or read, and where that is done: it takes seconds of a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sgl.errors import InvalidRequest
from sgl.runtime.requests.threads import FEW

MAX_TOKENIZED = 1 << 20
"""Characters a request: seconds of one thread, up to 400 MB."""
MAX_DETOKENIZED = 1 << 18
"""Tokens a request."""
EACH = 16
"""Overhead of each text or list, in characters or tokens."""
_TEXTS = 256  # tokenized in one call
_LONG_TEXTS = ThreadPoolExecutor(1, thread_name_prefix="sgl-texts")  # starts lazily


def pool_for(size: int) -> ThreadPoolExecutor | None:
    """The executor for this much text; long work waits for its like only."""
    return None if size <= FEW else _LONG_TEXTS


def checked_size(several: Sequence[Sequence[Any]], most: int, what: str, param: str) -> int:
    """What texts or token lists cost, in characters or tokens. what: a message's words behind the number, with {} for
    EACH. Raises InvalidRequest beyond `most`."""
    size = sum(map(len, several)) + EACH * len(several)
    if size > most:
        raise InvalidRequest(f"{size} {what.format(EACH)} counted; {most} may be", param=param)
    return size


def in_batches(encode: Callable[[Sequence[str]], list[list[int]]], texts: Sequence[str]) -> list[list[int]]:
    """Encode in batches: each call holds the GIL while it returns results."""
    return [ids for start in range(0, len(texts), _TEXTS) for ids in encode(texts[start : start + _TEXTS])]
