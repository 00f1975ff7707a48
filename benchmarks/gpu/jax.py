"""Decodes in JAX beside our CUDA path, of the same shape on one GPU: milliseconds a step, and the ratio.

    python -m benchmarks.gpu.jax MODEL [--rows 64] [--prompt 512] [--steps 128] [--reps 3] [--parts]

MODEL is a folder with a config.json; weights are random. Each engine has a process of its own, one after the other,
since XLA keeps what it took of the device. A step's time is what so many more of them take, prompts being cached.
--parts: of JAX, by its profiler, what the device computed in steps, its time without work, and the host's calls.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgl import Engine

BAR = 1.5  # times our CUDA path
_FIRST_STEPS = 8
_MOST_PARTS = 16


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--device", help="measure this one alone, and print JSON")
    arguments = parser.parse_args()
    if arguments.device:
        print(json.dumps(_measured(arguments)), flush=True)
        return
    found = {}
    for device in ("cuda", "jax"):
        command = [sys.executable, "-m", "benchmarks.gpu.jax", *sys.argv[1:], "--device", device]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[device] = json.loads(done.stdout.splitlines()[-1])
        its = found[device]
        print(f"{device:5} {its['ms']:8.2f} ms a step, warm after {its['warm']:.0f} s", flush=True)
        for name, ms in its.get("parts", {}).items():
            print(f"      {ms:8.3f} {name}", flush=True)
    ratio = found["jax"]["ms"] / found["cuda"]["ms"]
    print(f"jax takes {ratio:.2f} times as long (bar: {BAR})")


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    rows, prompt, steps = arguments.rows, arguments.prompt, arguments.steps
    prompts = [[(row * 7919 + at * 31) % 1000 + 10 for at in range(prompt)] for row in range(rows)]
    options: dict[str, Any] = {"max_running_requests": rows, "context_length": prompt + steps + 64}
    began = time.perf_counter()
    with Engine(
        arguments.model, load_format="dummy", skip_tokenizer_init=True, device=arguments.device, **options
    ) as engine:

        def seconds(number: int) -> float:
            start = time.perf_counter()
            engine.generate(
                input_ids=prompts,
                sampling_params={"temperature": 0.0, "max_new_tokens": number, "ignore_eos": True},
            )
            return time.perf_counter() - start

        for number in (_FIRST_STEPS, _FIRST_STEPS + steps) * 2:  # compiles, and caches the prompts
            seconds(number)
        warm = time.perf_counter() - began
        few, many = (
            min(seconds(number) for _ in range(arguments.reps)) for number in (_FIRST_STEPS, _FIRST_STEPS + steps)
        )
        found: dict[str, Any] = {"ms": (many - few) / steps * 1e3, "warm": warm}
        if arguments.parts and arguments.device == "jax":
            found["parts"] = _parts(lambda: seconds(_FIRST_STEPS + steps), _FIRST_STEPS + steps)
    return found


def _parts(run: Callable[[], Any], steps: int) -> dict[str, float]:
    """Milliseconds a step of what run() does in so many: the device's kernels and idle time, and calls of the host."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = Path(folder).glob("**/*.trace.json.gz")
        return _table(json.loads(gzip.decompress(file.read_bytes()))["traceEvents"], steps)


def _table(events: list[dict[str, Any]], steps: int) -> dict[str, float]:
    names = {
        (each["name"], each["pid"], each.get("tid")): each["args"].get("name")
        for each in events
        if each.get("ph") == "M"
    }
    kernels: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans = []
    for each in (each for each in events if each.get("ph") == "X"):
        process = names.get(("process_name", each["pid"], None), "")
        thread = names.get(("thread_name", each["pid"], each["tid"]), "")
        if process.startswith("/device:") and thread.startswith("Stream"):
            kernels["device: " + re.sub(r"[._]?\d+$", "", each["name"])[:90]] += each["dur"]
            spans.append((each["ts"], each["ts"] + each["dur"]))
        elif each["name"].startswith("PjitFunction"):
            calls["host: " + each["name"]] += each["dur"] / 2  # an event lies within one of the same name
    busy, end = 0.0, 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    idle = end - min(spans)[0] - busy if spans else 0.0
    totals = {"device: busy": busy, "device: idle": idle, **dict(kernels.most_common(_MOST_PARTS)), **calls}
    return {name: taken / 1e3 / steps for name, taken in totals.items()}


if __name__ == "__main__":
    main()
