"""The time between two tokens under a stream of long prompts, with prefill apart from decode and with data parallelism.

    python -m benchmarks.gpu.disaggregated MODEL TOKENIZER [--chats 8] [--prompts 0.3] [--seconds 30] [--words 20000]
                                           [--parts apart,together] [--context-length 65536] [--buffer-mb 24000]
                                           [--min-prefill-tokens 512] [--json FILE] [--option NAME=VALUE …]

MODEL and TOKENIZER are those of benchmarks.gpu.constrained. Two GPUs serve one model in two ways:

    apart     a server with disaggregation_mode="prefill", one with "decode", and sgl gateway before them
    together  one server with dp_size=2, whose steps mix prompts and outputs

Either gets short chats, `--chats` a second, alone; and then beside prompts of `--words` made-up words, `--prompts` a
second, each from a client in a process of its own (`sgl bench serving`). Printed: the chats' time between two tokens,
that beside the prompts over that without, and the prompts' time to their first token; of `apart` also the rate at which
the decode engine pulled pages (bytes over seconds of its reads, from the prefill engine's answer on), where a pull's
time goes, and beside it the rate of one plain copy of 4 GB from one GPU to the other, which is measured first.
`--option disaggregation_transport=cuda_ipc --buffer-mb 8000` goes that way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from benchmarks.gpu.served import served

BAR = 1.15  # times p99 without the prompts
RATE_BAR = 0.70  # of a plain copy's rate
_COPY = """
import time, torch
if torch.cuda.device_count() > 1:
    one, two = (torch.empty(4 * 10**9, dtype=torch.uint8, device=f"cuda:{each}") for each in (0, 1))
    for _ in range(4):
        began = time.perf_counter()
        two.copy_(one)
        for each in (0, 1):
            torch.cuda.synchronize(each)
        took = time.perf_counter() - began
    print(len(one) / took / 1e9)
