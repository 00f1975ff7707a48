"""Drafts on a GPU: hidden states of replayed steps, and engines whose draft model or head is asked and rests."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl import Engine
from sgl.runtime.runner.observer import ObservedStep, Observer
from sgl.runtime.speculate.budget import Budget
from sgl.runtime.speculate.drafter import NO_DRAFT, Draft, DraftRequest
from tests.every_draft import every_draft
from tests.guided_drafts import Guide, noted
from tests.test_gpu import Driver, error_of, load
from tests.tiny_heads import tiny_head
from tests.tiny_models import noisy_copy, tiny_checkpoint

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"head_dim": 128, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
HEADS: dict[str, dict[str, Any]] = {
    "head": {},
    "normed": {"fc_norm": True, "norm_output": True, "biases": True},
    "windowed": {"norm_before_fc": True, "layer_types": ["sliding_attention"], "sliding_window": 16},
}
DRAFT_MODELS = "draft", "target", "noisy"  # of random weights, its own, and nearly its own
DRAFTERS = {**dict.fromkeys(DRAFT_MODELS, "STANDALONE"), **dict.fromkeys(HEADS, "EAGLE3")}


class Noting(Observer):
    """Notes what it sees, in float64 on the host."""

    layers = (-1, 0, 1)

    def __init__(self) -> None:
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def observe(self, step: ObservedStep) -> None:
        """Its slots, and its hidden states side by side."""
        self.steps.append((step.slots.cpu(), torch.cat(step.hidden, 1).double().cpu()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafts")
    tiny_checkpoint(path / "target", with_tokenizer=True, **SIZES)
    tiny_checkpoint(path / "draft", with_tokenizer=True, **{**SIZES, "num_hidden_layers": 2, "seed": 3})
    noisy_copy(path / "target", path / "noisy")
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    for name, changes in HEADS.items():
        tiny_head(path / name, hidden_size=256, intermediate_size=256, target_hidden_size=256, **heads, **changes)
    return path


def test_hidden_states_of_replayed_steps_equal_launched_ones_and_the_float32_oracle(folder: Path) -> None:
    """Whatever steps without an observer come between."""
    rng = np.random.default_rng(0)
    path = folder / "target"
    model = load(path, "bfloat16")
    prompts = [rng.integers(0, model.config.vocab_size, rng.integers(1, 60)).tolist() for _ in range(37)]
    observers = [Noting() for _ in range(3)]
    drivers = [
        Driver(load(path, "bfloat16"), prompts, graph_rows=37, torch_attention=False, observer=observers[0]),
        Driver(load(path, "bfloat16"), prompts, graph_rows=0, torch_attention=False, observer=observers[1]),
        Driver(load(path, "float32"), prompts, graph_rows=0, torch_attention=True, observer=observers[2]),
    ]
    seen = 0
    pending: Any = None
    for count, is_observed in ((20, True), (37, False), (37, True), (36, False), (20, True), (3, True), (1, True)):
        forced = None if pending is None else np.resize(pending.wait().next_tokens, count).tolist()
        pending, *_ = [driver.step(range(count), forced, is_observed=is_observed) for driver in drivers]
        seen += is_observed
        assert [len(each.steps) for each in observers] == [seen] * 3
        if is_observed:
            (slots, ours), (same_slots, same), (_, exact) = (each.steps[-1] for each in observers)
            assert torch.equal(slots, same_slots)
            errors = [error_of(ours, exact), error_of(same, exact)]
            assert max(errors) < 4e-2
            assert error_of(ours, same) < max(errors)
    for driver in drivers:
        driver.runner.close()


def asked() -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts, some of which begin alike, and what is asked of them."""
    rng = random.Random(4)
    common = [rng.randrange(3, 250) for _ in range(40)]
    prompts = [common[: rng.choice([0, 24, 40])] + [rng.randrange(3, 250) for _ in range(9)] for _ in range(12)]
    params: list[dict[str, Any]] = [
        {"temperature": rng.choice([0.0, 0.8]), "seed": number, "max_new_tokens": 40, "ignore_eos": number % 2 == 0}
        for number in range(12)
    ]
    params[3]["regex"] = "(ab|cd){3,9}[0-9]+"
    return prompts, params


def engine(folder: Path, drafter: str | None, **options: Any) -> Engine:
    drafts: dict[str, Any] = {"speculative_algorithm": "off"}
    if drafter is not None:
        drafts = {"speculative_algorithm": DRAFTERS[drafter], "speculative_draft_model_path": str(folder / drafter)}
    options = {"device": "cuda", "check_ledger": True, "random_seed": 0, **drafts, **options}
    return Engine(str(folder / "target"), **options)


