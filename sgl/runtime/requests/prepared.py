"""The requests of one call of generate, from when they are read until all have ended."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from sgl.errors import InvalidRequest
from sgl.runtime.loop.submission import Output, Submission
from sgl.runtime.requests.arguments import GenerateRequest
from sgl.runtime.requests.results import CallResults, NativeResult
from sgl.runtime.requests.waiting import check

Rid = tuple[str | None, str]  # with whose it is


class PreparedCall(CallResults):
    """A call whose requests can be queued, with their results."""

    def __init__(self, is_list: bool) -> None:
        """See CallResults."""
        super().__init__(is_list)
        self.submissions: list[Submission] = []
        self.compiling: list[Future[Any]] = []  # what the requests are constrained to
        self.rids: dict[Rid, list[int]] = {}  # → uids, of each sample and of all samples of a prompt

    @property
    def uids(self) -> list[int]:
        """Of the requests."""
        return [submission.request.uid for submission in self.submissions]

    @property
    def deadline(self) -> float | None:
        """Of all requests, in monotonic seconds."""
        return self.submissions[0].request.deadline

    def add_prompt(self, wanted: GenerateRequest, pairs: list[tuple[Submission, NativeResult]]) -> None:
        """Add the samples of one prompt. Raises InvalidRequest if its rid is there already."""
        if (wanted.owner, wanted.rid) in self.rids:
            raise InvalidRequest(f"rid {wanted.rid!r} is given to two requests", param="rid")
        for submission, result in pairs:
            self.submissions.append(submission)
            self.add(result)
            self.rids[wanted.owner, result.header.rid] = [result.header.uid]
            if submission.guide is not None:
                self.compiling.append(submission.guide.flight)
        if wanted.rid is not None:
            self.rids[wanted.owner, wanted.rid] = [submission.request.uid for submission, _ in pairs]

    def absorb(self, output: Output) -> None:
        """Add an output to its result. Raises what ended the call as a whole, be it a constraint."""
        super().absorb(output)
        if output.finish_reason is not None and output.finish_reason.error is not None:
            check(self.compiling)
