"""Paged attention in plain torch, for any device and number: the oracle that every other backend is tested against.

A step is cut into rectangles (partition.py) whose pages are gathered and attended to by one dense kernel each. The
caches must hold finite numbers everywhere: masked keys are read, and then weighted by zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from sgl.kernels.attention.base import AttentionShape, AttentionStep
from sgl.kernels.attention.partition import Rectangle, rectangles

MAX_MASK_ELEMENTS = 1 << 22
"""Size of a rectangle's mask at most (a single query token may exceed it)."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Some of the step's T query tokens: all of them in order, a run of them, or any."""

    start: int
    stop: int
    index: torch.Tensor | None  # int64, where they are not start … stop - 1
    is_all: bool

    def of(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_all:
            return x
        return x[self.start : self.stop] if self.index is None else x.index_select(0, self.index)

    def put(self, out: torch.Tensor, x: torch.Tensor) -> None:
        if self.index is None:
            out[self.start : self.stop].copy_(x)
        else:
            out.index_copy_(0, self.index, x)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A rectangle on the device."""

    tokens: _Tokens
    shape: tuple[int, int]  # [n, q] of the tokens
    num_keys: int
    pages: torch.Tensor  # int64 [n * p]
    keys: torch.Tensor  # workspace for the gathered pages [n * p, page_size * num_kv_heads * head_dim]
    values: torch.Tensor
    mask: torch.Tensor | None  # [n, 1, q * group, num_keys], or [n, 1, 1, num_keys] where q is 1


class TorchAttention:
    """The `AttentionBackend` in plain torch, for any device."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._group = shape.num_heads // shape.num_kv_heads
        # Measured on one core of an EPYC (AVX-512), float32: a call costs what 625 keys of 4 x 16 numbers cost.
        self._overhead_keys = max(16, 40_000 // (shape.num_kv_heads * shape.head_dim))
        self._page_elements = shape.page_size * shape.num_kv_heads * shape.head_dim
        self._plans: dict[int | None, list[_Piece]] = {}  # which cover every query token once
        # Fresh memory for every gather would be returned to the system and faulted in again layer after layer.
        self._workspace = torch.empty(2, 0, dtype=shape.dtype, device=shape.device)

    def plan(self, step: AttentionStep) -> None:
        """See `AttentionBackend.plan`."""
        longest = int(step.kv_lens.max())
        flat: list[_Piece] | None = None
        for window in self._shape.windows:
            if window is None or window >= longest:
                flat = flat or self._plan(step, None)
                self._plans[window] = flat
            else:
                self._plans[window] = self._plan(step, window)

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        pieces = self._plans[window]
        if len(pieces) == 1 and pieces[0].tokens.is_all:
            return self._attend(pieces[0], query, key_cache, value_cache)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for piece in pieces:
            piece.tokens.put(out, self._attend(piece, query, key_cache, value_cache))
        return out

    def _attend(
        self, piece: _Piece, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        """Of the piece's tokens: [n * q, num_heads, head_dim]"""
        out = functional.scaled_dot_product_attention(
            self._fold(query, piece),
            self._gather(piece, key_cache, piece.keys),
            self._gather(piece, value_cache, piece.values),
            attn_mask=piece.mask,
            scale=self._shape.scale,
        )
        return self._unfold(out, piece)

    def _gather(self, piece: _Piece, cache: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
        """The piece's keys or values, good until the next piece: [n, num_kv_heads, num_keys, head_dim]"""
        shape = self._shape
        torch.index_select(cache.flatten(1), 0, piece.pages, out=workspace)
        tokens = workspace.view(piece.shape[0], -1, shape.num_kv_heads, shape.head_dim)
        return tokens[:, : piece.num_keys].transpose(1, 2)

    def _fold(self, query: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """The query heads of a kv head become further query tokens: [n, num_kv_heads, q * group, head_dim]"""
        n, q = piece.shape
        shape = self._shape
        heads = piece.tokens.of(query).view(n, q, shape.num_kv_heads, self._group, shape.head_dim)
        return heads.squeeze(1) if q == 1 else heads.transpose(1, 2).flatten(2, 3)

    def _unfold(self, x: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """From [n, num_kv_heads, q * group, head_dim] to [n * q, num_heads, head_dim]"""
        n, q = piece.shape
        heads = x.view(n, self._shape.num_kv_heads, q, self._group, -1)
        return heads.transpose(1, 2).reshape(n * q, self._shape.num_heads, -1)

    def _plan(self, step: AttentionStep, window: int | None) -> list[_Piece]:
        found = rectangles(
            step.q_lens,
            step.kv_lens,
            step.page_table,
            self._shape.page_size,
            window=window,
            overhead_keys=self._overhead_keys,
            max_pairs=MAX_MASK_ELEMENTS // self._group,
        )
        num_tokens = int(step.q_lens.sum())
        self._reserve(max(rectangle.pages.size for rectangle in found))
        return [self._piece(rectangle, window, num_tokens) for rectangle in found]

    def _piece(self, rectangle: Rectangle, window: int | None, num_tokens: int) -> _Piece:
        pages, num_keys, mask = rectangle.pages, rectangle.num_keys, None
        if window is not None or not rectangle.is_full:
            # Whole pages: the kernel is slow at the end of a length that is no multiple of its vectors.
            num_keys = pages.shape[1] * self._shape.page_size
            mask = self._mask(rectangle, window, num_keys)
        size = pages.size * self._page_elements
        keys, values = self._workspace[:, :size].view(2, pages.size, self._page_elements).unbind()
        n, q = rectangle.tokens.shape
        return _Piece(
            tokens=self._tokens(rectangle.tokens.reshape(-1), num_tokens),
            shape=(n, q),
            num_keys=num_keys,
            pages=self._to_device(pages.reshape(-1)),
            keys=keys,
            values=values,
            mask=mask,
        )

    def _reserve(self, num_pages: int) -> None:
        """Make room for the gathered keys and values of that many pages."""
        size = num_pages * self._page_elements
        if size > self._workspace.shape[1]:
            self._workspace = self._workspace.new_empty(2, size + size // 2)

    def _mask(self, rectangle: Rectangle, window: int | None, num_keys: int) -> torch.Tensor:
        # Relative to the row's first key, so that the columns are the same for every row.
        last = self._to_device(rectangle.positions - rectangle.key_starts[:, None]).unsqueeze(-1)
        keys = torch.arange(num_keys, device=last.device)
        hidden = keys > last
        if window is not None:
            hidden |= keys <= last - window
        mask = torch.zeros(hidden.shape, dtype=self._shape.dtype, device=last.device)
        mask.masked_fill_(hidden, -math.inf)
        if mask.shape[1] > 1:
            mask = mask.repeat_interleave(self._group, dim=1)
        return mask.unsqueeze(1)

    def _tokens(self, tokens: npt.NDArray[np.int64], num_tokens: int) -> _Tokens:
        start, stop = int(tokens[0]), int(tokens[0]) + len(tokens)
        is_run = bool((tokens == np.arange(start, stop)).all())
        return _Tokens(
            start=start,
            stop=stop,
            index=None if is_run else self._to_device(tokens),
            is_all=is_run and len(tokens) == num_tokens,
        )

    def _to_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._shape.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._shape.device, non_blocking=True)
