"""The process of a rank other than 0: it executes the batches that rank 0 sends. It schedules nothing and knows no
requests and no grammars."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path

from sgl.runtime import startup
from sgl.runtime.config import EngineConfig
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import Shard
from sgl.runtime.parallel import wire
from sgl.runtime.parallel.group import BEAT_SECONDS
from sgl.runtime.parallel.ring import Ring
from sgl.runtime.runner.runner import Launched

logger = logging.getLogger(__name__)


def main() -> None:
    """Run. Arguments: rank, folder, size, and rank 0's process id."""
    rank, folder, size, parent = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
    ring = Ring(folder / "ring", size - 1, rank - 1)
    threading.Thread(target=_beat, args=(ring, parent, folder), daemon=True).start()
    try:
        _follow(ring, folder, rank, size)
    except BaseException as error:
        if os.getppid() == parent:  # else rank 0 is gone, which is why
            with contextlib.suppress(OSError):
                (folder / f"error{rank}").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
            logger.exception("rank %d stops", rank)
        os._exit(1)
    os._exit(0)  # no library's clean-up may wait for other ranks


def _beat(ring: Ring, parent: int, folder: Path) -> None:
    while os.getppid() == parent:
        ring.beat()
        time.sleep(BEAT_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _follow(ring: Ring, folder: Path, rank: int, size: int) -> None:
    load = wire.unpacked(ring.get())
    assert isinstance(load, wire.Load), "it comes first"
    config = EngineConfig(**load.options)
    with startup.device_of(config) as device:
        shard = Shard.of(rank, config.tp_size, config.pp_size)
        ranks = Ranks.join(str(folder), shard)
        model = startup.load(config, startup.checked_model(config, device), device, ranks)
        build = wire.unpacked(ring.get())
        if isinstance(build, wire.Stop):
            return
        assert isinstance(build, wire.Build), "it comes second"
        runner = startup.follow(EngineConfig(**build.options), model, build.num_pages, frozenset(build.eos_ids))
        launched: deque[Launched] = deque()  # not sampled yet
        while True:
            frame = wire.unpacked(ring.get())
            if isinstance(frame, wire.Forward):
                if shard.stage:
                    runner.relay(frame.batch)
                else:
                    launched.append((runner.forward if ranks.links is None else runner.enter)(frame.batch))
            elif not isinstance(frame, wire.Sample):
                return
            elif not shard.stage:  # only the first stage samples
                runner.follow(launched.popleft(), frame.masks)
