"""A running engine without its memory: what trainers on the same device take while nothing is generated."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from sgl.errors import InvalidRequest
from sgl.lang.ir.sampling import shown
from sgl.runtime.config import EngineConfig
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.loop.pause import go_on, pause
from sgl.runtime.parallel.leader import LeadingRunner
from sgl.runtime.parallel.occupation import RankedOccupation
from sgl.runtime.runner.occupation import PARTS, Occupation, Part
from sgl.runtime.runner.own import EngineRunner
from sgl.runtime.runner.runner import ModelRunner


class MemoryOccupation:
    """Of one engine. Safe from any thread but the engine's own."""

    def __init__(self, config: EngineConfig, runner: EngineRunner, loop: EngineLoop) -> None:
        self._config, self._loop, self._scheduler = config, loop, loop.scheduler
        self._runner = runner
        self._stays_paused = False  # once all memory is there again
        self._lock = threading.Lock()

    @property
    def released(self) -> dict[str, int]:
        """Bytes by part."""
        its = self._runner.occupation.released if isinstance(self._runner, ModelRunner | LeadingRunner) else {}
        return {str(part): number for part, number in its.items()}

    def release(self, tags: Any) -> dict[str, int]:
        """Pause, take the KV of what runs, forget all that is cached, and give memory back. Returns bytes by part.
        Idempotent. Raises InvalidRequest and EngineDead."""
        runner, parts = self._able(), self._parts(tags, is_release=True)
        with self._lock:
            if not self.released:
                self._stays_paused = self._loop.call(lambda: self._scheduler.is_paused)
            pause(self._loop, "retract")

            def give_back() -> dict[Part, int]:
                self._loop.copies.settle()
                self._scheduler.memory.outdate()
                return runner.release(parts)

            try:
                return {str(part): number for part, number in self._loop.call(give_back).items()}
            finally:
                if not self.released and not self._stays_paused:  # nothing was given back
                    go_on(self._loop)

    def resume(self, tags: Any) -> None:
        """Take memory again; once all is there, go on unless somebody has paused the engine. Idempotent. Raises
        InvalidRequest and EngineDead."""
        runner, parts = self._able(), self._parts(tags, is_release=False)
        with self._lock:
            if not self.released:
                return
            try:
                self._loop.call(lambda: runner.restore(parts))
            except torch.OutOfMemoryError as error:
                raise InvalidRequest(
                    f"the device has no memory for what was released: free some, and call again ({error})"
                ) from error
            if not self.released and not self._stays_paused:
                go_on(self._loop)

    def pause(self, mode: Any) -> None:
        """See `pause.pause`; it outlasts a release that goes on. Raises InvalidRequest and EngineDead."""
        with self._lock:
            pause(self._loop, mode)
            self._stays_paused = True

    def go_on(self) -> bool:
        """See `pause.go_on`. While memory is released, or just being, that is for later: returns False, and `resume`
        goes on once all is there. Raises EngineDead."""
        with self._lock:
            self._stays_paused = False
            if goes_on := not self.released:
                go_on(self._loop)
            return goes_on

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """Without a step under way, and with nothing given back or taken meanwhile. Raises EngineDead."""
        with self._lock:
            was_paused = self._loop.call(lambda: self._scheduler.is_paused)
            pause(self._loop, "in_place")
            try:
                yield
            finally:
                if not was_paused:
                    go_on(self._loop)

    def check(self, part: Part) -> None:
        """Raise InvalidRequest while this part is given back."""
        if part in self.released:
            raise InvalidRequest(f"the memory of {part} is released: call resume_memory_occupation first")

    def _able(self) -> Occupation | RankedOccupation:
        config, why_not = self._config, None
        if not isinstance(self._runner, ModelRunner | LeadingRunner):
            why_not = f"device={config.device!r}: only an engine of torch gives memory back"
        elif config.disaggregation_mode not in (None, "null"):
            why_not = f"disaggregation_mode={config.disaggregation_mode!r}: other engines pull pages"
        else:
            why_not = self._runner.occupation.why_not
        if why_not is not None:
            raise InvalidRequest(why_not, param="tags")
        assert isinstance(self._runner, ModelRunner | LeadingRunner), "others were refused"
        return self._runner.occupation

    def _parts(self, tags: Any, *, is_release: bool) -> list[Part]:
        able = self._able().parts()
        if self._config.speculative_draft_model_path is not None:
            able = tuple(part for part in able if part != "weights")
        if tags is None:
            return [*(able if is_release else PARTS)]
        if not isinstance(tags, list | tuple) or not tags or not all(tag in PARTS for tag in tags):
            message = f"tags must be a list of some of {', '.join(PARTS)}, not {shown(tags)}"
            raise InvalidRequest(message, param="tags")
        for tag in tags if is_release else ():
            if tag not in able:
                where = "beside a draft model" if "cuda_graph" in able else "on a CPU"
                raise InvalidRequest(
                    f"{tag} is not given back {where}; what can be: {', '.join(able)}", param="tags"
                )
        return [*tags]
