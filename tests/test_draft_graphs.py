"""Drafts as one CUDA graph computes them, here without graphs and in Triton's interpreter; the graphs
themselves are for test_gpu_drafts.py."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.interpreter  # noqa: F401 - mends it
from sgl.kernels.attention.torch import TorchAttention
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.eagle.config import EagleConfig
from sgl.runtime.model.eagle.loader import load_head
from sgl.runtime.runner import draft_graphs
from sgl.runtime.runner.draft_graphs import DraftGraphs
from sgl.runtime.runner.drafts import HeadRunner
from sgl.runtime.speculate.eagle import EagleDrafter
from tests.test_drafters import (
    NUM_PAGES,
    PAGE_SIZE,
    PAGES,
    ROWS,
    EagleOracle,
    ModelOracle,
    Served,
    check,
    check_drawn,
    draft_model,
    drawn,
    entries_of,
    half_seen,
    target,
)
from tests.tiny_heads import tiny_head

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/test_gpu_drafts.py has the graphs themselves", allow_module_level=True)


class Launched(DraftGraphs):
    """What is replayed elsewhere is computed here."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.replayed: list[tuple[int, int]] = []

    def capture(self) -> None:
        """Nothing is recorded."""
        launched = self

        class Graph:
            def __init__(self, key: tuple[int, int]) -> None:
                self.key = key

            def replay(self) -> None:
                launched.replayed.append(self.key)
                launched._compute(*self.key)

        graphs: Any = {(rows, queries): Graph((rows, queries)) for rows in self._rows for queries in (1, 2, 4, 8)}
        self._graphs = graphs


def eagle(path: Path, model: Decoder, num_steps: int = 5, rows: int = ROWS, **changes: Any) -> EagleDrafter:
    config = EagleConfig.from_pretrained(tiny_head(path, **changes))
    head = load_head(config, model)
    num_slots = NUM_PAGES * PAGE_SIZE
    attention = TorchAttention(head.attention_shape(1))
    bounds = {"max_rows": ROWS, "max_pages": PAGES, "max_chain_rows": rows, "num_steps": num_steps}
    runner: Any = HeadRunner(head, num_slots, PAGE_SIZE, attention, kv_dtype=head.dtype, **bounds)
    runner.prepare(40)
    layers = config.layers_of(model.config.num_layers)
    return EagleDrafter(
        runner, layers, num_slots=num_slots, page_size=PAGE_SIZE, max_positions=64, num_steps=num_steps
    )


@pytest.fixture(autouse=True)
def _launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl.runtime.runner.drafts.DraftGraphs", Launched)
    monkeypatch.setattr("sgl.kernels.attention.decode._PER_PROCESSOR", 24)
    monkeypatch.setattr("sgl.kernels.attention.decode._LEAST_SHARE", 32)


@pytest.fixture
def headed(tmp_path: Path) -> tuple[Served, EagleOracle, list[tuple[int, int]]]:
    """With the rows and entries of what was replayed."""
    return served(tmp_path)


def served(path: Path, **options: Any) -> tuple[Served, EagleOracle, list[tuple[int, int]]]:
    model = target(path / "target")
    drafter: Any = eagle(path / "head", model, **options)
    replayed = drafter._runner._draft_graphs.replayed
    return Served(model, drafter), EagleOracle(path / "target", path / "head", drafter.layers), replayed


SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "seed": 3}
DRAFT_MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES,
    "windows, caps": {"family": "gemma2", "sliding_window": 5, "seed": 3},
    "two ropes": {"family": "gemma3", "sliding_window": 5, "seed": 3},
    "experts, sinks": {"family": "gpt-oss", "sliding_window": 5, "seed": 3},
    "padded": {**SIZES, "vocab_size": 400},
}


def no_steps(its: Served, patch: pytest.MonkeyPatch) -> None:
    """Nothing may be launched pass by pass."""
    drafter: Any = its.drafter
    patch.setattr(drafter._runner, "launch", None)


