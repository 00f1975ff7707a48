"""Steps that are launched while the drafts before them are being verified, here without graphs and in Triton's
interpreter; the graphs themselves are for test_gpu_drafts.py."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.interpreter  # noqa: F401 - mends it
from sgl import Engine
from tests.every_draft import every_draft, stop_its_clock
from tests.guided_drafts import Guide, noted
from tests.tiny_heads import tiny_head
from tests.tiny_models import noisy_copy, tiny_checkpoint

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/test_gpu_drafts.py has the graphs themselves", allow_module_level=True)
from sgl.kernels import ahead_triton
from sgl.kernels.attention.triton import TritonAttention
from sgl.kernels.launch_triton import Launcher
from sgl.runtime.runner.capture import MAX_QUERIES
from tests.test_draft_graphs import Launched as LaunchedDrafts
from tests.test_verify_graphs import Launched as LaunchedSteps


@pytest.mark.parametrize("case", range(12))
def test_inputs_are_moved_to_where_drafts_end(case: int) -> None:
    rng = np.random.default_rng(case)
    rows, bucket, passes, queries, firsts = 3, 4, 7, 8, 8
    before, wanted = rng.integers(0, 8, (2, rows))
    simulated = rng.integers(0, 8, rows) if case % 3 == 0 else np.full(rows, -1)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 1000, shape))

    starts, next_starts = (np.cumsum(its + 1) - its - 1 for its in (before, wanted))
    stands = [int(rng.integers(0, number + 1)) for number in before]
    computed, sampled = numbers(bucket * queries), numbers(int((before + 1).sum())) + 1000
    expected = []
    for b, number in enumerate(stands):
        drafts = computed[b * queries + 1 : b * queries + 1 + before[b]]
        own = sampled[starts[b] : starts[b] + before[b] + 1]
        own[:number] = drafts[:number]
        if simulated[b] >= 0:
            stands[b] = number = int(min(simulated[b], before[b]))
            own = own.clone()
            own[:number] = drafts[:number]
        expected.append(own)
    slots = numbers(rows, 1 + int((before + wanted).max()))
    columns = (starts, before, next_starts, wanted, simulated)
    known = torch.cat((torch.from_numpy(np.column_stack(columns)), slots), 1)
    assert ahead_triton.MAX_TOKENS == MAX_QUERIES
    stood, tokens = numbers(rows), numbers(int((wanted + 1).sum()))
    token_ids, last = numbers(bucket * firsts), numbers(bucket)
    seen, places, positions, later_slots = (numbers(passes, bucket) for _ in range(4))
    later = seen, places, positions, later_slots
    was = [its.clone() for its in (token_ids, last, *later)]
    ahead_triton.accept(sampled, computed, queries, known, stood, tokens, (token_ids, firsts, last), later)
    assert stood.tolist() == stands
    for b, number in enumerate(stands):
        back, kept = number - before[b], max(0, wanted[b] - 1)
        assert tokens[next_starts[b]] == expected[b][number]
        was[0][b * firsts : b * firsts + before[b] + 1] = expected[b]
        was[1][b] += back
        was[2][1:, b] += back
        was[3][:, b] += back
        was[4][:kept, b] += back
        was[5][:kept, b] = slots[b, 1 + number : 1 + number + kept]
    for its, old in zip((token_ids, last, *later), was, strict=True):
        assert torch.equal(its, old)

    drafts, inputs = numbers(passes, bucket), [numbers(bucket * queries) for _ in range(4)]
    first = numbers(bucket).to(torch.int32)
    old_rows, old_ids, old_positions, old_slots, old_first = (its.clone() for its in (*inputs, first))
    sampling = numbers(len(tokens)), numbers(len(tokens))
    made: Any = (*inputs, first)
    ahead_triton.place(drafts, known, stood, tokens, made, queries, sampling)
    for b, number in enumerate(stands):
        back, size = number - before[b], int(wanted[b]) + 1
        at, compact = slice(b * queries, b * queries + size), slice(next_starts[b], next_starts[b] + size)
        ids = torch.cat((expected[b][number : number + 1], drafts[: size - 1, b]))
        assert torch.equal(tokens[compact], ids)
        old_ids[at] = ids
        old_positions[at] += back
        old_slots[at] = slots[b, number : number + size]
        old_first[b] += back
        assert torch.equal(sampling[0][compact], old_rows[at])
        assert torch.equal(sampling[1][compact], old_positions[at] + 1)
    for its, old in zip(made, (old_rows, old_ids, old_positions, old_slots, old_first), strict=True):
        assert torch.equal(its, old)


def test_launches_differ_by_no_number_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is found in the cache, whatever rows want."""
    looked_up = list[int]()

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **options: Any) -> Any:
                looked_up.append(len(arguments))
                return {grid: lambda *others: None}

            return launch

    for name in ("_launch_accept", "_launch_place"):
        monkeypatch.setattr(ahead_triton, name, Launcher(Kernel()))
    none = torch.zeros(64, dtype=torch.int64)
    for width, queries, stride in ((6, 2, 1), (7, 4, 2), (9, 8, 4), (6, 8, 2)):
        known, later = none[:width].view(1, width), none[: 4 * stride].view(4, stride)
        first = none, queries, none
        ahead_triton.accept(none, none, queries, known, none, none, first, (later,) * 4)
        ahead_triton.place(later, known, none, none, (none,) * 5, queries, (none, none))
    assert len(looked_up) == 2


