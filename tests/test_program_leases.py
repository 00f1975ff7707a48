"""Programs that wait, run out of pages or are cancelled: leases, expiry, and a page ledger that always adds up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl.lang.ir import nodes as ir
from sgl.runtime.engine import Engine
from sgl.runtime.loop import timers
from sgl.runtime.program import machine
from tests.live_server import slow_steps, state_of
from tests.patience import PATIENCE, wait_until
from tests.program_client import PRINTABLE, SECONDS, Client, assert_idle, gen

PAGE = 4


def started(folder: Path, **options: Any) -> Engine:
    settings = {"device": "cpu", "page_size": PAGE, "max_total_tokens": 2048, "check_ledger": True, **options}
    return Engine(str(folder), **settings)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with started(folder) as engine:
        yield engine


@pytest.fixture(scope="module", params=[True, False], ids=["run-ahead", "synchronous"])
def small(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    """An engine with few pages and rows, so that requests wait, leases are evicted and rows are retracted."""
    options = {"max_total_tokens": 192, "max_running_requests": 8, "disable_overlap_schedule": not request.param}
    with started(folder, **options, schedule_conservativeness=0.01) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("engine", "small"):
        if name in request.fixturenames:
            assert_idle(request.getfixturevalue(name))


def num_leases(engine: Engine) -> int:
    return engine._loop.call(lambda: len(engine._scheduler.memory.leases))


def usage_of(client: Client) -> dict[str, Any]:
    """Of the latest node."""
    usage: dict[str, Any] = client.of(ir.NodeDone)[-1].meta["usage"]
    return usage


def test_pages_stay_locked_between_segments(engine: Engine) -> None:
    engine.flush_cache()
    client = Client(engine)
    client.send(ir.Text("x" * 20), gen(max_tokens=4))
    client.wait(ir.NodeDone)
    assert num_leases(engine) == 1
    assert not engine.flush_cache()
    client.finish(ir.Text("y"), gen())
    assert usage_of(client)["lease"] == "held"
    assert usage_of(client)["cached_tokens"] == 24
    assert engine.flush_cache()


def test_a_late_segment_costs_a_prefill_and_says_so(engine: Engine) -> None:
    texts = []
    for lease_s in (30.0, 0.02):
        engine.flush_cache()
        client = Client(engine, lease_s=lease_s)
        client.send(ir.Text("x" * 20), gen(max_tokens=4))
        client.wait(ir.NodeDone)
        if lease_s < 1:
            wait_until(lambda: not num_leases(engine))
            assert engine.flush_cache()
        texts.append([event.text for event in client.finish(ir.Text("y"), gen())])
    assert texts[0] == texts[1]
    assert usage_of(client)["lease"] == "expired"
    assert (usage_of(client)["new_tokens"], usage_of(client)["cached_tokens"]) == (26, 0)


def test_a_lease_lasts_while_the_program_runs_and_starts_anew_when_it_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 0.0
    for module in (machine, timers):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead))
    with started(folder, program_lease_ttl=PATIENCE) as engine:
        client = Client(engine, lease_s=2 * PATIENCE)
        client.send(ir.Text("x" * 20), ir.Fork((1, 2)), gen(max_tokens=4))
        client.wait(ir.NodeDone)
        with slow_steps(engine):
            client.send((1, gen(max_tokens=900)))
            wait_until(lambda: state_of(engine)["num_running_reqs"])
            ahead = 2 * PATIENCE
            before = state_of(engine)["steps"]
            wait_until(lambda: state_of(engine)["steps"] > before + 2)
            assert num_leases(engine) == 1
        wait_until(lambda: len(client.of(ir.NodeDone)) == 2)
        assert num_leases(engine) == 2, "the branch has one of its own now"
        ahead = 4 * PATIENCE
        wait_until(lambda: not num_leases(engine))
        client.session.cancel()
        assert client.is_done.wait(SECONDS)
        assert_idle(engine)


def test_branches_share_one_lease_until_they_have_their_own(engine: Engine) -> None:
    client = Client(engine)
    client.send(ir.Text("x" * 20), gen(), ir.Fork((1, 2, 3)))
    client.wait(ir.NodeDone)
    assert num_leases(engine) == 1
    client.send((1, gen()))
    client.wait(ir.NodeDone, 2)
    assert num_leases(engine) == 2
    client.send(ir.Join((1, 2)))
    client.send((3, gen()))
    client.wait(ir.NodeDone, 3)
    assert num_leases(engine) == 2  # of the root and of branch 3
    client.finish()
    assert num_leases(engine) == 0


def test_leases_never_keep_an_ordinary_request_waiting(small: Engine) -> None:
    """Programs that wait hold most pages; requests that need all of them run nevertheless, and the programs go on."""
    small.flush_cache()
    clients = [Client(small) for _ in range(6)]
    expected = []
    for i, client in enumerate(clients):
        client.send(ir.Text(chr(65 + i) * 20), gen(max_tokens=4, ignore_eos=True))
        expected.append(client.wait(ir.NodeDone)[0].text)
    assert num_leases(small) == 6
    whole = small.generate("z" * 100, {"max_new_tokens": 80, "ignore_eos": True})
    assert whole["meta_info"]["completion_tokens"] == 80
    assert num_leases(small) == 0
    for i, client in enumerate(clients):
        done = client.finish(ir.Text("y"), gen())
        direct = small.generate(
            input_ids=[1, *small.tokenizer.encode(chr(65 + i) * 20 + expected[i] + "y", add_special_tokens=False)],
            sampling_params={"max_new_tokens": 6, "seed": ir.node_seed(1, "3"), "logit_bias": dict(PRINTABLE)},
        )
        assert done[1].text == direct["text"]
    assert [usage_of(client)["lease"] for client in clients] == ["evicted"] * 6


def test_programs_that_are_retracted_write_the_same(small: Engine, engine: Engine) -> None:
    texts = []
    for each in (engine, small):
        before = each._scheduler.counters.retractions
        clients = [Client(each, seed=seed) for seed in range(3)]
        for client in clients:
            client.send(ir.Text("x"), gen(max_tokens=70), ir.Text("y"), gen(max_tokens=70), final=True)
        for client in clients:
            assert client.is_done.wait(SECONDS)
        texts.append([[event.text for event in client.of(ir.NodeDone)] for client in clients])
        assert (each._scheduler.counters.retractions > before) is (each is small)
    assert texts[0] == texts[1]


def test_cancelling_is_acknowledged_and_may_be_repeated(engine: Engine) -> None:
    client = Client(engine)
    client.session.cancel()
    client.session.cancel()
    assert client.is_done.wait(SECONDS)
    assert [type(event) for event in client.events] == [ir.Done]
    client.send(ir.Text("X"), gen())  # goes nowhere
    finished = Client(engine)
    finished.finish(ir.Text("X"), gen())
    finished.session.cancel()
    assert num_leases(engine) == 0
    assert len(finished.of(ir.Done)) == 1


def test_when_a_cancel_is_acknowledged_the_pages_are_back(engine: Engine) -> None:
    found: list[tuple[int, int]] = []
    ended = threading.Event()
    memory = engine._scheduler.memory

    def sink(event: ir.Event) -> None:
        if isinstance(event, ir.Delta):
            session.cancel()
        elif isinstance(event, ir.Done):
            found.append((len(memory.running), memory.cache.locked_pages))
            ended.set()

    session = engine.open_program(ir.Program("x", 1, stream=True), sink)
    session.send(ir.Segment(((0, ir.Text("X")), (0, gen(max_tokens=900, logit_bias=PRINTABLE)))))
    assert ended.wait(SECONDS)
    assert found == [(0, 0)]


def test_a_timer_from_an_earlier_wait_does_not_end_a_lease_too_soon(engine: Engine) -> None:
    client = Client(engine)
    client.send(ir.Text("x" * 20), gen())
    client.wait(ir.NodeDone)
    engine._loop.call(client.session._machine._expire_leases)
    assert num_leases(engine) == 1
    client.finish()


nodes = st.lists(
    st.sampled_from(
        ["text", "gen", "long", "select", "n", "fork", "join", "append", "ship", "pause", "bad", "role"]
    ),
    max_size=14,
)


class Recorder:
    """Turns a plan into segments that are valid, whatever the plan."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.open = [0]  # streams, innermost last
        self.forked: list[list[int]] = []
        self.next_stream = 1
        self.unsent: list[tuple[int, ir.Node]] = []

    def do(self, step: str) -> None:
        streams = self.forked[-1] if self.forked else [0]
        parent = self.forked[-2][0] if len(self.forked) > 1 else 0
        for stream in streams:
            if step in ("text", "long"):
                self.unsent.append((stream, ir.Text(f"{step} {stream} " * (12 if step == "long" else 1))))
            elif step == "gen":
                self.unsent.append((stream, gen(max_tokens=25, stop=["ee"])))
            elif step == "n":
                self.unsent.append((stream, gen(max_tokens=5, n=2)))
            elif step == "select":
                self.unsent.append((stream, ir.Select(None, ("yes", "yesterday", "no"))))
        if step == "bad":
            self.unsent.append((streams[-1], ir.Gen(params={"temperature": -1.0})))
        elif step == "role":
            self.unsent.append((streams[0], ir.RoleBegin("user")))
            self.unsent.append((streams[0], ir.RoleEnd("user")))
        elif step == "fork" and len(self.forked) < 2:
            children = [self.next_stream, self.next_stream + 1, self.next_stream + 2]
            self.next_stream += 3
            self.unsent.append((streams[0], ir.Fork(tuple(children))))
            self.forked.append(children)
        elif step in ("join", "append") and self.forked:
            self.unsent.append(
                (parent, ir.Join(tuple(self.forked.pop()), "append" if step == "append" else "gather"))
            )
        elif step == "ship":
            self.ship()
        elif step == "pause":
            self.ship()
            time.sleep(0.004)

    def ship(self, *, final: bool = False) -> None:
        self.client.send(*self.unsent, final=final)
        self.unsent = []


