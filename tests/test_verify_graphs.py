"""Steps that verify drafts as CUDA graphs compute them, here without graphs and in Triton's interpreter."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import tests.interpreter  # noqa: F401 - mends it
from sgl.runtime.batch import FROM_DEVICE, Batch, RowSetup
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.runner import verify_graphs
from sgl.runtime.runner.capture import recorded
from sgl.runtime.runner.runner import ModelRunner
from sgl.runtime.runner.verify_graphs import VerifyGraphs
from sgl.runtime.sampling_params import SamplingParams
from tests.tiny_models import tiny_checkpoint

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/test_speculation.py has the graphs themselves", allow_module_level=True)
from sgl.kernels.attention.triton import TritonAttention

PAGE = 4


class Launched(VerifyGraphs):
    """What is replayed elsewhere is launched here."""

    num_replayed = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        plan, graphs = self._attention.plan_verify, self

        class Attention:
            def __getattr__(self, name: str) -> Any:
                return getattr(graphs_attention, name)

            def plan_verify(self, *arguments: Any) -> Any:
                graphs._planned = plan(*arguments)
                return graphs._planned

        graphs_attention = self._attention
        self._attention = Attention()  # type: ignore[assignment]
        model = self._model

        class Model:
            def __getattr__(self, name: str) -> Any:
                return getattr(model, name)

            def forward(self, tokens: Any, kv: Any, attention: Any, *, captured: bool) -> Any:
                return model.forward(tokens, kv, graphs_attention)

        self._model = Model()  # type: ignore[assignment]

        class Graphs(dict[Any, Any]):
            def __missing__(self, key: Any) -> Any:
                return [self]

            def replay(self) -> None:
                graphs.num_replayed += 1
                graphs._forward(graphs._planned[0])

        self._graphs = Graphs()


def batch(rows: list[int], starts: list[int], ids: list[list[int]], writes: Any, num_drafts: list[int]) -> Batch:
    q_lens = np.array([len(its) for its in ids], np.int32)
    setups = [
        RowSetup(row, SamplingParams(temperature=0.0), 0, np.empty(0, np.int32), np.empty(0, np.int32))
        for row in rows
    ]
    return Batch(
        rows=np.array(rows, np.int32),
        q_lens=q_lens,
        kv_lens=np.array(starts, np.int32) + q_lens,
        token_ids=np.concatenate([np.array(its, np.int32) for its in ids]),
        page_writes=writes,
        samples=np.ones(len(rows), np.bool_),
        score_from=np.full(len(rows), -1, np.int32),
        top_logprobs=np.full(len(rows), -1, np.int32),
        setups=setups if not any(starts) else [],
        drafts={b: np.array(ids[b][-n:], np.int32) for b, n in enumerate(num_drafts) if n},
    )


@pytest.mark.parametrize(
    ("q_lens", "num_drafts", "has_logits"),
    [
        ((3, 1, 7), [2, 0, 6], True),
        ((3, 1, 7), [2, 0, 6], False),
        ((20, 1, 13), [0, 0, 10], False),
        ((9, 1, 16), [3, 0, 0], False),
        ((12, 1, 1), [11, 0, 0], True),
    ],
)
def test_padded_rows_and_tokens_change_nothing(
    q_lens: tuple[int, ...],
    num_drafts: list[int],
    has_logits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of 1 to 20 tokens, one of them from the device, in buckets of 4 or 8 rows of 8, whose logits are replayed,
    too, or are too many."""
    monkeypatch.setattr(verify_graphs, "_LOGITS", 32 if has_logits else 31)
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path))
    device = torch.device("cpu")
    model = load_decoder(config, device=device, dtype="float32", max_positions=64)
    rng = np.random.default_rng(0)
    results = []
    for is_replayed in (False, True):
        kv = KVCache(config, 40, PAGE, torch.float32, device)
        shape = model.attention_shape(PAGE, None)
        attention = TritonAttention(shape, max_graph_rows=8, max_pages=16, max_queries=8)
        runner = ModelRunner(model, kv, attention, max_rows=8, max_pages=16, device=device)
        rng = np.random.default_rng(0)
        rows = [5, 0, 3]
        writes = np.array([[row, i, 1 + n * 8 + i] for n, row in enumerate(rows) for i in range(8)], np.int32)
        prompts = [rng.integers(1, config.vocab_size, n).tolist() for n in (9, 4, 13)]
        runner.launch(batch(rows, [0, 0, 0], prompts, writes, [0, 0, 0])).wait()
        if is_replayed:
            runner._verify_graphs = Launched(model, kv, attention, runner._sampler.next_tokens, 8)
        ids = [rng.integers(1, config.vocab_size, n).tolist() for n in q_lens]
        ids[1] = [FROM_DEVICE]
        launched = runner.forward(batch(rows, [9, 4, 13], ids, writes[:0], num_drafts))
        found = runner.sample(launched).wait()
        if is_replayed:
            replayed = runner._verify_graphs._logits
            assert launched.logits is not None
            assert (launched.logits.data_ptr() == replayed.data_ptr()) == has_logits
            assert runner._verify_graphs.num_replayed == 1
        checks = {b: its.tolist() for b, its in found.checks.items()}
        caches = [kv.keys[layer][1:].clone() for layer in range(config.num_layers)]
        results.append((found.next_tokens.tolist(), checks, caches))
    (tokens, checks, caches), (replayed_tokens, replayed_checks, replayed_caches) = results
    assert tokens == replayed_tokens
    assert checks == replayed_checks
    assert {b: len(its) for b, its in checks.items()} == {b: n for b, n in enumerate(num_drafts) if n}
    for one, other in zip(caches, replayed_caches, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("work", "most"), [(1 << 33, 16), (0, 8)])
