"""Jump-forward: text that a constraint forces is appended, where that costs less than sampling it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sgl.errors import SglError
from sgl.grammar.matching.jump import ForcedText, Jump, cut
from sgl.runtime.constraints.request_matcher import RequestMatcher
from sgl.runtime.loop.submission import Submission
from sgl.runtime.scheduler.request import FinishReason, Request
from sgl.runtime.scheduler.scheduler import Scheduler


class Jumps:
    """Of one loop, and for its thread. `pins` and `cost`: see EngineLoop."""

    def __init__(
        self,
        scheduler: Scheduler,
        drafts_wait: Callable[[], bool],
        *,
        run_ahead: bool,
        is_on: bool,
        pins: bool,
        cost: float,
    ) -> None:
        """drafts_wait: whether drafters need each step's results before the next."""
        self.is_on, self.cost = is_on, cost
        self.hinted: list[Request] = []
        """Those whose constraint tells what is likely next, since they were last cleared."""
        self._scheduler = scheduler
        self._drafts_wait = drafts_wait
        self._run_ahead = run_ahead
        self._pins = pins

    def apply_to(self, request: Request) -> bool:
        """Whether text that its constraint forces is to be found: to be appended, or pinned."""
        return self._pins or self._may_jump(request)

    def forced_text(self, submission: Submission) -> ForcedText | None:
        """What must follow a request's latest token, if that matters. Raises SglError."""
        if submission.matcher is None or not submission.jumps:
            return None
        return submission.matcher.forced_text(submission.request.output_ids)

    def take(
        self, jumping: Iterable[tuple[Submission, ForcedText]]
    ) -> Iterator[tuple[Submission, FinishReason | None]]:
        """Append what is forced, each with the reason if that ends the request. All texts are tokenised in one call on
        all cores: one by one they would take longer."""
        texts = [(submission, submission.matcher, ahead) for submission, ahead in jumping if submission.matcher]
        if not texts:
            return
        cuts = cut([ahead for _, _, ahead in texts], texts[0][1].encode)
        for (submission, matcher, ahead), ids in zip(texts, cuts, strict=True):
            try:
                room = submission.request.max_new_tokens - len(submission.request.output_ids)
                reason = self._jump(submission, matcher, matcher.forced(ahead, ids, room))
            except SglError as error:  # this request's alone: a grammar that grew too large
                reason = FinishReason("abort", error=error)
            yield submission, reason

    def _may_jump(self, request: Request) -> bool:
        """Not if the sampler must score or count every token."""
        return self.is_on and request.top_logprobs < 0 and not request.params.has_penalties

    def _jump(self, submission: Submission, matcher: RequestMatcher, jump: Jump) -> FinishReason | None:
        """Append forced tokens and try a draft, if that pays; returns the reason if they end the request."""
        request = submission.request
        forced = jump.token_ids[: (room := request.max_new_tokens - len(request.output_ids))]
        # With run-ahead, a row with a draft would miss the very step that it may save. No state goes back behind one.
        may_draft = not (self._run_ahead or self._scheduler.memory.states) or self._drafts_wait()
        draft = jump.draft if may_draft and len(forced) + 2 <= room else None
        # Each token saves a step, except the one that the step in flight samples.
        saved = len(forced) + (draft is not None)
        waits = self._run_ahead and not self._drafts_wait()
        pays = saved > waits + self.cost * self._scheduler.num_running or request.num_ahead
        if not (pays and self._may_jump(request)):
            matcher.pin(forced)
            return None
        reason = None
        if submission.is_incremental or not request.stop_ids.isdisjoint(forced):
            for num_read, token in enumerate(forced, 1):
                reason = submission.read(token)
                if reason is not None:
                    forced = forced[:num_read]
                    break
        else:
            matcher.accept_all(forced)
        if forced:
            self._scheduler.append(request, forced)
        if draft is not None:
            matcher.likely = draft
            self.hinted.append(request)
        if reason is None and matcher.is_complete():
            reason = FinishReason("stop")
        return reason or (FinishReason("length") if len(forced) == room else None)
