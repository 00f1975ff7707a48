"""Decoders that transformers' modules serve, against transformers itself: the same tokens and logprobs, however the
requests are cut, cached, forked or retracted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sgl.errors import ConfigError
from sgl.runtime.engine import Engine
from sgl.runtime.model.choice import read_config
from tests.tiny_models import edit_json
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer
from tests.transformers_reference import Reference

ALWAYS = {
    "DeepseekV3ForCausalLM",
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "MixtralForCausalLM",
    "OPTForCausalLM",
    "PhiForCausalLM",
    "Qwen3MoeForCausalLM",
}
MAX_NEW = 10
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "model_impl": "transformers",
    "max_running_requests": 8,
    "max_total_tokens": 1024,
    "schedule_conservativeness": 0.01,
    "check_ledger": True,
}


def made_prompts() -> list[list[int]]:
    """Different lengths, some with a long beginning in common, one the beginning of another; longer than windows."""
    rng = random.Random(0)
    stem = [rng.randrange(3, 384) for _ in range(70)]
    made = [stem[:n] + [rng.randrange(3, 384) for _ in range(k)] for n, k in ((30, 3), (30, 9), (13, 1), (0, 5))]
    return [*made, stem, stem[:24]]


@pytest.mark.costly
@pytest.mark.parametrize(
    "architecture",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES],
)
def test_tokens_and_logprobs_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, architecture, **ARCHITECTURES[architecture])
    check_served(path, architecture, "transformers")


@pytest.mark.parametrize("context_length", [128, 256])
def test_phi_moe_turns_by_the_length_of_the_context(context_length: int, tmp_path: Path) -> None:
    short = {"short_factor": [1.0 + its / 8 for its in range(8)], "short_mscale": 1.2}
    long = {"short_factor": [2.0 + its for its in range(8)], "short_mscale": 1.3}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
    rope |= {"long_factor": long["short_factor"], "long_mscale": long["short_mscale"]}
    for name, its in (("model", short), ("oracle", short if context_length == 128 else long)):
        # transformers takes the short factors for any length, and the longest sequence of a step for the other one
        fields = {**ARCHITECTURES["PhimoeForCausalLM"], "rope_parameters": {**rope, **its}}
        tiny_transformer(tmp_path / name, "PhimoeForCausalLM", **fields)
    edit_json(tmp_path / "model" / "config.json", architectures=["PhiMoEForCausalLM"])  # as Microsoft writes it
    reference = Reference(tmp_path / "oracle", "PhimoeForCausalLM")
    with Engine(str(tmp_path / "model"), **OPTIONS, context_length=context_length) as engine:
        for prompt in made_prompts()[:2]:
            params = {"temperature": 0.0, "max_new_tokens": MAX_NEW}
            result = engine.generate(
                input_ids=prompt, sampling_params=params, return_logprob=True, logprob_start_len=0
            )
            assert result["output_ids"] == reference.greedy(prompt, MAX_NEW)
            given = torch.tensor([each[0] for each in result["meta_info"]["input_token_logprobs"][1:]])
            torch.testing.assert_close(given, reference.logprobs(prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "published"), [("Exaone", "ExaoneForCausalLM"), ("InternLM3", "InternLM3ForCausalLM")]
)
def test_types_that_a_class_of_another_family_serves(name: str, published: str, tmp_path: Path) -> None:
    """Whose fields and tensors have names of their own; by their makers' class, and by transformers'."""
    config_class = getattr(transformers, f"{name}Config", None)
    if config_class is None:
        pytest.skip(f"this transformers has no {name}")
    path = tiny_transformer(tmp_path, "LlamaForCausalLM", config_class)
    reference, prompt = Reference(path), made_prompts()[0]
    for architecture in ("LlamaForCausalLM", published):
        edit_json(path / "config.json", architectures=[architecture])
        with Engine(str(path), **{**OPTIONS, "model_impl": "auto"}) as engine:
            params = {"temperature": 0.0, "max_new_tokens": MAX_NEW}
            result = engine.generate(input_ids=prompt, sampling_params=params)
            assert result["output_ids"] == reference.greedy(prompt, MAX_NEW)


def test_llama_4_is_served_within_its_chunks(tmp_path: Path) -> None:
    architecture = "Llama4ForConditionalGeneration"
    path = tiny_transformer(tmp_path, architecture, **ARCHITECTURES[architecture])
    assert read_config(str(path), "auto").context_length == 127
    with pytest.raises(ConfigError, match="context_length=128 is longer than the model's 127"):
        Engine(str(path), **OPTIONS, context_length=128)
    check_served(path, architecture, "transformers")


def check_served(path: Path, architecture: str, model_impl: str) -> None:
    """Against transformers: whole, cut into chunks, cached, forked, retracted."""
    reference, prompts = Reference(path, architecture), made_prompts()
    expected = [reference.greedy(prompt, MAX_NEW) for prompt in prompts]
    logprobs = [reference.logprobs(prompt) for prompt in prompts]
    greedy = {"temperature": 0.0, "max_new_tokens": MAX_NEW}

    def check(engine: Engine, rows: list[int]) -> None:
        results = engine.generate(
            input_ids=[prompts[row] for row in rows],
            sampling_params=greedy,
            return_logprob=True,
            logprob_start_len=0,
        )
        for row, result in zip(rows, results, strict=True):
            assert result["output_ids"] == expected[row]
            given = torch.tensor([each[0] for each in result["meta_info"]["input_token_logprobs"][1:]])
            torch.testing.assert_close(given, logprobs[row], atol=1e-4, rtol=0)

    # fewer rows where more steps are taken
    ways: list[tuple[dict[str, Any], list[int]]] = [
        ({"chunked_prefill_size": -1}, [0, 1, 2, 3, 4, 5]),
        ({"chunked_prefill_size": 1, "page_size": 4}, [0, 3]),
        ({"chunked_prefill_size": 7, "page_size": 1}, [0, 1, 2, 3]),
        ({"chunked_prefill_size": 64, "page_size": 4, "max_total_tokens": 84}, [0, 1, 2, 3, 5]),
    ]
    for options, rows in ways:
        with Engine(str(path), **{**OPTIONS, "model_impl": model_impl, **options}) as engine:
            assert engine.config.model_impl == model_impl
            check(engine, rows)
            if "max_total_tokens" in options:
                windows = engine._started.runner._model.attention_shape(4).windows
                if None in windows and all(len(expected[row]) == MAX_NEW for row in rows):
                    assert engine.get_server_info()["internal_states"][0]["retractions"] > 0
                check(engine, [4])
                continue
            check(engine, rows[::-1])  # cached
            forked = engine.generate(input_ids=prompts[0], sampling_params={**greedy, "n": 2})
            assert [result["output_ids"] for result in forked] == [expected[0]] * 2
