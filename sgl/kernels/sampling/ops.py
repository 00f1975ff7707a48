"""Chooses tokens from logits: penalties, warping, seeded draws, log-probabilities.

Callers gather one value for each row. Output shapes depend only on input shapes, nothing waits for the device, and
a row's result depends only on that row. Comparisons use integer views, on a CPU ten times as fast as boolean masks
(32 x 32000 on one core: 0.3 ms against 3 ms a pass).
"""

from __future__ import annotations

import torch
from torch.nn import functional

CHUNK_BYTES = 1 << 27
CHUNK_BYTES_CPU = 1 << 22
"""Bytes of logits in a chunk of rows: bounds temporaries (about four times that), and on a CPU fits its cache."""

MAX_TOPK_SELECT = 256
"""Up to this k a CPU selects the k-th largest logit directly, above by bisection."""

_BLOCK = 128  # of the two-stage argmax
_KEY_BITS = 31
_INF_BITS = 0x7F800000  # of float32 +inf
_NEG_INF_BITS = -0x00800000  # of float32 -inf, as int32
_ONE_BITS = 0x3F800000
_TINY = 1e-30
LAST_ID = (1 << 24) - 1
LARGEST_KEY = 2**63 - 1


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, first: int = 0) -> torch.Tensor:
    """Standard Gumbel noise, a pure function of (seed, position, token id).

    seeds, positions: int64 [B]. first: the first of vocab_size token ids. Returns float32 [B, vocab_size], all finite.
    Counter-based: seed and position are
    hashed to two 32-bit keys a row; token id plus one key passes a two-round multiply-xorshift hash (constants: C.
    Wellons, hash-prospector, "lowbias32"), with the other key added between the rounds. 32-bit operations only, so
    that other kernels can repeat it bit by bit.
    """
    first_key, second = _row_keys(seeds, positions)
    ids = torch.arange(first, first + vocab_size, dtype=torch.int32, device=seeds.device)
    bits = ids + first_key
    bits = _mix_(bits, second)
    # uniform in (0, 1): 31 bits, and full float precision near 0, the tail where rare tokens win
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def penalize_(
    logits: torch.Tensor,
    occurrences: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Penalise the logits of tokens that occurred, in place: repetition first, then frequency and presence.

    logits: float32 [B, V]. occurrences: int32 [B, V], 2 for each time the token was generated, plus 1 if it is in
    the prompt. frequency, presence, repetition: float32 [B]; 0, 0 and 1 are neutral. Repetition divides positive
    and multiplies negative logits of tokens in prompt or output (CTRL, Keskar et al. 2019); the others count only
    the output.
    """
    seen = occurrences.clamp(max=1).to(torch.float32)
    factor = seen * repetition[:, None] + (1 - seen)
    negative = logits.clamp(max=0).mul_(factor)
    logits.clamp_(min=0).div_(factor).add_(negative)
    counts = occurrences >> 1
    logits.addcmul_(counts.to(torch.float32), frequency[:, None], value=-1)
    return logits.addcmul_(counts.clamp_(max=1).to(torch.float32), presence[:, None], value=-1)


def add_edits_(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Add values [E] to logits[rows, token_ids] in place; entries may repeat, -inf forbids a token.

    logits: float32 [B, V], contiguous. rows, token_ids: int64 [E]. values: float32 [E].
    """
    logits.view(-1).index_add_(0, rows * logits.shape[1] + token_ids, values)
    return logits


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """int64 [B]: the argmax of float32 [B, V]; the lowest id among equals."""
    num_rows, vocab_size = logits.shape
    if logits.is_cuda or vocab_size % _BLOCK or vocab_size == _BLOCK:
        return logits.argmax(-1)
    # on a CPU argmax is slow and amax fast: find the first block with the maximum, then search it
    blocks = logits.view(num_rows, vocab_size // _BLOCK, _BLOCK)
    best = blocks.amax(-1).argmax(-1)
    block = blocks.gather(1, best[:, None, None].expand(-1, 1, _BLOCK)).squeeze(1)
    return block.argmax(-1).add_(best, alpha=_BLOCK)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    max_top_k: int = 0,
) -> torch.Tensor:
    """Draw one token a row from the warped distribution by the Gumbel-max trick; temperature 0 takes the likeliest.

    logits: float32 [B, V]. temperature: float32 [B]. seeds, positions: int64 [B]. Others as for `warp`. Returns
    int64 [B].
    """
    drawn = []
    for rows in _chunks(logits):
        scores = warp(
            logits[rows],
            temperature[rows],
            top_k=None if top_k is None else top_k[rows],
            top_p=None if top_p is None else top_p[rows],
            min_p=None if min_p is None else min_p[rows],
            max_top_k=max_top_k,
        )
        noise = gumbel(seeds[rows], positions[rows], logits.shape[1])
        is_drawn = (temperature[rows] > 0).to(torch.float32)
        drawn.append(greedy(scores.addcmul_(noise, is_drawn[:, None])))
    return torch.cat(drawn)


def draw_keys(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor | None, positions: torch.Tensor, first: int
) -> torch.Tensor:
    """`sample` over a part of the vocabulary that starts at token `first`: int64 [B], whose largest over all parts
    names the token; see `drawn_ids`. seeds: None if all temperatures are 0.

    The upper 40 bits rank scores as float64 does, the lower 24 prefer lower ids among equals.
    """
    keys = []
    for rows in _chunks(logits):
        part, warmth = logits[rows], temperature[rows]
        top = part.amax(-1).clamp_(min=torch.finfo(torch.float32).min)
        is_drawn = warmth > 0
        scale = torch.where(is_drawn, warmth, 1.0).reciprocal_()
        scores = (part - top[:, None]).mul_(scale[:, None])
        if seeds is not None:
            noise = gumbel(seeds[rows], positions[rows], part.shape[1], first)
            scores.addcmul_(noise, is_drawn.to(torch.float32)[:, None])
        ids = greedy(scores)
        best = scores.gather(1, ids[:, None]).squeeze(1).double()
        keys.append(_ranked(best.add_(top.double().mul_(scale))).add_(LAST_ID - first - ids))
    return torch.cat(keys)


def chosen_keys(ids: torch.Tensor) -> torch.Tensor:
    """Keys above all that `draw_keys` gives, for int64 ids."""
    return LARGEST_KEY - ids


def drawn_ids(keys: torch.Tensor) -> torch.Tensor:
    """int64 token ids by the largest keys."""
    return LAST_ID - (keys & LAST_ID)


def _ranked(scores: torch.Tensor) -> torch.Tensor:
    """int64 that rank float64 scores, with the lower 24 bits 0."""
    bits = scores.view(torch.int64)
    return bits.bitwise_xor((bits >> 63) & 0x7FFFFFFFFFFFFFFF).bitwise_and_(~LAST_ID)


def warp(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    max_top_k: int = 0,
) -> torch.Tensor:
    """Logits over temperature, shifted to a row maximum of 0, with -inf for tokens that must not be drawn.

    logits: float32 [B, V]. temperature: float32 [B]; 0 keeps the logits' scale. Returns float32 [B, V], fresh.

    A token stays if all of these hold (None: off for all rows). The likeliest always stays; equal logits stay or go
    together.
    top_k: int64 [B]; fewer than top_k tokens are likelier. V or more: off. max_top_k bounds those
    that are not off, if the host knows a bound (0: unknown).
    top_p: float32 [B]; the likelier tokens have less than top_p of the mass that top_k leaves. 1: off.
    min_p: float32 [B]; its probability is at least min_p times the largest. 0: off.
    """
    is_drawn = temperature > 0
    scale = torch.where(is_drawn, temperature, 1.0).reciprocal_()[:, None]
    scores = (logits - logits.amax(-1, keepdim=True)).mul_(scale)
    if top_k is None and top_p is None and min_p is None:
        return scores
    keys = _keys(scores)
    least = torch.zeros(len(scores), dtype=torch.int32, device=scores.device)
    if top_k is not None:
        least = _kth_key(keys, top_k, max_top_k)
    if top_p is not None:
        mass = scores.exp()
        if top_k is not None:
            _drop_below_(mass.view(torch.int32), keys, least, 0)
        target = _row_sums(mass).mul_(top_p).clamp_(min=_TINY)  # the likeliest token alone has a mass of 1
        nucleus = _largest_key_reaching(keys, mass.view(torch.int32), target)
        least = torch.maximum(least, nucleus.mul_(top_p < 1))
    if min_p is not None:
        least = torch.maximum(least, _keys(min_p.log()))
    dropped = torch.zeros_like(keys)
    _drop_below_(dropped, keys, least, _NEG_INF_BITS)
    return scores.add_(dropped.view(torch.float32))


def logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, top_k: int, given: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Log-probabilities at N positions: of token_ids, of the top_k likeliest, and of given ids.

    logits: float32 [N, V]. token_ids: int64 [N]. given: int64 [N, G] or None. Returns float32 [N]; float32 [N, K]
    descending and their int32 ids [N, K], lower ids first among equals, where K = min(top_k, V), None if K is 0;
    float32 [N, G] or None.
    """
    num_top = min(top_k, logits.shape[1])
    chosen, top_values, top_ids, of_given = [], [], [], []
    for rows in _chunks(logits):
        some = logits[rows]
        if some.is_cuda and some.shape[1] % 4:  # torch rounds by where a row begins, in units of 16 bytes
            some = functional.pad(some, (0, -some.shape[1] % 4), value=-torch.inf)
        values = some.log_softmax(-1)[:, : logits.shape[1]]
        chosen.append(values.gather(1, token_ids[rows, None]).squeeze(1))
        if num_top:
            ids = _likeliest(values, num_top)
            top_values.append(values.gather(1, ids))
            top_ids.append(ids.to(torch.int32))
        if given is not None:
            of_given.append(values.gather(1, given[rows]))
    return (
        torch.cat(chosen),
        torch.cat(top_values) if top_values else None,
        torch.cat(top_ids) if top_ids else None,
        torch.cat(of_given) if of_given else None,
    )


def _chunks(logits: torch.Tensor) -> list[slice]:
    num_rows, vocab_size = logits.shape
    step = max(1, (CHUNK_BYTES if logits.is_cuda else CHUNK_BYTES_CPU) // (4 * vocab_size))
    return [slice(start, start + step) for start in range(0, max(1, num_rows), step)]


def _row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int32 [B, 1] hashes of (low and high half of the seed, position modulo 2^32)."""
    low, high, place = (word.to(torch.int32)[:, None] for word in (seeds, seeds >> 32, positions))  # truncates
    keys = []
    for salt in (0x243F6A88, 0x13198A2E):  # digits of pi: nothing up the sleeve
        key = _mix_(low + salt)
        key = _mix_(key.add_(high))
        keys.append(_mix_(key.add_(place)))
    return keys[0], keys[1]


def _mix_(bits: torch.Tensor, key: torch.Tensor | int = 0) -> torch.Tensor:
    """Hash int32 bits in place; wraps modulo 2^32 and shifts in zeros."""
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x21F0AAAD)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).add_(key).mul_(0xD35A2D97 - 2**32)
    return bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF))


