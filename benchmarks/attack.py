"""A plain request beside hostile clients: its latency over the idle server's, what the server's processes hold, answers
of 5xx, and the ledger of pages in the end.

    python -m benchmarks.attack [--model FOLDER] [--constraints 10000] [--mutants 6000] [--seed 0] [--only NAME …]

`sgl serve` runs in a process of its own. For each kind of attack a plain request is sent again and again, by turns with
the attack at rest and under way, so that both are measured within the same minutes. A line for each: median and 95th
percentile of the plain request in ms, idle and beside it, the ratio of the medians, the largest resident memory (PSS of
all processes) and its growth, the attack's answers by status. The bar: a ratio of 3, 1,024 MiB more, no 5xx, a ledger
that adds up. Other work on the machine counts as the attack's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp

PLAIN = {"text": "hello", "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}}
SHORT = {"max_new_tokens": 8, "temperature": 0}
REST_SECONDS, PAUSE_SECONDS = 5.0, 0.02
LISTEN_SECONDS = 5.0  # to a program, before its client goes
AT_ONCE = 8  # connections of the attack
Send = Callable[[str, Any], Awaitable[None]]


# ── what is sent ────────────────────────────────────────────────────────────────────────────────────────────────


def generate(**constraint: Any) -> tuple[str, Any]:
    """A request for a short text under a constraint."""
    return "/generate", {"text": "hello", "sampling_params": {**SHORT, **constraint}}


def small_constraints(number: int) -> Iterator[tuple[str, Any]]:
    """Different ones, a kind after the other."""
    for i in range(number):
        schema = {"type": "object", "properties": {f"k{i}": {"type": "integer"}}, "required": [f"k{i}"]}
        tag = {"triggers": [f"<t{i}"], "structures": [{"begin": f"<t{i}>", "schema": schema, "end": f"</t{i}>"}]}
        match i % 5:
            case 0:
                yield generate(regex=f"[a-c]{{1,4}}{i}")
            case 1:
                yield generate(json_schema=json.dumps(schema))
            case 2:
                yield "/v1/completions", {"prompt": "hello", "max_tokens": 8, "choices": [f"yes {i}", f"no {i}"]}
            case 3:
                yield generate(ebnf=f'root ::= "{i}" [a-z]* | "b" root')
            case 4:
                yield generate(structural_tag=json.dumps(tag))


def plain_neighbours(number: int) -> Iterator[tuple[str, Any]]:
    """No attack: what as many requests of the same length cost a request beside them that ask for nothing else."""
    for i in range(number):
        yield "/generate", {"text": f"hello {i}", "sampling_params": {**SHORT, "ignore_eos": True}}


def hostile_constraints(seed: int) -> Iterator[tuple[str, Any]]:
    """Of each kind what is small and asks for much, and what is large."""
    string = {"type": "string"}
    tags = [{"begin": f"<t{i:05d}>", "schema": {"type": "integer"}, "end": "</t>"} for i in range(10_000)]
    letters = "abcdefghijklmnop"[seed % 4 :]
    schemas: list[dict[str, Any]] = [
        {"type": "string", "minLength": 10**9, "maxLength": 10**9, "pattern": "^[a-z]*$"},
        {"type": "array", "minItems": 10**6},
        {"type": "array", "items": {"enum": list(range(3000))}, "uniqueItems": True, "minItems": 2500},
        {"type": "array", "prefixItems": [{"const": i} for i in range(5000)]},
        {"type": "object", "required": [f"k{i}" for i in range(30_000)]},
        {"enum": [f"{i:010d}" for i in range(50_000)]},
        {"allOf": [{"type": "string", "pattern": f"{letters[0]}.{{{i}}}b"} for i in range(14)]},
        {"oneOf": [{**string, "pattern": f"^.*{i}.*{i}.*$"} for i in range(12)]},
        {"type": "object", "patternProperties": {f"a.*{i}": string for i in range(14)}},
        {"type": "integer", "multipleOf": 99_991},
        {"anyOf": [{"properties": {f"k{i}": {"const": i}}, "required": [f"k{i}"]} for i in range(1000)]},
    ]
    for schema in schemas:
        yield generate(json_schema=json.dumps({**schema, "title": str(seed)}))
    look_aheads = "".join(f"(?=.*{letter})" for letter in letters[:7])
    repeats = f"(a{{1000}}){{{1000 + seed}}}"
    alternatives = "|".join(f"{seed}a{i}.*b{i}" for i in range(2000))
    for regex in (repeats * 2, f"(a|b)*a(a|b){{{40 + seed}}}", look_aheads + ".{100,}", alternatives):
        yield generate(regex=regex)
    for structures, triggers in ((tags, ["<t"]), (tags, [one["begin"][:-1] for one in tags])):
        yield generate(structural_tag=json.dumps({"triggers": triggers, "structures": structures, "seed": seed}))
    rules = "\n".join(f'r{i} ::= "x{i}" [a-z]* r{i}?' for i in range(90_000))
    ebnfs = [
        f"root ::= r0\n# {seed}\n{rules}",
        f"root ::= r0\n# {seed}\n{rules[: 1 << 19].rpartition(chr(10))[0]}",
        f'root ::= root root root | "a" | "b" root | root "c" | "" | "{seed}"',
        f'root ::= x{{0,200}} x{{0,200}} x{{0,200}} "{seed}"\nx ::= [a-z]*',
        f'start: (w | "a" w){{0,50}} "{seed}"\nw: /[a-z]*/ | /[a-c]+/',
    ]
    for ebnf in ebnfs:
        yield "/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 64, "ebnf": ebnf}}


def mutated_programs(number: int, seed: int) -> Iterator[tuple[str, Any]]:
    """A program with one to three values replaced, removed or repeated."""
    rng = random.Random(seed)
    odd = [None, True, -1, 0, 1e9, 10**30, "", "x" * 1000, [], {}, [[]], {"a": {}}, "\ud800", 0.5, "gen", [1] * 100]
    nodes: list[dict[str, Any]] = [
        {"st": 0, "op": "text", "text": "hello "},
        {"st": 0, "op": "gen", "name": "x", "params": {"max_tokens": 4, "n": 2, "stop": ["q"], "temperature": 0.5}},
        {"st": 0, "op": "gen", "name": "c", "params": {"max_tokens": 4}, "constraint": {"regex": "[a-z]+"}},
        {"st": 0, "op": "fork", "children": [1, 2]},
        {"st": 1, "op": "select", "name": "y", "choices": ["a", "b"], "method": "token_length_normalized"},
        {"st": 2, "op": "ref", "stream": 0, "index": 1, "functions": [["strip"], ["replace", "a", "bb"]]},
        {"st": 2, "op": "scope_begin", "name": "s"},
        {"st": 2, "op": "arg", "name": "given"},
        {"st": 2, "op": "scope_end", "name": "s"},
        {"st": 0, "op": "join", "children": [1, 2], "mode": "append"},
    ]
    program = {"v": 1, "name": "p", "seed": 1, "args": {"given": "text"}, "deadline_s": 5.0}
    good = {"program": program, "segment": {"nodes": nodes, "final": True}}
    for _ in range(number):
        body = json.loads(json.dumps(good))
        for _ in range(rng.randint(1, 3)):
            holder, key = rng.choice(list(places(body)))
            match rng.randrange(4):
                case 0 if isinstance(holder, list):
                    holder.insert(key, holder[key])
                case 1:
                    del holder[key]
                case _:
                    holder[key] = deepcopy(rng.choice(odd))  # a list that were shared might come to hold itself
        yield "/v1/programs", body


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or object inside with each of its indices or names."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def large_bodies(seed: int) -> Iterator[tuple[str, Any]]:
    """Megabytes of text, of ids, of wrong values, of messages, and of many prompts."""
    for _ in range(2):
        yield "/generate", {"text": f"the cat {seed} " * 500_000}
        yield "/generate", {"input_ids": [5] * 1_000_000}
        yield "/generate", {"input_ids": [""] * 1_000_000}
        yield "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 9_000}
        yield "/v1/chat/completions", {"messages": [{}] * 600_000}
        yield "/generate", {"text": ["a"] * 200, "sampling_params": {"max_new_tokens": 1, "n": 20}}
        yield "/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 1024, "sampling_params": SHORT}
        yield "/tokenize", {"text": "a b " * 1_000_000}


# ── the server and its clients ──────────────────────────────────────────────────────────────────────────────────


class Server:
    """An `sgl serve` process, and what its clients saw."""

    def __init__(self, url: str, pid: int, session: aiohttp.ClientSession) -> None:
        self.url, self.pid, self._session = url, pid, session
        self.statuses: Counter[int] = Counter()

    async def plain(self) -> float:
        """Milliseconds that a plain request takes."""
        began = time.perf_counter()
        async with self._session.post(self.url + "/generate", json=PLAIN) as answer:
            await answer.read()
            assert answer.status == 200, answer.status
        return 1e3 * (time.perf_counter() - began)

    async def send(self, path: str, body: Any) -> None:
        """One request of an attack; what comes of it is counted."""
        data = await asyncio.to_thread(lambda: json.dumps(body).encode())
        async with self._session.post(self.url + path, data=data) as answer:
            await answer.read()
            self.statuses[answer.status] += 1

    async def listen(self, path: str, body: Any) -> None:
        """One program, until it ends: some wait for a segment that never comes, and are left after a while."""
        data = json.dumps(body).encode()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LISTEN_SECONDS), self._session.post(self.url + path, data=data) as answer:
                self.statuses[answer.status] += 1
                await answer.read()

    async def leave(self, path: str, body: Any) -> None:
        """Begin to read a stream, and go."""
        async with self._session.post(self.url + path, json=body) as answer:
            self.statuses[answer.status] += 1
            await answer.content.readany()
            answer.close()

    async def state(self) -> dict[str, Any]:
        """What the engine does right now."""
        async with self._session.get(self.url + "/v1/status") as answer:
            state: dict[str, Any] = (await answer.json())["engine"]
            return state

    def resident_mib(self) -> float:
        """PSS of the server and of all processes below it (Linux)."""
        total, left = 0, [self.pid]
        while left:
            pid = left.pop()
            try:
                total += int(re.findall(r"^Pss: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)[0])
                for task in Path(f"/proc/{pid}/task").iterdir():
                    left += map(int, (task / "children").read_text().split())
            except (OSError, IndexError):  # it has ended
                continue
        return total / 1024


@asynccontextmanager
async def served(model: str) -> AsyncIterator[Server]:
    """A server, until the block ends."""
    command = [sys.executable, "-m", "sgl", "serve", model, "--port", "0", "--log-level", "error"]
    process = await asyncio.create_subprocess_exec(
        *command, "--max-total-tokens", "65536", "--check-ledger", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    found = re.search(r"http://\S+", line)
    assert found, line
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield Server(found[0], process.pid, session)
    process.terminate()
    await process.wait()


async def attacked(server: Server, send: Send, requests: Iterator[tuple[str, Any]]) -> tuple[list[float], float]:
    """The plain request's latencies, in ms, while the requests are sent, AT_ONCE at a time; and the most memory."""
    over, latencies, most = asyncio.Event(), [], [0.0]

    async def client() -> None:
        for path, body in requests:
            await send(path, body)

    async def watch() -> None:
        while not over.is_set():
            most[0] = max(most[0], await asyncio.to_thread(server.resident_mib))
            await asyncio.sleep(1.0)  # it takes milliseconds, and the memory's lock

    watching = asyncio.create_task(watch())
    attacking = asyncio.gather(*(client() for _ in range(AT_ONCE)))
    while not attacking.done():
        latencies.append(await server.plain())
        await asyncio.sleep(PAUSE_SECONDS)
    over.set()
    await attacking
    await watching
    return latencies, most[0]


