"""KV pages out of the other engine's memory, on a CPU, where shared memory takes a GPU's place: answers are those of
one engine, whoever dies and whatever ends amid a copy."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl.errors import ConfigError
from sgl.runtime.batch import PageMoves
from sgl.runtime.config import EngineConfig
from sgl.runtime.engine import Engine
from sgl.runtime.memory_plan import plan_memory, token_bytes, transfer_bytes
from sgl.runtime.rank_start import checked_model, load
from sgl.runtime.runner.host_pages import HostPages
from sgl.runtime.runner.mapped_rows import Copying, MappedRows
from tests.patience import PATIENCE, wait_until
from tests.test_transfers_engine import (
    _DECODE,
    _PREFILL,
    GREEDY,
    OPTIONS,
    PROMPTS,
    ROOMY,
    Child,
    answer_to,
    assert_all_is_back,
    key,
    offer,
    path,
    plain,
    state,
)
from tests.test_transfers_nixl import answer

__all__ = ["key", "path", "plain"]  # fixtures

MAPPED: dict[str, Any] = {"disaggregation_transport": "cuda_ipc"}
BUFFERS = MAPPED | ROOMY
_DYING = """
    import os, signal, sys
    from sgl.runtime.runner.mapped_rows import MappedRows

    read = MappedRows.read

    def read_and_die(self, theirs, rows, stamp, own):
        half = len(rows) // 2
        read(self, theirs, rows[:half], stamp, own[:half])
        os.kill(os.getpid(), signal.SIGKILL)

    if int(sys.argv[3]) > 0:
        MappedRows.read = read_and_die
"""


@pytest.fixture(scope="module")
def prefill(path: str, key: str) -> Iterator[Engine]:
    with Engine(path, **OPTIONS, **BUFFERS, disaggregation_mode="prefill") as engine:
        yield engine


@pytest.fixture
def decode(path: str, key: str) -> Iterator[Engine]:
    with Engine(path, **OPTIONS, **BUFFERS, disaggregation_mode="decode") as engine:
        yield engine


def reader(engine: Engine) -> Any:
    transfers: Any = engine._scheduler.memory.transfers
    return transfers.imports._reader


def amid_a_copy(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Something happens when half of the next pages are copied, and nothing before and after it."""
    read = MappedRows.read

    def halting(self: MappedRows, theirs: Any, rows: list[int], stamp: int, own: list[int]) -> Copying:
        half = len(rows) // 2
        read(self, theirs, rows[:half], stamp, own[:half])
        happens()
        rest = read(self, theirs, rows[half:], stamp, own[half:])
        rest.rows = np.array(rows)
        return rest

    monkeypatch.setattr(MappedRows, "read", halting)


