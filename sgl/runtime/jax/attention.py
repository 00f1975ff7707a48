"""Attention of a ragged step over paged keys and values.

A step's tokens are cut into blocks of one row each, and each block gathers the pages of its row: shapes then depend on
few numbers, all of them rounded up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sgl.kernels.attention.base import AttentionStep
from sgl.runtime.batch import Int32Array, Int64Array

_BLOCK = 64  # tokens of a row; 1 where no row has several
_MAP_BYTES = 1 << 30  # of keys, values and scores that are gathered at once
_LEAST_KEYS = 64
_LEAST_PAGED = 1024
_FINEST = 512


class Blocks(NamedTuple):
    """N blocks of C tokens over P pages, of a step of T tokens."""

    pages: Int32Array  # [N, P] of each block's row
    queries: Int32Array  # [N, C] which tokens it has; the last one repeats
    places: Int32Array  # [T] where each token lies among N * C


class Window(NamedTuple):
    """How a layer's scores are bounded."""

    scale: float
    cap: float | None
    window: int | None


def rounded(number: int, least: int = 8) -> int:
    """Up to a power of two, and above 512 to a multiple of that: so many shapes are compiled."""
    if number > _FINEST:
        return -(-number // _FINEST) * _FINEST
    return max(least, 1 << (number - 1).bit_length()) if number else least


def _rounded_keys(number: int) -> int:
    """Up to a power of two, above 512 to one of four sizes between two of them: all of it is copied and attended to."""
    if number <= _FINEST:
        return rounded(number, _LEAST_KEYS)
    step = 1 << (number - 1).bit_length() - 3
    return -(-number // step) * step


def blocks_of(step: AttentionStep, num_tokens: int, page_size: int, max_pages: int, *, is_paged: bool) -> Blocks:
    """The blocks of a step that is padded to num_tokens. max_pages: of a row. is_paged: rows of one token read from
    their pages, where padding costs nothing: fewer shapes are compiled."""
    q_lens = step.q_lens.astype(np.int64)
    size = 1 if int(q_lens.max()) == 1 else _BLOCK
    counts = -(-q_lens // size)
    number = num_tokens if size == 1 else rounded(int(counts.sum()))
    rows = np.repeat(np.arange(len(q_lens)), counts)
    firsts = np.cumsum(counts) - counts
    begins = (np.arange(len(rows)) - firsts[rows]) * size
    starts = np.cumsum(q_lens) - q_lens
    inside = np.minimum(begins[:, None] + np.arange(size), q_lens[rows][:, None] - 1)
    most = int(step.kv_lens.max())
    keys = max(_LEAST_PAGED, 1 << (most - 1).bit_length()) if is_paged and size == 1 else _rounded_keys(most)
    num_pages = min(-(-keys // page_size), max_pages)
    pages = np.zeros((number, num_pages), np.int32)
    its = step.page_table[rows, :num_pages]
    pages[: len(rows), : its.shape[1]] = its
    of_token: Int64Array = np.repeat(np.arange(len(q_lens)), q_lens)
    within = np.arange(len(of_token)) - starts[of_token]
    places = (firsts[of_token] + within // size) * size + within % size
    return Blocks(
        pages,
        _padded(starts[rows][:, None] + inside, number),
        _padded(places, num_tokens),
    )


def _padded(array: Int64Array, length: int) -> Int32Array:
    padded = np.zeros((length, *array.shape[1:]), np.int32)
    padded[: len(array)] = array
    return padded


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    blocks: Blocks,
    window: Window,
    sinks: jax.Array | None,
) -> jax.Array:
    """What tokens read, [T, num_kv, group, head_dim] as query. keys, values: [num_pages, page_size, num_kv, head_dim].
    positions: [T]. sinks: [num_kv, group]."""
    number, size = blocks.queries.shape
    length = blocks.pages.shape[1] * keys.shape[1]
    _, num_kv, group, dim = query.shape
    places = jnp.arange(length)

    def one(block: tuple[Any, Any, Any]) -> jax.Array:
        pages, q, at = block
        k, v = (its[pages].reshape(length, num_kv, dim) for its in (keys, values))
        scores = jnp.einsum("ckgd,lkd->kgcl", q, k, preferred_element_type=jnp.float32) * window.scale
        if window.cap is not None:
            scores = jnp.tanh(scores / window.cap) * window.cap
        seen = places <= at[:, None]
        if window.window is not None:
            seen &= places > at[:, None] - window.window
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:
            its = jnp.broadcast_to(sinks.astype(jnp.float32)[:, :, None, None], (*scores.shape[:3], 1))
            scores = jnp.concatenate((scores, its), -1)
        shares = jax.nn.softmax(scores, -1)[..., :length].astype(v.dtype)
        return jnp.einsum("kgcl,lkd->ckgd", shares, v)

    each = length * num_kv * (2 * dim * keys.dtype.itemsize + 8 * group * size)
    at_once = 1 << max(0, (_MAP_BYTES // each).bit_length() - 1)
    its = blocks.pages, query[blocks.queries], positions[blocks.queries]
    out = jax.vmap(one)(its) if at_once >= number else jax.lax.map(one, its, batch_size=at_once)
    return out.reshape(number * size, num_kv, group, dim)[blocks.places]
