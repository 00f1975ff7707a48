"""Speculation on one GPU, beside plain decoding in the same engine and run, with simulated acceptance.

    python -m benchmarks.gpu.speculate CONFIG [--rows 64] [--output 256] [--only batch,cost,masks]

CONFIG is a folder with a config.json; weights are random, so no draft would ever stand: which do is drawn instead, a
share of those whose predecessors stood. Told are

    batch   tokens a second of one request with four drafts of which three stand on average, and of many requests where
            the budget decides, with good and bad drafts: with speculation, without, and their ratio; and what the
            budget then believes that steps take
    cost    milliseconds of a step with so many tokens in each row against a decode step of as many rows, launched back
            to back
    masks   microseconds for the token masks of a chain of eight drafts, none of them known before
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl import Engine
from sgl.grammar import Vocabulary, compile
from sgl.grammar.automaton.finished import Configuration, finish
from sgl.grammar.automaton.place import advance, start_of
from sgl.runtime.batch import Batch, RowSetup
from sgl.runtime.runner.device_masks import DeviceMasks
from sgl.runtime.runner.mask_table import MaskTable
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.scheduler import verification
from sgl.runtime.scheduler.request import Request
from sgl.runtime.speculate.budget import Acceptance, Budget
from sgl.runtime.speculate.drafter import Draft, DraftRequest
from sgl.runtime.speculate.speculator import Speculator
from tests.every_draft import EveryDraft

_PROMPT = 512
_KV = 1024  # tokens behind which steps are timed
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["cat", "category", "dog"]},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "kind", "born", "tags"],
    "additionalProperties": False,
}
_TEXT = b'{"name":"Alice","kind":"category","born":"2019-04-30","tags":["x","yy"]}'


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--only", default="batch,cost,masks")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    began = time.perf_counter()
    if "batch" in only or "cost" in only:
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "context_length": 2048}
        options |= {"max_running_requests": max(arguments.rows, 64), "device": arguments.device}
        with Engine(arguments.model, speculative_algorithm="NGRAM", **options) as engine:
            print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
            if "batch" in only:
                _batches(engine, arguments.rows, arguments.output)
            if "cost" in only:
                _costs(engine)
    if "masks" in only:
        _masks(torch.device(arguments.device))
    print(f"{time.perf_counter() - began:.1f} s in all", flush=True)


class _Simulated:
    """Drafts any tokens; `accepted` says how many are accepted."""

    name = "simulated"

    def __init__(self, share: float) -> None:
        self._share = share
        self._rng = random.Random(0)

    def accepted(self, number: int) -> int:
        """Of so many drafts."""
        return next((i for i in range(number) if self._rng.random() >= self._share), number)

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter`."""
        return [Draft([1000 + i for i in range(asked.most)]) for asked in wanted]

    def ended(self, request: Request) -> None:
        """See `Drafter`."""


class _Informed(Budget):
    """Knows the share that stands: of drafts that no step verified, what plain decoding made tells nothing here."""

    def __init__(self, share: float) -> None:
        super().__init__(is_padded=True, compiles=True)
        self._share = share

    def acceptance(self, drafter: str, grade: int) -> Acceptance:
        """See `Budget`."""
        return Acceptance(self._share, 1.0)


