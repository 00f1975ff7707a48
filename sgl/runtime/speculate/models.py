"""Drafters that compute on the device: a draft model, or an EAGLE-3 head.

Both draw with the seed and position of the model's own draw, so that a draft equals it wherever the distributions
agree (Daliri, Musco, Suresh, arXiv 2408.07978). Their KV lies at the slots of the model's: prompts are filled in within
the step that computes them, so cached prefixes, forks and resumed requests find it; other tokens when the request is
next asked about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from sgl.runtime.batch import FROM_DEVICE, Batch, Int32Array, Int64Array, PendingStep, RowSetup
from sgl.runtime.runner.drafts import DraftRunner, HeadRunner
from sgl.runtime.runner.observer import ObservedStep, Observer
from sgl.runtime.scheduler.request import Request
from sgl.runtime.speculate.drafter import NO_DRAFT, Draft, Drafter, DraftRequest

_MOST_FORCED = 8  # tokens that a head goes through one by one, before it drafts
_NO_PAGES: Int32Array = np.empty(0, np.int32)
_NO_PAGE_WRITES: Int32Array = np.empty((0, 3), np.int32)


@dataclass(slots=True)
class _Row:
    """A request's row, as the drafter has computed it."""

    known: Int32Array  # [n] tokens at its first step
    done: int = 0  # tokens whose KV is right
    marked: int = 0  # of them, those noted as filled in
    pages: Int32Array = field(default_factory=lambda: _NO_PAGES)  # known to the runner
    is_blind: bool = False  # it has seen images, which the drafter does not
    drafted: list[int] = field(default_factory=list)  # tokens computed behind `done`, which may yet be right


@dataclass(slots=True)
class _Chunk:
    """Tokens [start, end) of a row to compute; None: the one that was drawn last."""

    row: int
    start: int
    end: int
    token_ids: Int32Array | None

    def cut(self, length: int) -> tuple[_Chunk, _Chunk | None]:
        """Its first `length` known tokens, and the others if there are any."""
        at, ids = self.start + length, self.token_ids
        if at >= self.end or ids is None:
            return self, None
        return _Chunk(self.row, self.start, at, ids[:length]), _Chunk(self.row, at, self.end, ids[length:])


