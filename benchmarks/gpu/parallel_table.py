"""The table of benchmarks.gpu.parallel: one GPU, several, the peers on as many, and how that stands to the bars."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu import peers

ROWS, PEER_ROWS = "rows.jsonl", "peers.jsonl"
LOW_IS_GOOD = ("ms", "s", "times")
Key = tuple[str, int, int, str]  # of, gpus, load, name


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure of several GPUs must be: at least or at most so many units, or times one GPU's or the better peer's
    figure."""

    limit: float
    unit: Literal["", "ms", "of one GPU", "of the better peer"] = ""
    is_least: bool = False

    def verdict(self, value: float | None, one: float | None, peer: float | None) -> str:
        """The bar and whether it is kept; a question mark where a figure is missing."""
        base = {"of one GPU": one, "of the better peer": peer}.get(self.unit, 1.0)
        text = f"{'≥' if self.is_least else '≤'} {self.limit:g} {self.unit}".rstrip()
        if value is None or base is None:
            return f"{text} ?"
        kept = value >= self.limit * base if self.is_least else value <= self.limit * base
        return f"{text} {'ok' if kept else 'MISSED'}"


# By the number of GPUs: for 8 billion weights on H100s or H200s.
BARS: dict[int, dict[tuple[str, str], list[Bar]]] = {
    2: {
        ("engine", "W3 TPOT"): [Bar(2.6, "ms")],
        ("engine", "W1 output"): [
            Bar(1.08, "of the better peer", is_least=True),
            Bar(1.65, "of one GPU", is_least=True),
        ],
        ("engine", "W4 step of 64"): [Bar(0.92, "of the better peer")],
        ("engine", "W4 step of 256"): [Bar(0.92, "of the better peer")],
        ("schemas", "W7 64 new"): [Bar(1.10)],
        ("schemas", "W7 256 new"): [Bar(1.10)],
        ("wide", "W3 TPOT"): [Bar(0.56, "of one GPU")],
        ("server", "W1 output"): [Bar(1.95, "of one GPU", is_least=True)],
        ("server", "W2 cold cache"): [Bar(1.95, "of one GPU", is_least=True)],
        ("server", "W2 warm cache"): [Bar(1.95, "of one GPU", is_least=True)],
    },
    **{
        size: {
            ("engine", "W3 TPOT"): [Bar(0.90, "of the better peer")],
            ("engine", "W1 output"): [Bar(1.05, "of the better peer", is_least=True)],
            ("schemas", "W7 64 new"): [Bar(1.10)],
        }
        for size in (4, 8)
    },
}
TITLES = {"engine": "", "schemas": "under schemas, ", "wide": "32B shape, ", "server": "over HTTP, "}


def table(folder: Path) -> list[str]:
    """Lines of Markdown. The latest row of a figure counts. Raises SystemExit where there is nothing."""
    rows = _read(folder / ROWS)
    theirs = _read(folder / PEER_ROWS)
    subjects = {(row["size"], row["hidden_size"]) for row in rows}
    if len(subjects) != 1:
        raise SystemExit(f"{folder / ROWS} has rows of {len(subjects)} models or sizes, and must have those of one")
    [(size, hidden_size)] = subjects
    found: dict[Key, dict[str, Any]] = {(row["of"], row["gpus"], row["load"], row["name"]): row for row in rows}
    of_peers = [
        peers.of_rows(row for row in theirs if (row["engine"], row["hidden_size"]) == (peer, hidden_size))
        for peer in peers.PEERS
    ]
    lines = [f"| | one GPU | {size} GPUs | ratio | SGLang | vLLM | of the better | bar |", "| --- |" + " --- |" * 7]
    for of, load, name in dict.fromkeys((key[0], key[2], key[3]) for key in found):
        both = found.get((of, 1, 1, name)), found.get((of, size, load, name))
        if load == 1 and of == "server" and both[1] is None:
            continue  # one engine alone: it stands beside those under more load
        unit = next(row["unit"] for row in both if row is not None)
        one, several = (None if row is None else float(row["value"]) for row in both)
        their = [figures.get(name) if of in ("engine", "schemas") else None for figures in of_peers]
        known = [value for value in their if value is not None]
        better = None if not known else min(known) if unit in LOW_IS_GOOD else max(known)
        times = f", {load} times the load" if load > 1 else ", the same load" if of == "server" else ""
        title = f"{TITLES[of]}{name}{times if name != 'ready' else ''}, {unit}"
        bars = BARS.get(size, {}).get((of, name), []) if load == size or of != "server" else []
        verdicts = ", ".join(bar.verdict(several, one, better) for bar in bars)
        cells = [_cell(one), _cell(several), _quotient(several, one)]
        cells += [*map(_cell, their), _quotient(several, better), verdicts]
        lines.append(f"| {' | '.join([title, *cells])} |")
    for name in dict.fromkeys(key[3] for key in found if key[0] == "server"):
        http, direct = found.get(("server", 1, 1, name)), found.get(("engine", 1, 1, name))
        if http and direct and name != "ready":
            share = http["value"] / direct["value"]
            lines.append(
                f"{name} on one GPU: over HTTP {share:.3f} of the {_cell(direct['value'])} without a server"
            )
    return lines


def _read(path: Path) -> list[dict[str, Any]]:
    """Whole lines; a time limit may have cut the last."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value >= 10 else f"{value:.3f}"


def _quotient(value: float | None, base: float | None) -> str:
    return "–" if value is None or base is None else f"{value / base:.3f}"
