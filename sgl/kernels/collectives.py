"""What the ranks of a group exchange within a step: sums, largest values, rows.

All ranks make the same calls in the same order, with tensors of the same shapes. On a CPU over gloo.
"""

from __future__ import annotations

import datetime
from collections import deque
from typing import Any, Protocol

import torch
from torch import distributed

_PATIENCE = datetime.timedelta(hours=1)  # a rank's death is noticed by whoever watches processes
_LOOPBACK = "127.0.0.1"


class Meeting(Protocol):
    """Where ranks find each other."""

    host: str
    """The own address that the others reach."""

    def store(self, name: str, size: int) -> Any:
        """torch's store for the group of this name and size."""
        ...


class Folder:
    """A meeting of ranks on one host, in a folder that only this user may read."""

    host = _LOOPBACK

    def __init__(self, path: str) -> None:
        self._path = path

    def store(self, name: str, size: int) -> Any:
        """A file."""
        c10d: Any = distributed  # its types lack what follows
        return c10d.FileStore(f"{self._path}/{name}", size)


class Collectives:
    """This rank's end of a group of `size` processes."""

    def __init__(self, meeting: Meeting, name: str, rank: int, size: int) -> None:
        """Wait for the others. name: of the group."""
        self.rank = rank
        self.size = size
        self._group = _joined(meeting, name, rank, size)
        c10d: Any = distributed
        self._largest = c10d.AllreduceOptions()
        self._largest.reduceOp = c10d.ReduceOp.MAX

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """Add up x of all ranks, in place."""
        self._group.allreduce([x]).wait()
        return x

    def largest_(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks for each element of x, in place."""
        self._group.allreduce([x], self._largest).wait()
        return x

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite x with rank 0's."""
        self._group.broadcast([x]).wait()
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, m] of all ranks side by side: [n, size * m]."""
        rows, width = x.shape
        everyone = x.new_empty(self.size * rows, width)
        self._group._allgather_base(everyone, x.contiguous()).wait()
        return everyone.view(self.size, rows, width).transpose(0, 1).reshape(rows, -1)


class Links:
    """This stage's ends of a ring of `stages` processes: what one sends, the next receives, in order."""

    def __init__(self, meeting: Meeting, name: str, stage: int, stages: int) -> None:
        """Wait for the others; see Collectives."""
        self._next, self._previous = (stage + 1) % stages, (stage - 1) % stages
        self._group = _joined(meeting, name, stage, stages)
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._most = 2 * stages

    def send(self, x: torch.Tensor) -> None:
        """Send to the next stage, without waiting until it receives. x must not change any more."""
        x = x.contiguous()
        self._sending.append((self._group.send([x], self._next, 0), x))
        while self._sending and (len(self._sending) > self._most or self._sending[0][0].is_completed()):
            self._sending.popleft()[0].wait()

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Wait for what the previous stage sent next, of x's shape and dtype, and overwrite x with it."""
        self._group.recv([x], self._previous, 0).wait()
        return x


def _joined(meeting: Meeting, name: str, rank: int, size: int) -> Any:
    """A process group of its own, not torch's default one: a process may hold several engines."""
    c10d: Any = distributed  # its types lack what follows
    gloo = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=meeting.host)]
    options._timeout = _PATIENCE
    return gloo(meeting.store(name, size), rank, size, options)
