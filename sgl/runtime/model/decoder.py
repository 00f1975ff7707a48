"""The decoder that all families share. Knows weights and kernels but no requests. Never waits for the device."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from sgl.kernels.attention.base import AttentionShape, GraphAttention, PlannedAttention
from sgl.kernels.layers.activation import gelu_and_mul, silu_and_mul
from sgl.kernels.layers.linear import Matrix, launches_overlap, linear, linear_add, linear_overlapped
from sgl.kernels.layers.norm import add_rms_norm, norm_parts_, rms_norm
from sgl.kernels.layers.qkv import rotate_and_store
from sgl.kernels.layers.rope import rotary_rows, rotary_rows_by_axis
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.mixture import mixture
from sgl.runtime.model.aux_hidden_states import AuxHiddenStates
from sgl.runtime.model.base import shape_of_heads
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.families import FAMILIES
from sgl.runtime.model.image_features import VisionEncoder
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.layer_state import LayerState
from sgl.runtime.model.lora import LoraStep, fed, gated
from sgl.runtime.model.part import ModelPart, warm_up_sizes
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.rotary import rotary_table
from sgl.runtime.model.tokens import Tokens
from sgl.runtime.model.weights import LayerWeights, Weights


class Decoder(ModelPart[Weights]):
    """A loaded model, or one rank's part of it, which gives the same hidden states."""

    captures = True

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_positions: int | None = None,
        ranks: Ranks | None = None,
        vision: VisionEncoder | None = None,
    ) -> None:
        """config: the whole model's. max_positions: positions it may be asked for (default: the context). ranks: among
        which the model is cut. vision: of a model that sees images."""
        super().__init__(config, weights, max_positions, ranks)
        self.whole_config, self.config = config, self.shard.local(config)
        self.windows = self.config.windows
        self.most_layers = -(-config.num_layers // self.shard.stages)
        """Of any stage."""
        self.logit_cap = config.logit_cap
        self._axes = torch.tensor(config.rope.axes, dtype=torch.int64, device=self.device)
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self._rotary_tables = [rotary_table(it, config.head_dim, self.max_positions, self.device) for it in ropes]
        self._qk_norms = [self._qk_norm(layer) for layer in weights.layers]
        self._gate = gelu_and_mul if FAMILIES[config.architecture].activation == "gelu" else silu_and_mul
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()  # as rounded
        self.vision = vision
        self.aux_hidden_states: AuxHiddenStates | None = None
        """Set before graphs are captured, it keeps hidden states of some layers."""

    def attention_shape(self, page_size: int, kv_dtype: torch.dtype | None = None) -> AttentionShape:
        """The attention backend's parameters. kv_dtype: the cache's, if not the weights'."""
        config = self.config
        return replace(
            shape_of_heads(config, page_size, self.dtype, kv_dtype, self.device),
            scale=config.attention_scale,
            windows=tuple(dict.fromkeys(config.windows)),
            softcap=config.score_cap,
            has_sinks=FAMILIES[config.architecture].has_sinks,
        )

    @torch.inference_mode()
    def forward(
        self, tokens: Tokens, kv: KVCache, attention: PlannedAttention, *, captured: bool = False
    ) -> torch.Tensor:
        """See `Model`. The last layer computes only keys and values of tokens that are not wanted."""
        state = self.embed(tokens)
        is_single = len(tokens.ids) == 1 and self.device.type == "cuda" and not self.weights.is_invariant
        if is_single and tokens.images is None and tokens.lora is None:
            state.overlaps = captured and launches_overlap(self.device)
            return self._forward_single(state, kv, attention)
        return self._last_layers(state, kv, attention, tokens.wanted, captured=captured)

    def forward_stage(
        self, tokens: Tokens, kv: KVCache, attention: PlannedAttention, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`forward` of a stage. before: what the stage before returned. Embeddings of images are needed in the first
        one only. Returns [T, hidden] for the next stage; in the last one what `forward` does."""
        state = self.embed(tokens) if before is None else self._state(before, tokens)
        if self.is_last:
            return self._last_layers(state, kv, attention, tokens.wanted, captured=False)
        for index in range(self.config.num_layers):
            self._layer(index, state, kv, attention, captured=False)
        if state.rest is not None:
            rest = state.rest if self.collectives is None else self.collectives.sum(state.rest)
            add_rms_norm(
                rest,
                state.residual,
                None,
                self.config.rms_norm_eps,
                state.rest_norm,
                is_invariant=self.weights.is_invariant,
            )
        return state.residual

    def _layer(
        self, index: int, state: LayerState, kv: KVCache, attention: PlannedAttention, *, captured: bool
    ) -> None:
        query = self.before_attention(index, state, kv, captured=captured)
        self.after_attention(index, state, self._attend(index, state, query, kv, attention), captured=captured)

    def _last_layers(
        self,
        state: LayerState,
        kv: KVCache,
        attention: PlannedAttention,
        wanted: torch.Tensor | None,
        *,
        captured: bool,
    ) -> torch.Tensor:
        last = self.config.num_layers - 1
        for index in range(last):
            self._layer(index, state, kv, attention, captured=captured)
        query = self.before_attention(last, state, kv, captured=captured)
        if wanted is not None and not len(wanted):
            return state.residual[:0]
        return self.finish(state, self._attend(last, state, query, kv, attention), wanted, captured=captured)

    def embed(self, tokens: Tokens) -> LayerState:
        """Tokens before the first layer."""
        residual = self._embedded(tokens.ids)
        if tokens.images is not None:
            tokens.images.embed(residual)
        return self._state(residual, tokens)

    def _state(self, residual: torch.Tensor, tokens: Tokens) -> LayerState:
        slots, images, lora = tokens.slots, tokens.images, tokens.lora
        if images is not None:
            by_axis = rotary_rows_by_axis(self._rotary_tables[0], images.places, self._axes, self.dtype)
            return LayerState(residual, by_axis, slots, images=images, lora=lora)
        rotary, *local = (rotary_rows(table, tokens.positions, self.dtype) for table in self._rotary_tables)
        return LayerState(residual, rotary, slots, local[0] if local else None, lora=lora)

    def _embedded(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded = super()._embedded(input_ids)
        return embedded if self._embedding_scale == 1.0 else embedded.mul_(self._embedding_scale)

    def before_attention(
        self, index: int, state: LayerState, kv: KVCache, out: torch.Tensor | None = None, *, captured: bool
    ) -> torch.Tensor:
        """A layer up to its attention: the queries [T, num_heads, head_dim], in `out` if given."""
        layer = self.weights.layers[index]
        x = self._normed(state.rest, state.residual, layer.input_norm, state.rest_norm)
        state.rest = None
        if self.aux_hidden_states is not None:
            self.aux_hidden_states.keep(index - 1, state.residual)
        lora = state.lora
        begun = None if lora is None else lora.begin(index, "qkv", x)
        has_parts = lora is None and not self.config.wide_qk_norm  # nothing but the rotation reads them
        qkv = linear_overlapped(x, layer.qkv, layer.qkv_bias, has_parts=has_parts) if captured else None
        state.overlaps = qkv is not None
        if qkv is None:
            qkv = linear(x, layer.qkv, layer.qkv_bias)
        if lora is not None:
            lora.expand_(index, "qkv", begun, qkv)
        return self._rotated(index, state, qkv, kv, out)

    def _rotated(
        self, index: int, state: LayerState, qkv: torch.Tensor, kv: KVCache, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Store a layer's keys and values of qkv [T, n], or of parts of it: the queries, as `before_attention`."""
        config, eps = self.config, self.config.rms_norm_eps
        rotary = state.rotary
        if state.local_rotary is not None and config.is_local[index]:
            rotary = state.local_rotary
        norm = self._qk_norms[index]
        if config.wide_qk_norm and norm is not None:
            sizes = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            norm_parts = norm_parts_ if self.collectives is None else self.collectives.norm_parts_
            norm_parts(qkv, norm, sizes, eps)
            norm = None
        heads = qkv.view(*qkv.shape[:-1], -1, config.head_dim)
        kv.reach(index)
        keys, values, slots = kv.keys[index], kv.values[index], kv.slots_of(index, state.slots)
        return rotate_and_store(heads, config.num_heads, rotary, norm, eps, keys, values, slots, out)

    def after_attention(self, index: int, state: LayerState, x: torch.Tensor, *, captured: bool) -> None:
        """A layer from its attention's output x [T, num_heads, head_dim]."""
        layer, lora = self.weights.layers[index], state.lora
        x = x.flatten(1)
        shrunk = None if lora is None else lora.begin(index, "output", x, is_half=True)
        rest = self._added(x, layer.output, layer.output_bias, layer.output_norm, state, captured=captured)
        if lora is not None:
            lora.add_(index, "output", shrunk, rest, state.residual)
        x = self._normed(rest, state.residual, layer.post_attention_norm, layer.output_norm)
        if layer.experts is not None:
            state.rest = self._mixture(index, x, layer, layer.experts, lora)
        else:
            assert layer.gate_up is not None
            assert layer.down is not None
            x = gated(x, layer.gate_up, layer.gate_up_bias, self._gate, index, lora, captured=captured)
            shrunk = None if lora is None else lora.begin(index, "down", x, is_half=True)
            state.rest = self._added(x, layer.down, layer.down_bias, layer.down_norm, state, captured=captured)
            if lora is not None:
                lora.add_(index, "down", shrunk, state.rest, state.residual)
        state.rest_norm = layer.down_norm
        if state.images is not None:
            state.images.add(index, state.residual)

    def _mixture(
        self, index: int, x: torch.Tensor, layer: LayerWeights, experts: Experts, lora: LoraStep | None
    ) -> torch.Tensor:
        """What experts make of x; of several ranks, this one's part, [T, hidden]."""
        shared = None
        if layer.gate_up is not None and layer.down is not None:
            shared = fed(x, layer.gate_up, layer.down, index, lora)
        parts = mixture(x, experts, shared, None if lora is None else lora.of_experts(index))
        if self.collectives is None or parts.dim() == x.dim():
            return parts
        if self.weights.is_invariant:  # torch's sums on a GPU depend on the number of rows
            return add_rms_norm(parts, torch.zeros_like(x), None, 0.0, is_invariant=True)
        return parts.sum(0)

    def _added(
        self,
        x: torch.Tensor,
        matrix: Matrix,
        bias: torch.Tensor | None,
        norm: torch.Tensor | None,
        state: LayerState,
        *,
        captured: bool,
    ) -> torch.Tensor | None:
        """`linear_add`; before a norm, and of several ranks this one's part, all of it is left."""
        if self.collectives is None and norm is None:
            return linear_add(x, matrix, bias, state.residual, captured=captured)
        room = None if self.collectives is None else self.collectives.room(len(x))
        if room is not None and isinstance(matrix, torch.Tensor) and bias is None:
            return torch.mm(x, matrix.t(), out=room)
        return linear(x, matrix, bias)

    def _normed(
        self,
        rest: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        """`norm.add_rms_norm` of what `_added` left."""
        eps, ranks = self.config.rms_norm_eps, self.collectives
        if rest is None or ranks is None:
            return add_rms_norm(rest, residual, weight, eps, before, is_invariant=self.weights.is_invariant)
        if weight is None or before is not None:
            rest = ranks.sum(rest)
            return add_rms_norm(rest, residual, weight, eps, before, is_invariant=self.weights.is_invariant)
        return ranks.add_rms_norm(rest, residual, weight, eps)

    def finish(
        self, state: LayerState, x: torch.Tensor, wanted: torch.Tensor | None = None, *, captured: bool = False
    ) -> torch.Tensor:
        """The last layer from its attention, and the last norm, of wanted tokens: [N, hidden]."""
        if wanted is not None:
            state.residual, x = state.residual.index_select(0, wanted), x.index_select(0, wanted)
            state.images = None if state.images is None else state.images.of(wanted)
            state.lora = None if state.lora is None else state.lora.for_wanted()
        self.after_attention(self.config.num_layers - 1, state, x, captured=captured)
        return self._normed(state.rest, state.residual, self.weights.norm, state.rest_norm)

    def _attend(
        self, index: int, state: LayerState, query: torch.Tensor, kv: KVCache, attention: PlannedAttention
    ) -> torch.Tensor:
        keys, values, window = kv.keys[index], kv.values[index], self.config.windows[index]
        sinks = self.weights.layers[index].sinks
        if state.overlaps:
            return cast(GraphAttention, attention).run(query, keys, values, window, sinks=sinks, overlaps=True)
        return attention.run(query, keys, values, window, sinks=sinks)

    def _forward_single(self, state: LayerState, kv: KVCache, attention: PlannedAttention) -> torch.Tensor:
        """`forward` of one token on a GPU, whose products only stream their weights."""
        # imported only where a Triton kernel runs
        from sgl.kernels.layers.single_triton import project, project_add_, project_gated

        eps, is_gelu = self.config.rms_norm_eps, self._gate is gelu_and_mul
        layers, residual, ranks = self.weights.layers, state.residual, self.collectives

        def added(
            x: torch.Tensor,
            matrix: Matrix,
            bias: torch.Tensor | None,
            before: torch.Tensor | None,
            norm: torch.Tensor | None,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            """Add a product to the residual, normalised before. Returns what comes next, and the norm that it still
            needs."""
            if ranks is None and before is None:
                project_add_(x, matrix, bias, residual)
                return residual, norm
            return self._normed(project(x, None, eps, matrix, bias), residual, norm, before), None

        x, norm = residual, layers[0].input_norm
        norms = [*(layer.input_norm for layer in layers[1:]), self.weights.norm]
        for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
            if self.aux_hidden_states is not None:
                self.aux_hidden_states.keep(index - 1, residual)
            query = self._rotated(index, state, project(x, norm, eps, layer.qkv, layer.qkv_bias), kv)
            x = self._attend(index, state, query, kv, attention).flatten(1)
            x, norm = added(x, layer.output, layer.output_bias, layer.output_norm, layer.post_attention_norm)
            if layer.experts is not None:
                assert next_norm is not None
                x, norm = self._single_mixture(x, norm, layer, layer.experts, residual, next_norm)
                continue
            assert layer.gate_up is not None
            assert layer.down is not None
            x = project_gated(x, norm, eps, layer.gate_up, layer.gate_up_bias, is_gelu=is_gelu)
            x, norm = added(x, layer.down, layer.down_bias, layer.down_norm, next_norm)
        return x if norm is None else rms_norm(x, norm, eps)

    def _single_mixture(
        self,
        x: torch.Tensor,
        norm: torch.Tensor | None,
        layer: LayerWeights,
        experts: Experts,
        residual: torch.Tensor,
        next_norm: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`added` of `_forward_single` for experts."""
        from sgl.kernels.moe.single_triton import mixture_add_

        eps, ranks = self.config.rms_norm_eps, self.collectives
        shared = None
        if layer.gate_up is not None and layer.down is not None:
            shared = layer.gate_up, layer.down
        if ranks is None:
            mixture_add_(x, norm, eps, experts, shared, residual)
            return residual, next_norm
        part = torch.zeros_like(residual)
        mixture_add_(x, norm, eps, experts, shared, part)
        return ranks.add_rms_norm(part, residual, next_norm, eps), None

    @torch.inference_mode()
    def warm_up_gemms(self, most_rows: int, most_tokens: int) -> None:
        """Run a layer's products with almost every number of tokens, and the output's with up to most_rows, so that
        cuBLAS loads its kernels now. Loading one later blocks the host until the GPU is idle."""
        config, layers = self.config, self.weights.layers
        nothing = torch.empty(0, device=self.device)
        for num_tokens in warm_up_sizes(most_rows, most_tokens):
            hidden, attended = (
                torch.zeros(num_tokens, width, dtype=self.dtype, device=self.device)
                for width in (config.hidden_size, config.num_heads * config.head_dim)
            )
            linear(hidden, layers[0].qkv, layers[0].qkv_bias)
            for index in self.first_layers():
                state = LayerState(hidden, (nothing, nothing), nothing)
                self.after_attention(index, state, attended.unsqueeze(1), captured=False)
            if self.is_first and num_tokens <= most_rows:
                self.logits(hidden)

    def first_layers(self) -> list[int]:
        """The first layer of each kind: dense, and with experts."""
        kinds = [layer.experts is None for layer in self.weights.layers]
        return sorted({kinds.index(kind) for kind in kinds})

    def weights_changed(self) -> None:
        """Follow new values of the weights, in place."""
        for norm, layer in zip(self._qk_norms, self.weights.layers, strict=True):
            if norm is not None and (its := self._qk_norm(layer)) is not None:
                norm.copy_(its)

    def _qk_norm(self, layer: LayerWeights) -> torch.Tensor | None:
        """[num_heads + num_kv_heads, head_dim] for queries and keys together; flat where it is over all heads."""
        if layer.q_norm is None or layer.k_norm is None:
            return None
        if self.config.wide_qk_norm:
            return torch.cat((layer.q_norm, layer.k_norm))
        q_rows = layer.q_norm.expand(self.config.num_heads, -1)
        return torch.cat((q_rows, layer.k_norm.expand(self.config.num_kv_heads, -1)))
