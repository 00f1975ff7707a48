"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counts since the start."""

    prompt_tokens: int = 0  # of admitted requests, once each
    cached_tokens: int = 0  # of those, found in the cache
    generated_tokens: int = 0  # sampled
    forced_tokens: int = 0  # output tokens that were certain
    drafted_tokens: int = 0  # drafts that were verified,
    verified_tokens: int = 0  # and accepted ones, each saving a step
    host_masks: int = 0  # token masks made on the host
    device_masks: int = 0  # token masks made on the device
    retractions: int = 0
    aborted: int = 0
    finished: int = 0
    steps: int = 0


@dataclass(slots=True)
class TierCounters:
    """What moved between the device, host memory and files since the start."""

    saved_pages: int = 0  # to host memory
    loaded_pages: int = 0  # from there
    written_pages: int = 0  # to files
    read_pages: int = 0  # from there
    num_loads: int = 0
    num_declined: int = 0  # prompts whose copies it was faster to compute again
    num_late: int = 0  # reads from files that were not waited for any longer
    saved_states: int = 0  # as pages
    loaded_states: int = 0
    written_states: int = 0
    read_states: int = 0
