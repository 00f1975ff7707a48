"""Generations that are stopped under way, and what becomes of them: ended, computed anew, or gone on with."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sgl import Engine
from sgl.errors import EngineDead, InvalidRequest, RequestAborted, RequestTimeout
from sgl.lang.ir import nodes as ir
from tests.live_server import slow_steps
from tests.patience import PATIENCE, wait_until
from tests.program_client import Client, gen
from tests.test_weights_update import shaken

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "page_size": 4,
    "check_ledger": True,
}
LONG = {"temperature": 0.0, "max_new_tokens": 120, "ignore_eos": True}
RNG = random.Random(2)
PROMPT = [RNG.randrange(3, 250) for _ in range(30)]


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["run-ahead", "synchronous"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    with Engine(folder, **OPTIONS, disable_overlap_schedule=not request.param) as engine:
        yield engine
        assert engine.check_ledger() == []


def steps(engine: Engine) -> int:
    state = engine.get_server_info()["internal_states"][0]
    return int(state["steps"])


class Running:
    """A generation in a thread."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self._engine, self._options = engine, options
        self.result: Any = None
        self.slow = ExitStack()
        """Until it is waited for."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._engine.generate(input_ids=PROMPT, sampling_params=LONG, **self._options)
        except RequestTimeout as error:
            self.result = error

    def wait(self) -> Any:
        self.slow.close()
        self._thread.join(PATIENCE)
        assert self.result is not None
        return self.result


def begun(engine: Engine, **options: Any) -> Running:
    """One that surely runs for as long as the test needs."""
    before = steps(engine)
    with ExitStack() as slow:
        slow.enter_context(slow_steps(engine))
        running = Running(engine, **options)
        running.slow = slow.pop_all()
    wait_until(lambda: steps(engine) > before + 3)
    return running


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_what_was_paused_goes_on_to_the_same_tokens(engine: Engine, mode: Any) -> None:
    wanted = engine.generate(input_ids=PROMPT, sampling_params=LONG)["output_ids"]
    running = begun(engine)
    engine.pause_generation(mode)
    engine.pause_generation(mode)
    state = engine.get_server_info()["internal_states"][0]
    assert state["is_paused"]
    assert state["num_running_reqs"] == (mode == "in_place")
    assert state["num_queue_reqs"] == (mode == "retract")
    other = Running(engine)  # waits
    wait_until(lambda: engine.get_server_info()["internal_states"][0]["num_queue_reqs"] == 1 + (mode == "retract"))
    assert steps(engine) == state["steps"]
    assert running.result is other.result is None
    engine.continue_generation()
    engine.continue_generation()
    assert running.wait()["output_ids"] == other.wait()["output_ids"] == wanted
    assert not engine.get_server_info()["internal_states"][0]["is_paused"]


def test_abort_ends_what_runs_with_what_there_is(engine: Engine) -> None:
    running = begun(engine)
    engine.pause_generation()
    result = running.wait()
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(result["output_ids"]) < 120
    assert result["text"]
    later = Running(engine)
    wait_until(lambda: engine.get_server_info()["internal_states"][0]["num_queue_reqs"] == 1)
    engine.continue_generation()
    assert len(later.wait()["output_ids"]) == 120


def test_retracted_generations_go_on_under_new_weights(engine: Engine, folder: Path, tmp_path: Path) -> None:
    new = shaken(folder, tmp_path / "new")
    running = begun(engine)
    engine.pause_generation("retract")
    engine.update_weights_from_disk(new)
    so_far = engine._loop.call(lambda: next(its.request.output_ids[:] for its in engine._loop._live.values()))
    engine.continue_generation()
    ids = running.wait()["output_ids"]
    assert ids[: len(so_far)] == so_far
    with Engine(new, **OPTIONS) as other:
        rest = {**LONG, "max_new_tokens": 120 - len(so_far)}
        assert ids[len(so_far) :] == other.generate(input_ids=PROMPT + so_far, sampling_params=rest)["output_ids"]


def test_deadlines_run_and_aborts_come_through_while_paused(engine: Engine) -> None:
    running = begun(engine, rid="mine")
    engine.pause_generation("in_place")
    assert isinstance(Running(engine, timeout=0.05).wait(), RequestTimeout)
    engine.abort("mine")
    assert running.wait()["meta_info"]["finish_reason"]["type"] == "abort"
    engine.continue_generation()


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_programs_with_branches_and_leases_are_paused_alike(engine: Engine, mode: Any) -> None:
    client = Client(engine)
    client.send(ir.Text("x" * 40), gen(max_tokens=4))
    client.wait(ir.NodeDone)
    before = steps(engine)
    with slow_steps(engine):
        client.send(ir.Fork((1, 2)), (1, gen(max_tokens=120)), (2, gen(max_tokens=120)), final=True)
        wait_until(lambda: steps(engine) > before + 3)
        engine.pause_generation(mode)
    engine.continue_generation()
    client.wait(ir.Done)
    failed = client.of(ir.NodeFailed)
    assert len(client.of(ir.NodeDone)) + len(failed) >= 3
    assert bool(failed) == (mode == "abort")
    assert all(isinstance(each.error, RequestAborted) for each in failed[:1])


def test_a_mode_that_is_none_is_refused_and_a_paused_engine_shuts_down(folder: Path) -> None:
    engine = Engine(folder, **OPTIONS)
    with pytest.raises(InvalidRequest, match="mode must be one of abort, retract, in_place, not 'wait'"):
        engine.pause_generation("wait")  # type: ignore[arg-type]
    engine.pause_generation("in_place")
    error: list[Exception] = []

    def ask() -> None:
        try:
            engine.generate(input_ids=PROMPT)
        except EngineDead as dead:
            error.append(dead)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    wait_until(lambda: engine.get_server_info()["internal_states"][0]["num_queue_reqs"] == 1)
    engine.shutdown()
    thread.join(PATIENCE)
    assert error
