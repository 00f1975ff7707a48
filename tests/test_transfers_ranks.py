"""Engines whose ranks share the heads offer and pull pages: answers are those of one process, also when a rank dies."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl.errors import ConfigError, EngineDead
from sgl.runtime.engine import Engine
from sgl.runtime.model.shard import Shard
from sgl.runtime.parallel import wire
from sgl.runtime.runner.shared_rows import SharedRows
from sgl.runtime.transfer.reader import TcpReader
from sgl.runtime.transfer.shape import PageShape
from tests.patience import PATIENCE
from tests.test_transfers_engine import (
    _DECODE,
    _PREFILL,
    GREEDY,
    OPTIONS,
    PROMPTS,
    ROOMY,
    Child,
    assert_all_is_back,
    key,
    offer,
    path,
    plain,
    state,
)
from tests.test_transfers_nixl import NIXL, answer, needs_nixl
from tests.tiny_models import tiny_checkpoint
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer

__all__ = ["key", "path", "plain"]  # fixtures


def prefilling(path: Any, tp_size: int, **options: Any) -> Engine:
    return Engine(path, **{**OPTIONS, **ROOMY, **options}, tp_size=tp_size, disaggregation_mode="prefill")


def decoding(path: Any, tp_size: int, **options: Any) -> Engine:
    return Engine(path, **{**OPTIONS, **options}, tp_size=tp_size, disaggregation_mode="decode")


def rank_1(engine: Engine) -> int:
    assert engine._started.group is not None
    return engine._started.group._processes[1].pid


def assert_pulled_answers_are(wanted: list[Any], one: Engine, other: Engine) -> None:
    for prompt, ids in zip(PROMPTS, wanted, strict=True):
        found = answer(other, prompt, offer(one, prompt))
        assert found["output_ids"] == ids
        assert found["meta_info"]["cached_tokens"] == 88
    for engine in (one, other):
        assert_all_is_back(engine)


@pytest.mark.costly
@pytest.mark.parametrize("tp_sizes", [(1, 2), (2, 1), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("transport", ["tcp", pytest.param("nixl", marks=[needs_nixl, pytest.mark.slow])])
def test_tokens_are_those_of_one_engine(
    path: str, key: str, plain: Engine, tp_sizes: tuple[int, int], transport: str
) -> None:
    wanted = [answer(plain, prompt)["output_ids"] for prompt in PROMPTS]
    options = {"disaggregation_transport": transport}
    with prefilling(path, tp_sizes[0], **options) as one, decoding(path, tp_sizes[1], **options) as other:
        assert_pulled_answers_are(wanted, one, other)


@needs_nixl
def test_nixl_reads_pages_of_other_ranks(path: str, key: str, plain: Engine) -> None:
    wanted = [answer(plain, prompt)["output_ids"] for prompt in PROMPTS]
    with prefilling(path, 2, **NIXL) as one, decoding(path, 1, **NIXL) as other:
        assert_pulled_answers_are(wanted, one, other)


@pytest.mark.slow
@pytest.mark.parametrize("tp_sizes", [(1, 2), (2, 1), (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("kind", ["one head", "two heads", "four heads", "latent", "tiers"])
def test_heads_that_several_ranks_hold_and_other_models(
    kind: str, tp_sizes: tuple[int, int], tmp_path: Path, key: str
) -> None:
    options: dict[str, Any] = {"skip_tokenizer_init": True}
    if kind == "latent":
        tiny_transformer(tmp_path, "DeepseekV3ForCausalLM", **ARCHITECTURES["DeepseekV3ForCausalLM"])
    else:
        heads = {"one head": 1, "two heads": 2, "four heads": 4, "tiers": 2}[kind]
        tiny_checkpoint(tmp_path, num_attention_heads=4, num_key_value_heads=heads)
    plainly = {name: value for name, value in OPTIONS.items() if name != "disaggregation_key_file"}
    with Engine(tmp_path, **plainly, **options) as engine:
        wanted = [answer(engine, prompt)["output_ids"] for prompt in PROMPTS]
    if kind == "tiers":
        options |= {"enable_hierarchical_cache": True}
    with prefilling(tmp_path, tp_sizes[0], **options) as one, decoding(tmp_path, tp_sizes[1], **options) as other:
        assert_pulled_answers_are(wanted, one, other)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ((2, 1), (1, 2)),
        *(
            pytest.param(*its, marks=pytest.mark.slow)
            for its in (((1, 2), (1, 1)), ((1, 1), (1, 2)), ((2, 2), (1, 3)), ((1, 3), (2, 2)))
        ),
    ],
    ids=str,
)
def test_stages_offer_and_pull_their_own_layers(
    theirs: tuple[int, int], ours: tuple[int, int], tmp_path: Path, key: str
) -> None:
    """Sizes are tp_size and pp_size. Three layers are cut into stages of one and of two."""
    tiny_checkpoint(tmp_path, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    options: dict[str, Any] = {"skip_tokenizer_init": True}
    plainly = {name: value for name, value in OPTIONS.items() if name != "disaggregation_key_file"}
    with Engine(tmp_path, **plainly, **options) as engine:
        wanted = [answer(engine, prompt)["output_ids"] for prompt in PROMPTS]
    prefill = prefilling(tmp_path, theirs[0], pp_size=theirs[1], **options)
    with prefill as one, decoding(tmp_path, ours[0], pp_size=ours[1], **options) as other:
        assert_pulled_answers_are(wanted, one, other)


def test_stages_are_cut_as_models_are() -> None:
    for num_layers, stages in ((3, 2), (7, 3), (32, 5), (4, 4)):
        cut = [Shard(stage=stage, stages=stages).layers_of(num_layers) for stage in range(stages)]
        assert PageShape(num_layers, 2, 1, 1, 1, 1).stages(stages) == [0, *(2 * its.stop for its in cut)]


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_a_page_is_the_same_for_any_number_of_ranks(heads: int) -> None:
    """Each rank finds the numbers of its layers and heads, whoever the page came from."""
    layers, tokens, unit = 3, 5, 4
    numbers = np.arange(2 * layers * tokens * heads * unit) % 251
    whole = numbers.astype(np.uint8).reshape(2 * layers, tokens, heads, unit)

    def page_of(rank: int, tp_size: int, pp_size: int) -> Any:
        its, each = Shard.of(rank, tp_size, pp_size), max(1, heads // tp_size)
        of_it, first = its.layers_of(layers), its.rank * heads // tp_size
        return whole[2 * of_it.start : 2 * of_it.stop, :, first : first + each].reshape(-1)

    def row_of(tp_size: int, pp_size: int) -> Any:
        fragment = tokens * max(1, heads // tp_size) * unit
        row, shape = np.full(2 * layers * fragment * tp_size, 255, np.uint8), shape_of(tp_size, pp_size)
        for rank in range(tp_size * pp_size):
            row[shape.place(rank, fragment)] = page_of(rank, tp_size, pp_size)
        assert sum(len(row[shape.place(rank, fragment)]) for rank in range(tp_size * pp_size)) == len(row)
        return row

    def shape_of(tp_size: int, pp_size: int) -> PageShape:
        return PageShape(layers, 2, tokens, heads, tp_size, pp_size)

    sizes = list(itertools.product((1, 2, 4, 8, 16), (1, 2, 3)))
    for ours, theirs in itertools.product(sizes, sizes):
        row, wanted = np.full(len(row_of(*ours)), 255, np.uint8), row_of(*ours)
        row[: whole.size] = row_of(*theirs)[: whole.size]
        shape_of(*ours).fit(row, *theirs)
        assert row.tobytes() == wanted.tobytes()


def test_ranks_share_rows_and_see_what_others_have_done(tmp_path: Path) -> None:
    shape = PageShape(1, 1, 1, 2, 4, 1)
    ranks = [SharedRows(tmp_path / "rows", 3, 32, 16, shape.place(rank, 8), rank, 4) for rank in range(4)]
    for rank, its in enumerate(ranks):
        its.own[:] = rank
    assert ranks[1].rows[2].tolist() == [*[0] * 8, *[2] * 8, *[1] * 8, *[3] * 8]  # ranks 0 and 1 hold the same
    assert ranks[3].whole[0].tolist() == [*[0] * 8, *[2] * 8]
    for its in ranks[1:]:
        assert not ranks[0].all_have("saved", 1)
        its.tell(1)
    assert ranks[0].all_have("saved", 1)
    assert ranks[0].all_have("loaded", 1)
    assert not ranks[0].all_have("loaded", 2)


def test_memory_that_ranks_cannot_share_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disaggregation_buffer_mb"):
        SharedRows(tmp_path / "rows", 1 << 40, 1 << 21, 1 << 21, slice(0, 1 << 20), 0, 2)


@pytest.mark.slow
def test_nobody_reads_what_a_rank_has_not_copied(
    path: str, key: str, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = answer(plain, PROMPTS[0])["output_ids"]
    with prefilling(path, 2) as one, decoding(path, 1) as other:
        group, other_rank, has_stopped = one._started.group, rank_1(one), threading.Event()
        assert group is not None
        send = group.send

        def stop_before_moves(frame: wire.Frame) -> None:
            if isinstance(frame, wire.Move):
                os.kill(other_rank, signal.SIGSTOP)
                has_stopped.set()
            send(frame)

        monkeypatch.setattr(group, "send", stop_before_moves)
        params = offer(one)
        assert has_stopped.wait(PATIENCE)
        [held] = one._scheduler.memory.transfers.exports.offers.held()  # type: ignore[union-attr]
        time.sleep(0.3)
        assert not held.is_copied.is_set()
        threading.Timer(0.5, os.kill, (other_rank, signal.SIGCONT)).start()
        found = answer(other, PROMPTS[0], params)
        assert found["output_ids"] == wanted
        assert found["meta_info"]["cached_tokens"] == 88
        for engine in (one, other):
            assert_all_is_back(engine)


@pytest.fixture
def begins(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is called, once, when a page has been received."""
    calls: list[Any] = []
    take = TcpReader._take

    def took(self: TcpReader, read: Any, page: int, checksum: int) -> None:
        take(self, read, page, checksum)
        if calls:
            calls.pop()()

    monkeypatch.setattr(TcpReader, "_take", took)
    yield calls
    assert not calls, "nothing was received"


