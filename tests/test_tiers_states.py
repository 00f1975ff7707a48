"""Copies of recurrent states beside those of pages: whoever goes on from a copied prefix finds its state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiers_soak import Episode
from sgl.runtime.engine import Engine
from tests import test_tiers
from tests.scheduler_driver import Driver, assert_right, make_request
from tests.test_gdn_models import tiny_hybrid
from tests.test_tiers import PROMPTS, num_loads, run_one, settle
from tests.test_tiers_engine import OPTIONS, answers, cached, eager, ids, logprobs, tiers_of


def tiered(**fields: object) -> Driver:
    return test_tiers.tiered(**{"host_states": 40, "checkpoints": 16, **fields})


@pytest.mark.parametrize("lateness", [0.0, 0.9])
def test_a_prefix_comes_back_with_its_state(lateness: float) -> None:
    driver = tiered(lateness=lateness)
    for uid, prompt in enumerate(PROMPTS):
        assert run_one(driver, uid, prompt).cached_len == 0
    for uid, prompt in enumerate(PROMPTS, 10):
        assert run_one(driver, uid, prompt).cached_len == 36
    assert num_loads(driver) >= 4
    settle(driver)
    driver.check()


def test_a_state_alone_comes_back_to_pages_that_stayed() -> None:
    driver = tiered(num_pages=100, checkpoints=2)
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt)
    assert driver.scheduler.memory.cache.evicted_pages == 0
    assert run_one(driver, 10, PROMPTS[0]).cached_len == 36
    assert num_loads(driver) == 1
    assert driver.tiers.counters.loaded_pages == 0


def test_pages_without_a_state_are_not_loaded() -> None:
    driver = tiered(host_states=1)
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt)
    assert run_one(driver, 10, PROMPTS[0]).cached_len == 0
    assert num_loads(driver) == 0


def test_a_prompt_that_leaves_a_copy_goes_on_from_the_last_state_before() -> None:
    driver = tiered()
    run_one(driver, 0, PROMPTS[0][:21])
    run_one(driver, 1, PROMPTS[0])
    for uid, prompt in enumerate(PROMPTS[1:], 2):
        run_one(driver, uid, prompt)
    other = [*PROMPTS[0][:30], *[5] * 10]
    assert run_one(driver, 10, other).cached_len == 20
    assert num_loads(driver) == 1


def test_a_loaded_state_is_not_lost_to_others_before_its_prompt_has_a_row() -> None:
    driver = tiered(num_pages=60, checkpoints=1, lateness=0.5)
    for uid, prompt in enumerate(PROMPTS):
        run_one(driver, uid, prompt)
    requests = [make_request(10 + i, prompt, 3) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        request.stop_ids = frozenset()
        driver.scheduler.add(request)
    driver.run()
    for request in requests:
        assert_right(request, recurrent=True)
    settle(driver)
    driver.check()


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [{}, {"chunked_prefill_size": 16}, pytest.param({"tp_size": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_an_engine_answers_alike_from_states_that_came_back(options: dict[str, Any], tmp_path: Path) -> None:
    path, _ = tiny_hybrid(tmp_path, "next")
    given = {"skip_tokenizer_init": True, "state_checkpoints": 6, **options}
    with Engine(str(path), **OPTIONS, **given) as engine:
        expected = ids(answers(engine))
    with eager(str(path), **given) as engine:
        assert ids(answers(engine)) == expected
        again = answers(engine)
        assert ids(again) == expected
        assert cached(again) == [88] * len(again)
        assert tiers_of(engine).counters.loaded_pages > 0
        assert engine.check_ledger() == []
        assert engine.flush_cache()
        assert cached(answers(engine)) == [0] * len(again)


def test_the_next_engine_finds_pages_with_their_states(tmp_path: Path) -> None:
    """Bit for bit as from states that stay on the device."""
    path, _ = tiny_hybrid(tmp_path, "next")
    given: dict[str, Any] = {"skip_tokenizer_init": True, "state_checkpoints": 20}
    with Engine(str(path), **{**OPTIONS, "max_total_tokens": 1024}, **given) as engine:
        expected, cold = ids(answers(engine)), logprobs(engine)
        assert logprobs(engine) == cold, "all were cached"
    given |= {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path / "files")}
    with eager(str(path), **given) as engine:
        assert ids(answers(engine)) == expected
    with eager(str(path), **given) as engine:
        assert logprobs(engine) == cold
        again = answers(engine)
        assert (ids(again), cached(again)) == (expected, [88] * len(again))
        counters = tiers_of(engine).counters
        assert (counters.read_pages, counters.read_states) == (8 * 11, 8)
        state = engine.get_server_info()["internal_states"][0]
        assert (state["file_read_states"], state["host_loaded_states"]) == (8, 16), "each prompt was asked twice"
        assert state["host_total_states"] >= state["host_used_states"] >= 8
        assert engine.check_ledger() == []
        assert engine.flush_cache()
        assert cached(answers(engine)) == [0] * len(again)
    with eager(str(path), **given, dtype="bfloat16") as engine:
        assert cached(answers(engine)) == [0] * 8, "pages and states of other bits"


@pytest.mark.costly
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(its, marks=pytest.mark.slow) for its in range(3, 10))])
def test_random_operations_lose_no_page_no_state_and_no_token(seed: int, tmp_path: Path) -> None:
    episode = Episode(random.Random(seed), tmp_path, "states")
    episode.run(6000)
    assert episode.finished > 0
