"""Messages between processes of this program, as frames on a stream of bytes.

A frame is a header, the sizes of its parts, a pickle, and the buffers of its arrays, which are not copied into the
pickle and stay where they were read.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

_HEADER = struct.Struct("<qq")  # the number of parts, and all bytes behind the header
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
    """Puts frames together again."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Callable[[], Any]]:
        """What unpacks each message that these bytes complete."""
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
