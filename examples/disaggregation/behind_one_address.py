"""A prefill and a decode server behind a gateway: clients send plain requests, and know of neither.

    python examples/disaggregation/behind_one_address.py [--model PATH] [--transport cuda_ipc]

Starts `sgl serve` twice and `sgl gateway` before them, asks, and stops them. More servers of either kind are further
`--worker`s (docs/disaggregation.md). With `cuda_ipc`, pages go from GPU to GPU; each server wants one of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import requests

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="embedded")
parser.add_argument("--transport", default="tcp")
given = parser.parse_args()
model, transport = given.model, ("--disaggregation-transport", given.transport)


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[str]:
    """An `sgl` command that serves; its URL."""
    command = [sys.executable, "-m", "sgl", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://\S+", said)
        assert found, said
        try:
            yield found[0]
        finally:
            process.terminate()


with (
    started("serve", model, "--disaggregation-mode", "prefill", *transport) as prefill,
    started("serve", model, "--disaggregation-mode", "decode", *transport) as decode,
    started("gateway", "--worker", prefill, "--worker", decode, "--min-prefill-tokens", "16") as url,
):
    while requests.get(f"{url}/workers", timeout=60).json()["stats"]["regular_count"]:
        time.sleep(0.1)  # the gateway looks at its workers every second
    prompt = "The committee met on Monday and talked about the new bridge over the river. " * 4
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=600)
    answer.raise_for_status()
    usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    where = "the decode server" if answer.headers["X-Sgl-Worker"] == decode else "another server"
    print(
        f"{where} answered, and computed {usage['prompt_tokens'] - cached} of {usage['prompt_tokens']} prompt tokens"
    )
    counts = re.findall(r"^sgl_gateway_pairs_total\S+ \S+$", requests.get(f"{url}/metrics", timeout=60).text, re.M)
    print(*counts, sep="\n")