def stop(pid: int) -> None:
    """Return when all threads of a child have stopped: on busy cores one may still answer after the signal."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


def assert_computed(engine: Engine, plain: Engine, params: Any) -> None:
    found = answer(engine, PROMPTS[0], params)
    assert found["output_ids"] == answer(plain, PROMPTS[0])["output_ids"]
    assert found["meta_info"]["cached_tokens"] == 0


def test_tokens_are_those_of_one_engine_whose_memory_is_opened_once(
    prefill: Engine, decode: Engine, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    whole = MappedRows.open
    monkeypatch.setattr(MappedRows, "open", lambda self, *given: opened.append(1) or whole(self, *given))
    for prompt in PROMPTS:
        found = answer(decode, prompt, offer(prefill, prompt))
        assert found["output_ids"] == answer(plain, prompt)["output_ids"]
        assert found["meta_info"]["cached_tokens"] == 88
    assert len(opened) == 1
    assert state(decode)["num_transfers_failed"] == 0
    for engine in (prefill, decode):
        assert_all_is_back(engine)
    told = state(decode)
    assert told["transfer_pulled_bytes"] == state(prefill)["transfer_sent_bytes"] > 0
    assert told["transfer_pull_seconds"] > 0


def test_prompts_that_are_pulled_at_once_are_apart(prefill: Engine, decode: Engine, plain: Engine) -> None:
    params = [offer(prefill, prompt) for prompt in PROMPTS]
    wanted = plain.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    found = decode.generate(input_ids=PROMPTS, sampling_params=GREEDY, kv_transfer_params=params)
    assert [its["output_ids"] for its in found] == [its["output_ids"] for its in wanted]
    for engine in (prefill, decode):
        assert_all_is_back(engine)


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_engines_of_different_transports_compute(
    path: str, prefill: Engine, decode: Engine, plain: Engine, which: str
) -> None:
    with Engine(path, **OPTIONS, **ROOMY, disaggregation_mode=which) as other:
        one, two = (other, decode) if which == "prefill" else (prefill, other)
        params = offer(one)
        assert_computed(two, plain, params)
        assert_all_is_back(two)
        one.end_kv_transfer(params)


def test_pages_are_not_sent_over_tcp(prefill: Engine) -> None:
    params = offer(prefill)
    assert answer_to(params, bytes.fromhex(params["prompt"])) == 2
    prefill.end_kv_transfer(params)
    assert_all_is_back(prefill)


def test_a_lease_that_ends_amid_a_copy_leaves_the_prompt_to_be_computed(
    prefill: Engine, decode: Engine, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its rows to the next offer, which overwrites what is still being copied."""
    params = offer(prefill)

    def end() -> None:
        assert prefill.end_kv_transfer(params) == 1
        wait_until(lambda: not state(prefill)["transfer_used_tokens"])
        offer(prefill, PROMPTS[1])
        wait_until(lambda: not transfers.exports._copying)

    transfers: Any = prefill._scheduler.memory.transfers
    amid_a_copy(monkeypatch, end)
    assert_computed(decode, plain, params)
    assert_all_is_back(decode)
    monkeypatch.undo()
    again = answer(decode, PROMPTS[0], offer(prefill))
    assert again["meta_info"]["cached_tokens"] == 88
    assert again["output_ids"] == answer(plain, PROMPTS[0])["output_ids"]


