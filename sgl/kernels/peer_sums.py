"""Sums of many tokens over the GPUs of one host, read from the others' memory, with the addition and norm behind them.

Each rank's part lies in memory that all can read. For two ranks one kernel reads both parts, adds the residual and
normalises. For more, one kernel sums a slice of the rows and a second reads everybody's slices, which moves as many
bytes as a ring does. Ranks meet at a kernel's start, block by block. Two buffers take turns, so that a rank may write
its next part while another still reads. Imported only where Triton is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl.kernels.peer_sums_triton import Rows, sum_rows
from sgl.kernels.shared_memory import handle_of, opened

_AHEAD = 1 << 30  # of any meeting


class PeerSums:
    """This rank's end. All ranks make the same calls in the same order, on one stream and outside of CUDA graphs."""

    def __init__(
        self,
        exchange: Callable[[Any], list[Any]],
        rank: int,
        size: int,
        device: torch.device,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """Wait for the others. exchange: gives what each rank gave it, in their order. shape: of the largest part.
        Raises RuntimeError where a GPU cannot read another's memory."""
        self._rank, self._size, self._device = rank, size, device
        self._most_tokens, self._width = shape
        self._num_blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        slices = -(-shape[0] // size) if size > 2 else 1
        self._parts = torch.zeros(2, *shape, dtype=dtype, device=device)
        self._slices = torch.zeros(2, slices, shape[1], dtype=dtype, device=device)
        self._flags = torch.zeros(size, self._num_blocks, dtype=torch.int32, device=device)
        self._num_sums = self._num_meetings = 0
        own = [self._parts, self._slices, self._flags]
        told = exchange(_handles(own))
        if problems := [each for each in told if isinstance(each, str)]:
            raise RuntimeError(problems[0])
        self._opened = [opened(each, device) for of_rank in told if of_rank is not told[rank] for each in of_rank]
        addresses = [
            [each.data_ptr() for each in (own if of_rank is told[rank] else self._others(number))]
            for number, of_rank in enumerate(told)
        ]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device).t().contiguous()

    def _others(self, number: int) -> list[torch.UntypedStorage]:
        first = 3 * (number - (number > self._rank))
        return self._opened[first : first + 3]

    def takes(self, x: torch.Tensor) -> bool:
        """Whether it sums such hidden states [T, n] now."""
        return (
            x.dim() == 2
            and x.dtype == self._parts.dtype
            and x.shape[1] == self._width
            and 0 < len(x) <= self._most_tokens
            and not torch.cuda.is_current_stream_capturing()
        )

    def room(self, num_tokens: int) -> torch.Tensor | None:
        """Where the next part to be summed can be written, [num_tokens, n], or else is copied to; None in a graph,
        which would write there whenever it runs."""
        if num_tokens > self._most_tokens or torch.cuda.is_current_stream_capturing():
            return None
        return self._parts[self._num_sums & 1, :num_tokens]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x [T, n] of all ranks."""
        total = torch.empty_like(x)
        self._run(x, None, None, total, 0.0)
        return total

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the sum of x [T, n] of all ranks to residual [T, n] in place, and return the normalised sum."""
        normed = torch.empty_like(residual)
        self._run(x, residual, weight, normed, eps)
        return normed

    def release(self) -> None:
        """End kernels that wait for ranks which are gone. Their results are worthless."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch leaves it so
        with torch.cuda.stream(stream):
            self._flags.fill_(_wrapped(self._num_meetings + _AHEAD))
            stream.synchronize()

    def close(self) -> None:
        """Close the others' memory, of which its owner would warn as it ends; unless a kernel still reads it."""
        if torch.cuda.default_stream(self._device).query():
            self._opened.clear()

    def _run(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        out: torch.Tensor,
        eps: float,
    ) -> None:
        num_tokens, turn = len(x), self._num_sums & 1
        room = self._parts[turn, :num_tokens]
        if x.data_ptr() != room.data_ptr():
            room.copy_(x)
        self._num_sums += 1
        if self._size == 2:
            self._launch(False, turn, residual, weight, out, (0, num_tokens, num_tokens), eps)
            return
        each = -(-num_tokens // self._size)
        first = min(self._rank * each, num_tokens)
        self._launch(False, turn, None, None, self._slices[turn], (first, min(first + each, num_tokens), each), 0.0)
        self._launch(True, turn, residual, weight, out, (0, num_tokens, each), eps)

    def _launch(
        self,
        is_of_owners: bool,
        turn: int,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        out: torch.Tensor,
        rows: Rows,
        eps: float,
    ) -> None:
        self._num_meetings += 1
        buffers = self._slices if is_of_owners else self._parts
        sources, flags = self._addresses[int(is_of_owners)], self._addresses[2]
        offset, meeting = turn * buffers[0].numel(), _wrapped(self._num_meetings)
        sum_rows(
            sources, flags, offset, meeting, residual, weight, out, rows, eps,
            rank=self._rank, is_of_owners=is_of_owners, num_blocks=self._num_blocks,
        )  # fmt: skip


def _wrapped(count: int) -> int:
    """As int32."""
    return (count + (1 << 31)) % (1 << 32) - (1 << 31)


def _handles(tensors: list[torch.Tensor]) -> list[Any] | str:
    """What another process needs to open the memory of each, or why it cannot."""
    try:
        return [handle_of(each) for each in tensors]
    except RuntimeError as error:
        return str(error)
