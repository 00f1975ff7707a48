"""Attention of one token a row, read from its pages where they lie: a kernel in Pallas, compiled by Triton.

XLA alone copies each row's pages together first: it writes and reads again what need only be read once.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from sgl.runtime.jax.attention import Window

_KEYS = 64  # at once
_HEAD_DIMS = 16, 32, 64, 128, 256
_LEAST_HEADS = 16  # that tensor cores multiply at once
_PROGRAMS = 512  # that keep a device busy: fewer rows are split
_UNSEEN = -1e30  # an infinity's difference to itself would be no number
_LOG2_E = math.log2(math.e)


def is_served(dtype: Any, head_dim: int) -> bool:
    """On NVIDIA's GPUs from Ampere on, which XLA's Triton compiles for, in 16 bits: products of float32 are exact
    elsewhere. Triton's blocks are powers of two, and _KEYS of larger heads exceed some devices' shared memory."""
    if jax.default_backend() != "gpu" or jnp.dtype(dtype).itemsize != 2:
        return False
    generation = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")[0]
    return generation.isdigit() and int(generation) >= 8 and head_dim in _HEAD_DIMS


def attend_paged(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    sinks: jax.Array | None,
    positions: jax.Array,
    pages: jax.Array,
    *,
    window: Window,
) -> jax.Array:
    """What the last tokens of N rows read, [N, num_kv, group, head_dim] as query; see `attention.attend`. positions:
    int32 [N]. pages: int32 [N, P] of each row."""
    number, num_kv, group, dim = query.shape
    num_pages, page_size = keys.shape[:2]
    most = -(-pages.shape[1] * page_size // _KEYS)
    splits = min(most, max(1, _PROGRAMS // (number * num_kv)))
    num_slots = num_pages * page_size
    flat = pl.BlockSpec((num_slots, None, dim), lambda row, head, split: (0, head, 0))
    of_head = pl.BlockSpec((None, None, group, dim), lambda row, head, split: (row, head, 0, 0))
    inputs = {
        "position": (positions, pl.BlockSpec((1,), lambda row, head, split: (row,))),
        "pages": (pages, pl.BlockSpec((None, pages.shape[1]), lambda row, head, split: (row, 0))),
        "query": (query, of_head),
        "keys": (keys.reshape(num_slots, num_kv, dim), flat),
        "values": (values.reshape(num_slots, num_kv, dim), flat),
    }
    if sinks is not None:
        inputs["sinks"] = sinks, pl.BlockSpec((None, group), lambda row, head, split: (head, 0))
    shaped: Any = jax.ShapeDtypeStruct  # JAX leaves it untyped
    sums = shaped((splits, *query.shape[:3]), jnp.float32)
    of_split = pl.BlockSpec((None, None, None, group), lambda row, head, split: (split, row, head, 0))
    parts: list[jax.Array] = pl.pallas_call(
        functools.partial(
            _read, names=tuple(inputs), window=window, page_size=page_size, splits=splits, dtype=keys.dtype
        ),
        grid=(number, num_kv, splits),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[
            pl.BlockSpec((None, None, None, group, dim), lambda row, head, split: (split, row, head, 0, 0)),
            *(of_split, of_split),
        ],
        out_shape=[
            shaped((splits, *query.shape), query.dtype if splits == 1 else jnp.float32),
            *(sums, sums),
        ],
        interpret=jax.default_backend() == "cpu",
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        name="attend_paged",
    )(*(array for array, _ in inputs.values()))
    read, most_scores, totals = parts
    if splits == 1:
        return read[0]
    shares = totals * jnp.exp2(most_scores - most_scores.max(0))
    return (read * (shares / shares.sum(0))[..., None]).sum(0).astype(query.dtype)


def _read(*refs: Any, names: tuple[str, ...], window: Window, page_size: int, splits: int, dtype: Any) -> None:
    """Of a row, a head of keys and a part of the row's keys: what is read, the largest score, the sum of shares."""
    its = dict(zip(names, refs, strict=False))
    read_ref, most_ref, total_ref = refs[len(names) :]
    position = its["position"][0]
    group, dim = its["query"].shape
    size = max(_LEAST_HEADS, 1 << (group - 1).bit_length())
    heads = jnp.minimum(jnp.arange(size), group - 1)  # the last again and again: all of them write the same
    query = its["query"][heads]
    first = 0 if window.window is None else jnp.maximum(position + 1 - window.window, 0) // _KEYS
    number = position // _KEYS + 1 - first
    each = (number + splits - 1) // splits
    start = pl.program_id(2) * each

    def step(index: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        read, most, total = carry
        places = (first + start + index) * _KEYS + jnp.arange(_KEYS)
        inside = jnp.minimum(places, position)
        slots = its["pages"][inside // page_size] * page_size + inside % page_size
        keys, values = its["keys"][slots], its["values"][slots]
        scores = _product(query, keys, 1) * window.scale
        if window.cap is not None:
            scores = jnp.tanh(scores / window.cap) * window.cap
        seen = places <= position
        if window.window is not None:
            seen &= places > position - window.window
        scores = jnp.where(seen[None], scores * _LOG2_E, _UNSEEN)
        new = jnp.maximum(most, scores.max(1))
        shares, kept = jnp.exp2(scores - new[:, None]), jnp.exp2(most - new)  # some key of these is seen
        return read * kept[:, None] + _product(shares.astype(dtype), values, 0), new, total * kept + shares.sum(1)

    none = jnp.zeros((size, dim), jnp.float32)
    most, total = jnp.full((size,), _UNSEEN, jnp.float32), jnp.zeros((size,), jnp.float32)
    if "sinks" in its:  # a key without a value
        is_first = pl.program_id(2) == 0
        most = jnp.where(is_first, its["sinks"][heads].astype(jnp.float32) * _LOG2_E, most)
        total = jnp.where(is_first, 1.0, total)
    count = jnp.maximum(jnp.minimum(each, number - start), 0)
    read, most, total = jax.lax.fori_loop(0, count, step, (none, most, total))
    read_ref[heads] = (read / jnp.maximum(total, 1e-30)[:, None]).astype(read_ref.dtype)  # a part may have no key
    most_ref[heads] = most
    total_ref[heads] = total


def _product(left: Any, right: Any, axis: int) -> Any:
    """In float32, over the right one's axis."""
    return jax.lax.dot_general(left, right, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
