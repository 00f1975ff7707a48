"""The tensor layout of grammars, vocabulary and places for the kernels that walk tokens.

A place is an automaton's state, a stack of frames (symbol, item count) and two counters. In state s, a byte leads
to `e = entries[s, classes[byte]]`: negative if not allowed, else the next state with flags. PUSH_BIT (`{` or `[`)
pushes (infos[s, 4 or 5], item count) and zeroes the item count. POP_BIT pops (symbol, count): the next state is
returns[symbol, e & TARGET_MASK], the item count is count. Otherwise the bits from OPERATION_SHIFT say: 1 count a
character, 2 zero the character count first, 4 count an item. A next state with GUARD_BIT is a guard: it stands for
infos[guard, 3] if its counter has reached its limit, else for infos[guard, 2], perhaps a guard again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

DEAD = -1
TARGET_MASK = (1 << 24) - 1
PUSH_BIT = 1 << 24
POP_BIT = 1 << 25
OPERATION_SHIFT = 26
GUARD_BIT = 1 << 29

MAX_SYMBOLS = 1 << 16
"""Most symbols of a grammar: frames are opened in one register."""
MAX_OPEN = 4
"""Tokens that leave more frames open at any time are not allowed."""
MAX_SAVED = 255
"""Nor are tokens with more items in a frame that they open, before they open another."""

ENDLESS = (1 << 31) - 2
"""The limit of a state that plain characters keep alive for ever."""
NOT_PLAIN = ENDLESS + 1
"""`reaches` of tokens that are not plain: beyond every limit."""


class VocabularyTensors(NamedTuple):
    """The tokens by rank, similar ones together. N ranks in blocks of `block`.

    *Plain* tokens are whole characters that a JSON string holds unescaped. They come first, short before long, then
    all others; each part is in byte order and padded to whole blocks with tokens of no bytes. In states that plain
    characters do not change, whole blocks need no walk.
    """

    block: int
    runs: torch.Tensor  # int16 [most, N]: a byte, plus 256 times its further repeats, at most 127
    lengths: torch.Tensor  # int32 [N], in runs
    token_ids: torch.Tensor  # int32 [N]
    reaches: torch.Tensor  # int32 [N] characters of plain tokens, NOT_PLAIN of others
    block_reaches: torch.Tensor  # int32 [N / block] the most of each block
    block_bytes: torch.Tensor  # int32 [N / block] the common first byte of a block, or -1
    plain_masks: torch.Tensor  # int32 [K + 1, ceil(V / 32)] by k: the plain tokens of at most k characters
    end_mask: torch.Tensor  # int32 [ceil(V / 32)] the tokens that end a text


@dataclass(frozen=True, slots=True)
class AutomatonTensors:
    """One automaton of S states; all contiguous."""

    entries: torch.Tensor  # int32 [S, C]
    classes: torch.Tensor  # int32 [256] the column of each byte
    infos: torch.Tensor
    """int32 [S, 8]: a guard's limit (-1: none), its counter (0 characters, 1 items), its targets below and at the
    limit; symbols pushed by `{` and `[`; characters up to which plain ones keep the state alive (-1: they do not);
    whether the text may end."""
    returns: torch.Tensor  # int32 [symbols, results]


@dataclass(frozen=True, slots=True)
class GrammarTensors:
    """Automata by number."""

    automata: list[AutomatonTensors]
    addresses: torch.Tensor
    """int64 [G, 6]: addresses of entries, infos, returns and classes; number of classes and results."""
    has_stacks: bool  # whether any of them pushes
    has_counters: bool


class Places(NamedTuple):
    """N places, with room for D frames each."""

    grammars: torch.Tensor  # int32 [N]
    states: torch.Tensor  # int32 [N]
    char_counts: torch.Tensor  # int32 [N]
    item_counts: torch.Tensor  # int32 [N]
    depths: torch.Tensor  # int32 [N]
    stacks: torch.Tensor  # int32 [N, D, 2] symbol, item count of the frame below
