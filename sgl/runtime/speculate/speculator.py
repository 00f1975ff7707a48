"""Decides before each step which rows have drafts, and which."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from time import perf_counter, thread_time
from typing import NamedTuple

from sgl.runtime.batch import Batch, Int32Array
from sgl.runtime.constraints.request_matcher import RequestMatcher
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.scheduler.step import Step
from sgl.runtime.speculate.budget import Budget, size_of
from sgl.runtime.speculate.drafter import NO_DRAFT, DeviceDrafter, Draft, Drafter, DraftRequest

_FIRST_PAUSE, _LONGEST_PAUSE = 4, 128  # steps without a look, after looks that found no gain
_LOOKING = 0.01  # of a step's time, for looks that find no gain, where a look costs nothing else
_WAITING = 0.02  # of the time, for looks that find nothing, before which no step is begun
_PLAIN, _PLAIN_STEPS = 128, 3  # steps with drafts, after which so many without are measured anew
_TRIED = 4  # tokens of a trial, whatever the budget says, of all rows
_TRIAL = 8  # looks with drafts of a model, in a trial of it,
_EMPTY_LOOK = 1 / 8  # of such a look is one without
_TRYING = 0.01  # of the time, for such trials
_LONGEST_REST = 1 << 14  # steps without one


class _Guess(NamedTuple):
    """What a drafter proposed for a request."""

    request: Request
    drafter: Drafter
    draft: Draft
    share: float  # of it that stands, by measurement
    at: int  # number of output tokens before it


class Speculator:
    """The drafters of one engine. Single-threaded; see `Drafter` for who is told what."""

    def __init__(
        self,
        scheduler: Scheduler,
        drafters: Sequence[Drafter] = (),
        models: Sequence[DeviceDrafter] = (),
        *,
        most: int = 0,
        jumps: bool = True,
        pins: bool = False,
        budget: Budget | None = None,
        is_on_host: bool = False,
    ) -> None:
        """models: drafters that take time on the device. most: drafts of a row, at most. jumps: whether certain tokens
        are appended. pins: see `EngineLoop`. budget: None: each row has as many drafts as are proposed. is_on_host:
        whether steps are computed by this thread, so that its time is theirs, whoever else has the processor, and a
        look costs nothing but its own."""
        self._scheduler = scheduler
        self._hosts, self._models = list(drafters), list(models)
        self._drafters = [*drafters, *models]
        self._most = most
        self._jumps, self._pins = jumps, pins
        self._budget = budget
        self._is_on_host = is_on_host
        self._clock = thread_time if is_on_host else perf_counter
        self._entered: dict[int, tuple[Request, int]] = {}  # by uid: what drafters were told of, and its row
        self._guesses: dict[int, _Guess] = {}  # the latest, by uid
        self._pause = _FIRST_PAUSE
        self._until_look = 0  # steps
        self._since_plain = 0  # steps with drafts
        self._since_drafts = 0  # steps
        self._waited = False  # whether the step under way began only when the one before was handled
        self._follows = True  # whether models are asked
        self._trial = 0.0  # looks left in which they are, though they did not pay
        self._trial_size, self._trial_seconds = 0, 0.0  # of which rows it is, and what it took
        self._num_steps: Counter[int] = Counter()  # by `size_of` their rows
        self._rests: dict[int, int] = {}  # of these, where models do not pay: number at the next trial
        self._size = 0  # of the latest step
        self._handled: float | None = None  # seconds, when results were last handled

    @property
    def wants_results(self) -> bool:
        """Whether the next step may have drafts, behind the tokens of the latest one."""
        return self._until_look <= 0 and bool(self._hosts or self._asks_models)

    @property
    def _asks_models(self) -> bool:
        return self._follows and any(model.is_ready for model in self._models)

    def observes(self, step: Step) -> bool:
        """Of each step before it is launched: whether a model wants to see it."""
        wanted = [model.wants(step) for model in self._models]  # all are told
        return any(wanted)

    def draft(self, hinted: Iterable[Request] = ()) -> None:
        """Give drafts to rows of the next step. Nothing may be in flight. hinted: requests whose constraint tells a
        token that is likely; without drafters, only these have drafts."""
        if not self.wants_results:
            for request in hinted:
                self._give(request, NO_DRAFT, 1)
            return
        self._waited = not self._is_on_host
        running = self._scheduler.memory.running
        for uid in [uid for uid, (request, row) in self._entered.items() if request.row != row]:
            self._leave(uid)
        if not running:  # which models pay is not known before requests are admitted
            return
        requests = [request for request in running.values() if self._scheduler.may_draft(request)]
        for request in requests:
            self._enter(request)
            if request.drafts:  # left from a step that had no room
                self._scheduler.draft(request, ())
        is_plain_due = self._is_plain_due(len(running))
        for model in self._models:
            model.is_resting = is_plain_due
        if is_plain_due:
            return
        self._choose(len(running))
        began = self._clock()
        wanted = [asked for request in requests if (asked := self._draft_request(request)) is not None]
        guesses = self._propose(wanted, len(running))
        for guess in guesses:
            self._guesses[guess.request.uid] = guess
        pays, is_trial = self._divide(guesses, len(running)), self._trial > 0 and self._asks_models
        if is_trial:
            self._went_on(is_drafted=any(guess.drafter in self._models for guess in guesses))
        if pays:
            self._pause = _FIRST_PAUSE
        elif not is_trial:
            self._rest_from_looks(len(running), self._clock() - began, has_guesses=bool(guesses))
        for request in hinted:
            if not request.drafts:
                self._give(request, NO_DRAFT, 1)

    def measure(self, batch: Batch) -> None:
        """A step's results were handled: it took the time since those of the one before."""
        if self._budget is None or not self._drafters:
            return
        self._until_look -= 1
        self._since_drafts += 1
        before, self._handled = self._handled, self._clock()
        waited, self._waited = self._waited, False
        num_rows, longest = len(batch), int(batch.q_lens.max())
        size = size_of(num_rows)
        self._num_steps[size] += 1
        if not self._follows and (size != self._size or self._num_steps[size] >= self._rests.get(size, 0)):
            self._choose(num_rows)
        self._size = size
        if before is None or batch.setups or longest > self._most + 1 or not batch.samples.all():
            return
        num_drafts, seconds = int(batch.q_lens.sum()) - num_rows, self._handled - before
        self._trial_seconds += seconds - self._budget.costs.plain(num_rows)
        self._budget.costs.saw(num_rows, num_drafts, longest, seconds, waited=waited or batch.is_observed)

    def rest(self) -> None:
        """There is nothing to do for a while."""
        self._handled = None

    def ended(self, request: Request) -> None:
        """A request ended, perhaps before it had a row."""
        self._judge(request)
        self._entered.pop(request.uid, None)
        for drafter in self._drafters:
            drafter.leave(request)

    def _choose(self, num_rows: int) -> None:
        """Whether models are asked: while they pay with so many rows, or to try whether they do by now."""
        if self._budget is None or not self._models:
            return
        shares = [self._budget.acceptance(model.name, 0).share for model in self._models]
        pays = any(any(self._budget.divide(num_rows, [(share, self._most)] * num_rows)) for share in shares)
        size = size_of(num_rows)
        num_steps = self._num_steps[size]
        if pays:
            self._trial = 0.0
            self._rests.pop(size, None)
        elif not self._trial and num_steps >= self._rests.setdefault(size, num_steps + _LONGEST_PAUSE):
            self._trial, self._trial_size, self._trial_seconds, self._until_look = _TRIAL, size, 0.0, 0
        self._follows = pays or self._trial > 0
        for model in self._models:
            model.follow(is_on=self._follows)

    def _went_on(self, *, is_drafted: bool) -> None:
        """A look was one of the trial. Behind the last one models rest, for so long that trials take little time."""
        self._trial -= 1.0 if is_drafted else _EMPTY_LOOK
        if self._trial <= 0 and self._budget is not None:
            self._trial, size, plain = 0.0, self._trial_size, self._budget.costs.plain(self._trial_size)
            rest = math.ceil(self._trial_seconds / (_TRYING * plain)) if plain else 0
            self._rests[size] = self._num_steps[size] + min(max(rest, _LONGEST_PAUSE), _LONGEST_REST)

    def _is_plain_due(self, num_rows: int) -> bool:
        """Whether the next steps have no drafts, to be measured."""
        if self._budget is None:
            return False
        self._since_plain += 1
        if self._since_plain >= _PLAIN or not self._budget.costs.plain(num_rows):
            self._since_plain = 0
            if not self._is_on_host:  # the first one of them waited
                self._until_look = _PLAIN_STEPS
            return True
        return False

    def _enter(self, request: Request) -> None:
        if request.uid not in self._entered:
            self._entered[request.uid] = request, request.row
            for drafter in self._drafters:
                drafter.enter(request)
        self._judge(request)

    def _leave(self, uid: int) -> None:
        request, _ = self._entered.pop(uid)
        self._judge(request)
        for drafter in self._drafters:
            drafter.leave(request)

    def _judge(self, request: Request) -> None:
        """See what became of the latest guess: also of one that no step verified."""
        guess = self._guesses.pop(request.uid, None)
        if guess is None:
            return
        came = request.output_ids[guess.at :]
        pairs = zip(guess.draft.token_ids, came, strict=False)
        rejected = next((i for i, (draft, token) in enumerate(pairs) if draft != token), None)
        num_tried = min(len(guess.draft.token_ids), len(came)) if rejected is None else rejected + 1
        num_accepted = num_tried if rejected is None else rejected
        if num_tried and self._budget is not None:
            seen = self._budget.acceptance(guess.drafter.name, guess.draft.grade)
            seen.saw(num_accepted, num_tried, max(1, len(self._entered)))
        guess.drafter.judge(request, guess.draft, num_accepted)

    def _draft_request(self, request: Request) -> DraftRequest | None:
        """None: there is no room for drafts, or not even for its last token."""
        memory = self._scheduler.memory
        rows = memory.rows
        most = min(self._most, request.max_new_tokens - len(request.output_ids) - 1)
        if most <= 0 or (reached := memory.reach(request, request.num_known + most)) < request.num_known:
            return None
        most = min(most, max(1, reached - request.num_known))
        pages: Int32Array = rows.pages[request.row, : rows.num_pages[request.row]]
        return DraftRequest(request, most, pages, int(rows.kv_len[request.row]))

    def _propose(self, requests: Sequence[DraftRequest], num_rows: int) -> list[_Guess]:
        """The best guess for each request. Drafters that take time on the device come last, for those where others are
        not as good."""
        best: dict[int, _Guess] = {}
        for drafter in self._hosts:
            self._ask(drafter, requests, best)
        for model in self._models:
            chosen = [asked for asked in requests if model.knows(asked.request)]
            if self._budget is not None:
                share = self._budget.acceptance(model.name, 0).share
                chosen = [it for it in chosen if (g := best.get(it.request.uid)) is None or g.share < share]
                if self._trial:
                    chosen = chosen[:_TRIED]
                elif not any(self._budget.divide(num_rows, [(share, asked.most) for asked in chosen])):
                    continue
            if self._follows:
                self._ask(model, chosen, best)
        return list(best.values())

    def _ask(self, drafter: Drafter, requests: Sequence[DraftRequest], best: dict[int, _Guess]) -> None:
        """Put what it drafts among the best guesses, by uid, where it is better."""
        if not requests:
            return
        for asked, draft in zip(requests, drafter.propose(requests), strict=True):
            if not draft.token_ids:
                continue
            share = 1.0 if self._budget is None else self._budget.acceptance(drafter.name, draft.grade).share
            before = best.get(asked.request.uid)
            if before is None or _worth(share, draft) > _worth(before.share, before.draft):
                num_tokens = len(asked.request.output_ids)
                best[asked.request.uid] = _Guess(asked.request, drafter, draft, share, num_tokens)

    def _divide(self, guesses: list[_Guess], num_rows: int) -> bool:
        """Give the guesses out, as many as pay, or some to try whether they do by now. False: none does."""
        numbers = [len(guess.draft.token_ids) for guess in guesses]
        pays = True
        if self._budget is not None:
            drafts = [(guess.share, number) for guess, number in zip(guesses, numbers, strict=True)]
            numbers = self._budget.divide(num_rows, drafts)
            pays = any(numbers)
            is_due = self._since_drafts >= _LONGEST_PAUSE  # to see what they take, and how many stand, by now
            if guesses and not pays and (is_due or self._trial > 0):
                numbers = self._budget.trial(num_rows, drafts)
        for guess, number in zip(guesses, numbers, strict=True):
            if number and self._give(guess.request, guess.draft, number):
                self._since_drafts = 0
        return pays and bool(guesses)

    def _rest_from_looks(self, num_rows: int, seconds: float, *, has_guesses: bool) -> None:
        """A look found no gain, and took so long."""
        if self._budget is None:
            return
        costs = self._budget.costs
        if self._is_on_host:
            pause = math.ceil(seconds / (_LOOKING * costs.plain(num_rows)))
            self._until_look = min(pause, _LONGEST_PAUSE)
            return
        if has_guesses:  # they took time
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._until_look = self._pause
        else:
            self._until_look = min(math.ceil(costs.waiting(num_rows) / _WAITING), _LONGEST_PAUSE)

    def _give(self, request: Request, draft: Draft, most: int) -> bool:
        """Whether it has a draft now."""
        most = min(most, request.max_new_tokens - len(request.output_ids) - 1)
        if most <= 0 or not self._scheduler.may_draft(request):
            return False
        token_ids = list(draft.token_ids[:most])
        matcher: RequestMatcher | None = request.owner.matcher
        if matcher is not None:
            token_ids = matcher.draft_tokens(
                token_ids,
                request.output_ids,
                request.max_new_tokens - len(request.output_ids),
                most,
                jumps=self._pins or (self._jumps and request.top_logprobs < 0),
                stop_ids=request.stop_ids,
            )
        if token_ids:
            self._scheduler.draft(request, token_ids)
        return bool(token_ids)


def _worth(share: float, draft: Draft) -> float:
    """Tokens that a draft is expected to give."""
    worth = 0.0
    for _ in draft.token_ids:
        worth = share * (1 + worth)
    return worth
