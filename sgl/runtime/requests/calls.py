"""An engine's unfinished calls: who waits for their outputs, and under which rid each is found."""

from __future__ import annotations

import contextlib
import threading

from sgl.errors import EngineDead, InvalidRequest
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.loop.submission import Submission
from sgl.runtime.requests.results import PreparedCall, Rid
from sgl.runtime.requests.router import OutputRouter, Sink


class Calls:
    """Safe from any thread."""

    def __init__(self, loop: EngineLoop, router: OutputRouter) -> None:
        self._loop = loop
        self._router = router
        self.rids: dict[Rid, list[Submission]] = {}
        self._lock = threading.RLock()  # reentrant: garbage collection may abandon a dropped stream anywhere

    def submit(self, call: PreparedCall, sink: Sink) -> None:
        """See Engine.submit."""
        with self._lock:
            for _, rid in self.rids.keys() & call.rids.keys():
                raise InvalidRequest(f"rid {rid!r} is in use by another unfinished request", param="rid")
            self.rids.update(call.rids)
        self._router.expect(call.uids, sink)
        try:
            self._loop.submit(call.submissions)
        except EngineDead:
            self.abandon(call)
            raise

    def abandon(self, call: PreparedCall) -> None:
        """See Engine.abandon."""
        if self._loop.process.was_forked:
            return
        with self._lock:
            for rid, its in call.rids.items():
                if self.rids.get(rid) == its:
                    del self.rids[rid]
        self._router.forget(call.uids)
        unfinished = [uid for uid, result in call.results.items() if result.finish_reason is None]
        if unfinished:
            with contextlib.suppress(EngineDead):
                self._loop.abort(unfinished)

    def abort(self, rid: str | None, owner: str | None) -> None:
        """See Engine.abort."""
        with self._lock:
            known = self.rids.items()
            found = [its for (whose, name), its in known if rid in (None, name) and owner in (None, whose)]
        chosen = {its.request.uid: its for each in found for its in each}
        for submission in chosen.values():
            submission.is_aborted = True  # the loop may not have it yet
        is_all = rid is None and owner is None
        if chosen or is_all:
            self._loop.abort_and_wait(None if is_all else list(chosen))
