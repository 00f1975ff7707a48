"""A decoder with multi-head latent attention: the cache has one latent for each token and layer, which all heads read.

Keys and values are never computed: queries are moved into the latents' space and what they attend to out of it, so
that attention is that of one key-value head, whose values are the first numbers of its keys. Never waits for the
device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from sgl.kernels.attention.base import AttentionBackend, AttentionShape
from sgl.kernels.collectives import Collectives, Links
from sgl.kernels.latent.products import absorb, expand, store_latents
from sgl.kernels.layers.activation import silu_and_mul
from sgl.kernels.layers.linear import linear, linear_add
from sgl.kernels.layers.norm import add_rms_norm, rms_norm
from sgl.kernels.layers.rope import rotary_rows
from sgl.runtime.model.decoder import warm_up_sizes
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.mla.config import LatentConfig
from sgl.runtime.model.mla.experts import mix
from sgl.runtime.model.mla.weights import LatentLayer, LatentWeights
from sgl.runtime.model.rotary import rotary_table

_LATENT_EPS = 1e-6  # of the latents' norms, whatever the config says of others


@dataclass(slots=True)
class _State:
    """T tokens on their way through the layers."""

    residual: torch.Tensor  # [T, hidden]
    rotary: tuple[torch.Tensor, torch.Tensor]  # of their positions
    slots: torch.Tensor  # int64 [T]
    rest: torch.Tensor | None = None  # not yet added to the residual


class LatentDecoder:
    """A loaded model; see `Model`."""

    collectives: Collectives | None = None
    links: Links | None = None

    def __init__(self, config: LatentConfig, weights: LatentWeights, max_positions: int | None = None) -> None:
        """max_positions: positions it may be asked for (default: the context)."""
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.vocabulary = range(config.vocab_size)
        self.most_layers = config.num_layers
        self.max_positions = max_positions or config.context_length
        self.captures = config.num_dense >= config.num_layers
        self._rotary_table = rotary_table(config.rope, config.rope_dim, self.max_positions, self.device)

    def attention_shape(self, page_size: int, kv_dtype: torch.dtype | None = None) -> AttentionShape:
        """The attention backend's parameters. kv_dtype: the cache's, if not the weights'."""
        config = self.config
        return AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=1,
            head_dim=config.head_dim,
            page_size=page_size,
            scale=config.scale,
            dtype=self.dtype,
            device=self.device,
            kv_dtype=kv_dtype,
            latent_dim=config.kv_rank,
        )

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KVCache,
        slots: torch.Tensor,
        attention: AttentionBackend,
        wanted: torch.Tensor | None = None,
        captured: bool = False,
    ) -> torch.Tensor:
        """See `Model.forward`. The last layer computes only what is cached of tokens that are not wanted."""
        rotary = rotary_rows(self._rotary_table, positions, self.dtype)
        state = _State(functional.embedding(input_ids, self.weights.embedding), rotary, slots)
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            query = self._before_attention(layer, state, kv.keys[index])
            if index == last and wanted is not None and not len(wanted):
                return state.residual[:0]
            attended = attention.run(query, kv.keys[index], kv.values[index])
            if index == last and wanted is not None:
                state.residual, attended = (its.index_select(0, wanted) for its in (state.residual, attended))
            self._after_attention(layer, state, attended, captured=captured)
        return add_rms_norm(state.rest, state.residual, self.weights.norm, self.config.rms_norm_eps)

    def _before_attention(self, layer: LatentLayer, state: _State, cache: torch.Tensor) -> torch.Tensor:
        """A layer up to its attention: what is cached, and the queries [T, num_heads, head_dim]."""
        config = self.config
        x = add_rms_norm(state.rest, state.residual, layer.input_norm, config.rms_norm_eps)
        qkv = linear(x, layer.qkv, layer.qkv_bias)
        query, latents = torch.split(qkv, [qkv.shape[1] - config.head_dim, config.head_dim], 1)
        if layer.query_up is not None and layer.query_norm is not None:
            query = linear(rms_norm(query, layer.query_norm, _LATENT_EPS), layer.query_up, None)
        query = query.view(len(x), config.num_heads, config.query_dim)
        store_latents(latents, layer.latent_norm, _LATENT_EPS, state.rotary, cache, state.slots)
        return absorb(query, layer.latent_up, state.rotary, config.nope_dim)

    def _after_attention(
        self, layer: LatentLayer, state: _State, attended: torch.Tensor, *, captured: bool
    ) -> None:
        """A layer from the latents [T, num_heads, kv_rank] that it attended to."""
        x = expand(attended, layer.latent_up, self.config.nope_dim)
        rest = linear_add(x, layer.output, layer.output_bias, state.residual, captured=captured)
        x = add_rms_norm(rest, state.residual, layer.post_attention_norm, self.config.rms_norm_eps)
        if layer.experts is not None:
            state.rest = mix(x, layer.experts, self.config.routing)
        else:
            assert layer.gate_up is not None, "a layer without experts is dense"
            assert layer.down is not None, "a layer without experts is dense"
            x = silu_and_mul(linear(x, layer.gate_up, None))
            state.rest = linear_add(x, layer.down, None, state.residual, captured=captured)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [n, vocab] of hidden states [n, hidden], in `out` if given."""
        head = self.weights.lm_head
        if hidden.is_cuda and self.dtype != torch.float32 and len(hidden) > 1 and isinstance(head, torch.Tensor):
            # neither rounded to the weights' dtype nor written twice
            return torch.mm(hidden, head.t(), out_dtype=torch.float32, out=out)
        logits = linear(hidden, head, None)
        return logits.float() if out is None else out.copy_(logits)

    def whole_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`logits`: no other rank has any."""
        return self.logits(hidden)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Themselves."""
        return logits

    @torch.inference_mode()
    def warm_up_gemms(self, most_rows: int, most_tokens: int) -> None:
        """See `Decoder.warm_up_gemms`."""
        config = self.config
        layers = {layer.experts is None: layer for layer in self.weights.layers}.values()
        cache = torch.zeros(1, 1, 1, config.head_dim, dtype=self.dtype, device=self.device)
        for num_tokens in warm_up_sizes(most_rows, most_tokens):
            hidden = torch.zeros(num_tokens, config.hidden_size, dtype=self.dtype, device=self.device)
            nowhere = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
            state = _State(hidden, rotary_rows(self._rotary_table, nowhere, self.dtype), nowhere)
            for layer in layers:
                query = self._before_attention(layer, state, cache)
                self._after_attention(layer, state, query[..., : config.kv_rank].contiguous(), captured=False)
            if num_tokens <= most_rows:
                self.logits(hidden)
