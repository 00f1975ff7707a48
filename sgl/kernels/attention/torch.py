"""Paged attention in plain torch, for any device and number: the oracle that every other backend is tested against, and
what CPUs run on that have no compiler.

A step is cut into rectangles (partition.py) whose pages are gathered and attended to by one dense kernel each. On
a CPU, keys that many rows share are attended to once for all of them, and the two halves are merged by their
log-sum-exps. The caches must hold finite numbers everywhere: masked keys are read, and then weighted by zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from sgl.kernels.attention.base import AttentionShape, AttentionStep
from sgl.kernels.attention.partition import Rectangle, SharedPrefix, rectangles, shared_prefixes

MAX_SHARING_QUERIES = 8
"""Rows with more query tokens attend to a shared prefix on their own: their kernels are busy enough."""

_FINE_PRODUCT = 1 << 14  # multiplications

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
    """A rectangle, or a shared prefix, on the device."""

    tokens: _Tokens
    shape: tuple[int, int]  # [n, q] of the tokens
    num_keys: int
    first_key: int | None  # the slot of a row's first key, where the others follow: they are read where they are
    pages: torch.Tensor  # int64 [n * p]
    keys: torch.Tensor  # workspace for the gathered pages [n * p, page_size * num_kv_heads * head_dim]
    values: torch.Tensor
    mask: torch.Tensor | None  # [n, 1, q * group, num_keys], or [n, 1, 1, num_keys] where q is 1


@dataclass(frozen=True, slots=True)
class _Plan:
    own: list[_Piece]  # cover every query token once
    shared: list[_Piece]  # n is 1


class TorchAttention:
    """The `AttentionBackend` in plain torch, for any device."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._group = shape.num_heads // shape.num_kv_heads
        # Measured on one core of an EPYC (AVX-512), float32: a call costs what 625 keys of 4 x 16 numbers cost.
        self._overhead_keys = max(16, 40_000 // (shape.num_kv_heads * shape.head_dim))
        self._page_elements = shape.page_size * shape.num_kv_heads * shape.head_dim
        self._plans: dict[int | None, _Plan] = {}
        # Fresh memory for every gather would be returned to the system and faulted in again layer after layer.
        self._workspace = torch.empty(2, 0, dtype=shape.dtype, device=shape.device)

    def plan(self, step: AttentionStep) -> None:
        """See `AttentionBackend.plan`."""
        longest = int(step.kv_lens.max())
        flat: _Plan | None = None
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
        plan = self._plans[window]
        shape = self._shape
        if not plan.shared:
            return self._attend_flat(plan.own, query, key_cache, value_cache)
        split = (len(query), shape.num_kv_heads, self._group)
        out = query.new_empty(*split, shape.head_dim)
        lse = torch.empty(split, dtype=torch.float32, device=query.device)
        for piece in plan.own:
            part, part_lse = self._attend_with_lse(piece, query, key_cache, value_cache)
            piece.tokens.put(out, part)
            piece.tokens.put(lse, part_lse)
        for piece in plan.shared:
            tokens = piece.tokens
            part, part_lse = self._attend_with_lse(piece, query, key_cache, value_cache)
            weight = torch.sigmoid(part_lse.sub_(tokens.of(lse))).unsqueeze(-1).to(out.dtype)
            if tokens.is_all:
                out.lerp_(part, weight)
            else:
                tokens.put(out, tokens.of(out).lerp(part, weight))
        return out.flatten(1, 2)

    def _attend_flat(
        self, pieces: list[_Piece], query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        if len(pieces) == 1 and pieces[0].tokens.is_all:
            return self._unfold(self._attend(pieces[0], query, key_cache, value_cache), pieces[0]).flatten(1, 2)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for piece in pieces:
            part = self._unfold(self._attend(piece, query, key_cache, value_cache), piece)
            piece.tokens.put(out, part.flatten(1, 2))
        return out

    def _attend(
        self, piece: _Piece, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> torch.Tensor:
        """[n, num_kv_heads, q * group, head_dim]"""
        return functional.scaled_dot_product_attention(
            self._fold(query, piece),
            self._gather(piece, key_cache, piece.keys),
            self._gather(piece, value_cache, piece.values),
            attn_mask=piece.mask,
            scale=self._shape.scale,
        )

    def _attend_with_lse(
        self, piece: _Piece, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens first: [n * q, num_kv_heads, group, head_dim] and float32 [n * q, num_kv_heads, group]"""
        arguments = (
            self._fold(query, piece),
            self._gather(piece, key_cache, piece.keys),
            self._gather(piece, value_cache, piece.values),
        )
        threads = torch.get_num_threads()
        if self._is_fine(piece):
            torch.set_num_threads(1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *arguments, attn_mask=piece.mask, scale=self._shape.scale
        )
        torch.set_num_threads(threads)
        return self._unfold(out, piece), self._unfold(lse, piece)

    def _is_fine(self, piece: _Piece) -> bool:
        """Whether the kernel's products are so small that they take longer within a parallel region (MKL asks there
        for each whether it may use threads)."""
        return piece.shape[1] * self._group * piece.num_keys * self._shape.head_dim < _FINE_PRODUCT

    def _gather(self, piece: _Piece, cache: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
        """The piece's keys or values, good until the next piece: [n, num_kv_heads, num_keys, head_dim]"""
        shape = self._shape
        if piece.first_key is not None:
            keys = cache.flatten(0, 1)[piece.first_key : piece.first_key + piece.num_keys]
            return keys.transpose(0, 1).unsqueeze(0)
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
        """From [n, num_kv_heads, q * group, …] to [n * q, num_kv_heads, group, …]"""
        n, q = piece.shape
        if q == 1:
            return x
        heads = x.view(n, self._shape.num_kv_heads, q, self._group, *x.shape[3:])
        return heads.transpose(1, 2).flatten(0, 1)

    def _plan(self, step: AttentionStep, window: int | None) -> _Plan:
        page_size = self._shape.page_size
        prefixes: list[SharedPrefix] = []
        if window is None and self._shape.device.type == "cpu":
            prefixes = shared_prefixes(
                step.q_lens,
                step.kv_lens,
                step.page_table,
                page_size,
                min_saved_keys=2 * self._overhead_keys,
                max_q=MAX_SHARING_QUERIES,
            )
        skipped_pages = np.zeros(len(step.q_lens), dtype=np.int32)
        for prefix in prefixes:
            skipped_pages[prefix.rows] = len(prefix.pages)
        pieces = rectangles(
            step.q_lens,
            step.kv_lens,
            step.page_table,
            page_size,
            skipped_pages=skipped_pages,
            window=window,
            overhead_keys=self._overhead_keys,
            max_pairs=MAX_MASK_ELEMENTS // self._group,
        )
        num_tokens = int(step.q_lens.sum())
        self._reserve(
            max(pages.size for pages in [piece.pages for piece in pieces] + [prefix.pages for prefix in prefixes])
        )
        return _Plan(
            own=[self._own_piece(rectangle, window, num_tokens) for rectangle in pieces],
            shared=[self._shared_piece(prefix, step, num_tokens) for prefix in prefixes],
        )

    def _own_piece(self, rectangle: Rectangle, window: int | None, num_tokens: int) -> _Piece:
        if window is None and rectangle.is_full:
            return self._piece(rectangle.tokens, rectangle.pages, rectangle.num_keys, None, num_tokens)
        # Whole pages: the kernel is slow at the end of a length that is no multiple of its vectors.
        num_keys = rectangle.pages.shape[1] * self._shape.page_size
        mask = self._mask(rectangle, window, num_keys)
        return self._piece(rectangle.tokens, rectangle.pages, num_keys, mask, num_tokens)

    def _shared_piece(self, prefix: SharedPrefix, step: AttentionStep, num_tokens: int) -> _Piece:
        q_lens = step.q_lens.astype(np.int64)
        lengths = q_lens[prefix.rows]
        # The first token of each row, less the tokens that the rows before it bring.
        shifts = (np.cumsum(q_lens) - q_lens)[prefix.rows] - (np.cumsum(lengths) - lengths)
        tokens = np.repeat(shifts, lengths) + np.arange(int(lengths.sum()))
        return self._piece(tokens[None], prefix.pages, len(prefix.pages) * self._shape.page_size, None, num_tokens)

    def _piece(
        self,
        tokens: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int64],
        num_keys: int,
        mask: torch.Tensor | None,
        num_tokens: int,
    ) -> _Piece:
        size = pages.size * self._page_elements
        keys, values = self._workspace[:, :size].view(2, pages.size, self._page_elements).unbind()
        n, q = tokens.shape
        flat = pages.reshape(-1)
        is_run = n == 1 and bool((flat[1:] == flat[:-1] + 1).all())
        return _Piece(
            tokens=self._tokens(tokens.reshape(-1), num_tokens),
            shape=(n, q),
            num_keys=num_keys,
            first_key=int(flat[0]) * self._shape.page_size if is_run else None,
            pages=self._to_device(flat),
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
