"""Inputs and outputs of the engine's loop: requests with their texts, and outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sgl.errors import GrammarError, GrammarTooLarge, InvalidRequest, RequestAborted
from sgl.runtime.batch import Float32Array, Logprobs
from sgl.runtime.constraints.request_matcher import RequestMatcher
from sgl.runtime.scheduler.request import FinishReason, Request
from sgl.runtime.text.output import TextOutput

Spending = Callable[[], list[dict[str, Any]]]
"""What each rank has done since it was made."""


class Detail(NamedTuple):
    """What an output carries besides tokens, with the first, the last, and any that has logprobs or other counts than
    the one before."""

    output_logprobs: list[Logprobs]
    input_logprobs: list[Logprobs]  # all of them, with the first output after the prompt
    cached_len: int
    num_retractions: int
    num_forced: int  # output tokens so far that were certain and not sampled
    num_drafted: int  # drafts so far that were verified,
    num_accepted: int  # and that stood
    queue_seconds: float  # from submission to the first step
    prefill_seconds: float  # from there to the first output token
    weight_version: str
    embedding: Float32Array | None  # [hidden_size] with the last output, if asked for
    transfer: dict[str, Any] | None = None  # with the last output, if asked for
    ranks: list[dict[str, Any]] | None = None  # with the last output: what each did meanwhile, if there are several


@dataclass(slots=True)
class Output:
    """One request's products since its previous output. `finish_reason` marks the last one."""

    uid: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    detail: Detail | None


@dataclass(slots=True, eq=False)
class Submission:
    """A request on its way into the loop, and then the loop's record of it."""

    request: Request
    text: TextOutput | None  # None: token ids only
    matcher: RequestMatcher | None = None  # the output's position in its constraint
    stream: bool = False
    submitted: float = 0.0  # monotonic seconds
    first_step: float = 0.0
    first_token: float = 0.0
    spending: Spending | None = None  # from its first step on
    emitted: int = 0  # output tokens sent
    emitted_logprobs: int = 0
    counted: int = 0  # the sum of the counts sent
    pieces: str = ""  # text not sent yet
    has_entered: bool = False  # the scheduler knows it
    jumps: bool = False  # whether forced text is looked for; see `Jumps.apply_to`
    is_aborted: bool = False  # by any thread; of use until it enters
    is_incremental: bool = False  # whether tokens become text one by one

    def __post_init__(self) -> None:
        self.is_incremental = self.text is not None and (self.stream or self.text.has_stops)

    def check(self) -> None:
        """Raise RequestAborted for one that was aborted on its way into the loop."""
        if self.is_aborted:
            raise RequestAborted(f"request {self.request.uid} was aborted")

    def begin(self, now: float, spending: Callable[[], Spending] | None) -> None:
        """A step has some of the prompt, at that moment: perhaps its first."""
        if not self.first_step:
            self.first_step, self.spending = now, None if spending is None else spending()

    def advance(self) -> FinishReason | None:
        """Read the latest token; returns the reason if it ends the request."""
        request = self.request
        self.first_token = self.first_token or time.monotonic()
        if not request.max_new_tokens:
            return FinishReason("length")
        token = request.output_ids[-1]
        if self.matcher is not None and token in request.stop_ids and self._holds_stops_back:
            raise self._too_high_a_minimum()  # it stands for nothing that is allowed
        reason = self.read(token)
        if reason is None and self.matcher is not None and self.matcher.is_complete():
            reason = FinishReason("stop")
        return reason or (FinishReason("length") if len(request.output_ids) >= request.max_new_tokens else None)

    def read(self, token: int) -> FinishReason | None:
        """Advance text and constraint by a token; returns the reason if it ends the request."""
        request, text, matcher = self.request, self.text, self.matcher
        if matcher is not None:
            matcher.check()
        if token in request.stop_ids:
            if self.is_incremental and request.params.no_stop_trim and text is not None:
                self.pieces += text.feed(token)
            return FinishReason("stop", token)
        if matcher is not None:
            try:
                matcher.accept(token)
            except GrammarTooLarge:
                raise
            except GrammarError as error:
                if not self._holds_stops_back:
                    raise
                raise self._too_high_a_minimum() from error
        if self.is_incremental and text is not None:
            self.pieces += text.feed(token)
            if text.matched is not None:
                return FinishReason("stop", text.matched, stop=text.stop)
        return None

    @property
    def _holds_stops_back(self) -> bool:
        """Whether the latest token could be no stop token."""
        return len(self.request.output_ids) <= self.request.params.min_new_tokens

    def _too_high_a_minimum(self) -> InvalidRequest:
        request = self.request
        return InvalidRequest(
            f"min_new_tokens={request.params.min_new_tokens} holds back all that the constraint allows behind "
            f"{len(request.output_ids) - 1} tokens: these are stop tokens",
            param="min_new_tokens",
        )

    def take(self, reason: FinishReason | None, weight_version: str) -> Output:
        """What came since the last output; with a reason, the last one."""
        request = self.request
        if reason is not None and (reason.type != "abort" or isinstance(reason.error, RequestAborted)):
            self._end_text(reason)
        emitted, detail = self.emitted, None
        counted = request.num_forced + request.num_retractions
        if request.num_drafted:
            counted += request.num_drafted + request.num_accepted
        if reason is not None or emitted == 0 or request.top_logprobs >= 0 or counted != self.counted:
            first_logprob, self.counted = self.emitted_logprobs, counted
            detail = Detail(
                output_logprobs=request.output_logprobs[first_logprob:],
                input_logprobs=[] if emitted or first_logprob else request.input_logprobs,
                cached_len=request.cached_len,
                num_retractions=request.num_retractions,
                num_forced=request.num_forced,
                num_drafted=request.num_drafted,
                num_accepted=request.num_accepted,
                queue_seconds=max(0.0, self.first_step - self.submitted),
                prefill_seconds=max(0.0, self.first_token - self.first_step),
                weight_version=weight_version,
                embedding=None if reason is None or reason.type == "abort" else request.embedding,
                transfer=request.offered,
                ranks=None if reason is None or self.spending is None else self.spending(),
            )
            self.emitted_logprobs = len(request.output_logprobs)
        pieces, self.pieces = self.pieces, ""
        self.emitted = len(request.output_ids)
        return Output(request.uid, pieces, request.output_ids[emitted:], reason, detail)

    def _end_text(self, reason: FinishReason) -> None:
        text, request = self.text, self.request
        if text is None:
            return
        if not self.is_incremental:
            trimmed = isinstance(reason.matched, int) and not request.params.no_stop_trim
            self.pieces = "".join(map(text.feed, request.output_ids[:-1] if trimmed else request.output_ids))
        if text.matched is None:
            self.pieces += text.flush()
