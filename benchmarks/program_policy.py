"""Programs under each schedule policy, in virtual time: 200 mixed ReAct and tree programs at 1.5 times saturation.

    python -m benchmarks.program_policy [--policies lpm program …] [--programs 200] [--load 1.5] [--seeds 3]

The scheduler is the engine's; the model is a cost: a step takes as long as Llama-3.1-8B's on one H200 (4.5 ms, 20 µs a
decode row, 33 µs a prompt token). Programs lease their pages between calls as an engine's do. Half of them are ReAct
agents (a shared few-shot prompt of 1,500 tokens, 2 to 8 rounds of a thought and an observation that a tool takes 50 to
500 ms for), half are trees of thought (a question, then 2 to 4 levels: a fork of 3 to 5 branches, each a proposal and
its rating, the best one goes on). They arrive at random, at `load` times the rate at which the same programs are
served when all are there at once under lpm. Prints the mean and p95 latency of a program, programs a second, and both
as ratios to lpm's.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np

from sgl.runtime.batch import StepResult
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.scheduler.leases import Lease
from sgl.runtime.scheduler.programs import GENERATED, ProgramService, Unit
from sgl.runtime.scheduler.request import FinishReason, Request
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.scheduler.step import Limits

STEP, PER_ROW, PER_PROMPT_TOKEN = 4.5e-3, 20e-6, 33e-6  # seconds
LIMIT = 256  # tokens that a node may generate
CONTEXT, PAGE, STEP_TOKENS = 8192, 16, 2048
FEW_SHOT = [7 + i % 4000 for i in range(1500)]  # tokens
TREE_SHOT = [11 + i % 3000 for i in range(800)]


@dataclass
class Call:
    """A node's requests: prompts of tokens, and how many tokens each generates."""

    prompts: list[list[int]]
    lengths: list[int]
    branches: bool = False  # each begins a branch of one fork
    outputs: list[list[int]] = field(default_factory=list)


@dataclass
class Future:
    """Tokens that the rest of the program may generate, which is recorded already."""

    tokens: int


@dataclass
class Pause:
    """A tool's time, in seconds."""

    seconds: float


Steps = Iterator[Call | Pause | Future | list]  # a list: parts that run side by side


def react(rng: random.Random, fresh: Callable[[int], list[int]]) -> Steps:
    """Rounds of a thought and a tool's observation."""
    tokens = FEW_SHOT + fresh(rng.randint(20, 60))
    for _ in range(rng.randint(2, 8)):
        call = Call([tokens], [rng.randint(30, 120)])
        yield call
        tokens = tokens + call.outputs[0]
        yield Pause(rng.uniform(0.05, 0.5))
        tokens = tokens + fresh(rng.randint(50, 250))
    yield Call([tokens], [rng.randint(20, 60)])


def tree(rng: random.Random, fresh: Callable[[int], list[int]]) -> Steps:
    """Every thought has as many that go on from it, down to the last level; then an answer."""
    width, depth = rng.choice([(2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2)])
    tokens = TREE_SHOT + fresh(rng.randint(60, 200))
    thoughts = [Thought(rng, fresh, tokens, width, depth) for _ in range(width)]
    number = sum(width**level for level in range(1, depth + 1))
    yield Future((2 * number + 1) * LIMIT)
    yield thoughts
    yield Call([tokens + thoughts[0].text], [rng.randint(60, 150)])


class Thought:
    """A branch: a thought of 40 to 160 tokens, then those below it, side by side; then a rating of 5 to 20."""

    def __init__(
        self, rng: random.Random, fresh: Callable[[int], list[int]], tokens: list[int], width: int, depth: int
    ) -> None:
        self.tokens, self.length, self.rating = tokens, rng.randint(40, 160), rng.randint(5, 20)
        self.question = fresh(20)
        self.text: list[int] = []
        self.below = partial(Thought, rng, fresh, width=width, depth=depth - 1) if depth > 1 else None
        self.width = width

    def __iter__(self) -> Steps:
        call = Call([self.tokens], [self.length], branches=True)
        yield call
        self.text = call.outputs[0]
        if self.below is not None:
            yield [self.below(self.tokens + self.text) for _ in range(self.width)]
        yield Call([self.tokens + self.text + self.question], [self.rating])


