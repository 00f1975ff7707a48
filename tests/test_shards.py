"""Parts of a model on two ranks give what the whole gives: weights, logits, draws; and frames arrive as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl.errors import ConfigError
from sgl.grammar.automaton.finished import Configuration
from sgl.kernels.collectives import Folder
from sgl.kernels.sampling import ops as sampling
from sgl.runtime.batch import BROADCAST, Batch, RowSetup
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import Shard
from sgl.runtime.model.tokens import Tokens
from sgl.runtime.model.weights import checkpoint_tensors
from sgl.runtime.parallel import wire
from sgl.runtime.parallel.ring import Ring
from sgl.runtime.runner.cut_vocabulary import outline
from sgl.runtime.sampling_params import SamplingParams
from tests.patience import PATIENCE
from tests.test_models import BROADER, MODELS, Paged, Step, in_chunks
from tests.tiny_models import tiny_checkpoint

T = TypeVar("T")


def on_ranks(folder: Path, tp_size: int, pp_size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What each rank of a group of threads returns."""
    folder.mkdir()
    size = tp_size * pp_size

    held: list[Ranks] = []  # one that closes ends what the others still receive

    def run(rank: int) -> T:
        ranks = Ranks.join(Folder(str(folder)), Shard.of(rank, tp_size, pp_size), torch.device("cpu"))
        held.append(ranks)
        return work(ranks)

    with ThreadPoolExecutor(size) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(run, rank) for rank in range(size)]]


class PagedStage(Paged):
    """The part of a rank; the first stage collects the logits."""

    def step(self, rows: Step) -> None:
        links, decoder, own = self.decoder.links, self.decoder, type(self.decoder)

        def forward(tokens: Tokens, *planned: Any) -> torch.Tensor:
            if links is None:
                return own.forward(decoder, tokens, *planned)
            before = None
            if not decoder.is_first:
                before = links.receive(torch.empty(len(tokens.ids), decoder.config.hidden_size))
            done = decoder.forward_stage(tokens, *planned, before)
            links.send(done)
            return links.receive(torch.empty_like(done)) if decoder.is_first else done

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            if not decoder.is_first:
                return torch.empty(len(hidden), 0)
            return decoder.whole(own.logits(decoder, hidden))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder, "forward", forward)
            patch.setattr(decoder, "logits", logits)
            super().step(rows)


