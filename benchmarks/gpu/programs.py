"""W11: whole programs over HTTP, ours and beside them those of SGLang: seconds, programs a second, their ratio.

    python -m benchmarks.gpu.programs MODEL [TOKENIZER] [--only chat,tips] [--scale 1] [--reps 2] [--texts FILE]
                                      [--peer URL [--peer-path PATH]] [--trace] [--json FILE] [--option NAME=VALUE …]

MODEL, TOKENIZER and --texts are those of benchmarks.gpu.serving. The programs are in benchmarks/gpu/program_client.py,
which runs in a process of its own. --peer is an SGLang server that runs already: the same source runs on it in the
language's original front end, imported from --peer-path. Without, SGLang's figures are those of other runs on H200s
(2026-11-22). `tips_fixed` and `chat_fixed` are `tips` and `chat` with answers of equal text, as many digits in any
engine; they do not count in the mean.

--trace runs `chat` and `tips` once more, both ways, and says where the time went: what the engine counted, and medians
for each generation of the last 50 programs: ms that it waited for its first step, computed its prompt, decoded, and
began after what came before it; tokens of its prompt that were computed and cached, and those that it sampled. The last
line of each has the same ms along a program's longest chain.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import peers
from benchmarks.gpu.program_client import THREADS
from benchmarks.gpu.program_trace import lines, traced
from benchmarks.gpu.served import served, texts

REPOSITORY = Path(__file__).resolve().parents[2]
MEAN_BAR = 2.1  # times SGLang's, 8 billion weights on an H200
BARS = {"tips_fixed": 1.05, "chat_fixed": 1.05}
TRACED = ("tips", "chat", "tips_fixed", "chat_fixed")
Row = dict[str, Any]


class Client:
    """Runs program_client on a server in one of the languages."""

    def __init__(self, language: str, url: str, paths: str, *arguments: str) -> None:
        """paths: where its packages are, as PYTHONPATH has it; nothing for those of this process."""
        self._command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.program_client",
            "--language",
            language,
            "--url",
            url,
        ]
        self._command += arguments
        own = paths or os.environ.get("PYTHONPATH", "")
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (own, str(REPOSITORY))))}

    def run(self, *arguments: str) -> list[Row]:
        """A row for each kind, each written to stderr as it comes. Raises CalledProcessError."""
        rows = []
        with subprocess.Popen(
            [*self._command, *arguments], stdout=subprocess.PIPE, text=True, env=self._environment
        ) as process:
            assert process.stdout is not None
            for text in process.stdout:
                if text.startswith("{"):  # packages print too
                    print(text, end="", file=sys.stderr, flush=True)
                    rows.append(json.loads(text))
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        return rows

    def trace(self, name: str) -> Row:
        """One kind, once."""
        [row] = self.run("--only", name, "--reps", "1", "--skip-warm-up")
        return row


def table(rows: list[Row], of_peer: Mapping[str, float], where: str) -> list[str]:
    """A line for each kind, and the geometric mean of the ratios. of_peer: programs a second."""
    found = [f"{'':16} {'programs':>8} {'seconds':>9} {'sgl/s':>8} {'SGLang/s':>9} {'ratio':>6}"]
    ratios = {}
    for row in rows:
        name, rate = row["name"], row["programs"] / row["seconds"]
        text = f"{name:16} {row['programs']:8} {row['seconds']:9.3f} {rate:8.2f}"
        if name in of_peer:
            ratios[name] = rate / of_peer[name]
            text += f" {of_peer[name]:9.2f} {ratios[name]:6.2f}{_verdict(ratios[name], BARS.get(name))}"
        found.append(text)
    counted = [ratio for name, ratio in ratios.items() if name not in BARS]
    if counted:
        mean = statistics.geometric_mean(counted)
        found.append(f"{f'geometric mean of {len(counted)}':54}{mean:6.2f}{_verdict(mean, MEAN_BAR)}")
    return [*found, f"SGLang: {where}"]


def _verdict(ratio: float, bar: float | None) -> str:
    return "" if bar is None else f" (bar {bar:g}) {'ok' if ratio >= bar else 'MISSED'}"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokenizer", type=Path, nargs="?")
    parser.add_argument("--only", default="", help="kinds of programs")
    parser.add_argument("--scale", default="1", help="of the numbers of programs")
    parser.add_argument("--reps", default="2", help="the best of which counts")
    parser.add_argument("--threads", default=str(THREADS), help="of the client")
    parser.add_argument("--texts", type=Path, metavar="FILE")
    parser.add_argument("--peer", metavar="URL", help="an SGLang server that runs already")
    parser.add_argument("--peer-path", default="", metavar="PATHS", help="where its packages are, as in PYTHONPATH")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--option", action="append", default=[], help="of our engine, NAME=VALUE")
    options = parser.parse_args()
    of_peer, where, traces = dict(peers.PROGRAMS), "recorded in other runs", []
    with tempfile.TemporaryDirectory() as folder, served(options.model, options.tokenizer, options.option) as url:
        sent = Path(folder) / "texts.json"
        sent.write_text(json.dumps(texts(options.texts)), encoding="utf-8")
        shape = ["--texts", str(sent), "--scale", options.scale, "--threads", options.threads]
        shape += ["--reps", options.reps, "--only", options.only]
        ours, theirs = Client("sgl", url, "", *shape), []
        rows = ours.run()
        if options.peer:
            theirs = Client("sglang", options.peer, options.peer_path, *shape).run()
            of_peer, where = {row["name"]: row["programs"] / row["seconds"] for row in theirs}, "in this run"
        print("\n".join(table(rows, of_peer, where)), flush=True)
        if options.trace:
            for name in TRACED:
                if not options.only or name in options.only.split(","):
                    traces.append(traced(url, partial(ours.trace, name)))
                    print("\n".join(lines(traces[-1])), flush=True)
    if options.json:
        body = {"rows": rows, "peer": theirs, "peer_ran": where, "traces": traces}
        options.json.write_text(json.dumps(body, indent=1))


if __name__ == "__main__":
    main()
