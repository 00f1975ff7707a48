"""Every workload on one GPU, ours and where the peer kit is present the peers' before it: tables, JSON and a picture.

    python -m benchmarks.gpu MODEL TOKENIZER --out FOLDER [--peers KIT PARTS] [--reps 3]

MODEL is a folder with a config.json; weights are random. TOKENIZER is a folder with a byte-level tokenizer.json, for W6
and W7. Each engine runs in a process of its own, one after another, so that each has the whole GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Run them all; what was measured before a failure stays in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", nargs=2, metavar=("KIT", "PARTS"))
    parser.add_argument("--reps", default="3")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer, rows = str(options.model), str(options.tokenizer), options.out / "peers.jsonl"
    reps, beside = ["--reps", options.reps], ["--peers", str(rows)] if options.peers else []
    if options.peers:
        rows.unlink(missing_ok=True)
        _run("peers", *options.peers, model, "--tokenizer", tokenizer, "--out", str(rows))
    picture = ["--json", str(options.out / "throughput.json"), "--plot", str(options.out / "throughput.svg")]
    _run("throughput", model, *reps, *picture, *beside)
    _run("constrained", model, tokenizer, *reps, "--json", str(options.out / "constrained.json"), *beside)


def _run(name: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", f"benchmarks.gpu.{name}", *arguments], check=True)


if __name__ == "__main__":
    main()
