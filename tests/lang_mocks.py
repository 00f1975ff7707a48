"""Backends for tests of the language: deterministic text, calls that wait, failures, and counted requests.

`MockBackend` knows single calls; `ProgramBackend` takes whole segments as a server would: as JSON, validated, under
a lease, and counts them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from sgl.errors import BackendError
from sgl.lang.backends.base import Backend
from sgl.lang.backends.steps import Completion, GenParams, Prompt, StepSession, TextBackend
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.check import Checker, program_from_wire
from sgl.lang.ir.choices import Scores
from sgl.lang.ir.encoding import to_json
from tests.patience import PATIENCE

Reply = Callable[[Prompt, GenParams], str]
ENDLESS = math.inf
"""`together` of calls that only `release` or a cancellation ends."""


class MockBackend(TextBackend):
    """Writes `<name:seed>`, or what `reply` says. `fail_on`: names of gens that fail. Remembers every call.

    `together`: calls wait until so many have run at once, or for `release`. `held`: gens whose calls wait for
    `release`.
    """

    constraints = frozenset({"regex", "json", "ebnf"})

    def __init__(
        self,
        reply: Reply | None = None,
        *,
        together: float = 0,
        held: Sequence[str] = (),
        fail_on: Sequence[str] = (),
        chat_template: Any = "chatml",
    ) -> None:
        self.reply = reply
        self.together = together
        self.held = held
        self.fail_on = fail_on
        self.chat_template = chat_template
        self.calls: list[tuple[Prompt, GenParams]] = []
        self.running = 0
        self.max_running = 0
        self.cancelled = 0
        self._released: Future[None] = Future()

    def release(self) -> None:
        """Let all calls go, from any thread."""
        if not self._released.done():
            self._released.set_result(None)

    async def generate(self, prompt: Prompt, params: GenParams) -> list[Completion]:
        self.calls.append((Prompt(prompt.text, [], list(prompt.messages), prompt.role, prompt.turn), params))
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            if 0 < self.together <= self.running:
                self.release()
            if (self.together or params.node.name in self.held) and not self._released.done():
                waiting = [asyncio.wrap_future(self._released)]  # which cancels nothing where `wait` is cancelled
                if not (await asyncio.wait(waiting, timeout=PATIENCE))[0]:
                    raise BackendError(f"at most {self.max_running} calls ran together and nobody released them")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if params.node.name in self.fail_on:
            raise BackendError("the mock was told to fail", retryable=True)
        texts = [self._text(prompt, params, seed) for seed in params.seeds]
        return [
            Completion(text, {"completion_tokens": len(text), "prompt_tokens": len(prompt.text)}) for text in texts
        ]

    async def stream(self, prompt: Prompt, params: GenParams) -> AsyncIterator[Completion]:
        [whole] = await self.generate(prompt, params)
        for i, letter in enumerate(whole.text):
            await asyncio.sleep(0)
            yield Completion(letter, {"completion_tokens": i + 1, "output_token_logprobs": [[-0.5, i, letter]]})

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> list[Scores]:
        """Letters are tokens, and the likelier the later in the alphabet."""
        self.calls.append((prompt, None))  # type: ignore[arg-type]
        rows = [[(ord(letter) % 32 - 32) / 32 for letter in choice] for choice in choices]
        return [
            Scores(row, [ord(letter) for letter in choice], [None, *row[1:]] if unconditional else None)
            for choice, row in zip(choices, rows, strict=True)
        ]

    def _text(self, prompt: Prompt, params: GenParams, seed: int) -> str:
        if self.reply is not None:
            return self.reply(prompt, params)
        return f"<{params.node.name}:{seed % 10_000}>"


class ProgramBackend(Backend):
    """Takes programs as a server does. `requests` counts opened programs and segments as one transport would: the
    first segment travels with the opening."""

    def __init__(self, mock: MockBackend | None = None) -> None:
        self.mock = mock or MockBackend()
        self.chat_template = self.mock.chat_template
        self.requests = 0
        self.sessions: list[WireSession] = []

    def open(self, program: ir.Program, sink: ir.Sink) -> WireSession:
        wire = json.loads(json.dumps(to_json(program)))
        session = WireSession(self, program_from_wire(wire), sink)
        self.sessions.append(session)
        return session


class WireSession:
    """Segments through JSON and the checker into an interpreter; knows whether its lease had run out."""

    def __init__(self, backend: ProgramBackend, program: ir.Program, sink: ir.Sink) -> None:
        self._backend = backend
        self._checker = Checker(program)
        self._inner = StepSession(backend.mock, program, self._deliver)
        self._sink = sink
        self._has_lapsed = False
        self.is_evicted = False
        self.is_cancelled = False
        self.segments: list[Any] = []

    def send(self, segment: ir.Segment) -> None:
        self.is_evicted, self._has_lapsed = self._has_lapsed, False
        self._backend.requests += 1
        wire = json.loads(json.dumps(to_json(segment)))
        self.segments.append(wire)
        self._inner.send(self._checker.segment(wire))

    def lapse(self) -> None:
        """As if its lease had run out before the next segment."""
        self._has_lapsed = True

    def cancel(self) -> None:
        self.is_cancelled = True
        self._inner.cancel()

    def _deliver(self, event: ir.Event) -> None:
        if isinstance(event, ir.NodeDone):
            event.meta = {**event.meta, "evicted": self.is_evicted}
        self._sink(event)


def text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
