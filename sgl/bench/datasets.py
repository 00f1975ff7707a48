"""What a benchmark sends: made-up prompts, prompts from files, and traces of lengths and arrivals.

A made-up prompt is words, about one token each; how many tokens they really were is what the server reports.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sgl.errors import ConfigError

_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all she there would their we him been has when who will more no if out so said what up its "
    "about into than them can only other new some could time these two may then do first any my now such like our"
)
_WORDS = _COMMON.split()
_TRACE_BLOCK = 512  # tokens that one hash id of a trace stands for


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a benchmark."""

    prompt: str
    max_tokens: int
    at: float | None = None  # seconds after the start, where a trace says so
    schema: dict[str, Any] | None = None  # that the output must match


def random_jobs(count: int, input_len: int, output_len: int, spread: float, rng: random.Random) -> list[Job]:
    """Lengths are drawn evenly from [length * (1 - spread), length * (1 + spread)]."""

    def around(length: int) -> int:
        return max(1, round(length * rng.uniform(1 - spread, 1 + spread)))

    return [Job(_text(around(input_len), rng), around(output_len)) for _ in range(count)]


def shared_prefix_jobs(
    count: int, groups: int, prefix_len: int, input_len: int, output_len: int, rng: random.Random
) -> list[Job]:
    """Every prompt is one of `groups` prefixes and a question of its own; in random order."""
    prefixes = [_text(prefix_len, rng) for _ in range(groups)]
    jobs = [Job(f"{prefixes[i % groups]} {_text(input_len, rng)}", output_len) for i in range(count)]
    rng.shuffle(jobs)
    return jobs


def file_jobs(path: Path, count: int, output_len: int, rng: random.Random) -> list[Job]:
    """The first `count` requests of a JSON, JSON-lines or CSV file.

    Records may be conversations ("conversations" or "turns"), prompts ("prompt", "question" or "text", with
    "max_tokens" and "schema" if they like), or lines of a trace: "input_length", "output_length", "timestamp" in
    milliseconds and "hash_ids" that say which blocks are shared; or the columns TIMESTAMP, ContextTokens,
    GeneratedTokens. Raises ConfigError if there is nothing of the kind.
    """
    jobs = []
    try:
        for record in _records(path):
            job = _job(record, output_len, rng)
            if job is not None:
                jobs.append(job)
            if len(jobs) == count:
                break
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read as a dataset: {error!r}", option="dataset_path") from error
    if not jobs:
        raise ConfigError(f"{path} holds no prompts", option="dataset_path")
    start = jobs[0].at or 0.0
    return [Job(job.prompt, job.max_tokens, None if job.at is None else job.at - start, job.schema) for job in jobs]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            yield from csv.DictReader(file)
    elif path.suffix == ".jsonl":
        with path.open() as file:
            for line in file:
                if line.strip():
                    yield json.loads(line)
    else:
        yield from json.loads(path.read_text())


def _job(record: dict[str, Any], output_len: int, rng: random.Random) -> Job | None:
    if "ContextTokens" in record:
        at = datetime.fromisoformat(record["TIMESTAMP"][:26]).timestamp()
        return Job(_text(int(record["ContextTokens"]), rng), max(1, int(record["GeneratedTokens"])), at)
    if "input_length" in record:
        blocks = [_text(_TRACE_BLOCK, random.Random(block)) for block in record.get("hash_ids", ())]
        words = " ".join(blocks).split()[: record["input_length"]]
        words += _text(record["input_length"] - len(words), rng).split()
        return Job(" ".join(words), max(1, record["output_length"]), record["timestamp"] / 1000)
    if "conversations" in record:
        turns = [turn["value"] for turn in record["conversations"]]
        if len(turns) < 2:
            return None
        return Job(turns[0], max(1, len(turns[1].split())))
    prompt = (
        record.get("prompt") or record.get("question") or record.get("text") or (record.get("turns") or [""])[0]
    )
    if not prompt:
        return None
    return Job(str(prompt), int(record.get("max_tokens", output_len)), schema=record.get("schema"))


def _text(num_words: int, rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=max(0, num_words)))
