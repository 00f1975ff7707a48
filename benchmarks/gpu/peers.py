"""What SGLang and vLLM take for the same workloads: run where the peer kit is present, else recorded.

    python -m benchmarks.gpu.peers KIT PARTS MODEL --out ROWS.jsonl [--tokenizer FOLDER] [--only W1,…] [--engine vllm …]

The kit is a folder with `on_gpu.sh` and `bench.py`, which run an engine from a folder of packed parts and write a JSON
line for each measurement; see its README. ROWS.jsonl then goes to the benchmarks of ours on the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.workloads import cut_tokenizer

PEERS = ("sglang", "vllm")
Figures = dict[str, tuple[float, ...]]  # by the name of ours, one for each of PEERS
UNCONSTRAINED = "W3,W4,W5,W2,W1"
CONSTRAINED = "W6,W7"  # these need a tokenizer
COPY_SECONDS = 2.0
# Without these, documents of W7 may go on with whitespace for ever.
COMPACT_JSON = {
    "sglang": "constrained_json_disable_any_whitespace=true",
    "vllm": 'structured_outputs_config={"backend":"xgrammar","disable_any_whitespace":true}',
}
# What tensor parallelism takes, {} being the number of GPUs. Nothing may use NVLink multicast, as all-reduce fusion and
# symmetric memory do by default: where a host's GPUs are shared, it can put those of others out of service.
PARALLEL = {
    "sglang": ("tp_size={}", "enforce_disable_flashinfer_allreduce_fusion=true"),
    "vllm": ("tensor_parallel_size={}",),
}
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


def _served(*values: float) -> dict[str, float]:
    names = ("TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms", "goodput")
    return dict(zip(names, values, strict=True))


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
        "W6 first": (1.38, 1.17),
        "W6 warm": (1.02, 1.02),
        "W7 64 new": (7.0, 6.2),
        "W7 64 seen": (6.2, 5.6),
        "W7 256 new": (9.6, 3.0),
        "W7 256 seen": (8.5, 2.7),
    },
    1024: {
        "W1 output": (22_970, 24_690),
        "W3 TTFT": (7.4, 6.9),
        "W3 TPOT": (1.60, 1.63),
        "W4 step of 64": (2.96, 2.90),
        "W4 step of 256": (7.13, 7.17),
    },
}

# W10 by rate and engine, W11 in programs a second by SGLang with its own front end: runs over HTTP with the first of
# these shapes on H200s, a GPU each, 2026-11-22. react, record and judge ran on another machine than the others.
SERVING: dict[float, dict[str, dict[str, float]]] = {
    24: {"SGLang": _served(41, 87, 9.1, 13.2, 1.0), "vLLM": _served(79, 148, 10.0, 15.6, 1.0)},
    48: {"SGLang": _served(92, 1385, 16.8, 41.6, 0.53), "vLLM": _served(136, 311, 17.6, 29.7, 0.53)},
    72: {"SGLang": _served(113, 364, 40.2, 84.0, 0.07), "vLLM": _served(164, 419, 26.0, 40.4, 0.16)},
}
PROGRAMS = {
    "few_shot": 63.2,
    "choose": 58.9,
    "tree_of_thought": 6.18,
    "tips": 28.3,
    "chat": 34.3,
    "react": 12.4,
    "record": 32.8,
    "judge": 14.1,
}


def run(
    kit: Path,
    parts: Path,
    model: Path,
    tokenizer: Path | None,
    only: str,
    engines: Iterable[str],
    rows: Path,
    size: int = 1,
    options: Iterable[str] = (),
) -> None:
    """These engines, one after another, each tensor parallel on `size` GPUs; what they measure is added to the file
    `rows` as it comes. options: NAME=VALUE, of theirs."""
    from sgl.runtime.model.choice import read_config  # versions.py imports this file beside older engines

    config = read_config(str(model), "sgl")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # the kit has its own
    if size > 1:
        environment |= WITHOUT_MULTICAST
    for peer in engines:
        with tempfile.TemporaryDirectory() as folder:
            out, cut = Path(folder) / "out", Path(folder) / "tokenizer"
            command = ["bash", str(kit / "on_gpu.sh"), peer, str(parts)]
            command += ["--model", str(model.resolve()), "--only", only]
            for option in (*options, *(PARALLEL[peer] if size > 1 else ())):
                command += ["--opt", option.format(size)]
            if tokenizer:
                cut.mkdir()
                cut_tokenizer(tokenizer, config.vocab_size, cut)
                command += ["--tokenizer", str(cut), "--opt", COMPACT_JSON[peer]]
            written, copied = out / f"{peer}.jsonl", 0
            with subprocess.Popen(command, env=environment | {"OUT": str(out)}) as process:
                status = None
                while status is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        status = process.wait(timeout=COPY_SECONDS)
                    copied += _copy_lines(written, copied, rows, {"hidden_size": config.hidden_size})
        if status:
            raise SystemExit(f"{peer} ended with status {status}; what it measured before is in {rows}")


def _copy_lines(source: Path, skipped: int, target: Path, also: dict[str, Any]) -> int:
    """Add the whole lines of one JSONL file behind the first `skipped` to another. Returns how many."""
    if not source.exists():
        return 0
    *lines, _ = source.read_text(encoding="utf-8").split("\n")
    with target.open("a", encoding="utf-8") as file:
        for line in lines[skipped:]:
            print(json.dumps({**also, **json.loads(line)}), file=file)
    return len(lines) - skipped


def figures_for(hidden_size: int, rows: Path | None) -> tuple[Figures, str]:
    """What the peers take for a model of this width, and where that was measured."""
    if rows is None:
        return RECORDED.get(hidden_size, {}), "recorded in other runs"
    read = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    read = [row for row in read if row["hidden_size"] == hidden_size]
    each = [of_rows(row for row in read if row["engine"] == peer) for peer in PEERS]
    for peer, figures in zip(PEERS, each, strict=True):
        if not figures:
            raise SystemExit(f"{rows} has no figures of {peer} for a model of width {hidden_size}")
    return {name: tuple(f[name] for f in each) for name in each[0] if name in each[1]}, "in this run"


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
            "W6": {"W6 warm" if row.get("rep") else "W6 first": "slowdown"},
            "W7": {f"W7 {row.get('batch')} {row.get('schemas')}": "slowdown"},
        }.get(row["w"], {})
        for name, key in found.items():
            values.setdefault(name, []).append(row[key])
    return {name: statistics.median(all_values) for name, all_values in values.items()}


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=Path)
    parser.add_argument("parts", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="without it, no W6 and W7")
    parser.add_argument("--only", help="workloads")
    parser.add_argument("--engine", nargs="+", choices=PEERS, default=PEERS)
    options = parser.parse_args()
    only = options.only or (f"{UNCONSTRAINED},{CONSTRAINED}" if options.tokenizer else UNCONSTRAINED)
    run(options.kit, options.parts, options.model, options.tokenizer, only, options.engine, options.out)


if __name__ == "__main__":
    main()
