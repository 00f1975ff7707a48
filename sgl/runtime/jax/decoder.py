"""The decoder of sgl's families in JAX, as a pure function of weights, KV pages and a step's tokens.

It computes what `sgl.runtime.model.decoder` defines, in the same dtypes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgl.runtime.batch import Int32Array
from sgl.runtime.jax.attention import Blocks, Window, attend
from sgl.runtime.jax.mesh import Devices
from sgl.runtime.jax.paged import attend_paged, is_served
from sgl.runtime.jax.weights import Arrays
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.families import FAMILIES

KV = list[tuple[jax.Array, jax.Array]]
"""By layer: keys and values, [num_pages, page_size, num_kv, head_dim]."""


class Inputs(NamedTuple):
    """A step of T tokens, which samples after S of them; padded tokens write to the dummy page."""

    token_ids: Int32Array  # [T]
    from_rows: Int32Array  # [T] the row whose last sampled token it is, or -1
    positions: Int32Array  # [T]
    slots: Int32Array  # [T] page * page_size + offset
    last: Int32Array  # [S]
    blocks: Blocks


class Decoder:
    """Functions to compile. config: of the whole model. is_paged: rows of one token read from their pages."""

    def __init__(self, config: ModelConfig, devices: Devices, dtype: Any) -> None:
        self._config = config
        self._devices = devices
        self._dtype = dtype
        self._is_gelu = FAMILIES[config.architecture].activation == "gelu"
        self._embedding_scale = jnp.asarray(config.embedding_scale, dtype)  # as rounded
        self.is_paged = is_served(dtype, config.head_dim)
        self._precision = "highest" if dtype == jnp.float32 else "default"

    def step(
        self, weights: Arrays, kv: KV, next_tokens: jax.Array, inputs: Inputs, *, is_whole: bool
    ) -> tuple[KV, jax.Array, jax.Array | None]:
        """Write keys and values into kv. Returns it, logits float32 [S, vocab], and if `is_whole` the hidden states
        after the last norm, [T, hidden]. next_tokens: int32 [max_rows + 1]."""
        config = self._config
        with jax.default_matmul_precision(self._precision):
            ids = jnp.where(inputs.from_rows >= 0, next_tokens[inputs.from_rows], inputs.token_ids)
            x = weights["embedding"][ids]
            x = x if config.embedding_scale == 1.0 else x * self._embedding_scale
            x = self._devices.keep(x)
            tables = [self._turns(table, inputs.positions) for table in weights["rotary"]]
            pages: KV = []
            for index, layer in enumerate(weights["layers"]):
                x, its = self._layer(index, layer, x, kv[index], tables, inputs)
                pages.append(its)
            hidden = self._norm(x if is_whole else x[inputs.last], weights["norm"])
            sampling = hidden[inputs.last] if is_whole else hidden
            return pages, self._logits(weights, sampling), hidden if is_whole else None

    def logits(self, weights: Arrays, hidden: jax.Array, index: jax.Array) -> jax.Array:
        """float32 [n, vocab] of hidden states [T, hidden] at index [n]."""
        with jax.default_matmul_precision(self._precision):
            return self._logits(weights, hidden[index])

    def _logits(self, weights: Arrays, hidden: jax.Array) -> jax.Array:
        head, cap = weights.get("lm_head", weights["embedding"]), self._config.logit_cap
        logits = jnp.einsum("th,vh->tv", hidden, head, preferred_element_type=jnp.float32)
        return logits if cap is None else jnp.tanh(logits / cap) * cap

    def _turns(self, table: jax.Array, positions: Int32Array) -> tuple[jax.Array, jax.Array]:
        cos, sin = jnp.split(table[positions].astype(self._dtype), 2, axis=-1)
        return cos[:, None], sin[:, None]

    def _layer(
        self,
        index: int,
        layer: Arrays,
        x: jax.Array,
        kv: tuple[jax.Array, jax.Array],
        tables: list[tuple[jax.Array, jax.Array]],
        inputs: Inputs,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        config, devices = self._config, self._devices
        normed = self._norm(x, layer.get("input_norm"))
        qkv = jnp.einsum("th,kgdh->tkgd", normed, layer["qkv"])
        qkv = devices.keep(qkv + layer["qkv_bias"] if "qkv_bias" in layer else qkv, 1)
        query, key, value = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1]
        axes = (-1, -2, -3) if config.wide_qk_norm else (-1,)
        query, key = self._norm(query, layer.get("q_norm"), axes), self._norm(key, layer.get("k_norm"), axes)
        turns = tables[-1] if config.local_rope is not None and config.is_local[index] else tables[0]
        query, key = _rotated(query, turns), _rotated(key, turns)[:, :, 0]
        keys, values = (
            devices.keep(_written(pages, inputs.slots, new), 2) for pages, new in zip(kv, (key, value), strict=True)
        )
        window = Window(config.attention_scale, config.score_cap, config.windows[index])
        read = self._read(query, keys, values, layer.get("sinks"), inputs, window)
        out = jnp.einsum("tkgd,hkgd->th", read, layer["output"])
        x = x + self._normed_sum(out, layer, "output")
        normed = self._norm(x, layer.get("post_attention_norm"))
        if "router" in layer:
            return x + self._norm(self._mixture(normed, layer), layer.get("down_norm")), (keys, values)
        return x + self._normed_sum(self._feed_forward(normed, layer), layer, "down"), (keys, values)

    def _read(
        self,
        query: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        sinks: jax.Array | None,
        inputs: Inputs,
        window: Window,
    ) -> jax.Array:
        blocks, positions = inputs.blocks, jnp.asarray(inputs.positions)
        if not self.is_paged or blocks.queries.shape[1] > 1:
            return attend(query, keys, values, positions, blocks, window, sinks)
        arrays = (
            (query, 1),
            (keys, 2),
            (values, 2),
            (sinks, 0),
            (positions, None),
            (jnp.asarray(blocks.pages), None),
        )
        return self._devices.apart(functools.partial(attend_paged, window=window), arrays, 1)

    def _normed_sum(self, out: jax.Array, layer: Arrays, name: str) -> jax.Array:
        """A product that devices sum up, with its bias and norm."""
        out = self._devices.keep(out)
        out = out + layer[f"{name}_bias"] if f"{name}_bias" in layer else out
        return self._norm(out, layer.get(f"{name}_norm"))

    def _feed_forward(self, x: jax.Array, layer: Arrays) -> jax.Array:
        both = jnp.einsum("th,cih->tci", x, layer["gate_up"])
        both = both + layer["gate_up_bias"] if "gate_up_bias" in layer else both
        gate = both[:, 0]
        gate = jax.nn.gelu(gate, approximate=True) if self._is_gelu else jax.nn.silu(gate)
        return jnp.einsum("ti,hi->th", gate * both[:, 1], layer["down"])

    def _mixture(self, x: jax.Array, layer: Arrays) -> jax.Array:
        """The sum of what experts make of x, each of its own tokens, side by side."""
        its = self._config.experts
        assert its is not None, "there is a router"
        scores = jnp.einsum("th,eh->te", x, layer["router"])
        scores = (scores + layer["router_bias"] if "router_bias" in layer else scores).astype(jnp.float32)
        shares, ids = jax.lax.top_k(jax.nn.softmax(scores[:, : its.num_experts], -1), its.top_k)
        if its.normalises:
            shares = shares / shares.sum(-1, keepdims=True)
        order = jnp.argsort(ids.reshape(-1), stable=True)
        tokens, expert = order // its.top_k, ids.reshape(-1)[order]
        sizes = jnp.bincount(expert, length=its.num_experts).astype(jnp.int32)

        def product(rows: jax.Array, name: str, bias: str) -> jax.Array:
            out = jax.lax.ragged_dot(rows, layer[name], sizes)
            return out + layer[bias][expert] if bias in layer else out

        rows = x[tokens]
        gate, up = product(rows, "gate", "gate_bias"), product(rows, "up", "up_bias")
        if its.clamped is None:
            gated = jax.nn.silu(gate) * up
        else:
            alpha, limit = its.clamped
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
            gated = gate * jax.nn.sigmoid(gate * alpha) * (up + 1)
        out = product(gated, "expert_down", "expert_down_bias").astype(jnp.float32)
        out = out * shares.reshape(-1)[order][:, None]
        summed = jnp.zeros(x.shape, jnp.float32).at[tokens].add(out)
        if "gate_up" in layer:
            shared = self._feed_forward(x, layer)
            summed = summed + shared * jax.nn.sigmoid(scores[:, its.num_experts :])
        return self._devices.keep(summed.astype(x.dtype))

    def _norm(self, x: jax.Array, weight: jax.Array | None, axes: tuple[int, ...] = (-1,)) -> jax.Array:
        """Root mean square over axes, in float32; unchanged without a weight."""
        if weight is None:
            return x
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(axes, keepdims=True) + self._config.rms_norm_eps)
        return (wide.astype(weight.dtype) * weight).astype(x.dtype)


def _rotated(heads: jax.Array, turns: tuple[jax.Array, jax.Array]) -> jax.Array:
    """[T, num_kv, n, head_dim] turned by [T, 1, head_dim / 2]."""
    cos, sin = (its[:, None] for its in turns)
    first, second = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), -1)


def _written(pages: jax.Array, slots: Int32Array, new: jax.Array) -> jax.Array:
    flat = pages.reshape(-1, *pages.shape[2:])
    return flat.at[slots].set(new.astype(pages.dtype)).reshape(pages.shape)
