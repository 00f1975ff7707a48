"""An engine's memory, given back and taken again: real bytes, the same outputs, a clean ledger."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sgl import Engine
from sgl.errors import ConfigError, EngineDead, InvalidRequest, RequestTimeout
from sgl.kernels import cpu
from sgl.lang.ir import nodes as ir
from sgl.runtime.memory_plan import room_on
from sgl.runtime.model.occupation import Occupied
from sgl.runtime.runner import occupation
from tests.patience import wait_until
from tests.program_client import Client, gen
from tests.test_pause import LONG, OPTIONS, PROMPT, Running, begun, steps
from tests.tiny_heads import tiny_head

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="takes no memory back in place")
MANY = 1 << 17  # tokens, of 768 bytes each


def state(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return found


def resident() -> int:
    """Bytes of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_closed_engine_keeps_no_graphs_buffers(folder: Path) -> None:
    class Graphs:
        def capture(self) -> None:
            """Records nothing."""

        def drop(self) -> None:
            """Nothing."""

    engine = Engine(folder, **OPTIONS)
    runner: Any = engine._started.runner
    graphs = Graphs()
    runner.occupation._graphs, freed = [graphs], weakref.ref(graphs)
    del graphs
    engine.shutdown()
    assert freed() is None


def test_kv_pages_are_the_machines_again(folder: Path) -> None:
    with Engine(folder, **{**OPTIONS, "max_total_tokens": MANY}) as engine:
        wanted = engine.generate(input_ids=PROMPT, sampling_params=LONG)["output_ids"]
        runner: Any = engine._started.runner
        (storage,) = runner._kv.storages()
        storage.fill_(1.0)
        before, address = resident(), storage.data_ptr()
        released = engine.release_memory_occupation()
        assert released == {"kv_cache": storage.nbytes} == state(engine)["released_memory"]
        assert storage.nbytes > 90 << 20
        assert before - resident() > 0.9 * storage.nbytes
        assert engine.release_memory_occupation(["kv_cache"]) == {}  # once is enough
        assert state(engine)["kv_available_tokens"] == MANY
        assert engine.check_ledger() == []
        engine.resume_memory_occupation()
        engine.resume_memory_occupation()
        assert storage.data_ptr() == address
        assert not storage.any()
        result = engine.generate(input_ids=PROMPT, sampling_params=LONG)
        assert result["output_ids"] == wanted
        assert result["meta_info"]["cached_tokens"] == 0
        assert engine.check_ledger() == []


@pytest.mark.parametrize("run_ahead", [True, False])
def test_what_ran_goes_on_and_what_comes_waits(folder: Path, run_ahead: bool) -> None:
    with Engine(folder, **OPTIONS, disable_overlap_schedule=not run_ahead) as engine:
        wanted = engine.generate(input_ids=PROMPT, sampling_params=LONG)["output_ids"]
        running = begun(engine)
        engine.release_memory_occupation()
        other = Running(engine)
        wait_until(lambda: state(engine)["num_queue_reqs"] == 2)
        before = steps(engine)
        assert isinstance(Running(engine, timeout=0.05).wait(), RequestTimeout)
        assert not engine.continue_generation()
        assert state(engine)["is_paused"]
        engine.pause_generation("in_place")
        assert steps(engine) == before
        engine.resume_memory_occupation(["kv_cache"])
        assert state(engine)["is_paused"]  # by who paused meanwhile
        assert steps(engine) == before
        assert engine.continue_generation()
        assert running.wait()["output_ids"] == other.wait()["output_ids"] == wanted
        assert engine.check_ledger() == []


def test_a_pause_from_before_stays(folder: Path) -> None:
    with Engine(folder, **OPTIONS) as engine:
        engine.pause_generation("in_place")
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert state(engine)["is_paused"]
        engine.continue_generation()
        assert len(engine.generate(input_ids=PROMPT, sampling_params=LONG)["output_ids"]) == 120


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_meanwhile_stays_and_no_longer_than_it_is_meant(folder: Path, mode: Any) -> None:
    with Engine(folder, **OPTIONS) as engine:
        engine.release_memory_occupation()
        engine.pause_generation(mode)
        engine.resume_memory_occupation()
        assert state(engine)["is_paused"]
        engine.continue_generation()
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert not state(engine)["is_paused"]
        assert len(engine.generate(input_ids=PROMPT, sampling_params=LONG)["output_ids"]) == 120


@pytest.mark.parametrize("paused", ["before", "meanwhile"])
def test_going_on_without_memory_is_for_when_it_is_there(folder: Path, paused: str) -> None:
    with Engine(folder, **OPTIONS) as engine:
        for when in ("before", "meanwhile"):
            if paused == when:
                engine.pause_generation("in_place")
            if when == "before":
                engine.release_memory_occupation()
        before = steps(engine)
        waits = Running(engine)
        assert not engine.continue_generation()
        wait_until(lambda: state(engine)["num_queue_reqs"] == 1)
        assert state(engine)["is_paused"]
        assert steps(engine) == before
        engine.resume_memory_occupation()
        assert len(waits.wait()["output_ids"]) == 120


