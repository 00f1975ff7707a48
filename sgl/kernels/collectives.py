"""What the ranks of a group exchange within a step: sums, largest values, rows.

All ranks make the same calls in the same order, with tensors of the same shapes: on GPUs over NCCL, on CPUs over gloo.
On GPUs everything is in stream order, and CUDA graphs can capture it.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed

from sgl.kernels import flashinfer_version
from sgl.kernels.exchange import Exchange
from sgl.kernels.layers.norm import add_rms_norm, rms_norm

if TYPE_CHECKING:
    from sgl.kernels.fused_reduction import FusedReduction
    from sgl.kernels.peer_sums import PeerSums

logger = logging.getLogger(__name__)

_PATIENCE = datetime.timedelta(hours=1)  # a rank's death is noticed by whoever watches processes
_ENDING_SECONDS = 1.0
_LOOPBACK = "127.0.0.1"
_ANOTHER = "another rank cannot do better"


class Rendezvous(Protocol):
    """Where ranks find each other."""

    host: str
    """The own address that the others reach."""
    is_one_host: bool

    def store(self, name: str, size: int) -> Any:
        """torch's store for the group of this name and size."""
        ...


class Folder:
    """A rendezvous of ranks on one host, in a folder that only this user may read."""

    host = _LOOPBACK
    is_one_host = True

    def __init__(self, path: str) -> None:
        self._path = path

    def store(self, name: str, size: int) -> Any:
        """A file."""
        c10d: Any = distributed  # its types lack what follows
        return c10d.FileStore(f"{self._path}/{name}", size)


