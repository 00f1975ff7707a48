"""Decides before each step which rows have drafts, and which."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from time import perf_counter, thread_time
from typing import NamedTuple

import numpy as np

from sgl.runtime.batch import Int32Array, StepResult
from sgl.runtime.constraints.request_matcher import RequestMatcher
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.scheduler.step import Step
from sgl.runtime.scheduler.verification import most_ahead, simulated
from sgl.runtime.speculate.budget import Budget
from sgl.runtime.speculate.drafter import NO_DRAFT, DeviceDrafter, Draft, Drafter, DraftRequest
from sgl.runtime.speculate.looks import Looks
from sgl.runtime.speculate.trials import LONGEST_PAUSE, Trials

_FIRST_PAUSE = 4  # steps without a look, after looks that found no gain; up to LONGEST_PAUSE
_LOOKING = 0.01  # of a step's time, for looks that find no gain, where a look costs nothing else
_WAITING = 0.02  # of the time, for looks that find nothing, before which no step is begun
_PLAIN_STEPS = 5  # without drafts, to be measured
_AHEAD = {False: 32, True: 4}
"""Steps with drafts of a model between looks, without or with others that may know better."""
_MOST_AHEAD = 7  # drafts of a row that goes ahead: steps with more are not replayed
_TRIED = 4  # tokens of a trial, whatever the budget says, of all rows


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
        budget: Budget | None = None,
        is_on_host: bool = False,
        spares_logprobs: bool = False,
    ) -> None:
        """models: drafters that take time on the device. most: drafts of a row, at most. is_on_host: whether steps are
        computed by this thread, so that its time is theirs, whoever else has the processor, and a look costs nothing
        but its own. spares_logprobs: requests that want log-probabilities have no drafts, whose number depends on
        measured time, as do the last bits of what is computed with them."""
        self._scheduler = scheduler
        self._hosts, self._models = list(drafters), list(models)
        self._drafters = [*drafters, *models]
        self._most = most
        self._budget = budget or Budget()
        self._trials = Trials(self._models, self._budget, most)
        self._is_on_host = is_on_host
        self._spares_logprobs = spares_logprobs
        self._clock = thread_time if is_on_host else perf_counter
        self._guesses: dict[int, _Guess] = {}  # the latest, by uid
        self._pause = _FIRST_PAUSE
        self._looks = Looks()
        self._has_looked = False  # before the step under way
        self._num_tokens = 0  # of all outputs, when results were last handled
        self._until_look = 0  # steps
        self._since_drafts = 0  # steps
        self._chain: DeviceDrafter | None = None  # whose are all drafts of the latest look,
        self._chained = 0  # so many of a row at most
        self._ahead = 0  # steps since it
        self._waited = False  # whether the step under way began only when the one before was handled
        self._handled: float | None = None  # seconds, when results were last handled

    @property
    def wants_results(self) -> bool:
        """Whether the next step may have drafts, behind the tokens of the latest one."""
        return self._until_look <= 0 and bool(self._hosts or self._asks_models)

    @property
    def _asks_models(self) -> bool:
        return self._trials.follows and any(model.is_ready for model in self._models)

    def observes(self, step: Step) -> bool:
        """Of each step before it is launched: whether a model wants to see it."""
        wanted = [model.wants(step) for model in self._models]  # all are told
        return any(wanted)

    def draft(self, hinted: Iterable[Request] = ()) -> None:
        """Give drafts to rows of the next step. Nothing may be in flight. hinted: requests whose constraint tells a
        token that is likely; without drafters, only these have drafts."""
        self._chain = None
        if self.wants_results and not self._look():
            return
        hinted = [request for request in hinted if not request.drafts]
        if not hinted:
            return
        running = self._scheduler.memory.running.values()
        room = self._scheduler.shares.draft_room() - sum(len(request.drafts) for request in running)
        for request in hinted:
            if room > 0 and self._give(request, NO_DRAFT, 1):
                room -= len(request.drafts)

    def go_ahead(self, latest: Step) -> Step | None:
        """The step behind the latest one, which is under way, with drafts of a model that the host need not know: not
        to be scheduled again, but launched. None: there is none, or it is time for a look."""
        model, requests, batch = self._chain, latest.requests, latest.batch
        if model is None or self._ahead >= _AHEAD[bool(self._hosts)]:
            return None
        table, before = self._scheduler.memory.rows.pages, [len(batch.drafts.get(b, ())) for b in range(len(batch))]
        if not model.may_go_ahead(latest, table) or any(its.owner.matcher is not None for its in requests):
            return None
        each = zip(requests, before, strict=True)
        most = [min(self._chained, _MOST_AHEAD, most_ahead(request, number)) for request, number in each]
        shares = [self._share(model, model.grade(request) or 0) for request in requests]
        wanted = np.array(self._budget.divide(len(requests), list(zip(shares, most, strict=True))), np.int64)
        if not wanted.any() or not self._budget.may_pass_look(len(requests)):
            return None
        step = self._scheduler.schedule_ahead(latest, wanted)
        if step is not None:
            self._ahead += 1
            self._budget.passed_look()
            model.go_ahead(step, table, np.array([simulated(number) for number in before], np.int64))
            step.batch.is_observed = self.observes(step)
        return step

    def computed(self, step: Step, result: StepResult) -> None:
        """A step was, and is handled next."""
        if step.batch.is_ahead:
            assert self._chain is not None, "no look came between"
            model = self._chain
            for b, request in enumerate(step.requests):
                if not request.is_done and b in result.drafts:
                    draft = Draft(result.drafts[b].tolist(), model.grade(request) or 0)
                    guess = _Guess(request, model, draft, self._share(model, draft.grade), len(request.output_ids))
                    self._guesses[request.uid] = guess

    def settle(self, step: Step) -> None:
        """What this one began behind, as it is ahead, was handled."""
        assert self._chain is not None, "it has drafts of a model"
        for request in step.requests:
            self._judge(request)
        self._chain.settle()

    def measure(self, step: Step) -> None:
        """A step's results were handled: it took the time since those of the one before."""
        if not self._drafters:
            return
        batch = step.batch
        self._until_look -= 1
        self._since_drafts += 1
        before, self._handled = self._handled, self._clock()
        waited, self._waited = self._waited, False
        looked, self._has_looked = self._has_looked or batch.is_ahead, False
        counters, num_tokens = self._scheduler.counters, self._num_tokens
        self._num_tokens = counters.generated_tokens + counters.forced_tokens
        num_rows, longest = len(batch), batch.longest
        if self._trials.may_change(num_rows):
            self._choose(num_rows)
        if before is None or batch.setups or not batch.samples.all():
            return
        seconds = self._handled - before
        if not self._is_on_host and (looked or not waited) and not _has_prompts(step):
            self._looks.saw(num_rows, self._num_tokens - num_tokens, seconds, looked=looked)
        if longest > self._most + 1:
            return
        self._trials.took(num_rows, seconds)
        num_drafts = len(batch.token_ids) - num_rows
        self._budget.costs.saw(num_rows, num_drafts, longest, seconds, waited=waited or batch.is_observed)

    def rest(self) -> None:
        """There is nothing to do for a while."""
        self._handled = None

    def ended(self, request: Request) -> None:
        """A request ended, perhaps before it had a row."""
        self._judge(request)
        for drafter in self._drafters:
            drafter.ended(request)

    def _look(self) -> bool:
        """Ask for drafts, and give them to rows where they pay. False: the next step is to have none at all."""
        self._waited = not self._is_on_host
        running = self._scheduler.memory.running
        if not running:  # which models pay is not known before requests are admitted
            return False
        requests = [request for request in running.values() if self._may_draft(request)]
        for request in requests:
            self._judge(request)
            if request.drafts:  # left from a step that had no room
                self._scheduler.draft(request, ())
        is_plain_due = self._budget.is_plain_due(len(running))
        for model in self._models:
            model.is_resting = is_plain_due
        if is_plain_due:
            if not self._is_on_host:  # the first one of them waited
                self._until_look = _PLAIN_STEPS
            return False
        self._choose(len(running), requests)
        began = self._clock()
        kv_len = self._scheduler.memory.rows.kv_len
        room = self._scheduler.shares.draft_room()
        wanted = [
            DraftRequest(request, most, num_computed=int(kv_len[request.row]))
            for request in requests
            if (most := min(self._most, self._most_drafts(request), room)) > 0
        ]
        guesses = self._propose(wanted, len(running))
        self._guesses |= {guess.request.uid: guess for guess in guesses}
        gains = self._divide(guesses, len(running), room)
        is_trial = self._trials.is_on and self._asks_models
        if is_trial:
            self._trials.looked(is_drafted=any(guess.drafter in self._models for guess in guesses))
        self._has_looked = not is_trial
        if not is_trial:
            self._looked(len(running), self._clock() - began, gains=gains, has_guesses=bool(guesses))
        return True

    def _may_draft(self, request: Request) -> bool:
        return self._scheduler.may_draft(request) and not (self._spares_logprobs and request.top_logprobs >= 0)

    def _choose(self, num_rows: int, requests: Collection[Request] = ()) -> None:
        if self._trials.choose(num_rows, requests):
            self._until_look = 0

    def _judge(self, request: Request) -> None:
        """See what became of the latest guess: also of one that no step verified."""
        guess = self._guesses.pop(request.uid, None)
        if guess is None:
            return
        pairs = list(zip(guess.draft.token_ids, request.output_ids[guess.at :], strict=False))
        num_accepted = next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
        if pairs:
            seen = self._budget.acceptance(guess.drafter.name, guess.draft.grade)
            seen.saw(num_accepted, min(num_accepted + 1, len(pairs)), max(1, self._scheduler.num_running))

    def _most_drafts(self, request: Request) -> int:
        return request.max_new_tokens - len(request.output_ids) - 1

    def _with_pages(self, asked: DraftRequest) -> DraftRequest | None:
        """None: there is no room for drafts, or not even for its last token."""
        request, memory = asked.request, self._scheduler.memory
        reached = memory.reach(request, request.num_known + asked.most)
        if reached < request.num_known:
            return None
        pages: Int32Array = memory.rows.pages[request.row, : memory.rows.num_pages[request.row]]
        return replace(asked, most=min(asked.most, max(1, reached - request.num_known)), pages=pages)

    def _propose(self, requests: Sequence[DraftRequest], num_rows: int) -> list[_Guess]:
        """The best guess for each request. Drafters that take time on the device come last, for those where others are
        not as good."""
        best: dict[int, _Guess] = {}
        for drafter in self._hosts:
            self._ask(drafter, requests, best)
        for model in self._models if self._trials.follows else ():
            chosen: list[tuple[int, float, DraftRequest]] = []
            for asked in requests:
                if (grade := model.grade(asked.request)) is not None:
                    share, other = self._share(model, grade), best.get(asked.request.uid)
                    if other is None or other.share < share:
                        chosen.append((grade, share, asked))
            if self._trials.is_on:
                chosen = sorted(chosen, key=lambda each: each[0])[:_TRIED]
            elif not any(self._budget.divide(num_rows, [(share, asked.most) for _, share, asked in chosen])):
                continue
            fitting = [its for _, _, asked in chosen if (its := self._with_pages(asked)) is not None]
            self._ask(model, fitting, best)
        return list(best.values())

    def _share(self, drafter: Drafter, grade: int) -> float:
        return self._budget.acceptance(drafter.name, grade).share

    def _ask(self, drafter: Drafter, requests: Sequence[DraftRequest], best: dict[int, _Guess]) -> None:
        """Put what it drafts among the best guesses, by uid, where it is better."""
        if not requests:
            return
        for asked, draft in zip(requests, drafter.propose(requests), strict=True):
            if draft.token_ids:
                request, share = asked.request, self._share(drafter, draft.grade)
                before = best.get(request.uid)
                if before is None or _worth(share, draft) > _worth(before.share, before.draft):
                    best[request.uid] = _Guess(request, drafter, draft, share, len(request.output_ids))

    def _divide(self, guesses: list[_Guess], num_rows: int, room: int) -> bool:
        """Give the guesses out, as many as pay now that the step has waited, or some to try whether they do; room: for
        so many drafts. Returns whether any would pay for waiting, too; none for which there is no room, and on a GPU
        none that had no pages or that a constraint cut off."""
        if not guesses:
            return False
        drafts = [(guess.share, len(guess.draft.token_ids)) for guess in guesses]
        numbers = _within(room, self._budget.divide(num_rows, drafts, waited=not self._is_on_host))
        pays = any(numbers)
        is_due = self._since_drafts >= LONGEST_PAUSE  # to see what they take, and how many stand, by now
        if not pays and (is_due or self._trials.is_on):
            numbers = _within(room, self._budget.trial(num_rows, drafts))
        for i, guess in enumerate(guesses):
            if numbers[i] and not self._give(guess.request, guess.draft, numbers[i]):
                numbers[i] = 0
        if any(numbers):
            self._since_drafts = 0
        if pays and len(guesses) == num_rows:
            drafters, self._chained, self._ahead = {guess.drafter for guess in guesses}, max(numbers), 0
            self._chain = next((model for model in self._models if {model} == drafters), None)
        return pays and (self._is_on_host or any(numbers)) and any(self._budget.divide(num_rows, drafts))

    def _looked(self, num_rows: int, seconds: float, *, gains: bool, has_guesses: bool) -> None:
        """A look took so long itself. gains: of `_divide`; not each look has to gain where looks pay."""
        if not self._is_on_host and self._looks.pay(num_rows):
            self._pause = _FIRST_PAUSE
        elif not gains:
            self._looks.rest(num_rows)
            self._rest_from_looks(num_rows, seconds, has_guesses=has_guesses)

    def _rest_from_looks(self, num_rows: int, seconds: float, *, has_guesses: bool) -> None:
        """Looks do not pay. seconds: that the latest took itself."""
        if self._is_on_host:
            pause = math.ceil(seconds / (_LOOKING * self._budget.costs.plain(num_rows)))
        elif has_guesses:  # they took time
            pause = self._pause = min(2 * self._pause, LONGEST_PAUSE)
        else:
            pause = math.ceil(self._budget.costs.waiting(num_rows) / _WAITING)
        self._until_look = min(pause, LONGEST_PAUSE)

    def _give(self, request: Request, draft: Draft, most: int) -> bool:
        """Whether it has a draft now."""
        most = min(most, self._most_drafts(request))
        if most <= 0 or not self._scheduler.may_draft(request):
            return False
        most = self._scheduler.memory.reach(request, request.num_known + most) - request.num_known
        if most <= 0:
            return False
        token_ids = list(draft.token_ids[:most])
        matcher: RequestMatcher | None = request.owner.matcher
        if matcher is not None:
            token_ids = matcher.draft_tokens(
                token_ids,
                request.output_ids,
                request.max_new_tokens - len(request.output_ids),
                most,
                jumps=request.owner.jumps,
                stop_ids=request.stop_ids,
            )
        if token_ids:
            self._scheduler.draft(request, token_ids)
        return bool(token_ids)


def _within(room: int, numbers: list[int]) -> list[int]:
    """So many drafts of each row, or where there is no room for all, fewer of those that have most."""
    most = max(numbers, default=0)
    while most > 1 and sum(min(number, most) for number in numbers) > room:
        most -= 1
    given = []
    for number in numbers:
        given.append(min(number, most, room))
        room -= given[-1]
    return given


def _has_prompts(step: Step) -> bool:
    """Whether it computed tokens of a prompt."""
    batch = step.batch
    starts = (batch.kv_lens - batch.q_lens).tolist()
    return any(start < request.prompt_len for start, request in zip(starts, step.requests, strict=True))


def _worth(share: float, draft: Draft) -> float:
    """Tokens that a draft is expected to give."""
    return sum(share**number for number in range(1, len(draft.token_ids) + 1))