def test_who_goes_on_waits_for_who_releases(folder: Path) -> None:
    """No step begins without its memory."""
    with Engine(folder, **OPTIONS) as engine:
        runner: Any = engine._started.runner
        own, began, late = runner.occupation.release, threading.Event(), threading.Event()

        def release(parts: Any) -> Any:
            began.set()
            late.wait(0.3)
            return own(parts)

        runner.occupation.release = release
        with ThreadPoolExecutor(2) as threads:
            releases = threads.submit(engine.release_memory_occupation)
            began.wait()
            assert not threads.submit(engine.continue_generation).result()
            assert releases.result().keys() == {"kv_cache"}
        assert state(engine)["is_paused"]
        engine.resume_memory_occupation()
        assert not state(engine)["is_paused"]


@pytest.mark.parametrize("tiers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_programs_lose_their_leases_and_go_on(folder: Path, tmp_path: Path, tiers: bool) -> None:
    options: dict[str, Any] = (
        {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"} if tiers else {}
    )
    if tiers:
        options["hicache_storage_dir"] = str(tmp_path)
    texts = []
    for releases in (False, True):
        with Engine(folder, **OPTIONS, **options) as engine:
            client = Client(engine)
            client.send(ir.Text("x" * 40), gen(max_tokens=4))
            client.wait(ir.NodeDone)
            if releases:
                engine.release_memory_occupation()
                assert state(engine)["kv_available_tokens"] == OPTIONS["max_total_tokens"]
                engine.resume_memory_occupation()
            client.send(gen(max_tokens=8), final=True)
            client.wait(ir.Done)
            assert not client.of(ir.NodeFailed)
            texts.append([its.text for its in client.of(ir.NodeDone)])
            assert engine.check_ledger() == []
    assert texts[0] == texts[1]


def test_what_cannot_be_given_back_is_refused(folder: Path) -> None:
    with Engine(folder, **OPTIONS) as engine:
        for tags in ("kv_cache", [], ["kv"], [3], {"kv_cache"}):
            with pytest.raises(
                InvalidRequest, match="tags must be a list of some of kv_cache, weights, cuda_graph"
            ):
                engine.release_memory_occupation(tags)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="weights is not given back on a CPU; what can be: kv_cache"):
            engine.release_memory_occupation(["kv_cache", "weights"])
        assert not state(engine)["is_paused"]


@pytest.mark.skipif(cpu.why_not() is not None, reason="cannot be compiled")
def test_weights_come_back_with_their_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: in memory of torch's own, which moves."""
    monkeypatch.setattr(occupation.Occupation, "parts", lambda self: occupation.PARTS)
    with Engine(folder, **OPTIONS, deterministic=True) as engine:
        wanted = engine.generate(input_ids=PROMPT, sampling_params=LONG, return_logprob=True)
        released = engine.release_memory_occupation()
        model: Any = engine._started.model
        assert released["weights"] > 100_000
        assert all(its.untyped_storage().nbytes() == 0 for its in model.weights.tensors())
        for use in (
            lambda: engine.update_weights({"model.norm.weight": torch.zeros(64)}),
            lambda: engine.update_weights_from_disk(folder),
            lambda: engine.get_weights_by_name("model.norm.weight"),
            engine.weights_hash,
        ):
            with pytest.raises(InvalidRequest, match="weights is released"):
                use()
        engine.resume_memory_occupation(["weights"])
        assert state(engine)["is_paused"]
        assert list(state(engine)["released_memory"]) == ["kv_cache"]
        engine.update_weights_from_disk(folder)
        engine.resume_memory_occupation(["kv_cache"])
        found = engine.generate(input_ids=PROMPT, sampling_params=LONG, return_logprob=True)
        assert found["output_ids"] == wanted["output_ids"]
        logprobs = [its["meta_info"]["output_token_logprobs"] for its in (wanted, found)]
        assert logprobs[0] == logprobs[1]


def test_views_stay_and_shared_memory_is_counted_once() -> None:
    whole = torch.arange(1000.0)
    part, other, kept = whole[10:20], torch.ones(50), whole.clone()
    for keeps in (True, False):
        occupied = Occupied([whole, part, other], keeps=keeps)
        assert occupied.release() == 4 * 1050
        assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
        occupied.restore()
        occupied.restore()
        assert torch.equal(part, kept[10:20] if keeps else torch.zeros(10))
        assert other.sum() == (50 if keeps else 0)


def test_graphs_go_with_the_others_and_come_back_last(folder: Path) -> None:
    calls: list[str] = []

    class Graphs:
        def capture(self) -> None:
            calls.append("capture")

        def drop(self) -> None:
            calls.append("drop")

    with Engine(folder, **OPTIONS) as engine:
        runner: Any = engine._started.runner
        own = occupation.Occupation(runner._model, runner._kv, [Graphs()])
        assert own.release(["kv_cache"]).keys() == {"cuda_graph", "kv_cache"}
        own.release(["cuda_graph"])
        own.restore(["cuda_graph"])  # which the address of keys and values is part of
        assert calls == ["drop"]
        own.restore(["kv_cache"])
        assert calls == ["drop", "capture"]
        assert own.released == {}


def test_weights_that_host_memory_cannot_hold_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(folder, **OPTIONS) as engine:
        wanted = engine.generate(input_ids=PROMPT, sampling_params=LONG)["output_ids"]
        monkeypatch.setattr(occupation.Occupation, "parts", lambda self: occupation.PARTS)
        with monkeypatch.context() as patch:
            patch.setattr(occupation.Occupied, "release", Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                engine.release_memory_occupation()
        own = occupation.Occupied.release
        for fails in (True, False):  # of the pages, whose weights are gone then

            def release(its: Any, fails: bool = fails) -> int:
                if fails and not its._keeps:
                    raise OSError("no pages")
                return own(its)

            monkeypatch.setattr(occupation.Occupied, "release", release)
            if fails:
                with pytest.raises(OSError, match="no pages"):
                    engine.release_memory_occupation()
                assert list(state(engine)["released_memory"]) == ["weights"]
            else:
                assert engine.release_memory_occupation().keys() == {"kv_cache"}
        engine.resume_memory_occupation()
        assert engine.generate(input_ids=PROMPT, sampling_params=LONG)["output_ids"] == wanted


@pytest.mark.gpu
def test_a_gpus_memory_is_a_trainers_and_graphs_are_captured_anew(folder: Path) -> None:
    options = {"device": "cuda", "max_total_tokens": MANY, "max_running_requests": 8, "deterministic": True}
    with Engine(folder, **options) as engine:
        wanted = engine.generate(input_ids=PROMPT, sampling_params=LONG, return_logprob=True)
        before = torch.cuda.mem_get_info()[0]
        released = engine.release_memory_occupation()
        assert released.keys() == set(occupation.PARTS)
        assert torch.cuda.mem_get_info()[0] - before > 0.9 * released["kv_cache"]
        trainers = torch.ones(released["kv_cache"] // 2, dtype=torch.uint8, device="cuda")  # where pages were
        for tag in occupation.PARTS:
            engine.resume_memory_occupation([tag])
        found = engine.generate(input_ids=PROMPT, sampling_params=LONG, return_logprob=True)
        assert bool((trainers == 1).all())
        assert state(engine)["released_memory"] == {}
        assert found["output_ids"] == wanted["output_ids"]
        logprobs = [its["meta_info"]["output_token_logprobs"] for its in (wanted, found)]
        assert logprobs[0] == logprobs[1]


def test_a_closed_engine_keeps_no_pages(folder: Path) -> None:
    """Though somebody still has it, and without a garbage collection: two engines, one after the other."""
    engine = Engine(folder, **{**OPTIONS, "max_total_tokens": MANY})
    runner: Any = engine._started.runner
    (storage,) = runner._kv.storages()
    storage.fill_(1.0)
    before = resident()
    gc.disable()
    try:
        engine.shutdown()
        after = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    finally:
        gc.enable()
    assert before - after > 0.9 * storage.nbytes
    engine.shutdown()
    with pytest.raises(EngineDead):
        engine.generate("a")


@pytest.mark.parametrize("algorithm", ["DRAFT", "EAGLE3"])
def test_a_closed_engine_keeps_none_of_its_drafters_memory(folder: Path, tmp_path: Path, algorithm: Any) -> None:
    draft = folder if algorithm == "DRAFT" else tiny_head(tmp_path / "head", vocab_size=259)
    options: dict[str, Any] = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(draft)}
    engine = Engine(folder, **{**OPTIONS, "max_total_tokens": MANY}, **options)
    runner: Any = engine._started.runner
    drafts = runner._observer._runner
    (storage,) = drafts._kv.storages()
    storage.fill_(1.0)
    features = [] if algorithm == "DRAFT" else [weakref.ref(drafts._features)]
    engine.shutdown()
    assert not storage.any()
    assert [each() for each in features] == [None] * len(features)
    engine.shutdown()


def test_a_start_without_room_says_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))
    with (
        pytest.raises(
            ConfigError, match=r"3.00 GiB of the 80.00 GiB of cuda:0 are free .*tried 5.*max_total_tokens"
        ),
        room_on(torch.device("cuda", 0)),
    ):
        raise torch.OutOfMemoryError("tried 5 GiB")


def test_what_ends_gives_weights_back_too() -> None:
    """On a device that is no CPU, whose weights nobody else has."""
    model, kv = Mock(), Mock()
    tensor = torch.ones(1000)
    model.device, model.weights.tensors, kv.storages = torch.device("cuda"), lambda: [tensor], list
    graphs = Mock()
    occupation.Occupation(model, kv, [graphs]).end()
    assert tensor.untyped_storage().nbytes() == 0
    graphs.drop.assert_called_once_with()


def test_what_cannot_be_closed_keeps_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(folder, **OPTIONS)
    closed = Mock()
    monkeypatch.setattr(engine._started.scheduler.memory, "close", Mock(side_effect=OSError("a disk is gone")))
    monkeypatch.setattr(engine._started.runner, "close", closed)
    with pytest.raises(OSError, match="a disk is gone"):
        engine.shutdown()
    closed.assert_called_once_with()
