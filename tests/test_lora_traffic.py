"""Random batches of random adapters, which come and go under few names, equal the models with their weights merged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl import Engine
from tests.test_lora import OPTIONS
from tests.tiny_adapters import ALL, logprobs, merged, tiny_adapter
from tests.tiny_models import tiny_checkpoint

RNG = random.Random(7)
PREFIX = [RNG.randrange(3, 380) for _ in range(20)]
NAMES = "x", "y", "z"
KINDS: list[dict[str, Any]] = [
    {"rank": 1, "lora_alpha": 2, "targets": ALL},
    {"rank": 8, "lora_alpha": 1.5, "targets": ("q_proj", "down_proj"), "use_rslora": True},
    {"rank": 3, "lora_alpha": 3, "targets": ("v_proj",), "dtype": torch.bfloat16},
    {"rank": 5, "lora_alpha": 5, "targets": ("k_proj", "o_proj", "up_proj"), "dtype": torch.float16},
]
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
Row = tuple[str | None, list[int], int, float]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("traffic") / "model")


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[tuple[Path, Any]]:
    """With their oracles."""
    paths = [tiny_adapter(model.parent / f"{i}", model, seed=i, **kind) for i, kind in enumerate(KINDS)]
    return [(path, merged(model, path)) for path in paths]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Most begin alike."""
    tail = draw(st.lists(st.integers(3, 379), max_size=5))
    return PREFIX[: draw(st.integers(1, len(PREFIX)))] + tail


ROWS = st.lists(
    st.tuples(st.sampled_from((None, *NAMES)), prompts(), st.integers(1, 12), st.sampled_from((0.0, 1.0))),
    min_size=1,
    max_size=8,
)
STEPS = st.lists(
    st.tuples(st.dictionaries(st.sampled_from(NAMES), st.integers(-1, len(KINDS) - 1)), ROWS),
    min_size=1,
    max_size=3,
)


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [
        {"max_loras_per_batch": 1, "max_total_tokens": 160, "chunked_prefill_size": 8},
        {"max_loras_per_batch": 2, "max_total_tokens": 320, "chunked_prefill_size": 3, **DRAFTS},
        {"max_loras_per_batch": 3, "max_total_tokens": 160, "enable_hierarchical_cache": True},
        pytest.param({"max_loras_per_batch": 2, "tp_size": 2, **DRAFTS}, marks=pytest.mark.slow),
    ],
)
def test_traffic_equals_merged_models(
    model: Path, adapters: list[tuple[Path, Any]], options: dict[str, Any]
) -> None:
    base = merged(model, None)
    with Engine(model_path=model, **{**OPTIONS, **options}) as engine:
        loaded: dict[str, int] = {}

        def change(name: str, number: int) -> None:
            """Load an adapter under a name in place of another; -1: none."""
            if name in loaded:
                engine.unload_lora_adapter(name)
                del loaded[name]
            if number >= 0:
                engine.load_lora_adapter(name, str(adapters[number][0]))
                loaded[name] = number

        @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
        @given(STEPS)
        def serves(steps: list[tuple[dict[str, int], list[Row]]]) -> None:
            for changes, rows in steps:
                for name, number in changes.items():
                    change(name, number)
                names = [name if name in loaded else None for name, *_ in rows]
                results = engine.generate(
                    input_ids=[prompt for _, prompt, _, _ in rows],
                    sampling_params=[
                        {"max_new_tokens": count, "temperature": temperature, "ignore_eos": True}
                        for _, _, count, temperature in rows
                    ],
                    lora_path=names,
                    return_logprob=True,
                )
                for name, (_, prompt, count, _), result in zip(names, rows, results, strict=True):
                    output = result["output_ids"]
                    assert len(output) == count
                    oracle = base if name is None else adapters[loaded[name]][1]
                    told = [its[0] for its in result["meta_info"]["output_token_logprobs"]]
                    exact = logprobs(oracle, prompt + output)[-count:]
                    assert told == pytest.approx(exact, abs=1e-3)
            assert not engine.check_ledger()

        serves()
