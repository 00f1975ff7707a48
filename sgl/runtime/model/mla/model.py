"""A decoder with multi-head latent attention: the cache has one latent for each token and layer, which all heads read.

Keys and values are never computed: queries are moved into the latents' space and what they attend to out of it, so
that attention is that of one key-value head, whose values are the first numbers of its keys. Never waits for the
device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl.kernels.attention.base import AttentionBackend, AttentionShape
from sgl.kernels.latent.attention import LatentAttention
from sgl.kernels.latent.products import enter, expand
from sgl.kernels.layers.activation import silu_and_mul
from sgl.kernels.layers.linear import Matrix
from sgl.kernels.layers.norm import rms_norm
from sgl.kernels.layers.rope import rotary_rows
from sgl.kernels.moe.mixture import mixture
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.lora import LoraStep, adapted, gated
from sgl.runtime.model.mla.config import LatentConfig
from sgl.runtime.model.mla.parts import local
from sgl.runtime.model.mla.weights import LatentLayer, LatentWeights
from sgl.runtime.model.part import ModelPart, warm_up_sizes
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.rotary import rotary_table
from sgl.runtime.model.tokens import Tokens

_LATENT_EPS = 1e-6  # of the latents' norms, whatever the config says of others


@dataclass(slots=True)
class _State:
    """T tokens on their way through the layers."""

    residual: torch.Tensor  # [T, hidden]
    rotary: tuple[torch.Tensor, torch.Tensor]  # of their positions
    slots: torch.Tensor  # int64 [T]
    rest: torch.Tensor | None = None  # not yet added to the residual
    lora: LoraStep | None = None  # of tokens with adapters


class LatentDecoder(ModelPart[LatentWeights]):
    """A loaded model; see `Model`."""

    captures = True

    def __init__(
        self,
        config: LatentConfig,
        weights: LatentWeights,
        max_positions: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """See `ModelPart`."""
        super().__init__(config, weights, max_positions, ranks)
        self.whole_config, self.config = config, local(config, self.shard)
        self.most_layers = -(-config.num_layers // self.shard.stages)
        self.windows: tuple[int | None, ...] = (None,) * self.config.num_layers
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
        self, tokens: Tokens, kv: KVCache, attention: AttentionBackend, *, captured: bool = False
    ) -> torch.Tensor:
        """See `Model`. The last layer computes only what is cached of tokens that are not wanted."""
        state = self._state(self._embedded(tokens.ids), tokens)
        is_single = len(tokens.ids) == 1 and tokens.lora is None and self.collectives is None
        if is_single and isinstance(attention, LatentAttention):
            return self._forward_single(state, kv, attention)
        return self._last_layers(state, kv, attention, tokens.wanted, captured=captured)

    @torch.inference_mode()
    def forward_stage(
        self, tokens: Tokens, kv: KVCache, attention: AttentionBackend, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Decoder.forward_stage`."""
        state = self._state(self._embedded(tokens.ids) if before is None else before, tokens)
        if self.is_last:
            return self._last_layers(state, kv, attention, tokens.wanted, captured=False)
        for index, layer in enumerate(self.weights.layers):
            query = self._before_attention(index, layer, state, kv.keys[index])
            attended = attention.run(query, kv.keys[index], kv.values[index])
            self._after_attention(index, layer, state, attended, captured=False)
        if state.rest is not None:
            rest = state.rest if state.rest.dim() == 2 else state.rest.sum(0)
            state.residual += rest if self.collectives is None else self.collectives.sum(rest)
        return state.residual

    def _state(self, residual: torch.Tensor, tokens: Tokens) -> _State:
        rotary = rotary_rows(self._rotary_table, tokens.positions, self.dtype)
        return _State(residual, rotary, tokens.slots, lora=tokens.lora)

    def _last_layers(
        self,
        state: _State,
        kv: KVCache,
        attention: AttentionBackend,
        wanted: torch.Tensor | None,
        *,
        captured: bool,
    ) -> torch.Tensor:
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            query = self._before_attention(index, layer, state, kv.keys[index])
            if index == last and wanted is not None and not len(wanted):
                return state.residual[:0]
            attended = attention.run(query, kv.keys[index], kv.values[index])
            if index == last and wanted is not None:
                state.residual, attended = (its.index_select(0, wanted) for its in (state.residual, attended))
                state.lora = None if state.lora is None else state.lora.for_wanted()
            self._after_attention(index, layer, state, attended, captured=captured)
        return self._add_norm(state.rest, state.residual, self.weights.norm)

    def _before_attention(self, index: int, layer: LatentLayer, state: _State, cache: torch.Tensor) -> torch.Tensor:
        """A layer up to its attention: what is cached, and the queries [T, num_heads, head_dim]."""
        config = self.config
        x = self._add_norm(state.rest, state.residual, layer.input_norm)
        qkv = adapted(x, layer.qkv, layer.qkv_bias, index, "qkv", state.lora)
        query, latents = torch.split(qkv, [qkv.shape[1] - config.head_dim, config.head_dim], 1)
        if layer.query_up is not None and layer.query_norm is not None:
            query = rms_norm(query.contiguous(), layer.query_norm, _LATENT_EPS)
            query = adapted(query, layer.query_up, None, index, "query_up", state.lora)
        return self._enter(layer, state, query, latents, cache)

    def _enter(
        self, layer: LatentLayer, state: _State, query: torch.Tensor, latents: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        query = query.view(len(query), self.config.num_heads, self.config.query_dim)
        norm, eps = layer.latent_norm, _LATENT_EPS
        return enter(query, latents, layer.latent_up, norm, eps, state.rotary, cache, state.slots)

    def _after_attention(
        self, index: int, layer: LatentLayer, state: _State, attended: torch.Tensor, *, captured: bool
    ) -> None:
        """A layer from the latents [T, num_heads, kv_rank] that it attended to."""
        x = expand(attended, layer.latent_up, self.config.nope_dim)
        rest = self._add_product(
            x, layer.output, layer.output_bias, state.residual, index, "output", state.lora, captured=captured
        )
        x = self._add_norm(rest, state.residual, layer.post_attention_norm)
        if layer.experts is not None:
            state.rest = mixture(x, layer.experts)
        else:
            gate_up, down = _dense(layer)
            x = gated(x, gate_up, None, silu_and_mul, index, state.lora, captured=captured)
            state.rest = self._add_product(
                x, down, None, state.residual, index, "down", state.lora, captured=captured
            )

    def _forward_single(self, state: _State, kv: KVCache, attention: LatentAttention) -> torch.Tensor:
        """`forward` of one token on a GPU, whose products only stream their weights."""
        # imported only where a Triton kernel runs
        from sgl.kernels.latent.products_triton import expand_parts
        from sgl.kernels.layers.single_triton import project, project_add_, project_gated
        from sgl.kernels.moe.single_triton import mixture_add_

        config, residual = self.config, state.residual
        for layer, cache in zip(self.weights.layers, kv.keys, strict=True):
            qkv = project(residual, layer.input_norm, config.rms_norm_eps, layer.qkv, layer.qkv_bias)
            query, latents = torch.split(qkv, [qkv.shape[1] - config.head_dim, config.head_dim], 1)
            if layer.query_up is not None:
                query = project(query, layer.query_norm, _LATENT_EPS, layer.query_up, None)
            query = self._enter(layer, state, query, latents, cache)
            parts, programs = attention.run_parts(query, cache)
            values = expand_parts(parts, programs, layer.latent_up, config.nope_dim)
            project_add_(values, layer.output, layer.output_bias, residual)
            norm, eps = layer.post_attention_norm, config.rms_norm_eps
            if layer.experts is not None:
                mixture_add_(residual, norm, eps, layer.experts, None, residual)
            else:
                gate_up, down = _dense(layer)
                project_add_(project_gated(residual, norm, eps, gate_up, None), down, None, residual)
        return rms_norm(residual, self.weights.norm, config.rms_norm_eps)

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
                query = self._before_attention(0, layer, state, cache)
                self._after_attention(0, layer, state, query[..., : config.kv_rank].contiguous(), captured=False)
            if self.is_first and num_tokens <= most_rows:
                self.logits(hidden)


def _dense(layer: LatentLayer) -> tuple[Matrix, Matrix]:
    """gate_up and down of a layer without experts."""
    assert layer.gate_up is not None, "it is dense"
    assert layer.down is not None, "it is dense"
    return layer.gate_up, layer.down
