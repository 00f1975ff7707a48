"""A drafter that computes on the device: an EAGLE-3 head. It needs the model's hidden states, of which it makes
features in steps of requests that it follows; it attends to no token without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from sgl.runtime.batch import Int32Array, Int64Array
from sgl.runtime.runner.ahead import Ahead, Verifying, VerifyInputs
from sgl.runtime.runner.drafts import HeadRunner
from sgl.runtime.runner.observer import ObservedStep
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.step import Step
from sgl.runtime.speculate.drafter import DraftRequest
from sgl.runtime.speculate.models import Guess, ModelDrafter, Row, Span, known_from

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

    def __init__(self, runner: HeadRunner, layers: tuple[int, ...], **options: int) -> None:
        """layers: see `Observer`. options: as of `ModelDrafter`."""
        super().__init__(runner, **options)
        self._head = runner
        self.layers = layers
        self._follows = True
        self._followed: dict[int, _Followed] = {}  # by uid
        self._seen: list[_Followed | None] = []  # of the latest step, by b
        self._step = 0  # its number
        self._verifying: Verifying | None = None  # of the latest step
        self._latest: ObservedStep | None = None
        self._ahead: Step | None = None  # the latest step, while not all is known of it

    def follow(self, *, is_on: bool) -> None:
        """See `DeviceDrafter`."""
        self._follows = is_on

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
        self._verifying, self._latest = None, replace(step, hidden=())
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

    def sampled(self, ids: torch.Tensor) -> None:
        """See `Observer`."""
        step = self._latest
        if step is None or step.inputs is None:
            return
        num_drafts = np.zeros(len(step.batch), np.int64)
        for b, its in step.batch.drafts.items():
            num_drafts[b] = len(its)
        if (step.batch.q_lens == num_drafts + 1).all():
            self._verifying = Verifying(ids, step.inputs.token_ids, step.inputs.queries, num_drafts)

    def place(self, inputs: VerifyInputs) -> Ahead:
        """See `Observer`."""
        return self._head.place_drafts(inputs)

    def may_go_ahead(self, latest: Step, table: Int32Array) -> bool:
        """See `DeviceDrafter`."""
        verifying = self._verifying
        if verifying is None or not self._follows or self.is_resting:
            return False
        most = self._num_steps
        each = zip(latest.requests, verifying.num_drafts.tolist(), strict=True)
        ends = [request.num_known + number + most + 1 for request, number in each]
        if max(ends) > self._max_positions or not self._head.holds(ends, int(verifying.num_drafts.max()) + 1):
            return False
        return all(self._goes_on(request, table[request.row]) for request in latest.requests)

    def _goes_on(self, request: Request, pages: Int32Array) -> bool:
        """Whether nothing but what is being verified stands between its features and its next drafts."""
        row, params = self._rows.get(request.uid), request.params
        if row is None or request.uid not in self._followed or row.num_retractions != request.num_retractions:
            return False
        if row.is_biased or params.min_new_tokens > len(request.output_ids) or request.top_logprobs >= 0:
            return False
        return row.done == request.num_known and np.array_equal(row.pages, pages[: len(row.pages)])

    def go_ahead(self, step: Step, table: Int32Array, simulated: Int64Array) -> None:
        """See `DeviceDrafter`."""
        verifying = self._verifying
        assert verifying is not None, "it may go ahead"
        wanted, chunks = step.batch.q_lens.astype(np.int64) - 1, []
        numbers = zip(step.requests, verifying.num_drafts.tolist(), wanted.tolist(), strict=True)
        for request, before, number in numbers:
            row, start, most = self._rows[request.uid], request.num_known, max(1, number)  # none: one is not used
            self._place(row, table[request.row, : -(-(start + before + number + 1) // self._page_size)])
            if len(row.holes):
                self._head.skip(row.number, row.holes, len(row.pages) * self._page_size)
            self._keys[self._slots(row.pages, np.arange(start, start + before + most))] = 0
            chunks.append((row.number, start, np.zeros(before + 1, np.int32), most))
        self._head.chain_ahead(chunks, verifying, wanted, simulated)
        self._ahead = step

    def settle(self) -> None:
        """See `DeviceDrafter`."""
        step, observed = self._ahead, self._latest
        assert step is not None and observed is not None, "a step is ahead"  # noqa: PT018
        for request in step.requests:
            row = self._rows.get(request.uid)
            if row is not None:
                start, row.done = row.done, request.num_known
                self._add_keys(row, known_from(request, row.num_keys))
                self._keys[self._slots(row.pages, np.arange(start, row.done))] = row.keys[start : row.done]
        self._note_features(observed)
        self._ahead = None

    def close(self) -> None:
        """See `Observer`."""
        self._verifying = self._latest = self._ahead = None
        super().close()

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

    def _filled_in(self, guesses: list[Guess]) -> list[Guess]:
        most_rows, most = self._head.chains
        for guess in guesses if 0 < len(guesses) <= most_rows else ():
            if len(guess.first) > most:  # one pass for all but the last token, and a chain behind it
                guess.shorten()
        return super()._filled_in(guesses)

    def _chained(self, guesses: list[Guess]) -> tuple[list[Guess], Callable[[], Int32Array]]:
        most, most_entries = self._head.chains
        # A cut-off would cost a graph many more passes over its logits, and forbids few drafts, as a minimum of tokens
        # does; a bias may forbid most.
        fitting = [
            guess
            for guess in guesses
            if not len(guess.forced) and not guess.row.is_biased and len(guess.first) <= most_entries
        ]
        if not 0 < len(fitting) <= most:
            return super()._chained([])
        chunks = [(its.row.number, its.first.start, its.first.known_ids, its.most) for its in fitting]
        drafts = self._head.chain(chunks, self._new_setups())
        if drafts is None:
            return super()._chained([])
        for guess in fitting:
            row, first = guess.row, guess.first
            slots = self._slots(row.pages, np.arange(first.start, first.end + guess.most - 1))
            self._keys[slots[: len(first)]] = row.keys[first.start : first.end]
            self._keys[slots[len(first) :]] = 0
        return fitting, drafts

    def _note(self, guess: Guess) -> None:
        """The model will make other features of what was drafted."""
        guess.row.done = guess.first.end
