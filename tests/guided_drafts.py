"""Drafts of graphs, most of which are what follows, and the steps that begin before those are known."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from sgl import Engine
from sgl.runtime.batch import Int64Array
from sgl.runtime.runner.draft_graphs import DraftGraphs, _Inputs
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.step import Step


class Guide:
    """Puts what follows in most drafts' places."""

    def __init__(
        self, running: Mapping[int, Request], texts: Mapping[bytes, list[int]], *, changes: bool = True
    ) -> None:
        """running: by row. texts: what follows a prompt. changes: False: drafts are only noted, as those of a draft
        model must be, whose later passes read them."""
        self._running, self._texts, self._changes = running, texts, changes
        self.drawn: dict[tuple[int, ...], list[int]] = {}
        """What is drafted behind each text, as far as that is wanted."""

    def change(self, graphs: DraftGraphs, bucket: int, queries: int) -> None:
        """Of a graph that was just replayed."""
        its = _Inputs.of(graphs._placed[bucket, queries][0], bucket, queries, graphs._num_passes)
        on_device = graphs._drafts[: graphs._num_passes * bucket].view(graphs._num_passes, bucket)
        rows, every_place, drafts = its.rows.tolist(), its.places.tolist(), on_device.cpu()
        for b, row in enumerate(rows):
            if row in self._running:
                prompt = self._running[row].prompt_ids
                text = [*prompt.tolist(), *self._texts[prompt.tobytes()]]
                places = [of_pass[b] for of_pass in every_place]
                wanted = 1 + int((its.later_slots[:, b] != 0).sum())  # others use the dummy page
                self.drawn[tuple(text[: places[0]])] = drafts[:wanted, b].tolist()
                for turn, place in enumerate(places):
                    # By the place alone: where drafts end does not depend on how steps came about.
                    if self._changes and place < len(text) and zlib.crc32(prompt.tobytes() + place.to_bytes(4)) % 5:
                        drafts[turn, b] = text[place]
        on_device.copy_(drafts)


def noted(engine: Engine, is_on: bool = True) -> list[int]:
    """The rows of each step that is ahead, from now on. is_on: whether there are any."""
    found = list[int]()
    scheduler = engine._scheduler
    schedule = scheduler.schedule_ahead

    def noting(latest: Step, wanted: Int64Array) -> Step | None:
        step = schedule(latest, wanted) if is_on else None
        if step is not None:
            found.append(len(step.requests))
        return step

    engine._loop.call(lambda: setattr(scheduler, "schedule_ahead", noting))
    return found