class ModelDrafter(Drafter, Observer):
    """A draft model. `Drafter` and `Observer` of one engine."""

    costs_device_time = True
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
    ) -> None:
        """num_slots: of KV. max_positions: beyond which nothing is drafted. num_steps: drafts at most, each a forward
        pass. most_tokens: of a pass that fills prompts in, and of those that a step finds missing, at most."""
        self._runner = runner
        self._page_size = page_size
        self._max_positions = max_positions
        self._num_steps = num_steps
        self._most_tokens = most_tokens
        self._left = most_tokens
        """Missing tokens that may yet be filled in until the model's next step."""
        self._is_filled = np.zeros(num_slots, np.bool_)
        """Of tokens that the model has computed, whether this drafter has, too."""
        self._rows: dict[int, _Row] = {}
        self._row_of: dict[int, tuple[int, _Row]] = {}  # by uid
        self._setups: dict[int, RowSetup] = {}  # by row, those that the runner does not know yet

    # ---- steps of the model

    def observe(self, step: ObservedStep) -> None:
        """See `Observer`. Fills prompts in."""
        batch, pages = step.batch, step.pages
        self._read(step)
        for setup in batch.setups:
            self._rows[setup.row] = _Row(np.concatenate((setup.prompt_ids, setup.output_ids)))
            params = setup.params
            if params.has_penalties:  # such requests are not asked about
                params = replace(params, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0)
            self._setups[setup.row] = replace(setup, params=params)
        starts = batch.kv_lens - batch.q_lens
        slots = self._slots(pages, starts, batch.q_lens)
        self._is_filled[slots] = False
        new_rows = {setup.row for setup in batch.setups}
        chunks: list[_Chunk] = []
        self._left = self._most_tokens
        ends = np.cumsum(batch.q_lens)
        for b in np.flatnonzero(batch.token_ids[ends - batch.q_lens] != FROM_DEVICE).tolist():
            number, start, end = int(batch.rows[b]), int(starts[b]), int(batch.kv_lens[b])
            row = self._rows.get(number)
            if row is None or b in batch.drafts:
                continue
            row.is_blind |= b in batch.places or (batch.offsets is not None and bool(batch.offsets[b]))
            if row.is_blind or end > self._max_positions:
                continue
            self._place(row, number, pages[b, : -(-end // self._page_size)])
            if number in new_rows:
                row.done = self._filled_len(pages[b], start)
            elif row.done < start:
                continue  # later, with the next draft
            first = min(row.done, start)  # what is cached may lack this drafter's part
            if start - first > self._left:
                continue  # by parts, before the next drafts
            self._left -= start - first
            ids = np.concatenate((row.known[first:start], batch.token_ids[ends[b] - batch.q_lens[b] : ends[b]]))
            skipped = max(self._first - first, 0)
            if first + skipped < end:
                chunks.append(_Chunk(number, first + skipped, end, ids[skipped:]))
            row.done, row.marked, row.drafted = end, 0, []
            self._mark(row)
        self._fill(chunks)

    def _fill(self, chunks: list[_Chunk]) -> None:
        """Compute known tokens, in passes of so many as the device's memory was planned for."""
        rest = deque(chunks)
        while rest:
            part, left = list[_Chunk](), self._most_tokens
            while rest and left:
                chunk, behind = rest.popleft().cut(left)
                if behind is not None:
                    rest.appendleft(behind)
                part.append(chunk)
                left -= chunk.end - chunk.start
            self._runner.forward(self._batch(part, samples=False))

    def loaded(self, pages: Int32Array) -> None:
        """See `Observer`. A head goes on without the features that are lost."""
        self._is_filled.reshape(-1, self._page_size)[pages] = False

    def close(self) -> None:
        self._runner.close()

    def _read(self, step: ObservedStep) -> None:
        """What else of the step is needed."""

    def _filled_len(self, pages: Int32Array, length: int, start: int = 0) -> int:
        """Leading tokens of `length` in these pages that are filled in, as those before `start` are."""
        filled = self._is_filled[self._slots(pages[None], np.array([start]), np.array([length - start]))]
        return length if filled.all() else start + int(filled.argmin())

    def _slots(
        self, pages: Int32Array, starts: Int32Array | Int64Array, lengths: Int32Array | Int64Array
    ) -> Int64Array:
        """Of so many tokens of each row from its start on."""
        ends = np.cumsum(lengths, dtype=np.int64)
        of_row = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(int(ends[-1])) - np.repeat(ends - lengths - starts, lengths)
        index, offset = np.divmod(positions, self._page_size)
        slots: Int64Array = pages[of_row, index].astype(np.int64) * self._page_size + offset
        return slots

    def _place(self, row: _Row, number: int, pages: Int32Array) -> None:
        """Tell the runner of pages that are new, or another's with the same tokens in place of the row's own."""
        common = min(len(row.pages), len(pages))
        changed = np.flatnonzero(row.pages[:common] != pages[:common])
        first = int(changed[0]) if len(changed) else common
        if first == len(pages):
            return
        self._runner.place(number, first, pages[first:])
        row.pages = np.concatenate((pages, row.pages[len(pages) :]))
        reused = min(row.done, (int(changed[-1]) + 1) * self._page_size) if len(changed) else 0
        if first * self._page_size < reused:
            filled = self._filled_len(row.pages, reused, first * self._page_size)
            if filled < reused:
                row.done, row.drafted = filled, []
                row.marked = min(row.marked, filled)

    def _mark(self, row: _Row) -> None:
        """Note for whoever finds them in the cache which tokens are filled in."""
        if row.marked < row.done:
            span = np.array([row.marked]), np.array([row.done - row.marked])
            self._is_filled[self._slots(row.pages[None], *span)] = True
            row.marked = row.done

    # ---- requests

    def enter(self, request: Request) -> None:
        row = self._rows.get(request.row)
        if row is not None:
            self._row_of[request.uid] = request.row, row

    def judge(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """See `Drafter`. What was accepted shows in the output."""

    def leave(self, request: Request) -> None:
        number, row = self._row_of.pop(request.uid, (-1, None))
        if row is None or self._rows.get(number) is not row:
            return
        del self._rows[number]
        if request.is_done:  # else its pages may be another's by now
            self._catch_up(row, request)
            self._mark(row)

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter`. A row that lacks many tokens has no drafts until they are filled in, some in each step."""
        guesses = [guess for index, asked in enumerate(wanted) if (guess := self._guess(index, asked)) is not None]
        if sum(guess.num_missing for guess in guesses) > self._left:
            guesses = self._within_limit(guesses)
        if sum(guess.reach - guess.start for guess in guesses) > self._most_tokens:
            self._fill([chunk for guess in guesses if (chunk := guess.pop_known()) is not None])
        steps: list[tuple[list[_Guess], PendingStep]] = []
        turn = 0
        while going := [guess for guess in guesses if turn < guess.num_steps]:
            chunks = [guess.chunk(turn) for guess in going]
            steps.append((going, self._runner.launch(self._batch(chunks, samples=True))))
            turn += 1
        drafts = [NO_DRAFT] * len(wanted)
        for turn, (going, pending) in enumerate(steps):
            for guess, token in zip(going, pending.wait().next_tokens.tolist(), strict=True):
                if turn >= guess.num_forced:
                    guess.drafted.append(token)
        for guess in guesses:
            drafts[guess.index] = Draft(guess.drafted)
            self._note(guess)
        return drafts

    def _within_limit(self, guesses: list[_Guess]) -> list[_Guess]:
        """Those whose missing tokens may be filled in at once. Of the first other one, fill in as many as may be."""
        chosen = list[_Guess]()
        for guess in sorted(guesses, key=lambda guess: guess.num_missing):
            if guess.num_missing <= self._left:
                chosen.append(guess)
                self._left -= guess.num_missing
            elif self._left and (missing := guess.pop_known()) is not None:
                part, _ = missing.cut(self._left)
                self._fill([part])
                guess.row.done, self._left = part.end, 0
        return chosen

    def _guess(self, index: int, asked: DraftRequest) -> _Guess | None:
        """What to compute for a request; None: nothing can be drafted."""
        request = asked.request
        row, known = self._rows.get(request.row), request.num_known
        most = min(asked.most, self._num_steps, self._max_positions - known + 1)
        if row is None or row.is_blind or request.params.has_penalties or known <= self._first or most < 1:
            return None
        self._catch_up(row, request)
        self._place(row, request.row, asked.pages[: -(-(known + most - 1) // self._page_size)])
        self._mark(row)
        reach = self._reach(asked)
        num_forced = known - reach
        if num_forced > _MOST_FORCED:
            return None
        if row.done + self._left < reach - 1 and row.done < asked.num_computed:  # others may have filled in some
            row.done = self._filled_len(row.pages, asked.num_computed, row.done)
        start = max(min(row.done, reach - 1), self._first)
        if start >= reach:
            return None
        return _Guess(index, row, request.row, start, reach, _known_from(request, start), num_forced, most)

    def _catch_up(self, row: _Row, request: Request) -> None:
        """Count the drafts of last time that became tokens: they are computed."""
        if row.drafted:
            known, row.drafted = _known_from(request, row.done)[: len(row.drafted)], row.drafted
            stands = known == np.array(row.drafted[: len(known)], np.int32)
            row.done += len(known) if stands.all() else int(stands.argmin())
            row.drafted = []

    def _reach(self, asked: DraftRequest) -> int:
        """Known tokens that can be computed at once."""
        return asked.request.num_known

    def _note(self, guess: _Guess) -> None:
        row = guess.row
        row.done, row.drafted = guess.reach, guess.drafted[:-1]
        row.marked = min(row.marked, row.done - 1)  # which the model is yet to compute

    def _batch(self, chunks: list[_Chunk], *, samples: bool) -> Batch:
        setups, self._setups = list(self._setups.values()), {}
        drawn = np.array([FROM_DEVICE], np.int32)
        size = len(chunks)
        return Batch(
            rows=np.array([chunk.row for chunk in chunks], np.int32),
            q_lens=np.array([chunk.end - chunk.start for chunk in chunks], np.int32),
            kv_lens=np.array([chunk.end for chunk in chunks], np.int32),
            token_ids=np.concatenate([drawn if chunk.token_ids is None else chunk.token_ids for chunk in chunks]),
            page_writes=_NO_PAGE_WRITES,
            samples=np.full(size, samples, np.bool_),
            score_from=np.full(size, -1, np.int32),
            top_logprobs=np.full(size, -1, np.int32),
            setups=setups,
        )


class EagleDrafter(ModelDrafter):
    """An EAGLE-3 head."""

    name = "eagle3"
    _first = 1

    def __init__(self, runner: HeadRunner, layers: tuple[int, ...], **options: int) -> None:
        """layers: see `Observer`. options: as of `ModelDrafter`."""
        super().__init__(runner, **options)
        self._head = runner
        self.layers = layers

    def _read(self, step: ObservedStep) -> None:
        self._head.read(step.hidden, step.slots)

    def _reach(self, asked: DraftRequest) -> int:
        """One token more than the model has computed: further ones need the head's own features."""
        return min(asked.request.num_known, asked.num_computed + 1)

    def _note(self, guess: _Guess) -> None:
        super()._note(guess)
        guess.row.drafted = []  # the model will make other features of these


@dataclass(slots=True)
class _Guess:
    """A request's draft under way."""

    index: int  # of what is wanted
    row: _Row
    number: int  # of the row
    start: int
    reach: int
    known: Int32Array  # tokens from start on
    num_forced: int  # known tokens behind `reach`, each a step of its own
    most: int
    drafted: list[int] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Forward passes."""
        return self.num_forced + self.most

    @property
    def num_missing(self) -> int:
        """Tokens before the last that the first pass would compute, too."""
        return self.reach - 1 - self.start

    def pop_known(self) -> _Chunk | None:
        """What the first pass would compute before the last token of its own; it is left out there."""
        start, end = self.start, self.reach - 1
        ids, self.start, self.known = self.known[: end - start], end, self.known[end - start :]
        return _Chunk(self.number, start, end, ids) if len(ids) else None

    def chunk(self, turn: int) -> _Chunk:
        """What one of them computes."""
        if not turn:
            return _Chunk(self.number, self.start, self.reach, self.known[: self.reach - self.start])
        at = self.reach + turn - 1
        is_known = turn <= self.num_forced
        ids = self.known[at - self.start : at - self.start + 1] if is_known else None
        return _Chunk(self.number, at, at + 1, ids)


def _known_from(request: Request, start: int) -> npt.NDArray[np.int32]:
    """Its tokens from one on."""
    if start >= request.prompt_len:
        return np.array(request.output_ids[start - request.prompt_len :], np.int32)
    return request.known_ids()[start:]
