"""Where images stand in a prompt: placeholders repeated, positions in time, height and width, and page keys.

A key has, in place of an image's placeholders, a number below zero that is the image's own: no two images share pages.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sgl.errors import InvalidRequest
from sgl.runtime.media.config import MediaConfig
from sgl.runtime.media.item import MediaItem, MediaRun

Int32Array = npt.NDArray[np.int32]
Encode = Callable[[str], Int32Array]

_FIRST_NUMBER = -2
_MOST_NUMBERS = 1 << 16  # images remembered: 10 MB


class ImageNumbers:
    """A number below zero for each image, never given to another. Safe from any thread."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = _FIRST_NUMBER
        self._lock = threading.Lock()

    def of(self, digest: bytes) -> int:
        """An image's number: a new one if it was not asked for in a long time."""
        with self._lock:
            number = self._numbers.get(digest)
            if number is None:
                number, self._next = self._next, self._next - 1
            self._numbers[digest] = number
            self._numbers.move_to_end(digest)
            if len(self._numbers) > _MOST_NUMBERS:
                self._numbers.popitem(last=False)
            return number


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A prompt with images."""

    ids: Int32Array  # [n]
    key_ids: Int32Array  # [n]
    places: Int32Array  # [3, n] positions in time, height and width
    offset: int  # what positions behind the prompt are ahead of their index
    runs: tuple[MediaRun, ...]  # in order

    @property
    def end(self) -> int:
        """Behind the last image: the rest is text, whose positions are `offset` ahead."""
        last = self.runs[-1]
        return last.start + last.count

    def followed_by(self, ids: Int32Array) -> Layout:
        """With text behind."""
        text = np.arange(1, len(ids) + 1, dtype=np.int32) + self.places[0, -1]
        places = np.concatenate((self.places, np.broadcast_to(text, (3, len(ids)))), axis=1)
        whole, key_ids = (np.concatenate((its, ids)) for its in (self.ids, self.key_ids))
        return Layout(whole, key_ids, places, self.offset, self.runs)

    def part(self, start: int, end: int) -> tuple[Int32Array, list[MediaRun]]:
        """Positions [3, end - start] of some tokens, also behind the prompt, and the images among them."""
        places = self.places[:, start:end]
        if (more := end - max(start, len(self.ids))) > 0:
            text = np.arange(end - more, end, dtype=np.int32) + np.int32(self.offset)
            places = np.concatenate((places, np.broadcast_to(text, (3, more))), axis=1)
        runs = []
        for run in self.runs:
            first, last = max(run.start, start), min(run.start + run.count, end)
            if first < last:
                runs.append(MediaRun(first - start, run.item, run.first + first - run.start, last - first))
        return places, runs


def lay_out(
    config: MediaConfig, ids: Int32Array, items: Sequence[MediaItem], numbers: ImageNumbers, encode: Encode
) -> Layout | None:
    """Put items into a prompt, in order, images and videos apart: each for one placeholder, or for as many as it has
    tokens. encode: of times, which some models write. None without images. Raises InvalidRequest if their numbers
    differ."""
    parts: list[Int32Array] = []
    runs: list[MediaRun] = []
    kinds = {config.image_token_id: "image", config.video_token_id: "video"}
    waiting = {kind: [item for item in items if item.kind == kind] for kind in kinds.values()}
    length = done = 0
    for start, end in _pads(ids, tuple(kinds)):
        kind = kinds[int(ids[start])]
        item = waiting[kind].pop(0) if waiting[kind] else None
        if item is None or end - start not in (1, item.num_tokens):
            raise _mismatch(config, ids, items, kind)
        parts.append(ids[done:start])
        length += start - done
        done = end
        for piece, own in _pieces(config, item, encode):
            if own is not None:
                runs.append(MediaRun(length, item, *own))
            parts.append(piece)
            length += len(piece)
    for kind, left in waiting.items():
        if left:
            raise _mismatch(config, ids, items, kind)
    if not runs:
        return None
    laid = np.concatenate((*parts, ids[done:]), dtype=np.int32)
    key_ids = laid.copy()
    for run in runs:
        key_ids[run.start : run.start + run.count] = numbers.of(run.item.digest)
    places = _places(config, len(laid), runs)
    return Layout(laid, key_ids, places, int(places.max()) + 1 - len(laid), tuple(runs))


def _pads(ids: Int32Array, tokens: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of one placeholder."""
    padded = np.concatenate(([-1], np.where(np.isin(ids, tokens), ids, -1), [-1]))
    bounds = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    return ((start, end) for start, end in pairwise(bounds) if padded[start + 1] >= 0)


def _pieces(
    config: MediaConfig, item: MediaItem, encode: Encode
) -> Iterator[tuple[Int32Array, tuple[int, int] | None]]:
    """What stands in place of a placeholder: token ids, and for the item's own its first and how many."""
    if item.kind == "image" or not config.splits_videos:
        token = config.image_token_id if item.kind == "image" else config.video_token_id
        yield np.full(item.num_tokens, token, np.int32), (0, item.num_tokens)
        return
    _, height, width = item.token_grid
    count = height * width
    begin, end = np.array([[config.vision_start_token_id], [config.vision_end_token_id]], np.int32)
    for moment, seconds in enumerate(times(config, item)):
        yield encode(f"<{seconds:.1f} seconds>"), None
        yield begin, None
        yield np.full(count, config.video_token_id, np.int32), (moment * count, count)
        yield end, None


def times(config: MediaConfig, item: MediaItem) -> list[float]:
    """Seconds of a video's moments: each the mean of its first and last frame. 24 frames a second if unknown."""
    fps, size, last = item.fps or 24.0, config.temporal_patch_size, len(item.frames) - 1
    return [
        (min(moment * size, last) + min(moment * size + size - 1, last)) / 2 / fps for moment in range(item.grid[0])
    ]


def _places(config: MediaConfig, length: int, runs: Sequence[MediaRun]) -> Int32Array:
    """[3, length] as in transformers: an image's tokens share the position of its beginning, plus their row and
    column; text goes on behind the longer side."""
    places = np.empty((3, length), np.int32)
    done = position = 0
    for run in runs:
        text = run.start - done
        places[:, done : run.start] = np.arange(position, position + text)
        position += text
        moments, height, width = run.item.token_grid
        moments = run.count // (height * width)
        interval = 1.0
        if run.item.kind == "video" and config.family == "qwen2_5_vl":
            interval = config.tokens_per_second * (
                config.temporal_patch_size / run.item.fps if run.item.fps else 1.0
            )
        time = (np.arange(moments) * interval).astype(np.int64)
        grid = np.stack(np.meshgrid(time, np.arange(height), np.arange(width), indexing="ij")).reshape(3, -1)
        done = run.start + run.count
        places[:, run.start : done] = grid + position
        position += max(height, width)
    places[:, done:] = np.arange(position, position + length - done)
    return places


def _mismatch(config: MediaConfig, ids: Int32Array, items: Sequence[MediaItem], kind: str) -> InvalidRequest:
    token = config.image_token_id if kind == "image" else config.video_token_id
    found = sum(1 for start, _ in _pads(ids, (token,)))
    given = [item.num_tokens for item in items if item.kind == kind]
    return InvalidRequest(
        f"the prompt has placeholders for {found} {kind}s (token {token}, each once or as often as its {kind} has "
        f"tokens), and {len(given)} {'is' if len(given) == 1 else 'are'} given"
        + (f", of {', '.join(map(str, given[:8]))} tokens" if given else ""),
        param=f"{kind}_data",
    )