class Collectives:
    """This rank's end of a group of `size` processes."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        *,
        in_order: bool = False,
    ) -> None:
        """Wait for the others. name: of the group. in_order: add rank after rank, however many numbers there are."""
        self._in_order = in_order
        self.rank = rank
        self.size = size
        self._device = device
        self._rendezvous = rendezvous
        self._name = name
        self._group = _joined(rendezvous, name, rank, size, device)
        self._fused: FusedReduction | None = None
        self.waited_ns = 0
        """For which this rank waited for what the others had to give, on a CPU."""
        self._peers: PeerSums | None = None
        self._ending: threading.Thread | None = None
        c10d: Any = distributed.distributed_c10d  # its types lack what follows
        self._sum, self._largest = c10d.AllreduceOptions(), c10d.AllreduceOptions()
        self._largest.reduceOp = c10d.ReduceOp.MAX
        self._from_first, self._gather = c10d.BroadcastOptions(), c10d.AllgatherOptions()
        for options in (self._sum, self._largest, self._from_first, self._gather):
            options.asyncOp = False  # on the current stream

    @property
    def fused_tokens(self) -> int:
        """Up to how many tokens sums are fused with what follows; see `fuse`."""
        return 0 if self._fused is None else self._fused.most_tokens

    def fuse(self, hidden_size: int, dtype: torch.dtype, most_tokens: int) -> None:
        """Prepare for sums of hidden states of up to so many tokens; waits for the others. On GPUs of one host the sum,
        the addition to the residual and the norm become one kernel: FlashInfer's for few tokens, and for more, which
        are never captured, one that reads the others' memory."""
        if self._device.type != "cuda" or self._in_order:
            return
        why = self._fuse_few(hidden_size, dtype)
        if why is not None:
            logger.info("sums of few tokens on %d ranks go through NCCL: %s", self.size, why)
        if most_tokens > self.fused_tokens:
            why = self._fuse_many(hidden_size, dtype, most_tokens)
            if why is not None:
                logger.info("sums of many tokens on %d ranks go through NCCL: %s", self.size, why)

    def _fuse_few(self, hidden_size: int, dtype: torch.dtype) -> str | None:
        """Why not, if not."""
        why = flashinfer_version.why_not()
        if why is not None:
            return f"not by FlashInfer: {why}"
        from sgl.kernels.fused_reduction import FusedReduction

        why = FusedReduction.obstacle(self._rendezvous, self.size, self.rank, self._device, hidden_size, dtype)
        if self._is_any(why):
            return why or _ANOTHER
        fused = None
        try:
            store = self._rendezvous.store(f"{self._name}-fused", self.size)
            fused = FusedReduction(store, self.rank, self.size, self._device, hidden_size, dtype)
        except RuntimeError as error:
            why = str(error)
        if self._is_any(why):
            return why or _ANOTHER
        self._fused = fused
        return None

    def _fuse_many(self, hidden_size: int, dtype: torch.dtype, most_tokens: int) -> str | None:
        """Why not, if not."""
        if not self._rendezvous.is_one_host:
            return "they are on several hosts"
        from sgl.kernels.peer_sums import PeerSums

        why, peers = None, None
        exchange = Exchange(self._rendezvous.store(f"{self._name}-peers", self.size), self.rank, self.size)
        try:
            shape = most_tokens, hidden_size
            peers = PeerSums(exchange.allgather, self.rank, self.size, self._device, shape, dtype)
        except RuntimeError as error:
            why = str(error)
        if self._is_any(why):
            return why or _ANOTHER
        self._peers = peers
        return None

    def _is_any(self, why: str | None) -> bool:
        """Whether any rank has a reason; the host waits."""
        return bool(self.largest_(torch.tensor([bool(why)], dtype=torch.int64, device=self._device)).item())

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x of all ranks, which may overwrite x."""
        if self._fused is not None and self._fused.takes(x):
            return self._fused.sum(x)
        if self._peers is not None and self._peers.takes(x):
            return self._peers.sum(x)
        if self._in_order:
            first, *others = self._gathered(x).unbind()
            for each in others:
                first = first + each
            return first
        self._finish(self._group.allreduce([x], self._sum))
        return x

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """`norm.add_rms_norm` of the sum of x [T, n] of all ranks, which may overwrite x."""
        if self._fused is not None and self._fused.takes(x):
            return self._fused.add_rms_norm(x, residual, weight, eps)
        if self._peers is not None and self._peers.takes(x):
            return self._peers.add_rms_norm(x, residual, weight, eps)
        return add_rms_norm(self.sum(x), residual, weight, eps, is_invariant=self._in_order)

    def room(self, num_tokens: int) -> torch.Tensor | None:
        """Where the next x of a sum that follows should be written, [num_tokens, n], if anywhere."""
        if self._peers is None or num_tokens <= self.fused_tokens:
            return None
        return self._peers.room(num_tokens)

    def norm_parts_(self, x: torch.Tensor, weight: torch.Tensor, sizes: tuple[int, int], eps: float) -> None:
        """`norm.norm_parts_` of rows of which other ranks have as many columns again."""
        parts = torch.split(x[:, : sum(sizes)], list(sizes), -1)
        if self._in_order:  # torch's sums on a GPU depend on the number of rows
            for part, scale in zip(parts, torch.split(weight, list(sizes)), strict=True):
                ones = weight.new_ones(self.size * part.shape[1])
                whole = rms_norm(self.gather_columns(part), ones, eps, is_invariant=True)
                part.copy_(whole.view(len(x), self.size, -1)[:, self.rank] * scale)
            return
        squares = torch.stack([part.float().square().mean(-1) for part in parts], -1)
        scales = (self.sum(squares) / self.size).add_(eps).rsqrt_()
        factors = torch.split(weight, list(sizes))
        for part, scale, its in zip(parts, torch.split(scales, 1, -1), factors, strict=True):
            part.copy_((part.float() * scale).to(part.dtype) * its)

    def largest_(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks for each element of x, int64 [n], in place."""
        if self._fused is not None and self._fused.largest_(x):
            return x
        self._finish(self._group.allreduce([x], self._largest))
        return x

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite x with rank 0's."""
        self._finish(self._group.broadcast([x], self._from_first))
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, m] of all ranks side by side: [n, size * m]."""
        return self._gathered(x).transpose(0, 1).reshape(len(x), -1)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, ...] of all ranks: [size, n, ...]."""
        everyone = x.new_empty(self.size * len(x), *x.shape[1:])
        self._finish(self._group._allgather_base(everyone, x.contiguous(), self._gather))
        return everyone.view(self.size, *x.shape)

    def _finish(self, work: Any) -> None:
        if work is not None:  # NCCL's on the current stream need not be waited for
            began = time.perf_counter_ns()
            work.wait()
            self.waited_ns += time.perf_counter_ns() - began

    def close(self) -> None:
        """End what still waits for others."""
        self._ending = ending = self._ending or _ending(self._group)
        if self._peers is not None:
            self._peers.release()
        if self._fused is not None:
            # Both kinds of kernels may wait in turn.
            default = torch.cuda.default_stream(self._device)
            self._fused.release(lambda: default.query() and not ending.is_alive(), _ENDING_SECONDS)
        ending.join(_ENDING_SECONDS)
        if self._peers is not None:
            self._peers.close()


