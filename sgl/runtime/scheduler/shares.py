"""Shares a step's tokens: one to each output, the rest to outputs and prompts by halves while both want some."""

from __future__ import annotations

from collections.abc import Sequence

from sgl.runtime.scheduler.memory import RowMemory
from sgl.runtime.scheduler.packing import Chunk
from sgl.runtime.scheduler.request import Phase, Request
from sgl.runtime.scheduler.waiting_queue import WaitingQueue

_UNLIMITED = 1 << 40  # tokens a step


class Shares:
    """Of requests that run. Long drafts and certain texts hold up neither other outputs nor prompts."""

    def __init__(self, step_tokens: int | None, memory: RowMemory, queue: WaitingQueue) -> None:
        self._step_tokens = step_tokens
        self._memory = memory
        self._queue = queue

    def fit(self, num_tokens: int) -> bool:
        """Whether a step may have so many."""
        return self._step_tokens is None or num_tokens <= self._step_tokens

    def draft_room(self) -> int:
        """How many drafts the next step has room for, while none is under way."""
        if self._step_tokens is None:
            return _UNLIMITED
        outputs, prompts = self._started()
        num_decodes = sum(request.phase is Phase.DECODE for request in self._memory.running.values())
        certain = sum(request.num_known - 1 - self._num_computed(request) for request in outputs)
        return max(0, self._beyond(num_decodes + len(outputs), prompts)[0] - certain)

    def chunks(self, num_decodes: int) -> tuple[list[Chunk], int]:
        """What started requests compute beside so many decodes, and how many tokens are left for others."""
        outputs, prompts = self._started()
        of_outputs, more = self._beyond(num_decodes + len(outputs), prompts)
        chunks: list[Chunk] = []
        more += self._compute(outputs, of_outputs, 1, chunks) - of_outputs
        return chunks, self._compute(prompts, max(more, 1), 0, chunks)

    def _started(self) -> tuple[list[Request], list[Request]]:
        """With known tokens to compute: those that go on with an output, and prompts, retracted requests' first."""
        outputs: list[Request] = []
        retracted: list[Request] = []
        prompts: list[Request] = []
        for request in self._memory.running.values():
            if request.phase is Phase.PREFILL:
                if not request.output_ids:
                    prompts.append(request)
                else:
                    (outputs if self._num_computed(request) >= request.prompt_len else retracted).append(request)
        return outputs, retracted + prompts

    def _num_computed(self, request: Request) -> int:
        return int(self._memory.rows.kv_len[request.row])

    def _beyond(self, num_outputs: int, prompts: Sequence[Request]) -> tuple[int, int]:
        """Tokens beyond one of each output: how many outputs may have, and all."""
        if self._step_tokens is None:
            return _UNLIMITED, _UNLIMITED
        more = max(self._step_tokens - num_outputs, 0)
        waits = len(self._queue) > 0 and self._memory.rows.num_free > 0
        if waits or any(request.computable_len > self._num_computed(request) for request in prompts):
            return more // 2, more
        return more, more

    def _compute(self, requests: Sequence[Request], tokens_left: int, of_each: int, chunks: list[Chunk]) -> int:
        """Add what they compute, so many tokens of each and more while some are left. Returns how many are."""
        memory = self._memory
        for request in requests:
            if tokens_left + of_each <= 0:
                break
            start = self._num_computed(request)
            memory.give_back(request)
            end = memory.reach(request, min(request.computable_len, start + of_each + tokens_left))
            if request.drafts and end < request.target_len:  # verified at once or not at all
                request.drafts, request.target_len = (), request.num_known
                end = min(end, request.target_len)
            if end > start:
                chunks.append(Chunk(request, start, end))
                tokens_left -= max(0, end - start - of_each)
        return tokens_left
