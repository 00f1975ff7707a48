"""Sends a load's requests, streamed, and times them. Speaks /generate (also of the original's servers) and OpenAI's
two."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from sgl.bench.datasets import Job
from sgl.bench.load import PATHS, Load, Measured
from sgl.lang.backends.http import CONNECT_SECONDS, unreachable, with_scheme

_TIMEOUT = 3600.0  # seconds
_LOOK_SECONDS = 5.0  # for the first answer


async def run(
    jobs: Sequence[Job], times: Sequence[float], load: Load, progress: Callable[[Measured], None]
) -> tuple[list[Measured], float]:
    """Send each job at its time; returns each result and the total seconds. Raises ServerUnreachable."""
    slots = asyncio.Semaphore(load.max_concurrency or len(jobs))
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT)
    connector = aiohttp.TCPConnector(limit=0)

    async def one(job: Job, at: float) -> Measured:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        async with slots:
            measured = await _measured(client, job, load, start)
        progress(measured)
        return measured

    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as client:
        await _look(client, with_scheme(load.url))
        for number in range(load.warmup):
            await _measured(client, Job(f"warm-up {number}", 8), load, 0.0)
        start = time.perf_counter()
        results = await asyncio.gather(*map(one, jobs, times))
    return list(results), time.perf_counter() - start


async def _look(client: aiohttp.ClientSession, url: str) -> None:
    """Raise ServerUnreachable if nobody accepts connections; requests show other errors."""
    limits = aiohttp.ClientTimeout(total=_LOOK_SECONDS + CONNECT_SECONDS, sock_connect=CONNECT_SECONDS)
    try:
        await (await client.get(url + "/health", timeout=limits)).release()
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
        raise unreachable(url, error) from None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return


async def _measured(client: aiohttp.ClientSession, job: Job, load: Load, start: float) -> Measured:
    measured = Measured(sent=time.perf_counter() - start)
    try:
        await _stream(client, job, load, measured)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, OSError) as error:
        measured.error = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return measured


async def _stream(client: aiohttp.ClientSession, job: Job, load: Load, measured: Measured) -> None:
    began = time.perf_counter()
    async with client.post(with_scheme(load.url) + PATHS[load.api], json=_body(job, load)) as answer:
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(f"error in the stream: {event['error']}")
            num_tokens = (_take_native if load.api == "native" else _take_openai)(event, measured)
            if num_tokens:
                measured.events.append((now - began, num_tokens))
    measured.latency = time.perf_counter() - began
    if not measured.output_tokens:  # no counts: take each event for a token
        measured.output_tokens = sum(num_tokens for _, num_tokens in measured.events)


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


def _take_native(event: Mapping[str, Any], measured: Measured) -> int:
    """Note an event; returns its tokens."""
    meta = event["meta_info"]
    num_new = meta["completion_tokens"] - measured.output_tokens
    measured.output_tokens = meta["completion_tokens"]
    measured.prompt_tokens = meta["prompt_tokens"]
    measured.cached_tokens = meta.get("cached_tokens", 0)
    return int(num_new)


def _take_openai(event: Mapping[str, Any], measured: Measured) -> int:
    """The same for chats, which open with an empty delta."""
    if usage := event.get("usage"):
        measured.output_tokens = usage["completion_tokens"]
        measured.prompt_tokens = usage["prompt_tokens"]
        measured.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    brings = ("text", "content", "reasoning_content", "tool_calls")
    choices = event.get("choices") or []
    return int(any({**choice, **choice.get("delta", {})}.get(name) for choice in choices for name in brings))
