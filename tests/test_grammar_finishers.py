"""Processes that close automata: what becomes of those that hang or die, and of who waits for them."""

from __future__ import annotations

import gc
import os
import queue
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from sgl.errors import EngineDead, GrammarTooLarge, RegexSyntaxError
from sgl.grammar.automaton.finished import FinishedAutomaton
from sgl.grammar.compiler import make_constraint
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.runtime.constraints import finishers as finishers_module
from sgl.runtime.constraints import process
from sgl.runtime.constraints.finishers import Finishers
from sgl.runtime.constraints.process import Channel
from sgl.runtime.constraints.service import CompileService
from sgl.time_limit import OutOfTime
from tests.open_files import many_open_files
from tests.patience import PATIENCE, wait_until


class GenerateRequest:
    """What came of a constraint, in its order."""

    def __init__(self, finishers: Finishers, **kind: Any) -> None:
        self.found: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        told = (self.told(name) for name in ("ended", "came late"))
        finishers.finish(make_constraint(kind), *told)

    def told(self, name: str) -> Callable[[Any], None]:
        return lambda answer: self.found.put((name, answer))

    def next(self) -> tuple[str, Any]:
        return self.found.get(timeout=PATIENCE)


@contextmanager
def finishers(num_processes: int = 1, **options: Any) -> Iterator[Finishers]:
    made = Finishers(num_processes, **{"deadline": PATIENCE, "patience": PATIENCE} | options)
    made.start()
    ready = GenerateRequest(made, regex="ready")
    if ready.next() == ("ended", None):
        ready.next()
    try:
        yield made
    finally:
        made.close()


def stopped(finishers: Finishers) -> int:
    """The process, which from now on does nothing."""
    [process] = finishers._processes
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGSTOP)
    return process._process.pid


def until_taken_up(finishers: Finishers) -> None:
    wait_until(lambda: finishers._channels)


def until_at_rest(finishers: Finishers) -> None:
    wait_until(lambda: not finishers._busy and not finishers._answered)


def test_automata_are_closed_one_after_another_and_errors_come_as_they_are() -> None:
    with finishers() as its:
        asked = [GenerateRequest(its, regex=f"[0-9]{{3}}-{i}") for i in range(20)]
        wrong = GenerateRequest(its, regex="(a")
        for each in asked:
            name, answer = each.next()
            assert name == "ended"
            assert isinstance(answer, FinishedAutomaton)
        assert isinstance(wrong.next()[1], RegexSyntaxError)
        assert not its._busy
        assert len(its._at_rest) == 1


def test_who_waits_longer_than_patience_is_told_and_gets_it_later() -> None:
    with finishers(patience=0.05) as its:
        pid = stopped(its)
        slow = GenerateRequest(its, regex="[ab]{4}")
        assert slow.next() == ("ended", None)
        os.kill(pid, signal.SIGCONT)
        name, answer = slow.next()
        assert name == "came late"
        assert isinstance(answer, FinishedAutomaton)


def test_a_process_that_hangs_is_killed_at_the_deadline_and_the_next_one_works() -> None:
    with finishers() as its:
        stopped(its)
        its._deadline = 0.2
        stuck = GenerateRequest(its, regex="[ab]{4}")
        until_taken_up(its)
        its._deadline = PATIENCE
        other = GenerateRequest(its, regex="[ab]{5}")
        name, answer = stuck.next()
        assert name == "ended"
        assert isinstance(answer, OutOfTime)
        assert isinstance(other.next()[1], FinishedAutomaton)
        assert stuck.found.empty()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_process_that_dies_ends_its_constraint_alone(is_first: bool) -> None:
    """And only the one that it had worked on alone; another is asked once more."""
    with finishers() as its:
        pid = stopped(its)
        if is_first:
            its._processes[0]._num_asked = 0
        dead = GenerateRequest(its, regex="[ab]{4}")
        until_taken_up(its)
        os.kill(pid, signal.SIGKILL)
        assert isinstance(dead.next()[1], GrammarTooLarge if is_first else FinishedAutomaton)
        assert isinstance(GenerateRequest(its, regex="[ab]{5}").next()[1], FinishedAutomaton)


def test_half_an_answer_holds_up_nobody_else() -> None:
    with finishers(num_processes=2) as its:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        its._processes[0]._channel = its._processes[1]._channel = Channel(ours)  # whichever is taken first
        stuck = GenerateRequest(its, regex="[ab]{4}")
        theirs.recv(1 << 16)
        theirs.sendall(struct.pack("<qq", 1, 1000) + b"half")
        for process in its._at_rest:
            process.kill(for_good=False)  # and so starts anew
        assert isinstance(GenerateRequest(its, regex="[ab]{5}").next()[1], FinishedAutomaton)
        assert stuck.found.empty()
        [(process, job)] = its._busy.items()
        process._seconds = job.until = 0.0
        its._rouse()
        assert isinstance(stuck.next()[1], OutOfTime)


def until_answered(finishers: Finishers, count: int) -> None:
    wait_until(lambda: len(finishers._answered) >= count, "each is not taken up when the one before is answered")


