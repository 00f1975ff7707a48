"""Decides what each step computes, and keeps every page and row accounted for.

Decode rows come first, then prompts that are partly computed, then new prompts, until the step's token budget is
spent. The scheduler touches plain ints and NumPy only; the loop carries its batches to a runner and brings the
results back. Pages of a row are [lent by the cache | now in the cache | private tail]: the first `tree_len` tokens'
pages belong to the cache and are protected by one lock on `request.node`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from sgl.errors import QueueFull
from sgl.runtime.batch import FROM_DEVICE, Batch, Int32Array, RowSetup, StepResult
from sgl.runtime.cache.in_flight import InFlight
from sgl.runtime.cache.ledger import check
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.radix import RadixCache
from sgl.runtime.config import SchedulePolicy
from sgl.runtime.scheduler.admission import OutputLengths, ReleaseSimulation
from sgl.runtime.scheduler.policy import WaitingQueue, current_match
from sgl.runtime.scheduler.request import FinishReason, Phase, Request
from sgl.runtime.scheduler.rows import RowTable

_MAX_BYPASSED = 16  # requests that may be found not to fit in one round before it ends


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a scheduler; lengths in tokens."""

    max_running_requests: int
    context_length: int
    step_budget: int | None  # tokens a step; None: prompts are never split
    max_queued_requests: int | None = None
    schedule_policy: SchedulePolicy = "lpm"
    conservativeness: float = 1.0


@dataclass(slots=True)
class Step:
    """One batch and the requests in its rows."""

    batch: Batch
    requests: list[Request]
    num_decodes: int  # the first so many rows decode


@dataclass(slots=True)
class Counters:
    """What happened since the start."""

    prompt_tokens: int = 0  # of admitted requests, once each
    cached_tokens: int = 0  # of those, found in the cache
    generated_tokens: int = 0
    retractions: int = 0
    aborted: int = 0
    finished: int = 0
    steps: int = 0


@dataclass(slots=True)
class _Chunk:
    """Known tokens [start, end) of a request, computed in this step."""

    request: Request
    start: int
    end: int


