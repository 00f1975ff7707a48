"""The engine against transformers: the same tokens and logprobs, however the requests are batched, cut or cached."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl.runtime.engine import Engine
from tests.pages import in_whole_pages
from tests.tiny_models import tiny_checkpoint
from tests.transformers_reference import Reference

REAL = ["stories260K", "stories260K-qwen2", "babyllama-105"]
TINY: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-mqa-llama3-rope": {
        "family": "llama",
        "num_key_value_heads": 1,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral-window": {"family": "mistral", "sliding_window": 24},
    "qwen2-untied": {"family": "qwen2", "tie_word_embeddings": False},
    "qwen3-yarn": {
        "family": "qwen3",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
}


@pytest.fixture(scope="module", params=[*REAL, *TINY])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    if request.param in REAL:
        checkpoint: Callable[[str], Path] = request.getfixturevalue("checkpoint")
        return Reference(checkpoint(request.param))
    folder = tmp_path_factory.mktemp(request.param)
    return Reference(tiny_checkpoint(folder, **TINY[request.param]))


@pytest.fixture
def prompts(reference: Reference) -> list[list[int]]:
    """Different lengths, some with a long beginning in common, one the beginning of another."""
    rng = random.Random(0)
    vocab = reference.model.config.vocab_size
    stem = [rng.randrange(3, vocab) for _ in range(70)]
    made = [stem[:n] + [rng.randrange(3, vocab) for _ in range(k)] for n, k in ((70, 3), (70, 9), (33, 1), (0, 5))]
    return [*made, stem[:48], [rng.randrange(3, vocab)]]


def open_engine(reference: Reference, device: str = "cpu", **options: Any) -> Engine:
    options = {"max_total_tokens": 4096, "max_running_requests": 8, "check_ledger": True, **options}
    return Engine(
        str(reference.path),
        device=device,
        dtype="float32",
        attention_backend="torch" if device == "cuda" else None,
        skip_tokenizer_init=True,
        **options,
    )


@pytest.fixture
def engine(reference: Reference, device: str) -> Iterator[Engine]:
    with open_engine(reference, device) as engine:
        yield engine


MAX_NEW = 24
GREEDY = {"temperature": 0.0, "max_new_tokens": MAX_NEW}


def generate(engine: Engine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    return [
        result["output_ids"] for result in engine.generate(input_ids=prompts, sampling_params={**GREEDY, **params})
    ]


def test_one_by_one_cached_and_together_give_the_tokens_of_transformers(
    reference: Reference, engine: Engine, prompts: list[list[int]]
) -> None:
    expected = [reference.greedy(prompt, MAX_NEW) for prompt in prompts]
    single = [engine.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"] for prompt in prompts]
    assert single == expected
    assert generate(engine, prompts) == expected  # every prompt is in the cache by now
    assert engine.flush_cache()
    assert generate(engine, prompts) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 1},
        {"chunked_prefill_size": 7, "page_size": 1},
        {"chunked_prefill_size": 64, "page_size": 4, "disable_overlap_schedule": False},
        {"chunked_prefill_size": -1, "disable_radix_cache": True},
        {"max_running_requests": 2, "page_size": 8, "schedule_policy": "fcfs", "disable_overlap_schedule": False},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_no_setting_changes_a_token(
    reference: Reference, prompts: list[list[int]], device: str, options: dict[str, Any]
) -> None:
    with open_engine(reference, device, **options) as engine:
        assert generate(engine, prompts) == [reference.greedy(prompt, MAX_NEW) for prompt in prompts]


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 7, "page_size": 4}], ids=["whole", "chunked"])
def test_plain_torch_gives_the_same_tokens(
    reference: Reference, prompts: list[list[int]], options: dict[str, Any]
) -> None:
    with open_engine(reference, **options) as engine:
        assert engine.config.attention_backend == "torch"
        assert generate(engine, prompts) == [reference.greedy(prompt, MAX_NEW) for prompt in prompts]


def test_retracted_requests_resume_with_the_same_tokens(
    reference: Reference, prompts: list[list[int]], device: str
) -> None:
    options = {"page_size": 4, "max_total_tokens": 160, "schedule_conservativeness": 0.01}
    with open_engine(reference, device, **options) as engine:
        many = [prompts[0][:20], prompts[3], prompts[4][:30], prompts[5], prompts[2][:25], prompts[1][-12:]]
        expected = [reference.greedy(prompt, 40) for prompt in many]
        assert generate(engine, many, max_new_tokens=40) == expected
        if all(len(ids) == 40 for ids in expected):
            assert engine.get_server_info()["internal_states"][0]["retractions"] > 0


def test_forked_samples_share_the_prompt(reference: Reference, engine: Engine, prompts: list[list[int]]) -> None:
    results = engine.generate(input_ids=prompts[0], sampling_params={**GREEDY, "n": 4})
    assert [result["output_ids"] for result in results] == [reference.greedy(prompts[0], MAX_NEW)] * 4
    assert sum(result["meta_info"]["cached_tokens"] for result in results) == 3 * in_whole_pages(
        engine, len(prompts[0]) - 1
    )


@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 7, "page_size": 4}], ids=["whole", "chunked"])
@pytest.mark.parametrize("start", [0, 1, 40])
def test_prompt_logprobs_are_those_of_transformers(
    reference: Reference, prompts: list[list[int]], device: str, start: int, options: dict[str, Any]
) -> None:
    with open_engine(reference, device, **options) as engine:
        for _ in range(2):  # the second time the prompt is cached
            for prompt in (prompts[0], prompts[1]):
                result = engine.generate(
                    input_ids=prompt,
                    sampling_params={**GREEDY, "max_new_tokens": 3},
                    return_logprob=True,
                    logprob_start_len=start,
                )
                entries = result["meta_info"]["input_token_logprobs"]
                assert [entry[1] for entry in entries] == prompt[start:]
                assert entries[0][0] is None
                expected = reference.logprobs(prompt)[start:]
                got = torch.tensor([entry[0] for entry in entries[1:]])
                assert torch.allclose(got, expected, atol=1e-4)
                after = [*prompt, *result["output_ids"]]
                expected = reference.logprobs(after)[len(prompt) - 1 :]
                got = torch.tensor([entry[0] for entry in result["meta_info"]["output_token_logprobs"]])
                assert torch.allclose(got, expected, atol=1e-4)


def test_scores_are_the_logprobs_of_each_candidate_after_the_prefix(
    reference: Reference, engine: Engine, prompts: list[list[int]]
) -> None:
    prefix = prompts[0]
    candidates = [prompts[3], prompts[3][:2], prompts[5], prompts[5]]
    before = engine.get_server_info()["internal_states"][0]
    scores = engine.score(prefix, candidates)
    after = engine.get_server_info()["internal_states"][0]
    assert after["steps"] - before["steps"] == 2  # the prefix with the first candidate, then all the others
    assert after["cached_tokens"] - before["cached_tokens"] == 3 * in_whole_pages(engine, len(prefix) - 1)
    for candidate, score in zip(candidates, scores, strict=True):
        expected = reference.logprobs([*prefix, *candidate])[len(prefix) - 1 :]
        assert score.token_ids == candidate
        assert torch.allclose(torch.tensor(score.logprobs), expected, atol=1e-4)
