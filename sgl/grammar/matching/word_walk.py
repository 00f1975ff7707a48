"""Masks inside long lists of words: the words walk down the vocabulary's trie together.

An automaton has a state for every prefix that words have in common, too many to be worked out for one mask where the
words are thousands. So each word is walked down the trie of tokens instead, all of them one byte a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sgl.grammar.automaton.nfa import PLAIN, Lexeme, Node
from sgl.grammar.automaton.pushdown import Automaton
from sgl.grammar.regular.expr import EPSILON, Concat, Words
from sgl.grammar.vocabulary.trie import Trie

Int64Array = npt.NDArray[np.int64]
MANY_WORDS: Final = 64
"""From so many words on, walking them takes less time than working out their states."""


@dataclass(frozen=True, slots=True)
class WordWalk:
    """`nodes` of the trie that begin words; `ends`, among them those where a word has ended and tokens go on; `then`,
    the state behind all words; `longest`, the bytes of the longest word that are still to come; `nearest[i]`, what is
    left of the shortest word that goes through nodes[i]."""

    nodes: Int64Array
    ends: Int64Array
    then: int
    longest: int
    nearest: list[bytes]


def walk_words(automaton: Automaton, trie: Trie, state: int, *, with_nearest: bool) -> WordWalk | None:
    """The walk from a state that is nothing but a long list of words; None for any other. `nearest` is left out
    unless it is asked for."""
    only = automaton.subsets.only_list(state)
    if only is None:
        return None
    origin, lexeme = only
    assert isinstance(lexeme, Lexeme)
    whole, target = lexeme.expr, lexeme.target
    expr, tail = (whole.head, whole.tail) if isinstance(whole, Concat) else (whole, EPSILON)
    if not isinstance(expr, Words) or expr.high - expr.low < MANY_WORDS:
        return None
    if expr.nullable:  # a word has ended already, and what follows it is no word
        return None
    if not isinstance(target, Node) or target.operation != PLAIN:
        return None
    texts = expr.words[expr.low : expr.high]
    data = np.frombuffer(b"".join(texts), np.uint8)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    offsets = np.cumsum(lengths) - lengths
    which = np.arange(len(texts))
    nodes: Int64Array = np.zeros(len(texts), np.int64)
    depth = expr.depth
    found, ended = [], []
    nearest: list[bytes] = []
    while True:
        is_over = lengths[which] == depth
        ended.append(nodes[is_over])
        which, nodes = which[~is_over], nodes[~is_over]
        if not len(which):
            break
        nodes = trie.step(nodes, data[offsets[which] + depth])
        which, nodes = which[nodes >= 0], nodes[nodes >= 0]
        depth += 1
        if with_nearest:
            order = np.lexsort((lengths[which], nodes))
            is_first = np.diff(nodes[order], prepend=-1) != 0
            found.append(nodes[order][is_first])
            nearest += [texts[i][depth:] for i in which[order][is_first].tolist()]
        else:
            found.append(np.unique(nodes))
    ends = np.unique(np.concatenate(ended))
    ends = ends[(trie.end[ends] > ends + 1) & (ends > 0)]
    then = automaton.state((origin, thread) for thread in automaton.builder.enter(tail, target))
    none = np.zeros(0, np.int64)
    longest = int(lengths.max()) - expr.depth
    return WordWalk(np.concatenate([none, *found]), ends, then, longest, nearest)
