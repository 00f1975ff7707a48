"""The requests of one call of generate, from when they are read until all have ended."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sgl.errors import InvalidRequest
from sgl.runtime.loop.submission import Output, Submission
from sgl.runtime.requests.native import Call, NativeResult
from sgl.runtime.requests.waiting import check


@dataclass(slots=True)
class Prepared:
    """The requests of one call of generate, and what will come of them."""

    call: Call
    compiling: list[Future[Any]] = field(default_factory=list)  # what they are constrained to
    submissions: list[Submission] = field(default_factory=list)
    rids: dict[str, list[int]] = field(
        default_factory=dict
    )  # → uids, of each sample and of all samples of a prompt

    @property
    def uids(self) -> list[int]:
        """Of the requests."""
        return [submission.request.uid for submission in self.submissions]

    def absorb(self, output: Output) -> None:
        """Add an output to its result. Raises what ended the call as a whole, be it a constraint."""
        self.call.absorb(output)
        if output.finish_reason is not None and output.finish_reason.error is not None:
            check(self.compiling)

    def add(self, pairs: list[tuple[Submission, NativeResult]], rid: str | None) -> None:
        """Add the samples of one prompt. Raises InvalidRequest if its rid is there already."""
        if rid is not None and rid in self.rids:
            raise InvalidRequest(f"rid {rid!r} is given to two requests", param="rid")
        for submission, result in pairs:
            self.submissions.append(submission)
            self.call.add(result)
            self.rids[result.header.rid] = [result.header.uid]
        if rid is not None:
            self.rids[rid] = [submission.request.uid for submission, _ in pairs]