"""
PATIENCE = 600.0  # seconds


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--chats", type=float, default=8.0, help="a second")
    parser.add_argument("--prompts", type=float, default=0.3, help="a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--parts", default="apart,together")
    parser.add_argument("--context-length", type=int, default=65_536)
    parser.add_argument("--buffer-mb", type=int, default=24_000, help="128 KB a token of 8 billion weights")
    parser.add_argument("--min-prefill-tokens", type=int, default=512, help="of the gateway")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--option", action="append", default=[], help="of the engines, NAME=VALUE")
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    copied = subprocess.run([sys.executable, "-c", _COPY], capture_output=True, text=True, check=True).stdout
    for part in arguments.parts.split(","):
        with {"apart": apart, "together": together}[part](arguments) as (url, decode):
            found[part] = measured(url, arguments, decode)
        its = found[part]
        print(
            f"{part:8} {its['tokens']:.0f} tokens a prompt; between tokens p50 {its['idle p50']:.2f} -> "
            f"{its['loaded p50']:.2f} ms, p99 {its['idle p99']:.2f} -> {its['loaded p99']:.2f} ms: "
            f"{its['loaded p99'] / its['idle p99']:.2f}x; prompts' first token p50 {its['first']:.0f} ms",
            flush=True,
        )
    if "apart" in found:
        ratio = found["apart"]["loaded p99"] / found["apart"]["idle p99"]
        print(f"apart: p99 {ratio:.2f}x of without prompts (bar {BAR}) {'ok' if ratio <= BAR else 'MISSED'}")
        if not found["apart"]["pulled"]:
            raise SystemExit("apart: no page was pulled: the servers' logs may say why")
        rate = found["apart"]["pulled"] / 1e9 / found["apart"]["reading"]
        print(f"apart: pulled {found['apart']['pulled'] / 1e9:.2f} GB at {rate:.1f} GB/s", end="")
        if copied:
            ratio = rate / float(copied)
            verdict = "ok" if ratio >= RATE_BAR else "MISSED"
            print(f", {ratio:.2f} of a plain copy's {float(copied):.1f} (bar {RATE_BAR:.2f}) {verdict}", end="")
        print()
        for name, median in found["apart"]["parts"].items():
            print(f"apart: of a pull: {name} " + (f"{median:.0f}" if name == "runs" else f"{1e3 * median:.2f} ms"))
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


@contextlib.contextmanager
def together(arguments: argparse.Namespace) -> Iterator[tuple[str, None]]:
    """One server, two engines."""
    options = [f"context_length={arguments.context_length}", "dp_size=2", *arguments.option]
    with served(arguments.model, arguments.tokenizer, options) as url:
        yield url, None


@contextlib.contextmanager
def apart(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Two servers behind a gateway, each on a GPU of its own. Also the URL of the one that decodes."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    with contextlib.ExitStack() as stack:
        urls = []
        try:
            for mode, gpu in zip(("prefill", "decode"), given, strict=False):
                os.environ["CUDA_VISIBLE_DEVICES"] = gpu
                options = [f"context_length={arguments.context_length}", f"disaggregation_mode={mode}"]
                options += [f"disaggregation_buffer_mb={arguments.buffer_mb}", *arguments.option]
                urls.append(stack.enter_context(served(arguments.model, arguments.tokenizer, options)))
        finally:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(given)
        workers = [argument for url in urls for argument in ("--worker", url)]
        workers.append(f"--min-prefill-tokens={arguments.min_prefill_tokens}")
        yield stack.enter_context(gateway(workers)), urls[1]


@contextlib.contextmanager
def gateway(workers: list[str]) -> Iterator[str]:
    """Its URL, once it knows the workers' modes."""
    command = [sys.executable, "-m", "sgl", "gateway", *workers, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = re.search(r"http://\S+", process.stdout.readline())
            assert said is not None, "it says where it is"
            end = time.monotonic() + PATIENCE
            while {its["mode"] for its in requests.get(f"{said[0]}/workers", timeout=60).json()["workers"]} != {
                "prefill",
                "decode",
            }:
                if time.monotonic() > end:
                    raise SystemExit("the gateway does not learn the workers' modes")
                time.sleep(0.1)
            yield said[0]
        finally:
            process.terminate()


def pulls(decode: str | None) -> tuple[float, float, dict[str, float]]:
    """Bytes that were pulled so far, seconds of the reads, and medians of these seconds' parts."""
    if decode is None:
        return 0.0, 0.0, {}
    [state] = requests.get(f"{decode}/get_server_info", timeout=60).json()["internal_states"]
    return state["transfer_pulled_bytes"], state["transfer_pull_seconds"], state["transfer_pull_parts"]


def measured(url: str, arguments: argparse.Namespace, decode: str | None) -> dict[str, Any]:
    """Milliseconds, and the prompts' tokens; of engines apart also the bytes that were pulled, and the seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def chats(seconds: float, seed: int) -> Load:
            count = max(1, round(arguments.chats * seconds))
            return Load(url, folder / f"{seed}.json", arguments.chats, count, 128, 128, seed)

        def prompts(count: int, seed: int) -> Load:
            return Load(url, folder / f"{seed}.json", arguments.prompts, count, arguments.words, 4, seed)

        for load in (prompts(2, 1), chats(5.0, 2)):  # warms up
            load.report()
        idle = chats(arguments.seconds, 3).report()
        number = max(1, round(arguments.prompts * arguments.seconds))
        before, beside = pulls(decode), prompts(number, 4)
        loaded = chats(arguments.seconds, 5).report()
        of_prompts = beside.report()
    pulled, reading, parts = pulls(decode)
    read = {"pulled": pulled - before[0], "reading": reading - before[1], "parts": parts}
    return {
        **({} if decode is None else read),
        "idle p50": idle["itl_ms"]["median"],
        "idle p99": idle["itl_ms"]["p99"],
        "loaded p50": loaded["itl_ms"]["median"],
        "loaded p99": loaded["itl_ms"]["p99"],
        "first": of_prompts["ttft_ms"]["median"],
        "tokens": of_prompts["input_tokens"] / number,
    }


class Load:
    """A running `sgl bench serving`."""

    def __init__(
        self, url: str, to: Path, rate: float, count: int, num_words: int, num_tokens: int, seed: int
    ) -> None:
        given = {"url": url, "request-rate": rate, "num-prompts": count, "input-len": num_words}
        given |= {"output-len": num_tokens, "seed": seed, "arrivals": "fixed", "warmup": 0, "output": to}
        options = [f"--{name}={value}" for name, value in given.items()]
        command = [sys.executable, "-m", "sgl", "bench", "serving", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._to = to

    def report(self) -> dict[str, Any]:
        """Wait for it. Raises SystemExit if a request failed."""
        self._process.wait(PATIENCE)
        found: dict[str, Any] = json.loads(self._to.read_text())
        if found["failed"]:
            raise SystemExit(f"{found['failed']} requests failed: {found['errors']}")
        return found


if __name__ == "__main__":
    main()
