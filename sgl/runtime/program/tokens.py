"""The tokens of a stream: [fixed | run].

Fixed tokens were generated, or precede such tokens, and are never encoded again. The run is the text since then,
always encoded as a whole: how a program cuts its text never shows. Only a chat template's pieces may contain
control tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import numpy as np

from sgl.formats.call_format import CallFormat
from sgl.formats.detect import call_style
from sgl.lang.ir.chat_template import ChatTemplate, RenderedTemplate
from sgl.lang.ir.interpreter import Piece
from sgl.runtime.batch import Int32Array
from sgl.runtime.text.tokenizer import Tokenizer

_WINDOW = 16  # tokens encoded again at a long run's end; the first half must not change
_ANCHORS = ("\n", "\x01", "a", "0")  # texts that do not merge with what follows


@dataclass(frozen=True, slots=True, eq=False)
class StreamTokens:
    """Immutable: branches share it."""

    ids: Int32Array
    num_fixed: int = 0
    pieces: tuple[Piece, ...] = ()  # of the run
    is_joint: bool = True  # whether the run was encoded in one go

    def generated(self, ids: Sequence[int]) -> StreamTokens:
        """With these generated tokens appended."""
        whole = np.concatenate((self.ids, np.array(ids, np.int32)))
        return StreamTokens(whole, len(whole))


NO_TOKENS = StreamTokens(np.empty(0, np.int32))


class Encoder:
    """Appends text to token sequences. Safe from any thread."""

    def __init__(self, tokenizer: Tokenizer, limit: int | None = None) -> None:
        """limit: see `Tokenizer.encode`, for each appended text."""
        self._tokenizer = tokenizer
        self._limit = limit
        self._control = sorted(tokenizer.control_tokens, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, self._control)))
        self._longest_control = max(map(len, self._control), default=0)
        self._table = None if tokenizer.table is None else tokenizer.table.token_bytes
        self._prepends = self._spelled(tokenizer.encode("a", add_special_tokens=False)) not in (None, b"a")

    @cached_property
    def call_format(self) -> CallFormat | None:
        """How the model's own chat template writes tool calls; None where text cannot hold them."""
        found = call_style(self._tokenizer.apply_chat_template)
        is_text = found is not None and not self._tokenizer.special_tokens_in(found.format.marks())
        return found.format if found is not None and is_text else None

    def extend(self, tokens: StreamTokens, pieces: Sequence[Piece]) -> StreamTokens:
        """Append text. A stream's start gets BOS and the like, unless a template opens it. Raises InvalidRequest
        for text that cannot be encoded."""
        pieces = [piece for piece in pieces if piece[0]]
        if not pieces and len(tokens.ids):
            return tokens
        run = tuple(merged((*tokens.pieces, *pieces)))
        ids = self._spliced(tokens, pieces)
        is_joint = ids is not None or self._is_safe(run)
        if ids is None:
            encoded = self._encoded(run, is_joint=is_joint, at_start=not tokens.num_fixed)
            ids = np.concatenate((tokens.ids[: tokens.num_fixed], encoded))
        return StreamTokens(ids, tokens.num_fixed, run, is_joint)

    def num_kept(self, prompt_ids: Int32Array, output_ids: Sequence[int], text: str) -> tuple[int, str]:
        """How many generated tokens spell a prefix of `text` (the output up to a stop), and the rest of the text.
        Tokens that cross its end or leave a character incomplete do not count."""
        detokenizer = self._tokenizer.detokenizer(prompt_ids)
        first_at = {0: 0}  # length of the text → the fewest tokens that give it
        length = 0
        for count, token_id in enumerate(output_ids, 1):
            length += len(detokenizer.feed(token_id))
            if length > len(text):
                break
            first_at.setdefault(length, count)
        for length, count in reversed(first_at.items()):
            if self._is_complete(prompt_ids, output_ids[:count]):
                return count, text[length:]
        return 0, text

    def spelled_by(self, output_ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Where runs of tokens (first, count) begin and end in the bytes of the output. Empty without a token table."""
        table = self._table
        if table is None or not runs:
            return []
        ends = [0, *accumulate(len(table[token_id]) for token_id in output_ids)]
        return [(ends[first], ends[first + count]) for first, count in runs]

    def _is_complete(self, prompt_ids: Int32Array, output_ids: Sequence[int]) -> bool:
        detokenizer = self._tokenizer.detokenizer(prompt_ids)
        for token_id in output_ids:
            detokenizer.feed(token_id)
        return not detokenizer.flush()

    def _encoded(self, pieces: Sequence[Piece], *, is_joint: bool, at_start: bool) -> Int32Array:
        add_special = at_start and not any(is_template for _, is_template in pieces)
        if is_joint:
            pieces = [("".join(text for text, _ in pieces), True)]
        parts = []
        for i, (text, allow_special) in enumerate(pieces):
            if at_start and not i:
                encode = self._tokenizer.encode
                parts.append(
                    encode(text, add_special_tokens=add_special, allow_special=allow_special, limit=self._limit)
                )
            else:
                parts.append(self._continued(text, allow_special))
        return np.concatenate(parts)

    def _continued(self, text: str, allow_special: bool) -> Int32Array:
        """The tokens of a text in the middle, without the leading space that some tokenizers add."""
        encode = self._tokenizer.encode
        alone = encode(text, add_special_tokens=False, allow_special=allow_special, limit=self._limit)
        if not self._prepends:
            return alone
        for anchor in _ANCHORS:
            head = encode(anchor, add_special_tokens=False)
            whole = encode(anchor + text, add_special_tokens=False, allow_special=allow_special)
            rest = whole[len(head) :]
            if np.array_equal(whole[: len(head)], head) and self._spelled(rest) == text.encode():
                return rest
        return alone

    def _spliced(self, tokens: StreamTokens, pieces: Sequence[Piece]) -> Int32Array | None:
        """Encode only the end of a long run again; None if more may change."""
        old, is_first = tokens.pieces, tokens.num_fixed == 0
        if len(tokens.ids) - tokens.num_fixed <= 4 * _WINDOW or not tokens.is_joint or self._table is None:
            return None
        if is_first and any(new for _, new in pieces) and not any(before for _, before in old):
            return None  # a template removes the tokenizer's prefix
        end = tokens.ids[-_WINDOW:]
        spelled = self._spelled(end) or b""
        added = "".join(text for text, _ in pieces)
        before = "".join(text for text, _ in old[-2 * _WINDOW :])
        try:
            tail = spelled.decode()
        except UnicodeDecodeError:
            return None
        context = before[-self._longest_control :]
        if not before.endswith(tail) or not self._is_safe(merged([(context, True), *pieces], whole=1)):
            return None
        again = self._continued(tail + added, allow_special=True)
        if not np.array_equal(again[: _WINDOW // 2], end[: _WINDOW // 2]):
            return None
        return np.concatenate((tokens.ids[:-_WINDOW], again))

    def _is_safe(self, pieces: Sequence[Piece]) -> bool:
        """Whether all control tokens in the joined text lie within template pieces."""
        text = "".join(text for text, _ in pieces)
        if not any(token in text for token in self._control):
            return True
        ends = list(accumulate(len(text) for text, _ in pieces))
        for match in self._control_pattern.finditer(text):
            at = bisect_right(ends, match.start())
            if not pieces[at][1] or match.end() > ends[at]:
                return False
        return True

    def _spelled(self, ids: Int32Array) -> bytes | None:
        table = self._table
        return None if table is None else b"".join([table[token_id] for token_id in ids.tolist()])


def model_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that came with the model, if any."""
    if not tokenizer.has_chat_template:
        return None

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)

    return RenderedTemplate("of the model", render)


def merged(pieces: Sequence[Piece], whole: int = 0) -> list[Piece]:
    """Join neighbours of one kind, except for the first `whole` pieces."""
    kinds = groupby(pieces[whole:], key=itemgetter(1))
    return [*pieces[:whole], *(("".join(text for text, _ in group), kind) for kind, group in kinds)]
