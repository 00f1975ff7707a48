"""Messages between our processes, as frames on a byte stream.

A frame is a header, the sizes of its parts, a pickle, and the buffers of arrays, which are neither copied into the
pickle nor out of the frame.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

_HEADER = struct.Struct("<qq")  # number of parts; bytes after the header
_ALIGNMENT = 16  # bytes, of each part


def packed(message: object) -> bytes:
    """The frame of a message."""
    arrays: list[pickle.PickleBuffer] = []
    parts: list[Any] = [pickle.dumps(message, 5, buffer_callback=arrays.append), *(array.raw() for array in arrays)]
    frame = [b"", struct.pack(f"<{len(parts)}q", *map(len, parts))]
    for part in parts:
        frame += (bytes(-len(frame[-1]) % _ALIGNMENT), part)
    frame[0] = _HEADER.pack(len(parts), sum(map(len, frame)))
    return b"".join(frame)


class Frames:
    """Reassembles frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Callable[[], Any]]:
        """Yields a function for each completed message that unpickles it."""
        self._rest += data
        while len(self._rest) >= _HEADER.size:
            num_parts, size = _HEADER.unpack_from(self._rest)
            end = _HEADER.size + size
            if len(self._rest) < end:
                return
            body = self._rest[_HEADER.size : end]
            del self._rest[:end]
            yield partial(_unpacked, memoryview(body), num_parts)


def _unpacked(body: memoryview, num_parts: int) -> Any:
    at, parts = 8 * num_parts, []
    for size in struct.unpack_from(f"<{num_parts}q", body):
        at += -at % _ALIGNMENT
        parts.append(body[at : at + size])
        at += size
    return pickle.loads(parts[0], buffers=parts[1:])