async def at_rest(server: Server) -> list[float]:
    """The plain request's latencies, in ms, while nothing else is asked for."""
    end, latencies = time.monotonic() + REST_SECONDS, list[float]()
    while time.monotonic() < end:
        latencies.append(await server.plain())
        await asyncio.sleep(PAUSE_SECONDS)
    return latencies


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else values[0]


async def main() -> None:
    """Run the attacks one after the other and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--constraints", type=int, default=10_000)
    parser.add_argument("--mutants", type=int, default=6_000)
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=None, metavar="NAME")
    options = parser.parse_args()
    seed = options.seed
    stream = {**PLAIN, "stream": True, "sampling_params": {**PLAIN["sampling_params"], "max_new_tokens": 400}}  # type: ignore[dict-item]
    async with served(options.model) as server:
        attacks: dict[str, tuple[Send, Iterator[tuple[str, Any]]]] = {
            "neighbours": (server.send, plain_neighbours(options.constraints)),
            "constraints": (server.send, small_constraints(options.constraints)),
            "hostile": (server.send, hostile_constraints(seed)),
            "programs": (server.listen, mutated_programs(options.mutants, seed)),
            "bodies": (server.send, large_bodies(seed)),
            "streams": (server.leave, islice(iter(lambda: ("/generate", stream), None), options.streams)),
        }
        await at_rest(server)  # warm
        first = server.resident_mib()
        worst, failures = 0.0, 0
        header = ("attack", "idle", "p95", "beside", "p95", "max", "ratio", "s", "MiB", "more")
        print(f"{header[0]:<12}" + "".join(f"{name:>9}" for name in header[1:]) + "  answers", flush=True)
        for name in options.only or attacks:
            idle = await at_rest(server)
            server.statuses.clear()
            began = time.monotonic()
            beside, most = await attacked(server, *attacks[name])
            seconds = time.monotonic() - began
            idle += await at_rest(server)
            ratio = statistics.median(beside) / statistics.median(idle)
            worst, failures = max(worst, ratio), failures + sum(n for s, n in server.statuses.items() if s >= 500)
            figures = [statistics.median(idle), p95(idle), statistics.median(beside), p95(beside), max(beside)]
            row = [*figures, ratio, seconds, most, most - first]
            answers = " ".join(f"{status}:{count}" for status, count in sorted(server.statuses.items()))
            print(f"{name:<12}" + "".join(f"{value:9.1f}" for value in row) + "  " + answers, flush=True)
        while (state := await server.state())["num_running_reqs"] or state["num_queue_reqs"]:
            await asyncio.sleep(0.1)
        leaks = 65536 - state["kv_available_tokens"] - state["kv_evictable_tokens"]
        print(f"largest ratio {worst:.2f} (bar 3), answers of 5xx {failures} (bar 0)")
        last = server.resident_mib()
        print(
            f"tokens of KV that nobody owns {leaks} (bar 0), resident {first:.0f} MiB at first, {last:.0f} in the end"
        )


if __name__ == "__main__":
    asyncio.run(main())
