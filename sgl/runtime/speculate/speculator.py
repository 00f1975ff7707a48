"""Decides before each step which rows have drafts, and which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgl.runtime.batch import Int32Array
from sgl.runtime.constraints.request_matcher import RequestMatcher
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.speculate.drafter import NO_DRAFT, Ask, Draft, Drafter


class Speculator:
    """The drafters of one engine. Single-threaded; see `Drafter` for who is told what."""

    def __init__(
        self,
        scheduler: Scheduler,
        drafters: Sequence[Drafter] = (),
        *,
        most: int = 0,
        jumps: bool = True,
    ) -> None:
        """most: drafts of a row, at most. jumps: whether certain tokens are appended."""
        self._scheduler = scheduler
        self._drafters = list(drafters)
        self._most = most
        self._jumps = jumps
        self._entered: dict[int, Request] = {}  # by uid: what drafters were told of
        self._latest: dict[int, tuple[Drafter, Draft, int, int]] = {}  # by uid: drafts under way, see `_judge`

    @property
    def wants_results(self) -> bool:
        """Whether the next step's drafts need the latest step's results."""
        return bool(self._drafters)

    def draft(self, hinted: Iterable[Request] = ()) -> None:
        """Give drafts to rows of the next step. Nothing may be in flight. hinted: requests whose constraint tells a
        token that is likely; without drafters, only these have drafts."""
        if not self._drafters:
            for request in hinted:
                self._give(request, NO_DRAFT, None)
            return
        running = self._scheduler.memory.running
        for uid in [uid for uid, request in self._entered.items() if request.row < 0]:
            self._leave(uid)
        asks = []
        for request in running.values():
            if not self._scheduler.may_draft(request):
                continue
            if request.uid not in self._entered:
                self._entered[request.uid] = request
                for drafter in self._drafters:
                    drafter.enter(request)
            self._judge(request)
            if (most := self._room(request)) > 0:
                asks.append(self._ask(request, most))
        if asks:
            for drafter in self._drafters:
                for ask, draft in zip(asks, drafter.propose(asks), strict=True):
                    self._give(ask.request, draft, drafter)

    def ended(self, request: Request) -> None:
        """A request ended, perhaps before it had a row."""
        self._latest.pop(request.uid, None)
        self._entered.pop(request.uid, None)
        for drafter in self._drafters:
            drafter.leave(request)

    def _leave(self, uid: int) -> None:
        request = self._entered.pop(uid)
        self._latest.pop(uid, None)
        for drafter in self._drafters:
            drafter.leave(request)

    def _room(self, request: Request) -> int:
        return min(self._most, request.max_new_tokens - len(request.output_ids) - 1)

    def _ask(self, request: Request, most: int) -> Ask:
        rows, memory = self._scheduler.memory.rows, self._scheduler.memory
        reached = memory.reach(request, request.num_known + most)
        most = min(most, max(1, reached - request.num_known))
        pages: Int32Array = rows.pages[request.row, : rows.num_pages[request.row]]
        return Ask(request, most, pages, int(rows.kv_len[request.row]), int(rows.offset[request.row]))

    def _give(self, request: Request, draft: Draft, drafter: Drafter | None) -> None:
        if not self._scheduler.may_draft(request):
            return
        if request.drafts:  # left from a step that had no room
            self._scheduler.draft(request, ())
        token_ids = list(draft.token_ids)
        most = self._room(request) if drafter is not None else 1
        most = min(most, request.max_new_tokens - len(request.output_ids) - 1)
        matcher: RequestMatcher | None = request.owner.matcher
        if most <= 0:
            return
        if matcher is not None:
            token_ids = matcher.foresee(
                token_ids,
                request.output_ids,
                request.max_new_tokens - len(request.output_ids),
                most,
                jumps=self._jumps and request.top_logprobs < 0,
                stop_ids=request.stop_ids,
            )
        if token_ids:
            self._scheduler.draft(request, token_ids)
            if drafter is not None:
                given = Draft(token_ids, draft.grade)
                self._latest[request.uid] = drafter, given, request.num_drafted, request.num_accepted

    def _judge(self, request: Request) -> None:
        """Tell what became of the latest drafts, if they were verified."""
        latest = self._latest.pop(request.uid, None)
        if latest is not None:
            drafter, draft, num_drafted, num_accepted = latest
            if request.num_drafted > num_drafted:
                drafter.judge(request, draft, request.num_accepted - num_accepted)
