"""Vocabularies, addresses and places for the device, in the layout of `kernels.mask`. Callers number grammars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sgl.grammar.automaton import finished
from sgl.grammar.automaton.place import Place
from sgl.grammar.automaton.tables import COUNT_SHIFT
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.kernels.mask.layout import (
    ENDLESS,
    GUARD_BIT,
    NOT_PLAIN,
    OPERATION_SHIFT,
    AutomatonTensors,
    VocabularyTensors,
)

Int32Array = npt.NDArray[np.int32]
_FEW_CHARS = 16
"""Longer plain tokens get their own blocks: only these are walked where almost all others are known to be allowed."""

_MAX_RUN = 128
"""Most equal bytes in a 16-bit run."""

assert (COUNT_SHIFT, finished.GUARD_BIT, finished.FOR_EVER) == (OPERATION_SHIFT, GUARD_BIT, ENDLESS), (
    "arrays are copied"
)


def vocabulary_tensors(vocabulary: Vocabulary, device: torch.device, block: int = 128) -> VocabularyTensors:
    """A vocabulary in blocks of `block` tokens, a multiple of 32."""
    chars, plain, lengths = vocabulary.chars, vocabulary.plain, vocabulary.lengths
    by_bytes = sorted(np.flatnonzero(lengths).tolist(), key=vocabulary.token_bytes.__getitem__)
    order = np.array(by_bytes, np.int64)
    is_short = plain[order] & (chars[order] <= _FEW_CHARS)
    parts = [order[is_short], order[plain[order] & ~is_short], order[~plain[order]]]
    ranks = np.concatenate([_filled(part, block) for part in parts if len(part)])  # -1 pads
    is_token = ranks >= 0
    ids = np.where(is_token, ranks, 0)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    first_runs, runs = _runs(np.frombuffer(b"".join(vocabulary.token_bytes), np.uint8), starts)
    rank_lengths = np.where(is_token, first_runs[ids + 1] - first_runs[ids], 0).astype(np.int32)
    rank_runs = np.zeros((int(rank_lengths.max(initial=1)), len(ranks)), np.int16)
    for position, row in enumerate(rank_runs):
        has_run = np.flatnonzero(rank_lengths > position)
        row[has_run] = runs[first_runs[ids[has_run]] + position]
    reaches = np.where(is_token, np.where(plain[ids], chars[ids], NOT_PLAIN), 0).astype(np.int32)
    firsts = (rank_runs[0] & 0xFF).astype(np.int32).reshape(-1, block)
    firsts = np.where(is_token.reshape(-1, block), firsts, firsts[:, :1])
    most_chars = int(chars[plain].max(initial=0))
    plain_up_to = [plain & (chars <= most) for most in range(most_chars + 1)]
    ends = np.zeros(vocabulary.size, np.bool_)
    ends[list(vocabulary.eos_ids)] = True

    def moved(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return VocabularyTensors(
        block=block,
        runs=moved(rank_runs),
        lengths=moved(rank_lengths),
        token_ids=moved(ids.astype(np.int32)),
        reaches=moved(reaches),
        block_reaches=moved(reaches.reshape(-1, block).max(1)),
        block_bytes=moved(np.where((firsts == firsts[:, :1]).all(1), firsts[:, 0], -1).astype(np.int32)),
        plain_masks=moved(_packed(np.stack(plain_up_to))),
        end_mask=moved(_packed(ends[None])[0]),
    )


def addresses_of(automata: Sequence[AutomatonTensors]) -> npt.NDArray[np.int64]:
    """`GrammarTensors.addresses`, on the host."""
    addresses = [
        [
            *(t.data_ptr() for t in (one.entries, one.infos, one.returns, one.classes)),
            one.entries.shape[1],
            one.returns.shape[1],
        ]
        for one in automata
    ]
    return np.array(addresses, np.int64).reshape(-1, 6)


def places_arrays(chosen: Sequence[tuple[int, Place]], max_depth: int) -> list[Int32Array]:
    """The fields of Places: each place with its grammar's number, and at most max_depth frames."""
    columns = np.array([(n, p.state, p.char_count, p.item_count) for n, p in chosen], np.int32).reshape(-1, 4)
    depths = np.zeros(len(chosen), np.int32)
    stacks = np.zeros((len(chosen), max_depth, 2), np.int32)
    for i, (_, place) in enumerate(chosen):
        if place.stack is not None:
            frames = _frames_of(place)
            depths[i] = len(frames)
            stacks[i, : len(frames)] = frames
    return [*columns.T.copy(), depths, stacks]


def _frames_of(place: Place) -> list[tuple[int, int]]:
    """Symbol and item count of frames, outermost first."""
    frames = []
    frame = place.stack
    while frame is not None:
        frames.append((frame.symbol, frame.item_count))
        frame = frame.parent
    return frames[::-1]


def _runs(text: npt.NDArray[np.uint8], starts: Int32Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int16]]:
    """The runs of equal bytes of all tokens, and the start of each token's, [V + 1]."""
    begins = np.ones(len(text) + 1, np.bool_)
    begins[1:-1] = text[1:] != text[:-1]
    begins[starts] = True
    at = np.flatnonzero(begins)
    lengths = np.diff(at)
    pieces = -(-lengths // _MAX_RUN)  # of runs longer than _MAX_RUN
    index = np.repeat(np.arange(len(lengths)), pieces)
    is_last = np.ones(len(index), np.bool_)
    is_last[:-1] = index[1:] != index[:-1]
    repeats = np.where(is_last, (lengths - 1)[index] % _MAX_RUN, _MAX_RUN - 1)
    first = np.concatenate(([0], np.cumsum(pieces)))
    return first[np.searchsorted(at, starts)], (text[at[:-1]][index] | repeats << 8).astype(np.int16)


def _filled(part: npt.NDArray[np.int64], block: int) -> npt.NDArray[np.int64]:
    return np.concatenate([part, np.full(-len(part) % block, -1)])


def _packed(allowed: npt.NDArray[np.bool_]) -> Int32Array:
    """bool [N, V] → int32 [N, ceil(V / 32)]."""
    padded = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), np.bool_)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)
