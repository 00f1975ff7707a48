"""Engines with host memory and files answer like engines without, after restarts too, and refuse what has no copies."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl.errors import ConfigError
from sgl.runtime.batch import PageMoves, no_pairs
from sgl.runtime.cache.keys import key_of
from sgl.runtime.engine import Engine
from sgl.runtime.runner.host_pages import HostPages
from sgl.runtime.scheduler.tiers import Tiers
from sgl.runtime.tier_choice import weights_hash
from tests.patience import wait_until
from tests.test_gdn_models import tiny_hybrid
from tests.test_models import LONGROPE
from tests.tiny_models import edit_json, tiny_checkpoint
from tests.tiny_transformers import tiny_transformer

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_total_tokens": 384,
    "max_running_requests": 4,
    "page_size": 8,
    "random_seed": 1,
    "check_ledger": True,
}
TIERED: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 8.0}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
_RNG = random.Random(3)
PROMPTS = [[_RNG.randrange(3, 300) for _ in range(90)] for _ in range(8)]


def tiers_of(engine: Engine) -> Tiers:
    tiers = engine._scheduler.memory.tiers
    assert tiers is not None
    return tiers


@contextmanager
def eager(path: str, **options: Any) -> Iterator[Engine]:
    """An engine that takes every load to pay: tiny models compute faster than anything loads."""
    with Engine(path, **{**OPTIONS, **TIERED, **options}) as engine:
        rates = tiers_of(engine).rates
        rates.compute.seconds, rates.load.seconds, rates.read.seconds, rates.step = 1.0, 1e-7, 1e-7, 0.0
        rates.is_fixed = True
        yield engine


def answers(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    return [engine.generate(input_ids=prompt, sampling_params=GREEDY) for prompt in prompts]


def logprobs(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[float]]:
    """Of what `answers` answers."""
    results = [engine.generate(input_ids=its, sampling_params=GREEDY, return_logprob=True) for its in prompts]
    return [[logprob for logprob, *_ in its["meta_info"]["output_token_logprobs"]] for its in results]


def ids(results: list[Any]) -> list[list[int]]:
    return [result["output_ids"] for result in results]


def cached(results: list[Any]) -> list[int]:
    return [result["meta_info"]["cached_tokens"] for result in results]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), with_tokenizer=True))


@pytest.fixture(scope="module")
def expected(path: str) -> list[list[int]]:
    with Engine(path, **OPTIONS) as engine:
        return ids(answers(engine))


@pytest.mark.parametrize(
    "options", [{}, {"chunked_prefill_size": 16}, {"disable_overlap_schedule": False}], ids=str
)
def test_what_is_loaded_gives_the_same_tokens(
    path: str, expected: list[list[int]], options: dict[str, Any]
) -> None:
    with eager(path, **options) as engine:
        assert ids(answers(engine)) == expected
        again = answers(engine)
        assert ids(again) == expected
        assert cached(again) == [88] * 8
        together = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        assert ids(together) == expected
        assert tiers_of(engine).counters.loaded_pages >= 8 * 11
        assert engine.check_ledger() == []


def test_the_next_engine_finds_the_pages_of_the_one_before(
    path: str, expected: list[list[int]], tmp_path: Path
) -> None:
    files = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path)}
    with eager(path, **files) as engine:
        assert ids(answers(engine)) == expected
    with eager(path, **files) as engine:
        again = answers(engine)
        assert ids(again) == expected
        assert cached(again) == [88] * 8
        assert tiers_of(engine).counters.read_pages >= 8 * 11
        assert engine.flush_cache()
        assert cached(answers(engine, PROMPTS[:1])) == [0]
    with eager(path, **files, dtype="bfloat16") as engine:
        assert cached(answers(engine)) == [0] * 8


def test_other_weights_find_nothing(path: str, tmp_path: Path) -> None:
    files = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path / "files")}
    with eager(path, **files) as engine:
        answers(engine)
    (tmp_path / "other").mkdir()
    other = str(tiny_checkpoint(tmp_path / "other", seed=1, with_tokenizer=True))
    with Engine(other, **OPTIONS) as plain:
        wanted = ids(answers(plain))
    with eager(other, **files) as engine:
        results = answers(engine)
        assert (ids(results), cached(results)) == (wanted, [0] * 8)


def test_a_checkpoint_may_move(path: str, tmp_path: Path) -> None:
    files = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path / "files")}
    with eager(path, **files) as engine:
        answers(engine)
    shutil.copytree(path, tmp_path / "moved")
    with eager(str(tmp_path / "moved"), **files) as engine:
        assert cached(answers(engine)) == [88] * 8


def test_a_rope_that_follows_the_context_has_pages_by_its_length(tmp_path: Path) -> None:
    model = str(
        tiny_checkpoint(
            *(tmp_path / "model", "phi3"),
            with_tokenizer=True,
            rope_scaling=LONGROPE,
            original_max_position_embeddings=128,
        )
    )
    files = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path / "files")}
    for context in (128, 256):
        with Engine(model, **OPTIONS, context_length=context) as engine:
            wanted = ids(answers(engine))
        for found in (0, 88):
            with eager(model, **files, context_length=context) as engine:
                results = answers(engine)
                assert (ids(results), cached(results)) == (wanted, [found] * 8)


def test_modules_of_transformers_with_other_settings_find_nothing(tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path / "model", "GPTNeoXForCausalLM")
    moved = Path(shutil.copytree(path, tmp_path / "moved"))
    other = Path(shutil.copytree(path, tmp_path / "other"))
    edit_json(other / "config.json", layer_norm_eps=0.5)
    files: dict[str, Any] = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path / "files")}
    prompts = [[token % 90 + 3 for token in prompt] for prompt in PROMPTS]
    for model, found in ((path, 0), (moved, 88), (other, 0)):
        with Engine(str(model), skip_tokenizer_init=True, **OPTIONS) as engine:
            wanted = ids(answers(engine, prompts))
        with eager(str(model), skip_tokenizer_init=True, **files) as engine:
            results = answers(engine, prompts)
            assert (ids(results), cached(results)) == (wanted, [found] * 8)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_ranks_copy_their_own_parts(path: str, expected: list[list[int]], ranks: dict[str, int]) -> None:
    with eager(path, **ranks) as engine:
        assert ids(answers(engine)) == expected
        again = answers(engine)
        assert (ids(again), cached(again)) == (expected, [88] * 8)


def test_what_is_measured_decides(path: str) -> None:
    with Engine(path, **OPTIONS, **TIERED) as engine:
        rates = tiers_of(engine).rates
        assert min(rates.compute.seconds, rates.load.seconds, rates.step) > 0
        assert not rates.is_fixed


def test_an_idle_engine_finishes_its_copies(path: str) -> None:
    with eager(path) as engine:
        answers(engine)
        engine._loop.call(tiers_of(engine).saves.save_all_later)
        wait_until(lambda: engine._loop.call(lambda: tiers_of(engine).poll_seconds) is None)
        assert engine._loop.call(lambda: tiers_of(engine).host.length(key_of(PROMPTS[-1]), None)) == 88


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"hicache_storage_backend": "file"},
            "hicache_storage_backend='file' is part of enable_hierarchical_cache",
        ),
        ({"hicache_ratio": 3.0}, "hicache_ratio=3.0 is part of enable_hierarchical_cache"),
        ({"hicache_size": 1}, "hicache_size=1 is part of enable_hierarchical_cache"),
        ({"hicache_storage_size": 1}, "hicache_storage_size=1 is part of enable_hierarchical_cache"),
        ({**TIERED, "hicache_storage_backend": "file"}, "name it by hicache_storage_dir"),
        ({**TIERED, "hicache_storage_size": 1}, "hicache_storage_size=1 is for hicache_storage_backend='file'"),
        ({**TIERED, "hicache_storage_dir": "x"}, "is for hicache_storage_backend='file'"),
        ({**TIERED, "disable_radix_cache": True}, "leaves nothing for enable_hierarchical_cache to keep"),
        ({**TIERED, "speculative_draft_model_path": "x"}, "keeps pages of the model alone"),
        ({**TIERED, "hicache_size": 1 << 20}, "hicache_size=1048576 is more than"),
        ({**TIERED, "hicache_ratio": 1e-6}, "hicache_ratio=1e-06 holds no page"),
        ({"hicache_ratio": 0.0}, "hicache_ratio"),
        ({"hicache_size": -1}, "hicache_size"),
        ({"hicache_storage_size": 0}, "hicache_storage_size"),
        ({"hicache_storage_backend": "nixl"}, "hicache_storage_backend"),
    ],
)
def test_options_that_do_not_go_together_are_refused(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        Engine(path, **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("architecture", "waits"),
    [("LlamaForCausalLM", True), ("DeepseekV3ForCausalLM", False), ("GPTNeoXForCausalLM", False)],
)
def test_long_loads_come_by_layer_only_to_models_that_wait_for_each(
    architecture: str, waits: bool, tmp_path: Path
) -> None:
    """Else a step would wait for all of a load that its prompt was admitted before."""
    model = str(tiny_transformer(tmp_path, architecture))
    with Engine(model, skip_tokenizer_init=True, **OPTIONS, **TIERED) as engine:
        host = engine._loop._runner.host  # type: ignore[attr-defined]
        assert host.by_layer == waits


def test_layers_with_windows_of_their_own_are_not_spread_over_stages(tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path, "gemma3"))
    options = {**OPTIONS, **TIERED, "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match="pp_size=2 with enable_hierarchical_cache"):
        Engine(model, **options, pp_size=2)
    with pytest.raises(ConfigError, match="holds no "):
        Engine(model, **{**options, "hicache_ratio": 0.01})


def test_a_hash_of_weights_sees_every_change() -> None:
    tensors = [torch.arange(1000, dtype=torch.float32), torch.zeros(3, 7, dtype=torch.bfloat16), torch.tensor(2.0)]
    seen = {weights_hash(tensors)}
    for changed in (0, 999):
        other = [tensors[0].clone(), *tensors[1:]]
        other[0][changed] += 1
        seen.add(weights_hash(other))
    swapped = tensors[0].clone()
    swapped[:2] = swapped[:2].flip(0)
    seen |= {weights_hash([swapped, *tensors[1:]]), weights_hash([*tensors[:2], torch.tensor(3.0)])}
    seen |= {weights_hash([tensors[0], tensors[1].view(7, 3), tensors[2]])}
    assert len(seen) == 6
    assert weights_hash([tensor.clone() for tensor in tensors]) in seen


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "GPTNeoXForCausalLM"])
def test_latents_and_the_modules_of_transformers_have_copies_too(architecture: str, tmp_path: Path) -> None:
    model = str(tiny_transformer(tmp_path, architecture))
    prompts = [[token % 90 + 3 for token in prompt] for prompt in PROMPTS]
    files: dict[str, Any] = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path / "files")}
    with Engine(model, skip_tokenizer_init=True, **OPTIONS) as engine:
        wanted = ids(answers(engine, prompts))
    for _ in range(2):
        with eager(model, skip_tokenizer_init=True, **files) as engine:
            assert ids(answers(engine, prompts)) == wanted
            again = answers(engine, prompts)
            assert (ids(again), cached(again)) == (wanted, [88] * 8)


def test_recurrent_states_without_room_for_any_are_refused(tmp_path: Path) -> None:
    model, _ = tiny_hybrid(tmp_path, "next")
    options = {**OPTIONS, **TIERED, "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match="state_checkpoints=0 leaves nothing"):
        Engine(str(model), **options, state_checkpoints=0)
    with pytest.raises(ConfigError, match="pp_size=2 with enable_hierarchical_cache"):
        Engine(str(model), **options, pp_size=2)
    with pytest.raises(ConfigError, match="holds no state"):
        Engine(str(model), **{**options, "hicache_ratio": 0.05}, state_checkpoints=4)


def test_moves_have_the_same_numbers_on_all_ranks() -> None:
    """Rank 0 alone measures. Others wait for the loads up to a number before a step, and would for later ones, too."""
    host, nothing = HostPages(torch.zeros(6, 20, 64, dtype=torch.uint8), 9, torch.device("cpu")), no_pairs()
    assert host.page_seconds() > 0
    assert [host.move(PageMoves(nothing, nothing)).number for _ in range(2)] == [1, 2]
