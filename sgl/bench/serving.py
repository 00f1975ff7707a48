"""Loads a server with requests and measures what its clients see.

Knows three protocols: our native one, which is also that of the original's servers, and OpenAI's two. Every request
streams; a token's time is that of the event that brings it.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from sgl.bench.datasets import Job

Api = Literal["native", "openai", "openai-chat"]
PATHS: dict[Api, str] = {"native": "/generate", "openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_PERCENTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}


@dataclass(slots=True)
class Measured:
    """What one request saw; times in seconds from when it was sent."""

    sent: float = 0.0  # since the start of the benchmark
    first_token: float | None = None
    gaps: list[float] = field(default_factory=list)  # between events that brought tokens
    latency: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def time_per_output_token(self) -> float | None:
        """After the first; None where there is no second."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.latency - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Load:
    """How requests are sent. rate: requests a second, 0 for all at once, None for the times of a trace."""

    url: str
    api: Api = "native"
    model: str = "default"
    api_key: str | None = None
    rate: float | None = 0.0
    is_poisson: bool = True
    max_concurrency: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout: float = 3600.0
    seed: int = 0


async def run(jobs: Sequence[Job], load: Load, progress: Callable[[], None]) -> tuple[list[Measured], float]:
    """Send every job; returns what each saw, and the seconds that all took. `progress` is called as each ends."""
    slots = asyncio.Semaphore(load.max_concurrency or len(jobs))
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    timeout = aiohttp.ClientTimeout(total=load.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    start = time.perf_counter()

    async def one(job: Job, at: float) -> Measured:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        async with slots:
            measured = Measured(sent=time.perf_counter() - start)
            try:
                await _stream(client, job, load, measured)
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, OSError) as error:
                measured.error = f"{type(error).__name__}: {error}"
        progress()
        return measured

    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as client:
        results = await asyncio.gather(*map(one, jobs, arrivals(jobs, load)))
    return list(results), time.perf_counter() - start


def arrivals(jobs: Sequence[Job], load: Load) -> list[float]:
    """When each request is sent, in seconds after the start."""
    if load.rate is None:
        return [job.at or 0.0 for job in jobs]
    if load.rate == 0:
        return [0.0] * len(jobs)
    rng, times, now = random.Random(load.seed), [], 0.0
    for _ in jobs:
        times.append(now)
        now += rng.expovariate(load.rate) if load.is_poisson else 1 / load.rate
    return times


async def _stream(client: aiohttp.ClientSession, job: Job, load: Load, measured: Measured) -> None:
    began = time.perf_counter()
    last = began
    async with client.post(load.url.rstrip("/") + PATHS[load.api], json=_body(job, load)) as answer:
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {(await answer.text())[:200]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(str(event["error"]))
            if not _take(event, load.api, measured):
                continue
            if measured.first_token is None:
                measured.first_token = now - began
            else:
                measured.gaps.append(now - last)
            last = now
    measured.latency = time.perf_counter() - began


def _body(job: Job, load: Load) -> dict[str, Any]:
    if load.api == "native":
        params: dict[str, Any] = {"max_new_tokens": job.max_tokens, "temperature": load.temperature}
        params["ignore_eos"] = load.ignore_eos and job.schema is None
        if job.schema is not None:
            params["json_schema"] = json.dumps(job.schema)
        return {"text": job.prompt, "sampling_params": params, "stream": True}
    body: dict[str, Any] = {"model": load.model, "max_tokens": job.max_tokens, "temperature": load.temperature}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if load.ignore_eos and job.schema is None:
        body["ignore_eos"] = True
    if job.schema is not None:
        schema = {"name": "answer", "schema": job.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if load.api == "openai":
        return {**body, "prompt": job.prompt}
    return {**body, "messages": [{"role": "user", "content": job.prompt}]}


def _take(event: Mapping[str, Any], api: Api, measured: Measured) -> bool:
    """Note what an event says; whether it brought tokens."""
    if api == "native":
        meta = event["meta_info"]
        grew = meta["completion_tokens"] > measured.output_tokens
        measured.output_tokens = meta["completion_tokens"]
        measured.prompt_tokens = meta["prompt_tokens"]
        measured.cached_tokens = meta.get("cached_tokens", 0)
        return bool(grew)
    if usage := event.get("usage"):
        measured.output_tokens = usage["completion_tokens"]
        measured.prompt_tokens = usage["prompt_tokens"]
        measured.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    choices = event.get("choices") or []
    return bool(choices) and (choices[0].get("finish_reason") is None or bool(choices[0].get("text")))


def report(results: Sequence[Measured], seconds: float, slo: Mapping[str, float]) -> dict[str, Any]:
    """Everything worth knowing of a run. slo: bounds in seconds by ttft, tpot, e2e, for the goodput."""
    done = [result for result in results if result.error is None]
    prompt_tokens, output_tokens = (
        sum(getattr(r, name) for r in done) for name in ("prompt_tokens", "output_tokens")
    )
    tpots = [tpot for result in done if (tpot := result.time_per_output_token) is not None]
    summary: dict[str, Any] = {
        "requests": len(results),
        "failed": len(results) - len(done),
        "seconds": seconds,
        "requests_per_second": len(done) / seconds,
        "input_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "input_tokens_per_second": prompt_tokens / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "cache_hit_rate": sum(r.cached_tokens for r in done) / prompt_tokens if prompt_tokens else 0.0,
        "ttft_ms": _summary([r.first_token for r in done if r.first_token is not None]),
        "tpot_ms": _summary(tpots),
        "itl_ms": _summary([gap for r in done for gap in r.gaps]),
        "e2e_ms": _summary([r.latency for r in done]),
    }
    if slo:
        summary["goodput_requests_per_second"] = sum(_keeps(result, slo) for result in done) / seconds
    errors = sorted({result.error for result in results if result.error is not None})
    return {**summary, "errors": errors[:5]}


def _keeps(result: Measured, slo: Mapping[str, float]) -> bool:
    values = {"ttft": result.first_token, "tpot": result.time_per_output_token, "e2e": result.latency}
    return all((values[name] or 0.0) <= bound for name, bound in slo.items())


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, in milliseconds."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    found = {"mean": statistics.fmean(ordered)}
    for name, percent in _PERCENTILES.items():
        found[name] = ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]
    return {name: 1000 * value for name, value in found.items()}