def share_for(mean: float, number: int) -> float:
    """The share of drafts that stand of those whose predecessors did, for `mean` of `number` to stand on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(middle**i for i in range(1, number + 1)) > mean else (middle, high)
    return low


def _batches(engine: Engine, rows: int, output: int) -> None:
    good = share_for(3, 4)
    print(f"\n{'':44} {'plain':>9} {'drafts':>9} {'ratio':>7} {'tokens a step':>14}")
    cases = [
        ("1 request, 4 drafts, 3 stand on average", 1, 4, good, False),
        ("1 request, 5 drafts, 80 % of them stand", 1, 5, 0.8, False),
        ("1 request, budget, 80 % stand", 1, 7, 0.8, True),
        ("8 requests, budget, 80 % stand", 8, 7, 0.8, True),
        (f"{rows} requests, budget, 80 % stand", rows, 7, 0.8, True),
        (f"{rows} requests, budget, 20 % stand", rows, 7, 0.2, True),
    ]
    own = engine._loop._speculator
    for name, number, most, share, has_budget in cases:
        drafter = _Simulated(share)
        budget = _Informed(share) if has_budget else EveryDraft()
        ours = Speculator(engine._scheduler, [drafter], most=most, budget=budget)
        rates: dict[bool, list[float]] = {False: [], True: []}
        steps: list[float] = []
        for rep in range(4):  # the first one warms up
            for drafts in (False, True):
                verification.simulated_acceptance = drafter.accepted
                _use(engine, ours if drafts else Speculator(engine._scheduler))
                before = engine._scheduler.counters.steps
                seconds = _timed(engine, number, output)
                if rep:
                    rates[drafts].append(number * (output - 1) / seconds)
                    if drafts:
                        steps.append((output - 1) / (engine._scheduler.counters.steps - before - 1))
        plain, fast = (statistics.median(rates[drafts]) for drafts in (False, True))
        numbers = f"{plain:9.1f} {fast:9.1f} {fast / plain:6.2f}x {statistics.median(steps):14.2f}"
        print(f"{name:44} {numbers}", flush=True)
        if has_budget:
            asked = [(each, budget.costs.ratio(number, number * (each - 1), each)) for each in (2, 4, 8)]
            print("    believes " + ", ".join(f"{each} tokens a row take {its:.2f} steps" for each, its in asked))
    verification.simulated_acceptance = None
    _use(engine, own)


def _use(engine: Engine, speculator: Speculator) -> None:
    engine._loop.call(lambda: setattr(engine._loop, "_speculator", speculator))


def _timed(engine: Engine, number: int, output: int) -> float:
    """Seconds from the first token to the last."""
    rng = random.Random(0)
    prompts = [[rng.randrange(1000) for _ in range(_PROMPT)] for _ in range(number)]
    engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 1, "temperature": 0.0})
    seconds = []
    for tokens in (1, output):  # the prompts are cached
        params = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        began = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=params)
        seconds.append(time.perf_counter() - began)
    return seconds[1] - seconds[0]


def _costs(engine: Engine) -> None:
    runner = engine._started.runner
    tokens = 2, 4, 8
    print(f"\n{'rows':>5} {'decode':>9}" + "".join(f" {f'{each} tokens':>10} {'':>6}" for each in tokens))
    num_pages = engine._scheduler.memory.pool.num_pages
    page_size = engine._scheduler.memory.page_size
    for rows in (1, 4, 8, 16, 32, 64):
        kv_len = min(_KV, (num_pages - 1) // rows * page_size - 8)
        found = {each: _milliseconds(engine, runner, rows, each, kv_len, page_size) for each in (1, *tokens)}
        line = f"{rows:5} {found[1]:6.3f} ms"
        for each in tokens:
            line += f" {found[each]:7.3f} ms {found[each] / found[1]:5.2f}x"
        print(line, flush=True)


def _milliseconds(engine: Engine, runner: Any, rows: int, tokens: int, kv_len: int, page_size: int) -> float:
    """Of one step of a launched sequence."""
    count = -(-(kv_len + tokens) // page_size)
    numbers = np.arange(rows, dtype=np.int32)
    writes = np.stack(
        (
            np.repeat(numbers, count),
            np.tile(np.arange(count, dtype=np.int32), rows),
            1 + np.arange(rows * count, dtype=np.int32),
        ),
        axis=1,
    )
    empty = np.empty(0, np.int32)

    def batch(is_first: bool) -> Batch:
        setups = [RowSetup(row, SamplingParams(temperature=0.0), 0, empty, empty) for row in range(rows)]
        drafts = {b: np.full(tokens - 1, 7, np.int32) for b in range(rows)} if tokens > 1 else {}
        return Batch(
            rows=numbers,
            q_lens=np.full(rows, tokens, np.int32),
            kv_lens=np.full(rows, kv_len + tokens, np.int32),
            token_ids=np.full(rows * tokens, 7, np.int32),
            page_writes=writes if is_first else writes[:0],
            samples=np.ones(rows, np.bool_),
            score_from=np.full(rows, -1, np.int32),
            top_logprobs=np.full(rows, -1, np.int32),
            setups=setups if is_first else [],
            drafts=drafts,
        )

    def run() -> float:
        runner.launch(batch(is_first=True)).wait()
        medians = []
        for _ in range(3):
            began = time.perf_counter()
            pending = [runner.launch(batch(is_first=False)) for _ in range(12)]
            pending[-1].wait()
            medians.append((time.perf_counter() - began) / len(pending))
        return 1e3 * statistics.median(medians)

    return engine._loop.call(run)


def _masks(device: torch.device) -> None:
    """Over 128,256 made-up tokens, of as many bytes as real ones."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = {bytes([byte]) for byte in range(256)} | {b'":"', b'","', b'":', b'{"', b'"]', b'"}', b'["', b"-0"}
    while len(words) < 128_000:
        words.add((rng.choice(["", " "]) + "".join(rng.choices(letters, k=rng.randint(2, 9)))).encode())
    vocabulary = Vocabulary(sorted(words), eos_ids=[128_000], logits_width=128_256)
    grammar = compile(json_schema=_SCHEMA, vocabulary=vocabulary)
    finished = finish(grammar.automaton, 20_000)
    assert finished is not None, "it is small"
    chains = []
    for start in range(0, len(_TEXT) - 24, 3):
        place, chain = advance(finished, start_of(grammar.automaton), _TEXT[:start]), []
        for step in range(8):
            assert place is not None, "the text is allowed"
            chain.append(Configuration(finished, place))
            place = advance(finished, place, _TEXT[start + 3 * step : start + 3 * step + 3])
        chains.append(chain)
    walker = DeviceMasks(vocabulary, 64, device)
    table = MaskTable(2048, vocabulary.size, device, walker)
    on_device, on_host = [], []
    rows = np.arange(8, dtype=np.int32)
    for chain in [*chains, *chains]:
        on_device.append(
            _microseconds(
                lambda chain=chain: walker.walk(dict.fromkeys(chain), table.rows, rows[: len(set(chain))]), device
            )
        )
    for chain in chains:
        table._known._known.clear()
        began = time.perf_counter()
        table.ensure_rows(chain)
        on_host.append(1e6 * (time.perf_counter() - began))
        if device.type == "cuda":
            torch.cuda.synchronize()
    times = on_device[len(chains) :]
    text = f"masks of a chain of 8 drafts, {len(chains)} chains"
    print(f"\n{text}: {statistics.median(times):.1f} us on the device (at most {max(times):.1f})")
    print(f"{'':{len(text)}}  {statistics.median(on_host):.1f} us on the host, to find and launch them", flush=True)


def _microseconds(launch: Callable[[], object], device: torch.device) -> float:
    """Between events before and behind; the shortest of five."""
    if device.type != "cuda":
        began = time.perf_counter()
        launch()
        return 1e6 * (time.perf_counter() - began)
    times = []
    for _ in range(5):
        torch.cuda._sleep(200_000)  # the launches wait in the queue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return min(times)


if __name__ == "__main__":
    main()
