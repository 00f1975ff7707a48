"""Benchmark requests: random words (about a token each), files, and traces of lengths and times."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from sgl.errors import ConfigError

_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all she there would their we him been has when who will more no if out so said what up its "
    "about into than them can only other new some could time these two may then do first any my now such like our"
)
_WORDS = _COMMON.split()
_TRACE_BLOCK = 512  # tokens per hash id of a trace


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: str
    max_tokens: int
    at: float | None = None  # seconds after the start, in a trace
    schema: dict[str, Any] | None = None  # for the output

    def cut(self, num_words: int | None, num_tokens: int | None) -> Job:
        """With prompt and answer cut to these lengths, if given."""
        prompt = self.prompt if num_words is None else " ".join(self.prompt.split(" ")[:num_words])
        max_tokens = self.max_tokens if num_tokens is None else min(num_tokens, self.max_tokens)
        return replace(self, prompt=prompt, max_tokens=max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is sent: flags of every `sgl bench`."""

    dataset: Literal["random", "generated-shared-prefix", "file"] | None = None
    """[file with --dataset-path, else random]"""
    dataset_path: str | None = None
    """JSON, JSON lines or CSV of conversations (ShareGPT's shape), prompts with or without schemas, or a trace of
    lengths; or a folder of JSON Schemas."""
    num_prompts: PositiveInt = 100
    """How many, of a dataset the first."""
    input_len: NonNegativeInt = 128
    """Words of a made-up prompt."""
    output_len: PositiveInt = 64
    """Tokens of an answer, where the dataset does not say."""
    spread: Annotated[float, Field(ge=0, le=1)] = 0.0
    """0 to 1: how far made-up lengths stray."""
    groups: PositiveInt = 8
    """Prefixes of generated-shared-prefix."""
    prefix_len: NonNegativeInt = 512
    """Words of a shared prefix."""
    max_input_len: PositiveInt | None = None
    """Words after which prompts are cut off."""
    max_output_len: PositiveInt | None = None
    """Tokens that no answer may exceed."""
    seed: int = 0
    """Of what is made up."""

    @property
    def kind(self) -> str:
        """The dataset's kind, also if only its path is given."""
        return self.dataset or ("random" if self.dataset_path is None else "file")

    def jobs(self) -> list[Job]:
        """The requests. Raises ConfigError."""
        rng, count, output_len = random.Random(self.seed), self.num_prompts, self.output_len
        kind = self.kind
        if (kind == "file") != (self.dataset_path is not None):
            raise ConfigError("--dataset file and --dataset-path go together", option="dataset_path")
        if self.dataset_path is not None:
            jobs = file_jobs(Path(self.dataset_path), count, output_len, rng)
        elif kind == "random":
            jobs = random_jobs(count, self.input_len, output_len, self.spread, rng)
        else:
            jobs = shared_prefix_jobs(count, self.groups, self.prefix_len, self.input_len, output_len, rng)
        return [job.cut(self.max_input_len, self.max_output_len) for job in jobs]


def random_jobs(count: int, input_len: int, output_len: int, spread: float, rng: random.Random) -> list[Job]:
    """Uniform lengths from [length * (1 - spread), length * (1 + spread)]."""

    def around(length: int) -> int:
        return max(1, round(length * rng.uniform(1 - spread, 1 + spread)))

    return [Job(_text(around(input_len), rng), around(output_len)) for _ in range(count)]


def shared_prefix_jobs(
    count: int, groups: int, prefix_len: int, input_len: int, output_len: int, rng: random.Random
) -> list[Job]:
    """Each prompt is one of `groups` prefixes plus its own question, shuffled."""
    prefixes = [_text(prefix_len, rng) for _ in range(groups)]
    jobs = [Job(f"{prefixes[i % groups]} {_text(input_len, rng)}", output_len) for i in range(count)]
    rng.shuffle(jobs)
    return jobs


def file_jobs(path: Path, count: int, output_len: int, rng: random.Random) -> list[Job]:
    """The first `count` requests of a JSON, JSON-lines or CSV file, or a folder of JSON Schemas.

    Records: conversations ("conversations" or "turns"); prompts (text, or "prompt", "question", "text" or "topic" with
    text or a chat's messages; optional "max_tokens", "schema"); or a trace's lines ("input_length", "output_length",
    "timestamp" in ms, "hash_ids" of shared blocks; or columns TIMESTAMP, ContextTokens, GeneratedTokens). Raises
    ConfigError for others."""
    jobs = []
    try:
        for record in _records(path):
            job = _job(record, output_len, rng)
            if job is not None:
                jobs.append(job)
            if len(jobs) == count:
                break
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{path} cannot be read as a dataset: {error!r}", option="dataset_path") from error
    if not jobs:
        raise ConfigError(f"{path} holds no prompts", option="dataset_path")
    start = jobs[0].at or 0.0
    return [job if job.at is None else replace(job, at=job.at - start) for job in jobs]


def _records(path: Path) -> Iterator[Any]:
    if path.is_dir():
        for file in sorted(path.glob("*.json")):
            schema = json.loads(file.read_text())
            schema = schema.get("schema", schema)
            yield {"prompt": f"An example of {file.stem.replace('_', ' ')} as JSON:\n", "schema": schema}
    elif path.suffix == ".csv":
        with path.open(newline="") as rows:
            yield from csv.DictReader(rows)
    else:
        text = path.read_text()
        try:
            yield from json.loads(text)
        except json.JSONDecodeError:  # one document a line
            yield from (json.loads(line) for line in text.splitlines() if line.strip())


def _job(record: Any, output_len: int, rng: random.Random) -> Job | None:
    if isinstance(record, str):
        return Job(record, output_len)
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
        return Job(turns[0], max(1, len(turns[1].split()))) if len(turns) > 1 else None
    prompt = next(
        (record[name] for name in ("prompt", "question", "text", "turns", "topic") if record.get(name)), ""
    )
    while isinstance(prompt, list):  # of turns, or their messages
        prompt = prompt[0]
    prompt = prompt["content"] if isinstance(prompt, dict) else prompt
    return Job(prompt, int(record.get("max_tokens", output_len)), schema=record.get("schema")) if prompt else None


def _text(num_words: int, rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=max(0, num_words)))
