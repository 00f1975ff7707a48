"""What SGLang and vLLM take for the same workloads: run beside ours where the peer kit is present, else recorded.

The kit is a folder with `on_gpu.sh` and `bench.py`, which run an engine from a folder of packed parts and write a
JSON line for each measurement; see its README.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PEERS = ("sglang", "vllm")
Figures = dict[str, tuple[float, ...]]  # by the name of ours, one for each of PEERS

# SGLang 0.5.15, vLLM 0.26.0, in runs of their own on an H200, 2026-11-20; by the model's hidden size: shapes of
# Llama-3.1-8B and Qwen3-0.6B.
RECORDED: dict[int, Figures] = {
    4096: {
        "W1 output": (9450, 9600),
        "W2 cold cache": (210, 231),
        "W2 warm cache": (245, 232),
        "W3 TTFT": (14.9, 16.4),
        "W3 TPOT": (4.90, 5.04),
        "W4 step of 64": (6.81, 6.75),
        "W4 step of 256": (14.5, 14.5),
        "W5 prefill": (42_200, 42_100),
    },
    1024: {
        "W1 output": (22_970, 24_690),
        "W3 TTFT": (7.4, 6.9),
        "W3 TPOT": (1.60, 1.63),
        "W4 step of 64": (2.96, 2.90),
        "W4 step of 256": (7.13, 7.17),
    },
}


def run(kit: Path, parts: Path, model: Path, names: Iterable[str]) -> Figures:
    """Both engines, one after another, before ours takes the GPU."""
    known = [name for name in names if name in ("W1", "W2", "W3", "W4", "W5")]
    figures = []
    with tempfile.TemporaryDirectory() as out:
        for peer in PEERS:
            command = ["bash", str(kit / "on_gpu.sh"), peer, str(parts), "--only", ",".join(known)]
            subprocess.run([*command, "--model", str(model.resolve())], env={**os.environ, "OUT": out}, check=True)
            lines = (Path(out) / f"{peer}.jsonl").read_text(encoding="utf-8").splitlines()
            figures.append(of_rows(json.loads(line) for line in lines))
    return {name: tuple(each[name] for each in figures) for name in figures[0] if all(name in f for f in figures)}


def of_rows(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Medians of what the kit's bench.py writes for one engine, by the names of our figures."""
    values: dict[str, list[float]] = {}
    for row in rows:
        found = {
            "W1": {"W1 output": "out_tok_s"},
            "W2": {f"W2 {row.get('cache')} cache": "req_s"},
            "W3": {"W3 TTFT": "ttft_ms", "W3 TPOT": "tpot_ms"},
            "W4": {f"W4 step of {row.get('batch')}": "step_ms"},
            "W5": {"W5 prefill": "prefill_tok_s"},
        }.get(row["w"], {})
        for name, key in found.items():
            values.setdefault(name, []).append(row[key])
    return {name: statistics.median(all_values) for name, all_values in values.items()}
