"""How grammars, the vocabulary and places lie in tensors, for the kernels that walk tokens.

A place is a state of an automaton, a stack of frames (symbol, item count) and two counters. One byte
leads from state s to `e = entries[s, classes[byte]]`: negative where it is not allowed, or the next state with flags
above it. PUSH_BIT pushes (infos[s, 4 or 5], item count) for `{` or `[` and sets the item count to 0. POP_BIT
pops (symbol, count): the next state is returns[symbol, e & TARGET_MASK], the item count is count. Otherwise the bits
from OPERATION_SHIFT on say: 1 one more character, 2 the character count starts at 0, 4 one more item. Where the next
state has GUARD_BIT, it is a guard, which stands for infos[guard, 3] if its counter has reached its limit, else for
infos[guard, 2]; those may be guards again.
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
"""More symbols than this in one grammar do not fit the register that frames are opened in."""
MAX_OPEN = 4
"""A token that leaves more frames open than this at any one time is not allowed."""
MAX_SAVED = 255
"""Nor is one with more items than this in a frame that it opens itself, before it opens another."""

ENDLESS = (1 << 31) - 2
"""The limit of a state that plain characters keep alive for ever."""
NOT_PLAIN = ENDLESS + 1
"""`reaches` of what is no plain token: beyond every limit."""


class VocabularyTensors(NamedTuple):
    """The tokens in an order in which those alike lie side by side: their rank. N ranks in blocks of `block`.

    *Plain* tokens are whole characters that a JSON string holds as they are. They come first, those of few characters
    before those of many, then all others, each part in order of bytes and filled up to whole blocks with tokens of no
    bytes. Where a state stays as it is over plain characters, whole blocks need no walk.
    """

    block: int
    runs: torch.Tensor  # int16 [most, N]: a byte, plus 256 times how often it comes again right behind, at most 127
    lengths: torch.Tensor  # int32 [N], in runs
    token_ids: torch.Tensor  # int32 [N]
    reaches: torch.Tensor  # int32 [N] characters of plain tokens, NOT_PLAIN of others
    block_reaches: torch.Tensor  # int32 [N / block] the most of each block
    block_bytes: torch.Tensor  # int32 [N / block] the first byte of all tokens of a block, -1 if it has several
    plain_masks: torch.Tensor  # int32 [K + 1, ceil(V / 32)] by k: the plain tokens of at most k characters
    end_mask: torch.Tensor  # int32 [ceil(V / 32)] the tokens that end a text


@dataclass(frozen=True, slots=True)
class AutomatonTensors:
    """One automaton of S states; all contiguous."""

    entries: torch.Tensor  # int32 [S, C]
    classes: torch.Tensor  # int32 [256] the column of each byte
    infos: torch.Tensor
    """int32 [S, 8]: limit of a guard (-1: it is none), its counter (0 characters, 1 items), where it leads below and
    at the limit; symbols pushed by `{` and `[`; up to how many characters plain ones keep the state alive (-1: they do
    not); whether the text may end."""
    returns: torch.Tensor  # int32 [symbols, results]


@dataclass(frozen=True, slots=True)
class GrammarTensors:
    """Automata by number."""

    automata: list[AutomatonTensors]
    addresses: torch.Tensor
    """int64 [G, 6]: where entries, infos, returns and classes of each begin; number of classes and results."""
    has_stacks: bool  # whether any of them pushes
    has_counters: bool


class Places(NamedTuple):
    """N places; D frames fit the stack of each."""

    grammars: torch.Tensor  # int32 [N]
    states: torch.Tensor  # int32 [N]
    char_counts: torch.Tensor  # int32 [N]
    item_counts: torch.Tensor  # int32 [N]
    depths: torch.Tensor  # int32 [N]
    stacks: torch.Tensor  # int32 [N, D, 2] symbol, item count of the frame below
