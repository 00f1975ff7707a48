"""Drafters that compute on the device: a draft model, or an EAGLE-3 head.

Both draw with the seed and position of the model's own draw, so that a draft equals it wherever the distributions
agree (Daliri, Musco, Suresh, arXiv 2408.07978). Their KV lies at the slots of the model's, and each slot has a key: of
the tokens up to the one whose KV lies there. So cached prefixes, forks and resumed requests find what is right, and
nothing is done in a step, nor when a page changes hands. What is missing is computed when a request is asked about: a
draft model needs tokens alone. A head needs the model's hidden states, which are kept in steps of requests that it
follows; it attends to no token without them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sgl.runtime.batch import FROM_DEVICE, Batch, Int32Array, Int64Array, PendingStep, RowSetup
from sgl.runtime.runner.drafts import DraftRunner, HeadRunner
from sgl.runtime.runner.observer import ObservedStep, Observer
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.step import Step
from sgl.runtime.speculate.drafter import NO_DRAFT, DeviceDrafter, Draft, DraftRequest

_Keys = npt.NDArray[np.uint64]
_Span = tuple[int, int]  # tokens from the first up to the second
_LONGEST_HOLE = 64  # tokens without features, behind which a head follows a request no more
_MOST_HOLES = 1 << 12  # tokens without KV in all, likewise
_MOST_FORCED = 8  # tokens that a head goes through one by one, before it drafts
_NO_IDS: Int32Array = np.empty(0, np.int32)
_NO_PAGE_WRITES: Int32Array = np.empty((0, 3), np.int32)


@dataclass(slots=True)
class _Followed:
    """A request whose features are kept."""

    row: int
    slots: Int32Array  # [max_positions] by token: where its feature went; 0: nowhere, which is the dummy page
    sure: int = 0  # at the latest step that was seen, tokens that were known for good,
    end: int = 0  # and all tokens, with the drafts
    step: int = 0  # its number

    def settle(self, num_computed: int, step: int) -> None:
        """So many tokens are computed for good. step: the latest; if it was not seen, nor was what became of drafts."""
        self.slots[num_computed if self.step == step else self.sure : self.end] = 0
        self.sure = self.end = min(self.end, num_computed if self.step == step else self.sure)


@dataclass(slots=True, eq=False)
class _Row:
    """A request that has been asked about."""

    number: int
    keys: _Keys  # of its known tokens, with room for all
    num_keys: int = 0
    done: int = 0  # tokens whose KV is right, or is not to be had
    pages: Int32Array = field(default_factory=lambda: _NO_IDS)  # known to the runner
    holes: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))  # of those done: without KV, ascending


@dataclass(slots=True)
class _Chunk:
    """Tokens [start, end) of a row to compute; None: the one that was drawn last."""

    row: _Row
    start: int
    end: int
    token_ids: Int32Array | None
    is_right: bool = True  # its KV is what the tokens give, whatever was drafted

    def cut(self, length: int) -> tuple[_Chunk, _Chunk | None]:
        """Its first `length` known tokens, and the others if there are any."""
        at, ids = self.start + length, self.token_ids
        if at >= self.end or ids is None:
            return self, None
        return _Chunk(self.row, self.start, at, ids[:length]), _Chunk(self.row, at, self.end, ids[length:])


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
    ) -> None:
        """num_slots: of KV. max_positions: beyond which nothing is drafted. num_steps: drafts at most, each a forward
        pass. most_tokens: of a pass, and of missing tokens that are computed before a step, at most."""
        self._runner = runner
        self._page_size = page_size
        self._max_positions = max_positions
        self._num_steps = num_steps
        self._most_tokens = most_tokens
        self._keys: _Keys = np.zeros(num_slots, np.uint64)
        """By slot, of the tokens up to the one whose KV lies there: sums of tokens times the factors of positions."""
        self._factors = np.random.default_rng(0).integers(1 << 63, size=max_positions, dtype=np.uint64) * 2 + 1
        self._rows: dict[int, _Row] = {}  # by uid
        self._setups: dict[int, RowSetup] = {}  # by row, those that the runner does not know yet

    def grade(self, request: Request) -> int | None:
        """See `DeviceDrafter`."""
        return 0 if request.uid in self._rows else None

    def close(self) -> None:
        self._runner.close()

    # ---- requests

    def enter(self, request: Request) -> None:
        if request.uid in self._rows or request.layout is not None or request.params.has_penalties:
            return  # images, which the drafter does not see
        room = min(request.prompt_len + request.max_new_tokens, self._max_positions)
        self._rows[request.uid] = _Row(request.row, np.empty(room, np.uint64))
        self._setups[request.row] = RowSetup(
            request.row, request.params, request.seed, request.prompt_ids, np.empty(0, np.int32)
        )

    def leave(self, request: Request) -> None:
        self._rows.pop(request.uid, None)

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter`. A row that lacks many tokens has no drafts until they are filled in, some in each step."""
        guesses = [guess for index, asked in enumerate(wanted) if (guess := self._guess(index, asked)) is not None]
        guesses = self._within_limit(guesses)
        self._fill([chunk for guess in guesses for chunk in guess.earlier])
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
            drafts[guess.index] = Draft(guess.drafted, guess.grade)
            self._note(guess)
        return drafts

    def _within_limit(self, guesses: list[_Guess]) -> list[_Guess]:
        """Those whose missing tokens may be filled in at once. Of the first other one, fill in as many as may be."""
        chosen, left = list[_Guess](), self._most_tokens
        for guess in sorted(guesses, key=lambda guess: guess.num_missing):
            if guess.num_missing <= left:
                chosen.append(guess)
                left -= guess.num_missing
                continue
            last = guess.pop_known()
            for chunk in guess.earlier if last is None else [*guess.earlier, last]:
                if left:
                    part, _ = chunk.cut(left)
                    self._fill([part])
                    guess.row.done = part.end
                    left -= part.end - part.start
        return chosen

    def _fill(self, chunks: list[_Chunk]) -> None:
        """Compute known tokens, in passes of so many as the device's memory was planned for."""
        rest = deque(chunks)
        while rest:
            part, left = list[_Chunk](), self._most_tokens
            while rest and left and rest[0].row not in [chunk.row for chunk in part]:
                chunk, behind = rest.popleft().cut(left)
                if behind is not None:
                    rest.appendleft(behind)
                part.append(chunk)
                left -= chunk.end - chunk.start
            self._runner.forward(self._batch(part, samples=False))

    def _guess(self, index: int, asked: DraftRequest) -> _Guess | None:
        """What to compute for a request; None: nothing can be drafted."""
        request = asked.request
        known = request.num_known
        most = min(asked.most, self._num_steps, self._max_positions - known + 1)
        if self.grade(request) is None or known <= self._first or most < 1:
            return None
        row = self._rows[request.uid]
        self._place(row, asked.pages)
        reach = self._reach(row, asked)
        if reach is None or known - reach > _MOST_FORCED:
            return None
        self._add_keys(row, _known_from(request, row.num_keys))
        spans, start = self._missing(row, asked, reach - 1), reach - 1
        if (grade := self.grade(request)) is None:
            return None  # no longer
        if spans and spans[-1][1] == start:
            start, _ = spans.pop()
        ids = _known_from(request, spans[0][0] if spans else start)
        first = known - len(ids)
        earlier = [_Chunk(row, its, end, ids[its - first : end - first]) for its, end in spans]
        return _Guess(index, grade, row, earlier, start, reach, ids[start - first :], known - reach, most)

    def _reach(self, row: _Row, asked: DraftRequest) -> int | None:
        """Known tokens that can be computed at once; None: nothing can be drafted yet."""
        return asked.request.num_known

    def _missing(self, row: _Row, asked: DraftRequest, end: int) -> list[_Span]:
        """Of the tokens before `end`, those to compute: of a draft model all from the first that is not right on."""
        right = self._are_right(row, np.arange(row.done, max(row.done, end)))
        row.done = end if right.all() else row.done + int(right.argmin())
        return [(row.done, end)] if row.done < end else []

    def _are_right(self, row: _Row, tokens: Int64Array) -> npt.NDArray[np.bool_]:
        """[n] whether the KV of these is."""
        right: npt.NDArray[np.bool_] = self._keys[self._slots(row.pages, tokens)] == row.keys[tokens]
        return right

    def _slots(self, pages: Int32Array, tokens: Int64Array) -> Int64Array:
        index, offset = np.divmod(tokens, self._page_size)
        slots: Int64Array = pages[index].astype(np.int64) * self._page_size + offset
        return slots

    def _add_keys(self, row: _Row, token_ids: Int32Array) -> None:
        """Those of its next tokens."""
        start, end = row.num_keys, row.num_keys + len(token_ids)
        row.keys[start:end] = self._keys_of(row, start, token_ids)
        row.num_keys = end

    def _keys_of(self, row: _Row, start: int, token_ids: Int32Array) -> _Keys:
        keys = (token_ids.astype(np.uint64) + np.uint64(1)) * self._factors[start : start + len(token_ids)]
        if start:
            keys[:1] += row.keys[start - 1]
        return np.cumsum(keys, dtype=np.uint64)

    def _place(self, row: _Row, pages: Int32Array) -> None:
        """Tell the runner of pages that are new, or another's with the same tokens in place of the row's own."""
        common = min(len(row.pages), len(pages))
        changed = np.flatnonzero(row.pages[:common] != pages[:common])
        first = int(changed[0]) if len(changed) else common
        if first < len(pages):
            self._runner.place(row.number, first, pages[first:])
            row.pages, row.done = pages.copy(), min(row.done, first * self._page_size)

    def _note(self, guess: _Guess) -> None:
        """What was drafted is computed, but for the last one, and may yet be right."""
        row, start = guess.row, guess.reach
        row.done = start
        drafted = np.array(guess.drafted[:-1], np.int32)
        slots = self._slots(row.pages, np.arange(start, start + len(drafted)))
        self._keys[slots] = self._keys_of(row, start, drafted)

    def _batch(self, chunks: list[_Chunk], *, samples: bool) -> Batch:
        for chunk in chunks:
            slots = self._slots(chunk.row.pages, np.arange(chunk.start, chunk.end))
            self._keys[slots] = chunk.row.keys[chunk.start : chunk.end] if chunk.is_right else 0
        setups, self._setups = list(self._setups.values()), {}
        drawn = np.array([FROM_DEVICE], np.int32)
        size = len(chunks)
        return Batch(
            rows=np.array([chunk.row.number for chunk in chunks], np.int32),
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

    def follow(self, *, is_on: bool) -> None:
        """See `DeviceDrafter`."""
        self._follows = is_on

    def wants(self, step: Step) -> bool:
        """See `DeviceDrafter`."""
        self._step += 1
        batch, followed = step.batch, self._followed
        begun = {setup.row for setup in batch.setups}
        for request in step.requests if begun else ():
            if request.row in begun:
                followed.pop(request.uid, None)
                can_draft = request.layout is None and not request.params.has_penalties
                if self._follows and can_draft and request.max_new_tokens > len(request.output_ids) + 1:
                    followed[request.uid] = _Followed(request.row, np.zeros(self._max_positions, np.int32))
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
        if request.uid not in self._followed or request.uid not in self._rows:
            return None
        return int(len(self._rows[request.uid].holes) > 1)  # a fork's first own entry is one

    def observe(self, step: ObservedStep) -> None:
        """See `Observer`."""
        self._head.read(step.hidden, step.slots)
        batch = step.batch
        each = zip(self._seen, batch.q_lens.tolist(), batch.kv_lens.tolist(), strict=True)
        for b, (followed, q_len, end) in enumerate(each):
            if followed is not None:
                tokens = np.arange(end - q_len, min(end, self._max_positions))
                followed.settle(end - q_len, self._step - 1)
                followed.slots[tokens] = self._slots(step.pages[b], tokens)
                followed.sure, followed.end, followed.step = end - len(batch.drafts.get(b, ())), end, self._step

    def leave(self, request: Request) -> None:
        super().leave(request)
        followed = self._followed.get(request.uid)
        if followed is not None and (request.is_done or followed.row != request.row):  # not of another row by now
            del self._followed[request.uid]

    def _reach(self, row: _Row, asked: DraftRequest) -> int | None:
        """One token more than the model has computed: further ones need the head's own features."""
        request, num_computed = asked.request, asked.num_computed
        followed = self._followed[request.uid]
        followed.settle(num_computed, self._step)
        if not self._has(row, followed, np.array([num_computed - 1])).all():  # it rested in the latest step
            if followed.end + _LONGEST_HOLE < num_computed:  # and for long
                del self._followed[request.uid]
            return None
        return min(request.num_known, num_computed + 1)

    def _has(self, row: _Row, followed: _Followed, tokens: Int64Array) -> npt.NDArray[np.bool_]:
        """[n] whether there are features of these: another's page may have taken the place of the row's own."""
        has: npt.NDArray[np.bool_] = followed.slots[tokens] == self._slots(row.pages, tokens)
        return has

    def _missing(self, row: _Row, asked: DraftRequest, end: int) -> list[_Span]:
        """Those whose predecessors have features. Others, which it never saw, are holes."""
        start = max(row.done, self._first)
        has = self._has(row, self._followed[asked.request.uid], np.arange(start, max(start, end)) - 1)
        holes = np.concatenate((row.holes[row.holes < start], start + np.flatnonzero(~has)))
        row.holes = holes[~self._are_right(row, holes)]  # others may have seen these
        if len(row.holes) > _MOST_HOLES:
            del self._followed[asked.request.uid]
        self._head.skip(row.number, row.holes, len(row.pages) * self._page_size)
        edges = start + np.flatnonzero(np.diff(has, prepend=False, append=False))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    def _note(self, guess: _Guess) -> None:
        """The model will make other features of what was drafted."""
        guess.row.done = guess.reach


@dataclass(slots=True)
class _Guess:
    """A request's draft under way."""

    index: int  # of what is wanted
    grade: int
    row: _Row
    earlier: list[_Chunk]  # missing, and not right before `start`
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
        """Tokens before the last that the first pass needs or would compute, too."""
        return sum(its.end - its.start for its in self.earlier) + self.reach - 1 - self.start

    def pop_known(self) -> _Chunk | None:
        """What the first pass would compute before the last token of its own; it is left out there."""
        start, end = self.start, self.reach - 1
        ids, self.start, self.known = self.known[: end - start], end, self.known[end - start :]
        return _Chunk(self.row, start, end, ids) if len(ids) else None

    def chunk(self, turn: int) -> _Chunk:
        """What one of them computes."""
        if not turn:
            return _Chunk(self.row, self.start, self.reach, self.known[: self.reach - self.start])
        at = self.reach + turn - 1
        ids = self.known[at - self.start : at - self.start + 1] if turn <= self.num_forced else None
        return _Chunk(self.row, at, at + 1, ids, is_right=False)


def _known_from(request: Request, start: int) -> npt.NDArray[np.int32]:
    """Its tokens from one on."""
    if start >= request.prompt_len:
        return np.array(request.output_ids[start - request.prompt_len :], np.int32)
    return request.known_ids()[start:]
