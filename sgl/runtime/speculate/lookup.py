"""A drafter without a model: what followed the same tokens before, in the output, the prompt or earlier outputs of the
same origin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl.runtime.batch import Int32Array
from sgl.runtime.scheduler.request import Request
from sgl.runtime.speculate.drafter import NO_DRAFT, Draft, Drafter, DraftRequest
from sgl.runtime.speculate.history import MAX_CONTEXT, History, search
from sgl.runtime.speculate.pools import START, Pools

SCANNED_TOKENS = 1 << 20
"""Of all requests, before one step: a fraction of a millisecond. Of longer prompts the ends are searched."""

_OF_TEXT = 0, 0, 1, 2, 2, 3, 3, 3, 3  # grades by tokens in common, in prompt and output; more: 4
_OF_POOL = 5, 5, 5, 6, 6, 6, 6, 6, 6  # in earlier outputs; more, or all from the beginning on: 7


class Lookup(Drafter):
    """See `Drafter`. Reads on where a draft was accepted, and searches again where one was rejected."""

    name = "lookup"

    def __init__(self, pools: Pools | None = None, *, scanned_tokens: int = SCANNED_TOKENS) -> None:
        """pools: earlier outputs by `Request.origin`; ended requests are added. None: nothing is kept."""
        self._pools = pools
        self._scanned_tokens = scanned_tokens
        self._readings: dict[int, _Reading] = {}  # by uid
        self._turn = 0

    def enter(self, request: Request) -> None:
        self._readings[request.uid] = _Reading(request)

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(wanted)
        left = self._scanned_tokens
        self._turn += 1
        for number in range(len(wanted)):
            i = (number + self._turn) % len(wanted)  # each comes first at times
            asked = wanted[i]
            origin = asked.request.origin
            pool = None if self._pools is None or origin is None else self._pools.ids(origin)
            drafts[i], scanned = self._readings[asked.request.uid].propose(asked.most, pool, left)
            left -= scanned
        return drafts

    def leave(self, request: Request) -> None:
        known = self._readings.pop(request.uid, None)
        reason, origin = request.finish_reason, request.origin
        if known is None or self._pools is None or origin is None or reason is None:
            return
        if reason.type != "abort" and request.output_ids:
            self._pools.add(origin, request.output_ids)


class _Reading:
    """A request's output, and the place that it may be read on from."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._output = History()
        self._source: Int32Array | None = None
        """The text found last; None: none. A pool's is copied as far as it may be needed."""
        self._at = 0  # in it: what may come next
        self._in_common = 0
        self._is_pool = False
        self._from_start = False

    def propose(self, most: int, pool: Int32Array | None, scanned_tokens: int) -> tuple[Draft, int]:
        """A draft, and how many tokens were searched for it."""
        new = self._request.output_ids[len(self._output) :]
        self._output.extend(new)
        scanned = 0
        if not self._reads_on(new):
            scanned = self._search(pool, scanned_tokens)
        if self._source is None:
            return NO_DRAFT, scanned
        ahead = self._source[self._at : self._at + most].tolist()
        if START in ahead:  # the end of an earlier output
            ahead = ahead[: ahead.index(START)]
        return (Draft(ahead, self._grade()) if ahead else NO_DRAFT), scanned

    def _reads_on(self, new: Sequence[int]) -> bool:
        """Whether the source goes on as the output did."""
        if self._source is None:
            return False
        end = self._at + len(new)
        if end >= len(self._source) or self._source[self._at : end].tolist() != new:
            self._source = None
            return False
        self._at = end
        self._in_common += len(new)
        return True

    def _search(self, pool: Int32Array | None, scanned_tokens: int) -> int:
        """Find the longest match; among equals the output's, the pool's, then the prompt's."""
        output, prompt = self._output.ids, self._request.prompt_ids
        scanned, best = 0, 0
        context = output[-MAX_CONTEXT:]
        if len(context) < MAX_CONTEXT:
            context = np.concatenate((prompt[len(context) - MAX_CONTEXT :], context))
        from_start = np.append(np.int32(START), output[-MAX_CONTEXT:])[-MAX_CONTEXT:]
        for text, sought, is_pool in ((output, context, False), (pool, from_start, True), (prompt, context, False)):
            if text is None or scanned >= scanned_tokens:
                continue
            text = text[-(scanned_tokens - scanned) :]
            scanned += len(text)
            at, in_common = search(text, sought)
            if in_common > best:
                best = in_common
                self._source, self._at, self._in_common = text, at, in_common
                self._is_pool, self._from_start = is_pool, is_pool and in_common > len(output)
        if self._source is not None and self._is_pool:
            self._source = self._source[self._at :][: 4 * MAX_CONTEXT].copy()
            self._at = 0
        return scanned

    def _grade(self) -> int:
        if self._is_pool:
            return 7 if self._from_start or self._in_common >= len(_OF_POOL) else _OF_POOL[self._in_common]
        return 4 if self._in_common >= len(_OF_TEXT) else _OF_TEXT[self._in_common]
