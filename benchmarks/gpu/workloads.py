"""Workloads of an offline engine on one GPU: token-id prompts, greedy, eos ignored, the prefix cache flushed first.

Each yields figures by name, beside what the machine would need at least.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sgl import Engine

if TYPE_CHECKING:  # versions.py runs this beside older engines
    from sgl.runtime.batch import Batch, PendingStep, TokenMasks
    from sgl.runtime.model.base import Config
    from sgl.runtime.model.mla.config import LatentConfig
    from sgl.runtime.runner.runner import Launched

PROMPT_IDS = 10_000  # prompts are drawn from the token ids below this


@dataclass(frozen=True, slots=True)
class Machine:
    """What one GPU does at best."""

    bandwidth: float  # bytes/s read and written by a copy
    matrix_rate: float  # bf16 FLOP/s of a product of 8192^3

    @staticmethod
    def measure() -> Machine:
        """Medians of ten, with random numbers: of zeros a product is faster."""
        machine = Machine(_copied(1 << 31), _multiplied(8192))
        torch.cuda.empty_cache()
        return machine


def _copied(size: int) -> float:
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source))


def _multiplied(size: int) -> float:
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device="cuda")
    return 2 * size**3 / _seconds(lambda: torch.mm(a, b))


@dataclass(frozen=True, slots=True)
class Multiplied:
    """Weights that tokens are multiplied with."""

    all_tokens: int  # whatever they are
    expert: int  # one expert of a layer
    num_experts: int
    top_k: int
    num_mixtures: int  # layers that have experts

    @staticmethod
    def of(config: Config) -> Multiplied:
        """Of a model on our own layers."""
        from sgl.runtime.model.config import ModelConfig
        from sgl.runtime.model.mla.config import LatentConfig

        if isinstance(config, LatentConfig):
            return _of_latent(config)
        assert isinstance(config, ModelConfig), "transformers' modules have other shapes"
        hidden, experts = config.hidden_size, config.experts
        layer = hidden * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
        weights = config.num_layers * layer + config.vocab_size * hidden
        if experts is None:
            return Multiplied(weights + config.num_layers * 3 * hidden * config.intermediate_size, 0, 1, 1, 0)
        num_mixtures = sum(experts.layers)
        weights += (config.num_layers - num_mixtures) * 3 * hidden * config.intermediate_size
        weights += num_mixtures * hidden * (experts.num_experts + 3 * (experts.shared_size or 0))
        expert = 3 * hidden * experts.intermediate_size
        return Multiplied(weights, expert, experts.num_experts, experts.top_k, num_mixtures)

    @property
    def by_token(self) -> int:
        """What one token is multiplied with."""
        return self.all_tokens + self.num_mixtures * self.top_k * self.expert

    def read(self, num_tokens: int) -> float:
        """What a step of so many tokens reads, each choosing experts at random."""
        share = 1 - (1 - self.top_k / self.num_experts) ** num_tokens
        return self.all_tokens + self.num_mixtures * self.num_experts * share * self.expert


def _of_latent(config: LatentConfig) -> Multiplied:
    """Of a model with latent attention, whose queries are absorbed and whose values are expanded."""
    hidden, heads, routing = config.hidden_size, config.num_heads, config.routing
    queries = heads * config.query_dim
    layer = hidden * (queries if config.q_rank is None else config.q_rank) + queries * (config.q_rank or 0)
    layer += hidden * config.head_dim + heads * (config.nope_dim + config.value_dim) * config.kv_rank
    layer += hidden * heads * config.value_dim
    num_dense = min(config.num_dense, config.num_layers)
    num_mixtures = config.num_layers - num_dense
    weights = config.num_layers * layer + config.vocab_size * hidden
    weights += num_dense * 3 * hidden * config.intermediate_size
    expert = 3 * hidden * config.expert_size
    weights += num_mixtures * (hidden * routing.num_experts + config.num_shared * expert)
    return Multiplied(weights, expert, routing.num_experts, routing.top_k, num_mixtures)


def _read(model: str | Path) -> tuple[Multiplied, int]:
    """What a model's tokens are multiplied with, and the bytes of KV that each adds."""
    from sgl.runtime.model.choice import read_config
    from sgl.runtime.model.kv_cache import KVCache

    config = read_config(str(model), "sgl")
    return Multiplied.of(config), KVCache.bytes_per_token(config, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement: what, how much, in what unit, and what the machine could do at best."""

    name: str
    value: float
    unit: str
    floor: float | None
    all: tuple[float, ...]  # every repetition

    @property
    def is_time(self) -> bool:
        """Whether less is better."""
        return self.unit == "ms"


class Workloads:
    """Runs W1 … W5 and W9 on an engine, `reps` times each; a figure is the median."""

    def __init__(
        self, engine: Engine, model: str | Path, machine: Machine | None, reps: int = 3, *, load: int = 1
    ) -> None:
        """machine: None for figures without floors. load: how many times as many requests W1, W2 and the warm-up send
        at once."""
        self._engine = engine
        self._machine = machine or Machine(math.inf, math.inf)
        self._reps = reps
        self._load = load
        self._rng = random.Random(1234)
        self._weights, self._kv_bytes = (Multiplied(1, 0, 1, 1, 0), 1) if machine is None else _read(model)

    def run(self, names: list[str]) -> Iterator[Figure]:
        """The figures of the named workloads, as they come."""
        table: dict[str, Callable[[], Iterator[Figure]]] = {
            "W1": self.ragged_throughput,
            "W2": self.shared_prefix,
            "W3": self.single_stream,
            "W4": self.decode_steps,
            "W5": self.prefill,
            "W9": self.forks,
            "host": self.exposed_host_time,
        }
        for name in names:
            yield from table[name]()

    def warm_up(self) -> None:
        """Every kind of step once: short and long prompts, small and large batches."""
        for count, length, output in (
            (1, 512, 8),
            (4, 2048, 4),
            (64, 512, 8),
            (256, 128, 16),
            (512, 64, 8),
            (8, 2048, 1),
        ):
            count *= self._load
            self._timed(self._prompts(count, length), [output] * count)

    def ragged_throughput(self) -> Iterator[Figure]:
        """W1: 256 requests, prompts and outputs of 100 to 1024 tokens, seed 0."""
        rng = random.Random(0)
        prompts = [[rng.randint(0, PROMPT_IDS) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
        outputs = [rng.randint(100, 1024) for _ in range(256)] * self._load
        lengths = [len(prompt) for prompt in prompts] * self._load
        rates = []
        for _ in range(self._reps):
            rates.append(sum(outputs) / self._timed([self._tokens(n) for n in lengths], outputs))
        floor = sum(lengths) * 2 * self._weights.by_token / self._machine.matrix_rate
        for step in range(max(outputs)):
            alive = [length + step for length, output in zip(lengths, outputs, strict=True) if step < output]
            floor += self._step_floor(len(alive), sum(alive))
        yield _figure("W1 output", rates, "tok/s", sum(outputs) / floor if floor else None)

    def shared_prefix(self) -> Iterator[Figure]:
        """W2: 512 requests of 2048 shared and 64 own tokens, 32 out; cold cache, then the prefix cached."""
        rates: dict[str, list[float]] = {"cold": [], "warm": []}
        count = 512 * self._load
        for _ in range(self._reps):
            prefix = self._tokens(2048)
            self._flush()
            for values in rates.values():
                prompts = [prefix + self._tokens(64) for _ in range(count)]
                values.append(count / self._timed(prompts, [32] * count, flush=False))
        for state, values in rates.items():
            yield _figure(f"W2 {state} cache", values, "req/s", None)

    def single_stream(self) -> Iterator[Figure]:
        """W3: one request, 512 in, 256 out. The first token's time is that of a request for one token."""
        first = [self._timed(self._prompts(1, 512), [1]) for _ in range(max(5, self._reps))]
        whole = [self._timed(self._prompts(1, 512), [256]) for _ in range(self._reps)]
        prompt = statistics.median(first)
        yield _figure(
            "W3 TTFT",
            [1e3 * value for value in first],
            "ms",
            1e3 * self._products_floor(512),
        )
        steps = [1e3 * (value - prompt) / 255 for value in whole]
        yield _figure("W3 TPOT", steps, "ms", 1e3 * self._step_floor(1, 640))

    def decode_steps(self) -> Iterator[Figure]:
        """W4: decode steps of 64 and of 256 rows, 512 in, 256 out."""
        for count in (64, 256):
            steps = []
            for _ in range(self._reps):
                prompt = self._timed(self._prompts(count, 512), [1] * count)
                whole = self._timed(self._prompts(count, 512), [256] * count)
                steps.append(1e3 * (whole - prompt) / 255)
            yield _figure(f"W4 step of {count}", steps, "ms", 1e3 * self._step_floor(count, count * 640))

    def prefill(self) -> Iterator[Figure]:
        """W5: 64 prompts of 2048 tokens, one token out."""
        rates = [64 * 2048 / self._timed(self._prompts(64, 2048), [1] * 64) for _ in range(self._reps)]
        yield _figure("W5 prefill", rates, "tok/s", self._machine.matrix_rate / (2 * self._weights.by_token))

    def forks(self) -> Iterator[Figure]:
        """W9: branches of a prefix that is cached, 16 own tokens in and 128 out: how many times faster than when each
        attends to the prefix for itself. Of the last, whose prefix is too short to gain, neither way may be slower."""
        attention = self._engine._started.runner._attention
        for count, length in ((64, 4096), (256, 4096), (64, 16_384), (16, 1024)):
            gains = []
            for _ in range(self._reps):
                prefix = self._tokens(length)
                seconds = []
                for least in (attention._least_saved, 1 << 60):  # type: ignore[attr-defined]
                    kept, attention._least_saved = attention._least_saved, least  # type: ignore[attr-defined]
                    self._timed([prefix], [1])
                    prompts = [prefix + self._tokens(16) for _ in range(count)]
                    seconds.append(self._timed(prompts, [128] * count, flush=False))
                    attention._least_saved = kept  # type: ignore[attr-defined]
                gains.append(seconds[1] / seconds[0])
            yield _figure(f"W9 {count} of {length}", gains, "times", None)

    def exposed_host_time(self) -> Iterator[Figure]:
        """Share of decode steps of 256 rows in which the GPU waits for the host."""
        runner = self._engine._started.runner
        forward, sample = runner.forward, runner.sample
        events: list[list[torch.cuda.Event]] = []

        def timed_forward(batch: Batch) -> Launched:
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            events[-1][0].record()
            return forward(batch)

        def timed_sample(launched: Launched, masks: TokenMasks | None = None) -> PendingStep:
            pending = sample(launched, masks)
            events[-1][1].record()
            return pending

        shares = []
        for _ in range(self._reps):
            events.clear()
            runner.forward, runner.sample = timed_forward, timed_sample  # type: ignore[method-assign]
            self._timed(self._prompts(256, 512), [128] * 256)
            runner.forward, runner.sample = forward, sample  # type: ignore[method-assign]
            torch.cuda.synchronize()
            steps = events[-110:-10]  # all rows decode
            waited = sum(before[1].elapsed_time(after[0]) for before, after in pairwise(steps))
            shares.append(100 * waited / steps[0][0].elapsed_time(steps[-1][0]))
        yield _figure("host exposed, 256", shares, "%", None)

    def _step_floor(self, rows: int, kv_tokens: int) -> float:
        """Seconds of a decode step: weights read or products computed, then keys and values read."""
        return self._products_floor(rows) + kv_tokens * self._kv_bytes / self._machine.bandwidth

    def _products_floor(self, num_tokens: int) -> float:
        """Seconds of a step's products: weights read, or products computed."""
        return max(
            2 * self._weights.read(num_tokens) / self._machine.bandwidth,
            2 * self._weights.by_token * num_tokens / self._machine.matrix_rate,
        )

    def _timed(self, prompts: list[list[int]], outputs: list[int], *, flush: bool = True) -> float:
        if flush:
            self._flush()
        params = [{"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True} for length in outputs]
        took, results = self._generate(prompts, params)
        assert [len(result["output_ids"]) for result in results] == outputs
        return took

    def _flush(self) -> None:
        self._engine.flush_cache()

    def _generate(
        self, prompts: list[list[int]], params: list[dict[str, Any]]
    ) -> tuple[float, list[dict[str, Any]]]:
        """Seconds, and what came of it."""
        began = time.perf_counter()
        results: list[dict[str, Any]] = self._engine.generate(input_ids=prompts, sampling_params=params)
        return time.perf_counter() - began, results

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        return [self._tokens(length) for _ in range(count)]

    def _tokens(self, length: int) -> list[int]:
        return [self._rng.randrange(PROMPT_IDS) for _ in range(length)]


def cut_tokenizer(folder: Path, size: int, target: Path) -> None:
    """Write a byte-level BPE tokenizer to `target`, cut to its first tokens: at most `size` ids in all."""
    body = json.loads((folder / "tokenizer.json").read_text())
    room = size - 256  # what a model has for special tokens, as a rule
    vocab = {token: token_id for token, token_id in body["model"]["vocab"].items() if token_id < room}
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in body["model"]["merges"]]
    body["model"]["vocab"] = vocab
    body["model"]["merges"] = [pair for pair in merges if "".join(pair) in vocab]
    specials = [token for token in body["added_tokens"] if token["special"]][:2]
    body["added_tokens"] = [{**token, "id": len(vocab) + i} for i, token in enumerate(specials)]
    (target / "tokenizer.json").write_text(json.dumps(body))
    names = {"eos_token": specials[-1]["content"], "tokenizer_class": "PreTrainedTokenizerFast"}
    (target / "tokenizer_config.json").write_text(json.dumps(names))


def _seconds(work: Callable[[], object]) -> float:
    """Of one run on the GPU, the median of ten."""
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def _figure(name: str, values: list[float], unit: str, floor: float | None) -> Figure:
    known = floor if floor and math.isfinite(floor) else None
    return Figure(name, statistics.median(values), unit, known, tuple(values))
