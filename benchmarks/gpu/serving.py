"""W10: a server under a rate of requests, as its clients see it, and peers' servers under the same: a line a rate.

    python -m benchmarks.gpu.serving MODEL [TOKENIZER] [--rates 24,48,72] [--requests 300] [--texts FILE]
                                     [--peer NAME=URL …] [--json FILE] [--option NAME=VALUE …]

MODEL and TOKENIZER are folders, as for benchmarks.gpu.constrained; without TOKENIZER, MODEL is one that `sgl serve`
takes, with weights, or the URL of a server that runs already. Arrivals are random at the rate and wait for no answer. A
prompt is a system prompt of 3,000 characters, which all share, one to five turns of a chat and a part of an article;
the answer has 32 to 256 tokens, past ends of text, and is streamed over /v1/completions. The prefix cache is emptied
before each rate. Goodput is the share of requests with a first token within 200 ms and 20 ms a token. --texts has
dialogues and articles of one's own: JSON with the keys of `texts` in benchmarks/gpu/served.py; without, words are made
up. --peer is a server of SGLang or vLLM that runs already; their figures are otherwise those of another run, on H200s
(2026-11-22).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import peers
from benchmarks.gpu.flush import flush_cache
from benchmarks.gpu.served import served, texts
from sgl.bench import about, client
from sgl.bench.datasets import Job
from sgl.bench.load import Load, arrivals
from sgl.bench.report import report as report_of

LIMITS = {"ttft": 0.2, "tpot": 0.02}  # seconds
BARS = {"TTFT p50 ms": 55.0, "TPOT p50 ms": 11.0, "goodput": 0.98}  # at BAR_RATE, 8 billion weights on an H200
BAR_RATE = 48.0
SHARED_CHARACTERS, OWN_CHARACTERS = 3000, (100, 3000)
WARM_UP = 16  # requests at once, before the first rate
PERCENTILES = {"p50": "median", "p95": "p95", "p99": "p99"}


def jobs(from_texts: dict[str, Any], count: int, outputs: Sequence[int], label: str) -> list[Job]:
    """What is sent. label: stands in each prompt behind what all share, so that no two rates share more."""
    rng, chats, articles = random.Random(0), from_texts["chats"], from_texts["articles"]
    shared = from_texts["gsm8k_shots"][:SHARED_CHARACTERS] + "\n\n"
    made = []
    for i in range(count):
        turns = "\n".join(chats[i % len(chats)][: 1 + i % 5])
        article = articles[i % len(articles)][: rng.randint(*OWN_CHARACTERS)]
        made.append(Job(f"{shared}[{label}/{i}] {turns}{article}\nAnswer:", rng.choice(outputs)))
    return made


class Server:
    """A server under measurement."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        self._load = Load(url=url, api="openai", warmup=0)
        self.subject = asyncio.run(about.server_facts(self._load))
        self._load = dataclasses.replace(self._load, model=self.subject["model"] or "default")

    def warm_up(self, first: Sequence[Job]) -> None:
        """Send them at once. Raises SystemExit if one fails."""
        results, _ = asyncio.run(client.run(first, [0.0] * len(first), self._load, lambda _: None))
        for result in results:
            if result.error is not None:
                raise SystemExit(f"{self.name}: {result.error}")

    def under(self, rate: float, sent: Sequence[Job]) -> dict[str, Any]:
        """The report of `sgl bench serving` for that rate."""
        flush_cache(self.url)
        load = dataclasses.replace(self._load, request_rate=rate)
        times = arrivals(sent, load, random.Random(1))
        results, seconds = asyncio.run(client.run(sent, times, load, lambda _: None))
        return {"name": self.name, "rate": rate, **report_of(results, seconds, LIMITS)}


def figures(row: dict[str, Any]) -> dict[str, float]:
    """What is printed of a report."""
    found = {
        f"{title} {short} ms": row[key].get(long, float("nan"))
        for title, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("e2e", "e2e_ms"))
        for short, long in PERCENTILES.items()
    }
    return {**found, "goodput": row["goodput_share"], "tok/s": row["output_tokens_per_second"]}


def line(name: str, rate: float, values: dict[str, float]) -> str:
    """A row of the table; what is not known is left blank."""
    cells = []
    for title in TITLES:
        value = values.get(title)
        digits = 2 if title == "goodput" or title.startswith("TPOT") else 0
        cells.append(" " * 8 if value is None else f"{value:8.{digits}f}")
    return f"{name:8} {rate:5g}{''.join(cells)}"


TITLES = [f"{title} {short} ms" for title in ("TTFT", "TPOT", "e2e") for short in PERCENTILES] + [
    "goodput",
    "tok/s",
]
HEADING = (
    f"{'':14}{'TTFT ms':>24}{'TPOT ms':>24}{'e2e ms':>24}{'':>8}{'output':>8}\n"
    f"{'':8} {'req/s':>5}{''.join(f'{short:>8}' for short in PERCENTILES) * 3}{'goodput':>8}{'tok/s':>8}"
)


def verdicts(values: dict[str, float]) -> str:
    """How a row stands to the bars."""
    parts = []
    for title, bar in BARS.items():
        kept = values[title] >= bar if title == "goodput" else values[title] <= bar
        parts.append(f"{title} {values[title]:.3g} (bar {bar:g}) {'ok' if kept else 'MISSED'}")
    return ", ".join(parts)


def main() -> None:
    """Run and print; status 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokenizer", type=Path, nargs="?")
    parser.add_argument("--rates", default="24,48,72", help="requests a second")
    parser.add_argument("--requests", type=int, default=300, help="for each rate")
    parser.add_argument("--outputs", default="32,64,128,256", help="tokens, of which one is drawn for each request")
    parser.add_argument("--texts", type=Path, metavar="FILE")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=URL", help="a server that runs already"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--option", action="append", default=[], help="of our engine, NAME=VALUE")
    options = parser.parse_args()
    sent, outputs = texts(options.texts), [int(n) for n in options.outputs.split(",")]
    rates, rows = [float(rate) for rate in options.rates.split(",")], []
    with served(options.model, options.tokenizer, options.option) as url:
        servers = [Server("sgl", url), *(Server(*peer.split("=", 1)) for peer in options.peer)]
        for server in servers:
            server.warm_up([job.cut(None, 16) for job in jobs(sent, WARM_UP, outputs, "warm-up")])
        print(HEADING, flush=True)
        for rate in rates:
            for server in servers:
                rows.append(server.under(rate, jobs(sent, options.requests, outputs, f"{rate:g}")))
                print(line(server.name, rate, figures(rows[-1])), flush=True)
                for error in rows[-1]["errors"]:
                    print(f"{'':8} {error}")
            if not options.peer:
                for name, values in peers.SERVING.get(rate, {}).items():
                    print(line(name, rate, values))
    print(f"SGLang and vLLM: {'in this run' if options.peer else 'recorded in another run'}")
    for row in rows:
        if row["rate"] == BAR_RATE:
            print(f"{row['name']} at {BAR_RATE:g} requests/s: {verdicts(figures(row))}")
    if options.json:
        subjects = {server.name: server.subject for server in servers}
        options.json.write_text(json.dumps({"servers": subjects, "rows": rows}, indent=1))
    if any(row["failed"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
