"""Drives a scheduler against the mock model step by step, as the engine's loop does, and makes requests for it."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl.runtime.cache.files import Kind, PageFiles
from sgl.runtime.cache.host import HostCache
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.cache.rates import Rates
from sgl.runtime.loop.copies import Copies
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.scheduler.request import FinishReason, Phase, Request
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.scheduler.step import Limits, Step
from sgl.runtime.scheduler.tiers import Tiers
from sgl.runtime.scheduler.transfers import Transfers
from tests.mock_follower import FollowingMover, lead
from tests.mock_mover import MockMover
from tests.mock_runner import Mixed, MockPending, MockRunner, expected_output, expected_score, prefix_totals
from tests.patience import PATIENCE

STOPS = frozenset({3, 50})


@dataclass
class Setting:
    """One way to run the same requests."""

    page_size: int = 4
    num_pages: int = 64
    rows: int = 8
    budget: int | None = 16
    overlap: bool = True
    radix: bool = True
    policy: str = "lpm"
    context: int = 96
    conservativeness: float = 1.0
    drafts: bool = False
    checkpoints: int | None = None
    """Of recurrent states; None: the model has none."""
    window: int | None = None
    """Tokens that a token sees; None: all. Mixed: in some layers."""
    num_window_pages: int = 0
    """Of the pool of layers with a window, if others have none."""
    depth: int = 1
    """Steps under way at once; with more than one, overlap says nothing."""
    host_pages: int | None = None
    """Of host memory; None: there is only the device's."""
    host_states: int | None = None
    """Of host memory, for checkpoints of recurrent states."""
    host_window_pages: int = 0
    """Of host memory, for pages of layers with a window."""
    folder: Path | None = None
    """For the file tier; None: there is none."""
    lateness: float = 0.5
    """How likely a copy is not done yet, at each look."""
    is_waited_for: bool = False
    """Each step waits for the loads that it needs, so that it may come before they are done."""
    most_saves: int = 1 << 20
    buffer_pages: int | None = None
    """Of host memory that pages to and from other engines go through; None: there are no others."""
    ranks: int = 1
    """All compute the same, and have copies of their own, which files have together."""
    seed: int = 0


