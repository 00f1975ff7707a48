"""Embeddings: the hidden states that transformers has, whatever else a step computes and however a prompt is cut."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sgl.errors import InvalidRequest
from sgl.runtime.batch import Float32Array
from sgl.runtime.engine import Engine
from sgl.runtime.scheduler.request import Pooling
from tests.tiny_models import CLASSES, tiny_checkpoint

OPTIONS: dict[str, Any] = {"dtype": "float32", "check_ledger": True, "random_seed": 1, "max_total_tokens": 4096}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 384, length).tolist() for length in lengths]


class Oracle:
    """transformers, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def embed(self, ids: list[int], pooling: Pooling, *, normalize: bool = False) -> Float32Array:
        with torch.no_grad():
            hidden = self._model.model(torch.tensor([ids])).last_hidden_state[0]
        found = (hidden[-1] if pooling == "last" else hidden.mean(0)).numpy()
        return found / np.linalg.norm(found) if normalize else found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tiny_checkpoint(tmp_path_factory.mktemp(family), family, with_tokenizer=True)
        return made[family]

    return folder


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def oracle(folders: Callable[[str], Path]) -> Oracle:
    return Oracle(folders("llama"))


@pytest.fixture(scope="module")
def engine(folders: Callable[[str], Path], device: str) -> Iterator[Engine]:
    """Prompts of more than 16 tokens are computed in several steps."""
    with Engine(str(folders("llama")), device=device, chunked_prefill_size=16, page_size=4, **OPTIONS) as engine:
        yield engine


def is_close(embedding: Any, expected: Float32Array) -> bool:
    return bool(np.allclose(np.array(embedding), expected, atol=2e-4, rtol=2e-4))


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_family_has_the_hidden_states_of_transformers(
    folders: Callable[[str], Path], device: str, family: str, pooling: Pooling
) -> None:
    oracle, prompts = Oracle(folders(family)), prompts_of(1, 1, 2, 17, 60)
    with Engine(str(folders(family)), device=device, **OPTIONS) as engine:
        results = engine.encode(input_ids=prompts, pooling=pooling, normalize=False)
    for ids, result in zip(prompts, results, strict=True):
        assert is_close(result["embedding"], oracle.embed(ids, pooling))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_cut_into_chunks_has_one_embedding(engine: Engine, oracle: Oracle, pooling: Pooling) -> None:
    for ids in prompts_of(2, 1, 15, 16, 17, 33, 100, 200):
        found = engine.encode(input_ids=ids, pooling=pooling, normalize=False)
        assert is_close(found["embedding"], oracle.embed(ids, pooling))
        assert found["meta_info"]["prompt_tokens"] == len(ids)
        assert found["meta_info"]["completion_tokens"] == 0


def test_a_mean_takes_no_cached_prefix_and_leaves_its_pages(engine: Engine, oracle: Oracle) -> None:
    shared, *tails = prompts_of(3, 40, 5, 9)
    engine.flush_cache()
    first = engine.encode(input_ids=shared + tails[0], pooling="mean", normalize=False)
    again = engine.encode(input_ids=shared + tails[0], pooling="mean", normalize=False)
    assert first["meta_info"]["cached_tokens"] == again["meta_info"]["cached_tokens"] == 0
    assert is_close(again["embedding"], oracle.embed(shared + tails[0], "mean"))
    last = engine.encode(input_ids=shared + tails[1], pooling="last", normalize=False)
    assert last["meta_info"]["cached_tokens"] == 40
    assert is_close(last["embedding"], oracle.embed(shared + tails[1], "last"))


def test_embeddings_beside_generations_change_neither(engine: Engine, oracle: Oracle) -> None:
    prompts = prompts_of(4, *range(1, 60, 7))
    alone = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    expected = {pooling: [oracle.embed(ids, pooling) for ids in prompts] for pooling in POOLINGS}
    found: dict[Any, Any] = {}

    def generate() -> None:
        found["generate"] = engine.generate(input_ids=prompts, sampling_params=GREEDY)

    def embed(pooling: Pooling) -> None:
        found[pooling] = engine.encode(input_ids=prompts, pooling=pooling, normalize=False)

    for _ in range(3):
        engine.flush_cache()
        threads = [threading.Thread(target=generate)]
        threads += [threading.Thread(target=embed, args=(pooling,)) for pooling in POOLINGS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [one["output_ids"] for one in found["generate"]] == [one["output_ids"] for one in alone]
        for pooling in POOLINGS:
            for result, vector in zip(found[pooling], expected[pooling], strict=True):
                assert is_close(result["embedding"], vector)


def test_a_retracted_mean_begins_anew(folders: Callable[[str], Path], oracle: Oracle) -> None:
    """The pages hold a few of these prompts, beside outputs that grow."""
    prompts = prompts_of(5, 80, 90, 70, 85)
    options = {**OPTIONS, "max_total_tokens": 300, "chunked_prefill_size": 8, "page_size": 4}
    grown = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
    with Engine(str(folders("llama")), device="cpu", **options) as engine:
        for _ in range(50):
            others = {"input_ids": prompts_of(6, 40, 40, 40), "sampling_params": grown}
            thread = threading.Thread(target=engine.generate, kwargs=others)
            thread.start()
            found = engine.encode(input_ids=prompts, pooling="mean", normalize=False)
            thread.join()
            for ids, result in zip(prompts, found, strict=True):
                assert is_close(result["embedding"], oracle.embed(ids, "mean"))
            if any(result["meta_info"]["num_retractions"] for result in found):
                return
    pytest.fail("no prompt was retracted, so this showed nothing")


def test_texts_are_embedded_and_vectors_have_length_one(engine: Engine, oracle: Oracle) -> None:
    text = "hello there"
    ids = engine.get_tokenizer().encode(text)
    found = engine.encode(text)
    assert is_close(found["embedding"], oracle.embed(ids, "last", normalize=True))
    assert np.linalg.norm(found["embedding"]) == pytest.approx(1.0, abs=1e-5)
    (listed,) = engine.encode([text])
    assert is_close(listed["embedding"], np.array(found["embedding"], np.float32))


def test_dimensions_keep_the_first_numbers_and_the_length(engine: Engine) -> None:
    whole = np.array(engine.encode("hello there", normalize=False)["embedding"])
    cut = engine.encode("hello there", dimensions=10)["embedding"]
    assert np.allclose(cut, whole[:10] / np.linalg.norm(whole[:10]), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "a", "pooling": "first"}, "pooling must be 'last' or 'mean', not 'first'"),
        ({"prompt": "a", "dimensions": 0}, "dimensions must be"),
        ({"prompt": "a", "dimensions": 65}, "dimensions must be"),
        ({"prompt": "a", "dimensions": True}, "dimensions must be"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the list of prompts is empty"),
        ({}, "give either prompt or input_ids"),
        ({"input_ids": [384]}, "token id 384 is out of range"),
        ({"input_ids": [5] * 300}, "256"),
        ({"prompt": ["a", ""]}, "the prompt is empty"),
    ],
)
def test_mistakes_are_named(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.encode(**arguments)


def test_generate_takes_no_pooling(engine: Engine) -> None:
    with pytest.raises(TypeError, match="pooling"):
        engine.generate("a", pooling="mean")  # type: ignore[call-arg]
