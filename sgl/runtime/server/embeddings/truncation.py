"""Prompts cut to their first or last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sgl.errors import InvalidRequest
from sgl.runtime.server.texts import in_batches
from sgl.runtime.text.tokenizer import Tokenizer


def first_tokens(tokenizer: Tokenizer, texts: Sequence[str], most: int) -> list[list[int]]:
    """The first `most` token ids of each text, of which little more is read."""
    found: list[list[int]] = [[] for _ in texts]
    left, length = list(range(len(texts))), 16 * most
    while left:
        encoded = in_batches(tokenizer.encode_all, [texts[i][:length] for i in left])
        further = []
        for i, ids in zip(left, encoded, strict=True):
            found[i] = ids[:most]
            if len(texts[i]) > length and len(ids) < 2 * most:  # a cut changes the tokens around it
                further.append(i)
        left, length = further, 4 * length
    return found


def last_tokens(tokenizer: Tokenizer, prompts: Sequence[Any], most: int) -> list[list[int]]:
    """The last `most` token ids of each text, or of each list of ids. What the tokenizer puts around a text stays, and
    counts. Raises InvalidRequest."""
    if not isinstance(prompts[0], str):
        return [ids[-most:] for ids in prompts]
    whole = in_batches(tokenizer.encode_all, prompts)
    bare = in_batches(partial(tokenizer.encode_all, add_special_tokens=False), prompts)
    return [_last(*each, most) for each in zip(whole, bare, strict=True)]


def _last(ids: list[int], bare: list[int], most: int) -> list[int]:
    """bare: without what the tokenizer puts around them."""
    if len(ids) <= most:
        return ids
    num_added = len(ids) - len(bare)
    if most <= num_added:
        message = f"truncate_prompt_tokens must be more than the {num_added} tokens around each text, not {most}"
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    start = next((i for i in range(num_added + 1) if ids[i : i + len(bare)] == bare), None)
    if start is None:
        message = "this tokenizer cuts a text otherwise beside its special tokens: send token ids, or no limit"
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    return [*ids[:start], *bare[num_added - most :], *ids[start + len(bare) :]]
