"""Speculation of small models: tokens a step and a second of drafters without a model, beside jump-forward alone.

    python benchmarks/speculate.py [MODEL] [--data WORKLOADS] [--count 30] [--only replay,records,tools,plain,together]
                                   [--rounds 1]

    replay   without a model: recorded outputs of ReAct traces are what a model would say. Tokens a step of look-ups in
             the trace so far and in outputs of other traces, never in the one replayed beyond its present position.
    records  JSON extraction by MODEL (the embedded one unless named) from sentences that it was never trained on
    tools    tool calls by the same, likewise
    plain    text without constraints, 1 to 64 requests at a time: CPU seconds with drafts of those without
    together records and tool calls likewise, 1 to 32 at a time

WORKLOADS is the folder that has sglang_bench/react. Outputs with and without drafts are compared. Both engines of
records and tools answer a few other requests first, then all of these in turns, --rounds times from empty caches and
pools: tokens a second are medians, on a CPU of its own time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # the cases are no part of the package

from benchmarks.embedded_eval import Case, Chat, generated_cases, tool_cases  # noqa: E402
from sgl import Engine  # noqa: E402
from sgl.runtime.sampling_params import SamplingParams  # noqa: E402
from sgl.runtime.scheduler.request import FinishReason, Request  # noqa: E402
from sgl.runtime.speculate.drafter import DraftRequest  # noqa: E402
from sgl.runtime.speculate.lookup import Lookup  # noqa: E402
from sgl.runtime.speculate.pools import Pools  # noqa: E402
from sgl.runtime.text.tokenizer import Tokenizer  # noqa: E402
from tools.train_embedded.records import record_example  # noqa: E402
from tools.train_embedded.values import Values  # noqa: E402

_MOST = 7  # drafts of a row
_OTHERS = 8  # requests that warm an engine up
_OPTIONS: dict[str, Any] = {"random_seed": 0, "max_total_tokens": 32_768}
"""Two engines lie in the device's memory."""
_BEGINNINGS = "Once upon a time", "The capital of France is", "def main():\n    ", "Q: What is 2 + 2? A:"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--only", default="replay,records,tools,plain,together")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    if "replay" in only:
        if arguments.data is None:
            print("replay: needs --data")
        else:
            _replay(arguments.data / "sglang_bench" / "react" / "hotpotqa_100.jsonl", arguments.model)
    if {"records", "tools", "together"} & set(only):
        values = Values(random.Random(7), "eval")
        with Engine(arguments.model) as engine:
            chat = Chat(engine)
            cases = {
                "records": generated_cases(chat, record_example, values, _OTHERS + arguments.count),
                "tools": tool_cases(chat, values, _OTHERS + arguments.count),
            }
        for name, its in cases.items():
            if name in only:
                _measure(name, arguments.model, its, arguments.rounds)
            if "together" in only:
                _together(name, arguments.model, its[:32])
    if "plain" in only:
        _plain(arguments.model)


def _replay(path: Path, model: str) -> None:
    """Thoughts and actions as outputs, behind prompts that grow by them and by observations."""
    with Engine(model) as engine:
        tokenizer = engine.tokenizer
    assert tokenizer is not None, "it comes with the model"
    traces = [next(iter(json.loads(line).items())) for line in path.read_text().splitlines()]
    for name, pools in (("the trace alone", None), ("other traces, too", Pools())):
        lookup, steps, tokens, seconds = Lookup(pools), 0, 0, []
        uid = 0
        for question, turns in traces:
            for prompt, output in _turns(question, turns, tokenizer):
                uid += 1
                found = _steps(lookup, uid, prompt, output, seconds)
                steps, tokens = steps + found, tokens + len(output)
        took = f"{1e6 * statistics.mean(seconds):.0f} us a look-up, at most {1e6 * max(seconds):.0f}"
        print(
            f"replay of {len(traces)} ReAct traces, {name:18} {tokens / steps:5.2f} tokens a step  {took}",
            flush=True,
        )


def _turns(
    question: str, turns: list[dict[str, str]], tokenizer: Tokenizer
) -> Iterator[tuple[list[int], list[int]]]:
    text = question + "\n"
    for number, turn in enumerate(turns, 1):
        text += f"Thought {number}:"
        output = f" {turn['thought']}\nAction {number}: {turn['action']}\n"
        yield tokenizer.encode(text).tolist(), tokenizer.encode(output, add_special_tokens=False).tolist()
        text += f"{output}Observation {number}: {turn.get('observation', '')}\n"


def _steps(lookup: Lookup, uid: int, prompt: list[int], output: list[int], seconds: list[float]) -> int:
    """Steps for an output whose drafts stand while they equal it."""
    params = SamplingParams(max_new_tokens=len(output))
    request = Request(uid, np.array(prompt, np.int32), params, 0, len(output), origin="react")
    steps = 1
    request.output_ids.append(output[0])
    while (at := len(request.output_ids)) < len(output):
        most = min(_MOST, len(output) - at - 1)
        draft: list[int] = []
        if most > 0:
            began = time.perf_counter()
            [found] = lookup.propose([DraftRequest(request, most, request.num_known - 1)])
            seconds.append(time.perf_counter() - began)
            draft = list(found.token_ids)
        num_accepted = next((i for i, token in enumerate(draft) if token != output[at + i]), len(draft))
        request.output_ids += output[at : at + num_accepted + 1]
        steps += 1
    request.finish_reason = FinishReason("stop")
    lookup.ended(request)
    return steps