def test_chains_of_ragged_rows_equal_the_oracles(
    headed: tuple[Served, EagleOracle, list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind prompts longer than a first pass may be, decodes that nobody asked about, and drafts that stood."""
    its, oracle, replayed = headed
    no_steps(its, monkeypatch)
    rng = random.Random(0)
    for row, length in enumerate((21, 2, 9)):
        its.enter(row, drawn(rng, length), range(1 + 16 * row, 17 + 16 * row))
    its.step({0: 7, 1: 2, 2: 9})
    its.step({0: 14, 1: 1, 2: 1})
    check(its, oracle, {0: 4, 1: 3, 2: 1})
    for _ in range(4):
        its.step({0: 1, 1: 1}, drawn=True)
    check(its, oracle, {1: 5})
    its.step({0: 1}, drawn=True)
    check(its, oracle, {2: 5, 0: 2, 1: 3})
    check(its, oracle, {0: 5})  # again, from the same place
    assert replayed == [(4, 4), (1, 4), (4, 8), (1, 1)]
    its.requests[1].output_ids += its.propose({1: 5})[1][:3]
    its.step({1: 4})
    check(its, oracle, {1: 5, 0: 1})
    assert replayed[-1] == (2, 4)


def test_holes_are_attended_to_by_no_pass(
    headed: tuple[Served, EagleOracle, list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    its, oracle, replayed = headed
    drafter = half_seen(its)
    no_steps(its, monkeypatch)
    its.step({1: 11})
    drafts, holes = entries_of(its, 1)
    assert holes == [1, 2, 3, 4, 5, 6, 7, 8]
    assert drafts == oracle.drafts(its.known(1), 3, 19, holes)
    drafter.is_resting = True
    for _ in range(2):
        its.step({1: 1})
    drafter.is_resting = False
    its.step({1: 1})
    its.enter(2, drawn(random.Random(5), 9), range(40, 56))
    its.step({2: 9})
    proposed = its.propose({1: 5, 2: 4})
    assert drafter._rows[101].holes.tolist() == [*range(1, 9), 20, 21]
    assert proposed[1] == oracle.drafts(its.known(1), 5, 22, [*range(1, 9), 20, 21])
    assert proposed[2] == oracle.drafts(its.known(2), 4, 9)
    assert len(replayed) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_before_residual": True, "head_dim": 8, "biases": True, "draft_vocab_size": ..., "logit_scale": 0.5},
        {"fc_norm": True, "norm_output": True},
        {"layer_types": ["sliding_attention"], "sliding_window": 4},
        {"layer_types": ["sliding_attention"], "sliding_window": 20},
    ],
    ids=["residual", "norm_output", "window", "wide window"],
)
def test_chains_of_heads_of_any_kind_equal_the_oracles(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_graphs, "_KEYS", 8)
    its, oracle, replayed = served(tmp_path, **changes)
    no_steps(its, monkeypatch)
    its.enter(0, drawn(random.Random(2), 33), range(1, 17))
    its.enter(3, drawn(random.Random(3), 3), range(20, 36))
    its.step({0: 33, 3: 3})
    check(its, oracle, {0: 5, 3: 5})
    its.step({0: 1, 3: 1}, drawn=True)
    check(its, oracle, {0: 4, 3: 5})
    assert replayed == [(2, 4), (2, 1)]


def test_chains_draw_what_steps_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By temperature and seed; and rows with biases, forced tokens, or more keys than fit are left to steps."""
    its, _, replayed = served(tmp_path)
    drafter: Any = its.drafter
    params: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 3.0}, {"logit_bias": {3: 50.0}}]
    for row, its_params in enumerate(params):
        its.enter(row, drawn(random.Random(row), 5 + row), range(1 + 16 * row, 17 + 16 * row), **its_params)
    its.step({row: 5 + row for row in range(4)})
    wanted = dict.fromkeys(range(4), 5)
    drafts = its.propose(wanted)
    assert drafts[3] == [3] * 5
    assert len(replayed) == 1
    graphs = drafter._runner._draft_graphs
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "_max_keys", 4 * 64 - 1)
        assert its.propose(wanted) == drafts
    drafter._runner._draft_graphs = None
    assert its.propose(wanted) == drafts
    assert len(replayed) == 1
    drafter._runner._draft_graphs = graphs
    its.requests[1].output_ids += [7, 8]
    assert {row: draft for row, draft in its.propose(wanted).items() if row != 1} == {
        row: draft for row, draft in drafts.items() if row != 1
    }
    assert len(replayed) == 2


