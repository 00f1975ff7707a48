"""Decides what each step computes: who runs, who waits, who is retracted.

The step's tokens go to outputs, then to started prompts, then to new ones. Plain ints and NumPy only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from operator import neg, sub

import numpy as np

from sgl.errors import QueueFull
from sgl.runtime.batch import Batch, Int32Array, Int64Array, Logprobs, RowSetup, StepResult
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.scheduler.adapters import AdapterSlots
from sgl.runtime.scheduler.admission import Admission, OutputLengths, ReleaseSimulation
from sgl.runtime.scheduler.counters import Counters
from sgl.runtime.scheduler.deadlines import MAX_EXPIRED, Deadlines
from sgl.runtime.scheduler.memory import RowMemory
from sgl.runtime.scheduler.packing import Chunk, assemble, assemble_ahead, share_of
from sgl.runtime.scheduler.programs import Programs
from sgl.runtime.scheduler.request import FinishReason, Phase, Request
from sgl.runtime.scheduler.retraction import in_the_way, youngest
from sgl.runtime.scheduler.shares import Shares
from sgl.runtime.scheduler.step import Limits, Step
from sgl.runtime.scheduler.tiers import Tiers
from sgl.runtime.scheduler.transfers import Transfers
from sgl.runtime.scheduler.verification import groups, has_room_ahead, take_scores, verified
from sgl.runtime.scheduler.waiting_queue import WaitingQueue

_MAX_BYPASSED = 16  # requests found not to fit before a round ends
_MAX_WITHOUT_SLOT = 256  # requests whose adapter has no slot, likewise


class Scheduler:
    """Owns the queue, the rows and the pool's pages. Single-threaded."""

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        *,
        share: bool = True,
        depth: int = 1,
        num_checkpoints: int | None = None,
        window: int | None = None,
        window_pool: PagePool | None = None,
        tiers: Tiers | None = None,
        transfers: Transfers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """depth: steps that are under way at once, each with other decodes (pipeline parallelism). num_checkpoints,
        window, window_pool, tiers, transfers: see `RowMemory`."""
        self.limits = limits
        self.counters = Counters()
        self._depth = depth
        num_rows, max_pages = limits.max_running_requests, -(-limits.context_length // pool.page_size)
        self.memory = RowMemory(
            *(pool, num_rows, max_pages, num_checkpoints, window, window_pool, tiers, transfers), share=share
        )
        self.queue = WaitingQueue(limits.schedule_policy, self.memory)
        self.memory.cache.watcher = self.queue
        self.shares = Shares(limits.step_tokens, self.memory, self.queue)
        self.adapters = AdapterSlots(limits.adapter_slots)
        self._running = self.memory.running
        self._rows = self.memory.rows
        self._clock = clock
        self._decodes: list[Request] | None = None  # running requests in DECODE; None: stale
        self._decode_rows: Int32Array = np.empty(0, np.int32)
        self._batch: Batch | None = None  # the last one, if it was of decodes alone
        self._in_flight: list[Step] = []  # scheduled, not yet handled
        self._lengths = OutputLengths(limits.conservativeness)
        self._admission = Admission(self.memory, self._lengths, limits.step_tokens)
        self._programs = Programs() if limits.schedule_policy == "program" else None
        self._deadlines = Deadlines()
        self._tick = 0
        self.is_paused = False  # nothing new is scheduled; for the loop

    # ── requests come and go ────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFull, and InvalidRequest if its adapter is gone."""
        limit = self.limits.max_queued_requests
        if limit is not None and len(self.queue) >= limit:
            raise QueueFull(f"{limit} requests are waiting already; try again later", limit=limit)
        self.adapters.enter(request.adapter)
        request.tick = self._tick
        if self._programs is not None:
            self._programs.enter(request)
        request.scored_len = request.logprob_start or 0
        self.queue.add(request)
        self._deadlines.add(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any phase; its pages become free or evictable, pending results are ignored. Idempotent."""
        if request.phase is Phase.DONE:
            return
        if request.phase is Phase.WAITING:
            self.queue.remove(request)
            if self._programs is not None:
                self._programs.gave_up(request)
        else:
            self._leave(request)
        request.phase = Phase.DONE
        request.finish_reason = reason
        request.match = None
        self.adapters.leave(request.adapter)
        self._deadlines.end(request)
        if reason.type == "abort":
            self.counters.aborted += 1
        else:
            self.counters.finished += 1
            if not request.params.ignore_eos:
                self._lengths.finished(len(request.output_ids), request.max_new_tokens)

    def grammar_is_ready(self, request: Request) -> None:
        """The constraint is compiled: compute the last known token, too."""
        if request.waits_for_grammar:
            self.queue.grammar_is_ready(request)

    def becomes_critical(self, request: Request) -> None:
        """Its program waits for nothing else any more. Idempotent."""
        if not request.is_critical:
            request.is_critical = True
            self.queue.renew(request)

    def append(self, request: Request, token_ids: Sequence[int]) -> None:
        """Append certain tokens, one at least, to a request that was just advanced: the next step computes them and
        samples what follows. The sample of a step in flight for it is dropped."""
        request.forced.append((len(request.output_ids), len(token_ids)))
        request.output_ids.extend(token_ids)
        self.counters.forced_tokens += len(token_ids)
        request.match = None
        for step in self._in_flight:
            step.dropped.add(request.uid)
        if request.phase is Phase.DECODE:
            self._extend(request)

    def may_draft(self, request: Request) -> bool:
        """Whether the next step may compute a running request's last known token, and could verify drafts behind it.
        Not with penalties, which count tokens that are sampled for good, nor with states, which do not go back."""
        if self.memory.states is not None or not request.output_ids or request.params.has_penalties:
            return False
        if request.phase is Phase.DECODE:
            return bool(self._rows.kv_len[request.row] == request.num_known - 1)
        if request.phase is not Phase.PREFILL or request.waits_for_grammar:
            return False
        return bool(self._rows.kv_len[request.row] >= request.prompt_len)  # not a retracted one's prompt

    def draft(self, request: Request, token_ids: Sequence[int]) -> None:
        """Let the next step verify drafts of a request that may draft, fewer than the tokens that it still wants. They
        replace earlier ones."""
        assert len(request.output_ids) + len(token_ids) < request.max_new_tokens, "one more is sampled"
        if request.phase is Phase.DECODE and token_ids:
            self._extend(request)
        if request.phase is Phase.PREFILL:
            request.drafts = token_ids
            request.target_len = request.num_known + len(token_ids)

    def _extend(self, request: Request) -> None:
        request.phase = Phase.PREFILL
        request.target_len = request.num_known
        self._rows.samples_left[request.row] = request.max_new_tokens - len(request.output_ids)
        self._decodes = None

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._running) or len(self.queue) > 0

    @property
    def waits_for_grammar(self) -> bool:
        """Whether any request waits for its grammar."""
        return self.queue.num_waiting_for_grammar > 0 or any(r.waits_for_grammar for r in self._running.values())

    def expire(self) -> list[Request]:
        """Up to MAX_EXPIRED requests whose deadline has passed, each once, for the caller to finish."""
        return self._deadlines.expired(self._clock(), MAX_EXPIRED) if self._deadlines else []

    # ── one step ────────────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> Step | None:
        """Build the next batch; None if nothing can run now."""
        self._tick += 1
        setups: list[RowSetup] = []
        while True:
            decodes, decode_rows = self._grow_decodes()
            chunks, tokens_left = self.shares.chunks(len(decodes))
            chunks += self._admit(tokens_left, setups)
            if self.memory.states is not None:
                self.memory.states.stop_at_wanted(chunks)
            if decodes or chunks:
                self.counters.steps += 1
                return self._commit(decodes, decode_rows, chunks, setups)
            is_pending = self._depth > 1 and self._in_flight  # results may free what is missing
            if is_pending or (other := in_the_way(self._running.values(), self.queue)) is None:
                return None
            self.retract(other)

    def schedule_ahead(self, latest: Step, wanted: Int64Array) -> Step | None:
        """The step behind one under way that verifies drafts: as if all stood, with at most `most_ahead` new ones of
        each row, which the device will know. None: others wait or run, or there is no room."""
        requests, rooms = latest.requests, zip(latest.requests, wanted.tolist(), strict=True)
        is_alone = len(self._running) == len(requests) and not len(self.queue) and not self.is_paused
        fits = self.shares.fit(int(wanted.sum()) + len(wanted))
        if not (is_alone and fits and all(has_room_ahead(each, number, self.memory) for each, number in rooms)):
            return None
        self._tick += 1
        self.counters.steps += 1
        step = Step(assemble_ahead(self._rows, latest.batch, wanted, self.memory.pop_page_writes()), requests, 0)
        step.batch.moved = self.memory.moved
        self._in_flight.append(step)
        return step

    def after_launch(self, step: Step) -> None:
        """From the next step on, this batch's prompt pages may be shared."""
        for request in step.requests[step.num_decodes :]:
            self.memory.share(request)
            if self._rows.kv_len[request.row] >= request.computable_len:
                self.memory.prompt_is_computed(request)

    def handle(self, step: Step, result: StepResult) -> Iterator[list[Request]]:
        """Append a step's tokens to its requests; those that have ended are skipped.

        Yields the requests that went on, for the caller to read their latest token: first all of them (also those
        that want none and are computed now), then again those whose first draft was accepted, with the token behind
        it, and so on, unless the caller ended them or appended other tokens in between."""
        take_scores(step, result)
        self._in_flight.remove(step)
        advanced: list[Request] = []
        verified: list[Iterator[Request]] = []
        tokens, split = result.next_tokens.tolist(), step.num_decodes
        for request, token in zip(step.requests[:split], tokens, strict=False):
            if request.phase is not Phase.DONE and request.uid not in step.dropped:
                request.output_ids.append(token)
                advanced.append(request)
                if request.phase is Phase.WAITING:  # retracted meanwhile: its match has changed
                    request.match = None
        self.counters.generated_tokens += len(advanced)
        for b, request in enumerate(step.requests[split:], split):
            if request.phase is not Phase.DONE and step.batch.kv_lens[b] == request.target_len:
                request.match = None
                if b in result.checks or step.batch.is_ahead:
                    if b in result.drafts:
                        request.drafts = result.drafts[b].tolist()
                    sampled = [*result.checks[b].tolist(), tokens[b]] if b in result.checks else [tokens[b]]
                    parts = result.output_logprobs[b].split() if b in result.output_logprobs else []
                    verified.append(self._verified(request, sampled, parts))
                    continue
                if request.max_new_tokens:
                    request.output_ids.append(tokens[b])
                    self.counters.generated_tokens += 1
                advanced.append(request)
        return groups(advanced, verified)

    def _verified(self, request: Request, sampled: list[int], logprobs: list[Logprobs]) -> Iterator[Request]:
        yield from verified(request, sampled, logprobs, self._rows, self.counters)
        if request.phase is not Phase.DECODE:
            return
        if self._in_flight and (ahead := self._in_flight[0]).batch.is_ahead:  # it computes what follows already
            b = ahead.requests.index(request)
            ahead.batch.kv_lens[b] = request.target_len = int(self._rows.kv_len[request.row])
            request.phase = Phase.VERIFY
        else:
            self._extend(request)

    # ── what goes into a batch ──────────────────────────────────────────────────────────────────────────────────

    def _grow_decodes(self) -> tuple[list[Request], Int32Array]:
        """The requests that decode in this step, each with a page to write to, and their rows."""
        table, page_size = self._rows, self.memory.page_size
        while True:
            if self._decodes is None:
                self._decodes = [r for r in self._running.values() if r.phase is Phase.DECODE]
                self._decode_rows = np.array([request.row for request in self._decodes], np.int32)
            decodes, rows = self._decodes, self._decode_rows
            if not decodes:
                return decodes, rows
            if self._depth > 1:
                ready = share_of(rows, [step.batch for step in self._in_flight], self._depth)
                decodes, rows = [decodes[i] for i in ready.tolist()], rows[ready]
            is_full = table.kv_len[rows] == table.num_pages[rows] * page_size
            full = rows[is_full]
            for row in full.tolist():
                self.memory.give_back(self._running[row])
            if not len(full) or self.memory.grow(full):
                return decodes, rows
            if (latest := youngest(self._running.values(), self.limits.schedule_policy)) is not None:
                self.retract(latest)
                continue
            # The only one left waits for pages of requests whose last result is pending.
            writable = [request for request, waits in zip(decodes, is_full, strict=True) if not waits]
            self._decodes = None
            return writable, rows[~is_full]

    def _admit(self, tokens_left: int, setups: list[RowSetup]) -> list[Chunk]:
        chunks: list[Chunk] = []
        if tokens_left <= 0 or not self._rows.num_free or not len(self.queue):
            self.queue.look_ahead()
            return chunks
        reserved = () if self._programs is None else self._programs.reserved()
        simulation = self._admission.simulation(reserved)
        seen, stuck = self.memory.available_by_pool(), None
        bypassed = without_slot = 0
        with closing(self.queue.candidates()) as candidates:
            for request in candidates:
                now = self.memory.available_by_pool()
                simulation.shrink(*map(sub, seen, now))  # by what loads took that were begun meanwhile
                seen = now
                if request.num_retractions and any(request in step.requests for step in self._in_flight):
                    continue  # its own token is pending
                if not self.adapters.has_room(request.adapter):
                    without_slot += 1
                    if self.queue.is_aged(request) or without_slot > _MAX_WITHOUT_SLOT:
                        break
                    continue
                if request.unit is not None and request.unit.failed_in == self._tick:
                    continue  # as little room as for the one before
                has_row = self._give_row(request, simulation)
                seen = self.memory.available_by_pool()
                if not has_row:
                    bypassed += 1
                    if self.queue.is_aged(request) or bypassed > _MAX_BYPASSED:
                        break
                    continue
                start = request.tree_len
                end = self.memory.reach(request, min(request.computable_len, start + tokens_left))
                seen = self.memory.available_by_pool()
                if end == start:  # others took what was reserved for it
                    stuck = request
                    break
                chunks.append(Chunk(request, start, end))
                tokens_left -= end - start
                output_ids = np.array(request.output_ids, np.int32)
                setups.append(RowSetup(request.row, request.params, request.seed, request.prompt_ids, output_ids))
                if tokens_left <= 0 or not self._rows.num_free:
                    break
        if stuck is not None:
            self.retract(stuck)
        return chunks

    def _give_row(self, request: Request, simulation: ReleaseSimulation) -> bool:
        """Give the request a row and its cached prefix, if it fits or nothing else runs."""
        memory, programs = self.memory, self._programs
        match = memory.entry_match(request)
        before = memory.available_by_pool()
        above = memory.lock(match)  # so that nobody counts or evicts it as free
        locked = tuple(map(sub, before, memory.available_by_pool()))
        skipped = 0 if above is None else above.length
        simulation.shrink(*locked)
        if programs is None or memory.is_full or not programs.is_reserved(request):
            partners = [] if programs is None else programs.partners(request, memory)
            fits = self._admission.fits(simulation, request, partners, match.length, skipped)
            if programs is not None and partners:
                programs.tried(request.unit, self._tick, fits=fits, others_run=bool(self._running))
            if not fits and memory.is_busy:
                simulation.shrink(*map(neg, locked))
                memory.unlock(match, above)
                return False
        memory.enter(request, above)
        self._rows.adapter[request.row] = self.adapters.take(request.adapter)
        if programs is not None:
            programs.admitted(request, request.num_known - match.length)
        self.queue.admitted(request)
        request.phase = Phase.PREFILL
        request.target_len = request.num_known
        request.shared_pages = match.length // memory.page_size
        self._rows.samples_left[request.row] = request.max_new_tokens - len(request.output_ids)
        if not request.num_retractions:
            request.cached_len = match.length
            self.counters.prompt_tokens += request.prompt_len
            self.counters.cached_tokens += match.length
        return True

    def _commit(
        self, decodes: list[Request], decode_rows: Int32Array, chunks: list[Chunk], setups: list[RowSetup]
    ) -> Step:
        """Build the batch and advance its requests' phases."""
        page_writes = self.memory.pop_page_writes()
        batch = assemble(self._rows, decodes, decode_rows, chunks, setups, page_writes, self._batch)
        self._batch = None if chunks else batch
        batch.moved = self.memory.moved
        if self.memory.states is not None:
            batch.state_loads, batch.state_saves = self.memory.states.copies(decode_rows, chunks)
        if self.memory.windows is not None:
            batch.window_writes = self.memory.windows.pop_writes()
        self.adapters.note(batch, self._rows.adapter)
        requests = decodes + [chunk.request for chunk in chunks]
        for chunk in chunks:
            if chunk.is_last:
                wants_more = Phase.VERIFY if chunk.request.drafts else Phase.DECODE
                chunk.request.phase = wants_more if chunk.request.max_new_tokens else Phase.DRAINING
                self._decodes = None
        left = self._rows.samples_left[batch.rows] - batch.samples
        self._rows.samples_left[batch.rows] = left
        if left.min() <= 0:
            self._decodes = None
            for request in requests:
                if request.phase is Phase.DECODE and self._rows.samples_left[request.row] <= 0:
                    request.phase = Phase.DRAINING
        step = Step(batch, requests, len(decodes))
        self._in_flight.append(step)
        return step

    # ── giving way ──────────────────────────────────────────────────────────────────────────────────────────────

    def _leave(self, request: Request) -> None:
        self.memory.leave(request)
        self.adapters.give_back(request.adapter)
        if self._programs is not None:
            self._programs.left(request)
        self._decodes = None

    def retract(self, request: Request) -> None:
        """Take a running request's row and pages. It returns to its old place in the queue; pages still in the tree
        will be a hit."""
        self._leave(request)
        request.phase = Phase.WAITING
        request.drafts, request.pooled = (), None
        request.num_retractions += 1
        self.counters.retractions += 1
        self._lengths.retracted()
        self.queue.add(request)
