"""Requests counted at the transport: one for a program, and at most one more for each value Python looks at."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from typing import Any

import pytest

import sgl
import sgl.lang.record.run as lang_run
from sgl.lang.record.run import SEGMENT_NODES
from tests.lang_mocks import ENDLESS, MockBackend, ProgramBackend
from tests.patience import PATIENCE, wait_until

pytestmark = pytest.mark.usefixtures("own_garbage")


def echo(prompt: Any, params: Any) -> str:
    """A reply that is the gen's name in brackets."""
    return f"<{params.node.name}>"


def requests_of(program: Any, *args: Any, **kwargs: Any) -> int:
    """How many requests one run takes, everything waited for."""
    backend = ProgramBackend(MockBackend(echo))
    state = program.run(*args, backend=backend, **kwargs)
    done = threading.Event()
    state.when_done(done.set)
    assert done.wait(PATIENCE)
    assert state.error() is None
    assert state.usage["requests"] == backend.requests
    return backend.requests


@sgl.function
def few_shot(s, question):
    """A straight line."""
    for i in range(5):
        s += f"Q: {i}\nA: {i}\n"
    s += "Q: " + question + "\nA:" + sgl.gen("answer", stop="\n")


@sgl.function
def chat(s, first, second):
    """Two turns, the second after the first answer."""
    s += sgl.system("Be brief.")
    s += sgl.user(first) + sgl.assistant(sgl.gen("a"))
    s += sgl.user(second) + sgl.assistant(sgl.gen("b"))


@sgl.function
def choose(s, question):
    """A select of each method."""
    for method in ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"):
        s += question + sgl.select(method, ["yes", "no"], choices_method=method)


@sgl.function
def parallel(s, topic):
    """A fork, and what the branches wrote in the parent, without reading it."""
    s += "Tips on " + topic
    forks = s.fork(2)
    forks += lambda i: f"Tip {i}:" + sgl.gen("tip")
    s += "1." + forks[0].ref("tip") + "2." + forks[1].ref("tip").strip()
    forks.join()
    s += "In short:" + sgl.gen("summary")


@sgl.function
def tree_of_thought(s, question):
    """2^4: four levels of two branches each; the texts of the leaves are the value."""
    s += question
    forks = [s]
    groups = []
    for _ in range(4):
        grown = []
        for state in forks:
            group = state.fork(2)
            group += "Think:" + sgl.gen("thought")
            groups.append(group)
            grown += list(group)
        forks = grown
    return forks


@sgl.function
def mixed(s):
    """Scopes, variables, copies, joins that append."""
    with s.var_scope("scope"):
        s += "a" + sgl.gen("x", n=2)
    s["plain"] = "value"
    with s.copy() as branch:
        branch += sgl.gen("copied")
    forks = s.fork(3)
    forks += sgl.gen("y")
    forks.join("concate_and_append")
    s += s.ref("scope").upper() + sgl.gen("z", dtype=int)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    ("program", "args"),
    [(few_shot, ("why",)), (chat, ("a", "b")), (choose, ("ok?",)), (parallel, ("cats",)), (mixed, ())],
)
def test_a_program_that_nobody_observes_is_one_request(program: Any, args: Any) -> None:
    assert requests_of(program, *args) == 1


@pytest.mark.usefixtures("unhurried")
def test_a_tree_of_thought_is_one_request() -> None:
    backend = ProgramBackend(MockBackend(echo))
    state = tree_of_thought.run("24?", backend=backend)
    leaves = [leaf.text() for leaf in state.ret_value]
    assert leaves == ["24?" + "Think:<thought>" * 4] * 16
    assert backend.requests == 1
    assert len(backend.mock.calls) == 2 + 4 + 8 + 16


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("num_observed", range(5))
def test_k_observations_are_at_most_k_more_requests(num_observed: int) -> None:
    @sgl.function
    def program(s):
        for i in range(4):
            s += f"{i}" + sgl.gen(f"x{i}")
            if i < num_observed:
                assert s[f"x{i}"] == f"<x{i}>"
                assert s.get_meta_info(f"x{i}")["completion_tokens"] == 4
                assert f"<x{i}>" in s.text()

    assert requests_of(program) <= 1 + num_observed
    assert requests_of(program) == 1 + num_observed  # the last ones are shipped at the end


@pytest.mark.usefixtures("unhurried")
def test_a_react_program_costs_one_request_per_observed_step() -> None:
    @sgl.function
    def react(s, question):
        s += question
        for i in range(4):
            s += "Action:" + sgl.select("tool", ["search", "finish"])
            if s["tool"] == "finish":
                break
            s += sgl.gen("argument") + f"Observation {i}\n"

    backend = ProgramBackend(MockBackend(echo))
    react.run("q", backend=backend).sync()
    assert backend.requests <= 5


@pytest.mark.usefixtures("unhurried")
def test_bodies_are_executed_once_whatever_is_asked_of_the_state() -> None:
    executed = []

    @sgl.function
    def program(s, x):
        executed.append(x)
        s += sgl.gen("a")

    backend = ProgramBackend(MockBackend(echo))
    state = program.run(0, backend=backend)
    for _ in range(3):
        state.text()
        state.messages()
        state["a"]
        state.error()
        list(state.text_iter())
    program.run_batch([(1,), (2,), (3,)], backend=backend)
    program.run(4, backend=backend, stream=True).sync()
    assert sorted(executed) == [0, 1, 2, 3, 4]
    assert backend.requests == 5


