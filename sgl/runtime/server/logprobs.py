"""Log-probabilities in OpenAI's form, from native entries [logprob, token id, …]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl.runtime.text.tokenizer import Tokenizer

Entry = Sequence[Any]  # [logprob | None, token id, …]


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The token's bytes, or its text's if the tokenizer knows none."""
    if tokenizer.table is not None:
        return tokenizer.table.bytes_of(token_id, skip_special_tokens=False)
    return tokenizer.token_text(token_id).encode()


def chat_logprobs(tokenizer: Tokenizer, meta: dict[str, Any], *, as_ids: bool = False) -> list[dict[str, Any]]:
    """Of a result's or event's tokens. `as_ids`: write tokens as token_id:N."""
    tops = meta.get("output_top_logprobs") or [[]] * len(meta["output_token_logprobs"])

    def described(entry: Entry) -> dict[str, Any]:
        data = token_bytes(tokenizer, entry[1])
        token = f"token_id:{entry[1]}" if as_ids else data.decode("utf-8", "replace")
        return {"token": token, "logprob": entry[0], "bytes": list(data)}

    return [
        {**described(entry), "top_logprobs": [described(other) for other in top or ()]}
        for entry, top in zip(meta["output_token_logprobs"], tops, strict=True)
    ]


class CompletionLogprobs:
    """Formats a completion's logprobs. Offsets are in the joined tokens; a character belongs to its last token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        num_top: int,
        echo: bool,
        has_output: bool = True,
        as_ids: bool = False,
    ) -> None:
        """`num_top`: alternatives per token. `as_ids`: write tokens as token_id:N."""
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer([] if echo else prompt_ids)
        self._num_top = num_top
        self._echo = echo
        self._has_output = has_output
        self._as_ids = as_ids
        self._offset = 0

    def of(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Of a result's or event's tokens; with echo, the prompt's come first, once."""
        fields: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._echo:
            self._echo = False
            self._add(fields, meta["input_token_logprobs"], meta.get("input_top_logprobs"))
        if self._has_output:
            self._add(fields, meta["output_token_logprobs"], meta.get("output_top_logprobs"))
        if not self._num_top:
            fields["top_logprobs"] = None
        return fields

    def _add(self, fields: dict[str, Any], entries: Sequence[Entry], tops: Sequence[Any] | None) -> None:
        for i, entry in enumerate(entries):
            piece = self._detokenizer.feed(entry[1])
            fields["tokens"].append(f"token_id:{entry[1]}" if self._as_ids else piece)
            fields["token_logprobs"].append(entry[0])
            fields["text_offset"].append(self._offset)
            self._offset += len(piece)
            top = tops[i] if tops is not None else None
            if top is not None:  # the token itself always, as at OpenAI
                top = {self._text(other[1]): other[0] for other in (*top, entry)}
            fields["top_logprobs"].append(top)

    def _text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return token_bytes(self._tokenizer, token_id).decode("utf-8", "backslashreplace")
