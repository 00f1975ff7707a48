"""A host that follows host 0: starts its share of the ranks whenever host 0 is there, and ends them when it is gone."""

from __future__ import annotations

import logging
import threading

from sgl.runtime.config import EngineConfig
from sgl.runtime.parallel.channels import remote_place
from sgl.runtime.parallel.group import kill, started
from sgl.runtime.parallel.tcp import TcpReceiver, secret_of

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
_POLL_SECONDS = 0.1


def run_node(config: EngineConfig, stop: threading.Event) -> None:
    """Follow until `stop`. Raises ConfigError."""
    host, port, file = place = remote_place(config)
    secret, size = secret_of(file), config.num_ranks
    share = size // config.nnodes
    ranks = range(config.node_rank * share, (config.node_rank + 1) * share)
    is_absent = False
    while not stop.is_set():
        try:
            watching = TcpReceiver(host, int(port), secret, size + config.node_rank, 0.0)
        except (OSError, EOFError) as error:
            if not is_absent or isinstance(error, EOFError):
                hint = ": is its secret the same?" if isinstance(error, EOFError) else ""
                logger.warning("waiting for host 0 at %s (%s)%s", config.dist_init_addr, error, hint)
            is_absent = True
            stop.wait(_PAUSE_SECONDS)
            continue
        is_absent = False
        logger.info("host 0 is there: ranks %d to %d of %d start", ranks[0], ranks[-1], size)
        _follow(watching, place, ranks, size, stop)


def _follow(watching: TcpReceiver, place: list[str], ranks: range, size: int, stop: threading.Event) -> None:
    lost = threading.Event()

    def watch() -> None:
        try:
            watching.get()  # nothing comes but the end
        except (OSError, EOFError):
            lost.set()

    threading.Thread(target=watch, daemon=True).start()
    processes = started(place, ranks, size)
    try:
        while not (stop.is_set() or lost.is_set() or any(each.poll() is not None for each in processes.values())):
            stop.wait(_POLL_SECONDS)
    finally:
        kill(processes)  # also one that is stopped, which host 0 cannot
        watching.close()
    if not stop.is_set():
        logger.warning("the ranks of this host have ended")
        stop.wait(_PAUSE_SECONDS)
