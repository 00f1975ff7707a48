"""Processes that try constraints end with their memory: what one constraint leaves behind fails no other."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sgl.errors import GrammarError, GrammarTooLarge, RegexSyntaxError
from sgl.grammar.compiler import Constraint, make_constraint
from sgl.runtime.constraints.process import Channel, GrammarProcess
from sgl.runtime.constraints.service import CompileService
from sgl.time_limit import OutOfTime
from tests.grammar_oracles import piece_vocabulary
from tests.patience import PATIENCE, wait_until

PIECES = piece_vocabulary()
EASY = make_constraint({"regex": "ab|c"})
GREEDY = make_constraint({"ebnf": 'root ::= "a" | "b" root'})  # a stack of 128 MB is set aside for it
WRONG = make_constraint({"regex": "a("})
TOO_MUCH = "took too much memory"


@pytest.fixture
def trial() -> Iterator[GrammarProcess]:
    made = GrammarProcess(PIECES)
    yield made
    made.kill()


def run(trial: GrammarProcess, constraint: Constraint) -> None:
    assert trial.run(constraint, PATIENCE) is None


def pid_of(trial: GrammarProcess) -> int:
    assert trial._process is not None
    return trial._process.pid


def leave_room(pid: int, num_bytes: int) -> None:
    """As if constraints had used up the rest."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (used + num_bytes, resource.prlimit(pid, resource.RLIMIT_AS)[1]))


def test_the_start_of_a_process_is_no_time_of_a_constraint(trial: GrammarProcess) -> None:
    trial.start()
    os.kill(pid_of(trial), signal.SIGSTOP)
    trial.ask(EASY, PATIENCE)
    asked = time.monotonic()
    assert trial.answer(PATIENCE) is None
    assert trial.due() > asked + PATIENCE, "it still starts"
    os.kill(pid_of(trial), signal.SIGCONT)
    wait_until(lambda: trial.answer(PATIENCE) is not None)
    ready = trial.due() - PATIENCE
    assert asked < ready < time.monotonic()
    trial.ask(EASY, PATIENCE)
    assert trial.due() <= time.monotonic() + PATIENCE


@pytest.mark.parametrize("num_bytes", [0, 1 << 20])
def test_who_finds_no_memory_left_is_asked_of_another_process(trial: GrammarProcess, num_bytes: int) -> None:
    """Also where there is not even room for its message."""
    large = make_constraint({"choices": [f"{number:0100d}" for number in range(20_000)]})
    run(trial, EASY)
    before = pid_of(trial)
    leave_room(before, num_bytes)
    run(trial, large)
    assert pid_of(trial) != before
    with pytest.raises(GrammarError, match="position"):
        run(trial, WRONG)


def test_who_takes_too_much_by_itself_is_told_so_and_fails_no_other() -> None:
    trial = GrammarProcess(PIECES, more_bytes=100 << 20)
    try:
        for _ in range(2):
            for _ in range(2):
                with pytest.raises(GrammarTooLarge, match=TOO_MUCH):
                    run(trial, GREEDY)
            run(trial, EASY)
            with pytest.raises(GrammarError, match="position"):
                run(trial, WRONG)
    finally:
        trial.kill()


def test_a_process_that_has_used_up_half_of_its_room_ends() -> None:
    trial = GrammarProcess(PIECES, more_bytes=320 << 20)
    try:
        run(trial, GREEDY)
        used_up = trial._process
        assert used_up is not None
        assert used_up.wait(PATIENCE) == 0
        run(trial, EASY)
        before = pid_of(trial)
        run(trial, EASY)
        assert pid_of(trial) == before
    finally:
        trial.kill()


def test_a_process_that_was_killed_while_nobody_asked_is_replaced(trial: GrammarProcess) -> None:
    for _ in range(3):
        run(trial, EASY)
        os.kill(pid_of(trial), signal.SIGKILL)
    run(trial, EASY)


def test_who_has_its_automaton_closed_is_asked_of_another_process_too() -> None:
    service = CompileService(PIECES, num_finishers=1, deadline=PATIENCE, patience=PATIENCE)
    try:
        assert service._finishers is not None
        [process] = service._finishers._processes
        assert service.submit(EASY).result(PATIENCE)
        before = pid_of(process)
        leave_room(before, 0)
        schema = {"type": "object", "properties": {f"name {number}": {"type": "integer"} for number in range(400)}}
        found = service.submit(make_constraint({"json_schema": schema})).result(PATIENCE)
        assert hasattr(found, "automaton")
        assert pid_of(process) != before
    finally:
        service.close()


def test_a_constraint_has_its_seconds_of_a_processor_however_long_others_have_it(trial: GrammarProcess) -> None:
    run(trial, EASY)
    os.kill(pid_of(trial), signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(trial.run, WRONG, 1.0)
        wait_until(lambda: trial._seconds == 1.0 and time.monotonic() > trial._begun + 1.5)
        assert not found.done()
        os.kill(pid_of(trial), signal.SIGCONT)
        assert isinstance(found.exception(PATIENCE), RegexSyntaxError)


def test_who_is_stuck_where_no_check_stands_has_no_more_of_a_processor(
    trial: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl.runtime.constraints.process._LOADED", PATIENCE)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs, subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        trial._process, trial._channel, trial._is_ready = process, Channel(ours), True
        try:
            with pytest.raises(OutOfTime):
                trial.run(EASY, 0.2)
            assert process.returncode == -signal.SIGKILL
        finally:
            process.kill()
    ours.close()
