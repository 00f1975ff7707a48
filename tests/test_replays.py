"""Replayed decode steps without a GPU: a stand-in for a CUDA graph calls again what was called when it was captured,
and Triton's interpreter runs the kernels. What real graphs make of it is for test_gpu.py.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from sgl.kernels.attention.torch import TorchAttention
from sgl.runtime.batch import FROM_DEVICE, Batch, RowSetup
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.runner import runner as runner_module
from sgl.runtime.runner.capture import capturing
from sgl.runtime.runner.graphs import DecodeGraphs
from sgl.runtime.runner.observer import ObservedStep, Observer
from sgl.runtime.runner.runner import ModelRunner
from sgl.runtime.runner.verify_graphs import VerifyGraphs
from sgl.runtime.sampling_params import SamplingParams
from tests.tiny_models import tiny_checkpoint

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off beside a GPU", allow_module_level=True)
pytest.importorskip("triton")
import tests.interpreter  # noqa: F401 - mends it
from sgl.kernels.attention.triton import TritonAttention

ROWS, PAGES, PAGE_SIZE = 6, 3, 4
CPU = torch.device("cpu")


class Graph:
    """What was called while it was captured is called again, with what is at the same places by then."""

    capturing: Graph | None = None

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for call in self._calls:
            call()

    @staticmethod
    @contextmanager
    def capture(graph: Graph, *, capture_error_mode: str, **_: Any) -> Iterator[None]:
        assert not gc.isenabled()
        assert capture_error_mode == "thread_local"
        Graph.capturing = graph
        yield
        Graph.capturing = None

    @staticmethod
    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if Graph.capturing is not None:
                Graph.capturing._calls.append(partial(function, *arguments))
            return function(*arguments)

        return call


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def unpinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*size, **options)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Graph.capture)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    for graphs in (DecodeGraphs, VerifyGraphs):
        monkeypatch.setattr(graphs, "_forward", Graph.recorded(graphs._forward))


def make_runner(model: Decoder, max_graph_rows: int, observer: Observer | None = None) -> ModelRunner:
    shape = model.attention_shape(PAGE_SIZE)
    attention = TritonAttention(shape, max_graph_rows=max_graph_rows, max_pages=PAGES)
    kv = KVCache(model.config, PAGES * ROWS + 1, PAGE_SIZE, model.dtype, CPU)
    limits = {"max_rows": ROWS, "max_pages": PAGES, "max_graph_rows": max_graph_rows}
    runner = ModelRunner(model, kv, attention, device=CPU, observer=observer, **limits)
    if runner._graphs is not None:
        runner._graphs.capture()
    if runner._verify_graphs is not None and observer is not None:
        runner._verify_graphs.capture()
    return runner


def batch_of(rows: list[int], q_len: int, kv_lens: list[int], params: list[dict[str, Any]]) -> Batch:
    """Prompts of so many tokens where q_len is not 1. kv_lens: of every row before."""
    size = len(rows)
    is_first = q_len > 1
    for row in rows:
        kv_lens[row] += q_len
    ids = [[row + 1] * q_len for row in rows] if is_first else [[FROM_DEVICE]] * size
    writes = [(row, i, 1 + PAGES * row + i) for row in rows for i in range(PAGES)] if is_first else []
    empty = np.empty(0, np.int32)
    setups = [
        RowSetup(row, SamplingParams(**params[row]), row, np.array(ids[i]), empty) for i, row in enumerate(rows)
    ]
    return Batch(
        rows=np.array(rows, np.int32),
        q_lens=np.full(size, q_len, np.int32),
        kv_lens=np.array([kv_lens[row] for row in rows], np.int32),
        token_ids=np.array(ids, np.int32).reshape(-1),
        page_writes=np.array(writes, np.int32).reshape(-1, 3),
        samples=np.ones(size, np.bool_),
        score_from=np.full(size, -1, np.int32),
        top_logprobs=np.full(size, -1, np.int32),
        setups=setups if is_first else [],
    )


@pytest.mark.costly
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("odd_one", [{}, {"logit_bias": {7: 100.0}}], ids=["plain", "one row has a bias"])
def test_replayed_steps_sample_what_launched_ones_do(tmp_path: Path, odd_one: dict[str, Any]) -> None:
    """While the step ahead is not over; rows of padding and of requests that sit out keep what is theirs."""
    params: list[dict[str, Any]] = [{"temperature": float(row % 2)} for row in range(ROWS)]
    params[1] |= odd_one
    model = load_decoder(ModelConfig.from_pretrained(tiny_checkpoint(tmp_path)), device=CPU, dtype="float32")
    found = []
    for max_graph_rows in (0, 5):
        runner = make_runner(model, max_graph_rows)
        kv_lens = [0] * ROWS
        pending = runner.launch(batch_of(list(range(ROWS)), 2, kv_lens, params))
        tokens = []
        for rows in ([0, 1, 2, 3, 4, 5], [5, 1, 2], [4, 0, 3, 1, 2], [3], [1, 4, 2], [2, 5]):
            following = runner.launch(batch_of(rows, 1, kv_lens, params))
            tokens.append(pending.wait().next_tokens.tolist())
            pending = following
        tokens.append(pending.wait().next_tokens.tolist())
        found.append((tokens, runner._sampler.next_tokens[:ROWS].tolist()))
    assert found[0] == found[1]


class Watcher(Observer):
    """Notes what an observer is shown."""

    layers = (0, 1)

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []

    def observe(self, step: ObservedStep) -> None:
        assert len(step.slots) == step.batch.q_lens.sum()
        assert len(step.pages) == len(step.batch)
        self.seen.append([its.clone() for its in (step.slots, *step.hidden)])


@pytest.mark.slow
@pytest.mark.usefixtures("stand_ins")
def test_an_observer_is_shown_replayed_steps_as_launched_ones(tmp_path: Path) -> None:
    """Decodes that it sees are replayed as steps that verify; others by graphs that keep nothing."""
    model = load_decoder(ModelConfig.from_pretrained(tiny_checkpoint(tmp_path)), device=CPU, dtype="float32")
    found, tokens = [], []
    for max_graph_rows in (0, 5):
        watcher, kv_lens = Watcher(), [0] * ROWS
        runner = make_runner(model, max_graph_rows, watcher)
        for is_observed in (True, False, True):
            for rows in ([5, 1, 2], [0, 1, 2, 3, 4, 5], [3]):
                q_len = 1 if kv_lens[3] else 2
                batch = batch_of(list(range(ROWS)) if q_len > 1 else rows, q_len, kv_lens, [{}] * ROWS)
                batch.is_observed = is_observed
                before = len(watcher.seen)
                tokens.append(runner.launch(batch).wait().next_tokens.tolist())
                assert len(watcher.seen) == before + is_observed
        assert len(watcher.seen) == 6
        found.append(watcher.seen)
        model.aux_hidden_states = None
    assert tokens[: len(tokens) // 2] == tokens[len(tokens) // 2 :]
    for launched, replayed in zip(*found, strict=True):
        assert torch.equal(launched[0], replayed[0])
        torch.testing.assert_close(launched[1:], replayed[1:], atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("stand_ins")
def test_graphs_of_decodes_keep_nothing_whatever_the_latest_step_did(tmp_path: Path) -> None:
    """They are captured anew when memory is resumed."""
    model = load_decoder(ModelConfig.from_pretrained(tiny_checkpoint(tmp_path)), device=CPU, dtype="float32")
    runner: Any = make_runner(model, 2, Watcher())
    runner._aux.is_on, seen = True, list[bool]()
    runner._graphs._forward = lambda *inputs: seen.append(runner._aux.is_on)
    runner._graphs.capture()
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("is_observed", [True, False])
def test_steps_that_nobody_observes_keep_no_hidden_states(is_observed: bool, tmp_path: Path) -> None:
    model = load_decoder(ModelConfig.from_pretrained(tiny_checkpoint(tmp_path)), device=CPU, dtype="float32")
    watcher = Watcher()
    runner = make_runner(model, 0, watcher)
    batch = batch_of([0, 1], 2, [0] * ROWS, [{}] * ROWS)
    batch.is_observed = is_observed
    runner.forward(batch)
    assert runner._aux is not None
    assert bool(runner._aux._kept.any()) == is_observed
    assert len(watcher.seen) == is_observed


@pytest.mark.usefixtures("stand_ins")
def test_garbage_is_collected_again_after_a_capture_that_failed() -> None:
    with pytest.raises(ZeroDivisionError), capturing("nothing"):
        _ = 1 // gc.isenabled()
    assert gc.isenabled()
    with capturing("nothing"):  # nor does anybody wait for that one for ever
        pass


@pytest.mark.usefixtures("stand_ins")
def test_a_step_that_is_launched_kernel_by_kernel_says_so(tmp_path: Path) -> None:
    model = load_decoder(ModelConfig.from_pretrained(tiny_checkpoint(tmp_path)), device=CPU, dtype="float32")
    runner = make_runner(model, 5)
    forward, kv_lens = runner._forward, [0] * ROWS
    seen: list[bool] = []

    def watched(*arguments: Any) -> Any:
        seen.append(runner.is_launching())
        with mock.patch.object(runner_module, "_LONGEST_LAUNCH", 0.0):
            seen.append(runner.is_launching())  # for so long that it waits for the device
        return forward(*arguments)

    runner._forward = watched  # type: ignore[method-assign]
    params: list[dict[str, Any]] = [{} for _ in range(ROWS)]
    runner.launch(batch_of([0, 1], 2, kv_lens, params)).wait()
    assert seen == [True, False]
    assert not runner.is_launching()
    runner.launch(batch_of([0, 1], 1, kv_lens, params)).wait()  # replayed
    assert len(seen) == 2
    runner._forward = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        runner.launch(batch_of([2], 2, kv_lens, params))
    assert not runner.is_launching()


@pytest.mark.parametrize(
    ("rows", "pages", "num_tokens", "longest"),
    [(8, 8, 64, [[1] * 8, [1, 31, 32], [1]]), (1, 8, 20, [[1], [20], [1]]), (2, 1, 3, [[1] * 2, [1, 2], [1]])],
)
def test_a_warm_up_has_prompts_of_all_tokens_of_a_step(
    rows: int, pages: int, num_tokens: int, longest: list[list[int]], tmp_path: Path
) -> None:
    """And of no more; a single row has them as well."""
    model = load_decoder(ModelConfig.from_pretrained(tiny_checkpoint(tmp_path)), device=CPU, dtype="float32")
    shape = model.attention_shape(PAGE_SIZE)
    kv = KVCache(model.config, pages + 1, PAGE_SIZE, model.dtype, CPU)
    runner = ModelRunner(model, kv, TorchAttention(shape), max_rows=rows, max_pages=pages, device=CPU)
    with mock.patch.object(runner, "launch", wraps=runner.launch) as launch:
        runner.prepare(num_tokens)
        runner.warm_up(num_tokens)
    launched = [call.args[0].q_lens.tolist() for call in launch.call_args_list]
    assert [sorted(q_lens) for q_lens in launched[:6:2]] == [sorted(q_lens) for q_lens in longest]
    assert all(sum(q_lens) <= max(num_tokens, rows) for q_lens in launched)
    fitting = {q_len for q_len in (2, 8, 64) if q_len <= min(num_tokens, pages * PAGE_SIZE)}
    assert {max(q_lens) for q_lens in launched[6:-1]} == fitting
    assert launched[-1] == [1]
    assert launch.call_args.args[0].top_logprobs.tolist() == [0]


def test_a_context_shorter_than_a_page_is_warmed_up(tmp_path: Path) -> None:
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path))
    model = load_decoder(config, device=CPU, dtype="float32", max_positions=PAGE_SIZE - 1)
    shape = model.attention_shape(PAGE_SIZE)
    kv = KVCache(model.config, 3, PAGE_SIZE, model.dtype, CPU)
    runner = ModelRunner(model, kv, TorchAttention(shape), max_rows=2, max_pages=1, device=CPU)
    runner.prepare(PAGE_SIZE)
    runner.warm_up(PAGE_SIZE)
