"""Pictures of programs: what users give as images and videos, as bytes."""

from __future__ import annotations

import base64
import binascii
import io
import struct
import zlib
from pathlib import Path
from typing import Any

from sgl.errors import InvalidRequest, is_installed, needs_extra

MAX_FRAMES = 768
"""Of a video, after sampling."""
_MAX_DECODED = 1 << 18  # frames of a file that are looked at: more than two hours
_OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*", b"MM\0*")


def image_bytes(value: Any) -> bytes:
    """The encoded image that a value is or names; see `expr.image`. Raises InvalidRequest."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str | Path):
        try:
            return Path(value).read_bytes()
        except (OSError, ValueError) as error:
            if isinstance(value, str) and (data := _from_base64(value)) is not None:
                return data
            said = getattr(error, "strerror", None) or error
            raise InvalidRequest(f"no image can be read from {str(value)[:200]}: {said}", param="image") from error
    if hasattr(value, "cpu"):  # torch tensor
        pixels = (value.clamp(0, 1) * 255).round().byte().permute(1, 2, 0) if value.is_floating_point() else value
        return _png(pixels.cpu().numpy())
    if hasattr(value, "save"):  # PIL image
        buffer = io.BytesIO()
        try:
            if hasattr(value, "getexif"):  # others' pictures save themselves
                from PIL import ImageOps

                value = ImageOps.exif_transpose(value)
                value = value if value.mode in _OF_PNG else value.convert("RGB")
            value.save(buffer, format="PNG")
        except Exception as error:  # decoders raise anything
            raise InvalidRequest(f"the image cannot be read: {error}", param="image") from error
        return buffer.getvalue()
    raise InvalidRequest(f"no image can be made of {type(value).__name__}", param="image")


def _png(pixels: Any) -> bytes:
    """uint8 [height, width, 1 or 3 channels] as a PNG."""
    if pixels.ndim != 3 or pixels.dtype != "uint8" or pixels.shape[2] not in (1, 3):
        raise InvalidRequest(f"no image can be made of {pixels.dtype} of shape {pixels.shape}", param="image")
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # each row starts with filter 0
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _from_base64(text: str) -> bytes | None:
    """The image in a data: URL or base64; None if there is none."""
    try:
        data = base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if data.startswith(_STARTS) else None


def as_png(data: bytes) -> bytes:
    """An encoded image as PNG. Raises InvalidRequest and MissingExtra."""
    if data.startswith(_STARTS[0]):
        return data
    with needs_extra("engine", "a frame that is no PNG image"):
        from PIL import Image
    buffer = io.BytesIO()
    try:
        Image.open(io.BytesIO(data)).convert("RGB").save(buffer, format="PNG")
    except Exception as error:  # decoders raise anything
        raise InvalidRequest(f"a frame cannot be read: {error}", param="path") from error
    return buffer.getvalue()


def frames_of(path: str | Path, num_frames: int) -> tuple[list[bytes], float | None]:
    """Evenly spaced frames of a video file as PNG images, fewer if it has fewer, and how many of them make a second.
    Raises InvalidRequest and MissingExtra."""
    if is_installed("cv2") and not is_installed("av"):
        return _by_opencv(path, num_frames)
    with needs_extra("video", "a video file (a list of frames does without)"):
        import av
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            rate = float(stream.average_rate or 0)
            total = stream.frames or int(float((stream.duration or 0) * (stream.time_base or 0)) * rate)
            if not 0 < total <= _MAX_DECODED:
                raise ValueError(f"it has {total} frames")
            wanted = {i * total // num_frames for i in range(num_frames)}
            found: list[bytes] = []
            for index, frame in enumerate(container.decode(stream)):
                if index in wanted:
                    buffer = io.BytesIO()
                    image: Any = frame
                    image.to_image().save(buffer, format="PNG")
                    found.append(buffer.getvalue())
                if index >= max(wanted):
                    break
    except (av.FFmpegError, OSError, ValueError, IndexError) as error:
        raise InvalidRequest(f"no video can be read from {path}: {error}", param="path") from error
    return found, len(wanted) * rate / total if rate else None


def _by_opencv(path: str | Path, num_frames: int) -> tuple[list[bytes], float | None]:
    import cv2  # type: ignore[import-not-found,unused-ignore]

    capture = cv2.VideoCapture(str(path))
    total, rate = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), float(capture.get(cv2.CAP_PROP_FPS))
    if total <= 0:
        raise InvalidRequest(f"no video can be read from {path}", param="path")
    frames = []
    for index in sorted({i * total // num_frames for i in range(num_frames)}):
        capture.set(cv2.CAP_PROP_POS_FRAMES, index)
        found, frame = capture.read()
        if found:
            frames.append(cv2.imencode(".png", frame)[1].tobytes())
    return frames, len(frames) * rate / total if rate else None
