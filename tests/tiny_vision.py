"""Tiny random checkpoints that see, with a tokenizer, a chat template and a preprocessor; and what transformers makes
of them and an image."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AddedToken
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging

from tests.tiny_models import byte_tokenizer

VOCAB_SIZE = 400
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>")
START, END, IMAGE, VIDEO = 384, 385, 386, 387
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}" + PLACE + "{% elif 'text' in part %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TOWER = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
}
VISION: dict[str, dict[str, Any]] = {
    "Qwen2VLForConditionalGeneration": {
        "text_config": {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
        "vision_config": {
            "depth": 2,
            "num_heads": 2,
            "patch_size": 4,
            "embed_dim": 32,
            "mlp_ratio": 2,
            "hidden_size": 64,
        },
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
        "vision_config": {**TOWER, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 3},
    },
    "Qwen3VLForConditionalGeneration": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        "vision_config": {**TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    },
}
VISION["Qwen3VLMoeForConditionalGeneration"] = {
    "text_config": {
        **VISION["Qwen3VLForConditionalGeneration"]["text_config"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "vision_config": VISION["Qwen3VLForConditionalGeneration"]["vision_config"],
}
SELDOM = "Qwen2VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"
ARCHITECTURES = [pytest.param(name, marks=pytest.mark.slow) if name in SELDOM else name for name in VISION]
SIZE = {"shortest_edge": 8 * 8 * 2, "longest_edge": 8 * 8 * 40}


def tiny_vision(path: Path, architecture: str, *, text: dict[str, Any] | None = None, **vision: Any) -> Path:
    """Write a checkpoint. text, vision: fields of the language model and of the tower."""
    fields = VISION[architecture]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(
        text_config={**fields["text_config"], **(text or {})},
        vision_config={**fields["vision_config"], **vision},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = model_class(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.3 * noise + (1.0 if "norm" in name or "ln" in name else 0.0))
            elif "visual" in name:
                parameter.copy_(noise * parameter[0].numel() ** -0.5 * 2.0)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 * (4.0 if "embed" in name else 1.5))
    logging.disable_progress_bar()
    model.save_pretrained(path)
    tokenizer = byte_tokenizer(384)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    processor(config).save_pretrained(path)
    of_videos = {"size": {"shortest_edge": 128, "longest_edge": 8 * 8 * 400}, "patch_size": 4}
    (path / "video_preprocessor_config.json").write_text(json.dumps(of_videos))
    return path


def processor(config: Any) -> Any:
    """transformers' own, in Pillow."""
    return Qwen2VLImageProcessorPil(size=SIZE, patch_size=config.vision_config.patch_size)


def picture(seed: int, width: int = 40, height: int = 24) -> Image.Image:
    """Smooth noise."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )


class Oracle:
    """A checkpoint in transformers. Prompts have each placeholder once."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.model: Any = getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32).eval()
        self.processor = processor(self.model.config)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def inputs(self, prompt: list[int], images: list[Image.Image]) -> dict[str, torch.Tensor]:
        """What the model takes."""
        if not images:
            return {"input_ids": torch.tensor([prompt])}
        made = self.processor(images, return_tensors="pt")
        counts = (made["image_grid_thw"].prod(1) // 4).tolist()
        ids: list[int] = []
        for token in prompt:
            ids += [token] * (counts.pop(0) if token == IMAGE else 1)
        whole = torch.tensor([ids])
        return {"input_ids": whole, "mm_token_type_ids": (whole == IMAGE).int(), **made}

    def greedy(self, prompt: list[int], images: list[Image.Image], max_new_tokens: int) -> list[int]:
        inputs = self.inputs(prompt, images)
        mask = torch.ones_like(inputs["input_ids"])
        with torch.inference_mode():
            out = self.model.generate(
                **inputs, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0
            )
        return list(out[0, inputs["input_ids"].shape[1] :].tolist())

    def logprobs(self, prompt: list[int], images: list[Image.Image]) -> torch.Tensor:
        """[n - 1] of each token given those before it."""
        inputs = self.inputs(prompt, images)
        with torch.inference_mode():
            logits = self.model(**inputs).logits[0, :-1].float()
        return torch.log_softmax(logits, -1).gather(1, inputs["input_ids"][0, 1:, None])[:, 0]


def words(rng: random.Random, count: int) -> list[int]:
    """Ids of text."""
    return [rng.randrange(3, 384) for _ in range(count)]


def place(token: int = IMAGE) -> list[int]:
    """A placeholder between its marks."""
    return [START, token, END]
