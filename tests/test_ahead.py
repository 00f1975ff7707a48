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
from tests.tiny_models import tiny_checkpoint

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/test_gpu_drafts.py has the graphs themselves", allow_module_level=True)
from sgl.kernels import ahead_triton
from sgl.kernels.attention.triton import TritonAttention
from tests.test_draft_graphs import Launched as LaunchedDrafts
from tests.test_verify_graphs import Launched as LaunchedSteps


@pytest.mark.parametrize("num_drafts", range(1, 8))
@pytest.mark.parametrize("simulated", [-1, 0, 3])
def test_inputs_are_moved_to_where_drafts_end(num_drafts: int, simulated: int) -> None:
    rng = np.random.default_rng(num_drafts)
    rows, bucket, passes, queries, firsts = 3, 4, 7, 8, 8
    num_tokens = num_drafts + 1

    def numbers(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 1000, shape))

    stands = [0, num_drafts, num_drafts // 2]
    computed = numbers(bucket * queries)
    sampled = numbers(rows, num_tokens) + 1000
    for b, number in enumerate(stands):
        sampled[b, :number] = computed[b * queries + 1 : b * queries + 1 + number]
    if simulated >= 0:
        stands = [min(simulated, num_drafts)] * rows
    expected = sampled.clone()
    if simulated >= 0:
        for b, number in enumerate(stands):
            expected[b, :number] = computed[b * queries + 1 : b * queries + 1 + number]
    window, stood, tokens = numbers(rows, 2 * num_tokens), numbers(rows), numbers(rows, num_tokens)
    token_ids, last = numbers(bucket * firsts), numbers(bucket)
    seen, places, positions, slots = later = tuple(numbers(passes, bucket) for _ in range(4))
    before = [its.clone() for its in (token_ids, last, seen, places, positions, slots)]
    ahead_triton.accept(
        sampled, computed, queries, window, simulated, stood, tokens, (token_ids, firsts, last), later
    )
    old_ids, old_last, old_seen, old_places, old_positions, old_slots = before
    assert stood.tolist() == stands
    for b, number in enumerate(stands):
        back, wanted = number - num_drafts, slice(num_drafts - 1)
        assert tokens[b, 0] == expected[b, number]
        old_ids[b * firsts : b * firsts + num_tokens] = expected[b]
        old_last[b] += back
        old_seen[1:, b] += back
        old_places[:, b] += back
        old_positions[wanted, b] += back
        old_slots[wanted, b] = window[b, 1 + number : number + num_drafts]
    for its, old in zip((token_ids, last, seen, places, positions, slots), before, strict=True):
        assert torch.equal(its, old)

    drafts, inputs = numbers(passes, bucket), [numbers(bucket * queries) for _ in range(4)]
    first = numbers(bucket).to(torch.int32)
    old = [its.clone() for its in (*inputs, first)]
    sampling = numbers(rows * num_tokens), numbers(rows * num_tokens)
    made: Any = (*inputs, first)
    ahead_triton.place(drafts, window, stood, tokens, made, queries, sampling)
    for b, number in enumerate(stands):
        back, at, compact = (
            number - num_drafts,
            slice(b * queries, b * queries + num_tokens),
            slice(b * num_tokens, None),
        )
        ids = torch.cat((expected[b, number : number + 1], drafts[:num_drafts, b]))
        assert torch.equal(tokens[b], ids)
        old[1][at] = ids
        old[2][at] += back
        old[3][at] = window[b, number : number + num_tokens]
        old[4][b] += back
        assert torch.equal(sampling[0][compact][:num_tokens], old[0][at])
        assert torch.equal(sampling[1][compact][:num_tokens], old[2][at] + 1)
    for its, was in zip((*inputs, first), old, strict=True):
        assert torch.equal(its, was)


class Guided(LaunchedDrafts):
    """See `Guide`."""

    def __init__(self, *arguments: Any, guide: Guide, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.guide = guide

    def _compute(self, bucket: int, queries: int) -> None:
        super()._compute(bucket, queries)
        self.guide.change(self, bucket, queries)


def pretend(engine: Engine, texts: dict[bytes, list[int]], rows: int) -> Guided:
    """Have it launch what would be replayed, ahead where it can."""
    loop: Any = engine._loop
    runner, (drafter,) = loop._runner, loop._speculator._models
    model, kv, head = runner._model, runner._kv, drafter._head
    shape = model.attention_shape(kv.page_size, None)
    bounds = {"max_graph_rows": rows, "max_pages": runner._page_table.shape[1], "max_queries": 8}
    samples = runner._sampler.next_tokens
    graphs = Guided(
        *(head._head, head._kv, head._features, head._sampler, head._downloader),
        max_rows=rows,
        max_entries=head._page_table.shape[1],
        passes=4,
        guide=Guide(engine._scheduler.memory.running, texts),
    )
    graphs.capture()

    def change() -> None:
        runner._verify_graphs = LaunchedSteps(model, kv, TritonAttention(shape, **bounds), samples, rows)
        head._draft_graphs = graphs
        loop._run_ahead = True

    loop.call(change)
    return graphs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ahead")
    tiny_checkpoint(path / "target", with_tokenizer=True)
    tiny_head(path / "head")
    return path


def engine_of(folder: Path, **options: Any) -> Engine:
    bounds = {"max_total_tokens": 1024, "max_running_requests": 8, "context_length": 128, "page_size": 4}
    return Engine(str(folder / "target"), check_ledger=True, random_seed=0, **{**bounds, **options})


def test_outputs_and_drafts_are_those_of_steps_that_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(folder / "head")}
    drawn: list[dict[tuple[int, ...], list[int]]] = []
    for is_on in (False, True):
        with engine_of(folder, speculative_num_steps=4, **drafts) as its, every_draft(its):
            graphs = pretend(its, texts, rows=8)
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
    assert all(waiting[text] == ahead_of_it[text] for text in common)


@pytest.mark.slow
def test_mixed_traffic_is_served_as_without_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    options: dict[str, Any] = {"max_running_requests": 3, "max_total_tokens": 112, "schedule_conservativeness": 0.1}
    requests = {"input_ids": prompts, "sampling_params": params, "return_logprob": logprobs}
    with engine_of(folder, speculative_algorithm="off", **options) as plain:
        expected = [its["output_ids"] for its in plain.generate(**requests)]
    texts = {np.array(ids, np.int32).tobytes(): text for ids, text in zip(prompts, expected, strict=True)}
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(folder / "head")}
    with engine_of(folder, speculative_num_steps=4, **drafts, **options) as its, every_draft(its):
        pretend(its, texts, rows=3)
        ahead = noted(its)
        for _ in range(2):
            found = its.generate(**requests)
            assert [each["output_ids"] for each in found] == expected
        assert {1, 2, 3} & set(ahead)
        assert len(ahead) > 20
        assert its._scheduler.counters.retractions
        streams = [
            its.generate(input_ids=prompt, sampling_params=each, stream=True)
            for prompt, each in zip(prompts[:6], params[:6], strict=True)
        ]
        for stream in streams:
            next(stream)
            stream.close()
        assert its.generate(input_ids=prompts[8], sampling_params=params[8])["output_ids"] == expected[8]
        assert not its._scheduler.memory.running