@pytest.mark.slow
def test_a_rank_of_the_prefill_side_that_dies_amid_a_read_costs_nothing_but_time(
    path: str, key: str, plain: Engine, begins: list[Any]
) -> None:
    with prefilling(path, 2) as one, decoding(path, 2) as other:
        params = offer(one)
        begins.append(lambda: os.kill(rank_1(one), signal.SIGKILL))
        assert answer(other, PROMPTS[0], params)["output_ids"] == answer(plain, PROMPTS[0])["output_ids"]
        with pytest.raises(EngineDead):
            offer(one, PROMPTS[1])
        assert_all_is_back(other)


@pytest.mark.slow
def test_a_rank_of_the_decode_side_that_dies_amid_a_read_leaves_the_lease_to_another(
    path: str, key: str, plain: Engine, begins: list[Any]
) -> None:
    with prefilling(path, 2) as one:
        params = offer(one)
        with decoding(path, 2) as other:
            begins.append(lambda: _killed(other))
            with pytest.raises(EngineDead):
                answer(other, PROMPTS[0], params)
        with decoding(path, 1) as third:
            found = answer(third, PROMPTS[0], params)
            assert found["output_ids"] == answer(plain, PROMPTS[0])["output_ids"]
            assert_all_is_back(third)
        assert_all_is_back(one)