class Driver:
    """The engine loop without a thread or text: schedule, launch, handle the step before."""

    def __init__(self, setting: Setting, make_transfers: Callable[[Driver], Transfers] | None = None) -> None:
        self.setting = setting
        self.pool = PagePool(setting.num_pages, setting.page_size)
        self.window_pool: PagePool | None = None
        if isinstance(setting.window, Mixed):
            self.window_pool = PagePool(setting.num_window_pages, setting.page_size)
        limits = Limits(
            setting.rows,
            setting.context,
            setting.budget,
            schedule_policy=setting.policy,
            conservativeness=setting.conservativeness,
        )  # type: ignore[arg-type]
        self.now = 0.0
        self.runner = self.mock_runner()
        self.files: PageFiles | None = None
        self.tiers: Tiers | None = None
        host_pages, self.first_row = setting.host_pages, 0 if setting.host_pages is None else setting.host_pages + 1
        if host_pages is not None or setting.buffer_pages is not None:
            rows = self.first_row + (setting.buffer_pages or 0)
            sizes = setting.host_states or 0, setting.host_window_pages
            self.mover = MockMover(self.runner, rows, random.Random(setting.seed), setting.lateness, *sizes)
            others = []
            for rank in range(1, setting.ranks):
                runner, rng = self.mock_runner(), random.Random(setting.seed + rank)
                lateness = setting.lateness if setting.folder is not None or rank > 1 else 1.0  # until waited for
                others.append((runner, FollowingMover(runner, rows, rng, lateness, *sizes)))
            self.mover.is_waited_for = setting.is_waited_for
            lead(self.runner, self.mover, others, shares=setting.folder is not None)
        if host_pages is not None:
            if setting.folder is not None:
                movers = [self.mover, *(mover for _, mover in others)]
                beside: dict[Kind, list[Any]] = {Kind.PAGE: [mover.memory for mover in movers]}
                if setting.host_states is not None:
                    beside[Kind.STATE] = [part for mover in movers for part in mover.states]
                if setting.host_window_pages:
                    beside[Kind.WINDOWED] = [mover.windowed for mover in movers]
                self.files = PageFiles(
                    *(setting.folder, b"m" * 32, self.mover.memory, setting.page_size, 1 << 18),
                    beside=beside,
                    segment_bytes=1 << 13,
                )
            rates = Rates(compute=1.0, load=1e-6, read=1e-6)
            rates.is_fixed = True
            host = HostCache(
                host_pages, setting.page_size, setting.host_states, setting.host_window_pages, setting.window
            )
            self.tiers = Tiers(host, rates, files=self.files, most_saves=setting.most_saves, clock=lambda: self.now)
        self.scheduler = Scheduler(
            limits,
            self.pool,
            share=setting.radix,
            depth=setting.depth,
            num_checkpoints=setting.checkpoints,
            window=setting.window,
            window_pool=self.window_pool,
            tiers=self.tiers,
            transfers=None if make_transfers is None else make_transfers(self),
            clock=lambda: self.now,
        )
        if self.scheduler.memory.states is not None:
            self.scheduler.memory.states._interval = setting.page_size
        self.copies = Copies(self.scheduler.memory, getattr(self, "mover", self.runner))  # type: ignore[arg-type]
        self.flying: tuple[Step, MockPending] | None = None
        self.in_stages: deque[tuple[Step, Any]] = deque()
        self.done: dict[int, Request] = {}
        self.num_steps = 0
        """That did something; the others waited for a copy or for files."""

    def mock_runner(self) -> MockRunner:
        """Of one rank."""
        setting = self.setting
        max_pages = -(-setting.context // setting.page_size)
        return MockRunner(
            *(setting.num_pages, setting.page_size, setting.rows, max_pages),
            *(setting.checkpoints, setting.window, setting.num_window_pages),
        )

    def live_requests(self) -> list[Request]:
        """Every request that has not ended."""
        return [*self.scheduler.memory.running.values(), *self.scheduler.queue]

    def step(self) -> bool:
        """One turn of the loop; whether anything happened."""
        decodable = {r.uid for r in self.live_requests() if r.phase is Phase.DECODE or self.goes_on(r)}
        movers = [each for each in (self.tiers, self.scheduler.memory.transfers) if each is not None]
        for each in movers:
            each.poll()
        step = self.scheduler.schedule() if self.scheduler.has_work else None
        for each in movers:
            each.launch(self.mover)
        waits = self.scheduler.memory.is_bringing
        happened = self.step_in_stages(step) if self.setting.depth > 1 else self.step_alone(step, decodable)
        if not happened and self.files is not None:
            time.sleep(0.001)  # for its threads, which others' tests may hold up
        self.num_steps += happened
        return happened or waits

    def goes_on(self, request: Request) -> bool:
        """Whether tokens behind its first one are known and may be computed."""
        if request.phase is not Phase.PREFILL or not request.output_ids:
            return False
        return bool(self.scheduler.memory.rows.kv_len[request.row] < request.computable_len)

    def step_alone(self, step: Step | None, decodable: set[int]) -> bool:
        flying, self.flying = self.flying, None
        happened = step is not None or flying is not None
        if step is not None:
            self.check_step(step, decodable)
            launched = (step, self.runner.launch(step.batch))
            self.scheduler.after_launch(step)
            if self.setting.overlap:
                self.flying = launched
            else:
                flying = launched
        if flying is not None:
            self.handle(*flying)
        return happened

    def step_in_stages(self, step: Step | None) -> bool:
        """A new step is launched before the results of depth - 1 others are known."""
        if step is not None:
            waiting = {r.uid for each, _ in self.in_stages for r in each.requests[: each.num_decodes]}
            assert not waiting & {r.uid for r in step.requests[: step.num_decodes]}, "its last token is not known"
            self.in_stages.append((step, self.runner.forward(step.batch)))
            self.scheduler.after_launch(step)
        if len(self.in_stages) == self.setting.depth or (step is None and self.in_stages):
            oldest, launched = self.in_stages.popleft()
            self.handle(oldest, self.runner.sample(launched))
            return True
        return step is not None

    def check_step(self, step: Step, decodable: set[int]) -> None:
        batch, budget = step.batch, self.setting.budget
        assert (batch.q_lens > 0).all(), "a row computes nothing"
        if budget is not None:
            num_outputs = step.num_decodes + sum(bool(r.output_ids) for r in step.requests[step.num_decodes :])
            assert batch.q_lens.sum() <= max(budget, num_outputs + 1)
        assert (batch.q_lens[: step.num_decodes] == 1).all()
        left_out = decodable - {r.uid for r in step.requests}
        for request in self.live_requests():
            if request.uid in left_out:
                pools = [self.pool, *([] if self.window_pool is None else [self.window_pool])]
                assert request.phase is Phase.WAITING or not min(pool.num_free for pool in pools), "left out"

    def handle(self, step: Step, pending: MockPending) -> None:
        for requests in self.scheduler.handle(step, pending.wait()):
            assert len({request.uid for request in requests}) == len(requests), "each comes once in a group"
            for request in requests:
                self.go_on(request)

    def go_on(self, request: Request) -> None:
        reason = None
        if request.max_new_tokens == 0:
            reason = FinishReason("length")
        elif request.output_ids[-1] in request.stop_ids:
            reason = FinishReason("stop", request.output_ids[-1])
        elif len(request.output_ids) >= request.max_new_tokens:
            reason = FinishReason("length")
        if reason is not None:
            self.copies.finish(self.scheduler, request, reason)
            self.done[request.uid] = request
        elif self.setting.drafts and request.max_new_tokens - len(request.output_ids) > 1:
            self.try_draft(request)

    def try_draft(self, request: Request) -> None:
        """Append tokens that come next and draft those behind them, or only draft, or neither; drafts are at times
        wrong, and tokens are also appended amid those that were just verified."""
        number = len(request.output_ids)
        rng = random.Random(request.uid * 1000 + number)
        expected = expected_output(
            request.prompt_ids.tolist(),
            number + 8,
            request.seed,
            request.stop_ids,
            recurrent=self.setting.checkpoints is not None,
            window=self.setting.window,
        )[number:]
        room = min(request.max_new_tokens - number, len(expected)) - 1
        num_appended = rng.choice([0, 0, 0, 1, 2, 4])
        if 0 < num_appended <= room:
            self.scheduler.append(request, expected[:num_appended])
            expected = expected[num_appended:]
        if request.num_ahead or not self.scheduler.may_draft(request):
            return
        drafts = [*expected, 0, 0, 0][: rng.choice([0, 1, 1, 2, 3, 7])]
        drafts = [token if rng.random() < 0.9 else rng.randrange(97) for token in drafts]
        self.scheduler.draft(request, drafts[: request.max_new_tokens - len(request.output_ids) - 1])

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request, FinishReason("abort"))

    def check(self) -> None:
        assert self.scheduler.memory.check() == []

    def run(self, bound: int = 5000) -> None:
        deadline, last = time.monotonic() + PATIENCE, self.num_steps + bound
        while self.step() and self.num_steps < last and time.monotonic() < deadline:
            pass
        assert not self.scheduler.has_work, "requests are left, and nothing happens"


