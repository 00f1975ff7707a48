"""The token masks of a step, from its requests' constraints."""

from __future__ import annotations

import numpy as np

from sgl.grammar.automaton.finished import Configuration
from sgl.runtime.batch import TokenMask, TokenMasks
from sgl.runtime.scheduler.counters import Counters
from sgl.runtime.scheduler.step import Step


def collect_masks(step: Step, counters: Counters) -> TokenMasks | None:
    """The masks of a step's sampled positions; none for ended requests. None if no row is constrained."""
    batch = step.batch
    masks: list[TokenMask | None] = []
    for b in np.flatnonzero(batch.samples).tolist():
        request = step.requests[b]
        matcher, num_drafts = request.owner.matcher, len(batch.drafts.get(b, ()))
        if matcher is None or request.is_done or request.uid in step.dropped:
            masks += [None] * (1 + num_drafts)
        elif num_drafts:
            masks += matcher.masks(num_drafts)
        else:  # the number of tokens that the matcher closes a document within
            masks.append(matcher.next(request.max_new_tokens - len(request.output_ids)))
    counters.host_masks += sum(isinstance(mask, np.ndarray) for mask in masks)
    counters.device_masks += sum(isinstance(mask, Configuration) for mask in masks)
    return masks if any(mask is not None for mask in masks) else None
