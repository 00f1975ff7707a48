"""What the ranks of a group exchange within a step: sums, largest values, rows.

All ranks make the same calls in the same order, with tensors of the same shapes. On a CPU over gloo.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch import distributed

_PATIENCE = datetime.timedelta(hours=1)  # a rank's death is noticed by whoever watches processes
_LOOPBACK = "lo"


class Collectives:
    """This rank's end of a group of `size` processes on one host."""

    def __init__(self, folder: str, rank: int, size: int) -> None:
        """Wait for the others. folder: one that only this user may read, where they find each other."""
        self.rank = rank
        self.size = size
        c10d: Any = distributed  # its types lack what follows
        gloo = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=_LOOPBACK)]
        options._timeout = _PATIENCE
        # a group of its own, not torch's default: a process may hold several engines
        self._group: Any = gloo(c10d.FileStore(f"{folder}/ranks", size), rank, size, options)
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
