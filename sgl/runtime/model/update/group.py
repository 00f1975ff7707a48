"""A process group with a trainer, which broadcasts new weights. A trainer that is gone holds nobody for longer than the
group's timeout."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import distributed

from sgl.errors import InvalidRequest

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_POLL_SECONDS = 1e-3


class TrainerGroup:
    """This engine's end; rank 0 is the trainer."""

    def __init__(
        self, address: str, port: int, rank: int, size: int, name: str, backend: str, seconds: float
    ) -> None:
        """Wait for the others. Raises InvalidRequest if they do not come within the time."""
        self._seconds, self._is_closed = seconds, False
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
                    if self._is_closed:
                        raise TimeoutError("the group was left")
                    time.sleep(_POLL_SECONDS)
                work.wait()
        except (RuntimeError, TimeoutError) as error:
            self.close()
            raise InvalidRequest(
                f"the trainer's broadcast did not arrive ({error}): the old weights stand, and the group is closed",
                param="group_name",
            ) from error

    def close(self) -> None:
        """Let go of it. Waits for nobody. Idempotent."""
        self._is_closed = True
        abort = getattr(self._group, "abort", None)
        try:
            if abort is not None:
                abort()
        except RuntimeError:  # a backend without it
            pass
        _forget(self._group)


class Bystanders:
    """On a rank other than 0: enters trainers' groups, which count every rank, and hears broadcasts, which rank 0 then
    gives to all. On a thread for each group, while steps go on. What fails is told in the log: a trainer's next
    broadcast then does not end, and rank 0 says so."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._groups: dict[str, Future[TrainerGroup]] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def enter(
        self, address: str, port: int, first: int, size: int, name: str, backend: str, seconds: float
    ) -> None:
        """See `TrainerGroup`."""
        self.leave(name)
        self._threads[name] = threads = ThreadPoolExecutor(1, thread_name_prefix="sgl-trainer")
        self._groups[name] = threads.submit(
            self._told, TrainerGroup, address, port, first + self._rank, size, name, backend, seconds
        )

    def hear(self, name: str, tensors: Sequence[tuple[str, int]]) -> None:
        """Take part in these broadcasts: dtypes, and numbers of elements."""
        if name in self._groups:
            self._threads[name].submit(self._told, self._hear, self._groups[name], tensors)

    def leave(self, name: str) -> None:
        """Let go of a group."""
        group, threads = self._groups.pop(name, None), self._threads.pop(name, None)
        if threads is not None and group is not None:
            threads.shutdown(wait=False)
            group.add_done_callback(lambda its: None if its.exception() else its.result().close())

    def _hear(self, group: Future[TrainerGroup], tensors: Sequence[tuple[str, int]]) -> None:
        sizes = [(getattr(torch, dtype), number) for dtype, number in tensors]
        most = max(dtype.itemsize * number for dtype, number in sizes)
        with torch.inference_mode():
            scratch = torch.empty(most, dtype=torch.uint8, device=self._device)
            for dtype, number in sizes:
                group.result().receive([scratch[: dtype.itemsize * number].view(dtype)])

    def _told(self, call: Callable[..., _T], *arguments: Any) -> _T:
        try:
            return call(*arguments)
        except Exception:
            logger.exception("rank %d is not of a trainer's group", self._rank)
            raise


def join(url: str, rank: int, size: int, name: str, backend: str, timeout: datetime.timedelta) -> Any:
    """A group beside torch's default one, as trainers make theirs: both ends must name its keys alike."""
    c10d: Any = distributed.distributed_c10d  # its types lack what follows
    before = {**c10d._world.pg_names}
    if name in before.values():
        raise RuntimeError(f"this process has a group {name!r} already")
    store, rank, size = next(c10d.rendezvous(url, rank, size, timeout=timeout))
    store.set_timeout(timeout)
    try:
        group, _ = c10d._new_process_group_helper(
            size, rank, [], c10d.Backend(backend), c10d.PrefixStore(name, store), group_name=name, timeout=timeout
        )
    except BaseException:
        for half_made in c10d._world.pg_names.keys() - before.keys():
            _forget(half_made)
        raise
    c10d._world.pg_group_ranks[group] = {index: index for index in range(size)}
    return group


def _forget(group: Any) -> None:
    """Torch would keep it, and refuse its name, for good."""
    c10d: Any = distributed.distributed_c10d
    world = c10d._world
    name = world.pg_names.get(group)
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        table.pop(group, None)
    for groups in world.tags_to_pg.values():
        groups[:] = [each for each in groups if each is not group]
    if name is not None:
        c10d._unregister_process_group(name)
