"""How a model takes images: patches, sizes, colours and placeholders, from its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sgl.errors import ModelError

Towers = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
Color = tuple[float, float, float]

_CLIP_MEAN: Color = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Color = (0.26862954, 0.26130258, 0.27577711)
_SIZES = {"image": (56 * 56, 28 * 28 * 1280), "video": (128 * 28 * 28, 28 * 28 * 768)}  # pixels; of transformers
_DEEP = (8, 16, 24)  # layers of Qwen3-VL's tower, by default
_BICUBIC = 3


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """What happens to an image's, or a video's, pixels."""

    min_pixels: int  # after resizing
    max_pixels: int
    resample: int  # Pillow's number of a filter
    scale: float  # of bytes, before mean and std
    mean: Color
    std: Color


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Of one model."""

    family: Towers
    patch_size: int  # pixels of a patch's side
    merge_size: int  # patches of a token's side
    temporal_patch_size: int  # frames of a patch
    tokens_per_second: float  # of a video, in positions
    image: Preprocessing
    video: Preprocessing
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    num_deep: int = 0
    """Embeddings of a token beside its own, which are added behind the first layers."""

    @property
    def splits_videos(self) -> bool:
        """Whether each moment of a video is written with its time, and between marks of its own."""
        return self.family == "qwen3_vl"

    @classmethod
    def read(cls, folder: Path, family: Towers, data: Mapping[str, Any]) -> MediaConfig:
        """data: config.json. Raises ModelError."""
        vision = data.get("vision_config") or {}
        both = _json(folder / "processor_config.json")
        image = _json(folder / "preprocessor_config.json") or both.get("image_processor") or {}
        video = _json(folder / "video_preprocessor_config.json") or both.get("video_processor") or image

        def token(name: str) -> int:
            value = data.get(name)
            if not isinstance(value, int):
                raise ModelError(f"{folder}: config.json has no {name!r}", path=str(folder))
            return value

        def size(name: str, default: int) -> int:
            value = vision.get(name, default)
            value = value if isinstance(value, int) else default
            given = {int(its[key]) for its in (image, video) if (key := _SAME.get(name, name)) in its}
            if given - {value}:
                raise ModelError(
                    f"{folder}: {name} is {value} in config.json and {max(given - {value})} for its preprocessor",
                    path=str(folder),
                )
            return value

        return cls(
            family=family,
            patch_size=size("patch_size", 16 if family == "qwen3_vl" else 14),
            merge_size=size("spatial_merge_size", 2),
            temporal_patch_size=size("temporal_patch_size", 2),
            tokens_per_second=float(vision.get("tokens_per_second", 1.0)),
            image=_preprocessing(folder, image, "image"),
            video=_preprocessing(folder, video, "video"),
            image_token_id=token("image_token_id"),
            video_token_id=token("video_token_id"),
            vision_start_token_id=token("vision_start_token_id"),
            vision_end_token_id=token("vision_end_token_id"),
            num_deep=len(vision.get("deepstack_visual_indexes", _DEEP)) if family == "qwen3_vl" else 0,
        )


_SAME = {"spatial_merge_size": "merge_size"}


def _preprocessing(folder: Path, given: Mapping[str, Any], kind: str) -> Preprocessing:
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if given.get(name) is False:
            raise ModelError(
                f"{folder}: its preprocessor has {name} off, and images need it here", path=str(folder)
            )
    size = given.get("size") or {}
    least, most = _SIZES[kind]
    least = given.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or least
    most = given.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or most
    return Preprocessing(
        int(least),
        int(most),
        int(given.get("resample") or _BICUBIC),
        float(given.get("rescale_factor") or 1 / 255),
        _color(given.get("image_mean"), _CLIP_MEAN),
        _color(given.get("image_std"), _CLIP_STD),
    )


def _color(given: Any, default: Color) -> Color:
    if not isinstance(given, list) or len(given) != 3:
        return default
    red, green, blue = map(float, given)
    return red, green, blue


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}", path=str(path)) from error
    return data if isinstance(data, dict) else {}