DRAFTERS = {"head": "EAGLE3", "draft": "DRAFT"}


class Guided(LaunchedDrafts):
    """See `Guide`."""

    def __init__(self, *arguments: Any, guide: Guide, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.guide = guide

    def _compute(self, bucket: int, queries: int) -> None:
        super()._compute(bucket, queries)
        self.guide.change(self, bucket, queries)


def pretend(engine: Engine, texts: dict[bytes, list[int]], rows: int, drafter: str) -> Guided:
    """Have it launch what would be replayed, ahead where it can."""
    loop: Any = engine._loop
    runner, drafts = loop._runner, loop._speculator._models[0]._runner
    model, kv = runner._model, runner._kv
    shape = model.attention_shape(kv.page_size, None)
    bounds = {"max_graph_rows": rows, "max_pages": runner._page_table.shape[1], "max_queries": 8}
    samples = runner._sampler.next_tokens
    graphs = Guided(
        *(drafts._passes(rows), drafts._sampler, drafts._downloader),
        max_rows=rows,
        max_entries=drafts._page_table.shape[1] * drafts._kv.page_size,
        num_passes=4,
        guide=Guide(engine._scheduler.memory.running, texts, changes=drafter == "head"),
    )
    graphs.capture()

    def change() -> None:
        runner._verify_graphs = LaunchedSteps(model, kv, TritonAttention(shape, **bounds), samples, rows)
        drafts._draft_graphs = graphs
        loop._run_ahead = True

    loop.call(change)
    return graphs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ahead")
    tiny_checkpoint(path / "target", with_tokenizer=True)
    tiny_head(path / "head")
    noisy_copy(path / "target", path / "draft")
    return path


def engine_of(folder: Path, **options: Any) -> Engine:
    bounds = {"max_total_tokens": 1024, "max_running_requests": 8, "context_length": 128, "page_size": 4}
    return Engine(str(folder / "target"), check_ledger=True, random_seed=0, **{**bounds, **options})


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_outputs_and_drafts_are_those_of_steps_that_wait(
    drafter: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn, where some drafts stand; alone, together, with ends and stops, and behind aborts."""
    stop_its_clock(monkeypatch)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 250) for _ in range(5 + number)] for number in range(6)]
    params: list[dict[str, Any]] = [
        {"temperature": 0.7 * (number % 2), "seed": number, "max_new_tokens": 40 + number, "ignore_eos": True}
        for number in range(6)
    ]
    with engine_of(folder, speculative_algorithm="off") as plain:
        expected = [its["output_ids"] for its in plain.generate(input_ids=prompts, sampling_params=params)]
    texts = {np.array(ids, np.int32).tobytes(): text for ids, text in zip(prompts, expected, strict=True)}
    drafts = {"speculative_algorithm": DRAFTERS[drafter], "speculative_draft_model_path": str(folder / drafter)}
    drawn: list[dict[tuple[int, ...], list[int]]] = []
    for is_on in (False, True):
        with engine_of(folder, speculative_num_steps=4, **drafts) as its, every_draft(its):
            graphs = pretend(its, texts, 8, drafter)
            ahead = noted(its, is_on)
            counters = its._scheduler.counters
            for prompt, its_params, tokens in zip(prompts, params, expected, strict=True):
                assert its.generate(input_ids=prompt, sampling_params=its_params)["output_ids"] == tokens
            assert (ahead.count(1) > 20) is is_on
            assert counters.verified_tokens > 0.5 * counters.drafted_tokens > 50
            its.flush_cache()
            found = its.generate(input_ids=prompts, sampling_params=params)
            assert [each["output_ids"] for each in found] == expected
            assert (ahead.count(6) > 2) is is_on
            its.flush_cache()
            stops = [
                {**each, "stop_token_ids": [tokens[17 + 3 * number]]}
                for number, (each, tokens) in enumerate(zip(params, expected, strict=True))
            ]
            found = its.generate(input_ids=prompts, sampling_params=stops)
            for each, tokens in zip(found, expected, strict=True):
                assert each["output_ids"] == tokens[: len(each["output_ids"])]
                assert each["meta_info"]["finish_reason"]["type"] == "stop"
            drawn.append(graphs.guide.drawn)
    waiting, ahead_of_it = drawn
    common = waiting.keys() & ahead_of_it.keys()
    assert len(common) > 60
    assert all(
        one == other for text in common for one, other in zip(waiting[text], ahead_of_it[text], strict=False)
    )


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_mixed_traffic_is_served_as_without_drafts(
    drafter: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constraints, penalties, biases, logprobs and stops among others, that begin alike, wait, and are retracted."""
    stop_its_clock(monkeypatch)
    rng = random.Random(3)
    common = [rng.randrange(3, 250) for _ in range(16)]
    prompts, params = list[list[int]](), list[dict[str, Any]]()
    others: list[dict[str, Any]] = [
        {"regex": "(ab|cd){3,9}[0-9]+"},
        {"frequency_penalty": 0.5},
        {"logit_bias": {"7": 3.0}},
        {"min_new_tokens": 12},
        {"stop_token_ids": list(range(3, 60))},
        {"top_p": 0.8, "temperature": 1.0},
    ]
    for number in range(30):
        prompts.append(
            common[: rng.choice([0, 8, 16])] + [rng.randrange(3, 250) for _ in range(rng.randrange(1, 9))]
        )
        its_own = {"temperature": rng.choice([0.0, 0.7]), "seed": number, "max_new_tokens": rng.randrange(2, 60)}
        params.append({**its_own, **(rng.choice(others) if rng.random() < 0.3 else {}), "ignore_eos": True})
    logprobs = [number % 7 == 0 for number in range(30)]
    options: dict[str, Any] = {"max_running_requests": 3, "max_total_tokens": 92, "schedule_conservativeness": 0.01}
    requests = {"input_ids": prompts, "sampling_params": params, "return_logprob": logprobs}
    with engine_of(folder, speculative_algorithm="off", **options) as plain:
        expected = [its["output_ids"] for its in plain.generate(**requests)]
    texts = {np.array(ids, np.int32).tobytes(): text for ids, text in zip(prompts, expected, strict=True)}
    drafts = {"speculative_algorithm": DRAFTERS[drafter], "speculative_draft_model_path": str(folder / drafter)}
    with engine_of(folder, speculative_num_steps=4, **drafts, **options) as its, every_draft(its):
        pretend(its, texts, 3, drafter)
        ahead = noted(its)
        for turn in range(6):  # who runs beside whom differs from turn to turn
            found = its.generate(**requests)
            assert [each["output_ids"] for each in found] == expected
            if turn and (its._scheduler.counters.retractions or drafter == "draft"):
                break
        assert len(ahead) > 5
        assert its._scheduler.counters.retractions or drafter == "draft", "which ends requests sooner"
        streams = [
            its.generate(input_ids=prompt, sampling_params=each, stream=True)
            for prompt, each in zip(prompts[:6], params[:6], strict=True)
        ]
        for stream in streams:
            next(stream)
            stream.close()
        assert its.generate(input_ids=prompts[8], sampling_params=params[8])["output_ids"] == expected[8]
        assert not its._scheduler.memory.running