def test_a_copy_that_does_not_end_keeps_its_pages(
    prefill: Engine, decode: Engine, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl.runtime.transfer.mapped._SILENT_SECONDS", 0.3)
    whole, has_ended = MappedRows.read, threading.Event()

    def slow(self: MappedRows, theirs: Any, rows: list[int], stamp: int, own: list[int]) -> Any:
        copying = whole(self, theirs, rows, stamp, own)
        return SimpleNamespace(has_ended=has_ended.is_set, seconds=0.0, num_runs=copying.num_runs)

    monkeypatch.setattr(MappedRows, "read", slow)
    assert_computed(decode, plain, offer(prefill))
    assert state(decode)["transfer_used_tokens"] == 88
    assert decode.check_ledger() == []
    has_ended.set()
    assert_all_is_back(decode)


@pytest.mark.parametrize("when", ["before", "amid"])
def test_a_prefill_process_that_is_killed_costs_nothing_but_time(
    path: str, decode: Engine, plain: Engine, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Child(_PREFILL, path, -1, **BUFFERS) as child:
        assert answer(decode, PROMPTS[1], child.ask(PROMPTS[1]))["meta_info"]["cached_tokens"] == 88
        params = child.ask(PROMPTS[0])

        def kill() -> None:
            child.process.kill()
            child.process.wait(PATIENCE)

        if when == "before":
            kill()
        else:
            amid_a_copy(monkeypatch, kill)
        assert_computed(decode, plain, params)
        assert child.process.wait(PATIENCE)
    wait_until(lambda: not reader(decode)._peers)  # its memory is not held
    assert answer(decode, PROMPTS[0])["output_ids"] == answer(plain, PROMPTS[0])["output_ids"]
    assert_all_is_back(decode)


def test_a_prefill_process_that_stands_still_delays_a_request_for_a_bounded_time(
    path: str, decode: Engine, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at all, once it has told where the pages lie."""

    def silent(patch: pytest.MonkeyPatch, seconds: float) -> None:
        for where in ("mapped", "reader"):
            patch.setattr(f"sgl.runtime.transfer.{where}._SILENT_SECONDS", seconds)

    with Child(_PREFILL, path, -1, **BUFFERS) as child:
        params, later = child.ask(PROMPTS[0]), child.ask(PROMPTS[1])
        with monkeypatch.context() as patch:
            silent(patch, PATIENCE)
            amid_a_copy(patch, lambda: stop(child.process.pid))
            found = answer(decode, PROMPTS[0], params)
        assert found["output_ids"] == answer(plain, PROMPTS[0])["output_ids"]
        assert found["meta_info"]["cached_tokens"] == 88
        silent(monkeypatch, 0.5)
        found = answer(decode, PROMPTS[1], later)
        assert found["output_ids"] == answer(plain, PROMPTS[1])["output_ids"]
        assert found["meta_info"]["cached_tokens"] == 0
        assert_all_is_back(decode)
        os.kill(child.process.pid, signal.SIGCONT)


def test_a_decode_process_killed_amid_a_copy_leaves_the_lease_to_another(
    path: str, prefill: Engine, decode: Engine, plain: Engine
) -> None:
    with Child(_DYING + _DECODE, path, 1000, **BUFFERS) as child:
        assert child.ask([PROMPTS[1], None, GREEDY])  # its start may outlast a lease
        params = offer(prefill)
        assert child.ask([PROMPTS[0], params, GREEDY]) is None
    found = answer(decode, PROMPTS[0], params)
    assert found["output_ids"] == answer(plain, PROMPTS[0])["output_ids"]
    assert found["meta_info"]["cached_tokens"] == 88
    for engine in (prefill, decode):
        assert_all_is_back(engine)


def test_memory_that_is_not_the_engines_is_not_read(
    prefill: Engine, decode: Engine, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers: Any = prefill._scheduler.memory.transfers
    rows = transfers.exports._server._remote._rows
    for handle in ([1, 0, 1 << 20], [os.getpid(), 0, 1 << 20], ["x"], [os.getpid(), rows.handle[1], 1 << 60]):
        monkeypatch.setattr(rows._memory, "handle", handle)
        assert_computed(decode, plain, offer(prefill))
        assert_all_is_back(decode)
    monkeypatch.undo()
    mark = rows._rows[0].clone()
    rows._rows[0] = 7  # another engine's memory under this handle
    assert_computed(decode, plain, offer(prefill))
    rows._rows[0] = mark
    assert_all_is_back(decode)


@pytest.mark.parametrize("num_host", [0, 5])
def test_moves_and_reads_are_those_of_arrays(num_host: int) -> None:
    rng, device = np.random.default_rng(num_host), torch.device("cpu")
    caches = [torch.from_numpy(rng.integers(0, 256, (6, 20, 24), np.uint8)) for _ in range(2)]
    hosts = [HostPages(cache, num_host, device, num_mapped=12) for cache in caches]
    one, two = (host.mapped for host in hosts)
    assert one is not None
    assert two is not None
    theirs, nothing = two.open(one.handle, one.mark), np.empty((0, 2), np.int32)
    for _ in range(30):
        count = int(rng.integers(1, 9))
        pages, rows, own, to = (rng.permutation(11)[:count].astype(np.int32) + 1 for _ in range(4))
        wanted = caches[1].clone()
        wanted[:, to] = caches[0][:, pages]
        saved = hosts[0].move(PageMoves(np.stack((pages, rows + num_host), 1), nothing))
        assert saved.is_saved()
        copying = two.read(theirs, *one.number((rows + num_host).tolist()), (own + num_host).tolist())
        assert copying.has_ended()
        assert hosts[1].move(PageMoves(nothing, np.stack((own + num_host, to), 1))).is_loaded()
        assert torch.equal(caches[1], wanted)
    for wrong in (0, 12, -1):
        with pytest.raises(ConnectionError, match="no such rows"):
            two.read(theirs, [wrong], 1, [1 + num_host])
    hosts[0].move(PageMoves(np.array([[1, 1 + num_host]], np.int32), nothing))
    where = one.number([1 + num_host])
    assert two.read(theirs, *where, [1 + num_host]).has_ended()
    copying = two.read(theirs, *where, [1 + num_host])
    hosts[0].move(PageMoves(np.array([[1, 1 + num_host]], np.int32), nothing))  # another prompt's
    with pytest.raises(ConnectionError, match="overwritten"):
        copying.has_ended()
    copying = two.read(theirs, *one.number([1 + num_host]), [1 + num_host])
    one.close()
    with pytest.raises(ConnectionError, match="overwritten"):  # what is open stays, and does not count
        copying.has_ended()
    with pytest.raises(ConnectionError):
        two.open(one.handle, one.mark)


def test_rows_that_are_written_while_they_are_copied_never_count() -> None:
    """A thread fills all rows with one number after the other, whoever reads."""
    device, nothing = torch.device("cpu"), np.empty((0, 2), np.int32)
    caches = [torch.zeros(2, 9, 1 << 16, dtype=torch.uint8) for _ in range(2)]
    hosts = [HostPages(cache, 0, device, num_mapped=9) for cache in caches]
    one, two = (host.mapped for host in hosts)
    assert one is not None
    assert two is not None
    theirs, rows, is_over = two.open(one.handle, one.mark), list(range(1, 9)), threading.Event()
    all_pages = PageMoves(np.array([rows, rows], np.int32).T, nothing)

    def write() -> None:
        while not is_over.wait(float(np.random.default_rng().uniform(0, 1e-3))):
            caches[0].fill_((one.number(rows)[1] + 1) % 251)
            hosts[0].move(all_pages)
            saved.append(one.number(rows)[1])  # an offer is told when it is copied

    hosts[0].move(all_pages)  # with 0 in them, under stamp 1
    saved = [1]
    writing = threading.Thread(target=write)
    writing.start()
    outcomes = {True: 0, False: 0}
    try:
        end = time.monotonic() + PATIENCE
        while min(outcomes.values()) < 20:
            assert time.monotonic() < end, f"each comes about: {outcomes}"
            stamp = saved[-1]
            try:
                counts = two.read(theirs, rows, stamp, rows).has_ended()
            except ConnectionError:
                counts = False
            outcomes[counts] += 1
            if counts and stamp > 1:
                hosts[1].move(PageMoves(nothing, all_pages.saves))
                assert torch.equal(caches[1][:, rows], torch.full_like(caches[1][:, rows], stamp % 251))
    finally:
        is_over.set()
        writing.join()


def test_pages_on_their_way_take_from_the_memory_of_others(path: str) -> None:
    device = torch.device("cpu")

    def planned(transport: Any, given: int | None = None) -> int:
        config = EngineConfig(
            model_path=path, device="cpu", page_size=8, max_running_requests=1 << 14, mem_fraction_static=2e-3,
            disaggregation_mode="prefill", disaggregation_transport=transport, disaggregation_buffer_mb=given,
        )  # fmt: skip
        model_config = checked_model(config, device)
        return plan_memory(config, model, model_config)[1].num_pages - 1

    config = EngineConfig(model_path=path, device="cpu")
    model = load(config, checked_model(config, device), device, None)
    page_bytes = 8 * token_bytes(config, model)
    assert planned("tcp") == planned("tcp", 1)
    assert planned("tcp") - planned("cuda_ipc", 3) == pytest.approx(3e6 / page_bytes, abs=1)
    assert planned("cuda_ipc") * 1.1 == pytest.approx(planned("tcp"), abs=2)
    assert (
        transfer_bytes(
            EngineConfig(model_path=path, disaggregation_mode="decode", **MAPPED), planned("cuda_ipc") * page_bytes
        )
        <= (planned("tcp") + 1 - planned("cuda_ipc")) * page_bytes
    )


def test_options_that_cannot_go_together_are_refused(path: str, key: str, tmp_path: Path) -> None:
    for options, match in (
        ({"tp_size": 2}, "tp_size=2 with disaggregation_transport='cuda_ipc'"),
        ({"pp_size": 2}, "pp_size=2 with disaggregation_transport='cuda_ipc'"),
        ({"disaggregation_buffer_mb": 1 << 30, "max_total_tokens": None}, "leaves nothing for KV pages"),
    ):
        with pytest.raises(ConfigError, match=match):
            Engine(path, **{**OPTIONS, **MAPPED, **options}, disaggregation_mode="decode")


def test_where_memory_cannot_be_shared_the_option_is_named(
    path: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match=r"disaggregation_transport='cuda_ipc'.*'tcp' and 'nixl'"):
        Engine(path, **OPTIONS, **MAPPED, disaggregation_mode="decode")
