"""Where images stand in prompts: positions as transformers computes them, page keys that no two images share, pixels as
transformers' processor makes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

from sgl.runtime.engine import Engine
from sgl.runtime.media.config import MediaConfig
from sgl.runtime.media.item import MediaItem, MediaRun
from sgl.runtime.media.layout import ImageNumbers, Layout, lay_out, times
from sgl.runtime.media.read import MediaReader
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.vision import VisionTower
from tests.tiny_models import edit_json
from tests.tiny_vision import (
    ARCHITECTURES,
    END,
    IMAGE,
    START,
    VIDEO,
    Oracle,
    picture,
    place,
    processor,
    tiny_vision,
)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, MediaConfig, Any]:
    """Its architecture, folder, how it takes images, and transformers' module."""
    path = tiny_vision(tmp_path_factory.mktemp("sees"), request.param)
    media = ModelConfig.from_pretrained(path).media
    assert media is not None
    return request.param, path, media, Oracle(path, request.param).model


def item(kind: Any, moments: int, height: int, width: int, shade: int) -> MediaItem:
    """Of so many tokens, in one shade of grey."""
    frames = np.full((moments if kind == "image" else 2 * moments, height * 8, width * 8, 3), shade, np.uint8)
    return MediaItem(kind, frames, (moments, height * 2, width * 2), 2)


ITEMS = st.one_of(
    st.builds(item, st.just("image"), st.just(1), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2)),
    st.builds(item, st.just("video"), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2)),
)
PROMPTS = st.lists(st.tuples(st.lists(st.integers(3, 300), max_size=5), ITEMS), min_size=1, max_size=4)
NUMBERS = ImageNumbers()


def encode(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + 3


def laid_out(media: MediaConfig, parts: list[tuple[list[int], MediaItem]]) -> Layout:
    """Texts with an item behind each."""
    ids: list[int] = []
    for text, each in parts:
        ids += [*text, START, IMAGE if each.kind == "image" else VIDEO, END]
    layout = lay_out(media, np.array(ids, np.int32), [each for _, each in parts], NUMBERS, encode)
    assert layout is not None
    return layout


@settings(max_examples=40, deadline=None)
@given(parts=PROMPTS)
def test_positions_are_those_of_transformers(model: Any, parts: list[tuple[list[int], MediaItem]]) -> None:
    _, _, media, module = model
    layout = laid_out(media, parts)
    ids = torch.from_numpy(layout.ids)[None].long()
    grids = {
        f"{kind}_grid_thw": torch.tensor(its)
        for kind in ("image", "video")
        if (its := [each.grid for _, each in parts if each.kind == kind])
    }
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    places, deltas = module.model.get_rope_index(ids, mm_token_type_ids=types, **grids)
    np.testing.assert_array_equal(layout.places, places[:, 0].numpy())
    assert layout.offset == int(deltas)


@settings(max_examples=60, deadline=None)
@given(left=PROMPTS, right=PROMPTS)
def test_keys_are_the_same_as_far_as_prompts_are(model: Any, left: Any, right: Any) -> None:
    _, _, media, _ = model
    layouts = [laid_out(media, parts) for parts in (left, right)]
    seen: list[list[Any]] = []  # what a token is, in all that matters
    for layout in layouts:
        whole: list[Any] = layout.ids.tolist()
        for run in layout.runs:
            for i in range(run.count):
                whole[run.start + i] = (run.item.kind, run.item.grid, run.item.frames.tobytes(), run.first + i)
        seen.append(whole)
    keys = [layout.key_ids.tolist() for layout in layouts]

    def common(one: list[Any], other: list[Any]) -> int:
        pairs = zip(one, other, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))

    assert common(*keys) == common(*seen)


def test_a_forgotten_image_gets_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl.runtime.media.layout._MOST_NUMBERS", 2)
    numbers = ImageNumbers()
    given_out = [numbers.of(digest) for digest in (b"a", b"b", b"a", b"c", b"b", b"a")]
    assert given_out[0] == given_out[2]
    assert len(set(given_out)) == 5
    assert max(given_out) < -1


SIZES = st.tuples(st.integers(1, 90), st.integers(1, 90)).filter(lambda its: max(its) <= 30 * min(its))


@settings(max_examples=40, deadline=None)
@given(size=SIZES, mode=st.sampled_from(["RGB", "L", "RGBA", "P", "CMYK"]), seed=st.integers(0, 5))
def test_pixels_are_those_of_transformers(model: Any, size: tuple[int, int], mode: str, seed: int) -> None:
    _, _, media, module = model
    image = picture(seed, *size).convert(mode)
    made = MediaReader(media, "none", 10**6).item("image", image)
    theirs = processor(module.config)([image], return_tensors="pt")
    assert list(made.grid) == theirs["image_grid_thw"][0].tolist()
    ours = VisionTower(module.model.visual, media, 0).patches(made)
    torch.testing.assert_close(ours, theirs["pixel_values"], atol=1e-5, rtol=0)


def video(num_frames: int = 5) -> list[Image.Image]:
    return [picture(100 + i) for i in range(num_frames)]