def test_long_rows_are_replayed_if_they_read_little_again(
    work: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As so many rows of eight tokens; more of them where products take no time."""
    monkeypatch.setattr(verify_graphs, "_SMALL_WORK", work)
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path))
    device = torch.device("cpu")
    model = load_decoder(config, device=device, dtype="float32", max_positions=64)
    kv = KVCache(config, 40, PAGE, torch.float32, device)
    attention = TritonAttention(model.attention_shape(PAGE, None), max_graph_rows=16, max_pages=16, max_queries=8)
    graphs = VerifyGraphs(model, kv, attention, torch.zeros(17, dtype=torch.int64), 16)

    def holds(q_lens: list[int], past: int = 0, **options: Any) -> bool:
        its = batch(
            list(range(len(q_lens))), [past] * len(q_lens), [[1] * n for n in q_lens], None, [0] * len(q_lens)
        )
        return graphs.holds(replace(its, **options))

    assert holds([8 * most])
    assert not holds([8 * most + 1])
    assert holds([17, 8, 1, 8 * most - 40])
    assert not holds([17, 8, 1, 8 * most - 39])
    assert holds([2] * 16)
    assert not holds([2] * 17)
    assert not holds([9], is_observed=True)
    assert not holds([9], samples=np.zeros(1, np.bool_))
    of_token = 2 * config.num_kv_heads * config.head_dim * 4
    longest = (8 << 20) // of_token
    assert holds([16], longest - 16)
    assert not holds([16], longest - 15)
    assert holds([8], longest)


@pytest.mark.parametrize(
    ("num_layers", "is_whole", "pieces"), [(3, False, [3]), (9, False, [4, 5]), (9, True, [9])]
)
def test_the_first_piece_of_a_forward_pass_is_short(
    num_layers: int, is_whole: bool, pieces: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure ends the capture."""
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path, num_hidden_layers=num_layers))
    kv = KVCache(config, 4, PAGE, torch.float32, torch.device("cpu"))
    layers: list[int] = []
    open_graphs = 0

    class Graph:
        def capture_begin(self, **_: Any) -> None:
            nonlocal open_graphs
            open_graphs += 1
            layers.append(0)

        def capture_end(self) -> None:
            nonlocal open_graphs
            open_graphs -= 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)

    def forward(most: int = num_layers) -> None:
        for index in range(num_layers):
            assert index < most, "as told"
            kv.reach(index)
            assert open_graphs == 1
            layers[-1] += 1

    assert len(recorded(forward, kv, None, cast(Any, None), is_whole=is_whole)) == len(pieces)
    assert layers == pieces
    for most in range(num_layers):
        with pytest.raises(AssertionError, match="as told"):
            recorded(partial(forward, most), kv, None, cast(Any, None), is_whole=is_whole)
        assert open_graphs == 0
