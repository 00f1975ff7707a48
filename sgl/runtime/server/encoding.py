"""Answers as JSON; large ones in pieces off the event loop, since the C encoder holds the GIL."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

from sgl.runtime.requests.threads import FEW, FIELDS, in_thread

_ENCODER = json.JSONEncoder(separators=(",", ":"), default=str, allow_nan=False)
_CHARACTERS = 16  # count as one value


def json_bytes(value: Any) -> bytes:
    """One line of ASCII JSON; lone surrogates survive. Infinite numbers become null."""
    try:
        return "".join(_pieces(value)).encode()
    except ValueError:
        return "".join(_pieces(_finite(value))).encode()


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON response."""
    return web.Response(body=json_bytes(body), status=status, headers=headers, content_type="application/json")


def size_of_text(length: int) -> int:
    """What a text of so many characters counts as."""
    return length // _CHARACTERS + 1


def size_of(value: Any) -> int:
    """Approximate number of values, judged by the last item of each list."""
    if isinstance(value, str):
        return size_of_text(len(value))
    if isinstance(value, dict):
        return 1 + sum([size_of(item) for item in value.values()])
    return len(value) * size_of(value[-1]) if value and isinstance(value, (list, tuple)) else 1


async def answer(build: Callable[[], Any], size: int) -> web.Response:
    """A response built of about `size` values."""
    data = await in_thread(lambda: json_bytes(build()), size)
    return web.Response(body=data, content_type="application/json")


def size_of_result(result: dict[str, Any]) -> int:
    """Approximate number of values in a result or event."""
    size = FIELDS + len(result.get("output_ids", ())) + len(result["text"]) // _CHARACTERS
    for name, entries in result["meta_info"].items():
        if name.endswith("_logprobs") and entries:
            size += len(entries) * size_of(entries[-1])  # the first may be null
    return size


def _pieces(value: Any) -> Iterator[str]:
    size = size_of(value)
    if isinstance(value, dict) and size > FEW:
        mark = "{"
        for key, item in value.items():
            yield f"{mark}{_ENCODER.encode(key)}:"
            yield from _pieces(item)
            mark = ","
        yield "}"
    elif isinstance(value, list) and size > FEW:
        step, mark = max(1, FEW * len(value) // size), "["
        for start in range(0, len(value), step):
            yield mark
            if step == 1:
                yield from _pieces(value[start])
            else:
                yield _ENCODER.encode(value[start : start + step])[1:-1]
            mark = ","
        yield "]"
    else:
        yield _ENCODER.encode(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
