"""Sums over the GPUs of one host, fused with the residual addition and the RMS norm: FlashInfer's all-reduce.

Its "trtllm" backend writes through plain peer memory and never makes NVLink multicast objects. One kernel pushes each
rank's part to all others (one shot), or sums a slice for them (two shots), where that moves fewer bytes. Counters on
the device tell its buffers apart, so CUDA graphs can capture it. Imported only where FlashInfer is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from flashinfer import comm
from flashinfer.comm.mnnvl import create_tensor_from_cuda_memory
from flashinfer.comm.trtllm_ar import get_trtllm_comm_module

from sgl.kernels import flashinfer_version
from sgl.kernels.exchange import Exchange
from sgl.kernels.keys_triton import largest, spread
from sgl.kernels.layers.fused_triton import overlap

logger = logging.getLogger(__name__)

_COMPILING = 5.0  # seconds; loading takes less
_MOST_BYTES = 16 << 20  # of one rank's part: NCCL is no slower for more
_ONE_SHOT_BYTES = 32 << 20  # of all ranks' parts
_SIZES = (2, 4, 8, 16)
_DTYPES = (torch.bfloat16, torch.float16)
_ANY_DEVICE = (0, 7)  # from here on its buffers are on the current device, before on that of the rank's number
_ALIGNED = 64  # of the hidden size
_Pattern = comm.AllReduceFusionPattern
_TENSORS = (
    *("allreduce_out", "residual_in", "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma", "rms_eps"),
    *("scale_factor", "layout_code"),
)


class FusedReduction:
    """This rank's end. All ranks make the same calls in the same order."""

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, hidden_size: int, dtype: torch.dtype
    ) -> None:
        """Wait for the others. store: torch's, of the group. Raises RuntimeError."""
        self.most_tokens = _MOST_BYTES // (hidden_size * dtype.itemsize)
        self._rank = rank
        self._size = size
        self._device = device
        self._dtype = dtype
        self._module = get_trtllm_comm_module()
        self._overlaps = bool(overlap(device)["overlaps"])
        self._workspace = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=size,
            rank=rank,
            max_token_num=self.most_tokens,
            hidden_dim=hidden_size,
            dtype=dtype,
            comm_backend=_Backend(Exchange(store, rank, size), rank, size),
        )
        handle = self._workspace.mem_handles[2]  # into which the others push
        shape = (handle.buf_size,)
        self._received = create_tensor_from_cuda_memory(handle.uc_ptrs[rank], shape, torch.uint8, device.index)

    @staticmethod
    def obstacle(
        rendezvous: Any, size: int, rank: int, device: torch.device, hidden_size: int, dtype: torch.dtype
    ) -> str | None:
        """Why such ranks cannot use it, if they cannot. Compiles its kernels, if they are not."""
        if not rendezvous.is_one_host:
            return "they are on several hosts"
        if size not in _SIZES:
            return f"FlashInfer's all-reduce takes {', '.join(map(str, _SIZES))} ranks"
        if dtype not in _DTYPES:
            return f"FlashInfer's all-reduce takes 16 bits, not {dtype}"
        if hidden_size % _ALIGNED:
            return f"FlashInfer's all-reduce takes multiples of {_ALIGNED}, not a hidden size of {hidden_size}"
        if (device.index or 0) != rank and flashinfer_version.installed() < _ANY_DEVICE:
            return f"FlashInfer's all-reduce puts rank {rank} on cuda:{rank}, and it is on {device}"
        with ThreadPoolExecutor(1) as thread:
            compiling = thread.submit(get_trtllm_comm_module)
            if wait([compiling], timeout=_COMPILING).not_done and not rank:
                logger.info("FlashInfer's all-reduce is compiled with nvcc, once on a machine: about three minutes")
            try:
                compiling.result()
            except (RuntimeError, OSError) as error:
                return f"FlashInfer's all-reduce cannot be compiled, which takes CUDA's nvcc ({error})"
        return None

    def takes(self, x: torch.Tensor) -> bool:
        """Whether it serves such hidden states [T, n]."""
        return x.dim() == 2 and x.dtype == self._dtype and 0 < len(x) <= self.most_tokens

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x [T, n] of all ranks."""
        total = torch.empty_like(x)
        self._run(x, _Pattern.kAllReduce, allreduce_out=total)
        return total

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the sum of x [T, n] of all ranks to residual [T, n] in place, and return the normalised sum."""
        normed = torch.empty_like(x)
        self._run(
            x,
            _Pattern.kARResidualRMSNorm,
            residual_in=residual,
            residual_out=residual,
            norm_out=normed,
            rms_gamma=weight,
            rms_eps=eps,
        )
        return normed

    def largest_(self, keys: torch.Tensor) -> bool:
        """The largest of all ranks for each of keys, int64 [n], in place; False if there are too many."""
        places = spread(keys, self._rank, self._size, self._dtype)
        if not self.takes(places):
            return False
        largest(self.sum(places), self._size, keys)
        return True

    def release(self, is_over: Callable[[], bool], seconds: float) -> None:
        """End kernels that wait for ranks which are gone: what they wait for is any data in this rank's buffers. Their
        results are worthless."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch leaves it so
        end = time.monotonic() + seconds
        with torch.cuda.stream(stream):
            while not is_over() and time.monotonic() < end:
                self._received.zero_()
                stream.synchronize()

    def _run(self, x: torch.Tensor, pattern: int, **tensors: Any) -> None:
        given = dict.fromkeys(_TENSORS) | {name: _flat(tensor) for name, tensor in tensors.items()}
        # Unlike comm.allreduce_fusion, let the next kernel begin, and load its weights, while this one waits.
        self._module.trtllm_allreduce_fusion(
            allreduce_in=x.view(-1),
            world_size=self._size,
            world_rank=self._rank,
            token_num=len(x),
            hidden_dim=x.shape[1],
            workspace_ptrs=self._workspace.workspace_tensor,
            launch_with_pdl=self._overlaps,
            use_oneshot=self._size * x.nbytes <= _ONE_SHOT_BYTES or len(x) <= self._size,
            trigger_completion_at_end=False,
            fp32_acc=True,
            pattern_code=pattern,
            **given,
        )


def _flat(given: Any) -> Any:
    return given.view(-1) if isinstance(given, torch.Tensor) else given


class _Backend(comm.mnnvl.CommBackend):  # type: ignore[misc]  # it has no types
    """An exchange as FlashInfer calls it."""

    def __init__(self, exchange: Exchange, rank: int, size: int) -> None:
        self._exchange = exchange
        self._rank = rank
        self._size = size

    def Get_rank(self) -> int:  # noqa: N802
        return self._rank

    def Get_size(self) -> int:  # noqa: N802
        return self._size

    def allgather(self, data: Any) -> list[Any]:
        """What each rank gave, in their order."""
        return self._exchange.allgather(data)

    def bcast(self, data: Any, root: int) -> Any:
        """What this rank gave."""
        return self.allgather(data if self._rank == root else None)[root]

    def barrier(self) -> None:
        """Wait until all are here."""
        self.allgather(None)

    def Split(self, color: int, key: int) -> _Backend:  # noqa: N802
        """The group as it is: nothing here is split."""
        raise NotImplementedError("a group of ranks is not split")
