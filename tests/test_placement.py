"""Which engine gets what: shared beginnings meet, work stays even, and nothing that a client sends hurts."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl.errors import EngineDead
from sgl.lang.ir import nodes as ir
from sgl.runtime.config import EngineConfig
from sgl.runtime.server import placement as module
from sgl.runtime.server.placement import GENERATED, Future, Placement, future_of, future_of_program
from sgl.runtime.server.replicas import Replicas

SYSTEM = "You are a careful assistant who answers in one word. " * 40


def placed(placement: Placement, prompt: str | list[int], among: list[int], **params: Any) -> int:
    return placement.place(future_of(prompt, {"max_new_tokens": 4, **params}), among)[0]


def test_requests_with_the_same_beginning_meet() -> None:
    placement = Placement(3)
    beginnings = [f"{i} " + SYSTEM for i in range(3)]
    homes = [placed(placement, text, [0, 1, 2]) for text in beginnings]
    assert sorted(homes) == [0, 1, 2]
    for turn in range(5):
        for home, text in zip(homes, beginnings, strict=True):
            assert placed(placement, text + f" turn {turn}" * 9, [0, 1, 2]) == home


def test_a_beginning_is_computed_again_elsewhere_where_that_costs_less() -> None:
    placement = Placement(2)
    engine, work = placement.place(future_of(SYSTEM, {"max_new_tokens": 4}), [0, 1])
    placement.end(engine, work)
    chosen = [placed(placement, SYSTEM + str(i), [0, 1], max_new_tokens=50) for i in range(20)]
    assert chosen[:4] == [0, 0, 0, 1]  # three outputs of 50 tokens take as long as a prompt of 540
    assert chosen.count(0) == pytest.approx(11, abs=1)


def test_short_requests_take_turns() -> None:
    placement = Placement(4)
    ended = []
    for i in range(40):
        engine, work = placement.place(future_of("hi", {"max_new_tokens": 1}), range(4))
        placement.end(engine, work)
        ended.append(engine)
        assert ended.count(engine) <= i // 4 + 1


@given(
    st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000), st.booleans()), max_size=60)
)
def test_work_stays_even_and_returns_to_nothing(number: int, requests: list[tuple[int, int, bool]]) -> None:
    """Without shared beginnings, no engine is ahead by more than one request (Graham's list scheduling)."""
    placement = Placement(number)
    going: list[tuple[int, float]] = []
    rng = random.Random(number)
    largest = 0.0
    for prompt, generated, ends in requests:
        engine, work = placement.place(Future([], 1, prompt, generated), range(number))
        assert work == prompt + GENERATED * generated
        largest = max(largest, work)
        going.append((engine, work))
        if not ends:
            continue
        placement.end(*going.pop(rng.randrange(len(going))))
    if not any(ends for *_, ends in requests):
        assert max(placement._work) - min(placement._work) <= largest
    for engine, work in going:
        placement.end(engine, work)
    assert placement._work == pytest.approx([0.0] * number, abs=1e-6)


def test_only_engines_that_serve_are_chosen_and_a_restarted_one_has_no_cache() -> None:
    placement = Placement(2)
    future = future_of(SYSTEM, {"max_new_tokens": 4})
    engine, work = placement.place(future, [1])
    placement.end(engine, work)
    assert engine == 1
    assert placement.found(1, future) > 400
    assert placed(placement, SYSTEM, [0, 1]) == 1
    placement.forget(1)
    assert placement.found(1, future) == 0
    assert placed(placement, SYSTEM, [0, 1]) == 0
    with pytest.raises(EngineDead, match="no engine is running"):
        placed(placement, "a", [])


def test_token_ids_texts_and_keys_are_kept_apart() -> None:
    ids = list(range(1000))
    assert len(future_of(ids, None).blocks) == 1000 // 16
    assert future_of(ids, None).blocks[-1] != future_of(ids, None, "key").blocks[-1]
    assert future_of([*ids[:500], 7, *ids[501:]], None).blocks[:31] == future_of(ids, None).blocks[:31]
    assert future_of([*ids[:500], 7, *ids[501:]], None).blocks[31] != future_of(ids, None).blocks[31]


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        (None, None),
        ("a" * 50_000_000, {}),
        ([1] * 5_000_000, {"max_new_tokens": 10**30, "n": 10**30}),
        ("a", {"max_new_tokens": math.nan, "n": -3}),
        ("a", {"max_new_tokens": "many", "n": None}),
        ("a", [1, 2]),
        ([[], {}, "x"] * 100, {}),
        ({"a": 1}, {}),
        ([math.nan] * 100, {"max_new_tokens": True}),
    ],
    ids=range(9),
)
def test_whatever_comes_is_bounded(prompt: Any, params: Any) -> None:
    future = future_of(prompt, params)
    assert len(future.blocks) <= module.MOST_BLOCKS
    assert math.isfinite(future.prompt)
    assert 0 <= future.generated < 1e12
    Placement(2).place(future, [0, 1])


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 100)
    placement = Placement(1)
    first = future_of([1] * 1000, None)
    placement.place(first, [0])
    for i in range(50):
        placement.place(future_of([i] * 200, None), [0])
        placement.place(future_of([1] * 16, None), [0])
    assert len(placement._known[0]) <= 100
    assert placement.found(0, first) == 16  # what was asked for again stays


