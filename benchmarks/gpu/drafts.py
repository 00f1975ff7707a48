"""What drafts are worth on real text: acceptance, tokens a step and tokens a second, beside plain decoding.

    python -m benchmarks.gpu.drafts MODEL DATA --drafts FOLDER [--suites gsm8k,mtbench,bfcl,json] [--modes plain,lookup,
                                    draft,eagle3] [--prompts 12] [--tokens 128] [--rows 1] [--temperature 0]
                                    [--option NAME=VALUE …] [--json FILE]

MODEL, DATA and FOLDER are those of benchmarks/draft_training.py, which FOLDER's drafts come from; it is run first where
they are missing. Each mode has an engine of its own, one after another. Prompts are answered --rows at a time, those of
bfcl and json under their schemas, with jump-forward in every mode. `equal`: outputs that are plain's, token for token;
`tie`: of the others, those that part between two tokens whose logprobs in plain decoding are no farther apart than
twice what a token's moves when other requests are in the step, at most, which is printed.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.real_prompts import SUITES, Asked, prompts
from sgl import Engine
from sgl.runtime.config import EngineConfig, parse_options

MODES = "plain", "lookup", "draft", "eagle3"
LIKELIEST = 20  # tokens of a position
_COLUMNS = {"tok/s": 8, "x": 6, "tok/step": 9, "accepted": 9, "drafted": 8, "equal": 6, "tie": 6}
HEADER = f"{'suite':8} {'mode':8} " + " ".join(f"{name:>{width}}" for name, width in _COLUMNS.items())


@dataclass(slots=True)
class Row:
    """One mode on one suite."""

    suite: str
    mode: str
    tokens_a_second: float
    tokens_a_step: float  # of a row: output tokens, forced ones among them, for each step that it was in
    accepted: float  # of drafts
    drafted: int
    equal: float  # share of outputs
    ties: float  # share of the others

    def line(self, plain: float) -> str:
        """Of the table. plain: tokens a second of plain decoding."""
        return (
            f"{self.suite:8} {self.mode:8} {self.tokens_a_second:8.0f} {self.tokens_a_second / plain:6.2f} "
            f"{self.tokens_a_step:9.2f} {self.accepted:9.2f} {self.drafted:8d} {self.equal:6.2f} {self.ties:6.2f}"
        )


class Answers:
    """Plain decoding's outputs, and how likely other tokens were."""

    def __init__(self) -> None:
        self.rounding = 0.0
        """The farthest that a token's logprob is from its own among other requests: of the kernels for other rows."""
        self._ids: dict[str, list[list[int]]] = {}
        self._likeliest: dict[str, list[list[dict[int, float]]]] = {}

    def keep(
        self, suite: str, ids: list[list[int]], alone: Sequence[dict[str, Any]], together: Sequence[dict[str, Any]]
    ) -> None:
        """alone, together: results of the same prompts again, with the likeliest tokens of each position, as many at
        once as the ids and all at once."""
        self._ids[suite] = ids
        self._likeliest[suite] = [_likeliest(result, own) for result, own in zip(alone, ids, strict=True)]
        for kept, result, own in zip(self._likeliest[suite], together, ids, strict=True):
            for one, other in zip(kept, _likeliest(result, own), strict=False):
                moved = [abs(one[token] - other[token]) for token in one.keys() & other.keys()]
                self.rounding = max(self.rounding, *moved)

    def compare(self, suite: str, ids: list[list[int]]) -> tuple[float, float]:
        """Shares: of outputs that are equal, and of the others that part between two tokens whose logprobs rounding
        may turn round."""
        others = ties = 0
        for own, theirs, likeliest in zip(ids, self._ids[suite], self._likeliest[suite], strict=True):
            if own != theirs:
                others += 1
                pairs = enumerate(zip(own, theirs, strict=False))
                at, one, other = next(((at, a, b) for at, (a, b) in pairs if a != b), (len(likeliest), 0, 0))
                if at < len(likeliest) and {one, other} <= likeliest[at].keys():
                    ties += abs(likeliest[at][one] - likeliest[at][other]) <= 2 * self.rounding
        return 1 - others / len(ids), ties / others if others else 1.0


def _likeliest(result: dict[str, Any], ids: list[int]) -> list[dict[int, float]]:
    """Logprobs by token, of the positions whose tokens before are those ids."""
    same = 0
    while same < min(len(ids), len(result["output_ids"])) and result["output_ids"][same] == ids[same]:
        same += 1
    tops = result["meta_info"]["output_top_logprobs"][: same + 1]
    return [{token: logprob for logprob, token, *_ in top} for top in tops]


def options_of(mode: str, drafts: Path) -> dict[str, Any]:
    """The engine's for a mode."""
    if mode in ("plain", "lookup"):
        return {"speculative_algorithm": "off" if mode == "plain" else "NGRAM"}
    return {"speculative_algorithm": mode.upper(), "speculative_draft_model_path": str(drafts / mode)}


def measure(
    engine: Engine, mode: str, asked: dict[str, list[Asked]], plain: Answers, arguments: argparse.Namespace
) -> list[Row]:
    """A mode on every suite."""
    found = []
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
        _answers(
            engine, ids, [{**its, "max_new_tokens": 2} for its in params], len(ids)
        )  # compiles, fills the cache
        before, began = _counters(engine), time.perf_counter()
        outputs = [result["output_ids"] for result in _answers(engine, ids, params, arguments.rows)]
        seconds = time.perf_counter() - began
        counted = {name: its - before[name] for name, its in _counters(engine).items()}
        if mode == "plain":
            scored = [_answers(engine, ids, params, rows, LIKELIEST) for rows in (arguments.rows, len(ids))]
            plain.keep(suite, outputs, *scored)
        num_tokens = sum(map(len, outputs))
        steps = max(1, counted["steps"]) * arguments.rows
        drafted = counted["drafted_tokens"]
        row = Row(
            suite,
            mode,
            num_tokens / seconds,
            num_tokens / steps,
            counted["verified_tokens"] / max(1, drafted),
            drafted,
            *plain.compare(suite, outputs),
        )
        found.append(row)
    return found


def _counters(engine: Engine) -> dict[str, int]:
    state = engine.get_server_info()["internal_states"][0]
    return {name: state[name] for name in ("steps", "drafted_tokens", "verified_tokens")}


def _answers(
    engine: Engine, ids: list[list[int]], params: list[dict[str, Any]], rows: int, top_logprobs_num: int = 0
) -> list[dict[str, Any]]:
    """So many at a time."""
    more: dict[str, Any] = (
        {"return_logprob": True, "top_logprobs_num": top_logprobs_num} if top_logprobs_num else {}
    )
    results: list[dict[str, Any]] = []
    for start in range(0, len(ids), rows):
        part = slice(start, start + rows)
        results += engine.generate(input_ids=ids[part], sampling_params=params[part], **more)
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
    plain, rows = Answers(), []
    print(HEADER, flush=True)
    for mode in dict.fromkeys(["plain", *modes]):
        began = time.perf_counter()
        with Engine(model_path=arguments.model, **{**options, **options_of(mode, arguments.drafts)}) as engine:
            started = time.perf_counter() - began
            rows += measure(engine, mode, asked, plain, arguments)
        speeds = {row.suite: row.tokens_a_second for row in rows if row.mode == "plain"}
        for row in rows:
            if row.mode == mode:
                print(row.line(speeds[row.suite]), flush=True)
        print(f"({mode}: started in {started:.0f} s, {time.perf_counter() - began:.0f} s in all)", flush=True)
        if mode == "plain":
            print(f"(a logprob moves by up to {plain.rounding:.3g} among other requests)", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