def _killed(engine: Engine) -> None:
    """A rank dies, and the read goes on when that is known."""
    group = engine._started.group
    assert group is not None
    os.kill(rank_1(engine), signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while group._failure is None and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_process_that_leads_ranks_and_dies_amid_a_read_holds_no_page(
    path: str, key: str, plain: Engine, side: str
) -> None:
    wanted = answer(plain, PROMPTS[0])["output_ids"]
    if side == "prefill":
        with Child(_PREFILL, path, 9, tp_size=2) as child, decoding(path, 2) as other:
            params = child.ask(PROMPTS[0])
            assert answer(other, PROMPTS[0], params)["output_ids"] == wanted
            child.process.wait(PATIENCE)
            assert_all_is_back(other)
        return
    with prefilling(path, 2) as one, decoding(path, 1) as other:
        with Child(_DECODE, path, 7, tp_size=2) as child:
            assert child.ask([PROMPTS[1], None, GREEDY])  # its start may outlast a lease
            params = offer(one)
            assert child.ask([PROMPTS[0], params, GREEDY]) is None
        assert state(one)["transfer_used_tokens"] == 88  # until the lease ends, or another engine pulls
        assert answer(other, PROMPTS[0], params)["meta_info"]["cached_tokens"] == 88
        assert_all_is_back(one)
