"""A drafter without a model: what followed the same tokens before, in the output, the prompt or earlier outputs of the
same origin."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from sgl.runtime.batch import Int32Array
from sgl.runtime.scheduler.request import Request
from sgl.runtime.speculate.drafter import NO_DRAFT, Draft, Drafter, DraftRequest
from sgl.runtime.speculate.pools import START, Pools

MAX_CONTEXT = 16
"""Tokens compared at most; a longer match says no more."""
MOST_PLACES = 1 << 12
"""Newest places of a token that are compared further: a prompt may be one token a million times."""
SCANNED_TOKENS = 1 << 20
"""Of all requests, before one step: a fraction of a millisecond. Of longer prompts the ends are searched."""

_COMPARED = 4  # tokens that are scanned in the time in which a place is compared once
_FEW = 8  # places
_AHEAD = 128  # tokens kept of what was found

# Grades by tokens in common, 0 to MAX_CONTEXT.
_OF_TEXT = (0, 0, 1, 2, 2, 3, 3, 3, 3) + 8 * (4,)  # in prompt and output
_OF_POOL = 3 * (5,) + 6 * (6,) + 8 * (7,)  # in earlier outputs
_FROM_START = 17 * (7,)  # the same, all from the beginning on


class Lookup(Drafter):
    """See `Drafter`. Reads on where a draft was accepted, and searches again where one was rejected."""

    name = "lookup"

    def __init__(self, pools: Pools | None = None, *, scanned_tokens: int = SCANNED_TOKENS) -> None:
        """pools: earlier outputs by `Request.origin`; ended requests are added. None: nothing is kept."""
        self._pools = pools
        self._scanned_tokens = scanned_tokens
        self._readings: dict[int, _Reading] = {}  # by uid
        self._turn = 0

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(wanted)
        left = self._scanned_tokens
        self._turn += 1
        for number in range(len(wanted)):
            i = (number + self._turn) % len(wanted)  # each comes first at times
            request = wanted[i].request
            if (reading := self._readings.get(request.uid)) is None:
                reading = self._readings[request.uid] = _Reading(request)
            drafts[i], scanned = reading.propose(wanted[i].most, self._pools, left)
            left -= scanned
        return drafts

    def ended(self, request: Request) -> None:
        self._readings.pop(request.uid, None)
        reason, origin = request.finish_reason, request.origin
        is_whole = reason is not None and reason.type != "abort"
        # Of one token nothing follows; as the newest beginning it would stand before longer ones.
        if self._pools is not None and origin is not None and is_whole and len(request.output_ids) > 1:
            self._pools.add(origin, request.output_ids)


class _Reading:
    """A request's output, and what may follow it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._output = array("i")
        self._ahead: list[int] = []  # where the text found last goes on
        self._in_common = 0
        self._grades = _OF_TEXT

    def propose(self, most: int, pools: Pools | None, most_scanned: int) -> tuple[Draft, int]:
        """A draft, and how many tokens were scanned for it, or might have been in that time."""
        new = self._request.output_ids[len(self._output) :]
        self._output.extend(new)
        self._in_common += len(new)
        self._ahead = self._ahead[len(new) :] if self._ahead[: len(new)] == new else []
        scanned = 0 if self._ahead else self._search(pools, most_scanned)
        if not self._ahead:
            return NO_DRAFT, scanned
        return Draft(self._ahead[:most], self._grades[min(self._in_common, MAX_CONTEXT)]), scanned

    def _search(self, pools: Pools | None, most_scanned: int) -> int:
        """Find the longest match; among equals the output's, the pool's, then the prompt's."""
        request, scanned = self._request, 0
        output = np.frombuffer(self._output[-max(most_scanned, MAX_CONTEXT) :], np.int32)
        prompt = request.prompt_ids
        pool = prompt[:0] if pools is None or request.origin is None else pools.ids(request.origin)
        tail = output[-MAX_CONTEXT:]
        context = tail if len(tail) == MAX_CONTEXT else np.concatenate((prompt[-MAX_CONTEXT:], tail))[-MAX_CONTEXT:]
        from_start = np.append(np.int32(START), tail)[-MAX_CONTEXT:]
        best = 0
        for text, sought, grades in (
            (output, context, _OF_TEXT),
            (pool, from_start, _OF_POOL),
            (prompt, context, _OF_TEXT),
        ):
            if scanned < most_scanned:
                text = text[scanned - most_scanned :]
                at, in_common, compared = search(text, sought)
                scanned += len(text) + _COMPARED * compared
                if in_common > best:
                    best = in_common
                    ahead = text[at : at + _AHEAD].tolist()
                    self._ahead = ahead[: ahead.index(START)] if START in ahead else ahead
                    self._in_common = in_common
                    self._grades = _FROM_START if grades is _OF_POOL and in_common > len(output) else grades
        return scanned


def search(text: Int32Array, context: Int32Array) -> tuple[int, int, int]:
    """Where in `text` [n] the longest end of `context` [m >= 1] ends that is there, the newest of them: (index
    behind it, tokens in common, at most MAX_CONTEXT, how many places were compared, each time); (0, 0, 0) if not even
    the last token is. An end right at the end of text, behind which nothing stands, does not count, nor does one
    before the last token's MOST_PLACES newest places. O(n), in NumPy."""
    found = (text[:-1] == context[-1]).nonzero()[0][-MOST_PLACES:]
    if not len(found):
        return 0, 0, 0
    length, most, compared = 1, min(len(context), MAX_CONTEXT), 0
    while length < most and len(found) > _FEW:
        compared += len(found)
        # Within one token of the text's beginning, index -1 would wrap around.
        before = found[found >= length]
        before = before[text[before - length] == context[-1 - length]]
        if not len(before):
            most = length
            break
        found = before
        length += 1
    if length == most:
        return int(found[-1]) + 1, length, compared
    places, sought = found.tolist(), context[::-1][length:most].tolist()
    best, in_common = places[-1], length
    for at in reversed(places):  # few are compared faster one by one
        its = text[max(0, at - most + 1) : at - length + 1][::-1].tolist()
        number = length + next((i for i, (a, b) in enumerate(zip(its, sought, strict=False)) if a != b), len(its))
        if number > in_common:
            best, in_common = at, number
    return best + 1, in_common, compared + len(places)