@pytest.mark.parametrize("head", HEADS)
def test_heads_draft_in_float32_what_they_draft_on_a_cpu(head: str, folder: Path) -> None:
    """Where the same was drafted before: outputs may part behind a near-tie."""
    prompts, params = asked()

    def drafted(device: str) -> dict[tuple[int, ...], list[int]]:
        found: dict[tuple[int, ...], list[int]] = {}
        options: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 8192, "device": device}
        options["attention_backend"] = "triton" if device == "cuda" else "torch"
        with engine(folder, head, **options) as its, every_draft(its):
            noted(its, is_on=False)
            (model,) = its._loop._speculator._models
            propose = model.propose

            def noting(wanted: Sequence[DraftRequest]) -> list[Draft]:
                drafts = propose(wanted)
                for each, draft in zip(wanted, drafts, strict=True):
                    found[tuple(each.request.known_ids().tolist())] = list(draft.token_ids)
                return drafts

            its._loop.call(lambda: setattr(model, "propose", noting))
            for prompt, each in zip(
                prompts, params, strict=True
            ):  # together, what is cached differs from run to run
                its.flush_cache()
                its.generate(input_ids=prompt, sampling_params=each)
        return found

    ours, theirs = drafted("cuda"), drafted("cpu")
    common = ours.keys() & theirs.keys()
    assert len(common) > 0.9 * len(theirs) > 100
    assert sum(len(ours[text]) for text in common) > 4 * 0.9 * len(common)
    assert sum(ours[text] == theirs[text] for text in common) >= 0.98 * len(common)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rows", [1, 12])