class Links:
    """This stage's ends of a ring of `stages` processes: what one sends, the next receives, in order."""

    def __init__(self, rendezvous: Rendezvous, name: str, stage: int, stages: int, device: torch.device) -> None:
        """Wait for the others; see Collectives."""
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._most = 2 * stages
        self._endings: list[threading.Thread] = []
        self.waited_ns = 0
        """For which this stage waited for the one before it, on a CPU."""
        after, before = (stage + 1) % stages, (stage - 1) % stages
        if device.type == "cuda":
            # NCCL works off what two ranks exchange in order: a group for each edge, lest a send wait for a receive.
            self._next, self._previous = 1, 0
            self._out = _joined(rendezvous, f"{name}-{stage}", 0, 2, device)
            self._in = _joined(rendezvous, f"{name}-{before}", 1, 2, device)
            for edge in sorted((stage, before)):  # NCCL connects at the first use, and both must be there
                nothing = torch.zeros(1, device=device)
                if edge == stage:
                    self.send(nothing)
                else:
                    self.receive(nothing)
        else:
            self._next, self._previous = after, before
            self._out = self._in = _joined(rendezvous, name, stage, stages, device)

    def send(self, x: torch.Tensor) -> None:
        """Send to the next stage, without waiting until it receives. x must not change any more."""
        x = x.contiguous()
        self._sending.append((self._out.send([x], self._next, 0), x))
        while self._sending and (len(self._sending) > self._most or self._sending[0][0].is_completed()):
            self._sending.popleft()[0].wait()

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Wait for what the previous stage sent next, of x's shape and dtype, and overwrite x with it. A GPU waits in
        stream order."""
        began = time.perf_counter_ns()
        self._in.recv([x], self._previous, 0).wait()
        self.waited_ns += time.perf_counter_ns() - began
        return x

    def close(self) -> None:
        """End what still waits for others."""
        self._endings = self._endings or [_ending(group) for group in (self._out, self._in)]
        for ending in self._endings:
            ending.join(_ENDING_SECONDS)


def _joined(rendezvous: Rendezvous, name: str, rank: int, size: int, device: torch.device) -> Any:
    """A process group of its own, not torch's default one: a process may hold several engines."""
    c10d: Any = distributed  # its types lack what follows
    store = rendezvous.store(name, size)
    if device.type == "cuda":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = _PATIENCE
        return c10d.ProcessGroupNCCL(store, rank, size, options)
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=rendezvous.host)]
    options._timeout = _PATIENCE
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _ending(group: Any) -> threading.Thread:
    """NCCL's kernels wait for ever for a rank that is gone, and so would what ends the process. Ends only once no graph
    has any of them."""
    thread = threading.Thread(target=group.abort if group.name() == "nccl" else lambda: None, daemon=True)
    thread.start()
    return thread
