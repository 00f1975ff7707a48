"""The process of a rank other than 0: it executes the batches that rank 0 sends. It schedules nothing and knows no
requests and no grammars."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import asdict
from functools import partial
from typing import NoReturn

from sgl.runtime import rank_start
from sgl.runtime.config import EngineConfig
from sgl.runtime.forks import set_process_name
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import Shard
from sgl.runtime.model.update.choice import writer_of
from sgl.runtime.model.update.group import FollowerGroups
from sgl.runtime.model.update.ranks import first_rows, follow, hashed
from sgl.runtime.parallel import occupation, wire
from sgl.runtime.parallel.channels import Receiver, receiver_of
from sgl.runtime.parallel.group import BEAT_SECONDS
from sgl.runtime.parallel.times import LOST, Times
from sgl.runtime.runner.runner import Launched
from sgl.runtime.tier_choice import weights_hash

logger = logging.getLogger(__name__)


def main() -> None:
    """Run. Arguments: rank, number of ranks, id of the process that started this one, and where rank 0 is."""
    rank, size, parent = map(int, sys.argv[1:4])
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides, and answers what it has first
        signal.signal(number, signal.SIG_IGN)
    set_process_name(f"sgl rank {rank}")
    receiver = receiver_of(sys.argv[4:], rank, size)
    threading.Thread(target=_beat, args=(receiver, parent), daemon=True).start()
    try:
        _follow(receiver, rank)
    except BaseException as error:  # rank 0 raises it
        if os.getppid() == parent:
            receiver.fail(f"{type(error).__name__}: {error}")
            logger.exception("rank %d stops", rank)
        else:  # rank 0 is gone, which is why
            receiver.close()
        os._exit(1)


def _beat(receiver: Receiver, parent: int) -> None:
    with contextlib.suppress(OSError):  # rank 0 is gone
        while os.getppid() == parent:
            receiver.beat()
            time.sleep(BEAT_SECONDS)
    receiver.close()
    os._exit(1)


def _follow(receiver: Receiver, rank: int) -> NoReturn:
    load = wire.unpacked(receiver.get())
    assert isinstance(load, wire.Load), "it comes first"
    config = EngineConfig(**load.options)
    with rank_start.device_of(config, rank) as device:
        shard = Shard.of(rank, config.tp_size, config.pp_size)
        ranks = Ranks.join(receiver, shard, device, in_order=config.deterministic)
        model_config = rank_start.checked_model(config, device)
        model = rank_start.load(config, model_config, device, ranks)
        build = wire.unpacked(receiver.get())
        if isinstance(build, wire.Stop):
            _stop()
        assert isinstance(build, wire.Build), "it comes second"
        runner = rank_start.follow(build, model_config, model, shard)
        launched: deque[Launched] = deque()  # not sampled yet
        groups = FollowerGroups(rank, device, partial(receiver.numbers.__setitem__, LOST))
        times = Times(receiver.numbers, ranks, device)
        while True:
            data = receiver.get()
            times.begin()
            frame = wire.unpacked(data)
            if not isinstance(frame, wire.JoinGroup | wire.Broadcast | wire.LeaveGroup | wire.Stop):
                groups.settle()
            match frame:
                case wire.Forward() if shard.stage:
                    runner.relay(frame.batch)
                case wire.Forward():
                    launched.append((runner.forward if ranks.links is None else runner.enter)(frame.batch))
                case wire.Sample():
                    if not shard.stage:  # only the first stage samples
                        runner.follow(launched.popleft(), frame.masks)
                case wire.Move():
                    runner.move(frame.moves)
                case wire.AddAdapter():
                    runner.add_adapter(frame.number, runner.read_adapter(frame.path))
                case wire.DropAdapter():
                    runner.drop_adapter(frame.number)
                case wire.Write():
                    follow(model, frame.told)
                case wire.Read():
                    first_rows(model, writer_of(model, None), frame.name, frame.num_rows)
                case wire.Hash():
                    hashed(model, writer_of(model, None) if frame.reads else None, weights_hash)
                case wire.JoinGroup():
                    groups.enter(**asdict(frame))
                case wire.Broadcast():
                    groups.hear(**asdict(frame))
                case wire.LeaveGroup():
                    groups.leave(frame.name, frame.number)
                case wire.Release() | wire.Restore() | wire.Capture():
                    occupation.follow(frame, runner.occupation, ranks)
                case wire.Stop() | wire.Load() | wire.Build():
                    _stop()
            times.end(isinstance(frame, wire.Forward))


def _stop() -> NoReturn:
    os._exit(0)  # here: no destructor may wait for other ranks
