"""Prompts over latents by FlashInfer's kernels for multi-head latent attention.

Its planner splits the work in C++ from host integers and copies it asynchronously; the Python wrapper copies from
pageable memory, so it is bypassed.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from sgl.kernels import flashinfer_version
from sgl.kernels.attention.base import AttentionShape
from sgl.kernels.attention.flashinfer_modules import CannotCompile, PrefillKernel
from sgl.kernels.attention.ragged import Int32Array, RaggedRows
from sgl.kernels.latent.attention import Prompts
from sgl.kernels.staging import Uploader, pinned_buffer

logger = logging.getLogger(__name__)

RANK, ROPE_DIM = 512, 64  # what it has kernels for
_SCALED_CACHE: flashinfer_version.Version = (0, 6, 14)
"""From here on a run is given two scales of 8-bit caches,"""
_SCALED_BLOCKS: flashinfer_version.Version = (0, 6, 18)
"""and from here on optional scales of their blocks."""
_INT_WORKSPACE = 2 << 20  # bytes, for the planner's results
_CAUSAL = 1  # mask mode
_TILE = 64  # query tokens times heads of a block
_MOST_WORKS = 12_000  # tiles of one plan, whose room is for 16,384 and which may cut some
_PINNED = 6  # buffers for the planner's results, reused in turn


def why_not(shape: AttentionShape) -> str | None:
    """Why it cannot serve latents of this shape; None: it can."""
    rope_dim = shape.head_dim - shape.latent_dim
    if (shape.latent_dim, rope_dim) != (RANK, ROPE_DIM):
        return (
            f"it has kernels for latents of {RANK} numbers and rotated keys of {ROPE_DIM}, not {shape.latent_dim} and "
            f"{rope_dim}"
        )
    return None


class FlashInferPrompts(Prompts):
    """`Prompts` by FlashInfer. Raises CannotCompile."""

    def __init__(self, shape: AttentionShape, kernel: PrefillKernel) -> None:
        self._shape = shape
        self._module = self._load(kernel)
        version = flashinfer_version.installed()
        self._more = (1.0, 1.0) if version >= _SCALED_CACHE else ()
        if version >= _SCALED_BLOCKS:
            self._more = (*self._more, None)
        self._uploader = Uploader(shape.device)
        processors = torch.cuda.get_device_properties(shape.device).multi_processor_count
        num_bytes = 2 * processors * _TILE * (2 * shape.latent_dim + 4) + 4096  # two tiles of each block's
        self._partial = torch.zeros(num_bytes, dtype=torch.uint8, device=shape.device)
        self._workspaces: list[torch.Tensor] = []
        self._pinned = [self._pinned_buffer() for _ in range(_PINNED)]
        self._num_plans = 0
        self._most_tokens = max(1, _MOST_WORKS * _TILE // shape.num_heads)
        self._planned: list[tuple[slice, Any]] = []
        self._pages = torch.empty(0, dtype=torch.int32, device=shape.device)

    def plan(self, host: RaggedRows, q_lens: Int32Array) -> None:
        (self._pages,) = self._uploader.upload(host.pages)
        self._planned = []
        for first in range(0, int(host.query_starts[-1]), self._most_tokens):
            tokens = slice(first, min(first + self._most_tokens, int(host.query_starts[-1])))
            self._planned.append((tokens, self._plan_tokens(host, tokens, self._workspace(len(self._planned)))))

    def run(self, query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
        rank = self._shape.latent_dim
        cached = cache.flatten(2)
        for (tokens, plan), workspace in zip(self._planned, self._workspaces, strict=False):
            some = query[tokens]
            self._module.run(
                self._partial,
                workspace,
                plan,
                some[..., :rank],
                some[..., rank:],
                cached[..., :rank],
                cached[..., rank:],
                self._pages,
                out[tokens],
                None,  # no log-sum-exp
                _CAUSAL,
                self._shape.num_heads,
                self._shape.page_size,
                self._shape.scale,
                False,  # nor to which base
                *self._more,
            )

    def _plan_tokens(self, host: RaggedRows, tokens: slice, workspace: torch.Tensor) -> Any:
        """Of the rows of these query tokens, the first and last of which may be cut."""
        first = int(host.query_starts.searchsorted(tokens.start, side="right")) - 1
        end = int(host.query_starts.searchsorted(tokens.stop, side="left"))
        starts = host.query_starts[first : end + 1]
        cut = np.clip(starts, tokens.start, tokens.stop)
        kv_lens = host.kv_lens[first:end] - (starts - cut)[1:]
        pinned, event = self._pinned[self._num_plans % _PINNED]
        self._num_plans += 1
        event.synchronize()  # long past in steady state
        plan = self._module.plan(
            self._partial,
            workspace,
            pinned,
            torch.from_numpy(cut - tokens.start),
            torch.from_numpy(host.page_starts[first : end + 1]),
            torch.from_numpy(np.ascontiguousarray(kv_lens)),
            self._shape.num_heads,
            self._shape.latent_dim,
            True,  # causal
        )
        event.record()
        return plan

    def _workspace(self, index: int) -> torch.Tensor:
        if index == len(self._workspaces):
            self._workspaces.append(torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=self._shape.device))
        return self._workspaces[index]

    def _load(self, kernel: PrefillKernel) -> Any:
        """The compiled module, which nvcc compiles once on a machine."""
        what = f"FlashInfer's {kernel} kernels for latent attention in {self._shape.dtype}"
        logger.info("%s are loaded; compiling them, once on a machine, takes about a minute", what)
        try:
            return self._compiled(kernel)
        except (RuntimeError, OSError) as error:
            note = str(error).strip().splitlines() or [type(error).__name__]
            raise CannotCompile(f"{what} cannot be compiled, which takes CUDA's nvcc ({note[0]})") from error

    def _compiled(self, kernel: PrefillKernel) -> Any:
        from flashinfer.jit import gen_batch_mla_module

        shape = self._shape
        types = shape.dtype, shape.cache_dtype, shape.dtype, torch.int32
        rope_dim = shape.head_dim - shape.latent_dim
        return gen_batch_mla_module(kernel, *types, shape.latent_dim, rope_dim, False).build_and_load()

    @staticmethod
    def _pinned_buffer() -> tuple[torch.Tensor, torch.cuda.Event]:
        return pinned_buffer(_INT_WORKSPACE)
