"""What becomes of drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from sgl.runtime.batch import Logprobs, StepResult
from sgl.runtime.scheduler.counters import Counters
from sgl.runtime.scheduler.memory import RowMemory
from sgl.runtime.scheduler.request import Phase, Request
from sgl.runtime.scheduler.rows import RowTable
from sgl.runtime.scheduler.step import Step

simulated_acceptance: Callable[[int], int] | None = None
"""How many of so many drafts stand, whatever was sampled: for measurements with random weights alone. It says the same
each time: for the device, which may know it first, and for the host."""


def simulated(num_drafts: int) -> int:
    """How many of so many drafts stand, whatever is sampled; -1: those that equal it."""
    return -1 if simulated_acceptance is None else min(simulated_acceptance(num_drafts), num_drafts)


def verified(
    request: Request, sampled: list[int], logprobs: list[Logprobs], table: RowTable, counters: Counters
) -> Iterator[Request]:
    """Append the tokens sampled in place of drafts, up to the first that differs from its draft, or all and the one
    behind them; yields the request after each, for the caller to read it. Ends when it has ended, or got other tokens
    than were sampled.

    sampled: [drafts + 1]. logprobs: likewise, or none.
    """
    drafts, row = request.drafts, request.row
    num_accepted = simulated(len(drafts))
    if num_accepted < 0:
        num_accepted = next((i for i, draft in enumerate(drafts) if sampled[i] != draft), len(drafts))
    sampled[:num_accepted] = drafts[:num_accepted]
    del sampled[num_accepted + 1 :]
    table.kv_len[row] -= len(drafts) - num_accepted  # the others' KV will be overwritten
    request.drafts, request.phase = (), Phase.DECODE
    request.num_drafted += len(drafts)
    counters.drafted_tokens += len(drafts)
    outputs, first, number, before = request.output_ids, len(request.output_ids), 0, request.num_accepted
    request.stood = before + num_accepted, first + num_accepted
    while number < len(sampled):
        outputs.append(sampled[number])
        request.output_logprobs += logprobs[number : number + 1]
        counters.generated_tokens += 1
        number += 1
        request.num_ahead = len(sampled) - number
        yield request
        phase = request.phase
        if phase is Phase.PREFILL:  # the caller appended tokens, perhaps those that were sampled
            while number < len(sampled) and outputs[first + number : first + number + 1] == [sampled[number]]:
                number += 1
            table.kv_len[row] = min(int(table.kv_len[row]), request.prompt_len + first + number)
            if number == len(sampled) or first + number < len(outputs):
                request.stood = before + min(num_accepted, number), 0
                break
            request.phase = Phase.DECODE
        elif phase is not Phase.DECODE:  # it has ended
            break
    request.num_ahead = 0
    counters.verified_tokens += request.num_accepted - before


def take_scores(step: Step, result: StepResult) -> None:
    """Give requests their log-probabilities and pooled states; those of drafts come with what stands."""
    for b, logprobs in result.input_logprobs.items():
        step.requests[b].input_logprobs.append(logprobs)
    for b, logprobs in result.output_logprobs.items():
        if b not in result.checks:
            step.requests[b].output_logprobs.append(logprobs)
    for b, pooled in result.pooled.items():
        request = step.requests[b]
        if request.phase is not Phase.WAITING:  # a retracted one begins anew
            request.pooled = pooled if request.pooled is None else request.pooled + pooled


def most_ahead(request: Request, num_drafts: int) -> int:
    """Drafts that it may have at most in the step behind one that verifies so many of it."""
    return max(0, request.max_new_tokens - len(request.output_ids) - num_drafts - 2)


def has_room_ahead(request: Request, num_drafts: int, memory: RowMemory) -> bool:
    """Whether it has pages for its last token and so many drafts, behind those that are being verified."""
    assert memory.windows is None, "a row that computes nothing gives no pages back"
    end = int(memory.rows.kv_len[request.row]) + num_drafts + 1
    return request.phase is Phase.VERIFY and memory.reach(request, end) == end


def groups(advanced: list[Request], verified: list[Iterator[Request]]) -> Iterator[list[Request]]:
    """All advanced requests and the first of each verified one, then the next of each."""
    while group := advanced + [request for each in verified for request in islice(each, 1)]:
        yield group
        advanced = []
