"""Chooses tokens from logits in JAX: the same functions of seed, position and logits as in
`sgl.kernels.sampling.ops`, which defines them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgl.runtime.runner.row_settings import FREQUENCY, MIN_P, PRESENCE, REPETITION, TEMPERATURE, TOP_P

_TINY = 1e-30


class Drawn(NamedTuple):
    """What S positions are sampled by: arrays of the host, which a call brings to the device."""

    rows: Any  # int32 [S] request rows
    positions: Any  # int32 [S] of the tokens that are sampled
    floats: Any  # float32 [S, 6] columns of `RowSettings.floats`
    seeds: Any  # uint32 [S, 2] low and high half
    top_k: Any  # int32 [S] vocab: off
    forced: Any  # int32 [S] the only token possible, or -1
    mask_rows: Any  # int32 [S] row of the table of masks, or -1
    edits: tuple[Any, Any, Any]  # index into S, token id and value of additions to logits, [E]


def choose(
    logits: jax.Array,
    its: Drawn,
    masks: jax.Array | None,
    occurrences: jax.Array | None,
    *,
    draws: bool,
    cuts: bool,
) -> jax.Array:
    """int32 [S] of float32 logits [S, V]. masks: int32 [R, ceil(V / 32)]; None: no position has one. occurrences: int32
    [rows, V], see `penalize_`; None: no row has penalties. draws, cuts: whether any row draws, and by top-k, top-p or
    min-p."""
    if occurrences is not None:
        logits = _penalized(logits, occurrences[its.rows], its.floats)
    index, ids, values = its.edits
    if len(ids):
        logits = logits.at[index, ids].add(values)
    if masks is not None:
        logits = jnp.where(_allowed(masks, its.mask_rows, logits.shape[1]), logits, -jnp.inf)
    if draws:
        logits = _drawn(logits, its, cuts=cuts)
    chosen = jnp.argmax(logits, -1).astype(jnp.int32)
    return jnp.where(its.forced >= 0, its.forced, chosen)


def _penalized(logits: jax.Array, occurrences: jax.Array, floats: jax.Array) -> jax.Array:
    frequency, presence, repetition = (floats[:, each, None] for each in (FREQUENCY, PRESENCE, REPETITION))
    factor = jnp.where(occurrences > 0, repetition, 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    counts = (occurrences >> 1).astype(jnp.float32)
    return logits - counts * frequency - jnp.minimum(counts, 1) * presence


def _allowed(masks: jax.Array, rows: jax.Array, vocab_size: int) -> jax.Array:
    """bool [S, vocab_size]."""
    words = jnp.where((rows >= 0)[:, None], masks[rows], -1)
    bits = (words[:, :, None] >> jnp.arange(32)) & 1
    return bits.reshape(len(rows), -1)[:, :vocab_size] > 0


def _drawn(logits: jax.Array, its: Drawn, *, cuts: bool) -> jax.Array:
    """Scores whose largest is the draw."""
    temperature = its.floats[:, TEMPERATURE, None]
    is_drawn = temperature > 0
    scores = (logits - logits.max(-1, keepdims=True)) * (1.0 / jnp.where(is_drawn, temperature, 1.0))
    if cuts:
        scores = _cut(scores, its)
    noise = gumbel(its.seeds, its.positions, logits.shape[1])
    return scores + jnp.where(is_drawn, noise, 0.0)


def _cut(scores: jax.Array, its: Drawn) -> jax.Array:
    """With -inf for tokens that must not be drawn: see `ops.warp`."""
    vocab_size = scores.shape[1]
    falling = -jnp.sort(-scores, axis=-1)
    kth = jnp.take_along_axis(falling, jnp.clip(its.top_k - 1, 0, vocab_size - 1)[:, None], 1)
    least = jnp.where((its.top_k < vocab_size)[:, None], kth, -jnp.inf)
    top_p, min_p = its.floats[:, TOP_P, None], its.floats[:, MIN_P, None]
    sums = jnp.cumsum(jnp.where(falling >= least, jnp.exp(falling), 0.0), -1)
    target = jnp.maximum(sums[:, -1:] * top_p, _TINY)
    num_short = jnp.minimum((sums < target).sum(-1, keepdims=True), vocab_size - 1)
    nucleus = jnp.take_along_axis(falling, num_short, 1)
    least = jnp.maximum(least, jnp.where(top_p < 1, nucleus, -jnp.inf))
    least = jnp.maximum(least, jnp.log(min_p))
    return jnp.where(scores >= least, scores, -jnp.inf)


def gumbel(seeds: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """float32 [S, vocab_size]: `ops.gumbel`, bit by bit up to the logarithms."""
    low, high, place = (word.astype(jnp.uint32)[:, None] for word in (seeds[:, 0], seeds[:, 1], positions))
    keys = [_mixed(_mixed(_mixed(low + jnp.uint32(salt)) + high) + place) for salt in (0x243F6A88, 0x13198A2E)]
    ids = jnp.arange(vocab_size, dtype=jnp.uint32)
    bits = _mixed(ids + keys[0], keys[1]) & jnp.uint32(0x7FFFFFFF)
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _mixed(bits: jax.Array, key: jax.Array | None = None) -> jax.Array:
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x21F0AAAD)
    bits = bits ^ (bits >> 15)
    bits = (bits if key is None else bits + key) * jnp.uint32(0xD35A2D97)
    return bits ^ (bits >> 15)


def logprobs(
    logits: jax.Array, token_ids: jax.Array, given: jax.Array, *, top_k: int
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """See `ops.logprobs`; given: int32 [N, G], where G may be 0."""
    values = jax.nn.log_softmax(logits, -1)
    chosen = jnp.take_along_axis(values, token_ids[:, None], 1)[:, 0]
    top_values = top_ids = None
    if num_top := min(top_k, logits.shape[1]):
        top_values, top_ids = jax.lax.top_k(values, num_top)
    of_given = jnp.take_along_axis(values, given, 1) if given.shape[1] else None
    return chosen, top_values, top_ids, of_given
