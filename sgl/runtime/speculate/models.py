"""A drafter that computes on the device: a draft model. What it shares with a head (`eagle.py`) is here, too.

Both draw with the seed and position of the model's own draw, so that a draft equals it wherever the distributions
agree (Daliri, Musco, Suresh, arXiv 2408.07978). Their KV lies at the slots of the model's, and each slot has a key: of
the tokens up to the one whose KV lies there. So cached prefixes, forks and resumed requests find what is right, and
nothing is done when a page changes hands. What is missing is computed when a request is asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
import torch

from sgl.runtime.batch import FROM_DEVICE, Batch, Int32Array, Int64Array, PendingStep, RowSetup
from sgl.runtime.runner.ahead import Ahead, Verifying, VerifyInputs
from sgl.runtime.runner.capture import MAX_QUERIES
from sgl.runtime.runner.drafts import DraftRunner
from sgl.runtime.runner.observer import ObservedStep, Observer
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.step import Step
from sgl.runtime.speculate.drafter import NO_DRAFT, DeviceDrafter, Draft, DraftRequest

Keys = npt.NDArray[np.uint64]
Span = tuple[int, int]  # tokens from the first up to the second
_MOST_FORCED = 8  # tokens that a head goes through one by one, before it drafts
_NO_IDS: Int32Array = np.empty(0, np.int32)
_NO_PAGE_WRITES: Int32Array = np.empty((0, 3), np.int32)


@dataclass(slots=True, eq=False)
class Row:
    """A request that has been asked about."""

    number: int
    num_retractions: int  # when it got the row
    keys: Keys  # of its known tokens, with room for all
    first_key: np.uint64  # of no token: a head reads hidden states, which are those of an adapter and of weights
    num_keys: int = 0
    done: int = 0  # tokens whose KV is right, or is not to be had
    pages: Int32Array = field(default_factory=lambda: _NO_IDS)  # known to the runner
    is_biased: bool = False
    holes: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))  # of those done: without KV, ascending


@dataclass(slots=True)
class _Chunk:
    """Tokens [start, end) of a row to compute; None: the one that was drawn last."""

    row: Row
    start: int
    end: int
    token_ids: Int32Array | None
    is_right: bool = True  # its KV is what the tokens give, whatever was drafted

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def known_ids(self) -> Int32Array:
        """Where they are known."""
        assert self.token_ids is not None, "they are known"
        return self.token_ids

    def part(self, start: int, end: int) -> _Chunk:
        """Known tokens of it."""
        return _Chunk(self.row, start, end, self.known_ids[start - self.start : end - self.start])


@dataclass(slots=True, eq=False)
class Guess:
    """A request's draft under way."""

    index: int  # of what is wanted
    grade: int
    row: Row
    missing: list[_Chunk]  # to compute before the first pass
    first: _Chunk  # of the first pass: known tokens
    forced: Int32Array  # known tokens behind it, each a pass of its own
    most: int
    drafted: list[int] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        """Tokens before the last that the first pass needs or would compute, too."""
        return sum(map(len, [*self.missing, self.first])) - 1

    def shorten(self) -> None:
        """Leave the last token alone to the first pass."""
        first, last = self.first, self.first.end - 1
        if first.start < last:
            self.missing.append(first.part(first.start, last))
            self.first = first.part(last, first.end)

    def chunk(self, turn: int) -> _Chunk:
        """What one of the passes computes."""
        if not turn:
            return self.first
        at = self.first.end + turn - 1
        ids = self.forced[turn - 1 : turn] if turn <= len(self.forced) else None
        return _Chunk(self.row, at, at + 1, ids, is_right=False)


