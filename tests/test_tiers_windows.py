"""Copies of windowed pages beside those of all tokens: whoever goes on from a copied prefix finds what it sees."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiers_soak import Episode
from sgl.runtime.engine import Engine
from tests import test_tiers
from tests.mock_runner import Mixed
from tests.scheduler_driver import Driver
from tests.test_tiers import PROMPTS, num_loads, run_one, settle
from tests.test_tiers_engine import OPTIONS, answers, cached, eager, ids, logprobs, tiers_of
from tests.tiny_models import tiny_checkpoint


def tiered(**fields: object) -> Driver:
    defaults: dict[str, object] = {"window": Mixed(9), "num_window_pages": 60, "host_window_pages": 100}
    return test_tiers.tiered(**{**defaults, **fields})


@pytest.mark.parametrize("lateness", [0.0, 0.9])
def test_a_prefix_comes_back_with_what_its_end_sees(lateness: float) -> None:
    driver = tiered(lateness=lateness)
    for uid, prompt in enumerate(PROMPTS):
        assert run_one(driver, uid, prompt).cached_len == 0
    for uid, prompt in enumerate(PROMPTS, 10):
        assert run_one(driver, uid, [*prompt, 1, 2, 3]).cached_len == 40
    assert num_loads(driver) >= 4
    settle(driver)
    driver.check()


def test_windowed_pages_alone_come_back_to_pages_that_stayed() -> None:
    driver = tiered(num_pages=100, num_window_pages=24)
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt)
    settle(driver)
    assert driver.scheduler.memory.cache.evicted_pages == 0
    assert run_one(driver, 10, [*PROMPTS[0], 1, 2, 3]).cached_len == 40
    assert num_loads(driver) == 1
    assert driver.tiers.counters.loaded_pages == 0


def test_copies_that_have_not_arrived_are_not_written() -> None:
    driver = tiered(num_pages=100)
    assert driver.tiers is not None
    request = run_one(driver, 0, PROMPTS[0])
    driver.mover._lateness = 1.0
    assert driver.tiers.saves.save(driver.scheduler.memory.cache.match(request.key()).node)
    driver.tiers.launch(driver.mover)
    copy = driver.tiers.host.tree.match(request.key()).node
    places, pages = driver.tiers.beside.hold(copy)
    assert len(places) == len(pages) == 0
    driver.mover._lateness = 0.0
    settle(driver)
    places, pages = driver.tiers.beside.hold(copy)
    assert places == [8, 9]
    driver.tiers.beside.release_copies(pages)
    driver.check()


def test_pages_without_what_their_end_sees_are_not_loaded() -> None:
    driver = tiered(host_window_pages=2)
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt)
    assert run_one(driver, 10, [*PROMPTS[0], 1, 2, 3]).cached_len == 0
    assert num_loads(driver) == 0


@pytest.mark.costly
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma3", {}),
        ("gpt-oss", {"chunked_prefill_size": 16}),
        pytest.param("gemma3", {"tp_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_engine_answers_alike_from_pages_that_came_back(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path = str(tiny_checkpoint(tmp_path, family))
    given = {"skip_tokenizer_init": True, **options}
    with Engine(path, **OPTIONS, **given) as engine:
        assert engine._scheduler.memory.windows is not None
        expected = ids(answers(engine))
    with eager(path, **given) as engine:
        assert ids(answers(engine)) == expected
        again = answers(engine)
        assert ids(again) == expected
        assert min(cached(again)) >= 80
        assert tiers_of(engine).counters.loaded_pages > 0
        assert engine.check_ledger() == []
        assert engine.flush_cache()
        assert cached(answers(engine)) == [0] * len(again)


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
def test_the_next_engine_finds_the_pages_of_both_pools(family: str, tmp_path: Path) -> None:
    path = str(tiny_checkpoint(tmp_path, family))
    given: dict[str, Any] = {"skip_tokenizer_init": True}
    with Engine(path, **{**OPTIONS, "max_total_tokens": 1024}, **given) as engine:
        cold, expected = logprobs(engine), ids(answers(engine))
    given |= {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path / "files")}
    with eager(path, **given) as engine:
        assert ids(answers(engine)) == expected
    with eager(path, **given) as engine:
        assert logprobs(engine) == [pytest.approx(its, abs=1e-5) for its in cold]
        again = answers(engine)
        assert ids(again) == expected
        assert min(cached(again)) >= 80
        assert tiers_of(engine).counters.read_pages >= 8 * 10
        assert engine.check_ledger() == []
        assert engine.flush_cache()
        assert cached(answers(engine)) == [0] * len(again)


@pytest.mark.costly
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(its, marks=pytest.mark.slow) for its in range(3, 10))])
def test_random_operations_lose_no_page_and_no_token(seed: int, tmp_path: Path) -> None:
    episode = Episode(random.Random(seed), tmp_path, "windows")
    episode.run(6000)
    assert episode.finished > 0