def reference_patches(frames: list[Image.Image], media: MediaConfig) -> torch.Tensor:
    """By a loop over tokens, patches, colours, frames and rows."""
    pixels = np.stack([np.asarray(frame) for frame in frames]) / 255
    pixels = (pixels - np.array(media.video.mean)) / np.array(media.video.std)
    size, depth = media.patch_size, media.temporal_patch_size
    pixels = np.concatenate((pixels, *[pixels[-1:]] * (-len(frames) % depth)))
    moments, height, width = len(pixels) // depth, pixels.shape[1] // size, pixels.shape[2] // size
    made = []
    for t in range(moments):
        for block_y in range(height // 2):
            for block_x in range(width // 2):
                for y in (2 * block_y, 2 * block_y + 1):
                    for x in (2 * block_x, 2 * block_x + 1):
                        cut = pixels[
                            t * depth : (t + 1) * depth, y * size : (y + 1) * size, x * size : (x + 1) * size
                        ]
                        made.append(cut.transpose(3, 0, 1, 2).reshape(-1))
    return torch.tensor(np.stack(made), dtype=torch.float32)


@pytest.mark.parametrize("fps", [None, 2.0])
def test_videos_are_seen_as_by_transformers(model: Any, fps: float | None) -> None:
    architecture, path, media, module = model
    frames = video()
    grid = torch.tensor([[3, 6, 10]])
    pixels = reference_patches(frames, media)
    with Engine(str(path), device="cpu", max_total_tokens=1024, chunked_prefill_size=7) as engine:
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        ids = [5, 6, START]
        if media.splits_videos:
            for seconds in (0.5, 2.5, 4.0):
                text = f"<{seconds / (fps or 24.0):.1f} seconds>"
                ids += [*tokenizer.encode(text, add_special_tokens=False).tolist(), START, *[VIDEO] * 15, END]
        else:
            ids += [VIDEO] * 45
        ids += [END, 7, 8]
        whole = torch.tensor([ids])
        inputs: dict[str, Any] = {
            "input_ids": whole,
            "pixel_values_videos": pixels,
            "video_grid_thw": grid,
            "mm_token_type_ids": 2 * (whole == VIDEO).int(),
        }
        if architecture == "Qwen2_5_VLForConditionalGeneration" and fps is not None:
            inputs["second_per_grid_ts"] = torch.tensor([2 / fps])
        with torch.inference_mode():
            logits = module(**inputs).logits[0, :-1].float()
            mask = torch.ones_like(whole)
            out = module.generate(**inputs, attention_mask=mask, do_sample=False, max_new_tokens=5, pad_token_id=0)
        expected = torch.log_softmax(logits, -1).gather(1, whole[0, 1:, None])[:, 0]
        result = engine.generate(
            input_ids=[5, 6, *place(VIDEO), 7, 8],
            video_data={"frames": frames, "fps": fps},
            sampling_params={"temperature": 0.0, "max_new_tokens": 5},
            return_logprob=True,
            logprob_start_len=0,
        )
    given_out = torch.tensor([each[0] for each in result["meta_info"]["input_token_logprobs"][1:]])
    torch.testing.assert_close(given_out, expected, atol=1e-4, rtol=0)
    assert result["output_ids"] == out[0, len(ids) :].tolist()


def test_times_of_an_odd_number_of_frames(model: Any) -> None:
    _, _, media, _ = model
    frames = np.zeros((3, 8, 8, 3), np.uint8)
    assert times(media, MediaItem("video", frames, (2, 2, 2), 2, fps=2.0)) == [0.25, 1.0]


def test_the_hubs_older_files_are_read(tmp_path: Path) -> None:
    path = tiny_vision(tmp_path, "Qwen2_5_VLForConditionalGeneration")
    before = ModelConfig.from_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    text.pop("model_type")
    edit_json(path / "config.json", **text, text_config=...)
    preprocessor = json.loads((path / "preprocessor_config.json").read_text())
    sizes = preprocessor.pop("size")
    edit_json(
        path / "preprocessor_config.json",
        size=...,
        min_pixels=sizes["shortest_edge"],
        max_pixels=sizes["longest_edge"],
    )
    assert replace(ModelConfig.from_pretrained(path), path=before.path) == before


def test_embeddings_are_kept_up_to_a_bound(model: Any) -> None:
    _, _, media, module = model
    read = MediaReader(media, "none", 10**6).item
    one, other = (read("image", picture(seed)) for seed in (1, 2))
    places = torch.zeros(3, one.num_tokens, dtype=torch.int64)

    def embedded(tower: VisionTower, *items: MediaItem) -> int:
        for each in items:
            tower.encode(places, [MediaRun(0, each, 0, each.num_tokens)])
        return tower.num_runs

    assert embedded(VisionTower(module.model.visual, media, 1), one, one, other, one) == 3
    assert embedded(VisionTower(module.model.visual, media, 1 << 20), one, one, other, one, other) == 2


def test_random_weights_see(model: Any) -> None:
    _, path, _, _ = model
    with Engine(str(path), device="cpu", max_total_tokens=256, load_format="dummy") as engine:
        found = engine.generate(input_ids=place(), image_data=picture(1), sampling_params={"max_new_tokens": 2})
        assert found["meta_info"]["completion_tokens"] > 0


@pytest.mark.slow
def test_experts_may_be_transposed(tmp_path: Path) -> None:
    """As in the checkpoints of Qwen3-VL-30B-A3B."""
    path = tiny_vision(tmp_path, "Qwen3VLMoeForConditionalGeneration")
    asked = {
        "input_ids": place(),
        "image_data": picture(1),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 8},
    }
    outputs = []
    for _ in range(2):
        with Engine(str(path), device="cpu", max_total_tokens=256) as engine:
            outputs.append(engine.generate(**asked)["output_ids"])
        file = path / "model.safetensors"
        tensors = load_file(file)
        tensors |= {name: its.transpose(1, 2).contiguous() for name, its in tensors.items() if its.dim() == 3}
        save_file(tensors, file, metadata={"format": "pt"})
    assert outputs[0] == outputs[1]