def test_nobody_is_told_while_somebody_launches_and_the_processes_work_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finishers_module, "_LONGEST_WAIT", PATIENCE)
    launches, looks = threading.Event(), []

    def is_launching() -> bool:
        looks.append(time.monotonic())
        return launches.is_set()

    with finishers(is_launching=is_launching) as its:
        launches.set()
        asked = [GenerateRequest(its, regex=regex) for regex in ("[ab]{4}", "(", "[cd]{4}")]
        until_answered(its, 3)
        looks.clear()
        wait_until(lambda: len(looks) > 50)
        gaps = [later - earlier for earlier, later in pairwise(looks)]
        assert median(gaps) >= finishers_module._LOOK_SECONDS / 2, "it sleeps between two looks"
        assert all(ask.found.empty() for ask in asked)
        launches.clear()
        first, failed, last = (ask.next() for ask in asked)
        assert isinstance(first[1], FinishedAutomaton)
        assert isinstance(failed[1], RegexSyntaxError)
        assert isinstance(last[1], FinishedAutomaton)


def test_who_launches_on_and_on_holds_up_no_answer() -> None:
    with finishers(is_launching=lambda: True) as its:
        assert isinstance(GenerateRequest(its, regex="[ab]{4}").next()[1], FinishedAutomaton)


def test_answers_that_come_late_are_told_as_such_behind_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finishers_module, "_LONGEST_WAIT", PATIENCE)
    launches = threading.Event()
    with finishers(is_launching=launches.is_set) as its:
        its._patience = 0.1
        launches.set()
        pid = stopped(its)
        asked = GenerateRequest(its, regex="[ab]{4}")
        assert asked.next() == ("ended", None)  # at once
        os.kill(pid, signal.SIGCONT)
        until_answered(its, 1)
        assert asked.found.empty()
        launches.clear()
        name, answer = asked.next()
        assert name == "came late"
        assert isinstance(answer, FinishedAutomaton)


@pytest.mark.parametrize("state", ["answered", "under way", "waiting"])
def test_a_service_that_was_closed_lets_go_of_who_launches(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner, whose memory is the GPU's."""

    class Runner:
        launches = False

        def is_launching(self) -> bool:
            return self.launches

    monkeypatch.setattr(finishers_module, "_LONGEST_WAIT", PATIENCE)
    runner = Runner()
    service = CompileService(
        Vocabulary([bytes([byte]) for byte in range(256)], []),
        num_finishers=1,
        patience=PATIENCE,
        is_launching=runner.is_launching,
    )
    its = service._finishers
    assert its is not None
    service.start()
    service.submit(make_constraint({"regex": "ready"})).result(PATIENCE)
    until_at_rest(its)
    if state == "answered":
        runner.launches = True
        flight = service.submit(make_constraint({"regex": "[ab]{4}"}))
        until_answered(its, 1)
    else:
        stopped(its)
        flight = service.submit(make_constraint({"regex": "[ab]{4}"}))
        until_taken_up(its)
        if state == "waiting":
            flight = service.submit(make_constraint({"regex": "[cd]{4}"}))
    service.close()
    its._thread.join(PATIENCE)
    assert isinstance(flight.exception(PATIENCE), EngineDead)
    kept = weakref.ref(runner)
    del service, its, runner, flight
    gc.collect()
    assert kept() is None


def test_garbage_is_looked_for_when_nobody_asks_or_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []  # after how many answers
    answered = 0
    fake = SimpleNamespace(freeze=lambda: None, disable=lambda: None, collect=lambda: collected.append(answered))
    monkeypatch.setattr(process, "gc", fake)
    monkeypatch.setattr(process, "_IDLE_SECONDS", PATIENCE)
    one, other = socket.socketpair()
    with many_open_files():
        ours, theirs = Channel(one), Channel(other.dup())
    other.close()
    worker = threading.Thread(target=process.serve_channel, args=(theirs,))
    worker.start()
    tell(ours, (None, b""))
    assert ours.receive() is not None  # it is ready
    for _ in range(process._COLLECT_ANYWAY + 10):
        tell(ours, (make_constraint({"regex": "a"}), PATIENCE))
        assert ours.receive() is not None
        answered += 1
    assert len(collected) == 1
    assert process._COLLECT_ANYWAY - 1 <= collected[0] <= process._COLLECT_ANYWAY
    monkeypatch.setattr(process, "_IDLE_SECONDS", 0.01)
    for _ in range(process._COLLECT_AFTER):
        tell(ours, (make_constraint({"regex": "a"}), PATIENCE))
        assert ours.receive() is not None
    wait_until(lambda: len(collected) == 2)  # nobody asks
    ours._socket.close()
    worker.join(PATIENCE)
    assert not worker.is_alive()


def tell(channel: Channel, message: Any) -> None:
    channel.put(message)
    assert channel.flush()


def test_nothing_is_told_after_the_end() -> None:
    with finishers() as its:
        stopped(its)
        asked = GenerateRequest(its, regex="[ab]{4}")
        until_taken_up(its)
    its._thread.join(PATIENCE)
    assert not its._thread.is_alive()
    with pytest.raises(queue.Empty):
        asked.found.get(timeout=0.05)