@pytest.mark.usefixtures("unhurried")
def test_reading_values_after_the_run_costs_nothing_more() -> None:
    backend = ProgramBackend(MockBackend(echo))
    states = few_shot.run_batch([("a",), ("b",)], backend=backend)
    for state in states:
        assert state["answer"] == "<answer>"
        assert state.get_meta_info("answer")["completion_tokens"]
    assert backend.requests == 2


def test_a_body_that_turns_to_something_long_has_its_nodes_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ProgramBackend(MockBackend(echo))
    arrived = []

    @sgl.function
    def program(s):
        s += "early" + sgl.gen("x")
        wait_until(lambda: backend.mock.calls)
        arrived.append(len(backend.mock.calls))
        monkeypatch.setattr(lang_run.idle_watch, "add", lambda _: None)
        s += "late" + sgl.gen("y")

    program.run(backend=backend).sync()
    assert arrived == [1]
    assert backend.requests == 2


@pytest.mark.usefixtures("unhurried")
def test_a_long_segment_is_shipped_before_anybody_observes() -> None:
    @sgl.function
    def program(s):
        for i in range(SEGMENT_NODES * 3 // 2):
            s += f"{i} "

    assert requests_of(program) == 2


def test_an_endless_recording_loop_ends_with_an_error() -> None:
    @sgl.function
    def program(s):
        while True:
            s += sgl.gen("x")

    @sgl.function
    def forking(s):
        while True:
            s.fork(100)

    for endless, message in ((program, "at most 10000 nodes"), (forking, "at most 4096 forked")):
        with pytest.raises(sgl.errors.ProgramError, match=message):
            endless.run(backend=ProgramBackend(MockBackend(echo)))


def test_a_late_segment_after_the_lease_is_computed_and_says_so() -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("x")
        s["x"]
        backend.sessions[0].lapse()
        s += sgl.gen("y")

    backend = ProgramBackend(MockBackend(echo))
    state = program.run(backend=backend)
    assert state.text() == "<x><y>"
    assert state.get_meta_info("y")["evicted"] is True
    assert state.get_meta_info("x")["evicted"] is False


@pytest.mark.slow
def test_ten_thousand_programs_run_at_once_without_a_thread_each() -> None:
    @sgl.function
    def program(s, i):
        s += f"{i}" + sgl.gen("x")

    backend, before = MockBackend(echo, together=10_000), threading.active_count()
    states = program.run_batch([(i,) for i in range(10_000)], backend=backend)
    assert backend.max_running == 10_000
    assert all(state["x"] == "<x>" for state in states)
    assert threading.active_count() < before + 16


def test_bodies_that_wait_for_something_else_overlap() -> None:
    @sgl.function
    def program(s, i):
        s += f"{i}" + sgl.gen("x")
        meeting.wait(PATIENCE)  # a slow service

    meeting = threading.Barrier(30)
    states = program.run_batch([(i,) for i in range(30)], backend=MockBackend(echo))
    assert all(state["x"] == "<x>" for state in states)
    meeting = threading.Barrier(30)
    streams = [program.run(i, backend=MockBackend(echo), stream=True) for i in range(30)]
    assert [state.text() for state in streams] == [f"{i}<x>" for i in range(30)]

    async def main() -> None:
        await asyncio.gather(*[program.arun(i, backend=MockBackend(echo)) for i in range(30)])

    meeting = threading.Barrier(30)
    asyncio.run(main())


def test_streams_take_no_thread_each() -> None:
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")

    backend, before = MockBackend(echo, together=ENDLESS), threading.active_count()
    states = [program.run(backend=backend, stream=True) for _ in range(300)]
    wait_until(lambda: backend.running == 300)
    assert threading.active_count() < before + 16
    backend.release()
    assert all(state.text() == "a<x>" for state in states)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_finished_programs_leave_nothing_behind(is_streaming: bool) -> None:
    backend = ProgramBackend(MockBackend(echo))
    states = [parallel.run("cats", backend=backend, stream=is_streaming) for _ in range(50)]
    for state in states:
        state.text()
    runs = [weakref.ref(state._run) for state in states]
    del states, state
    backend.sessions.clear()
    wait_until(lambda: gc.collect() >= 0 and all(run() is None for run in runs))


def test_a_wide_fork_starts_no_thread_per_branch() -> None:
    @sgl.function
    def program(s):
        forks = s.fork(500)
        forks += lambda i: f"{i}" + sgl.gen("x")
        forks.join()

    backend = MockBackend(lambda prompt, _: prompt.text, together=500)
    threads = threading.active_count()
    state = program.run(backend=backend)
    assert state["x"] == [str(i) for i in range(500)]
    assert backend.max_running == 500
    assert threading.active_count() <= threads + 2


def test_the_watch_over_recording_bodies_outlives_runs_that_come_while_it_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collections run code in the middle of anything, and threads take turns there."""

    class Recording:
        is_over = False

        def __init__(self) -> None:
            self._unsent = [1]

        def flush(self) -> None:
            self._unsent = []

    class Litter:
        def __init__(self) -> None:
            self.itself = self
            weakref.finalize(self, sum, range(50))

    def litter() -> None:
        while not is_over.is_set():
            Litter()

    monkeypatch.setattr(lang_run, "IDLE_S", 0.0005)
    watch, is_over = lang_run.IdleWatch(), threading.Event()
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    thread = threading.Thread(target=litter)
    thread.start()
    try:
        sys.setswitchinterval(1e-6)
        gc.set_threshold(20)
        for _ in range(30_000):
            watch.add(Recording())  # type: ignore[arg-type]
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        is_over.set()
        thread.join()
    wait_until(lambda: not watch._recording)