def _plain(model: str) -> None:
    """For each number of requests."""
    with _engines(model) as engines:
        for rows, tokens in ((1, 256), (8, 128), (32, 128), (64, 64)):
            for temperature in (0.0, 0.8):
                params = {"temperature": temperature, "seed": 3, "max_new_tokens": tokens, "ignore_eos": True}
                prompts = [f"{number} {_BEGINNINGS[number % len(_BEGINNINGS)]}" for number in range(rows)]
                _compare(
                    f"plain, {rows:2} at a time, temperature {temperature:3}", engines, [prompts], [[params] * rows]
                )


def _together(name: str, model: str, cases: list[Case]) -> None:
    """Likewise, under constraints."""
    with _engines(model) as engines:
        for rows in (1, 4, 12, 32):
            prompts = [[case.prompt for case in cases[at : at + rows]] for at in range(0, len(cases), rows)]
            params = [
                [
                    {"temperature": 0.7, "seed": at + i, "json_schema": case.schema, "max_new_tokens": 200}
                    for i, case in enumerate(cases[at : at + rows])
                ]
                for at in range(0, len(cases), rows)
            ]
            _compare(f"{name}, {rows:2} at a time, temperature 0.7", engines, prompts, params)


@contextlib.contextmanager
def _engines(model: str) -> Iterator[list[Engine]]:
    """One without drafts, and one with `auto`."""
    with (
        Engine(model, speculative_algorithm="off") as plain,
        Engine(model, speculative_algorithm="auto") as drafting,
    ):
        yield [plain, drafting]


def _compare(
    name: str, engines: list[Engine], prompts: list[list[str]], params: list[list[dict[str, Any]]]
) -> None:
    """Five interleaved pairs of all batches."""
    ratios, texts = [], []
    for turn in range(6):  # the first warms up
        seconds = []
        for engine in engines:
            engine.flush_cache()
            began = time.process_time()
            batches = zip(prompts, params, strict=True)
            texts.append([output["text"] for batch in batches for output in engine.generate(*batch)])
            seconds.append(time.process_time() - began)
        if turn:
            ratios.append(seconds[1] / seconds[0])
    same = all(text == texts[0] for text in texts)
    ratio = statistics.median(ratios)
    print(f"{name}: CPU seconds with drafts {ratio:.2f}x those without  outputs equal: {same}", flush=True)


def _measure(name: str, model: str, cases: list[Case], rounds: int) -> None:
    """At batch 1, one request after another."""
    cases, others = cases[_OTHERS:], cases[:_OTHERS]
    for temperature in (0.0, 0.7):
        algorithms = "off", "auto"
        found: dict[str, list[tuple[list[list[int]], float, float]]] = {algorithm: [] for algorithm in algorithms}
        with contextlib.ExitStack() as stack:
            engines = {
                algorithm: stack.enter_context(Engine(model, speculative_algorithm=algorithm, **_OPTIONS))
                for algorithm in algorithms
            }
            for engine in engines.values():
                _run(engine, others, temperature)
            for _ in range(rounds):
                for algorithm, engine in engines.items():
                    engine.flush_cache()
                    found[algorithm].append(_run(engine, cases, temperature))
        (plain, before, _), (drafted, after, _) = found["off"][0], found["auto"][0]
        rate_before, rate = (statistics.median(each[2] for each in found[algorithm]) for algorithm in algorithms)
        text = f"{name}, temperature {temperature}: {before:5.2f} -> {after:5.2f} tokens a step ({after / before:.2f}x)"
        same = sum(a == b for a, b in zip(plain, drafted, strict=True))
        print(
            f"{text}, {rate_before:7.1f} -> {rate:7.1f} tokens a second ({rate / rate_before:.2f}x), "
            f"{same} of {len(plain)} outputs equal",
            flush=True,
        )


def _run(engine: Engine, cases: list[Case], temperature: float) -> tuple[list[list[int]], float, float]:
    """Outputs; tokens a step and a second, behind prompts that are cached."""
    outputs: list[list[int]] = []
    steps = tokens = 0
    seconds = 0.0
    counters = engine._scheduler.counters
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    for number, case in enumerate(cases):
        params: dict[str, Any] = {"temperature": temperature, "seed": number, "json_schema": case.schema}
        engine.generate(prompt=case.prompt, sampling_params={**params, "max_new_tokens": 1})
        before, began = counters.steps, clock()
        result = engine.generate(prompt=case.prompt, sampling_params={**params, "max_new_tokens": 200})
        seconds += clock() - began
        steps += counters.steps - before
        tokens += len(result["output_ids"])
        outputs.append(result["output_ids"])
    return outputs, tokens / steps, tokens / seconds


if __name__ == "__main__":
    main()
