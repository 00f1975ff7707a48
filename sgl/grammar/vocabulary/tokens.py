"""The bytes of every token id, exactly as the tokenizer joins them.

Knows token ids, their bytes, the ids that end a text and the width of the logits; knows nothing of grammars. Built
once for a tokenizer (about a third of a second for 150,000 tokens) and shared by all grammars.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl.errors import TokenizerError
from sgl.grammar.vocabulary.special import is_text, spelled
from sgl.grammar.vocabulary.token_table import TokenTable, read_tokens
from sgl.grammar.vocabulary.trie import PlainTokens, Trie

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class Vocabulary:
    """Token id → bytes, with everything about them that does not depend on a grammar.

    Tokens without bytes (unused ids) are never allowed inside a constraint, special ones only where it asks for them:
    their bytes are no text, see `special.py`. The `eos_ids` are allowed exactly where a constraint accepts, and have no
    bytes whatever the tokenizer says.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes | None],
        eos_ids: Iterable[int],
        logits_width: int | None = None,
        special: Mapping[int, str] | None = None,
    ) -> None:
        """`token_bytes[i]` are the bytes of token i: None or b"" if it has none. `logits_width` is the number of
        columns of the model's logits, where that is more than the number of tokens. `special`: the names of special
        tokens, by id."""
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.special = dict(special or {})
        ended = set(self.eos_ids)
        tokens = [data if data and is_text(data) else b"" for data in token_bytes]
        for token_id, name in self.special.items():
            tokens[token_id] = spelled(name)
        tokens = [b"" if index in ended else data for index, data in enumerate(tokens)]
        self.size = max(len(tokens), logits_width or 0, (self.eos_ids[-1] + 1) if self.eos_ids else 0)
        """Number of columns of a mask: V."""
        if logits_width is not None and logits_width < self.size:
            raise TokenizerError(
                f"the logits have {logits_width} columns and the vocabulary reaches id {self.size - 1}"
            )
        self.words = (self.size + 31) // 32
        """Number of int32 in one row of a token bitmask."""
        self.token_bytes: list[bytes] = tokens + [b""] * (self.size - len(tokens))
        self.lengths: Int32Array = np.fromiter(map(len, self.token_bytes), np.int32, self.size)

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, *, eos_ids: Iterable[int] | None = None, logits_width: int | None = None
    ) -> Vocabulary:
        """The vocabulary of a fast transformers tokenizer, a `tokenizers.Tokenizer`, a tiktoken-like encoding, or a
        table that was read from one.

        `eos_ids` defaults to the tokenizer's own. Raises TokenizerError where the decoder does more than join
        tokens, or where a sample of tokens does not decode to its bytes.
        """
        if hasattr(tokenizer, "decode_single_token_bytes"):
            tokens, special, found_eos = _tiktoken_bytes(tokenizer)
        else:
            table = tokenizer if isinstance(tokenizer, TokenTable) else _read(tokenizer)
            tokens, special = _text_bytes(table), table.control
            eos = getattr(tokenizer, "eos_token_id", None)
            found_eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        return cls(tokens, found_eos if eos_ids is None else eos_ids, logits_width, special)

    @cached_property
    def digest(self) -> bytes:
        """Names the vocabulary: equal ones have equal digests."""
        state = hashlib.blake2b(digest_size=16)
        state.update(self.lengths.tobytes())
        state.update(b"".join(self.token_bytes))
        state.update(np.array(self.eos_ids, np.int64).tobytes())
        state.update(repr(sorted(self.special.items())).encode())
        return state.digest()

    @cached_property
    def missing_bytes(self) -> bytes:
        """The bytes of texts that are no token of their own."""
        singles = {data for data in self.token_bytes if len(data) == 1}
        return bytes(byte for byte in range(256) if is_text(each := bytes([byte])) and each not in singles)

    @property
    def is_byte_complete(self) -> bool:
        """Whether every byte of texts is a token of its own, so that any text can be produced."""
        return not self.missing_bytes

    def tokens_named_in(self, texts: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The special tokens that texts name: those that go on, and those that end a text."""
        if not self.special:
            return (), ()
        named = {name for text in texts for name in self._names.findall(text)}
        ended = {name for token_id, name in self.special.items() if token_id in self.eos_ids}
        return tuple(sorted(named - ended)), tuple(sorted(named & ended))

    @cached_property
    def _names(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.special.values(), key=len, reverse=True))))

    @cached_property
    def text_bytes(self) -> list[bytes]:
        """The bytes of every token without the special ones."""
        return [data if is_text(data) else b"" for data in self.token_bytes]

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """Bytes → the first token that has them."""
        found: dict[bytes, int] = {}
        for token_id, data in enumerate(self.token_bytes):
            if data:
                found.setdefault(data, token_id)
        return found

    @cached_property
    def lengths_by_beginning(self) -> dict[bytes, tuple[int, ...]]:
        """By their first two bytes, or the only one: the lengths of the tokens that begin so, 1 among them."""
        found: dict[bytes, set[int]] = {}
        for data in self.ids:
            found.setdefault(data[:2], {1}).add(len(data))
        return {beginning: tuple(sorted(lengths)) for beginning, lengths in found.items()}

    def work_out(self) -> None:
        """Work out all that grammars ask for, which takes about a second, before somebody waits for it."""
        _ = self.trie.nodes, self.plain_tokens.rest.nodes, self.duplicates, self.pairs
        _ = self.lengths_by_beginning, self.max_token_len, self._by_first_byte, self.is_byte_complete

    @cached_property
    def max_token_len(self) -> int:
        """Bytes of the longest token."""
        return int(self.lengths.max(initial=0))

    @cached_property
    def pairs(self) -> bytes:
        """[256 * 256] by two bytes, the first one times 256: nonzero if they stand side by side in a token."""
        found = np.zeros(1 << 16, np.bool_)
        texts = [data for data in self.token_bytes if data and is_text(data)]
        data = np.frombuffer(b"".join(texts), np.uint8).astype(np.uint16)
        is_within = np.ones(len(data), np.bool_)
        is_within[np.cumsum([len(text) for text in texts], dtype=np.int64) - 1] = False  # a token's last byte
        found[(data[:-1] << 8 | data[1:])[is_within[:-1]]] = True
        return found.tobytes()

    @cached_property
    def most_opened(self) -> int:
        """The most brackets that one token opens."""
        return max(data.count(b"{") + data.count(b"[") for data in (b"", *self.token_bytes))

    @cached_property
    def plain(self) -> BoolArray:
        """[V] tokens that are whole characters, none of which JSON escapes in a string."""
        whole = re.compile(rb'[^"\\\x00-\x1f]+').fullmatch
        found = (bool(whole(data)) and data.decode(errors="ignore").encode() == data for data in self.token_bytes)
        return np.fromiter(found, np.bool_, self.size)

    @cached_property
    def chars(self) -> Int32Array:
        """[V] number of characters that begin in a token: bytes that do not continue one."""
        data = np.frombuffer(b"".join(self.token_bytes), np.uint8)
        starts = np.concatenate(([0], np.cumsum((data & 0xC0) != 0x80)))
        ends = np.cumsum(self.lengths, dtype=np.int64)
        return np.asarray(starts[ends] - starts[ends - self.lengths], np.int32)

    @cached_property
    def trie(self) -> Trie:
        """All tokens, of those with equal bytes the first."""
        return Trie(self.token_bytes, list(self.ids.values()))

    def beginning_with(self, byte: int) -> Int32Array:
        """[words] the mask of the tokens that begin with a byte; not to be written to."""
        row: Int32Array = self._by_first_byte[byte]
        return row

    @cached_property
    def _by_first_byte(self) -> Int32Array:
        firsts = np.full(self.words * 32, -1, np.int16)
        has_bytes = np.flatnonzero(self.lengths)
        firsts[has_bytes] = np.frombuffer(b"".join(data[:1] for data in self.token_bytes if data), np.uint8)
        bits = (firsts == byte for byte in range(256))
        return np.stack([np.packbits(each, bitorder="little").view(np.int32) for each in bits])

    @cached_property
    def plain_tokens(self) -> PlainTokens:
        """The tokens that most strings may go on with, and the others."""
        return PlainTokens(self.token_bytes, self.plain, self.chars, self.trie)

    @cached_property
    def duplicates(self) -> Int32Array:
        """[n, 2] tokens with the bytes of an earlier one: that one, and the token."""
        others = set(np.flatnonzero(self.lengths).tolist()).difference(self.ids.values())
        return np.array([(self.ids[self.token_bytes[i]], i) for i in sorted(others)], np.int32).reshape(-1, 2)

    def __reduce__(self) -> tuple[object, ...]:
        return (Vocabulary, (self.token_bytes, self.eos_ids, self.size, self.special))


_MAX_CHECKED = 256


def _read(tokenizer: Any) -> TokenTable:
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "get_added_tokens_decoder"):
        raise TokenizerError(
            f"{type(tokenizer).__name__} has no byte table; a fast tokenizer or a tiktoken encoding does"
        )
    return read_tokens(backend, max_checked=_MAX_CHECKED)


def _text_bytes(table: TokenTable) -> list[bytes | None]:
    """The bytes of the tokens that stand for text."""
    tokens: list[bytes | None] = list(table.token_bytes)
    if table.unknown_id is not None:
        tokens[table.unknown_id] = None
    return tokens


def _tiktoken_bytes(encoding: Any) -> tuple[list[bytes | None], dict[int, str], list[int]]:
    special = {encoding.encode_single_token(name): name for name in encoding.special_tokens_set}
    result: list[bytes | None] = []
    for token_id in range(encoding.max_token_value + 1):
        try:
            data = None if token_id in special else encoding.decode_single_token_bytes(token_id)
        except KeyError:
            data = None
        result.append(data)
    eos = getattr(encoding, "eot_token", None)
    return result, special, [] if eos is None else [eos]
