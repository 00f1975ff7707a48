"""What the language costs a client: programs a second, threads, forks. Run by `make bench-client`.

The backend answers at once or after a fixed time and generates nothing, so all that is measured is the client. The
figures of the original's client are from its version 0.5.23 on two cores. Prints figure, compared with, ratio, bar.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import sgl
from sgl.lang.aio import io
from sgl.lang.backends.base import Backend
from sgl.lang.backends.steps import Completion, GenParams, Prompt, TextBackend
from sgl.lang.ir import nodes as ir


class InstantBackend(Backend):
    """Executes whole programs: every gen is answered with one word, `latency` seconds after it may start."""

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency
        self.running = self.max_running = 0
        self.max_threads = 0

    def open(self, program: ir.Program, sink: ir.Sink) -> InstantSession:
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        return InstantSession(self, sink)


class InstantSession:
    """One program. Streams run side by side: a segment's answer comes after its longest chain of gens."""

    def __init__(self, backend: InstantBackend, sink: ir.Sink) -> None:
        self._backend = backend
        self._sink = sink
        self._next_index: dict[int, int] = {}

    def send(self, segment: ir.Segment) -> None:
        """Answer the gens now or later."""
        gens: list[tuple[int, int]] = []
        depth: dict[int, int] = {}
        for stream, node in segment.nodes:
            index = self._next_index.get(stream, 0)
            self._next_index[stream] = index + 1
            if isinstance(node, ir.Gen):
                gens.append((stream, index))
                depth[stream] = depth.get(stream, 0) + 1
        seconds = self._backend.latency * max(depth.values(), default=0)
        if seconds:
            io.loop().call_later(seconds, self._answer, gens, segment.final)
        else:
            self._answer(gens, segment.final)

    def cancel(self) -> None:
        """Nothing is held."""

    def _answer(self, gens: list[tuple[int, int]], is_final: bool) -> None:
        self._backend.max_threads = max(self._backend.max_threads, threading.active_count())
        for stream, index in gens:
            self._sink(ir.NodeDone(stream, index, "word", "word", {"completion_tokens": 1}))
        if is_final:
            self._backend.running -= 1
            self._sink(ir.Done())


class SlowCalls(TextBackend):
    """Knows single calls only: programs are executed node by node on the client."""

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency

    async def generate(self, prompt: Prompt, params: GenParams) -> list[Completion]:
        """One word for each sample."""
        if self.latency:
            await asyncio.sleep(self.latency)
        return [Completion("word", {"completion_tokens": 1}) for _ in params.seeds]


@sgl.function
def one_gen(s: Any, question: str) -> None:
    """One question, one answer."""
    s += "Q: " + question + "\nA:" + sgl.gen("answer", stop="\n")


@sgl.function
def three_gens(s: Any, question: str) -> None:
    """Three gens in a row."""
    s += "Q: " + question + "\n"
    s += "Thought:" + sgl.gen("thought", max_tokens=16)
    s += "\nA:" + sgl.gen("answer", max_tokens=16)
    s += "\nCheck:" + sgl.gen("check", max_tokens=16)


@sgl.function
def wide_fork(s: Any, width: int) -> None:
    """Many branches of one gen each."""
    s += "Begin."
    branches = s.fork(width)
    branches += lambda i: f"{i}:" + sgl.gen("part")
    branches.join()


@sgl.function
async def observing(s: Any, question: str) -> None:
    """A body that waits for its value, as an agent's does."""
    s += "Q: " + question + "\nA:" + sgl.gen("answer")
    s += "\n" + await s["answer"] + sgl.gen("more")


def timed(work: Callable[[], object], repeats: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """The fastest of some runs, in seconds of the clock."""
    best = float("inf")
    for _ in range(repeats):
        gc.collect()
        start = clock()
        work()
        best = min(best, clock() - start)
    return best


def cpu_milliseconds(work: Callable[[], object], num_programs: int) -> float:
    """CPU time of all threads a program: on an idle machine the wall time too, as only one thread runs at a time."""
    return 1e3 * timed(work, repeats=8, clock=time.process_time) / num_programs


def report(what: str, figure: float, unit: str, original: float | None, bar: float | None) -> None:
    """One line; a missed bar says so."""
    compared = f"original {original:g} {unit}, {original / figure:.1f}x better" if original else "original: cannot"
    verdict = "" if bar is None else f"bar {bar:g} {unit}: {'met' if figure <= bar else 'MISSED'}"
    print(f"{what:<58} {figure:9.3f} {unit:<7}  {compared:<42} {verdict}")


def many_programs() -> None:
    """2000 programs at once, each with one gen of 100 ms."""
    backend = InstantBackend(latency=0.1)
    rows = [{"question": str(i)} for i in range(2000)]
    seconds = timed(lambda: one_gen.run_batch(rows, backend=backend), repeats=3)
    report("2000 one-gen programs, 100 ms a gen (run_batch)", seconds, "s", 3.08, 0.5)
    report("  threads meanwhile", backend.max_threads, "threads", 194, 8)
    calls = SlowCalls(latency=0.1)
    seconds = timed(lambda: one_gen.run_batch(rows, backend=calls), repeats=3)
    report("  the same, node by node on a backend of single calls", seconds, "s", 3.08, 0.5)


def many_waiting_programs() -> None:
    """10,000 programs that wait for a value in the middle of their body, on one event loop."""
    backend = InstantBackend(latency=0.1)
    rows = [{"question": str(i)} for i in range(10_000)]

    async def all_rows() -> None:
        await observing.arun_batch(rows, backend=backend)

    seconds = timed(lambda: asyncio.run(all_rows()), repeats=1)
    report("10,000 async programs, two gens of 100 ms, 1 observed", seconds, "s", None, None)
    report("  threads meanwhile", backend.max_threads, "threads", None, 8)
    print(f"  programs under way at the same time: {backend.max_running}")


def forks() -> None:
    """One program of 500 branches."""
    backend = InstantBackend(latency=0.1)
    seconds = timed(lambda: wide_fork.run(500, backend=backend).sync())
    report("fork(500), 100 ms a gen", seconds, "s", 0.61, None)
    report("  threads meanwhile", backend.max_threads, "threads", 503, 8)


def overhead() -> None:
    """Programs against a backend that takes no time."""
    backend, calls = InstantBackend(), SlowCalls()
    rows = [{"question": str(i)} for i in range(2000)]
    cost = cpu_milliseconds(lambda: three_gens.run_batch(rows, backend=backend), len(rows))
    report("three-gen program, no latency (run_batch of 2000), CPU", cost, "ms", 0.43, 0.2)
    cost = cpu_milliseconds(lambda: three_gens.run_batch(rows, backend=calls), len(rows))
    report("  the same, node by node on a backend of single calls", cost, "ms", 0.43, 0.2)
    cost = cpu_milliseconds(lambda: [three_gens.run("x", backend=backend).sync() for _ in range(1000)], 1000)
    report("three-gen program, no latency (run, one by one), CPU", cost, "ms", 0.43, 0.2)


def main() -> None:
    """All measurements."""
    overhead()
    many_programs()
    many_waiting_programs()
    forks()


if __name__ == "__main__":
    main()
