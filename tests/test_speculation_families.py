"""Speculation changes no token whatever layers a model has: sinks and windows, mixtures of experts, latent attention,
chunks, images."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sgl import Engine
from tests.test_speculation import Oracle, recorded, speculate
from tests.tiny_models import CLASSES, byte_tokenizer, tiny_checkpoint
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer
from tests.tiny_vision import VISION, picture, place, tiny_vision

FAMILIES = [
    "gpt-oss",
    "DeepseekV3ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "gemma3",
            "qwen3-moe",
            "Cohere2ForCausalLM",
            "DeepseekV2ForCausalLM",
            "Llama4ForCausalLM",
            "OPTForCausalLM",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
        )
    ),
]
KINDS: list[dict[str, Any]] = [
    {},
    {"regex": "(ab|cd){3,9}[0-9]+"},
    {"stop": ["e", "qu"], "min_new_tokens": 2},
    {"temperature": 1.2, "top_k": 9, "logit_bias": {"70": 3.0}},
    {"temperature": 0.8, "n": 2},
    {"presence_penalty": 0.5},
]


def checkpoint(path: Path, family: str) -> Path:
    if family in VISION:
        return tiny_vision(path, family)
    if family in CLASSES:
        return tiny_checkpoint(path, family, with_tokenizer=True)
    byte_tokenizer(384).save_pretrained(tiny_transformer(path, family, **ARCHITECTURES[family]))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_random_drafters_change_no_token_of_any_family(family: str, tmp_path: Path) -> None:
    """Also over prompts in chunks, and from the cache."""
    path, rng = checkpoint(tmp_path, family), random.Random(5)
    prompts, images, params = [], [], []
    for number in range(12):
        words = [rng.randrange(3, 250) for _ in range(rng.randint(2, 40))]
        seen = family in VISION and number % 3 > 0
        prompts.append(words + place() + words[:4] if seen else words)
        images.append([picture(number)] if seen else None)
        kind = KINDS[number % len(KINDS)]
        params.append({"temperature": 0.0, "seed": number, "max_new_tokens": 30, "ignore_eos": True, **kind})
    given = {"image_data": images} if family in VISION else {}

    def answers(engine: Engine) -> list[Any]:
        results = engine.generate(input_ids=prompts, sampling_params=params, **given)
        return [(each["output_ids"], each["text"], each["meta_info"]["finish_reason"]) for each in results]

    options: dict[str, Any] = {"chunked_prefill_size": 16, "page_size": 4, "max_running_requests": 6}
    with Engine(path, **options, check_ledger=True, speculative_algorithm="off") as engine:
        with recorded(engine) as outputs:
            expected = answers(engine)
        for seed in range(2):
            speculate(engine, [Oracle(outputs, 0.2, seed)])
            assert answers(engine) == expected
        counters = engine._scheduler.counters
        assert 50 < counters.verified_tokens < counters.drafted_tokens
