"""Rank 0's side of a group: starts the other ranks' processes, sends them frames, and watches them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from sgl.errors import EngineDead
from sgl.runtime.config import EngineConfig
from sgl.runtime.forks import Fork, forker
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import Shard
from sgl.runtime.parallel import wire
from sgl.runtime.parallel.channels import sender_of
from sgl.runtime.parallel.times import LOST, NUMBERS, since, told

logger = logging.getLogger(__name__)

FOLLOWER = "sgl.runtime.follower"
"""What other ranks run."""
BEAT_SECONDS = 0.25
_POLL_SECONDS = 0.1
_NOTICE_SECONDS = 2.0  # until the watcher sees why a step failed
_STARTING_SECONDS = 300.0  # for a process to begin
_ENDING_SECONDS = 2.0
_CODE = f"from {FOLLOWER} import main; main()"


class RankGroup:
    """`size` ranks, of which this process is rank 0."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        """Start the others. device: this process's. Raises EngineDead."""
        self.size = size = config.num_ranks
        self._silence = config.rank_timeout
        self._is_remote = config.nnodes > 1
        self._failure: EngineDead | None = None
        self._on_failure: Callable[[EngineDead], None] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._processes: dict[int, Fork] = {}  # by rank, of this host
        self._ranks: Ranks | None = None  # once they have met
        self._engine = config.dp_rank or 0
        self.own_numbers = [0] * NUMBERS
        """What rank 0 tells of itself; see `times`."""
        self._sender, self._place = sender_of(config)
        try:
            self._processes = started(self._place, range(1, size // config.nnodes), size)
            if config.nnodes > 1:
                logger.info("waiting for %d other hosts at %s", config.nnodes - 1, config.dist_init_addr)
            self._await_beats()
            self._watcher = threading.Thread(target=self._watch, name="sgl-ranks", daemon=True)
            self._watcher.start()
            self.send(wire.Load(asdict(config)))
            with self.failing():
                self._ranks = Ranks.join(
                    self._sender,
                    Shard.of(0, config.tp_size, config.pp_size),
                    device,
                    in_order=config.deterministic,
                )
        except BaseException:
            self.close()
            raise

    @property
    def ranks(self) -> Ranks:
        """This process's connections."""
        assert self._ranks is not None, "they have met"
        return self._ranks

    def told(self) -> list[dict[str, Any]]:
        """How each rank has spent its time; see `times`. Safe from any thread."""
        return [{"engine": self._engine, "rank": rank, **told(its)} for rank, its in enumerate(self._numbers())]

    def spending(self) -> Callable[[], list[dict[str, Any]]]:
        """Begin to count; the result tells what each rank has spent since."""
        before = self._numbers()
        return lambda: [
            {"rank": rank, **since(*its)} for rank, its in enumerate(zip(before, self._numbers(), strict=True))
        ]

    def lost(self) -> list[int]:
        """Of each rank, the latest of trainers' groups that is of no use to it. Safe from any thread."""
        return [numbers[LOST] for numbers in self._numbers()]

    def _numbers(self) -> list[list[int]]:
        return [[*self.own_numbers], *(self._sender.numbers(reader)[:NUMBERS] for reader in range(self.size - 1))]

    def file(self, name: str) -> str:
        """One that ranks on one host, and nobody else, may read while the group lives."""
        return os.path.join(self._place[0], name)

    def send(self, frame: wire.Frame) -> None:
        """Send all ranks a frame. Raises EngineDead."""
        self.check()
        self._sender.put(wire.packed(frame), self.check)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Around what needs all ranks: raises EngineDead if it fails because one is gone."""
        try:
            yield
        except RuntimeError as error:
            end = time.monotonic() + _NOTICE_SECONDS
            while self._failure is None and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            if self._failure is None:
                raise
            raise self._failure from error

    def end(self, message: str) -> EngineDead:
        """End all ranks, since this one cannot go on as the others expect; returns what others are told."""
        self._fail(message)
        return self._failure or EngineDead(message)

    def on_failure(self, call: Callable[[EngineDead], None]) -> None:
        """Call this, on another thread, when a rank fails."""
        with self._lock:
            self._on_failure = call
            failure = self._failure
        if failure is not None:
            call(failure)

    def close(self) -> None:
        """End all ranks. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        end = time.monotonic() + _ENDING_SECONDS
        stopping = threading.Thread(target=self._stop, args=(end,), daemon=True)  # which may hang
        stopping.start()
        stopping.join(_ENDING_SECONDS)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        kill(self._processes)
        if self._ranks is not None:
            self._ranks.close()
        self._sender.close()

    def _stop(self, end: float) -> None:
        def check() -> None:
            self.check()
            if time.monotonic() > end:
                raise EngineDead("the ranks do not listen")

        with contextlib.suppress(EngineDead, KeyError):  # a host that never came has no connection
            self._sender.put(wire.packed(wire.Stop()), check)

    def check(self) -> None:
        """Raise EngineDead if a rank is gone."""
        if self._failure is not None:
            raise self._failure

    def _await_beats(self) -> None:
        end = time.monotonic() + _STARTING_SECONDS
        waiting = set(range(1, self.size))
        while waiting := {rank for rank in waiting if not self._sender.beats(rank - 1)}:
            for rank in waiting:
                if (how := self._ended(rank)) is not None:
                    raise EngineDead(f"rank {rank} of {self.size} ended while it was starting ({how})")
            if time.monotonic() > end:
                raise EngineDead(f"the ranks {sorted(waiting)} did not start within {_STARTING_SECONDS:g} s")
            time.sleep(_POLL_SECONDS / 10)

    def _watch(self) -> None:
        heard = [(self._sender.beats(reader), time.monotonic()) for reader in range(self.size - 1)]
        last = time.monotonic()
        while not self._closed.wait(_POLL_SECONDS):
            now = time.monotonic()
            paused, last = now - last > self._silence / 2, now  # this process itself stood still
            for rank in range(1, self.size):
                beats = self._sender.beats(rank - 1)
                if beats != heard[rank - 1][0] or paused:
                    heard[rank - 1] = beats, now
                if (how := self._ended(rank)) is not None:
                    self._fail(f"rank {rank} of {self.size} ended and the engine with it ({how})")
                    return
                if now - heard[rank - 1][1] > self._silence:
                    self._fail(f"rank {rank} of {self.size} has not answered for {self._silence:g} s")
                    return

    def _ended(self, rank: int) -> str | None:
        """How a rank ended; None if it did not."""
        process, how = self._processes.get(rank), []
        if process is not None:
            code = process.poll()
            if code is None:
                return None
            how.append(signal.Signals(-code).name if code < 0 else f"code {code}")
        if (why := self._sender.gone(rank - 1)) is not None:
            how.append(why)
        return ": ".join(how) or None

    def _fail(self, message: str) -> None:
        if self._closed.is_set():
            return
        logger.error("%s", message)
        with self._lock:
            self._failure = failure = EngineDead(message)
            call = self._on_failure
        kill(self._processes)  # which ends exchanges that wait for it, as does what other hosts do now
        if self._is_remote:
            self._sender.close()
        if call is not None:
            call(failure)
        if self._ranks is not None:
            self._ranks.close()  # last: what now comes of steps is worthless, and the engine knows it


def started(place: list[str], ranks: Iterable[int], size: int) -> dict[int, Fork]:
    """Processes of these ranks, of `size` in all. place: see `channels.receiver_of`. Raises EngineDead."""
    parent = forker(FOLLOWER)
    arguments = [str(size), str(parent.pid), *place]
    processes: dict[int, Fork] = {}
    try:
        for rank in ranks:
            processes[rank] = parent.fork(_CODE, [str(rank), *arguments])
    except BaseException:
        kill(processes)
        raise
    return processes


def kill(processes: Mapping[int, Fork]) -> None:
    """End processes at once."""
    for process in processes.values():
        if process.poll() is None:
            process.kill()
    for process in processes.values():
        process.wait()