@pytest.mark.costly
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in BROADER else name for name in MODELS]
)
@pytest.mark.parametrize(
    ("tp_size", "pp_size"), [(2, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (1, 2)))]
)
def test_parts_have_the_logits_of_the_whole(name: str, tp_size: int, pp_size: int, tmp_path: Path) -> None:
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path / "model", **MODELS[name]))
    rng = np.random.default_rng(3)
    sequences = [rng.integers(0, config.vocab_size, length).tolist() for length in (1, 40, 23)]
    whole = load_decoder(config)
    expected = Paged(whole, sequences, 16).run(in_chunks(sequences, 7))
    parameters = checkpoint_tensors(config, whole.weights)

    def work(ranks: Ranks) -> tuple[set[str], list[torch.Tensor]]:
        decoder, shard = load_decoder(config, ranks=ranks), ranks.shard
        parts = checkpoint_tensors(config, decoder.weights, shard)
        for tensor_name, part in parts.items():
            of_whole = parameters[tensor_name]
            place = shard.part(tensor_name, config)
            wanted = of_whole[place]
            if config.experts is not None and config.experts.clamped is not None and "gate_up_proj" in tensor_name:
                its = slice(place[-1].start // 2, place[-1].stop // 2)  # of all gates, then all ups, once loaded
                wanted = torch.cat([half[..., its] for half in of_whole.chunk(2, -1)], -1)
            assert torch.equal(part, wanted if shard.adds(tensor_name) else torch.zeros_like(wanted)), tensor_name
        return set(parts), PagedStage(decoder, sequences, 16).run(in_chunks(sequences, 7))

    held: set[str] = set()
    for rank, (names, found) in enumerate(on_ranks(tmp_path / "ranks", tp_size, pp_size, work)):
        held |= names
        for one, other in zip(found, expected, strict=True):
            if rank < tp_size:
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
                assert torch.equal(one.argmax(-1), other.argmax(-1))
    assert held == set(parameters)


@pytest.mark.parametrize(
    ("size", "overrides", "words"),
    [
        (3, {}, "4 attention heads"),
        (2, {"intermediate_size": 63}, "an intermediate_size of 63"),
        (6, {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}, "4 key-value heads"),
        (4, {"vocab_size": 90}, "a vocabulary of 90"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(
    size: int, overrides: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path, **overrides))
    with pytest.raises(ConfigError, match=rf"tp_size={size}: .* has {words}, which {size} ranks") as refused:
        Shard(0, size).check(config)
    assert refused.value.option == "tp_size"
    with pytest.raises(ConfigError, match=r"pp_size=9: .* has [0-9] layers, fewer than stages"):
        Shard(stages=9).check(config)


def test_the_same_dummy_weights_are_cut(tmp_path: Path) -> None:
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path / "model", "qwen2"))
    whole = checkpoint_tensors(config, load_decoder(config, load_format="dummy").weights)

    def work(ranks: Ranks) -> dict[str, torch.Tensor]:
        decoder = load_decoder(config, load_format="dummy", ranks=ranks)
        return checkpoint_tensors(config, decoder.weights, ranks.shard)

    for rank, parts in enumerate(on_ranks(tmp_path / "ranks", 2, 2, work)):
        for name, part in parts.items():
            assert torch.equal(part, whole[name][Shard.of(rank, 2, 2).part(name, config)]), name


@given(st.data())
def test_the_largest_key_of_all_parts_names_the_token_of_the_whole(data: st.DataObject) -> None:
    width, parts = data.draw(st.sampled_from([32, 64, 160])), data.draw(st.integers(1, 5))
    num_rows = data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    vocab_size = width * parts - data.draw(st.integers(0, 31))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * data.draw(st.sampled_from([0.1, 1.0, 30.0]))
    if data.draw(st.booleans()):
        logits = logits.round()  # equals
    if data.draw(st.booleans()):  # masked, at times a whole part
        logits[torch.rand(logits.shape, generator=generator) < 0.9] = -torch.inf
    logits[:, data.draw(st.integers(0, vocab_size - 1))] = 1.0
    temperature = torch.tensor([data.draw(st.sampled_from([0.0, 0.5, 1.0, 7.0])) for _ in range(num_rows)])
    seeds = torch.randint(0, 2**62, (num_rows,), generator=generator)
    positions = torch.arange(num_rows) + 5
    expected = sampling.sample(logits, temperature, seeds, positions)
    keys = torch.stack(
        [
            sampling.draw_keys(logits[:, start : start + width], temperature, seeds, positions, start)
            for start in range(0, vocab_size, width)
        ]
    )
    assert torch.equal(sampling.drawn_ids(keys.amax(0)), expected)
    greedy = torch.zeros(num_rows)
    keys = torch.stack(
        [
            sampling.draw_keys(logits[:, start : start + width], greedy, None, positions, start)
            for start in range(0, vocab_size, width)
        ]
    )
    assert torch.equal(sampling.drawn_ids(keys.amax(0)), sampling.greedy(logits))
    given_ids = torch.arange(num_rows)
    assert bool((sampling.chosen_keys(given_ids) > keys.amax(0)).all())
    assert torch.equal(sampling.drawn_ids(sampling.chosen_keys(given_ids)), given_ids)


def random_batch(rng: np.random.Generator) -> Batch:
    """Any shape a scheduler could make, and some it could not."""
    num_rows = int(rng.integers(1, 40))
    q_lens = rng.integers(1, 30, num_rows).astype(np.int32)

    def ids(most: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return rng.integers(-1, 2**31 - 1, int(rng.integers(0, most))).astype(np.int32)

    setups = []
    for row in range(int(rng.integers(0, 5))):
        params = SamplingParams(
            temperature=float(rng.random()),
            top_k=int(rng.integers(-1, 50)),
            stop=("a", "ü\n"),
            stop_token_ids=(1, 2**31 - 1),
            logit_bias={int(key): float(rng.normal()) for key in rng.integers(0, 2**31 - 1, 3)},
            seed=int(rng.integers(-(2**63), 2**63)),
            json_schema={"type": "object"},
        )
        setups.append(RowSetup(row, params, int(rng.integers(0, 2**63)), ids(5000), ids(50)))
    chosen = [int(b) for b in rng.choice(num_rows, int(rng.integers(0, num_rows + 1)), replace=False)]
    return Batch(
        rows=rng.permutation(num_rows).astype(np.int32),
        q_lens=q_lens,
        kv_lens=q_lens + ids(2).sum(dtype=np.int32),
        token_ids=ids(1000),
        page_writes=rng.integers(0, 99, (int(rng.integers(0, 9)), 3)).astype(np.int32),
        samples=rng.random(num_rows) < 0.5,
        score_from=rng.integers(-1, 9, num_rows).astype(np.int32),
        top_logprobs=rng.integers(-1, 9, num_rows).astype(np.int32),
        setups=setups,
        score_targets={b: ids(20) for b in chosen},
        drafts={b: ids(8) for b in chosen},
        pool_from={b: b + 1 for b in chosen},
        token_ids_logprob={b: ids(20) for b in chosen},
        is_streamed=bool(rng.integers(2)),
        is_observed=bool(rng.integers(2)),
    )


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, with the same types."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, RowSetup):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    return type(one) is type(other) and one == other


@pytest.mark.costly
@pytest.mark.parametrize("capacity", [64, 5000, 1 << 20])
def test_batches_pass_through_the_ring_bit_for_bit(capacity: int, tmp_path: Path) -> None:
    """To two readers; most frames are longer than the smaller rings."""
    rng = np.random.default_rng(capacity)
    number = {64: 20, 5000: 200, 1 << 20: 1000}[capacity]
    sent: list[wire.Frame] = [wire.Forward(random_batch(rng)) for _ in range(number)]
    sent += [
        wire.Sample(None),
        wire.Sample([None, 3, BROADCAST]),
        wire.Load({"a": None}),
        wire.Build({}, 7, [1], ""),
    ]
    path = tmp_path / "ring"
    writer = Ring(path, 2, capacity=capacity)
    got: list[list[wire.Frame]] = [[], []]

    def read(reader: int) -> None:
        ring = Ring(path, 2, reader, capacity)
        while not got[reader] or not isinstance(got[reader][-1], wire.Stop):
            got[reader].append(wire.unpacked(ring.get()))
            ring.beat()

    threads = [threading.Thread(target=read, args=(reader,), daemon=True) for reader in range(2)]
    for thread in threads:
        thread.start()
    for frame in [*sent, wire.Stop()]:
        writer.put(wire.packed(frame), lambda: None)
    for reader, thread in enumerate(threads):
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert writer.beats(reader) == len(got[reader]) == len(sent) + 1
        for one, other in zip(sent, got[reader], strict=False):
            assert type(one) is type(other)
            for f in fields(one):
                left, right = getattr(one, f.name), getattr(other, f.name)
                if isinstance(left, Batch):
                    assert all(same(getattr(left, its.name), getattr(right, its.name)) for its in fields(Batch))
                else:
                    assert same(left, right)


def test_a_full_ring_asks_whether_to_go_on(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", 1, capacity=128)

    def dead() -> None:
        raise EOFError

    with pytest.raises(EOFError):
        ring.put(bytes(1000), dead)


def test_other_ranks_learn_no_grammar() -> None:
    masks: list[Any] = [None, np.zeros(4, np.int32), 7, Configuration(cast(Any, None), cast(Any, None))]
    assert outline(masks) == [None, BROADCAST, 7, BROADCAST]
    with pytest.raises(NotImplementedError, match="object is not sent"):
        wire.packed(wire.Load({"a": object()}))