class Part:
    """One thread of control of a program."""

    def __init__(self, program: Program, steps: Steps, parent: Part | None = None) -> None:
        self.program, self.steps, self.parent = program, steps, parent
        self.children = 0
        self.call: Call | None = None
        self.requests: list[Request] = []
        self.unfinished = 0
        self.lease: Lease | None = None
        self.unit: Unit | None = None


class Program:
    """One program and when it came and ended, in seconds."""

    def __init__(self, steps: Steps, came: float) -> None:
        self.came, self.ended = came, 0.0
        self.service = ProgramService()
        self.call = object()
        self.under_way: dict[Part, None] = {}
        self.root = Part(self, steps)


class Simulation:
    """Runs programs on one scheduler."""

    def __init__(self, policy: str, rows: int, pages: int) -> None:
        self.now = 0.0
        limits = Limits(rows, CONTEXT, STEP_TOKENS, schedule_policy=policy)  # type: ignore[arg-type]
        self.scheduler = Scheduler(limits, PagePool(pages, PAGE), clock=lambda: self.now)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = count()
        self.busy = 0.0
        self.submissions: list[Request] = []  # of this turn

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something then."""
        heapq.heappush(self.events, (when, next(self.numbers), action))

    def run(self) -> None:
        """Until nothing is left."""
        scheduler = self.scheduler
        while True:
            while self.events and (self.events[0][0] <= self.now or not scheduler.has_work):
                when, _, action = heapq.heappop(self.events)
                self.now = max(self.now, when)
                action()
            if not scheduler.has_work:
                if not self.events:
                    return
                continue
            step = scheduler.schedule()
            assert step is not None, "requests are left, and nothing happens"
            scheduler.after_launch(step)
            prompt = int(step.batch.q_lens[step.num_decodes :].sum())
            seconds = STEP + PER_ROW * step.num_decodes + PER_PROMPT_TOKEN * prompt
            self.now += seconds
            self.busy += seconds
            tokens = np.array([5000 + (r.uid * 31 + len(r.output_ids)) % 20000 for r in step.requests], np.int32)
            ended = [
                request
                for group in scheduler.handle(step, StepResult(tokens, {}))
                for request in group
                if len(request.output_ids) >= request.seed
            ]
            for request in ended:
                scheduler.finish(request, FinishReason("stop"))
            for request in ended:
                self._request_ended(request)

    def begin(self, program: Program) -> None:
        """A program comes."""
        self._go_on(program.root)
        self._tell(program)

    def _request_ended(self, request: Request) -> None:
        part: Part = request.owner
        assert part.call is not None
        part.unfinished -= 1
        if part.unfinished:
            return
        program = part.program
        part.call.outputs = [its.output_ids for its in part.requests]
        last = part.requests[0]
        self._lease(part, last.key(), last)
        program.under_way.pop(part)
        self._go_on(part)
        self._tell(program)

    def _lease(self, part: Part, key: bytes, request: Request) -> None:
        lease = self.scheduler.memory.leases.take(key, request.namespace)
        self._release(part)
        part.lease = lease

    def _release(self, part: Part) -> None:
        if part.lease is not None:
            self.scheduler.memory.leases.release(part.lease)
            part.lease = None

    def _resume(self, part: Part) -> None:
        self._go_on(part)
        self._tell(part.program)

    def _go_on(self, part: Part) -> None:
        step = next(part.steps, None)
        program = part.program
        if step is None:
            self._release(part)
            if part.parent is None:
                program.ended = self.now
                return
            part.parent.children -= 1
            if not part.parent.children:
                self._go_on(part.parent)
        elif isinstance(step, Pause):
            self.at(self.now + step.seconds, partial(self._resume, part))
        elif isinstance(step, Future):
            program.service.future = GENERATED * step.tokens
            self._go_on(part)
        elif isinstance(step, Call):
            self._submit(part, step)
        else:
            part.children = len(step)
            unit = Unit()
            for its in step:
                child = Part(program, iter(its), part)
                child.unit = unit
                self._go_on(child)

    def _submit(self, part: Part, call: Call) -> None:
        part.call, part.requests, part.unfinished = call, [], len(call.prompts)
        part.program.under_way[part] = None
        for prompt, length in zip(call.prompts, call.lengths, strict=True):
            request = Request(
                next(self.numbers),
                np.array(prompt, np.int32),
                SamplingParams(max_new_tokens=LIMIT),
                seed=length,
                max_new_tokens=LIMIT,
                owner=part,
                call=part.program.call,
                program=part.program.service,
                unit=part.unit if call.branches else None,
                is_critical=False,
            )
            part.requests.append(request)
            part.program.service.arrives(request)
            self.submissions.append(request)

    def _tell(self, program: Program) -> None:
        if len(program.under_way) == 1:
            for part in program.under_way:
                for request in part.requests:
                    self.scheduler.becomes_critical(request)
        for request in self.submissions:
            self.scheduler.add(request)
        self.submissions.clear()


def programs(number: int, seed: int) -> list[Callable[[], Steps]]:
    """Makers of the same programs every time."""
    rng = random.Random(seed)
    kinds = [rng.choice([react, tree]) for _ in range(number)]
    seeds = [rng.randrange(1 << 30) for _ in range(number)]

    def make(kind: Callable[..., Steps], own: int) -> Steps:
        its = random.Random(own)
        return kind(its, lambda n: [30_000 + its.randrange(60_000) for _ in range(n)])

    return [lambda kind=kind, own=own: make(kind, own) for kind, own in zip(kinds, seeds, strict=True)]  # type: ignore[misc]


def measure(
    policy: str, makers: list[Callable[[], Steps]], arrivals: list[float], rows: int, pages: int
) -> dict[str, float]:
    """Seconds of latency, and programs a second of what passes from the first arrival to the last end."""
    simulation = Simulation(policy, rows, pages)
    running = [Program(make(), came) for make, came in zip(makers, arrivals, strict=True)]
    for program in running:
        simulation.at(program.came, lambda its=program: simulation.begin(its))  # type: ignore[misc]
    simulation.run()
    latencies = sorted(its.ended - its.came for its in running)
    counters = simulation.scheduler.counters
    assert simulation.scheduler.memory.check() == []
    return {
        "mean s": statistics.fmean(latencies),
        "p50 s": latencies[len(latencies) // 2],
        "p95 s": latencies[int(0.95 * len(latencies))],
        "programs/s": len(running) / max(its.ended for its in running),
        "busy s": simulation.busy,
        "hit rate": counters.cached_tokens / counters.prompt_tokens,
        "retractions": counters.retractions,
    }


def at_load(
    number: int, load: float, seed: int, rows: int, pages: int
) -> tuple[list[Callable[[], Steps]], list[float]]:
    """Programs and their arrivals."""
    makers = programs(number, seed)
    rate = load * measure("lpm", makers, [0.0] * number, rows, pages)["programs/s"]
    rng, now, arrivals = random.Random(seed + 1), 0.0, []
    for _ in range(number):
        now += rng.expovariate(rate)
        arrivals.append(now)
    return makers, arrivals


def main() -> None:
    """Print a line for each seed and policy, with ratios to the first policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["lpm", "fcfs", "dfs-weight", "program"])
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--load", type=float, default=1.5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--pages", type=int, default=8192)
    args = parser.parse_args()
    for seed in range(args.seeds):
        makers, arrivals = at_load(args.programs, args.load, seed, args.rows, args.pages)
        first: dict[str, float] = {}
        for policy in args.policies:
            found = measure(policy, makers, arrivals, args.rows, args.pages)
            first = first or found
            sooner = first["mean s"] / found["mean s"]
            more = found["programs/s"] / first["programs/s"]
            figures = "".join(f"{name} {value:7.2f}  " for name, value in found.items())
            print(f"{policy:<11}{figures}{sooner:.2f}x sooner in the mean, throughput {more:.3f}x", flush=True)


if __name__ == "__main__":
    main()