several_plans = st.lists(st.tuples(nodes, st.integers(0, 12), st.booleans()), min_size=1, max_size=4)
several_lengths = st.lists(st.integers(1, 60), max_size=4)


@pytest.mark.costly
@given(several_plans, several_lengths)
@settings(max_examples=20)
def test_random_programs_and_cancels_on_few_pages_leave_no_page_behind(
    small: Engine, plans: list[tuple[list[str], int, bool]], ordinary: list[int]
) -> None:
    check_pages_left(small, plans, ordinary)


@pytest.mark.slow
@given(several_plans, several_lengths)
@settings(max_examples=40)
def test_more_programs_and_cancels_on_few_pages_leave_no_page_behind(
    small: Engine, plans: list[tuple[list[str], int, bool]], ordinary: list[int]
) -> None:
    check_pages_left(small, plans, ordinary)


def check_pages_left(small: Engine, plans: list[tuple[list[str], int, bool]], ordinary: list[int]) -> None:
    """Several programs at once, some cancelled after so many events, beside ordinary requests. The engine checks
    its ledger after each step; here every program must end, and nothing may follow its end."""
    clients = []
    others = [
        threading.Thread(target=small.generate, args=("q" * length, {"max_new_tokens": 60})) for length in ordinary
    ]
    for thread in others:
        thread.start()
    for plan, cancel_after, is_cancelled in plans:
        client = Client(small, chat_template="chatml", lease_s=0.01, stream=is_cancelled)
        client.cancel_after = cancel_after if is_cancelled else None
        clients.append(client)
        recorder = Recorder(client)
        for step in ["text", *plan]:
            recorder.do(step)
        recorder.ship(final=True)
    for client in clients:
        if client.cancel_after == 0:
            client.session.cancel()
        assert client.is_done.wait(SECONDS)
        assert client.late == []
    for thread in others:
        thread.join(SECONDS)
    assert_idle(small)
