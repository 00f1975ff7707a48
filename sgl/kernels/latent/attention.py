"""Attention over latents on a GPU: decodes by Triton's kernel, with equal shares of keys for all programs, prompts by
Triton's or FlashInfer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from sgl.kernels.attention.base import AttentionShape, AttentionStep, GraphAttention
from sgl.kernels.attention.decode import DecodeAttention, DecodePlan, Programs
from sgl.kernels.attention.ragged import Int32Array, Int64Array, RaggedRows
from sgl.kernels.staging import Uploader

_TILE = 32  # keys a program of decodes takes at a time
_LEAST_SHARE = 64  # keys of one


class Prompts(Protocol):
    """Attention of rows of several query tokens over latents."""

    def plan(self, host: RaggedRows, q_lens: Int32Array) -> None:
        """Prepare for a step's rows. Never waits for the device."""

    def run(self, query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
        """Attend for query [T, num_heads, head_dim] into out [T, num_heads, latent_dim], both contiguous."""


class LatentDecodes(DecodeAttention):
    """`DecodeAttention` over latents."""

    def __init__(self, shape: AttentionShape, *, max_graph_rows: int = 0, max_pages: int = 0) -> None:
        # imported only where a Triton kernel runs
        from sgl.kernels.latent.attend_triton import head_groups, programs_per_processor

        self._scale, self._rank = shape.scale, shape.latent_dim
        groups = head_groups(shape.num_heads, shape.dtype, shape.device)
        as_planned = replace(shape, num_kv_heads=groups, head_dim=shape.latent_dim)
        super().__init__(
            as_planned,
            max_graph_rows=max_graph_rows,
            max_pages=max_pages,
            per_processor=programs_per_processor(shape.num_heads // groups),
            least_share=_LEAST_SHARE,
        )
        self._tile = _TILE

    def programs(self, num_rows: int, *, of_several: bool = False) -> Programs:
        """See `DecodeAttention`: always all. Their kernel chooses its warps."""
        return Programs(self.num_programs, 0, self._tile)

    def attend(
        self, plan: DecodePlan, query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend for query [B, num_heads, head_dim], contiguous, into out [B, num_heads, latent_dim]; None: leave the
        programs' parts, for `products.expand_parts`. Returns these, and the programs of `decode.SplitWork`."""
        from sgl.kernels.latent import attend_triton

        programs, segments = plan.shares[None]
        scratch, arrays = (self._parts, self._counters), (programs, segments, plan.pages)
        attend_triton.attend_decodes(query, cache, out, scratch, arrays, self._scale, self._rank, self._tile)
        return self._parts, programs


class TritonPrompts(Prompts):
    """`Prompts` by Triton's kernel."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._uploader = Uploader(shape.device)
        self._planned: list[torch.Tensor] = []

    def plan(self, host: RaggedRows, q_lens: Int32Array) -> None:
        from sgl.kernels.attention.triton import tiles
        from sgl.kernels.latent.attend_triton import tile_tokens

        shape = self._shape
        cut = tiles(q_lens, tile_tokens(shape.num_heads, shape.dtype, shape.device))
        arrays = (*cut, host.query_starts, host.page_starts, host.kv_lens, host.pages)
        self._planned = self._uploader.upload(*arrays)

    def run(self, query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
        from sgl.kernels.latent import attend_triton

        shape = self._shape
        attend_triton.attend_prompts(query, cache, out, tuple(self._planned), shape.scale, shape.latent_dim)


class LatentAttention(GraphAttention):
    """The `GraphAttention` over latents. `max_graph_rows` and `max_pages` (of a row) bound `plan_decode`."""

    def __init__(
        self, shape: AttentionShape, prompts: Prompts, *, max_graph_rows: int = 0, max_pages: int = 0
    ) -> None:
        self._shape = shape
        self._decode = LatentDecodes(shape, max_graph_rows=max_graph_rows, max_pages=max_pages)
        self._prompts = prompts
        self._decodes: DecodePlan | None = None
        self._has_prompts = False

    def plan(self, step: AttentionStep) -> None:
        longer = np.flatnonzero(step.q_lens > 1)
        num_decodes = int(longer[0]) if len(longer) else len(step.q_lens)
        self._decodes = self._decode.plan(step, num_decodes) if num_decodes else None
        self._has_prompts = num_decodes < len(step.q_lens)
        if self._has_prompts:
            rows = slice(num_decodes, None)
            self._prompts.plan(RaggedRows.of(step, rows, self._shape.page_size), step.q_lens[rows])

    def variants(self, num_rows: int) -> range:
        return range(1)

    def variant(self, step: AttentionStep) -> int:
        return 0

    def plan_decode(self, step: AttentionStep, variant: int, inputs: Sequence[Int64Array]) -> list[torch.Tensor]:
        self._decodes, placed = self._decode.plan_for_graph(step, inputs)
        self._has_prompts = False
        return placed

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None = None,
        out: torch.Tensor | None = None,
        *,
        sinks: torch.Tensor | None = None,
        overlaps: bool = False,
    ) -> torch.Tensor:
        assert window is None, "latents have no windows"
        assert sinks is None, "nor sinks"
        if out is None:
            out = query.new_empty(*query.shape[:2], self._shape.latent_dim)
        num_decodes = 0
        if self._decodes is not None:
            num_decodes = self._decodes.num_rows
            self._decode.attend(self._decodes, query[:num_decodes], key_cache, out[:num_decodes])
        if self._has_prompts:
            self._prompts.run(query[num_decodes:], key_cache, out[num_decodes:])
        return out

    def run_parts(self, query: torch.Tensor, key_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`run` of a step of one row of one token, not merged; see `LatentDecodes.attend`."""
        assert self._decodes is not None, "planned before it is run"
        return self._decode.attend(self._decodes, query, key_cache, None)