class Scheduler:
    """Owns the queue, the rows and the pages. One thread uses it."""

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        *,
        share: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.cache = RadixCache(pool)
        self._shares = share
        self.counters = Counters()
        self._clock = clock
        self._page_size = pool.page_size
        self._in_flight = InFlight(pool.page_size)
        max_pages = -(-limits.context_length // pool.page_size)
        self.rows = RowTable(limits.max_running_requests, max_pages)
        self.queue = WaitingQueue(limits.schedule_policy, self.cache)
        self._running: dict[int, Request] = {}  # by row, in order of admission
        self._decodes: list[Request] | None = None  # the running requests in DECODE; None: look again
        self._decode_rows: Int32Array = np.empty(0, np.int32)
        self._lengths = OutputLengths(limits.conservativeness)
        self._page_writes: list[Int32Array] = []  # for the next batch
        self._earliest_deadline = float("inf")
        self._tick = 0

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFull."""
        limit = self.limits.max_queued_requests
        if limit is not None and len(self.queue) >= limit:
            raise QueueFull(f"{limit} requests are waiting already; try again later", limit=limit)
        request.tick = self._tick
        request.scored_len = request.logprob_start or 0
        self.queue.add(request)
        self._earliest_deadline = min(self._earliest_deadline, _next_deadline(request))

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any phase, now. Its pages are free or evictable when this returns; a result that is
        still under way for it will be ignored. Ending twice changes nothing."""
        if request.phase is Phase.DONE:
            return
        if request.phase is Phase.WAITING:
            self.queue.remove(request)
        else:
            self._leave_row(request)
        request.phase = Phase.DONE
        request.finish_reason = reason
        request.match = None
        if reason.type == "abort":
            self.counters.aborted += 1
        else:
            self.counters.finished += 1
            if not request.params.ignore_eos:
                self._lengths.finished(len(request.output_ids), request.max_new_tokens)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to schedule or to wait for."""
        return bool(self._running) or len(self.queue) > 0

    def live_requests(self) -> Iterable[Request]:
        """Every request that has not ended."""
        yield from list(self._running.values())
        yield from list(self.queue)

    def next_deadline(self) -> float | None:
        """Monotonic time of the next timeout, if any (it may be of a request that has ended)."""
        return None if self._earliest_deadline == float("inf") else self._earliest_deadline

    def expire(self) -> list[Request]:
        """Requests whose deadline has passed; the caller finishes them."""
        now = self._clock()
        if now < self._earliest_deadline:
            return []
        live = list(self.live_requests())
        late = [request for request in live if _next_deadline(request) <= now]
        rest = (_next_deadline(request) for request in live if _next_deadline(request) > now)
        self._earliest_deadline = min(rest, default=float("inf"))
        return late

    # ---- one step

    def schedule(self) -> Step | None:
        """Build the next batch, or None when nothing can run before a result or a request arrives."""
        self._tick += 1
        while True:
            setups: list[RowSetup] = []
            decodes = self._grow_decodes()
            budget = self._prompt_budget(len(decodes))
            chunks = self._continue_prompts(budget)
            budget -= sum(chunk.end - chunk.start for chunk in chunks)
            chunks += self._admit(budget, setups)
            if decodes or chunks:
                self.counters.steps += 1
                return self._pack(decodes, chunks, setups)
            stuck = [request for request in self._running.values() if request.phase is Phase.PREFILL]
            if len(stuck) < 2:
                return None
            self._retract(stuck[-1])  # all wait for pages that only they hold

    def launched(self, step: Step) -> None:
        """To be called once the batch is on its way: what it computes of prompts may be shared from the next
        step on, since steps run in order."""
        for request in step.requests[step.num_decodes :]:
            self._share(request, int(self.rows.kv_len[request.row]))
            if request.phase is not Phase.PREFILL:
                self._in_flight.end(request.uid)

    def handle(self, step: Step, result: StepResult) -> list[Request]:
        """Take in a step's result; returns the requests that have one more output token, or that were waiting
        for their prompt only. Requests that ended meanwhile are passed over."""
        advanced: list[Request] = []
        tokens = result.next_tokens.tolist()
        for b, logprobs in result.input_logprobs.items():
            if step.requests[b].phase is not Phase.DONE:
                step.requests[b].input_logprobs.append(logprobs)
        for b, logprobs in result.output_logprobs.items():
            if step.requests[b].phase is not Phase.DONE:
                step.requests[b].output_logprobs.append(logprobs)
        for request, token, samples in zip(step.requests, tokens, step.batch.samples.tolist(), strict=True):
            request.pending -= 1
            if request.phase is Phase.DONE:
                continue
            if samples:
                if request.max_new_tokens:
                    request.output_ids.append(token)
                    self.counters.generated_tokens += 1
                request.match = None
                advanced.append(request)
            elif request.max_new_tokens == 0 and request.phase is Phase.DRAINING and not request.pending:
                advanced.append(request)
        return advanced

    # ---- pages

    def _take(self, count: int) -> Int32Array | None:
        """`count` free pages, evicting what nobody uses; None if there are not as many."""
        return self.cache.alloc(count)

    def _available_pages(self) -> int:
        return self.pool.num_free + self.cache.evictable_pages

    def _share(self, request: Request, length: int) -> None:
        """Hand the pages of the request's first `length` tokens, whole pages of them, to the cache."""
        page_size, held = self._page_size, request.node
        assert held is not None, "a request with a row has its place in the tree"
        if not self._shares:
            return
        first, num_pages = request.tree_len // page_size, min(length, request.num_known) // page_size
        if num_pages <= first:
            return
        key = request.key()[4 * request.tree_len : 4 * num_pages * page_size]
        mine = self.rows.pages[request.row, first:num_pages]
        inserted = self.cache.insert(key, mine, request.namespace, after=held)
        self.cache.move_lock(held, inserted.node)
        request.node, request.tree_len = inserted.node, num_pages * page_size
        if len(inserted.duplicates):  # somebody else computed the same tokens meanwhile
            mine[: len(inserted.pages)] = inserted.pages
            self._page_writes.append(self.rows.writes(request.row, first, len(inserted.pages)))
            self.pool.free(inserted.duplicates)

    def _leave_row(self, request: Request) -> None:
        """Give the request's row back, its whole pages to the cache, the rest to the free list."""
        row = request.row
        self._share(request, int(self.rows.kv_len[row]))
        self.pool.free(self.rows.held(row)[request.tree_len // self._page_size :].copy())
        self._in_flight.end(request.uid)
        assert request.node is not None, "a request with a row has its place in the tree"
        self.cache.unlock(request.node)
        request.node, request.tree_len, request.row = None, 0, -1
        del self._running[row]
        self._decodes = None
        self.rows.give_back(row)
        self._page_writes = [writes[writes[:, 0] != row] for writes in self._page_writes]

    def _retract(self, request: Request) -> None:
        """Take a running request's row and pages back. It waits in its old place, and what is left of its
        pages in the cache when it returns is a prefix hit."""
        self._leave_row(request)
        request.phase = Phase.WAITING
        request.match = None
        request.num_retractions += 1
        self.counters.retractions += 1
        self._lengths.retracted()
        self.queue.add(request)

    def _youngest(self) -> Request | None:
        """The running request to retract first: lowest priority, then latest admitted. Never the only one."""
        candidates = [request for request in self._running.values() if request.phase is not Phase.DRAINING]
        if len(candidates) < 2:
            return None
        if self.limits.schedule_policy == "priority":
            lowest = min(request.priority for request in candidates)
            candidates = [request for request in candidates if request.priority == lowest]
        return candidates[-1]

    # ---- what goes into a batch

    def _prompt_budget(self, num_decodes: int) -> int:
        """Tokens for prompts in this step: what decodes leave, and always at least one."""
        if self.limits.step_budget is None:
            return 1 << 40
        return max(self.limits.step_budget - num_decodes, 1)

    def _grow_decodes(self) -> list[Request]:
        """The requests that decode in this step, each with a page to write to; sets _decode_rows alike."""
        table = self.rows
        while True:
            if self._decodes is None:
                self._decodes = [r for r in self._running.values() if r.phase is Phase.DECODE]
                self._decode_rows = np.array([request.row for request in self._decodes], np.int32)
            rows = self._decode_rows
            is_full = table.kv_len[rows] == table.num_pages[rows] * self._page_size
            full = rows[is_full]
            if not len(full):
                return self._decodes
            pages = self._take(len(full))
            if pages is not None:
                index = table.num_pages[full]
                table.pages[full, index] = pages
                table.num_pages[full] = index + 1
                self._page_writes.append(np.stack((full, index, pages), axis=1))
                return self._decodes
            youngest = self._youngest()
            if youngest is not None:
                self._retract(youngest)
                continue
            # The only one left waits for the pages of those whose last result is under way.
            writable = [request for request, full_ in zip(self._decodes, is_full, strict=True) if not full_]
            self._decodes, self._decode_rows = None, rows[~is_full]
            return writable

    def _continue_prompts(self, budget: int) -> list[_Chunk]:
        """Chunks of requests that are admitted and not computed up to their known tokens."""
        chunks: list[_Chunk] = []
        for request in self._running.values():
            if budget <= 0:
                break
            if request.phase is Phase.PREFILL:
                chunk = self._extend(request, int(self.rows.kv_len[request.row]), budget)
                if chunk is not None:
                    chunks.append(chunk)
                    budget -= chunk.end - chunk.start
        return chunks

    def _extend(self, request: Request, start: int, budget: int) -> _Chunk | None:
        """As long a chunk from `start` as budget and pages allow; None if that is nothing."""
        row, page_size = request.row, self._page_size
        held = int(self.rows.num_pages[row])
        end = min(request.target_len, start + budget)
        end = min(end, (held + self._available_pages()) * page_size)
        if end <= start:
            return None
        missing = -(-end // page_size) - held
        if missing > 0:
            pages = self._take(missing)
            assert pages is not None, "evictable and free pages were counted"
            self._page_writes.append(self.rows.append(row, pages))
        return _Chunk(request, start, end)

    def _admit(self, budget: int, setups: list[RowSetup]) -> list[_Chunk]:
        """Give rows to waiting requests while rows, budget and pages last."""
        chunks: list[_Chunk] = []
        if budget <= 0 or not self.rows.num_free or not len(self.queue):
            return chunks
        simulation = self._simulation()
        bypassed = 0
        for request in self.queue.ordered():
            if budget <= 0 or not self.rows.num_free or bypassed > _MAX_BYPASSED:
                break
            if request.pending or self._is_computed_elsewhere(request):
                continue
            if not self._admit_one(request, simulation):
                if self.queue.is_aged(request):
                    break
                bypassed += 1
                continue
            chunk = self._extend(request, request.tree_len, budget)
            assert chunk is not None, "the simulation found pages for the whole request"
            setups.append(
                RowSetup(
                    request.row,
                    request.params,
                    request.seed,
                    request.prompt_ids,
                    np.array(request.output_ids, np.int32),
                )
            )
            chunks.append(chunk)
            budget -= chunk.end - chunk.start
        return chunks

    def _simulation(self) -> ReleaseSimulation:
        simulation = ReleaseSimulation(self._available_pages(), self._page_size)
        for row, request in self._running.items():
            if request.phase is not Phase.DRAINING:
                held = int(self.rows.num_pages[row])
                known = max(request.target_len, int(self.rows.kv_len[row]))
                simulation.add(self._remaining(request), known, held, held - request.shared_pages)
        return simulation

    def _remaining(self, request: Request) -> int:
        return self._lengths.remaining(
            len(request.output_ids), request.max_new_tokens, exact=request.params.ignore_eos
        )

    def _is_computed_elsewhere(self, request: Request) -> bool:
        """Whether a running request is about to put the next tokens of this one into the cache."""
        cached_len = current_match(self.cache, request).length
        key = request.key()[: 4 * request.match_limit]
        return self._in_flight.find(request.uid, key, cached_len, request.namespace) is not None

    def _admit_one(self, request: Request, simulation: ReleaseSimulation) -> bool:
        """Give the request a row and its cached prefix if the simulation finds room for it."""
        match = current_match(self.cache, request)
        lent = match.length // self._page_size
        before = self._available_pages()
        self.cache.lock(match.node)  # so that it is not counted, nor evicted, as somebody's room
        taken = before - self._available_pages()
        simulation.shrink(taken)
        simulation.add(self._remaining(request), request.num_known, lent, 0)
        if not simulation.is_feasible() and self._running:
            simulation.drop_last()
            simulation.shrink(-taken)
            self.cache.unlock(match.node)
            return False
        self.queue.admitted(request)
        request.row = self.rows.take()
        self._running[request.row] = request
        request.phase = Phase.PREFILL
        request.target_len = request.num_known
        request.shared_pages = lent
        if not request.num_retractions:
            request.cached_len = match.length
            self.counters.prompt_tokens += request.prompt_len
            self.counters.cached_tokens += match.length
        self.rows.samples_left[request.row] = request.max_new_tokens - len(request.output_ids)
        self.rows.kv_len[request.row] = match.length
        request.node, request.tree_len = match.node, match.length
        if lent:
            self._page_writes.append(self.rows.append(request.row, match.pages))
        if self._shares:
            self._in_flight.begin(request.uid, request.key(), request.namespace)
        request.match = None
        return True

    def check(self) -> list[str]:
        """What is wrong with the ownership of pages, if anything: empty when every page has one owner."""
        private = [
            self.rows.held(row)[request.tree_len // self._page_size :] for row, request in self._running.items()
        ]
        locked = [request.node for request in self._running.values() if request.node is not None]
        return check(self.pool, self.cache, private, locked)

    # ---- packing

    def _pack(self, decodes: list[Request], chunks: list[_Chunk], setups: list[RowSetup]) -> Step:
        table = self.rows
        decode_rows = self._decode_rows
        chunk_rows = np.array([chunk.request.row for chunk in chunks], np.int32)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        ends = np.array([chunk.end for chunk in chunks], np.int32)
        ones = np.ones(len(decodes), np.int32)
        rows = np.concatenate((decode_rows, chunk_rows))
        table.kv_len[decode_rows] += 1
        table.kv_len[chunk_rows] = ends
        token_ids = [np.full(len(decodes), FROM_DEVICE, np.int32)]
        token_ids += [chunk.request.known_ids()[chunk.start : chunk.end] for chunk in chunks]
        size = len(rows)
        batch = Batch(
            rows=rows,
            q_lens=np.concatenate((ones, ends - starts)),
            kv_lens=table.kv_len[rows],
            token_ids=np.concatenate(token_ids),
            page_writes=np.concatenate(self._page_writes) if self._page_writes else np.empty((0, 3), np.int32),
            samples=np.ones(size, np.bool_),
            score_from=np.full(size, -1, np.int32),
            top_logprobs=np.full(size, -1, np.int32),
            setups=setups,
        )
        self._page_writes = []
        requests = decodes + [chunk.request for chunk in chunks]
        for request in requests:
            request.pending += 1
        for b, chunk in enumerate(chunks, len(decodes)):
            self._finish_chunk(batch, b, chunk)
        self._ask_for_logprobs(batch, requests)
        sampling = rows[batch.samples]
        table.samples_left[sampling] -= 1
        if (table.samples_left[sampling] <= 0).any():
            for request in requests:
                if request.phase is Phase.DECODE and table.samples_left[request.row] <= 0:
                    request.phase = Phase.DRAINING
            self._decodes = None
        return Step(batch, requests, len(decodes))

    def _finish_chunk(self, batch: Batch, b: int, chunk: _Chunk) -> None:
        """Mark what a chunk samples and which of its positions are scored, and move its request on."""
        request = chunk.request
        done = chunk.end == request.target_len
        wants_next = request.max_new_tokens > 0 or request.top_logprobs >= 0
        batch.samples[b] = done and wants_next
        if done:
            request.phase = Phase.DECODE if request.max_new_tokens > 0 else Phase.DRAINING
            self._decodes = None
        first, last = max(chunk.start, request.scored_len), min(chunk.end, request.prompt_len - 1)
        if request.logprob_start is not None and first < last:
            batch.score_from[b] = first - chunk.start
            batch.score_targets[b] = request.prompt_ids[first + 1 : last + 1]
            request.scored_len = last

    def _ask_for_logprobs(self, batch: Batch, requests: list[Request]) -> None:
        for b, request in enumerate(requests):
            if request.top_logprobs >= 0:
                batch.top_logprobs[b] = request.top_logprobs
                if request.token_ids_logprob is not None:
                    batch.token_ids_logprob[b] = request.token_ids_logprob


def _next_deadline(request: Request) -> float:
    """When the request times out next: in the queue before its first row, or over all."""
    deadline = request.deadline if request.deadline is not None else float("inf")
    if request.queue_deadline is not None and request.phase is Phase.WAITING and not request.num_retractions:
        return min(deadline, request.queue_deadline)
    return deadline
