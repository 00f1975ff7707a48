"""What every drafter is: something that guesses a request's next tokens.

A step computes a request's drafts behind its last token and samples at each of these positions with the seed,
position and mask of plain decoding. A draft stands while it equals the sample, and the sample behind the last that
stands counts, too. So a drafter never changes an output, only the number of steps: it may be wrong, late, or silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sgl.runtime.batch import Int32Array, Int64Array
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.step import Step


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request whose last token is known and not computed yet."""

    request: Request  # its row, tokens, seed and parameters; not to be changed
    most: int  # drafts wanted at most, >= 1
    num_computed: int  # tokens in KV: positions num_computed to num_known - 1 come with the drafts
    pages: Int32Array | None = None
    """[n] for a `DeviceDrafter`: a view of its row of the page table, for positions up to num_known + most - 2."""


class Draft(NamedTuple):
    """Token ids that may follow, the likeliest path only."""

    token_ids: Sequence[int] = ()
    grade: int = 0
    """Which of the drafter's kinds of guesses it is, of a few. Acceptance is measured for each."""


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Guesses for one engine. All calls come from the engine's thread, between two steps. Output tokens are only ever
    appended; a fork is a new request, whose prompt is the tokens so far. A request may have another row each time."""

    name: str
    """Its own in an engine: acceptance is measured for each."""

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """One draft for each, of at most `most` tokens; NO_DRAFT where there is no guess. Must be quick: the step
        waits. Requests may be left out at will, also for many steps."""
        ...

    def ended(self, request: Request) -> None:
        """A request did, for any reason; perhaps before anything was proposed for it."""
        return


class DeviceDrafter(Drafter, Protocol):
    """A drafter that takes time on the device: it is asked while it pays, and in trials."""

    is_resting: bool = False
    """Whether steps that only decode are to be plain ones, to be measured."""

    def follow(self, *, is_on: bool) -> None:
        """Whether it may be asked from now on; at first it may. Off: no step costs anything, and a head misses what is
        computed meanwhile."""
        return

    def outdate(self) -> None:
        """What is cached is found no more: the cache was flushed, or the model has other weights."""
        return

    def wants(self, step: Step) -> bool:
        """Of every step, before it is launched: whether `Observer.observe` is to see it."""
        return False

    @property
    def is_ready(self) -> bool:
        """Whether there may be a request to draft for."""
        return True

    def may_go_ahead(self, latest: Step, table: Int32Array) -> bool:
        """Whether it can draft for all rows of a step that verifies its drafts and is under way. table: pages by
        row."""
        return False

    def go_ahead(self, step: Step, table: Int32Array, simulated: Int64Array) -> None:
        """Draft for a step that is ahead of the one of which it may. simulated: [R] so many drafts stand; -1: those
        that equal what is sampled."""
        raise AssertionError("it may not")

    def settle(self) -> None:
        """What the latest step that is ahead began behind is known now."""
        return

    def grade(self, request: Request) -> int | None:
        """Of the next draft for a request, as far as is known before; None: there is none."""
        ...
