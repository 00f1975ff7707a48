"""The watchdog counts the time it has watched, and harms no process but the one it watched."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from sgl.runtime.config import EngineConfig
from sgl.runtime.server import engine_process as process_module
from sgl.runtime.server.engine_process import EngineProcess
from sgl.runtime.server.watchdog import TICK_SECONDS, Watchdog
from tests.patience import PATIENCE


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(beats: list[tuple[float, float | None]]) -> float:
    """What is counted after waits of so many seconds, each with a beat of that age, or none, before the tick."""
    clock = Clock()
    watchdog, stuck = Watchdog(clock), 0.0
    for seconds, age in beats:
        clock.now += seconds
        if age is not None:
            watchdog.heard(age)
        stuck = watchdog.tick()
    return stuck


def test_a_step_that_goes_on_counts_and_so_does_silence() -> None:
    assert watched([(1.0, float(age)) for age in range(1, 11)]) == 10.0
    assert watched([(1.0, 0.0)] + [(1.0, None)] * 9) == 10.0


def test_a_new_step_begins_anew_however_long_the_last() -> None:
    assert watched([(1.0, 1.0), (1.0, 2.0), (1.0, 0.4)]) == 1.0
    assert watched([(1.0, 3.0), (1.0, 0.0)]) == 1.0


@pytest.mark.parametrize("age", [None, 5000.0])
def test_time_that_nobody_watched_is_no_hang(age: float | None) -> None:
    """The watcher was stopped, or the machine slept, and the engine's own clock may have gone on."""
    assert watched([(1.0, 0.1), (4999.0, age)]) <= 2 * TICK_SECONDS + 1.0


class Process:
    """What EngineProcess sees of a process."""

    def __init__(self, pid: int) -> None:
        self.pid, self.killed, self.alive = pid, False, True

    def poll(self) -> int | None:
        return None if self.alive else -9

    def wait(self, timeout: float | None = None) -> int:
        if self.alive:
            raise subprocess.TimeoutExpired("it", timeout or 0.0)
        return -9

    def kill(self) -> None:
        self.killed = True
        self.alive = False


@pytest.mark.parametrize("meanwhile", ["nothing", "replaced", "recovered", "ended"])
def test_only_the_process_that_hung_is_killed(monkeypatch: pytest.MonkeyPatch, meanwhile: str) -> None:
    signals: list[tuple[int, int]] = []
    ticks: list[Watchdog] = []
    tick = Watchdog.tick
    monkeypatch.setattr(Watchdog, "tick", lambda its: (ticks.append(its), tick(its))[1])
    monkeypatch.setattr(process_module, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(process_module.os, "kill", lambda pid, number: signals.append((pid, number)))
    first, second = Process(1), Process(2)

    async def scenario() -> None:
        engine: Any = EngineProcess(EngineConfig(), configure=lambda: None, watchdog_timeout=5.0)
        engine._process, engine._is_up = first, True
        engine._watchdog._stuck = 50.0
        watching = asyncio.create_task(engine._watch())

        async def until(is_so: Callable[[], bool]) -> None:
            async with asyncio.timeout(PATIENCE):
                while not is_so():
                    assert not watching.done(), watching.result()
                    await asyncio.sleep(0)

        await until(lambda: bool(signals))
        before = len(ticks)
        if meanwhile == "replaced":
            engine._process, engine._watchdog = second, Watchdog()
        elif meanwhile == "recovered":
            engine._watchdog.heard(0.0)
        elif meanwhile == "ended":
            first.alive = False
        await until(lambda: len(ticks) > before + 1)  # the first looks whether to kill it
        watching.cancel()

    asyncio.run(scenario())
    assert signals[0] == (1, signal.SIGUSR1)
    assert {pid for pid, _ in signals} == {1}
    assert (first.killed, second.killed) == (meanwhile == "nothing", False)


def test_an_engine_that_hangs_on_its_way_out_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its channel is closed, and nobody would ever start the next one."""
    monkeypatch.setattr(process_module, "_ENDING_SECONDS", 0.01)
    process: Any = Process(1)
    asyncio.run(EngineProcess._ended(process))
    assert process.killed
