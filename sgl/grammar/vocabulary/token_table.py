"""The exact bytes of every token id, read from a tokenizer's vocabulary and from how its decoder joins tokens.

Knows the decoders whose text is the concatenation of tokens: byte-level BPE, and SentencePiece with or without
byte fallback. Everything else (WordPiece, CTC, word suffixes, no decoder) has no such table, nor has a tokenizer
whose own `decode` disagrees with the table. Read when a tokenizer is loaded; constraints and the detokenizer use it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from sgl.errors import TokenizerError
from sgl.grammar.vocabulary.special import is_control

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


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
    unknown_id: int | None = None
    """The token for text outside the vocabulary, called special or not."""
    control: dict[int, str] = field(default_factory=dict)
    """Id → name of the tokens that control the model, called special or not."""

    @cached_property
    def pieces(self) -> list[str | None]:
        """Id → text of the token, None where its bytes alone are not complete UTF-8."""
        return [_text_or_none(data) for data in self.token_bytes]

    def pieces_without(self, skipped_ids: frozenset[int]) -> list[str | None]:
        """`pieces` where some tokens have no text."""
        found = self._pieces_without.get(skipped_ids)
        if found is None:
            found = list(self.pieces)
            for token_id in skipped_ids:
                found[token_id] = ""
            while len(self._pieces_without) >= _KEPT_PIECES:
                self._pieces_without.pop(next(iter(self._pieces_without)), None)
            self._pieces_without[skipped_ids] = found
        return found

    @cached_property
    def _pieces_without(self) -> dict[frozenset[int], list[str | None]]:
        return {}

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


def read_tokens(backend: Backend, *, max_checked: int | None = None) -> TokenTable:
    """The table of a tokenizer. Raises TokenizerError if its decoder does more than join tokens, or proves the table
    wrong: all tokens are compared with the tokenizer's `decode`, or a sample of `max_checked`.
    """
    joins = _joins(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
    added = backend.get_added_tokens_decoder()
    tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    tokens.update({token_id: token.content for token_id, token in added.items()})
    to_bytes = _byte_level if joins.byte_level else joins.sentencepiece
    unknown = getattr(backend.model, "unk_token", None)
    unknown_id = backend.token_to_id(unknown) if isinstance(unknown, str) else None
    table = TokenTable(
        token_bytes=[to_bytes(tokens[i]) if i in tokens else b"" for i in range(max(tokens, default=-1) + 1)],
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        unknown_id=unknown_id,
        control={
            token_id: token.content
            for token_id, token in added.items()
            if token_id != unknown_id and is_control(token.content, is_special=token.special)
        },
        first=joins.first,
        invalid="surrogateescape" if joins.byte_fallback else "replace",
    )
    byte_ids = {i for i, token in tokens.items() if joins.byte_fallback and _BYTE_TOKEN.fullmatch(token)}
    for token_ids in _samples(table, sorted(tokens), byte_ids, max_checked):
        for skip in (False,) if table.special_ids.isdisjoint(token_ids) else (False, True):
            expected, text = (each.decode(token_ids, skip_special_tokens=skip) for each in (backend, table))
            if text != expected:
                raise TokenizerError(
                    f"tokens {token_ids[:8]}… decode to {expected[:80]!r}, and their bytes say {text[:80]!r}"
                )
    return table


_KEPT_PIECES = 8  # lists of all tokens: a server needs two or three
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPES = {0xDC00 + byte: "\ufffd" for byte in range(0x80, 0x100)}
_SAMPLE_LEN = 64
_JOINING_STEPS = re.compile("(Metaspace |(Replace )*)(ByteFallback )?(Fuse )?((?<=Fuse )Strip )?")


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


def _joins(decoder: Any) -> _Joins:
    """Read a decoder as `tokenizers` serialises it. Raises TokenizerError for one that does more than join tokens."""
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Joins(byte_level=True)
    replacements: list[tuple[str, str]] = []
    first: Literal["keep", "strip", "drop"] = "keep"
    is_known = decoder is not None and _JOINING_STEPS.fullmatch(" ".join([*kinds, ""])) is not None
    for step in steps if is_known else ():
        if step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
            first = "keep" if step.get("prepend_scheme") == "never" else "drop"
        elif step["type"] == "Replace":
            is_known &= "String" in step["pattern"]
            replacements.append((step["pattern"].get("String", ""), step["content"]))
        elif step["type"] == "Strip":
            is_known &= step["content"] == " " and step["start"] in (0, 1) and step["stop"] == 0
            first = "strip" if step["start"] else first
    if not is_known:
        raise TokenizerError(
            f"the decoder {kinds or None} does more than join tokens, so they have no bytes of their own; "
            "byte-level BPE and SentencePiece decoders do"
        )
    return _Joins(byte_fallback="ByteFallback" in kinds, replacements=tuple(replacements), first=first)


def _byte_level(token: str) -> bytes:
    """The bytes that GPT-2's alphabet spells; a token with any other character stands for itself."""
    if token.isascii():
        return token.encode()
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


def _samples(
    table: TokenTable, token_ids: list[int], byte_ids: set[int], max_checked: int | None
) -> Iterator[list[int]]:
    """Sequences in which every token occurs in some company, or so many. Byte tokens come only in whole characters."""
    chosen = [token_id for token_id in token_ids if token_id not in byte_ids]
    chosen = chosen[:: -(-len(chosen) // max_checked) or 1] if max_checked else chosen
    num_samples = -(-len(chosen) // _SAMPLE_LEN)
    for start in range(num_samples):  # tokens from all over the vocabulary, not neighbours
        yield chosen[start::num_samples]
    by_byte = {table.token_bytes[token_id]: token_id for token_id in byte_ids}
    for character in " ~é你😀":
        spelled = [by_byte.get(bytes([byte])) for byte in character.encode()]
        if known := [token_id for token_id in spelled if token_id is not None and len(by_byte) == 256]:
            yield [*known, *known, *chosen[:2], *known]
