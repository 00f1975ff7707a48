"""The exact bytes of every token id, read from a tokenizer's vocabulary and from how its decoder joins tokens.

Knows the decoders whose text is the concatenation of tokens: byte-level BPE, and SentencePiece with or without
byte fallback. Everything else (WordPiece, CTC, word suffixes, no decoder) has no such table, nor has a tokenizer
whose own `decode` disagrees with the table. Called when a tokenizer is loaded; the detokenizer reads the result.
"""

from __future__ import annotations

import codecs
import json
import logging
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False, eq=False)
class TokenTable:
    """Token id → bytes, and the rules by which bytes become the text that the tokenizer's `decode` gives."""

    token_bytes: list[bytes]
    """b"" where no token has the id."""
    special_ids: frozenset[int]
    """The ids that skip_special_tokens leaves out."""
    first: Literal["keep", "strip", "drop"]
    """What becomes of the space before a text: kept; stripped; dropped with all spaces of the first token."""
    invalid: Literal["replace", "surrogateescape"]
    """How invalid bytes become U+FFFD: one for each longest start of a character, or one for each byte."""

    @cached_property
    def pieces(self) -> list[str | None]:
        """Id → text of the token, None where its bytes alone are not complete UTF-8."""
        return [_text_or_none(data) for data in self.token_bytes]

    @cached_property
    def visible_pieces(self) -> list[str | None]:
        """`pieces` where special tokens have no text."""
        pieces = list(self.pieces)
        for token_id in self.special_ids:
            pieces[token_id] = ""
        return pieces

    def bytes_of(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        """The token's bytes: none if it is skipped or does not exist."""
        if token_id >= len(self.token_bytes) or (skip_special_tokens and token_id in self.special_ids):
            return b""
        return self.token_bytes[token_id]

    def first_bytes(self, data: bytes) -> bytes:
        """What is left of the first bytes of a text that starts here."""
        if self.first == "strip":
            return data.removeprefix(b" ")
        return data.replace(b" ", b"") if self.first == "drop" else data

    def text_of(self, data: bytes, *, final: bool) -> tuple[str, bytes]:
        """Text of the complete characters of `data` (of all of it if `final`), and the bytes left over, which may
        become a character with what follows."""
        text, used = codecs.utf_8_decode(data, self.invalid, final)
        return text.translate(_ESCAPES), data[used:]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence.

        It is what the tokenizer's `decode` gives, but for one thing: where a run of byte tokens mixes characters
        with invalid bytes, the tokenizer turns all of the run into U+FFFD, and this only the invalid bytes.
        """
        parts = (self.bytes_of(token_id, skip_special_tokens=skip_special_tokens) for token_id in token_ids)
        visible = [part for part in parts if part]
        if not visible:
            return ""
        visible[0] = self.first_bytes(visible[0])
        return self.text_of(b"".join(visible), final=True)[0]


def token_table(backend: Backend) -> TokenTable | None:
    """The table of a tokenizer; None if its decoder does more than join tokens, or proves the table wrong.

    A few hundred ms for 150,000 tokens, which are all compared with the tokenizer's `decode`.
    """
    joins = _joins(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
    if joins is None:
        logger.info("the tokenizer's decoder has no token table: text is decoded in windows")
        return None
    added = backend.get_added_tokens_decoder()
    tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    tokens.update({token_id: token.content for token_id, token in added.items()})
    to_bytes = _byte_level if joins.byte_level else joins.sentencepiece
    table = TokenTable(
        token_bytes=[to_bytes(tokens[i]) if i in tokens else b"" for i in range(max(tokens, default=-1) + 1)],
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        first=joins.first,
        invalid="surrogateescape" if joins.byte_fallback else "replace",
    )
    byte_ids = {i for i, token in tokens.items() if joins.byte_fallback and _BYTE_TOKEN.fullmatch(token)}
    for token_ids in _samples(table, sorted(tokens), byte_ids):
        for skip in (False,) if table.special_ids.isdisjoint(token_ids) else (False, True):
            expected = backend.decode(token_ids, skip_special_tokens=skip)
            if table.decode(token_ids, skip_special_tokens=skip) != expected:
                logger.warning("the tokenizer decodes %s… not as its table: using windows", token_ids[:8])
                return None
    return table


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPES = {0xDC00 + byte: "\ufffd" for byte in range(0x80, 0x100)}
_SAMPLE_LEN = 64


@dataclass(frozen=True)
class _Joins:
    """How a decoder turns one token into bytes."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    first: Literal["keep", "strip", "drop"] = "keep"

    def sentencepiece(self, token: str) -> bytes:
        for old, new in self.replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else token.encode()


def _joins(decoder: Any) -> _Joins | None:
    """Read a decoder as `tokenizers` serialises it; None if it is none of those that only join tokens."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Joins(byte_level=True)
    if kinds == ["Metaspace"]:
        first: Literal["keep", "drop"] = "keep" if steps[0].get("prepend_scheme") == "never" else "drop"
        return _Joins(replacements=((steps[0]["replacement"], " "),), first=first)
    shape = re.fullmatch(r"((?:Replace )*)(ByteFallback )?(Fuse )?(?:(?<=Fuse )(Strip ))?", " ".join([*kinds, ""]))
    if shape is None:
        return None
    replacements = [step for step in steps if step["type"] == "Replace"]
    if any("String" not in step["pattern"] for step in replacements):
        return None
    strip = steps[-1] if shape[4] else None
    if strip is not None and (strip["content"], strip["start"], strip["stop"]) not in ((" ", 1, 0), (" ", 0, 0)):
        return None
    return _Joins(
        byte_fallback=shape[2] is not None,
        replacements=tuple((step["pattern"]["String"], step["content"]) for step in replacements),
        first="strip" if strip is not None and strip["start"] else "keep",
    )


def _byte_level(token: str) -> bytes:
    """The bytes that GPT-2's alphabet spells; a token with any other character stands for itself."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _alphabet() -> dict[int, int]:
    """Character → byte of byte-level BPE: printable Latin-1 is itself, the other bytes follow from U+0100 on, in
    rising order (Radford et al. 2019). Latin-1 characters outside of the alphabet are moved out of Latin-1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, 0x10FFFF) | {0x100 + i: byte for i, byte in enumerate(others)}


_ALPHABET = _alphabet()


def _text_or_none(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _samples(table: TokenTable, token_ids: list[int], byte_ids: set[int]) -> Iterator[list[int]]:
    """Sequences in which every token occurs in some company. Byte tokens come only in whole characters."""
    shuffled = [token_id for token_id in token_ids if token_id not in byte_ids]
    random.Random(0).shuffle(shuffled)
    for start in range(0, len(shuffled), _SAMPLE_LEN):
        yield shuffled[start : start + _SAMPLE_LEN]
    by_byte = {table.token_bytes[token_id]: token_id for token_id in byte_ids}
    for character in " ~é你😀":
        spelled = [by_byte.get(bytes([byte])) for byte in character.encode()]
        if known := [token_id for token_id in spelled if token_id is not None and len(by_byte) == 256]:
            yield [*known, *known, *shuffled[:2], *known]
