"""What goes into the engine's loop and what comes out of it: requests with their texts, and outputs, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sgl.runtime.batch import Logprobs
from sgl.runtime.constraints.guides import Guide
from sgl.runtime.scheduler.request import FinishReason, Request
from sgl.runtime.text.output import TextOutput


class Detail(NamedTuple):
    """What an output carries besides tokens: with the first, the last, and any that has logprobs."""

    output_logprobs: list[Logprobs]
    input_logprobs: list[Logprobs]  # all of them, with the first output that follows the prompt
    cached_len: int
    num_retractions: int
    num_forced: int  # output tokens so far that followed for certain and were not sampled
    queue_seconds: float  # from submission to the first step
    prefill_seconds: float  # from there to the first output token


@dataclass(slots=True)
class Output:
    """What one request produced since its previous output. `finish_reason` marks the last one."""

    uid: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    detail: Detail | None


@dataclass(slots=True, eq=False)
class Submission:
    """A request on its way into the loop, and the loop's record of it afterwards."""

    request: Request
    text: TextOutput | None  # None: token ids only
    guide: Guide | None = None  # where the output stands in its constraint
    stream: bool = False
    submitted: float = 0.0  # monotonic seconds
    first_step: float = 0.0
    first_token: float = 0.0
    emitted: int = 0  # output tokens that left
    emitted_logprobs: int = 0
    pieces: str = ""  # text that did not leave yet
    has_entered: bool = False  # the scheduler knows it
    is_incremental: bool = False  # whether tokens are read as text one by one, as they come

    def __post_init__(self) -> None:
        self.is_incremental = self.text is not None and (self.stream or self.text.has_stops)
