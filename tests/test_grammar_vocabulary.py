"""Token bytes are what the tokenizer joins; those of special tokens are no text; the trie holds every token once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sgl.errors import TokenizerError
from sgl.grammar import Vocabulary
from sgl.grammar.vocabulary.token_table import read_tokens
from sgl.grammar.vocabulary.trie import Trie
from sgl.runtime.text.tokenizer import token_table
from tests.grammar_oracles import PIECES
from tests.tiny_tokenizers import EOS, WITH_TABLE, WITHOUT_TABLE, WORDS

TEXTS = [WORDS, "the cat", " the  hat\n\n", "naïve 你好 😀", "x", '{"key": [1, 2]}']


def joined(vocabulary: Vocabulary, ids: list[int]) -> bytes:
    return b"".join(vocabulary.text_bytes[i] for i in ids)


@pytest.mark.parametrize("name", WITH_TABLE)
def test_bytes_join_to_what_the_tokenizer_decodes(name: str) -> None:
    tokenizer = WITH_TABLE[name]()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, eos_ids=[])
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(ids).encode()
        assert joined(vocabulary, ids) in (decoded, b" " + decoded)


@pytest.mark.parametrize("name", WITHOUT_TABLE)
def test_a_tokenizer_that_does_more_than_join_is_refused(name: str) -> None:
    with pytest.raises(TokenizerError, match="join tokens"):
        Vocabulary.from_tokenizer(WITHOUT_TABLE[name]())


@pytest.mark.parametrize("name", WITH_TABLE)
def test_a_table_that_was_read_gives_the_vocabulary_of_its_tokenizer(name: str) -> None:
    tokenizer = WITH_TABLE[name]()
    assert Vocabulary.from_tokenizer(read_tokens(tokenizer)).digest == Vocabulary.from_tokenizer(tokenizer).digest


@pytest.mark.parametrize("replacement", ["xy", ""])
def test_a_decoder_that_replaces_across_tokens_is_refused(replacement: str) -> None:
    tokenizer: Tokenizer = WITH_TABLE["characters"]()
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Replace(" ", replacement)]
    tokenizer.decoder = decoders.Sequence(steps)
    with pytest.raises(TokenizerError, match="join tokens"):
        Vocabulary.from_tokenizer(tokenizer)
    assert token_table(tokenizer) is None


def test_something_without_a_table_is_refused() -> None:
    with pytest.raises(TokenizerError, match="no byte table"):
        Vocabulary.from_tokenizer(object())


def test_bytes_of_special_tokens_are_no_text_and_the_end_is_the_tokenizers_own() -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=WITH_TABLE["byte fallback"](), eos_token=EOS)
    vocabulary = Vocabulary.from_tokenizer(fast, logits_width=1000)
    assert vocabulary.eos_ids == (2,)
    assert vocabulary.size == 1000
    assert vocabulary.words == 32
    assert vocabulary.token_bytes[:3] == [b"", b"\xff<s>\xfe", b""]
    assert vocabulary.text_bytes[:4] == [b"", b"", b"", b"\x00"]
    assert vocabulary.is_byte_complete


def test_added_tokens_stand_for_their_text_unless_they_control_the_model() -> None:
    tokenizer: Tokenizer = WITH_TABLE["byte level"]()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    assert vocabulary.token_bytes[tokenizer.token_to_id("<|file|>")] == b"\xff<|file|>\xfe"
    assert vocabulary.token_bytes[tokenizer.token_to_id("    ")] == b"    "
    assert vocabulary.token_bytes[tokenizer.token_to_id("<|im_end|>")] == b"\xff<|im_end|>\xfe"
    assert vocabulary.tokens_named_in(["a<|im_end|>", "<|file|>s"]) == (("<|file|>", "<|im_end|>"), ())


def test_logits_narrower_than_the_vocabulary_are_refused() -> None:
    with pytest.raises(TokenizerError, match="columns"):
        Vocabulary([b"a", b"b"], [], 1)


class Encoding:
    """As tiktoken's: a gap in the ids, and special tokens by name."""

    special_tokens_set = frozenset({"<|end|>"})
    max_token_value = 4
    eot_token = 4

    def encode_single_token(self, name: str) -> int:
        return {"<|end|>": 4}[name]

    def decode_single_token_bytes(self, token_id: int) -> bytes:
        return {0: b"a", 1: b"\xc3", 3: b"\xa9b", 4: b"<|end|>"}[token_id]


