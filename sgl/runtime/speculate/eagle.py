"""A drafter that computes on the device: an EAGLE-3 head. It needs the model's hidden states, of which it makes
features in steps of requests that it follows; it attends to no token without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl.runtime.batch import Int32Array, Int64Array
from sgl.runtime.runner.drafts import HeadRunner
from sgl.runtime.runner.observer import ObservedStep
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.step import Step
from sgl.runtime.speculate.drafter import DraftRequest
from sgl.runtime.speculate.models import Guess, ModelDrafter, Row, Span

_LONGEST_HOLE = 64  # tokens without features, behind which a head follows a request no more
_MOST_HOLES = 1 << 12  # tokens without KV in all, likewise


@dataclass(slots=True)
class _Followed:
    """A request whose features are kept."""

    first_key: np.uint64  # of the weights that it began with, which may change before a draft is asked for
    slots: Int32Array  # [max_positions] by token: where its feature went; 0: nowhere, which is the dummy page
    sure: int = 0  # at the latest step that was seen, tokens that were known for good,
    end: int = 0  # and all tokens, with the drafts
    step: int = 0  # its number

    def settle(self, num_computed: int, step: int) -> None:
        """So many tokens are computed for good. step: the latest; if it was not seen, nor was what became of drafts."""
        sure = num_computed if self.step == step else self.sure
        self.slots[sure : self.end] = 0
        self.sure = self.end = min(self.end, sure)


class EagleDrafter(ModelDrafter):
    """An EAGLE-3 head. It follows requests from their first step on."""

    name = "eagle3"
    _first = 1

    def __init__(self, runner: HeadRunner, layers: tuple[int, ...], **options: Any) -> None:
        """layers: see `Observer`. options: as of `ModelDrafter`."""
        super().__init__(runner, **options)
        self._head = runner
        self.layers = layers
        self._followed: dict[int, _Followed] = {}  # by uid
        self._seen: list[_Followed | None] = []  # of the latest step, by b
        self._step = 0  # its number

    def wants(self, step: Step) -> bool:
        """See `DeviceDrafter`."""
        self._step += 1
        self._verifying = None
        batch, followed = step.batch, self._followed
        begun = {setup.row for setup in batch.setups}
        for request in step.requests if begun else ():
            if request.row in begun:
                followed.pop(request.uid, None)
                can_draft = request.layout is None and not request.params.has_penalties
                if self._follows and can_draft and request.max_new_tokens > len(request.output_ids) + 1:
                    followed[request.uid] = _Followed(
                        self._first_key(request), np.zeros(self._max_positions, np.int32)
                    )
        if not self._follows or not followed or (self.is_resting and len(batch.token_ids) == len(batch)):
            return False
        self._seen = [followed.get(request.uid) for request in step.requests]
        return any(its is not None for its in self._seen)

    @property
    def is_ready(self) -> bool:
        """See `DeviceDrafter`."""
        return bool(self._followed)

    def grade(self, request: Request) -> int | None:
        """See `DeviceDrafter`. 1: it began while the head rested, or with what was cached then."""
        if request.uid not in self._followed:
            return None
        row = self._rows.get(request.uid)
        return int(row is not None and len(row.holes) > 1)  # a fork's first own entry is one

    def observe(self, step: ObservedStep) -> None:
        """See `Observer`."""
        self._head.read(step.hidden, step.slots)
        super().observe(step)
        if not step.batch.is_ahead:
            self._note_features(step)

    def _note_features(self, step: ObservedStep) -> None:
        batch = step.batch
        each = zip(self._seen, batch.q_lens.tolist(), batch.kv_lens.tolist(), strict=True)
        for b, (followed, q_len, end) in enumerate(each):
            if followed is not None:
                tokens = np.arange(end - q_len, min(end, self._max_positions))
                followed.settle(end - q_len, self._step - 1)
                followed.slots[tokens] = self._slots(step.pages[b], tokens)
                followed.sure, followed.end, followed.step = end - len(batch.drafts.get(b, ())), end, self._step

    def _goes_on(self, request: Request, pages: Int32Array) -> bool:
        return request.uid in self._followed and super()._goes_on(request, pages)

    def settle(self) -> None:
        """See `DeviceDrafter`."""
        super().settle()
        assert self._latest is not None, "a step was ahead of it"
        self._note_features(self._latest)

    def ended(self, request: Request) -> None:
        super().ended(request)
        self._followed.pop(request.uid, None)

    def _first_key(self, request: Request) -> np.uint64:
        followed = self._followed.get(request.uid)
        return super()._first_key(request) if followed is None else followed.first_key

    def _reach(self, row: Row, asked: DraftRequest) -> int | None:
        """One token more than the model has computed: further ones need the head's own features."""
        request, num_computed = asked.request, asked.num_computed
        followed = self._followed[request.uid]
        followed.settle(num_computed, self._step)
        if not self._has(row, followed, np.array([num_computed - 1])).all():  # it rested in the latest step
            if followed.end + _LONGEST_HOLE < num_computed:  # and for long
                del self._followed[request.uid]
            return None
        return min(request.num_known, num_computed + 1)

    def _has(self, row: Row, followed: _Followed, tokens: Int64Array) -> npt.NDArray[np.bool_]:
        """[n] whether there are features of these: another's page may have taken the place of the row's own."""
        has: npt.NDArray[np.bool_] = followed.slots[tokens] == self._slots(row.pages, tokens)
        return has

    def _missing(self, row: Row, asked: DraftRequest, end: int) -> list[Span]:
        """Those whose predecessors have features. Others, which it never saw, are holes."""
        start = max(row.done, self._first)
        has = self._has(row, self._followed[asked.request.uid], np.arange(start, max(start, end)) - 1)
        if not len(row.holes) and has.all():
            self._head.skip(row.number, row.holes, 0)
            return [(start, end)] if start < end else []
        holes = np.concatenate((row.holes[row.holes < start], start + np.flatnonzero(~has)))
        row.holes = holes[~self._are_right(row, holes)]  # others may have seen these
        if len(row.holes) > _MOST_HOLES:
            del self._followed[asked.request.uid]
        self._head.skip(row.number, row.holes, len(row.pages) * self._page_size)
        edges = start + np.flatnonzero(np.diff(has, prepend=False, append=False))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    def _extend(self, row: Row, pages: Int32Array) -> None:
        super()._extend(row, pages)
        if len(row.holes):
            self._head.skip(row.number, row.holes, len(row.pages) * self._page_size)

    def _note(self, guess: Guess) -> None:
        """The model will make other features of what was drafted."""
        guess.row.done = guess.first.end