def _keys(scores: torch.Tensor) -> torch.Tensor:
    """int32 in [0, 0x7F800000] that rank scores <= 0 like the floats; -inf has 0."""
    return scores.abs().view(torch.int32).neg_().add_(_INF_BITS)


def _drop_below_(bits: torch.Tensor, keys: torch.Tensor, least: torch.Tensor, dropped_bits: int) -> None:
    """Where keys [B, V] < least [B], set int32 bits [B, V] to dropped_bits, in place."""
    below = (keys - least[:, None]).bitwise_right_shift_(_KEY_BITS)  # -1 below, else 0
    if dropped_bits:
        bits.bitwise_or_(below.bitwise_and_(dropped_bits))
    else:
        bits.bitwise_and_(below.bitwise_not_())


def _kth_key(keys: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """int32 [B]: the top_k-th largest of each row of keys [B, V]; 0 where top_k >= V."""
    vocab_size = keys.shape[1]
    if 0 < max_top_k <= (vocab_size if keys.is_cuda else min(MAX_TOPK_SELECT, vocab_size)):
        largest = keys.topk(max_top_k, dim=-1).values
        kth = largest.gather(1, (top_k - 1).clamp_(max=max_top_k - 1)[:, None]).squeeze(1)
        return kth.mul_(top_k < vocab_size)
    ones = torch.full_like(keys, _ONE_BITS)
    return _largest_key_reaching(keys, ones, top_k.to(torch.float32)).mul_(top_k < vocab_size)


def _largest_key_reaching(keys: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """int32 [B]: the largest t such that the weights of keys >= t sum up to target; if none does, one that exceeds
    no key.

    keys: int32 [B, V]. weights: int32 [B, V], the bits of floats >= 0. target: float32 [B]. A GPU sorts (256 x
    128256 on an H200: 2.4 ms, 31 passes 10 ms), a CPU bisects over the bits of t (32 x 32000 on one core: 10 ms, a
    sort 69 ms); both are as exact as their sum.
    """
    if keys.is_cuda:
        falling, order = keys.sort(-1, descending=True)
        sums = weights.view(torch.float32).gather(1, order).cumsum_(-1)
        num_short = (sums < target[:, None]).sum(-1, keepdim=True).clamp_(max=keys.shape[1] - 1)
        return falling.gather(1, num_short).squeeze(1)
    found = torch.zeros_like(target, dtype=torch.int32)
    scratch = torch.empty_like(keys)
    for bit in reversed(range(_KEY_BITS)):
        probe = found + (1 << bit)
        torch.sub(probe[:, None] - 1, keys, out=scratch)
        scratch.bitwise_right_shift_(_KEY_BITS).bitwise_and_(weights)  # the weight where key >= probe, else 0
        reached = _row_sums(scratch.view(torch.float32)) >= target
        found.add_(reached.to(torch.int32), alpha=1 << bit)
    return found


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    """[B] sums of [B, V]. A CPU would split a single row between threads and round differently, so that row is
    summed twice."""
    if len(values) == 1 and not values.is_cuda:
        return values.expand(2, -1).sum(-1)[:1]
    return values.sum(-1)


def _likeliest(values: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [N, count]: ids of the largest of float32 [N, V], descending; lower ids first among equals."""
    vocab_size = values.shape[1]
    bits = values.view(torch.int32)
    ranks = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) << 32  # ordered like the floats
    ranks += torch.arange(vocab_size - 1, -1, -1, device=values.device)
    order = ranks.topk(count, dim=-1).values
    return vocab_size - 1 - (order & 0xFFFFFFFF)
