"""A hybrid of gated delta nets and attention. Knows weights, caches and kernels but no requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch.nn import functional

from sgl.errors import ConfigError
from sgl.kernels.attention.base import AttentionBackend, AttentionShape
from sgl.kernels.gdn.ops import convolve, delta_rule, gated_norm, sigmoid_gated
from sgl.kernels.layers.activation import silu_and_mul
from sgl.kernels.layers.linear import Matrix, linear
from sgl.kernels.layers.qkv import rotate_and_store
from sgl.kernels.layers.rope import rotary_rows
from sgl.kernels.moe.mixture import mixture
from sgl.runtime.model.base import shape_of_heads
from sgl.runtime.model.config import DtypeName
from sgl.runtime.model.gdn import weights
from sgl.runtime.model.gdn.config import HybridConfig
from sgl.runtime.model.gdn.parts import check_parts, local
from sgl.runtime.model.gdn.states import StateCache, StateStep
from sgl.runtime.model.gdn.weights import AttentionWeights, DeltaWeights, DenseWeights, HybridWeights
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.loader import LoadFormat, resolve_dtype
from sgl.runtime.model.lora import LoraStep, fed, gated
from sgl.runtime.model.part import ModelPart, warm_up_sizes
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.rotary import rotary_table
from sgl.runtime.model.shard import WHOLE
from sgl.runtime.model.tokens import Tokens
from sgl.runtime.model.weights import matrix_tensors


def load_hybrid(
    config: HybridConfig,
    *,
    device: str | torch.device = "cpu",
    dtype: Literal["auto"] | DtypeName = "auto",
    load_format: LoadFormat = "auto",
    max_positions: int | None = None,
    ranks: Ranks | None = None,
) -> Hybrid:
    """The model of a config with its weights on the device; arguments as for `load_decoder`. Raises WeightsError, and
    ConfigError for another load_format or a model that cannot be cut."""
    shard = WHOLE if ranks is None else ranks.shard
    check_parts(config, shard)
    device = torch.device(device)
    torch_dtype = resolve_dtype(config, dtype, device)
    if load_format not in ("auto", "dummy", "safetensors"):
        raise ConfigError(f"load_format={load_format!r}: {config.path} is safetensors", option="load_format")
    if load_format == "dummy":
        its = weights.fill(config, torch_dtype, device, shard)
    else:
        its = weights.load(config, torch_dtype, device, shard)
    its.pack()
    return Hybrid(config, its, max_positions, ranks)


class Hybrid(ModelPart[HybridWeights]):
    """A loaded `RecurrentModel`, or one rank's part of it, which gives the same hidden states."""

    def __init__(
        self,
        config: HybridConfig,
        weights: HybridWeights,
        max_positions: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """See `ModelPart`."""
        super().__init__(config, weights, max_positions, ranks)
        self.whole_config, shard = config, self.shard
        stages = [local(config, replace(shard, stage=stage)) for stage in range(shard.stages)]
        self.config = config = stages[shard.stage]
        self.most_layers = max(its.num_layers for its in stages)
        self.windows: tuple[int | None, ...] = (None,) * config.num_layers
        self.captures = True
        self._rotary_table = _partial_table(config, self.max_positions, self.device)
        self.state_bytes = max(_state_bytes(its, self.dtype) for its in stages)
        self._places = [sum(config.attends[:layer]) for layer in range(len(config.attends))]  # in the KV cache

    def new_states(self, num_slots: int) -> StateCache:
        """See `RecurrentModel`."""
        config = self.config
        return StateCache(
            (config.value_heads, config.key_dim, config.value_dim),
            (config.conv_width - 1, config.conv_channels),
            len(config.attends) - config.num_layers,
            num_slots,
            self.dtype,
            self.device,
        )

    def attention_shape(self, page_size: int, kv_dtype: torch.dtype | None = None) -> AttentionShape:
        """See `Model`."""
        return shape_of_heads(self.config, page_size, self.dtype, kv_dtype, self.device)

    @torch.inference_mode()
    def forward(
        self, tokens: Tokens, kv: KVCache, attention: AttentionBackend, *, captured: bool = False
    ) -> torch.Tensor:
        """See `Model`."""
        return self._layers(self._embedded(tokens.ids), tokens, kv, attention, captured=captured)

    @torch.inference_mode()
    def forward_stage(
        self, tokens: Tokens, kv: KVCache, attention: AttentionBackend, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Decoder.forward_stage`."""
        residual = self._embedded(tokens.ids) if before is None else before
        return self._layers(residual, tokens, kv, attention, captured=False)

    def _layers(
        self,
        residual: torch.Tensor,
        tokens: Tokens,
        kv: KVCache,
        attention: AttentionBackend,
        *,
        captured: bool,
    ) -> torch.Tensor:
        """What this part makes of hidden states [T, hidden]: the wanted ones after the last norm, or all for the next
        stage."""
        config, lora, states = self.config, tokens.lora, tokens.states
        assert states is not None, "its runner has states"
        wanted = tokens.wanted if self.is_last else None
        rotary = rotary_rows(self._rotary_table, tokens.positions, self.dtype)
        rest: torch.Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            x = self._add_norm(rest, residual, layer.input_norm)
            place = self._places[index]
            if isinstance(layer.mixer, AttentionWeights):
                cache = kv.keys[place], kv.values[place]
                x = self._attend(layer.mixer, x, rotary, cache, tokens.slots, attention, index, lora)
            else:
                x = self._mix(layer.mixer, x, index - place, states, index, lora)
            if wanted is not None and index == len(config.attends) - 1:
                if not len(wanted):  # states, keys and values are written
                    return residual[:0]
                residual, x = residual.index_select(0, wanted), x.index_select(0, wanted)
                lora = None if lora is None else lora.for_wanted()
            output, bias = layer.mixer.output, _output_bias(layer.mixer)
            rest = self._add_product(x, output, bias, residual, index, "output", lora, captured=captured)
            x = self._add_norm(rest, residual, layer.post_norm)
            if isinstance(layer.mlp, DenseWeights):
                x = gated(x, layer.mlp.gate_up, None, silu_and_mul, index, lora, captured=captured)
                rest = self._add_product(x, layer.mlp.down, None, residual, index, "down", lora, captured=captured)
            else:
                shared = fed(x, layer.mlp.shared.gate_up, layer.mlp.shared.down, index, lora)
                rest = mixture(x, layer.mlp.experts, shared, None if lora is None else lora.of_experts(index))
        if self.is_last:
            return self._add_norm(rest, residual, self.weights.norm)
        if rest is not None:
            rest = rest if rest.dim() == 2 else rest.sum(0)
            residual += rest if self.collectives is None else self.collectives.sum(rest)
        return residual

    def _attend(
        self,
        layer: AttentionWeights,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        cache: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        attention: AttentionBackend,
        index: int,
        lora: LoraStep | None,
    ) -> torch.Tensor:
        """Attention before its output projection, [T, num_heads * head_dim]."""
        config = self.config
        width = config.num_heads * config.head_dim
        names = {"qkv": slice(-width), "gate": slice(-width, None)}
        qkvg = _adapted(x, layer.qkvg, layer.qkvg_bias, names, index, lora)
        qkv = torch.unflatten(qkvg[:, :-width], 1, (-1, config.head_dim))
        if not qkv.is_cuda:
            qkv = qkv.contiguous()
        query = rotate_and_store(qkv, config.num_heads, rotary, layer.norm, config.rms_norm_eps, *cache, slots)
        return sigmoid_gated(attention.run(query, *cache).flatten(1), qkvg[:, -width:])

    def _mix(
        self,
        layer: DeltaWeights,
        x: torch.Tensor,
        place: int,
        states: StateStep,
        index: int,
        lora: LoraStep | None,
    ) -> torch.Tensor:
        """A delta net before its output projection, [T, value_heads * value_dim]."""
        config, cache, rows = self.config, states.cache, states.rows
        heads = config.value_heads
        sizes = [config.conv_channels, heads * config.value_dim, heads, heads]
        names = {"inputs": slice(-2 * heads), "gates": slice(-2 * heads, None)}
        inputs = _adapted(x, layer.inputs, None, names, index, lora)
        qkv, gate, beta, decay = torch.split(inputs, sizes, 1)
        qkv = convolve(qkv, layer.convolution, cache.of_convolution[place], rows)
        read = delta_rule(qkv, (beta, decay), layer.a_log, layer.dt_bias, cache.of_rule[place], rows)
        return gated_norm(read, gate, layer.norm, config.rms_norm_eps)

    @torch.inference_mode()
    def warm_up_gemms(self, most_rows: int, most_tokens: int) -> None:
        """See `Model`."""
        for num_tokens in warm_up_sizes(most_rows, most_tokens):
            for matrix in self.weights.distinct_matrices():
                width = next(matrix_tensors(matrix)).shape[1]
                linear(torch.zeros(num_tokens, width, dtype=self.dtype, device=self.device), matrix, None)
            if self.is_first and num_tokens <= most_rows:
                self.logits(torch.zeros(num_tokens, self.config.hidden_size, dtype=self.dtype, device=self.device))


def _state_bytes(config: HybridConfig, dtype: torch.dtype) -> int:
    rule = config.value_heads * config.key_dim * config.value_dim * 4
    inputs = (config.conv_width - 1) * config.conv_channels * dtype.itemsize
    return (len(config.attends) - config.num_layers) * (rule + inputs)


def _adapted(
    x: torch.Tensor,
    matrix: Matrix,
    bias: torch.Tensor | None,
    names: dict[str, slice],
    index: int,
    lora: LoraStep | None,
) -> torch.Tensor:
    """`lora.adapted`, of several products in the same matrix, by their columns."""
    begun = {} if lora is None else {name: lora.begin(index, name, x) for name in names}
    out = linear(x, matrix, bias)
    if lora is not None:
        for name, its in begun.items():
            lora.expand_(index, name, its, out[:, names[name]])
    return out


def _output_bias(mixer: AttentionWeights | DeltaWeights) -> torch.Tensor | None:
    return mixer.output_bias if isinstance(mixer, AttentionWeights) else None


def _partial_table(config: HybridConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """`rotary_table` for whole heads, in `weights.rotary_order`: the rest of a head turns by nothing."""
    table = rotary_table(config.rope, config.rotary_dim, num_positions, device)
    cos, sin = table.chunk(2, -1)
    rest = (config.head_dim - config.rotary_dim) // 2
    return torch.cat((functional.pad(cos, (0, rest), value=1.0), functional.pad(sin, (0, rest))), -1)