def test_tiktoken_encodings_are_read() -> None:
    vocabulary = Vocabulary.from_tokenizer(Encoding())
    assert vocabulary.token_bytes == [b"a", b"\xc3", b"", b"\xa9b", b""]
    assert vocabulary.eos_ids == (4,)


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5", "mistral-v3"])
def test_real_tokenizers_join_to_what_they_decode(unpacked: Callable[[str], Path], name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(unpacked("tokenizers") / name)
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    assert vocabulary.is_byte_complete or name == "mistral-v3"
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert joined(vocabulary, ids) in (text.encode(), b" " + text.encode())
    special = set(tokenizer.all_special_ids)
    assert not any(vocabulary.text_bytes[i] for i in special)


def test_equal_vocabularies_have_equal_digests() -> None:
    one, same = Vocabulary([b"a", b"bc"], [0]), Vocabulary([b"a", b"bc"], [0])
    assert one.digest == same.digest
    assert one.digest == pickle.loads(pickle.dumps(one)).digest
    assert (
        len({one.digest, *(Vocabulary(t, e).digest for t, e in [([b"ab", b"c"], [0]), ([b"a", b"bc"], [1])])}) == 3
    )


def test_bytes_that_no_text_has_are_none_of_a_token() -> None:
    vocabulary = Vocabulary([b"a", b"\xff", b"a\xfe", b"b"], [], special={3: "<b>"})
    assert vocabulary.token_bytes == [b"a", b"", b"", b"\xff<b>\xfe"]
    assert vocabulary.digest != Vocabulary([b"a", b"", b"", b"\xff<b>\xfe"], []).digest


SOME_BYTES = st.binary(max_size=5).map(lambda data: data.replace(b"\xff", b"").replace(b"\xfe", b"\x80"))


@given(st.lists(st.one_of(st.sampled_from(PIECES), SOME_BYTES, st.text(max_size=3).map(str.encode))))
def test_the_trie_holds_every_token_where_its_bytes_lead(tokens: list[bytes]) -> None:
    vocabulary = Vocabulary(tokens, [])
    first = {data: i for i, data in reversed(list(enumerate(tokens))) if data}
    check_trie(vocabulary.trie, first)
    check_trie(vocabulary.plain_tokens.rest, {data: i for data, i in first.items() if not vocabulary.plain[i]})
    assert {(int(i), int(j)) for i, j in vocabulary.duplicates} == {
        (first[data], i) for i, data in enumerate(tokens) if data and i != first[data]
    }
    for i, data in enumerate(tokens):
        plain = data.decode(errors="ignore").encode() == data and not set(data) & {*range(32), 0x22, 0x5C}
        assert vocabulary.plain[i] == (plain and bool(data))


def check_trie(trie: Trie, tokens: dict[bytes, int]) -> None:
    """Its nodes are the beginnings of the tokens, in order."""
    texts = sorted({data[:end] for data in tokens for end in range(len(data) + 1)} | {b""})
    assert len(trie) == len(texts)
    for node, text in enumerate(texts):
        below = [other for other in range(node, len(texts)) if texts[other].startswith(text)]
        assert below == list(range(node, trie.end[node]))
        depth = len(text)
        assert trie.depth[node] == depth
        assert trie.token[node] == tokens.get(text, -1)
        assert text[-1:] in (b"", bytes([trie.byte[node]]))
        children = {text: child for child, text in enumerate(texts) if child in below and len(text) == depth + 1}
        found = trie.step(np.full(256, node), np.arange(256, dtype=np.uint8))
        assert found.tolist() == [children.get(text + bytes([byte]), -1) for byte in range(256)]


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=5), st.text(max_size=3).map(str.encode))))
def test_tokens_that_are_not_plain_are_entered_behind_their_plain_characters(tokens: list[bytes]) -> None:
    vocabulary = Vocabulary(tokens, [])
    plain = vocabulary.plain_tokens
    rest = plain.rest
    found = []
    for node, end, chars in plain.exits.tolist():
        assert end == rest.end[node]
        assert rest.depth[node] == chars + 1
        for token in rest.token[node:end][rest.token[node:end] >= 0].tolist():
            data = tokens[token]
            assert all(0x20 <= byte < 0x80 and byte not in (0x22, 0x5C) for byte in data[:chars])
            assert data[chars] < 0x20 or data[chars] >= 0x80 or data[chars] in (0x22, 0x5C)
            found.append(token)
    assert sorted(found) == sorted(rest.ids.tolist())
    for count in range(len(plain.tokens) + 1):
        bits = np.unpackbits(plain.row(count).view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(bits)) == set(plain.tokens[:count])
    assert [int(vocabulary.chars[i]) for i in plain.tokens] == sorted(plain.chars.tolist())
