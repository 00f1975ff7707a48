"""Rank 0's side of a group: starts the other ranks' processes, sends them frames, and watches them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from sgl.errors import EngineDead
from sgl.runtime.child import command
from sgl.runtime.config import EngineConfig
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import Shard
from sgl.runtime.parallel import wire
from sgl.runtime.parallel.ring import Ring

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.25
_POLL_SECONDS = 0.1
_NOTICE_SECONDS = 2.0  # until the watcher sees why a step failed
_STARTING_SECONDS = 300.0  # for a process to begin: it imports torch
_ENDING_SECONDS = 2.0
_SHARED_MEMORY = Path("/dev/shm")
_CODE = "from sgl.runtime.follower import main; main()"


class RankGroup:
    """`size` ranks on this host, of which this process is rank 0."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the others. Raises EngineDead."""
        self.size = size = config.num_ranks
        self._silence = config.rank_timeout
        self._failure: EngineDead | None = None
        self._on_failure: Callable[[EngineDead], None] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="sgl-ranks-", dir=_memory_folder()))  # nobody else may read it
        self._ring = Ring(self._folder / "ring", size - 1)
        arguments = str(self._folder), str(size), str(os.getpid())
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, size):
                started = subprocess.Popen(
                    [*command(_CODE), str(rank), *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
                self._processes.append(started)
            self._await_beats()
            self._watcher = threading.Thread(target=self._watch, name="sgl-ranks", daemon=True)
            self._watcher.start()
            self.send(wire.Load(asdict(config)))
            with self.failing():
                self.ranks = Ranks.join(str(self._folder), Shard.of(0, config.tp_size, config.pp_size))
        except BaseException:
            self.close()
            raise

    def send(self, frame: wire.Frame) -> None:
        """Send all ranks a frame. Raises EngineDead."""
        self._check()
        self._ring.put(wire.packed(frame), self._check)

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
        with contextlib.suppress(EngineDead):
            self.send(wire.Stop())
        end = time.monotonic() + _ENDING_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _await_beats(self) -> None:
        end = time.monotonic() + _STARTING_SECONDS
        while not all(self._ring.beats(reader) for reader in range(self.size - 1)):
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    raise EngineDead(self._said(rank, process, "while it was starting"))
            if time.monotonic() > end:
                raise EngineDead(f"the ranks did not start within {_STARTING_SECONDS:g} s")
            time.sleep(_POLL_SECONDS / 10)

    def _watch(self) -> None:
        heard = [(self._ring.beats(reader), time.monotonic()) for reader in range(self.size - 1)]
        last = time.monotonic()
        while not self._closed.wait(_POLL_SECONDS):
            now = time.monotonic()
            paused, last = now - last > self._silence / 2, now  # this process itself stood still
            for rank, process in enumerate(self._processes, 1):
                beats = self._ring.beats(rank - 1)
                if beats != heard[rank - 1][0] or paused:
                    heard[rank - 1] = beats, now
                if process.poll() is not None:
                    self._fail(self._said(rank, process, "and the engine with it"))
                    return
                if now - heard[rank - 1][1] > self._silence:
                    self._fail(f"rank {rank} of {self.size} has not answered for {self._silence:g} s")
                    return

    def _said(self, rank: int, process: subprocess.Popen[bytes], when: str) -> str:
        code = process.returncode
        how = signal.Signals(-code).name if code and code < 0 else f"code {code}"
        note = self._folder / f"error{rank}"
        with contextlib.suppress(OSError):
            how += f": {note.read_text(encoding='utf-8')}"
        return f"rank {rank} of {self.size} ended {when} ({how})"

    def _fail(self, message: str) -> None:
        if self._closed.is_set():
            return
        logger.error("%s", message)
        with self._lock:
            self._failure = failure = EngineDead(message)
            call = self._on_failure
        self._kill()  # which ends exchanges that wait for it
        if call is not None:
            call(failure)

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()


def _memory_folder() -> Path | None:
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
