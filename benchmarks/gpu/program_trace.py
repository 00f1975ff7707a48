"""Where the time of programs goes, by what the server counted and by the timelines that it keeps of the last 50.

It reads a server's endpoints; benchmarks.gpu.programs runs the programs and prints what `traced` returns by `lines`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import requests

STAGES = ("waited", "prompt", "decode", "between")
TOKENS = ("new", "cached", "generated")
COUNTERS = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "forced_tokens", "retractions")
SEGMENTS = "/v1/programs/{id}/segments"  # after the one that opened a program: its client's round trips
END_SECONDS = 10.0  # a program's end comes a moment after its last value
_ANSWER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of a program; times in ms."""

    name: str
    after: Generation | None  # the last to end of those that the program ran before it
    ended: float  # since the program was opened
    waited: float  # for its first step
    prompt: float
    decode: float
    between: float  # since `after` had ended, or the program was opened
    new: int  # tokens of its prompt that were computed
    cached: int
    generated: int


def generations(timeline: dict[str, Any]) -> list[Generation]:
    """Those of a program, in the order in which they ended."""
    nodes: dict[int, list[dict[str, Any]]] = {}
    forked_at: dict[int, tuple[int, int]] = {}  # stream: the stream and the place where it was forked
    for node in timeline["nodes"]:
        of_stream = nodes.setdefault(node["st"], [])
        if node["op"] == "fork":
            forked_at |= {child: (node["st"], len(of_stream)) for child in node["children"]}
        of_stream.append(node)

    def places(stream: int, index: int) -> dict[int, int]:
        """A node's place in its own stream, and the places of the forks that lead there in those above."""
        found = {stream: index}
        while stream in forked_at:
            stream, index = forked_at[stream]
            found[stream] = index
        return found

    found: list[tuple[dict[int, int], Generation]] = []
    for event in timeline["events"]:
        if event["type"] != "node_done" or "e2e_latency" not in event["meta"]:
            continue
        meta, place, ended = event["meta"], places(event["stream"], event["index"]), 1e3 * event["at"]
        waited, prompt, took = (1e3 * meta[name] for name in ("queue_time", "prefill_time", "e2e_latency"))
        after = max((one for where, one in found if _precedes(where, place)), key=lambda g: g.ended, default=None)
        generation = Generation(
            name=nodes[event["stream"]][event["index"]]["name"],
            after=after,
            ended=ended,
            waited=waited,
            prompt=prompt,
            decode=took - waited - prompt,
            between=ended - took - (0.0 if after is None else after.ended),
            new=meta["usage"]["new_tokens"],
            cached=meta["usage"]["cached_tokens"],
            generated=meta["usage"]["generated_tokens"],
        )
        found.append((place, generation))
    return [generation for _, generation in found]


def _precedes(one: dict[int, int], other: dict[int, int]) -> bool:
    """Whether a node at these places comes before another, by the nearest stream that both have a place in."""
    return next(index < other[stream] for stream, index in one.items() if stream in other)


def longest_chain(found: list[Generation]) -> dict[str, float]:
    """The stages, summed from the generation that ended last back over what each came after."""
    total, last = dict.fromkeys(STAGES, 0.0), found[-1] if found else None
    while last is not None:
        total = {stage: ms + getattr(last, stage) for stage, ms in total.items()}
        last = last.after
    return total


def traced(url: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` returns of the programs that it runs on the server, and where their time went."""
    known = {item["id"] for item in _get(f"{url}/v1/programs")}
    before = _counted(url)
    row = run()
    counted = {name: number - before.get(name, 0) for name, number in _counted(url).items()}
    ids = [item["id"] for item in _get(f"{url}/v1/programs") if item["id"] not in known]
    timelines = [_timeline(url, program) for program in ids]
    programs = [generations(timeline) for timeline in timelines]
    opened = [timeline["started"] for timeline in timelines]
    by_name: dict[str, list[Generation]] = {}
    for generation in sorted((one for found in programs for one in found), key=lambda one: one.ended):
        by_name.setdefault(generation.name, []).append(generation)
    medians = {
        name: {column: statistics.median(getattr(one, column) for one in found) for column in (*STAGES, *TOKENS)}
        for name, found in by_name.items()
    }
    chains = [longest_chain(found) for found in programs]
    chain = {stage: statistics.median(one[stage] for one in chains) for stage in STAGES}
    about = {"counted": counted, "traced": len(programs), "opened_within_ms": 1e3 * (max(opened) - min(opened))}
    return {**row, **about, "medians": medians, "chain": chain}


def lines(trace: dict[str, Any]) -> list[str]:
    """A trace as text."""
    counted = trace["counted"]
    title = f"medians of {trace['traced']} programs"
    rows = [
        f"{trace['name']}: {trace['programs']} programs in {trace['seconds']:.2f} s, {counted['steps']:,} steps of "
        f"{counted['generated_tokens'] / max(1, counted['steps']):.0f} sampled tokens on average",
        f"  prompts of {counted['prompt_tokens']:,} tokens, {counted['cached_tokens']:,} of them cached; "
        f"{counted['forced_tokens']:,} tokens forced, {counted['retractions']} retractions, "
        f"{counted['segments']:,} segments after a program's first; {trace['characters']:,} characters",
        f"  the last {trace['traced']} programs were opened within {trace['opened_within_ms']:.0f} ms",
        f"  {title:26}"
        + "".join(f"{column + (' ms' if column in STAGES else ''):>12}" for column in (*STAGES, *TOKENS)),
    ]
    for name, medians in trace["medians"].items():
        rows.append(f"  {name:26}" + "".join(f"{medians[column]:12,.0f}" for column in (*STAGES, *TOKENS)))
    rows.append(f"  {'longest chain':26}" + "".join(f"{trace['chain'][stage]:12,.0f}" for stage in STAGES))
    return rows


def _counted(url: str) -> dict[str, int]:
    status = _get(f"{url}/v1/status")
    segments = sum(count for path, _, count in status["responses"] if path == SEGMENTS)
    return {**{name: status["engine"][name] for name in COUNTERS}, "segments": segments}


def _timeline(url: str, program: str) -> dict[str, Any]:
    until = time.monotonic() + END_SECONDS
    while True:
        timeline: dict[str, Any] = _get(f"{url}/v1/programs/{program}/timeline")
        if not timeline["is_running"] or time.monotonic() > until:
            return timeline
        time.sleep(0.05)


def _get(url: str) -> Any:
    answer = requests.get(url, timeout=_ANSWER_SECONDS)
    answer.raise_for_status()
    return answer.json()
