"""What drafts are worth on real text: acceptance, tokens a step and tokens a second, beside plain decoding.

    python -m benchmarks.gpu.drafts MODEL DATA --drafts FOLDER [--suites gsm8k,mtbench,bfcl,json]
                                    [--modes plain,grammar,lookup,auto,draft,eagle3] [--prompts 12] [--tokens 128]
                                    [--rows 1] [--rounds 5] [--temperature 0] [--option NAME=VALUE …] [--json FILE]

MODEL, DATA and FOLDER are those of benchmarks/draft_training.py, which FOLDER's drafts come from; it is run first where
they are missing. Each mode has an engine of its own beside plain decoding's; either answers all prompts of a suite in
turns, from an empty cache, --rounds times: `tok/s` is the median, `x` that of the rounds' ratios; on a CPU both are of
its time, whatever else it has to do. Prompts are answered --rows at a time, those of bfcl and json under their schemas,
with jump-forward in every mode. Drafts are as many as the budget allows for `tok/s` and `drafted`, as many as are
proposed for `accepted`, the share of them that stands, and `tok/step`.

`equal`: outputs of both that are plain's, token for token; `tie`: of the others, those that part between two tokens
whose logprobs there, behind the same text, are no farther apart than twice what such a token's moves when other
requests are in the step, at most, which is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.real_prompts import SUITES, Asked, prompts
from sgl import Engine
from sgl.runtime.config import EngineConfig, parse_options
from tests.every_draft import every_draft

TOKENS = 32_768
"""Of an engine's KV, where no option says: two lie in the device's memory."""
MODES = "plain", "grammar", "lookup", "auto", "draft", "eagle3"
_WITHOUT_MODEL = {"plain": "off", "grammar": "GRAMMAR", "lookup": "NGRAM", "auto": "auto"}
PLACES = 6  # of an output, where rounding is measured
_COLUMNS = {"tok/s": 8, "x": 6, "tok/step": 9, "accepted": 9, "drafted": 8, "equal": 6, "tie": 6}
HEADER = f"{'suite':8} {'mode':8} " + " ".join(f"{name:>{width}}" for name, width in _COLUMNS.items())


@dataclass(slots=True)
class Row:
    """One mode on one suite."""

    suite: str
    mode: str
    tokens_a_second: float
    times_plain: float
    tokens_a_step: float  # of a row: output tokens, forced ones among them, for each step that it was in
    accepted: float  # of drafts
    drafted: int
    equal: float  # share of outputs
    ties: float  # share of the others

    def line(self) -> str:
        """Of the table."""
        return (
            f"{self.suite:8} {self.mode:8} {self.tokens_a_second:8.0f} {self.times_plain:6.2f} "
            f"{self.tokens_a_step:9.2f} {self.accepted:9.2f} {self.drafted:8d} {self.equal:6.2f} {self.ties:6.2f}"
        )


class Answers:
    """Plain decoding's outputs."""

    def __init__(self) -> None:
        self.rounding = 0.0
        """The farthest that a token's logprob is from its own among other requests: of the kernels for other rows."""
        self._ids: dict[str, list[list[int]]] = {}

    def keep(self, engine: Engine, suite: str, prompts: list[list[int]], outputs: list[list[int]]) -> None:
        """Compare others with these. Some of their tokens are asked about one by one, and all at once."""
        self._ids[suite] = outputs
        asked = [
            (prompt + ids[:at], [ids[at]])
            for prompt, ids in zip(prompts, outputs, strict=True)
            for at in range(0, len(ids), len(ids) // PLACES + 1)
        ]
        alone = [_logprobs(engine, [its])[0] for its in asked]
        for one, other in zip(alone, _logprobs(engine, asked), strict=True):
            self.rounding = max(self.rounding, abs(one[0] - other[0]))

    def compare(
        self, engine: Engine, suite: str, prompts: list[list[int]], outputs: list[list[int]]
    ) -> tuple[float, float]:
        """Shares: of outputs that are equal, and of the others that part between two tokens whose logprobs rounding
        may turn round."""
        parted = []
        for prompt, own, theirs in zip(prompts * 2, outputs, self._ids[suite] * 2, strict=False):
            if own != theirs:
                at = next((i for i, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b), None)
                parted.append(None if at is None else (prompt + own[:at], [own[at], theirs[at]]))
        alone = [_logprobs(engine, [its])[0] for its in parted if its is not None]
        ties = sum(abs(one - other) <= 2 * self.rounding for one, other in alone)
        return 1 - len(parted) / len(outputs), ties / len(parted) if parted else 1.0


def _logprobs(engine: Engine, asked: list[tuple[list[int], list[int]]]) -> list[list[float]]:
    """Of tokens behind texts, whatever a constraint would make of them."""
    if not asked:
        return []
    results = engine.generate(
        input_ids=[text for text, _ in asked],
        sampling_params={"temperature": 0.0, "max_new_tokens": 1},
        return_logprob=True,
        token_ids_logprob=[tokens for _, tokens in asked],
    )
    return [[logprob for logprob, *_ in result["meta_info"]["output_token_ids_logprobs"][0]] for result in results]


def options_of(mode: str, drafts: Path) -> dict[str, Any]:
    """The engine's for a mode."""
    if mode in _WITHOUT_MODEL:
        return {"speculative_algorithm": _WITHOUT_MODEL[mode]}
    return {"speculative_algorithm": mode.upper(), "speculative_draft_model_path": str(drafts / mode)}


def measure(
    engine: Engine,
    mode: str,
    asked: dict[str, list[Asked]],
    plain: Answers,
    arguments: argparse.Namespace,
    beside: Engine | None = None,
) -> list[Row]:
    """A mode on every suite. beside: plain decoding's engine; None: it is the one."""
    found = []
    engines = [engine] if beside is None else [beside, engine]
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    for suite, suites_prompts in asked.items():
        texts = [
            engine.tokenizer.apply_chat_template(its.messages, add_generation_prompt=True) for its in suites_prompts
        ]
        ids = engine.tokenizer.encode_all(texts, add_special_tokens=False)
        params = [
            {
                "temperature": arguments.temperature,
                "max_new_tokens": arguments.tokens,
                "seed": number,
                **({} if its.schema is None else {"json_schema": its.schema}),
            }
            for number, its in enumerate(suites_prompts)
        ]
        for each in engines:  # compiles
            _answers(each, ids, [{**its, "max_new_tokens": 2} for its in params], len(ids))
        drafted = _counters(engine)["drafted_tokens"]
        rounds = []
        for _ in range(arguments.rounds):
            speeds = []
            for each in engines:
                each.flush_cache()
                began = clock()
                outputs = [result["output_ids"] for result in _answers(each, ids, params, arguments.rows)]
                speeds.append(sum(map(len, outputs)) / (clock() - began))
            rounds.append(speeds)
        drafted = _counters(engine)["drafted_tokens"] - drafted
        if mode == "plain":
            plain.keep(engine, suite, ids, outputs)
        before = _counters(engine)
        engine.flush_cache()  # a head attends to no token that was computed while it rested
        with every_draft(engine):
            again = [result["output_ids"] for result in _answers(engine, ids, params, arguments.rows)]
        counted = {name: its - before[name] for name, its in _counters(engine).items()}
        steps = max(1, counted["steps"]) * arguments.rows
        row = Row(
            suite,
            mode,
            statistics.median(speeds[-1] for speeds in rounds),
            statistics.median(speeds[-1] / speeds[0] for speeds in rounds),
            sum(map(len, again)) / steps,
            counted["verified_tokens"] / max(1, counted["drafted_tokens"]),
            drafted,
            *plain.compare(engine, suite, ids, outputs + again),
        )
        found.append(row)
    return found


def _counters(engine: Engine) -> dict[str, int]:
    state = engine.get_server_info()["internal_states"][0]
    return {name: state[name] for name in ("steps", "drafted_tokens", "verified_tokens")}


def _answers(engine: Engine, ids: list[list[int]], params: list[dict[str, Any]], rows: int) -> list[dict[str, Any]]:
    """So many at a time."""
    results: list[dict[str, Any]] = []
    for start in range(0, len(ids), rows):
        part = slice(start, start + rows)
        results += engine.generate(input_ids=ids[part], sampling_params=params[part])
    return results


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """The command's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--drafts", type=Path, required=True)
    parser.add_argument("--suites", default=",".join(SUITES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--train", nargs=argparse.REMAINDER, default=[], help="options of the training, at the end")
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--json", type=Path)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    """Train what is missing, measure, print."""
    arguments = arguments_of(given)
    logging.basicConfig(level=logging.WARNING)
    modes = arguments.modes.split(",")
    missing = [mode for mode in modes if mode in ("draft", "eagle3") and not (arguments.drafts / mode).exists()]
    if missing:
        given_options = [part for its in arguments.option for part in ("--option", its)]
        module = [sys.executable, "-m", "benchmarks.draft_training", arguments.model, str(arguments.data)]
        chosen = ["--out", str(arguments.drafts), "--only", ",".join(missing), *given_options, *arguments.train]
        subprocess.run([*module, *chosen], check=True)
    asked = {
        suite: prompts(arguments.data, suite, training=False, most=arguments.prompts)
        for suite in arguments.suites.split(",")
    }
    options = parse_options(EngineConfig, dict(its.split("=", 1) for its in arguments.option))
    options.setdefault("max_total_tokens", TOKENS)
    plain, rows = Answers(), list[Row]()

    @contextlib.contextmanager
    def measured(mode: str, beside: Engine | None = None) -> Iterator[Engine]:
        began = time.perf_counter()
        with Engine(model_path=arguments.model, **{**options, **options_of(mode, arguments.drafts)}) as engine:
            started = time.perf_counter() - began
            found = measure(engine, mode, asked, plain, arguments, beside)
            print("\n".join(row.line() for row in found), flush=True)
            print(f"({mode}: started in {started:.0f} s, {time.perf_counter() - began:.0f} s in all)", flush=True)
            rows.extend(found)
            yield engine

    print(HEADER, flush=True)
    with measured("plain") as base:
        for mode in dict.fromkeys(modes):
            if mode != "plain":
                with measured(mode, base):
                    pass
    print(f"(a logprob moves by up to {plain.rounding:.3g} among other requests)", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
