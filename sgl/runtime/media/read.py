"""Reads images and videos that callers give: paths, URLs, base64, bytes, Pillow's images, lists of frames.

Everything is bounded before work is done for it; what is not an image raises InvalidRequest.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sgl.errors import ContextTooLong, InvalidRequest, QueueFull, needs_extra
from sgl.runtime.media.config import MediaConfig, Preprocessing
from sgl.runtime.media.fetch import FETCH_SECONDS, UrlPolicy, fetch
from sgl.runtime.media.item import MediaItem, MediaKind

MAX_BYTES = 32 << 20
"""Of an encoded image, or of a video's frames together."""
MAX_PIXELS = 64 << 20
"""Of an image before it is resized: 200 MB."""
MAX_FRAMES = 768
MAX_ITEMS = 256
"""Images and videos of a prompt."""
_MAX_RATIO = 200  # of the longer side to the shorter; as in transformers
_KEPT_BYTES = 256 << 20  # of resized pixels
_LIVE_BYTES = 4 << 30  # of those that requests hold
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_PNG = b"\x89PNG\r\n\x1a\n"
_IEND = b"IEND\xaeB`\x82"


class MediaReader:
    """Makes items of what callers give, and keeps the latest. Safe from any thread."""

    def __init__(self, config: MediaConfig, urls: UrlPolicy, context_length: int) -> None:
        """urls: which may be fetched. context_length: of a prompt, in tokens."""
        self.config = config
        self._context_length = context_length
        self._urls = urls
        self._items: OrderedDict[bytes, MediaItem] = OrderedDict()  # by digest of what was given
        self._num_bytes = 0  # of these
        self._num_live = 0  # of all that anybody holds
        self._lock = threading.RLock()  # reentrant: a garbage collection may end an item anywhere

    def items(self, images: Any, videos: Any = None) -> list[MediaItem]:
        """The items of one prompt. images: one, or a list; videos: one, or a list of them. Raises InvalidRequest."""
        given: list[tuple[MediaKind, Any]] = [("image", each) for each in _several(images)]
        given += [("video", each) for each in ([videos] if _is_video(videos) else _several(videos))]
        _check_number(len(given))
        items: list[MediaItem] = []
        end = time.monotonic() + FETCH_SECONDS
        for kind, each in given:
            items.append(self.item(kind, each, end=end))
            self.check(items)
        return items

    def check(self, items: Sequence[MediaItem]) -> None:
        """Raise InvalidRequest if these are too many for a prompt."""
        _check_number(len(items))
        num_tokens = sum(item.num_tokens for item in items)
        if num_tokens >= self._context_length:
            raise ContextTooLong.of(num_tokens, self._context_length, param="image_data", seen="images")

    def item(self, kind: MediaKind, given: Any, fps: float | None = None, end: float | None = None) -> MediaItem:
        """An image, or a video: its frames as a list of images, or as PNG images one after the other, or {"frames",
        "fps"}. fps: frames a second. end: monotonic seconds at which fetching gives up. Raises InvalidRequest."""
        if isinstance(given, MediaItem):
            return given
        if kind == "video" and isinstance(given, Mapping):
            given, fps = given.get("frames"), given.get("fps", fps)
        if fps is not None and not (isinstance(fps, int | float) and 0 < fps < 1e6):
            raise InvalidRequest(f"fps must be above 0, not {fps!r:.40}", param="video_data")
        end = time.monotonic() + FETCH_SECONDS if end is None else end
        several = given if kind == "video" and _is_list(given) else [given]
        _check_frames(several)
        frames: list[Any] = []
        for each in several:
            left = MAX_BYTES - sum(len(frame) for frame in frames if isinstance(frame, bytes))
            frames.append(self._content(each, end, left))
        if kind == "video" and len(frames) == 1 and isinstance(frames[0], bytes):
            frames = _cut(frames[0])
            _check_frames(frames)
        if not all(isinstance(frame, bytes) for frame in frames):  # whose pixels are hashed, GBs of a video's
            frames[0] = _rgb(frames[0], kind)
            self._planned(kind, frames[0].size, len(frames))
        hashed = hashlib.sha256(f"{kind} {fps}".encode())
        for frame in frames:
            content = frame if isinstance(frame, bytes) else _identity(frame, kind)
            hashed.update(f" {type(frame) is bytes} {len(content)} ".encode())  # where it ends, and whether encoded
            hashed.update(content)
        key = hashed.digest()
        with self._lock:
            if (item := self._items.get(key)) is not None:
                self._items.move_to_end(key)
                return item
        item = self._made(kind, frames, fps)
        with self._lock:
            if self._num_live + item.frames.nbytes > _LIVE_BYTES:
                said = "images of other requests take all memory for them; try again later"
                raise QueueFull(said, limit=_LIVE_BYTES)
            self._num_live += item.frames.nbytes
            weakref.finalize(item, self._ended, item.frames.nbytes)
            if key not in self._items:
                self._items[key] = item
                self._num_bytes += item.frames.nbytes
            while self._num_bytes > _KEPT_BYTES:
                _, old = self._items.popitem(last=False)
                self._num_bytes -= old.frames.nbytes
        return item

    def _made(self, kind: MediaKind, frames: Sequence[Any], fps: float | None) -> MediaItem:
        first = _rgb(frames[0], kind)
        how, height, width, grid = self._planned(kind, first.size, len(frames))
        pixels = np.empty((len(frames), height, width, 3), np.uint8)
        for i, frame in enumerate(frames):
            image = _rgb(frame, kind) if i else first
            if image.size != first.size:
                raise InvalidRequest("the frames of a video have different sizes", param=f"{kind}_data")
            pixels[i] = np.asarray(image.resize((width, height), how.resample))
        return MediaItem(kind, pixels, grid, self.config.merge_size, fps)

    def _planned(
        self, kind: MediaKind, size: tuple[int, int], num_frames: int
    ) -> tuple[Preprocessing, int, int, tuple[int, int, int]]:
        """How frames of this width and height are resized, to which height and width, and the item's grid. Raises
        InvalidRequest."""
        config = self.config
        how = config.image if kind == "image" else config.video
        height, width = _size(config, how, kind, num_frames, size[1], size[0])
        patch = config.patch_size
        grid = -(-num_frames // config.temporal_patch_size), height // patch, width // patch
        if (num_tokens := math.prod(grid) // config.merge_size**2) >= self._context_length:  # a video may have GBs
            raise ContextTooLong.of(num_tokens, self._context_length, param="image_data", seen="images")
        return how, height, width, grid

    def _ended(self, num_bytes: int) -> None:
        with self._lock:
            self._num_live -= num_bytes

    def _content(self, given: Any, end: float, most: int) -> Any:
        """Encoded bytes, no more than `most`, or a Pillow image."""
        if isinstance(given, str | Path):
            given = self._loaded(str(given), end, most)
        if isinstance(given, bytes | bytearray | memoryview):
            if len(given) > most:
                raise InvalidRequest(f"an image has {len(given)} bytes, {most} are the most", param="image_data")
            return bytes(given)
        if hasattr(given, "convert") and hasattr(given, "size"):
            return given
        raise InvalidRequest(
            f"an image is a path, a URL, base64, bytes or a Pillow image, not {type(given).__name__}",
            param="image_data",
        )

    def _loaded(self, text: str, end: float, most: int) -> bytes:
        if text.startswith(("http://", "https://")):
            return fetch(text, self._urls, most, end)
        if text.startswith("data:") or (len(text) > 4096 and not text.startswith("file:")):
            return from_base64(text)
        path = Path(text.removeprefix("file://"))
        try:
            size = path.stat().st_size if path.is_file() else None
        except (OSError, ValueError):  # it is no path, but long
            size = None
        if size is None:
            return from_base64(text)
        if size > most:
            raise InvalidRequest(f"{path} has more than {most} bytes", param="image_data")
        try:
            return path.read_bytes()
        except OSError as error:
            raise InvalidRequest(f"no image can be read from {path}: {error}", param="image_data") from error


def from_base64(text: str) -> bytes:
    """The bytes of base64, or of a data: URL with it. Raises InvalidRequest."""
    shown = f"{text[:60]!r}{'…' if len(text) > 60 else ''}"
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidRequest(f"an image's data: URL is data:image/…;base64,…, not {shown}", param="image_data")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(
            f"an image is a path, a URL or base64, and {shown} is none of these", param="image_data"
        ) from None


def _check_number(number: int) -> None:
    if number > MAX_ITEMS:
        message = f"{number} images and videos are given, and a prompt may have {MAX_ITEMS}"
        raise InvalidRequest(message, param="image_data")


def _check_frames(frames: Sequence[Any]) -> None:
    if not 0 < len(frames) <= MAX_FRAMES:
        raise InvalidRequest(f"a video has 1 to {MAX_FRAMES} frames, not {len(frames)}", param="video_data")


def _several(given: Any) -> Sequence[Any]:
    return [each for each in (given if _is_list(given) else [given]) if each is not None]


def _is_list(given: Any) -> bool:
    return isinstance(given, list | tuple)


def _is_video(given: Any) -> bool:
    """Whether it is a list of frames, rather than of videos."""
    one = _is_list(given) and len(given) > 0 and not isinstance(given[0], list | tuple | Mapping | MediaItem)
    return one or isinstance(given, Mapping)


def _identity(image: Any, kind: MediaKind) -> bytes:
    seen = _rgb(image, kind)  # its own pixels may be numbers of colours
    return f"{seen.size}".encode() + bytes(seen.tobytes())


def _cut(data: bytes) -> list[bytes]:
    """PNG images that follow each other; other data is one image."""
    if not data.startswith(_PNG):
        return [data]
    frames = data.split(_IEND + _PNG)
    return [
        (_PNG if i else b"") + frame + (_IEND if i < len(frames) - 1 else b"") for i, frame in enumerate(frames)
    ]


def _rgb(given: Any, kind: MediaKind) -> Any:
    """A Pillow image in RGB, upright, within bounds."""
    with needs_extra("engine", "images"):
        from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
    try:
        image = Image.open(io.BytesIO(given), formats=_FORMATS) if isinstance(given, bytes) else given
        width, height = image.size
        if width * height <= MAX_PIXELS and min(width, height) > 0:
            image.load()
            if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # otherwise this copies
                image = ImageOps.exif_transpose(image)
            return image if image.mode == "RGB" else image.convert("RGB")
    except Image.DecompressionBombError as error:
        raise InvalidRequest(f"the {kind} is too large: {error}", param=f"{kind}_data") from None
    except Exception as error:  # decoders raise anything
        said = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):  # which says where it is in memory
            said = "it has another format, or is cut off" if given else "it is empty"
        message = f"the {kind} cannot be read ({said[:200]}): it must be one of {', '.join(_FORMATS)}"
        raise InvalidRequest(message, param=f"{kind}_data") from None
    message = f"the {kind} is {width} x {height} pixels, and {MAX_PIXELS} in all are the most"
    raise InvalidRequest(message, param=f"{kind}_data")


def _size(
    config: MediaConfig, how: Preprocessing, kind: MediaKind, num_frames: int, height: int, width: int
) -> tuple[int, int]:
    """Height and width to resize to: whole tokens, about the same ratio, and pixels within the model's bounds, which
    some models set for all frames of a video together."""
    unit = config.patch_size * config.merge_size
    frames = 1.0
    counted = 1
    if kind == "video" and config.splits_videos:
        frames, size = float(num_frames), config.temporal_patch_size
        counted = max(size, round(num_frames / size) * size)
        if min(height, width) < unit:
            stretch = max(unit / height, unit / width)
            height, width = int(height * stretch), int(width * stretch)
    if max(height, width) > _MAX_RATIO * min(height, width):
        message = f"the {kind} is {width} x {height} pixels: one side may be {_MAX_RATIO} times the other"
        raise InvalidRequest(message, param=f"{kind}_data")
    rows, columns = round(height / unit), round(width / unit)
    area = counted * rows * columns * unit * unit
    if area > how.max_pixels:
        shrink = math.sqrt(frames * height * width / how.max_pixels)
        rows = max(1, math.floor(height / shrink / unit))
        columns = max(1, math.floor(width / shrink / unit))
    elif area < how.min_pixels:
        grow = math.sqrt(how.min_pixels / (frames * height * width))
        rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
    if not rows or not columns:
        message = f"the {kind} is {width} x {height} pixels, less than this model can see"
        raise InvalidRequest(message, param=f"{kind}_data")
    return rows * unit, columns * unit
