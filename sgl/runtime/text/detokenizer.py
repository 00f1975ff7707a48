"""Streams one request's text: what `decode(prompt + output)` adds to `decode(prompt)`. Pieces are final; a
character waits for all of its bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sgl.grammar.vocabulary.token_table import TokenTable

TokenIds = Sequence[int] | npt.NDArray[np.int32]


class Detokenizer(ABC):
    """The text of one request. Only the end of `prompt_ids` is read."""

    __slots__ = ("_prompt_text",)
    _prompt_text: str
    """How decode(prompt) shows an incomplete character at its end: not part of the output."""

    @abstractmethod
    def feed(self, token_id: int) -> str:
        """New text, perhaps none. Ids without a token have no text."""

    @abstractmethod
    def flush(self) -> str:
        """The rest at the end; bytes that never became a character are U+FFFD."""

    def _without_prompt(self, text: str) -> str:
        if text and self._prompt_text:
            text = text.removeprefix(self._prompt_text)
            self._prompt_text = ""
        return text


class ByteDetokenizer(Detokenizer):
    """Uses a table of token bytes: tokens of whole characters cost one look-up."""

    __slots__ = ("_at_start", "_is_plain", "_pending", "_pieces", "_skipped_ids", "_table")

    def __init__(self, table: TokenTable, prompt_ids: TokenIds, skipped_ids: frozenset[int] | None = None) -> None:
        """`skipped_ids`: tokens without text; None: the special ones."""
        self._table = table
        self._skipped_ids = table.special_ids if skipped_ids is None else skipped_ids
        self._pieces = table.pieces_without(self._skipped_ids)
        tail = self._tail(prompt_ids)
        self._at_start = not tail
        self._pending = table.text_of(tail, final=False)[1]
        self._prompt_text = table.text_of(self._pending, final=True)[0]
        self._is_plain = not (self._at_start or self._pending)

    def feed(self, token_id: int) -> str:
        try:
            if self._is_plain and (piece := self._pieces[token_id]) is not None:
                return piece
        except IndexError:  # rows of the model beyond the tokenizer
            return ""
        return self._feed_bytes(self._bytes_of(token_id))

    def flush(self) -> str:
        text = self._table.text_of(self._pending, final=True)[0]
        self._pending = b""
        return self._without_prompt(text)

    def _feed_bytes(self, data: bytes) -> str:
        if not data:
            return ""
        if self._at_start:
            data = self._table.first_bytes(data)
            self._at_start = False
        text, self._pending = self._table.text_of(self._pending + data, final=False)
        self._is_plain = not self._pending
        return self._without_prompt(text)

    def _bytes_of(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped_ids else self._table.bytes_of(token_id, skip_special_tokens=False)

    def _tail(self, prompt_ids: TokenIds) -> bytes:
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes_of(int(token_id)) + tail
            if len(tail) >= 4:
                break
        return tail


class WindowDetokenizer(Detokenizer):
    """For tokenizers of which only `decode` is known: decodes the last tokens again each time, ten times as slow as
    the table. Sent text is final even if a later token changes it."""

    __slots__ = ("_decode", "_ids", "_sent", "_skipped_ids")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_ids: TokenIds,
        *,
        skipped_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`skipped_ids`: those that `decode` omits."""
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._ids, text = self._context(self._tail(prompt_ids))
        num_open = _num_open(text)
        self._sent = text[: len(text) - num_open]  # the part of decode(_ids) that was sent or belongs to the prompt
        self._prompt_text = text[len(text) - num_open :]

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        num_open = _num_open(text)
        text = text[: len(text) - num_open]
        is_full = len(self._ids) >= _MAX_WINDOW and (not num_open or len(self._ids) >= 4 * _MAX_WINDOW)
        piece = ""
        if text.startswith(self._sent):
            piece = text[len(self._sent) :]
            self._sent = text
        elif is_full:
            piece = _beyond(self._sent, text)
        if is_full:
            self._ids, text = self._context(self._ids)
            self._sent = text[: len(text) - num_open]
        return self._without_prompt(piece)

    def flush(self) -> str:
        return self._without_prompt(_beyond(self._sent, self._decode(self._ids)))

    def _context(self, ids: list[int]) -> tuple[list[int], str]:
        """The last few tokens, from the start of a character, and their text."""
        for length in range(_CONTEXT, _CONTEXT + 4):
            text = self._decode(ids[-length:])
            if not text.startswith("\ufffd"):
                break
        return ids[-length:], text

    def _tail(self, prompt_ids: TokenIds) -> list[int]:
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if int(token_id) not in self._skipped_ids:
                tail.append(int(token_id))
                if len(tail) == _CONTEXT + 3:
                    break
        return tail[::-1]


_CONTEXT = 8
_MAX_WINDOW = 24


def _num_open(text: str) -> int:
    """Characters at the end that may change: an incomplete one is one U+FFFD, or one for each byte."""
    return min(3, len(text) - len(text.rstrip("\ufffd")))


def _beyond(sent: str, text: str) -> str:
    same = 0
    while same < min(len(sent), len(text)) and sent[same] == text[same]:
        same += 1
    return text[same:]
