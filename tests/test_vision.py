"""Models that see, against transformers: the same tokens and logprobs, however prompts with images are cut, cached,
forked or retracted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import sgl
from sgl.errors import ConfigError
from sgl.runtime.engine import Engine
from tests.tiny_vision import ARCHITECTURES, PLACE, Oracle, picture, place, tiny_vision, words

MAX_NEW = 8
GREEDY = {"temperature": 0.0, "max_new_tokens": MAX_NEW}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "max_running_requests": 8,
    "max_total_tokens": 1024,
    "schedule_conservativeness": 0.01,
    "check_ledger": True,
}
Prompt = tuple[list[int], list[Image.Image]]


def made_prompts() -> list[Prompt]:
    """With none, one and several images; some share beginnings that end within an image or behind it."""
    rng = random.Random(0)
    stem, red, wide = words(rng, 11), picture(1), picture(2, 60, 17)
    twin = picture(3)  # as large as red
    return [
        ([*stem, *place(), *words(rng, 9)], [red]),
        ([*stem, *place(), *words(rng, 4)], [red]),
        ([*stem, *place(), *words(rng, 9)], [twin]),
        ([*stem, *place(), *words(rng, 3), *place(), *words(rng, 2)], [red, wide]),
        ([*place(), *place(), 5], [wide, wide]),
        (words(rng, 30), []),
    ]


@pytest.mark.costly
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_and_logprobs_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    path = tiny_vision(tmp_path, architecture)
    oracle, prompts = Oracle(path, architecture), made_prompts()
    expected = [oracle.greedy(*prompt, MAX_NEW) for prompt in prompts]
    logprobs = [oracle.logprobs(*prompt) for prompt in prompts]

    def check(engine: Engine, rows: list[int]) -> None:
        results = engine.generate(
            input_ids=[prompts[row][0] for row in rows],
            image_data=[prompts[row][1] for row in rows],
            sampling_params=GREEDY,
            return_logprob=True,
            logprob_start_len=0,
        )
        for row, result in zip(rows, results, strict=True):
            given = torch.tensor([each[0] for each in result["meta_info"]["input_token_logprobs"][1:]])
            torch.testing.assert_close(given, logprobs[row], atol=1e-4, rtol=0)
            assert result["output_ids"] == expected[row]

    def check_tokens(engine: Engine, rows: list[int]) -> None:
        for row in rows:
            ids, images = prompts[row]
            assert (
                engine.generate(input_ids=ids, image_data=images, sampling_params=GREEDY)["output_ids"]
                == expected[row]
            )

    every = list(range(len(prompts)))
    ways: list[tuple[dict[str, Any], list[int]]] = [
        ({"chunked_prefill_size": -1}, every),
        ({"chunked_prefill_size": 1, "page_size": 4}, [0, 3]),
        ({"chunked_prefill_size": 7, "page_size": 1, "disable_overlap_schedule": False}, every),
        ({"chunked_prefill_size": 64, "page_size": 4, "max_total_tokens": 80}, every),
    ]
    for options, rows in ways:
        with Engine(str(path), **{**OPTIONS, **options}) as engine:
            check(engine, rows)
            if "max_total_tokens" in options:
                assert engine.get_server_info()["internal_states"][0]["retractions"] > 0
            check_tokens(engine, rows[::-1])  # cached
            ids, images = prompts[3]
            forked = engine.generate(input_ids=ids, image_data=images, sampling_params={**GREEDY, "n": 2})
            assert [result["output_ids"] for result in forked] == [expected[3]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "ranks"),
    [
        pytest.param("Qwen2_5_VLForConditionalGeneration", {"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param("Qwen3VLMoeForConditionalGeneration", {"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param("Qwen2_5_VLForConditionalGeneration", {"pp_size": 3}, marks=pytest.mark.slow),
        pytest.param("Qwen2_5_VLForConditionalGeneration", {"tp_size": 2, "pp_size": 2}, marks=pytest.mark.slow),
        ("Qwen3VLForConditionalGeneration", {"pp_size": 2}),
    ],
)
def test_ranks_see_what_one_process_sees(architecture: str, ranks: dict[str, int], tmp_path: Path) -> None:
    """The first one alone has the tower."""
    path = tiny_vision(tmp_path, architecture, text={"num_hidden_layers": 4})
    oracle, prompts = Oracle(path, architecture), made_prompts()
    with Engine(str(path), **{**OPTIONS, **ranks, "chunked_prefill_size": 7, "page_size": 4}) as engine:
        results = engine.generate(
            input_ids=[ids for ids, _ in prompts],
            image_data=[images for _, images in prompts],
            sampling_params=GREEDY,
            return_logprob=True,
            logprob_start_len=0,
        )
        assert engine.get_server_info()["internal_states"][0]["encoded_images"] == 3
    for prompt, result in zip(prompts, results, strict=True):
        assert result["output_ids"] == oracle.greedy(*prompt, MAX_NEW)
        given = torch.tensor([each[0] for each in result["meta_info"]["input_token_logprobs"][1:]])
        torch.testing.assert_close(given, oracle.logprobs(*prompt), atol=1e-4, rtol=0)


QWEN3 = "Qwen3VLForConditionalGeneration"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision(tmp_path_factory.mktemp("sees"), QWEN3)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder, QWEN3)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), **{**OPTIONS, "skip_tokenizer_init": False}) as engine:
        yield engine
        assert engine.check_ledger() == []


def test_a_first_stage_without_all_layers_that_the_tower_adds_to_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"pp_size=2: the first stage .* 1 layers, .* behind the first 2"):
        Engine(str(folder), **OPTIONS, pp_size=2)


def num_encoded(engine: Engine) -> int:
    return int(engine.get_server_info()["internal_states"][0]["encoded_images"])


CHOICES = ["one", "two more", "three"]


@sgl.function
def ask(s: Any, question: str) -> None:
    s += sgl.user(sgl.image(picture(1)) + question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=6, temperature=0))
    left, right = s.fork(2)
    left += sgl.user("and then?") + sgl.assistant(sgl.gen("then", max_tokens=4, temperature=0))
    right += sgl.user(sgl.image(picture(2, 60, 17)) + "and this?")
    right += sgl.assistant(sgl.select("which", choices=CHOICES))
    s += left["then"] + right["which"]


def test_programs_see(engine: Engine, oracle: Oracle) -> None:
    def ids(text: str) -> list[int]:
        return list(oracle.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(tokens: list[int]) -> str:
        return str(oracle.tokenizer.decode(tokens, skip_special_tokens=True))

    state = ask.run("what <|image_pad|>?", backend=engine)
    spelled = engine.tokenizer.encode("what <|image_pad|>?", add_special_tokens=False, allow_special=False).tolist()
    start = [*ids(f"<|im_start|>user\n{PLACE}"), *spelled, *ids("<|im_end|>\n<|im_start|>assistant\n")]
    images = [picture(1)]
    answer = oracle.greedy(start, images, 6)
    assert state["answer"] == text(answer)
    both = [*start, *answer, *ids("<|im_end|>\n<|im_start|>user\n")]
    left = [*both, *ids("and then?<|im_end|>\n<|im_start|>assistant\n")]
    right = [*both, *ids(f"{PLACE}and this?<|im_end|>\n<|im_start|>assistant\n")]
    images = [*images, picture(2, 60, 17)]
    scores = []
    for choice in map(ids, CHOICES):
        scores.append(float(oracle.logprobs([*right, *choice], images)[-len(choice) :].mean()))
    assert state.text().endswith(text(oracle.greedy(left, images[:1], 4)) + CHOICES[scores.index(max(scores))])
    assert num_encoded(engine) == 2
    usage = state.get_meta_info("answer")["usage"]
    assert usage["cached_tokens"] == 0
    again = ask.run("what <|image_pad|>?", backend=engine)
    assert again.text() == state.text()
    assert again.get_meta_info("answer")["usage"]["cached_tokens"] > 0
    assert num_encoded(engine) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gpu_sees_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    """In bfloat16, with and without graphs: the same logprobs as in float32, as far as 16 bits go."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    wide = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}
    wide |= {"head_dim": 64} if "Qwen3" in architecture else {}
    width = {"hidden_size": 256} if architecture.startswith("Qwen2VL") else {"out_hidden_size": 256}
    path = tiny_vision(tmp_path, architecture, text=wide, **width)
    oracle, prompts = Oracle(path, architecture), made_prompts()
    expected = [oracle.logprobs(*prompt) for prompt in prompts]
    options = {**OPTIONS, "device": "cuda", "dtype": "bfloat16", "max_total_tokens": 4096}
    for more in ({"disable_cuda_graph": True}, {}, {"chunked_prefill_size": 16}):
        with Engine(str(path), **{**options, **more}) as engine:
            for _ in ("new", "cached"):
                results = engine.generate(
                    input_ids=[ids for ids, _ in prompts],
                    image_data=[images for _, images in prompts],
                    sampling_params={"temperature": 0.0, "max_new_tokens": MAX_NEW, "ignore_eos": True},
                    return_logprob=True,
                    logprob_start_len=0,
                )
                for result, wanted, (ids, images) in zip(results, expected, prompts, strict=True):
                    meta = result["meta_info"]
                    given = torch.tensor([each[0] for each in meta["input_token_logprobs"][1:]])
                    assert (given - wanted).abs().mean() < 0.1
                    # decodes, behind images: what was written has the logprobs that it should have
                    whole = oracle.logprobs([*ids, *result["output_ids"]], images)[len(wanted) :]
                    written = torch.tensor([each[0] for each in meta["output_token_logprobs"]])
                    assert (written - whole).abs().mean() < 0.15
            plain = {"temperature": 0.0, "max_new_tokens": MAX_NEW, "ignore_eos": True}
            ids, images = prompts[3]
            alone = engine.generate(input_ids=ids, image_data=images, sampling_params=plain)["output_ids"]
            assert len(alone) == MAX_NEW
            assert num_encoded(engine) == 3
