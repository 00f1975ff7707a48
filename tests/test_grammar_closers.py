"""Processes that close automata: what becomes of those that hang or die, and of who waits for them."""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from sgl.errors import GrammarTooLarge, RegexSyntaxError
from sgl.grammar import process
from sgl.grammar.closers import Closers
from sgl.grammar.closure import Closed
from sgl.grammar.compiler import make_constraint
from sgl.grammar.process import Channel
from sgl.grammar.time_limit import OutOfTime


class Ask:
    """What came of a constraint, in its order."""

    def __init__(self, closers: Closers, **kind: Any) -> None:
        self.found: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        told = (self.told(name) for name in ("ended", "came late"))
        closers.close_automaton(make_constraint(kind), *told)

    def told(self, name: str) -> Callable[[Any], None]:
        return lambda answer: self.found.put((name, answer))

    def next(self) -> tuple[str, Any]:
        return self.found.get(timeout=30)


@contextmanager
def closers(num_processes: int = 1, **options: Any) -> Iterator[Closers]:
    made = Closers(num_processes, **{"deadline": 30.0, "patience": 30.0} | options)
    made.start()
    ready = Ask(made, regex="ready")
    if ready.next() == ("ended", None):
        ready.next()
    try:
        yield made
    finally:
        made.close()


def stopped(closers: Closers) -> int:
    """The process, which from now on does nothing."""
    [process] = closers._processes
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGSTOP)
    return process._process.pid


def until_taken_up(closers: Closers) -> None:
    while not closers._channels:
        time.sleep(0.001)


def test_automata_are_closed_one_after_another_and_errors_come_as_they_are() -> None:
    with closers() as its:
        asked = [Ask(its, regex=f"[0-9]{{3}}-{i}") for i in range(20)]
        wrong = Ask(its, regex="(a")
        for each in asked:
            name, answer = each.next()
            assert name == "ended"
            assert isinstance(answer, Closed)
        assert isinstance(wrong.next()[1], RegexSyntaxError)
        assert not its._busy
        assert len(its._at_rest) == 1


def test_who_waits_longer_than_patience_is_told_and_gets_it_later() -> None:
    with closers(patience=0.05) as its:
        pid = stopped(its)
        slow = Ask(its, regex="[ab]{4}")
        assert slow.next() == ("ended", None)
        os.kill(pid, signal.SIGCONT)
        name, answer = slow.next()
        assert name == "came late"
        assert isinstance(answer, Closed)


def test_a_process_that_hangs_is_killed_at_the_deadline_and_the_next_one_works() -> None:
    with closers(deadline=1.5) as its:
        stopped(its)
        stuck, other = Ask(its, regex="[ab]{4}"), Ask(its, regex="[ab]{5}")
        name, answer = stuck.next()
        assert name == "ended"
        assert isinstance(answer, OutOfTime)
        assert isinstance(other.next()[1], Closed)
        assert stuck.found.empty()


def test_a_process_that_dies_ends_its_constraint_alone() -> None:
    with closers() as its:
        pid = stopped(its)
        dead, other = Ask(its, regex="[ab]{4}"), Ask(its, regex="[ab]{5}")
        until_taken_up(its)
        os.kill(pid, signal.SIGKILL)
        assert isinstance(dead.next()[1], GrammarTooLarge)
        assert isinstance(other.next()[1], Closed)


def test_half_an_answer_holds_up_nobody_else() -> None:
    with closers(num_processes=2, deadline=3.0) as its:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        its._processes[0]._channel = its._processes[1]._channel = Channel(ours)  # whichever is taken first
        stuck = Ask(its, regex="[ab]{4}")
        theirs.recv(1 << 16)
        theirs.sendall(struct.pack("<qq", 1, 1000) + b"half")
        for process in its._at_rest:
            process.kill(for_good=False)  # and so starts anew
        assert isinstance(Ask(its, regex="[ab]{5}").next()[1], Closed)
        assert stuck.found.empty()
        assert isinstance(stuck.next()[1], OutOfTime)


def test_nobody_is_told_while_somebody_launches_and_the_processes_work_on() -> None:
    launches = threading.Event()
    with closers(is_launching=launches.is_set) as its:
        launches.set()
        asked = [Ask(its, regex=regex) for regex in ("[ab]{4}", "(", "[cd]{4}")]
        end = time.monotonic() + 30
        while len(its._answered) < 3:
            assert time.monotonic() < end, "each is taken up when the one before is answered"
            time.sleep(0.001)
        assert all(ask.found.empty() for ask in asked)
        launches.clear()
        first, failed, last = (ask.next() for ask in asked)
        assert isinstance(first[1], Closed)
        assert isinstance(failed[1], RegexSyntaxError)
        assert isinstance(last[1], Closed)


def test_garbage_is_looked_for_when_nobody_asks_or_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []  # after how many answers
    answered = 0
    fake = SimpleNamespace(freeze=lambda: None, disable=lambda: None, collect=lambda: collected.append(answered))
    monkeypatch.setattr(process, "gc", fake)
    monkeypatch.setattr(process, "_IDLE_SECONDS", 0.3)
    ours, theirs = (Channel(end) for end in socket.socketpair())
    worker = threading.Thread(target=process.serve_channel, args=(theirs,))
    worker.start()
    tell(ours, None)
    for _ in range(process._COLLECT_ANYWAY + 10):
        tell(ours, (make_constraint({"regex": "a"}), 10.0))
        assert ours.receive() is not None
        answered += 1
    assert len(collected) == 1
    assert process._COLLECT_ANYWAY - 1 <= collected[0] <= process._COLLECT_ANYWAY
    for _ in range(process._COLLECT_AFTER):
        tell(ours, (make_constraint({"regex": "a"}), 10.0))
        assert ours.receive() is not None
    end = time.monotonic() + 30
    while len(collected) < 2:
        assert time.monotonic() < end, "nobody asks"
        time.sleep(0.01)
    ours._socket.close()
    worker.join(30)
    assert not worker.is_alive()


def tell(channel: Channel, message: Any) -> None:
    channel.put(message)
    assert channel.flush()


def test_nothing_is_told_after_the_end() -> None:
    with closers() as its:
        stopped(its)
        asked = Ask(its, regex="[ab]{4}")
        until_taken_up(its)
    its._thread.join(30)
    assert not its._thread.is_alive()
    with pytest.raises(queue.Empty):
        asked.found.get(timeout=0.05)
