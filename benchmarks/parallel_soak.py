"""Random finishes and aborts on several ranks for minutes: nothing hangs, no call is lost, all pages get free.

    python -m benchmarks.parallel_soak MODEL [--seconds 600] [--clients 48] [--seed 0] [--option NAME=VALUE …]

MODEL is a folder with a tokenizer, or "embedded"; --option tp_size=2 makes two ranks, pp_size=2 two stages. Each client
asks one call after another: some plain, some constrained, with drafts of the past, logprobs, penalties or several
samples, some of them streams that are closed early, some aborted by their id, some cancelled. A greedy prompt comes
again and again and must be answered alike each time. Status 1 and what was wrong, if a call takes over --stuck seconds;
and where each thread is, if not even that can be told.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import faulthandler
import random
import time
from typing import Any

from sgl import Engine
from sgl.runtime.config import EngineConfig, parse_options

STARTING = 300  # seconds at most
_PROMPT = "The order of the day is"
_SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","yes"]}},"required":["a","b"]}'


def random_params(rng: random.Random) -> dict[str, Any]:
    """Parameters of one call."""
    params: dict[str, Any] = {
        "max_new_tokens": rng.choice([1, 2, 5, 17, 64, 200]),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.3]),
        "ignore_eos": rng.random() < 0.5,
    }
    kind = rng.randrange(8)
    if kind == 0:
        params["regex"] = rng.choice(["[a-z ]{1,40}", "([0-9]{2},)*end", "(yes|no)"])
    elif kind == 1:
        params["json_schema"] = _SCHEMA
    elif kind == 2:
        params |= {"top_k": rng.choice([1, 5, 50]), "top_p": rng.choice([0.3, 0.9])}
    elif kind == 3:
        params |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": rng.randrange(100)}
    elif kind == 4:
        params["stop"] = rng.choice([" a", "e", "\n"])
    elif kind == 5:
        params["n"] = rng.choice([2, 4])
    return params


class Soak:
    """What the clients of one engine have counted."""

    def __init__(self, engine: Engine, seconds: float, stuck: float) -> None:
        self.engine = engine
        self.until = time.monotonic() + seconds
        self._stuck = stuck
        self.ended: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._expected: str | None = None

    async def client(self, number: int, seed: int) -> None:
        """One call after another until the time is over."""
        rng = random.Random(seed * 100_003 + number)
        while time.monotonic() < self.until and not self.wrong:
            try:
                async with asyncio.timeout(self._stuck):
                    await self._call(rng, f"{number}-{rng.random()}")
            except TimeoutError:
                self.wrong.append(f"a call of client {number} was not answered within {self._stuck:g} s")

    async def _call(self, rng: random.Random, rid: str) -> None:
        kind = rng.choice(["known", "whole", "whole", "abort", "cancel", "stream", "close"])
        if kind == "known":
            answer: Any = await self.engine.async_generate(_PROMPT, {"max_new_tokens": 24, "temperature": 0.0})
            self._expected = self._expected or answer["text"]
            if answer["text"] != self._expected:
                self.wrong.append(f"{_PROMPT!r} gave {self._expected!r} and then {answer['text']!r}")
            self.ended["known"] += 1
            return
        prompt = " ".join(
            rng.choices(["red", "order", "of", "tea", "7", "{", "day", "is"], k=rng.randrange(1, 200))
        )
        params = random_params(rng)
        logprob = rng.random() < 0.2
        if kind in ("stream", "close"):
            params.pop("n", None)
            events: Any = await self.engine.async_generate(prompt, params, stream=True, return_logprob=logprob)
            left = rng.randrange(1, 12) if kind == "close" else 10**6
            async with contextlib.aclosing(events) as events:
                async for _ in events:
                    left -= 1
                    if not left:
                        break
            self.ended[kind] += 1
            return
        call = asyncio.ensure_future(self.engine.async_generate(prompt, params, rid=rid, return_logprob=logprob))
        if kind in ("abort", "cancel"):
            await asyncio.wait([call], timeout=rng.random() * 0.2)
            if kind == "cancel":
                call.cancel()
            else:
                await asyncio.to_thread(self.engine.abort, rid)
        try:
            answers: Any = await call
        except asyncio.CancelledError:
            if kind != "cancel":
                raise
            self.ended["cancelled"] += 1
            return
        for answer in answers if isinstance(answers, list) else [answers]:
            self.ended[answer["meta_info"]["finish_reason"]["type"]] += 1


async def _run(engine: Engine, clients: int, seed: int, seconds: float, stuck: float) -> Soak:
    soak = Soak(engine, seconds, stuck)
    asking = [asyncio.ensure_future(soak.client(number, seed)) for number in range(clients)]
    while not all(each.done() for each in asking):
        await asyncio.wait(asking, timeout=min(30.0, seconds))
        print(f"{max(0.0, soak.until - time.monotonic()):5.0f} s left: {dict(soak.ended)}", flush=True)
    await asyncio.gather(*asking)
    return soak


def _of_engine(engine: Engine, name: str) -> int:
    return int(engine.get_server_info()["internal_states"][0][name])


def soak(engine: Engine, *, clients: int, seed: int, seconds: float, stuck: float = 60.0) -> Soak:
    """Run the clients, then look whether all that they held is free; `wrong` of what it returns says what is not."""
    done = asyncio.run(_run(engine, clients, seed, seconds, stuck))
    deadline = time.monotonic() + stuck
    while left := sum(_of_engine(engine, name) for name in ("num_running_reqs", "num_queue_reqs")):
        if time.monotonic() > deadline:
            done.wrong.append(f"{left} requests run or wait though no call is left")
            break
        time.sleep(0.05)
    done.wrong += engine.check_ledger()
    if not engine.flush_cache():
        done.wrong.append("the cache cannot be flushed: somebody holds pages")
    return done


def main() -> None:
    """Run; say what ended how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stuck", type=float, default=60)
    parser.add_argument("--option", action="append", default=[], help="of the engine, NAME=VALUE")
    given = parser.parse_args()
    faulthandler.dump_traceback_later(given.seconds + STARTING + 3 * given.stuck, exit=True)
    options: Any = parse_options(EngineConfig, dict(option.split("=", 1) for option in given.option))
    with Engine(given.model, **options) as engine:
        done = soak(engine, clients=given.clients, seed=given.seed, seconds=given.seconds, stuck=given.stuck)
    print(f"{sum(done.ended.values()):,} calls: {dict(done.ended)}")
    if done.wrong:
        raise SystemExit("\n".join(done.wrong[:20]))
    print("nothing hung, every page is free")


if __name__ == "__main__":
    main()