@pytest.mark.parametrize("kind", DRAFT_MODELS)
def test_chains_of_draft_models_equal_the_oracles(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind prompts, decodes that nobody asked about, drafts of which some stood, and cached prefixes."""
    monkeypatch.setattr(draft_graphs, "_KEYS", 8)
    drafter: Any = draft_model(tmp_path / "draft", chain_rows=ROWS, **DRAFT_MODELS[kind])
    drafter._runner.prepare(40)
    its, oracle = Served(target(tmp_path / "target"), drafter), ModelOracle(tmp_path / "draft")
    no_steps(its, monkeypatch)
    rng = random.Random(0)
    for row, length in enumerate((21, 1, 9)):
        its.enter(row, drawn(rng, length), range(1 + 16 * row, 17 + 16 * row))
    its.step({0: 21, 1: 1, 2: 9})
    check(its, oracle, {0: 4, 1: 3, 2: 1})
    for _ in range(4):
        its.step({0: 1, 1: 1}, drawn=True)
    check(its, oracle, {1: 5})
    check(its, oracle, {2: 9, 0: 2, 1: 3})
    its.requests[1].output_ids += its.propose({1: 5})[1]  # all stood
    its.step({1: 6})
    check(its, oracle, {1: 5})
    its.requests[0].output_ids += its.propose({0: 5})[0][:2]
    its.step({0: 3})
    shared = its.known(0)[: its.done[0] // PAGE_SIZE * PAGE_SIZE]
    pages = [*range(1, 1 + len(shared) // PAGE_SIZE), *range(50, 60)][:PAGES]
    its.enter(3, shared + drawn(rng, 3), pages, cached_len=len(shared))
    its.requests[3].cached_len = len(shared)
    its.step({3: 3})
    check(its, oracle, {0: 3, 3: 4})
    assert drafter._runner._draft_graphs.replayed == [(4, 2), (1, 4), (4, 4), (1, 1), (1, 2), (1, 1), (2, 4)]


def test_chains_of_a_draft_model_draw_what_is_drawn(tmp_path: Path) -> None:
    """Of equal weights: greedy, and with seeds; a bias is left to steps."""
    drafter: Any = draft_model(tmp_path / "target", chain_rows=ROWS)
    drafter._runner.prepare(40)
    params: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 2.0}, {"logit_bias": {3: 8.0}}]
    check_drawn(Served(target(tmp_path / "target"), drafter), params)
    assert drafter._runner._draft_graphs.replayed == [(4, 8), (4, 1), (4, 1), (4, 1)]


def test_more_rows_than_graphs_have_are_drafted_for_by_steps(tmp_path: Path) -> None:
    its, oracle, replayed = served(tmp_path, rows=2)
    for row in range(3):
        its.enter(row, drawn(random.Random(row), 5 + row), range(1 + 16 * row, 17 + 16 * row))
    its.step({row: 5 + row for row in range(3)})
    check(its, oracle, {0: 3, 1: 4, 2: 5})
    assert not replayed
    check(its, oracle, {0: 3, 2: 5})
    assert replayed == [(2, 1)]


@pytest.mark.parametrize("is_biased", [False, True])
def test_more_rows_than_graphs_have_behind_long_texts(is_biased: bool, tmp_path: Path) -> None:
    """Of which one has no chain: others' first passes are longer than any graph's."""
    its, oracle, _ = served(tmp_path, rows=2)
    drafter: Any = its.drafter
    if not is_biased:
        drafter._most_tokens = 30  # one is filled in later
    for row in range(3):
        bias = {"logit_bias": {3: 50.0}} if is_biased and row == 2 else {}
        its.enter(row, drawn(random.Random(row), 12 + row), range(1 + 16 * row, 17 + 16 * row), **bias)
    its.step({row: 12 + row for row in range(3)})
    if is_biased:
        assert its.propose({0: 3, 1: 4, 2: 5}).keys() == {0, 1, 2}
    else:
        assert len(its.propose({0: 3, 1: 4, 2: 5})) == 3
    check(its, oracle, {0: 3, 1: 4})


def test_passes_that_a_row_does_not_want_write_nowhere(
    headed: tuple[Served, EagleOracle, list[tuple[int, int]]],
) -> None:
    """Not even behind its last page."""
    its, oracle, _ = headed
    drafter: Any = its.drafter
    its.enter(0, drawn(random.Random(1), 61), range(1, 17))
    its.enter(1, drawn(random.Random(2), 9), range(20, 36))
    its.step({0: 61, 1: 9})
    kv = drafter._runner._kv
    its.propose({0: 1, 1: 5})
    before = kv.keys[0].clone()
    assert its.propose({0: 2, 1: 1}).keys() == {0, 1}
    changed = np.flatnonzero((kv.keys[0] != before).flatten(1).any(1).numpy()).tolist()
    assert set(changed) <= {0, 4 * 16 + 2}
    check(its, oracle, {0: 2})


def test_a_closed_runner_keeps_nothing(tmp_path: Path) -> None:
    its, _, _ = served(tmp_path)
    drafter: Any = its.drafter
    graphs = drafter._runner._draft_graphs
    drafter.close()
    assert not graphs._graphs
    assert graphs._passes._features.numel() == graphs._inputs.numel() == 0
    assert drafter._runner.chains[0] == 0
