"""Piecewise CUDA graphs of steps with prompts: everything between two attention calls is one launch.

On a slow host, a small step takes longer to launch than to compute. Attention depends on the rows and is launched;
the rest depends only on the number of tokens. Padding tokens write to the dummy page, and nothing attends to them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import torch

from sgl.kernels.attention.base import GraphAttention
from sgl.kernels.staging import ALIGNMENT, Uploader, views_into
from sgl.runtime.batch import Int64Array
from sgl.runtime.model.aux_hidden_states import keeping
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.layer_state import LayerState
from sgl.runtime.model.tokens import Tokens
from sgl.runtime.runner.capture import CAPTURE_MODE, capturing

_LARGE_WORK = 1 << 38  # a layer's weights times tokens: a millisecond on an H200, in which launching keeps up
_MOST_TOKENS = 4096
_GRAPH_BYTES = 320 << 10  # of one layer's graph, on an H200
_NUM_ARRAYS = 6  # of a PackedStep, of which the slots may count twice,
_NUM_INPUTS = 3  # the first of which graphs read


def token_buckets(num_weights: int, most: int) -> list[int]:
    """Numbers of tokens to capture, at most `most`, for layers of num_weights. Few tokens cost what reading weights
    costs; above 256, at most an eighth is padding."""
    most = min(most, _MOST_TOKENS, max(64, _LARGE_WORK // num_weights // 128 * 128))
    sizes, size = [], 16
    while size < most:
        sizes.append(size)
        size += max(32 - size % 32, (1 << size.bit_length() - 1) // 8)
    return [*sizes, most]


def that_fit(sizes: list[int], config: ModelConfig, itemsize: int, free_bytes: int) -> list[int]:
    """The first sizes whose graphs fit into a quarter of the free memory; at least one."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    of_token = itemsize * (config.feed_forward_width + 6 * config.hidden_size + heads * config.head_dim)
    num_fit = 1
    while num_fit < len(sizes):
        num_bytes = sizes[num_fit] * of_token + (num_fit + 1) * config.num_layers * _GRAPH_BYTES
        if num_bytes > free_bytes // 4:
            break
        num_fit += 1
    return sizes[:num_fit]


class PromptGraphs:
    """Steps of at most `max_tokens` tokens; fewer if layers are so large that launching keeps up. Capture before
    the first step; each step, `place`, plan the attention, `run`."""

    def __init__(self, model: Decoder, kv: KVCache, attention: GraphAttention, max_tokens: int) -> None:
        self._model = model
        self._kv = kv
        self._attention = attention
        config = model.config
        of_layers = model.weights.num_multiplied - len(model.vocabulary) * config.hidden_size
        sizes = token_buckets(max(1, of_layers // config.num_layers), max_tokens)
        free_bytes, _ = torch.cuda.mem_get_info(model.device)
        self._buckets = that_fit(sizes, config, model.dtype.itemsize, free_bytes)
        most = self._buckets[-1]
        num_bytes = (_NUM_ARRAYS + 1) * (8 * most + ALIGNMENT)
        self._uploader = Uploader(model.device, num_bytes)
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=model.device)
        heads = most, config.num_heads, config.head_dim
        self._query = torch.zeros(heads, dtype=model.dtype, device=model.device)
        self._attended = torch.zeros(heads, dtype=model.dtype, device=model.device)
        self._residual = torch.zeros(most, config.hidden_size, dtype=model.dtype, device=model.device)
        self._pieces: dict[int, tuple[LayerState, list[torch.cuda.CUDAGraph]]] = {}

    def holds(self, num_tokens: int) -> bool:
        """Whether such a step is replayed; one token has its own kernels."""
        return 1 < num_tokens <= self._buckets[-1]

    def place(self, *step: Int64Array) -> list[torch.Tensor]:
        """Copy a PackedStep to where graphs read it; returns its arrays there, the first _NUM_INPUTS padded."""
        read = self._read(self._bucket(len(step[0])))
        for its, array in zip(read, step, strict=False):
            its[..., : len(step[0])] = array[..., : len(step[0])]
        arrays = *read, *step[_NUM_INPUTS:]
        self._uploader.upload_into(self._inputs, *arrays)
        return views_into(self._inputs, arrays)

    def run(self, num_tokens: int, wanted: torch.Tensor | None) -> torch.Tensor:
        """`Decoder.forward`'s hidden states for a step that is placed and planned."""
        state, pieces = self._pieces[self._bucket(num_tokens)]
        query, attended = self._query[:num_tokens], self._attended[:num_tokens]
        config, kv = self._model.config, self._kv
        for index, piece in enumerate(pieces):
            kv.reach(index)
            piece.replay()
            if index == len(pieces) - 1 and wanted is not None and not len(wanted):
                return self._residual[:0]
            caches, sinks = (kv.keys[index], kv.values[index]), self._model.weights.layers[index].sinks
            self._attention.run(query, *caches, config.windows[index], attended, sinks=sinks)
        last = LayerState(self._residual[:num_tokens], state.rotary, state.slots)
        return self._model.finish(last, attended, wanted)

    def drop(self) -> None:
        """Let go of what was recorded, until the next `capture`."""
        self._pieces.clear()

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every bucket, the largest first, whose memory others reuse."""
        self._inputs.zero_()  # what earlier steps left there may not be token ids where another bucket has them
        what = f"steps of up to {self._buckets[-1]} tokens with prompts"
        with keeping(self._model), capturing(what) as (pool, stream):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for bucket in reversed(self._buckets):
                    self._capture(bucket, pool)
            torch.cuda.empty_cache()  # memory of computations beside captures belongs to that stream

    def _capture(self, bucket: int, pool: Any) -> None:
        inputs = views_into(self._inputs, self._read(bucket))
        state = self._enter(inputs)
        num_varied = self._model.first_layers()[-1] + 2
        for index in range(min(num_varied, self._model.config.num_layers)):  # compiles what a capture may not
            self._piece(index, state)
        pieces = []
        for index in range(self._model.config.num_layers):
            # torch.cuda.graph would wait for the device and free memory each time.
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode=CAPTURE_MODE)
            try:
                if not index:
                    state = self._enter(inputs)
                self._piece(index, state)
            finally:
                graph.capture_end()
            pieces.append(graph)
        self._pieces[bucket] = state, pieces

    def _read(self, bucket: int) -> tuple[Int64Array, ...]:
        """Room for the arrays that graphs read, zeros."""
        pools = () if self._kv.windowed is None else (2,)
        return np.zeros(bucket, np.int64), np.zeros(bucket, np.int64), np.zeros((*pools, bucket), np.int64)

    def _enter(self, inputs: list[torch.Tensor]) -> LayerState:
        token_ids, positions, slots = inputs
        state = self._model.embed(Tokens(token_ids, positions, slots))
        state.residual = self._residual[: len(state.residual)].copy_(state.residual)
        return state

    def _piece(self, index: int, state: LayerState) -> None:
        """From the previous layer's attention to this one's."""
        num_tokens = len(state.residual)
        if index:
            self._model.after_attention(index - 1, state, self._attended[:num_tokens], captured=True)
        self._model.before_attention(index, state, self._kv, self._query[:num_tokens], captured=True)

    def _bucket(self, num_tokens: int) -> int:
        return self._buckets[bisect_left(self._buckets, num_tokens)]
