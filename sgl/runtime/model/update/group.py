"""A process group with a trainer, which broadcasts new weights. A trainer that is gone holds nobody for longer than the
group's timeout."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from sgl.errors import InvalidRequest

_POLL_SECONDS = 1e-3


class TrainerGroup:
    """This engine's end; rank 0 is the trainer."""

    def __init__(
        self, address: str, port: int, rank: int, size: int, name: str, backend: str, seconds: float
    ) -> None:
        """Wait for the others. Raises InvalidRequest if they do not come within the time."""
        self._seconds = seconds
        timeout = datetime.timedelta(seconds=seconds)
        host = f"[{address}]" if ":" in address else address
        try:
            self._group = join(f"tcp://{host}:{port}", rank, size, name, backend, timeout)
        except (RuntimeError, ValueError) as error:  # DistStoreError and its like are RuntimeErrors
            raise InvalidRequest(
                f"no group {name!r} of {size} at {address}:{port} came about within {seconds:g} s: {error}",
                param="master_address",
            ) from error

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill tensors with what rank 0 broadcasts, one after the other. Raises InvalidRequest if that does not
        come; the group is of no use then."""
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        end = time.monotonic() + self._seconds
        try:
            works = [self._group.broadcast([tensor], options) for tensor in tensors]
            for work in works:
                while not work.is_completed():
                    if time.monotonic() > end:
                        raise TimeoutError(f"nothing for {self._seconds:g} s")
                    time.sleep(_POLL_SECONDS)
                work.wait()
        except (RuntimeError, TimeoutError) as error:
            self.close()
            raise InvalidRequest(
                f"the trainer's broadcast did not arrive ({error}): the old weights stand, and the group is closed",
                param="group_name",
            ) from error

    def close(self) -> None:
        """Let go of it. Waits for nobody."""
        abort = getattr(self._group, "abort", None)
        try:
            if abort is not None:
                abort()
        except RuntimeError:  # a backend without it
            pass
        c10d: Any = distributed.distributed_c10d
        for table in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks):
            table.pop(self._group, None)


def join(url: str, rank: int, size: int, name: str, backend: str, timeout: datetime.timedelta) -> Any:
    """A group beside torch's default one, as trainers make theirs: both ends must name its keys alike."""
    c10d: Any = distributed.distributed_c10d  # its types lack what follows
    store, rank, size = next(c10d.rendezvous(url, rank, size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend(backend), c10d.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {index: index for index in range(size)}
    return group
