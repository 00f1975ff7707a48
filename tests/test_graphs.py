"""What is captured in CUDA graphs; what becomes of it is for test_gpu.py."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl.kernels.attention.base import MAX_INPUTS, AttentionStep
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.kv_cache import WindowedLayers
from sgl.runtime.runner.graphs import DecodeGraphs, buckets
from sgl.runtime.runner.idle import idle_batch
from sgl.runtime.runner.pack import pack, windowed_step
from sgl.runtime.runner.prompt_graphs import PromptGraphs, that_fit, token_buckets
from sgl.runtime.runner.verify_graphs import VerifyGraphs
from tests.tiny_models import edit_json, tiny_checkpoint


def test_decodes_are_padded_little_where_products_count() -> None:
    sizes = buckets(512)
    assert sizes[:4] == [1, 2, 4, 8]
    assert sizes[-1] == 512
    assert buckets(100)[-1] == 100
    assert all((b - a - 1) / b < 0.1 for a, b in pairwise(sizes) if a >= 160)


@pytest.mark.parametrize("most", [2, 16, 17, 100, 1000, 8448, 10**6])
@pytest.mark.parametrize("num_weights", [100, 15_700_000, 218_000_000, 855_000_000, 10**11])
def test_steps_with_prompts_are_padded_little_where_products_count(num_weights: int, most: int) -> None:
    sizes = token_buckets(num_weights, most)
    assert sizes == sorted(set(sizes))
    assert (
        min(most, 64) <= sizes[-1] <= most
    )  # launching so few takes longer than computing them, whatever the model
    assert len(sizes) < 50
    assert all((b - a - 1) / b <= 1 / 8 for a, b in pairwise(sizes) if a >= 256)


def test_graphs_of_steps_with_prompts_leave_most_of_the_memory(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 3072}
    folder = tiny_checkpoint(tmp_path)
    edit_json(folder / "config.json", **sizes)  # weights of this size would take half a minute to write
    config = ModelConfig.from_pretrained(folder)
    wanted = token_buckets(15_700_000, 8448)
    assert that_fit(wanted, config, 2, 16 << 30) == wanted
    few, one = that_fit(wanted, config, 2, 1 << 30), that_fit(wanted, config, 2, 0)
    assert few == wanted[: len(few)]
    assert 10 < len(few) < len(wanted)
    assert one == wanted[:1]


def test_other_threads_spoil_no_capture_of_a_step_with_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    class Graph:
        def capture_begin(self, **options: object) -> None:
            begun.append(options)

        def capture_end(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    graphs: Any = PromptGraphs.__new__(PromptGraphs)
    graphs._model = SimpleNamespace(config=SimpleNamespace(num_layers=3), first_layers=lambda: [0])
    graphs._kv = SimpleNamespace(windowed=None)
    graphs._inputs, graphs._pieces = torch.zeros(1024, dtype=torch.uint8), {}
    graphs._enter = graphs._piece = lambda *_: None
    graphs._capture(16, "the pool")
    assert begun == [{"pool": "the pool", "capture_error_mode": "thread_local"}] * 3
    _, pieces = graphs._pieces[16]
    assert len(pieces) == 3


def test_large_layers_are_launched_for_fewer_tokens() -> None:
    small, large = token_buckets(15_700_000, 8448)[-1], token_buckets(218_000_000, 8448)[-1]
    assert large < small
    assert large >= 1024


class _Placing:
    """An attention backend that only places what comes along."""

    def variant(self, step: AttentionStep) -> int:
        return 0

    def plan_decode(self, step: AttentionStep, variant: int, inputs: Any) -> list[torch.Tensor]:
        (rows,) = inputs
        assert len(rows) <= MAX_INPUTS
        self.placed = torch.from_numpy(rows)
        return [self.placed]

    def plan_verify(self, step: AttentionStep, queries: int, inputs: Any) -> list[torch.Tensor]:
        return [*self.plan_decode(step, 0, inputs), torch.from_numpy(step.kv_lens - step.q_lens)]


@pytest.mark.parametrize("has_pools", [False, True])
def test_replayed_steps_write_where_launched_ones_would(has_pools: bool) -> None:
    """Decodes and steps that verify drafts, padded, with one pool of pages and with two."""
    rng = np.random.default_rng(0)
    layers = WindowedLayers([True], window=9, num_pages=50) if has_pools else None
    model: Any = SimpleNamespace(device=torch.device("cpu"), vocabulary=range(4), dtype=torch.float32)
    model.config = SimpleNamespace(hidden_size=2)
    model.collectives, model.windows = None, (None,)
    model.weights = SimpleNamespace(num_multiplied=100)
    kv: Any = SimpleNamespace(page_size=4, windowed=layers, keys=[torch.zeros(50, 4, 1, 2)])
    attention: Any = _Placing()
    tokens = torch.zeros(4, dtype=torch.int64)
    table, window_table = rng.permutation(48).reshape(3, 16) + 1, rng.permutation(48).reshape(3, 16) + 1
    for q_lens in ([1, 1, 1], [3, 1, 2]):
        batch: Any = idle_batch(q_lens, 0.0)
        batch.kv_lens = np.array([40, 5, 23], np.int32)
        windowed = windowed_step(batch, window_table, 9, 4) if has_pools else None
        step = AttentionStep(batch.q_lens, batch.kv_lens, table[batch.rows, :10], windowed)
        expected = pack(batch, step, 4).slots
        if sum(q_lens) == 3:
            decodes = DecodeGraphs(model, kv, attention, tokens, 4)
            decodes._graphs[4, 0, False] = SimpleNamespace(replay=lambda: None)  # type: ignore[assignment]
            assert decodes.run(batch, step) is not None
            found, places = attention.placed[3:].squeeze(0), np.arange(3)
            batch.is_observed = True
            assert decodes.run(batch, step) is None, "they keep no hidden states"
            checks = VerifyGraphs(model, kv, attention, tokens, 4)
            checks._graphs[4, 2] = [SimpleNamespace(replay=lambda: None)]  # type: ignore[list-item]
            observed = checks.run(batch, step)
            assert observed is not None
            assert observed.places.tolist() == [0, 2, 4]
            assert observed.slots.numpy()[..., [0, 2, 4]].tolist() == expected[..., :3].tolist()
            batch.is_observed = False
            assert checks.run(batch, step) is None
        else:
            batch.is_observed = True
            checks = VerifyGraphs(model, kv, attention, tokens, 4)
            checks._graphs[4, 4] = [SimpleNamespace(replay=lambda: None)]  # type: ignore[list-item]
            verified = checks.run(batch, step)
            assert verified is not None
            found, places = verified.slots, verified.places.numpy()
            assert places.tolist() == [0, 1, 2, 4, 8, 9]
        assert found.numpy()[..., places].tolist() == expected[..., : len(places)].tolist()
