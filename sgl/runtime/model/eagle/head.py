"""An EAGLE-3 head: one decoder layer that reads a token and what the target made of the tokens before it.

Entry p, for p >= 1, stands for token p: its input is the token's embedding beside a feature of token p - 1, which is
the target's hidden states behind three layers, fused. Where the target has not been yet, it is what the head itself
made of token p - 1, before its last norm, or behind it (`norm_output`). Entry p attends to entries 1 to p; rope counts
from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch.nn import functional

from sgl.kernels.attention.base import AttentionShape, PlannedAttention
from sgl.kernels.layers.activation import silu_and_mul
from sgl.kernels.layers.linear import Matrix, gated_overlapped, linear, linear_add, linear_overlapped, prepare
from sgl.kernels.layers.norm import add_rms_norm, rms_norm
from sgl.kernels.layers.qkv import rotate_and_store
from sgl.kernels.layers.rope import rotary_rows
from sgl.runtime.model.base import shape_of_heads
from sgl.runtime.model.eagle.config import EagleConfig
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.rotary import rotary_table
from sgl.runtime.model.tokens import Tokens
from sgl.runtime.model.weights import matrix_tensors

_PRODUCTS = ("fuse", "qkv", "output", "gate_up", "down", "lm_head")


@dataclass(slots=True, kw_only=True)
class HeadWeights:
    """Matrices are [out, in]."""

    embedding: torch.Tensor  # [vocab, hidden]; perhaps the target's
    fuse_norms: torch.Tensor | None  # [n, 3 * target hidden / n]: of n equal parts of what is fused, 1 or 3
    fuse: Matrix  # [hidden, 3 * target hidden]
    fuse_bias: torch.Tensor | None
    input_norm: torch.Tensor  # [hidden], of embeddings
    hidden_norm: torch.Tensor  # [hidden], of features
    qkv: Matrix  # [(num_heads + 2 * num_kv_heads) * head_dim, 2 * hidden]
    qkv_bias: torch.Tensor | None
    output: Matrix  # [hidden, num_heads * head_dim]
    output_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor  # [hidden]
    gate_up: Matrix  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: Matrix  # [hidden, intermediate]
    down_bias: torch.Tensor | None
    norm: torch.Tensor  # [hidden]
    lm_head: Matrix  # [draft vocab, hidden]; perhaps the target's, or its embedding
    target_ids: torch.Tensor | None  # int64 [draft vocab] the drafts' ids as tokens of the target; None: the same
    borrowed: frozenset[str] = frozenset()  # fields that are the target's or another one

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of its own once."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in self.borrowed and value is not None and not isinstance(value, frozenset):
                yield from matrix_tensors(value)

    @property
    def num_multiplied(self) -> int:
        """Elements of the matrices that tokens are multiplied with."""
        return sum(math.prod(next(matrix_tensors(getattr(self, name))).shape) for name in _PRODUCTS)

    def prepare(self, most_rows: int) -> None:
        """See `linear.prepare`."""
        for name in _PRODUCTS:
            prepare(getattr(self, name), getattr(self, f"{name}_bias", None), most_rows)


class EagleHead:
    """A loaded head. It is a `Model` but for its `forward`, which needs features. Never waits for the device."""

    collectives = None
    links = None
    most_layers = 1
    captures = False

    def __init__(self, config: EagleConfig, weights: HeadWeights, max_positions: int) -> None:
        self.config, self.weights, self.max_positions = config, weights, max_positions
        self.vocabulary = range(config.vocab_size)
        self.device, self.dtype = weights.norm.device, weights.norm.dtype
        self._rotary_table = rotary_table(config.rope, config.head_dim, max_positions, self.device)

    def attention_shape(self, page_size: int, kv_dtype: torch.dtype | None = None) -> AttentionShape:
        """See `Model`."""
        shape = shape_of_heads(self.config, page_size, self.dtype, kv_dtype, self.device)
        return replace(shape, windows=(self.config.window,))

    @torch.inference_mode()
    def fused(self, hidden: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Features of T tokens, [T, hidden], of what the target made of them: [T, target hidden] for each layer."""
        joined = torch.cat(hidden, -1).to(self.dtype)
        if (norms := self.weights.fuse_norms) is not None:
            parts = zip(joined.chunk(len(norms), -1), norms, strict=True)
            joined = torch.cat(
                [rms_norm(its.contiguous(), norm, self.config.rms_norm_eps) for its, norm in parts], -1
            )
        return linear(joined, self.weights.fuse, self.weights.fuse_bias)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tokens,
        features: torch.Tensor,
        kv: KVCache,
        attention: PlannedAttention,
        *,
        captured: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the wanted tokens, hidden states after the last norm, and features: [N, hidden] each. features: [T,
        hidden], of the tokens before; overwritten where all tokens are wanted. captured: for a CUDA graph."""
        wanted = tokens.wanted
        weights, config, eps = self.weights, self.config, self.config.rms_norm_eps
        embedded = functional.embedding(tokens.ids, weights.embedding).to(self.dtype)
        normed = rms_norm(features, weights.hidden_norm, eps)
        residual = normed if config.norm_before_residual else features
        x = torch.cat((rms_norm(embedded, weights.input_norm, eps), normed), -1)
        product = linear_overlapped(x, weights.qkv, weights.qkv_bias, has_parts=True) if captured else None
        if product is None:
            product = linear(x, weights.qkv, weights.qkv_bias)
        qkv = product.view(*product.shape[:-1], -1, config.head_dim)
        rotary = rotary_rows(self._rotary_table, tokens.positions, self.dtype)
        keys, values = kv.keys[0], kv.values[0]
        query = rotate_and_store(qkv, config.num_heads, rotary, None, eps, keys, values, tokens.slots)
        if wanted is not None and not len(wanted):
            return residual[:0], residual[:0]
        x = attention.run(query, keys, values, config.window).flatten(1)
        if wanted is not None:
            x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
        rest = _added(x, weights.output, weights.output_bias, residual, captured=captured)
        x = add_rms_norm(rest, residual, weights.post_attention_norm, eps)
        gate_up = weights.gate_up, weights.gate_up_bias
        gated = gated_overlapped(x, *gate_up, is_gelu=False) if captured else None
        x = silu_and_mul(linear(x, *gate_up)) if gated is None else gated
        rest = _added(x, weights.down, weights.down_bias, residual, captured=captured)
        x = add_rms_norm(rest, residual, weights.norm, eps)
        return x, x if config.norm_output else residual

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [n, vocab] of hidden states [n, hidden], in `out` if given; -inf for tokens that it cannot draft."""
        logits, target_ids = self.own_logits(hidden), self.weights.target_ids
        if target_ids is None:
            return logits if out is None else out.copy_(logits)
        if out is None:
            out = torch.empty(len(logits), self.config.vocab_size, dtype=torch.float32, device=logits.device)
        return out.fill_(-math.inf).index_copy_(1, target_ids, logits)

    @torch.inference_mode()
    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, draft vocab] of hidden states [n, hidden]."""
        logits, scale = linear(hidden, self.weights.lm_head, None).float(), self.config.logit_scale
        return logits if scale == 1.0 else logits.mul_(scale)

    whole_logits = logits

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return logits

    @torch.inference_mode()
    def warm_up_gemms(self, most_rows: int, most_tokens: int) -> None:
        """See `Model`."""
        weights = self.weights
        for size in sorted({1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, most_tokens}, reverse=True):
            for name in _PRODUCTS:
                matrix: Matrix = getattr(weights, name)
                if size <= most_rows or (name != "lm_head" and size <= most_tokens):
                    width = matrix.shape[1] if isinstance(matrix, torch.Tensor) else self.config.hidden_size
                    linear(torch.zeros(size, width, dtype=self.dtype, device=self.device), matrix, None)


def _added(
    x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, residual: torch.Tensor, *, captured: bool
) -> torch.Tensor | None:
    """See `linear_add`."""
    return linear_add(x, matrix, bias, residual, captured=True) if captured else linear(x, matrix, bias)