def make_request(uid: int, prompt: list[int], max_new: int, **fields: object) -> Request:
    params = SamplingParams(max_new_tokens=max_new)
    return Request(
        uid,
        np.array(prompt, np.int32),
        params,
        seed=uid % 7,
        max_new_tokens=max_new,
        stop_ids=STOPS,
        **fields,  # type: ignore[arg-type]
    )


def assert_right(request: Request, *, recurrent: bool = False, window: int | None = None) -> None:
    prompt, seed = request.prompt_ids.tolist(), request.seed
    expected = expected_output(
        prompt, request.max_new_tokens, seed, request.stop_ids, recurrent=recurrent, window=window
    )
    assert request.output_ids == expected
    if request.logprob_start is not None:
        totals = prefix_totals(prompt, window)
        scored = [float(x) for part in request.input_logprobs for x in part.chosen]
        wanted = [
            expected_score(totals[p], int(request.prompt_ids[p + 1]))
            for p in range(request.logprob_start, request.prompt_len - 1)
        ]
        assert scored == pytest.approx(wanted)


_STEMS = [[(7 * k + 11 * j) % 97 for k in range(40)] for j in range(3)]


def random_request(uid: int, seed: int, context: int) -> Request:
    """Prompts that share stems of random length, sometimes scored, sometimes without output."""
    rng = random.Random(seed)
    prompt = rng.choice(_STEMS)[: rng.randint(0, 40)] + [rng.randrange(97) for _ in range(rng.randint(1, 6))]
    max_new = min(rng.choice([0, 1, 2, 5, 12, 30]), context - len(prompt))
    return make_request(
        uid,
        prompt,
        max_new,
        priority=rng.randint(0, 2),
        namespace=rng.choice([None, None, "salt"]),
        logprob_start=rng.randrange(len(prompt)) if rng.random() < 0.3 else None,
    )
