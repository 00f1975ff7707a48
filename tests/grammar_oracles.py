"""What the grammar tests share: vocabularies small and real, grammars of random shapes, and masks byte by byte."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from sgl.grammar import Matcher, Vocabulary
from sgl.grammar.automaton.nfa import Builder, KeyOrder
from sgl.grammar.automaton.pushdown import Automaton
from sgl.grammar.automaton.values import value_node
from sgl.grammar.matching.budget import Budget
from sgl.grammar.matching.masks import MaskCache
from sgl.grammar.text.json import WHITESPACE
from tests.grammar_shapes import FixedSchema

# Tokens that cross every kind of border: between keys, values and brackets, within characters and escapes.
PIECES = [
    b'{"', b'":', b'","', b'"}', b'"},', b"[[", b"]]", b"[{", b"}]", b'],"', b"}}", b"{}", b"[]", b"{}}", b'":{"',
    b"null", b"true", b"fals", b"name", b"ab", b'"a":', b"red", b'dish"', b"x1", b"12", b".5", b"e-", b"abc", b"dddd",
    b"aaaaaaaa", b"  ", b": ", b", ", b'\\"', b"\\u00", b'a"', b'"b', b"\xd0", b"\xb4\xd0\xb5", b"\xf0\x9f",
    b"\x98\x80a", b"\xe2\x82\xac\xe2", b"\xc3\xa9t\xc3\xa9", b"a\x00", b"1,2", b"1]", b'",', b'x"}]}', b'bbb"]',
    b"abcdabcdabcd", b"ab", b"0", b"</f>", b"<f", b"=add>{",
]  # fmt: skip


def piece_vocabulary() -> Vocabulary:
    """Every byte, `PIECES` (some of them twice), a special token, a token without bytes, and two that end the text."""
    tokens = [*(bytes([byte]) for byte in range(256)), *PIECES, None, b""]
    return Vocabulary([*tokens, b"</s>", None], [len(tokens), len(tokens) + 1], len(tokens) + 40)


def real_vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary.from_tokenizer(AutoTokenizer.from_pretrained(folder))


def shape_matcher(
    schema: FixedSchema, vocabulary: Vocabulary, key_order: KeyOrder = "schema", whitespace: str = "compact"
) -> Matcher:
    builder = Builder(WHITESPACE[whitespace], key_order)
    automaton = Automaton(builder, value_node(builder, schema, builder.end))
    masks = MaskCache(automaton, vocabulary, 1 << 26, max_seconds=60)
    return Matcher(automaton, vocabulary, masks, Budget(automaton, vocabulary))


def mask_of(matcher: Matcher, vocabulary: Vocabulary, remaining: int | None = None) -> npt.NDArray[np.bool_]:
    """bool [V], from the packed mask; nothing may be set behind the vocabulary."""
    row = np.full(vocabulary.words + 1, -1, np.int32)
    matcher.fill_mask(row[:-1], remaining)
    assert row[-1] == -1, "the mask ends with the row"
    bits = np.unpackbits(row[:-1].view(np.uint8), bitorder="little").astype(np.bool_)
    assert not bits[vocabulary.size :].any()
    return bits[: vocabulary.size]


def accepted_one_by_one(matcher: Matcher, vocabulary: Vocabulary) -> npt.NDArray[np.bool_]:
    """bool [V]: which tokens the matcher accepts, each tried on a copy."""
    return np.array([matcher.copy().accept(token_id) for token_id in range(vocabulary.size)])


def likely(matcher: Matcher, vocabulary: Vocabulary, allowed: npt.NDArray[np.bool_], rng: random.Random) -> int:
    """One of the allowed tokens, brackets and quotes more often than others."""
    ids = np.flatnonzero(allowed).tolist()
    weights = [6 if vocabulary.token_bytes[i][:1] in (b'"', b"{", b"}", b"[", b"]", b",") else 1 for i in ids]
    return int(rng.choices(ids, weights)[0])
