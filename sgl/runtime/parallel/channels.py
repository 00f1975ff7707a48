"""How rank 0 reaches the others, and they it: through shared memory on one host, over TCP between several."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sgl.errors import ConfigError
from sgl.kernels.collectives import Folder, Rendezvous
from sgl.runtime.config import EngineConfig
from sgl.runtime.parallel.folders import LedFolder, remove_if_left
from sgl.runtime.parallel.ring import Ring
from sgl.runtime.parallel.tcp import TcpReceiver, TcpSender, secret_of
from sgl.runtime.parallel.times import Numbers

_CONNECTING_SECONDS = 300.0
_LOOKS, _LOOK_SECONDS = 5, 0.02


class Sender(Rendezvous, Protocol):
    """Rank 0's end. Rank r is reader r - 1."""

    def put(self, frame: bytes, check: Callable[[], None]) -> None:
        """Send a frame to all; `check` may raise while that is not possible."""
        ...

    def beats(self, reader: int) -> int:
        """How often it has told that it lives."""
        ...

    def numbers(self, reader: int) -> list[int]:
        """What it tells of itself; see `times`."""
        ...

    def gone(self, reader: int) -> str | None:
        """Why it is not there any more, if that is known."""
        ...

    def close(self) -> None:
        """End it. Idempotent."""
        ...


class Receiver(Rendezvous, Protocol):
    """Another rank's end."""

    @property
    def numbers(self) -> Numbers:
        """What it tells of itself; see `times`."""
        ...

    def get(self) -> bytes:
        """Wait for the next frame."""
        ...

    def beat(self) -> None:
        """Tell that this rank lives."""
        ...

    def fail(self, text: str) -> None:
        """Tell why it ends."""
        ...

    def close(self) -> None:
        """Clean up after rank 0, which is gone."""
        ...


class _LocalSender(Folder):
    def __init__(self, led: LedFolder, num_readers: int) -> None:
        super().__init__(str(led.path))
        self._folder = led.path
        self.close = led.close
        self._ring = Ring(led.path / "ring", num_readers)
        self.put, self.beats, self.numbers = self._ring.put, self._ring.beats, self._ring.numbers

    def gone(self, reader: int) -> str | None:
        with contextlib.suppress(OSError):
            return (self._folder / f"error{reader + 1}").read_text(encoding="utf-8")
        return None


class _LocalReceiver(Folder):
    def __init__(self, path: Path, num_readers: int, rank: int) -> None:
        super().__init__(str(path))
        self._folder = path
        self._rank = rank
        ring = Ring(path / "ring", num_readers, rank - 1)
        self.get, self.beat, self.numbers = ring.get, ring.beat, ring.own_numbers
        self._removing = threading.Lock()  # what is written meanwhile would stay

    def fail(self, text: str) -> None:
        with self._removing, contextlib.suppress(OSError):
            (self._folder / f"error{self._rank}").write_text(text, encoding="utf-8")
            for _ in range(_LOOKS):  # that rank 0 was killed shows here before it does elsewhere
                remove_if_left(self._folder)
                time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        with self._removing:
            shutil.rmtree(self._folder, ignore_errors=True)


def sender_of(config: EngineConfig) -> tuple[Sender, list[str]]:
    """Rank 0's end for these options, and the arguments that give others theirs. Raises ConfigError."""
    if config.nnodes == 1:
        folder = LedFolder()
        return _LocalSender(folder, config.num_ranks - 1), [str(folder.path)]
    host, port = config.address
    try:
        sender = TcpSender(host, port, _secret(config), config.num_ranks, config.nnodes)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.dist_init_addr}: {error}", option="dist_init_addr") from error
    return sender, remote_place(config)


def receiver_of(place: list[str], rank: int, size: int) -> Receiver:
    """Another rank's end. Raises OSError and EOFError."""
    if len(place) == 1:
        return _LocalReceiver(Path(place[0]), size - 1, rank)
    host, port, secret = place
    return TcpReceiver(host, int(port), secret_of(secret), rank, _CONNECTING_SECONDS)


def remote_place(config: EngineConfig) -> list[str]:
    """The arguments for ends on any host. Raises ConfigError."""
    host, port = config.address
    _secret(config)
    return [host, str(port), str(config.dist_key_file)]


def _secret(config: EngineConfig) -> bytes:
    assert config.dist_key_file is not None, "`address` asks for it"
    return secret_of(config.dist_key_file)
