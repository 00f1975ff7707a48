"""The bounds of a scheduler, and what it decides: a batch and whose rows it has."""

from __future__ import annotations

from dataclasses import dataclass, field

from sgl.runtime.batch import Batch
from sgl.runtime.config import SchedulePolicy
from sgl.runtime.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a scheduler; lengths in tokens."""

    max_running_requests: int
    context_length: int
    step_tokens: int | None  # at most; None: prompts are never split
    max_queued_requests: int | None = None
    schedule_policy: SchedulePolicy = "lpm"
    conservativeness: float = 1.0
    adapter_slots: int = 0


@dataclass(slots=True, eq=False)
class Step:
    """One batch and the requests in its rows."""

    batch: Batch
    requests: list[Request]
    num_decodes: int  # the first rows are decodes
    launched: float = 0.0  # monotonic seconds
    dropped: set[int] = field(default_factory=set)  # uids of requests whose sampled token is ignored