def test_a_program_is_placed_by_all_that_it_will_do() -> None:
    program = ir.Program("p", 0, defaults={"max_tokens": 10}, args={"q": "w" * 400})
    nodes: list[tuple[int, ir.Node]] = [
        (0, ir.RoleBegin("user")),
        (0, ir.Text("t" * 400)),
        (0, ir.Arg("q")),
        (0, ir.RoleEnd("user")),
        (0, ir.Gen("a", {"max_tokens": 50, "n": 2})),
        (0, ir.Text("x" * 4000)),
        (0, ir.Fork((1, 2))),
        (1, ir.Gen("b", {"max_tokens": 10_000})),
        (2, ir.Text("y" * 400)),
        (2, ir.Select("c", ("yes", "perhaps"))),
        (2, ir.Gen("d")),
    ]
    future = future_of_program(program, ir.Segment(tuple(nodes)))
    assert future.generated == 2 * 50 + module.MOST_GENERATED + 10
    assert future.prompt == pytest.approx((400 + 400 + 4000 + 400 + 10 + 12) / 4, abs=2)
    assert len(future.blocks) == (400 + 400 + 12) // 64  # up to the first gen
    other = future_of_program(ir.Program("p", 9, args={"q": "w" * 200 + "v" * 200}), ir.Segment(tuple(nodes)))
    assert future.blocks[:9] == other.blocks[:9]
    assert future.blocks[-1] != other.blocks[-1]


def test_a_long_program_is_looked_at_for_a_while() -> None:
    nodes = tuple((0, ir.Gen(str(i), {"max_tokens": 1})) for i in range(100_000))
    assert future_of_program(ir.Program("p", 0), ir.Segment(nodes)).generated == module.MOST_NODES


class FakeEngine:
    """An engine's answers, and how many of its events were taken."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.taken = 0
        self.is_up = True
        self.config = EngineConfig(dp_size=2)

    def heartbeat_age(self) -> float:
        return 0.0

    async def generate(self, **arguments: Any) -> Any:
        await asyncio.sleep(0)
        if self.fails:
            raise EngineDead("this one fails")
        await asyncio.sleep(1000)

    async def stream(self, **arguments: Any) -> AsyncGenerator[dict[str, Any], None]:
        while True:
            self.taken += 1
            yield {"index": 0}
            await asyncio.sleep(0)


def replicas(*, fails: bool) -> tuple[Replicas, list[FakeEngine]]:
    made = Replicas(EngineConfig(dp_size=2), configure=print)
    engines = [FakeEngine(fails), FakeEngine(fails)]
    made._engines = engines  # type: ignore[assignment]
    return made, engines


def test_a_call_that_fails_leaves_no_work_behind() -> None:
    """Also of the parts that were cancelled before they began."""

    async def check() -> None:
        made, _ = replicas(fails=True)
        with pytest.raises(EngineDead, match="this one fails"):
            await made.generate(prompt=["a", "b"] * 50)
        made, _ = replicas(fails=False)
        task = asyncio.ensure_future(made.generate(prompt=["a", "b"]))
        await asyncio.sleep(0)  # its parts have not begun
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made._placement._work == pytest.approx([0.0, 0.0])
        assert made._rids == set()

    asyncio.run(check())


def test_a_stream_that_is_not_read_takes_no_events() -> None:
    async def check() -> None:
        made, engines = replicas(fails=False)
        async with aclosing(made.stream(prompt=["a", "b"])) as events:
            await anext(events)
            for _ in range(200):
                await asyncio.sleep(0)
            assert sum(engine.taken for engine in engines) < 8
        assert made._placement._work == pytest.approx([0.0, 0.0])

    asyncio.run(check())


def test_a_long_list_is_placed_in_bundles() -> None:
    made, _ = replicas(fails=False)
    placed: list[Future] = []
    place = made._placement.place
    made._placement.place = lambda future, among: (placed.append(future), place(future, among))[1]  # type: ignore
    parts = made._parts({"prompt": ["a" * 100_000] * 65_536, "sampling_params": {"n": 1}})
    assert len(placed) <= 64
    assert sorted(i for part in parts for i in part.prompts) == list(range(65_536))
    assert sorted(i for part in parts for i in part.places) == list(range(65_536))
    placed.clear()
    [part] = made._parts({"prompt": ["a"] * 1_000_000})  # an engine refuses it
    assert (len(placed), part.prompts) == (1, [])