def test_chains_draft_in_float32_what_passes_one_by_one_draft(rows: int, drafter: str, folder: Path) -> None:
    """Behind prompts, cached prefixes with holes, and steps of which some drafts stood, for rows of any lengths."""
    prompts, params = asked()
    options: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 8192, "attention_backend": "triton"}
    found: list[tuple[list[int], list[int]]] = []
    replayed: set[tuple[int, int]] = set()
    with engine(folder, drafter, max_running_requests=rows, **options) as its, every_draft(its):
        noted(its, is_on=False)
        model: Any = its._loop._speculator._models[0]
        propose, runner = model.propose, model._runner
        graphs = runner._draft_graphs
        holes = set[int]()
        is_asked = itertools.cycle([True, False, True, False, False, True, *[False] * 4, True])

        def noting(bucket: int, queries: int, keys: Any, place: Any = graphs._place) -> None:
            replayed.add((bucket, queries))
            place(bucket, queries, keys)

        def twice(wanted: Sequence[DraftRequest]) -> list[Draft]:
            if not next(is_asked):
                return [NO_DRAFT] * len(wanted)
            before = {uid: (row.done, row.holes, row.pages) for uid, row in model._rows.items()}
            keys, runner._draft_graphs = model._keys.copy(), None
            expected = propose(wanted)
            model._keys[:], runner._draft_graphs = keys, graphs
            nothing = 0, np.empty(0, np.int64), np.empty(0, np.int32)
            for uid, row in model._rows.items():
                row.done, row.holes, row.pages = before.get(uid, nothing)
            drafts = propose(wanted)
            holes.update(len(row.holes) for row in model._rows.values())
            found.extend(
                (list(draft.token_ids), list(other.token_ids))
                for draft, other in zip(drafts, expected, strict=True)
            )
            return drafts

        for owner, name, its_own in ((model, "propose", twice), (graphs, "_place", noting)):
            its._loop.call(functools.partial(setattr, owner, name, its_own))
        its.generate(input_ids=prompts, sampling_params=params)
    fewest = 250 if drafter == "target" else 300  # where all stand, outputs end sooner
    assert sum(len(drafts) for drafts, _ in found) > fewest
    assert sum(drafts == expected for drafts, expected in found) >= 0.98 * len(found)
    assert len(holes) > 1 or rows > 1 or drafter in DRAFT_MODELS
    assert {queries for _, queries in replayed} == {1, 2, 4, 8}
    assert max(bucket for bucket, _ in replayed) == rows


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_of_a_step_are_one_replay(drafter: str, folder: Path) -> None:
    """Once prompts are computed, no pass is launched; a closed engine keeps no graph."""
    prompts, params = asked()
    params = [{**its, "regex": None} for its in params]
    with engine(folder, drafter, dtype="bfloat16", max_total_tokens=8192) as its, every_draft(its):
        model: Any = its._loop._speculator._models[0]
        runner, launched = model._runner, list[int]()
        graphs, launch = runner._draft_graphs, runner.launch

        def noting(batch: Any) -> Any:
            launched.append(len(batch))
            return launch(batch)

        its._loop.call(lambda: setattr(runner, "launch", noting))
        its.generate(input_ids=prompts, sampling_params=params)
        assert graphs._graphs
        assert its._loop.scheduler.counters.drafted_tokens > 100
    assert not launched
    assert not graphs._graphs


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_outputs_in_float32_are_those_of_plain_decoding(
    drafter: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While drafts are asked for, while they rest, and when they are asked for again."""
    prompts, params = asked()
    options: dict[str, Any] = {"dtype": "float32", "attention_backend": "triton", "max_total_tokens": 8192}

    def answers(its: Engine) -> list[list[int]]:
        return [result["output_ids"] for result in its.generate(input_ids=prompts, sampling_params=params)]

    with engine(folder, None, **options) as plain:
        expected = answers(plain)
    with engine(folder, drafter, **options) as its:
        speculator, counters = its._loop._speculator, its._loop.scheduler.counters
        for _ in range(3):
            assert answers(its) == expected
        assert counters.drafted_tokens
        with monkeypatch.context() as patch:
            patch.setattr(Budget, "divide", lambda self, num_rows, drafts, **others: [0] * len(drafts))
            assert answers(its) == expected
            assert answers(its) == expected
        its._loop.call(
            lambda: speculator._trials._rests.update(dict.fromkeys(speculator._trials._rests, 0))
        )  # a trial is due
        for _ in range(8):
            assert answers(its) == expected


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rows", [1, 5])
def test_steps_ahead_sample_and_draft_what_steps_that_wait_do(drafter: str, rows: int, folder: Path) -> None:
    """Where most drafts stand."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 250) for _ in range(5 + 9 * number)] for number in range(5)]
    params: list[dict[str, Any]] = [
        {"temperature": 0.7 * (number % 2), "seed": number, "max_new_tokens": 90, "ignore_eos": True}
        for number in range(5)
    ]
    options: dict[str, Any] = {"dtype": "float32", "attention_backend": "triton", "max_total_tokens": 8192}
    options["max_running_requests"] = rows
    with engine(folder, None, **options) as plain:
        expected = [result["output_ids"] for result in plain.generate(input_ids=prompts, sampling_params=params)]
    texts = {np.array(ids, np.int32).tobytes(): text for ids, text in zip(prompts, expected, strict=True)}
    drawn: list[dict[tuple[int, ...], list[int]]] = []
    for is_on in (False, True):
        with engine(folder, drafter, **options) as its, every_draft(its):
            model: Any = its._loop._speculator._models[0]
            graphs, ahead = model._runner._draft_graphs, noted(its, is_on)
            guide = Guide(its._scheduler.memory.running, texts, changes=drafter in HEADS)

            class Guided:
                def __init__(self, key: tuple[int, int], graph: Any, graphs: Any = graphs, guide: Any = guide):
                    self.key, self.graph, self.graphs, self.guide = key, graph, graphs, guide

                def replay(self) -> None:
                    self.graph.replay()
                    self.guide.change(self.graphs, *self.key)

            guided = {key: Guided(key, graph) for key, graph in graphs._graphs.items()}
            its._loop.call(functools.partial(setattr, graphs, "_graphs", guided))
            found = its.generate(input_ids=prompts, sampling_params=params)
            assert [result["output_ids"] for result in found] == expected
            assert (len(ahead) > 10) is is_on
            counters = its._loop.scheduler.counters
            assert counters.drafted_tokens > 100
            assert counters.verified_tokens > 0.5 * counters.drafted_tokens or drafter == "draft"
            drawn.append(guide.drawn)
    waiting, others = drawn
    common = waiting.keys() & others.keys()
    assert len(common) > 40
    same = [all(map(int.__eq__, waiting[text], others[text])) for text in common]
    assert sum(same) >= 0.98 * len(common)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_graphs_serve_drafts_that_rest_and_wake(
    drafter: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model drafts for itself nearly always right; nothing is allocated on the device meanwhile."""
    prompts, params = asked()
    with engine(folder, drafter, dtype="bfloat16", max_total_tokens=8192) as its:
        speculator, counters = its._loop._speculator, its._loop.scheduler.counters
        its.generate(input_ids=prompts, sampling_params=params)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with monkeypatch.context() as patch:
            patch.setattr(Budget, "divide", lambda self, num_rows, drafts, **others: [0] * len(drafts))
            for _ in range(2):
                its.generate(input_ids=prompts, sampling_params=params)
        its._loop.call(
            lambda: speculator._trials._rests.update(dict.fromkeys(speculator._trials._rests, 0))
        )  # a trial is due
        for _ in range(8):
            its.generate(input_ids=prompts, sampling_params=params)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + (1 << 20)
        assert its.check_ledger() == []
        if drafter == "target":
            assert counters.verified_tokens > 0.8 * counters.drafted_tokens > 0
