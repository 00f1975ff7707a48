"""A running program's streams, the requests a node waits for, and the node's usage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sgl.lang.ir import interpreter
from sgl.lang.ir.interpreter import Piece
from sgl.runtime.cache.keys import Namespace
from sgl.runtime.loop.submission import Output, Submission
from sgl.runtime.media.item import MediaItem
from sgl.runtime.program.tokens import NO_TOKENS, StreamTokens
from sgl.runtime.requests.results import NativeResult
from sgl.runtime.scheduler.leases import Lease


class Stream(interpreter.Stream):
    """A stream with its tokens and lease; branches share both."""

    def __init__(self, stream_id: int, path: str, parent: Stream | None = None) -> None:
        super().__init__(stream_id, path, parent)
        self.tokens: StreamTokens = NO_TOKENS if parent is None else parent.tokens
        self.items: tuple[MediaItem, ...] = () if parent is None else parent.items  # of its placeholders
        self.num_counted = 0  # tokens that the program was charged for
        self.unencoded: list[Piece] = [] if parent is None else list(parent.unencoded)
        self.lease: Lease | None = None if parent is None else parent.lease
        self.leased: tuple[bytes, Namespace] | None = None if parent is None else parent.leased
        """What the lease protects, or protected."""
        self.num_first: int = 0 if parent is None else parent.num_first  # tokens of the first gen's prompt
        if self.lease is not None:
            self.lease.num_holders += 1

    def append(self, text: str, *, is_template: bool = False) -> None:
        """Add text, encoded when a request needs it."""
        super().append(text, is_template=is_template)
        if text:
            self.unencoded.append((text, is_template))


class NodeRequests:
    """The requests of a node, in order."""

    def __init__(
        self,
        stream: Stream,
        pairs: Sequence[tuple[Submission, NativeResult]],
        listener: Callable[[NativeResult], None] | None = None,
    ) -> None:
        self.stream = stream
        self.submissions = [submission for submission, _ in pairs]
        self.requests = [submission.request for submission in self.submissions]
        self.results = [result for _, result in pairs]
        self.error: Exception | None = None
        self._listener = listener
        self._by_uid = {submission.request.uid: result for submission, result in pairs}

    @property
    def is_over(self) -> bool:
        """Whether every request has ended, or one failed."""
        return not self._by_uid or self.error is not None

    @property
    def unfinished(self) -> list[int]:
        """Uids of the requests that have not ended."""
        return list(self._by_uid)

    def take(self, output: Output) -> bool:
        """Add a request's output; returns whether it was the last."""
        result = self._by_uid[output.uid]
        result.add(output)
        if self._listener is not None:
            self._listener(result)
        if output.finish_reason is None:
            return False
        del self._by_uid[output.uid]
        self.error = self.error or output.finish_reason.error
        return True

    def usage(self, *, forced_tokens: int = 0) -> dict[str, Any]:
        """Tokens summed over the requests, seconds of the slowest. `lease` is "held", why it was lost, or None."""
        requests, lease, now = self.requests, self.stream.lease, time.monotonic()
        cached = sum(request.cached_len for request in requests)
        forced = sum(request.num_forced for request in requests)
        drafted = sum(request.num_drafted for request in requests)
        speculation = {"drafted_tokens": drafted, "accepted_tokens": sum(r.num_accepted for r in requests)}
        return {
            "new_tokens": sum(request.prompt_len for request in requests) - cached,
            "cached_tokens": cached,
            "generated_tokens": sum(len(request.output_ids) for request in requests) - forced,
            "forced_tokens": forced + forced_tokens,
            **(speculation if drafted else {}),
            **({} if (spending := self.submissions[0].spending) is None else {"ranks": spending()}),
            "queue_seconds": max(each.first_step - each.submitted for each in self.submissions),
            "compute_seconds": max(now - each.first_step for each in self.submissions),
            "lease": None if lease is None else lease.lost or "held",
        }