class ModelDrafter(DeviceDrafter, Observer):
    """A draft model. `Drafter` and `Observer` of one engine."""

    name = "draft"
    layers: tuple[int, ...] = ()
    _first = 0  # tokens without an entry

    def __init__(
        self,
        runner: DraftRunner,
        *,
        num_slots: int,
        page_size: int,
        max_positions: int,
        num_steps: int,
        most_tokens: int = 1 << 13,
        goes_ahead: bool = False,
    ) -> None:
        """num_slots: of KV. max_positions: beyond which nothing is drafted. num_steps: drafts at most, each a forward
        pass. most_tokens: of a pass, and of missing tokens that are computed before a step, at most. goes_ahead:
        whether its steps may, where they are replayed; a head's may."""
        self._runner = runner
        self._page_size = page_size
        self._max_positions = max_positions
        self._num_steps = num_steps
        self._most_tokens = most_tokens
        self._goes_ahead = goes_ahead
        self._keys: Keys = np.zeros(num_slots, np.uint64)
        """By slot, of the tokens up to the one whose KV lies there: sums of tokens times the factors of positions."""
        self._factors = np.random.default_rng(0).integers(1 << 63, size=max_positions, dtype=np.uint64) * 2 + 1
        self._epoch = 0  # counts what is found no more
        self._rows: dict[int, Row] = {}  # by uid
        self._setups: dict[int, RowSetup] = {}  # by row, those that the runner does not know yet
        self._follows = True
        self._proposed: frozenset[int] = frozenset()  # uids of requests with drafts, in the latest look
        self._verifying: Verifying | None = None  # of the latest step
        self._latest: ObservedStep | None = None
        self._ahead: Step | None = None  # the latest step, while not all is known of it

    def follow(self, *, is_on: bool) -> None:
        """See `DeviceDrafter`."""
        self._follows = is_on

    def wants(self, step: Step) -> bool:
        """See `DeviceDrafter`. Steps that it may go ahead of: those of what it drafted at once."""
        self._verifying, batch = None, step.batch
        proposed, self._proposed = self._proposed, frozenset()
        if not (self._goes_ahead and self._follows and batch.drafts) or batch.longest > MAX_QUERIES:
            return False
        is_its_own = batch.is_ahead or all(step.requests[b].uid in proposed for b in batch.drafts)
        return is_its_own and len(batch.token_ids) == len(batch) + sum(map(len, batch.drafts.values()))

    def observe(self, step: ObservedStep) -> None:
        """See `Observer`."""
        self._verifying, self._latest = None, replace(step, hidden=())

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
        return self._runner.place_drafts(inputs)

    def may_go_ahead(self, latest: Step, table: Int32Array) -> bool:
        """See `DeviceDrafter`."""
        verifying = self._verifying
        if verifying is None or not self._follows or self.is_resting:
            return False
        most = self._num_steps
        each = zip(latest.requests, verifying.num_drafts.tolist(), strict=True)
        ends = [request.num_known + number + most + 1 for request, number in each]
        if max(ends) > self._max_positions or not self._runner.holds(ends, int(verifying.num_drafts.max()) + 1):
            return False
        return all(self._goes_on(request, table[request.row]) for request in latest.requests)

    def _goes_on(self, request: Request, pages: Int32Array) -> bool:
        """Whether nothing but what is being verified stands between what it knows of it and its next drafts."""
        row, params = self._rows.get(request.uid), request.params
        if row is None or row.num_retractions != request.num_retractions:
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
            self._extend(row, table[request.row, : -(-(start + before + number + 1) // self._page_size)])
            self._keys[self._slots(row.pages, np.arange(start, start + before + most))] = 0
            chunks.append((row.number, start, np.zeros(before + 1, np.int32), most))
        self._runner.chain_ahead(chunks, verifying, wanted, simulated)
        self._ahead = step

    def _extend(self, row: Row, pages: Int32Array) -> None:
        """Give it the pages of a step that is ahead."""
        self._place(row, pages)

    def settle(self) -> None:
        """See `DeviceDrafter`."""
        assert self._ahead is not None, "a step is ahead"
        for request in self._ahead.requests:
            row = self._rows.get(request.uid)
            if row is not None:
                start, row.done = row.done, request.num_known
                self._add_keys(row, known_from(request, row.num_keys))
                self._keys[self._slots(row.pages, np.arange(start, row.done))] = row.keys[start : row.done]
        self._ahead = None

    def grade(self, request: Request) -> int | None:
        """See `DeviceDrafter`. It does not see images."""
        return 0 if request.layout is None else None

    def ended(self, request: Request) -> None:
        self._rows.pop(request.uid, None)

    def outdate(self) -> None:
        """See `DeviceDrafter`. Running requests go on with what they have, as the model does."""
        self._epoch += 1

    def close(self) -> None:
        """See `Observer`."""
        self._verifying = self._latest = self._ahead = None
        self._runner.close()

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter`. A row that lacks many tokens has no drafts until they are filled in, some in each step."""
        guesses = [guess for index, asked in enumerate(wanted) if (guess := self._guess(index, asked)) is not None]
        guesses = self._filled_in(guesses)
        chained, drafts_of = self._chained(guesses)
        one_by_one = guesses if not chained else [guess for guess in guesses if guess not in chained]
        passes: list[tuple[list[Guess], PendingStep]] = []
        while going := [guess for guess in one_by_one if len(passes) < len(guess.forced) + guess.most]:
            chunks = [guess.chunk(len(passes)) for guess in going]
            passes.append((going, self._runner.launch(self._batch(chunks, samples=True))))
        for turn, (going, pending) in enumerate(passes):
            for guess, token in zip(going, pending.wait().next_tokens.tolist(), strict=True):
                if turn >= len(guess.forced):
                    guess.drafted.append(token)
        for guess, token_ids in zip(chained, drafts_of().T.tolist() if chained else (), strict=True):
            guess.drafted = token_ids[: guess.most]
        drafts = [NO_DRAFT] * len(wanted)
        for guess in guesses:
            drafts[guess.index] = Draft(guess.drafted, guess.grade)
            self._note(guess)
        self._proposed = frozenset(wanted[guess.index].request.uid for guess in chained)
        return drafts

    def _chained(self, guesses: list[Guess]) -> tuple[list[Guess], Callable[[], Int32Array]]:
        """Those whose passes were launched at once, and what gives their drafts, [passes, guesses]."""
        most, most_entries = self._runner.chains
        # A cut-off would cost a graph many more passes over its logits, and forbids few drafts, as a minimum of tokens
        # does; a bias may forbid most.
        fitting = [
            guess
            for guess in guesses
            if not len(guess.forced) and not guess.row.is_biased and len(guess.first) <= most_entries
        ]
        if not 0 < len(fitting) <= most:
            return [], lambda: _NO_IDS
        chunks = [(its.row.number, its.first.start, its.first.known_ids, its.most) for its in fitting]
        drafts = self._runner.chain(chunks, self._new_setups())
        if drafts is None:
            return [], lambda: _NO_IDS
        for guess in fitting:
            row, first = guess.row, guess.first
            slots = self._slots(row.pages, np.arange(first.start, first.end + guess.most - 1))
            self._keys[slots[: len(first)]] = row.keys[first.start : first.end]
            self._keys[slots[len(first) :]] = 0
        return fitting, drafts

    def _filled_in(self, guesses: list[Guess]) -> list[Guess]:
        """Compute what is missing, no more tokens than the device's memory was planned for; returns those of which
        nothing is missing then, whose first pass has no more tokens either."""
        most_rows, most = self._runner.chains
        for guess in guesses if 0 < len(guesses) <= most_rows else ():
            if len(guess.first) > most:  # one pass for all but the last token, and a chain behind it
                guess.shorten()
        whole, left = list[Guess](), self._most_tokens
        for guess in sorted(guesses, key=lambda guess: guess.num_missing):
            if guess.num_missing <= left:
                whole.append(guess)
                left -= guess.num_missing
                continue
            guess.shorten()
            chunks, guess.missing = guess.missing, []
            for chunk in chunks:
                if left:
                    guess.row.done = min(chunk.end, chunk.start + left)
                    guess.missing.append(chunk.part(chunk.start, guess.row.done))
                    left -= len(guess.missing[-1])
        if sum(len(guess.first) for guess in whole) > self._most_tokens:
            for guess in whole:
                guess.shorten()
        for turn in zip_longest(*(guess.missing for guess in guesses)):
            self._runner.forward(self._batch([chunk for chunk in turn if chunk is not None], samples=False))
        return whole

    def _guess(self, index: int, asked: DraftRequest) -> Guess | None:
        """What to compute for a request; None: nothing can be drafted."""
        request = asked.request
        known = request.num_known
        most = min(asked.most, self._num_steps, self._max_positions - known + 1)
        if self.grade(request) is None or known <= self._first or most < 1:
            return None
        row = self._row(request)
        assert asked.pages is not None, "it computes there"
        self._place(row, asked.pages)
        reach = self._reach(row, asked)
        if reach is None or known - reach > _MOST_FORCED:
            return None
        self._add_keys(row, known_from(request, row.num_keys))
        spans, start = self._missing(row, asked, reach - 1), reach - 1
        if (grade := self.grade(request)) is None:
            return None  # no longer
        if spans and spans[-1][1] == start:
            start, _ = spans.pop()
        first = spans[0][0] if spans else start
        ids = known_from(request, first)
        *missing, last = [
            _Chunk(row, at, end, ids[at - first : end - first]) for at, end in [*spans, (start, reach)]
        ]
        return Guess(index, grade, row, missing, last, ids[reach - first :], most)

    def _row(self, request: Request) -> Row:
        row = self._rows.get(request.uid)
        if row is None or row.num_retractions != request.num_retractions:
            room = min(request.prompt_len + request.max_new_tokens, self._max_positions)
            first_key = self._first_key(request)
            row = Row(request.row, request.num_retractions, np.empty(room, np.uint64), first_key)
            row.is_biased = bool(request.params.logit_bias)
            self._rows[request.uid] = row
            self._setups[request.row] = RowSetup(
                request.row, request.params, request.seed, request.prompt_ids, _NO_IDS
            )
        return row

    def _first_key(self, request: Request) -> np.uint64:
        return np.uint64(request.adapter << 32 | self._epoch)

    def _reach(self, row: Row, asked: DraftRequest) -> int | None:
        """Known tokens that can be computed at once; None: nothing can be drafted yet."""
        return asked.request.num_known

    def _missing(self, row: Row, asked: DraftRequest, end: int) -> list[Span]:
        """Of the tokens before `end`, those to compute: of a draft model all from the first that is not right on."""
        right = self._are_right(row, np.arange(row.done, max(row.done, end)))
        row.done = end if right.all() else row.done + int(right.argmin())
        return [(row.done, end)] if row.done < end else []

    def _are_right(self, row: Row, tokens: Int64Array) -> npt.NDArray[np.bool_]:
        """[n] whether the KV of these is."""
        right: npt.NDArray[np.bool_] = self._keys[self._slots(row.pages, tokens)] == row.keys[tokens]
        return right

    def _slots(self, pages: Int32Array, tokens: Int64Array) -> Int64Array:
        index, offset = np.divmod(tokens, self._page_size)
        slots: Int64Array = pages[index].astype(np.int64) * self._page_size + offset
        return slots

    def _add_keys(self, row: Row, token_ids: Int32Array) -> None:
        """Those of its next tokens."""
        start, end = row.num_keys, row.num_keys + len(token_ids)
        row.keys[start:end] = self._keys_of(row, start, token_ids)
        row.num_keys = end

    def _keys_of(self, row: Row, start: int, token_ids: Int32Array) -> Keys:
        keys = (token_ids.astype(np.uint64) + np.uint64(1)) * self._factors[start : start + len(token_ids)]
        keys[:1] += row.keys[start - 1] if start else row.first_key
        return np.cumsum(keys, dtype=np.uint64)

    def _place(self, row: Row, pages: Int32Array) -> None:
        """Tell the runner of pages that are new, or another's with the same tokens in place of the row's own."""
        common = min(len(row.pages), len(pages))
        changed = np.flatnonzero(row.pages[:common] != pages[:common])
        first = int(changed[0]) if len(changed) else common
        if first < len(pages):
            self._runner.place(row.number, first, pages[first:])
            row.pages, row.done = pages.copy(), min(row.done, first * self._page_size)

    def _note(self, guess: Guess) -> None:
        """What was drafted is computed, but for the last one, and may yet be right."""
        row, start = guess.row, guess.first.end
        row.done = start
        drafted = np.array(guess.drafted[:-1], np.int32)
        slots = self._slots(row.pages, np.arange(start, start + len(drafted)))
        self._keys[slots] = self._keys_of(row, start, drafted)

    def _batch(self, chunks: list[_Chunk], *, samples: bool) -> Batch:
        for chunk in chunks:
            slots = self._slots(chunk.row.pages, np.arange(chunk.start, chunk.end))
            self._keys[slots] = chunk.row.keys[chunk.start : chunk.end] if chunk.is_right else 0
        drawn = np.array([FROM_DEVICE], np.int32)
        size = len(chunks)
        return Batch(
            rows=np.array([chunk.row.number for chunk in chunks], np.int32),
            q_lens=np.array(list(map(len, chunks)), np.int32),
            kv_lens=np.array([chunk.end for chunk in chunks], np.int32),
            token_ids=np.concatenate([drawn if chunk.token_ids is None else chunk.token_ids for chunk in chunks]),
            page_writes=_NO_PAGE_WRITES,
            samples=np.full(size, samples, np.bool_),
            score_from=np.full(size, -1, np.int32),
            top_logprobs=np.full(size, -1, np.int32),
            setups=self._new_setups(),
        )

    def _new_setups(self) -> list[RowSetup]:
        setups, self._setups = list(self._setups.values()), {}
        return setups


def known_from(request: Request, start: int) -> npt.NDArray[np.int32]:
    """Its tokens from one on."""
    if start >= request.prompt_len:
        return np.array(request.output_ids[start - request.prompt_len :], np.int32)
    return request.known_ids()[start:]
