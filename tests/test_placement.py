"""Which engine gets what: shared beginnings meet, work stays even, and nothing that a client sends hurts."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl.errors import EngineDead
from sgl.lang.ir import nodes as ir
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.server import placement as module
from sgl.runtime.server.placement import (
    GENERATED,
    MOST_GENERATED,
    Future,
    Placement,
    future_of,
    future_of_program,
    future_of_prompts,
)

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


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 4000), st.integers(0, 2000)), max_size=64
    ),
)
def test_no_engine_gets_more_than_the_mean_and_one_bundle(
    number: int, bundles: list[tuple[int, int, int, int]]
) -> None:
    """Also where bundles share beginnings, which make work less."""
    futures = [
        Future([hash((family, i)) for i in range(blocks)], 16, 16 * blocks + own, generated)
        for family, blocks, own, generated in bundles
    ]
    placement = Placement(number)
    placed = placement.place_all(futures, range(number))
    assert len(placed) == len(futures)
    assert all(0 <= work <= future.work for future, (_, work) in zip(futures, placed, strict=True))
    mean = sum(work for _, work in placed) / number
    assert max(placement._work) <= mean + max((each.work for each in futures), default=0) + 1e-6
    for engine, work in placed:
        placement.end(engine, work)
    assert placement._work == pytest.approx([0.0] * number, abs=1e-6)


def test_the_largest_come_first_and_answers_keep_their_places() -> None:
    placement = Placement(2)
    placed = placement.place_all([Future([], 1, size, 0) for size in (1, 1, 2, 4)], [0, 1])
    assert placed == [(1, 1), (1, 1), (1, 2), (0, 4)]
    with pytest.raises(EngineDead, match="no engine is running"):
        placement.place_all([Future([], 1, 1, 0)], [])


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, 128),
        (None, 128),
        ({"max_new_tokens": None, "ignore_eos": True}, 128),
        ({"max_new_tokens": 100}, 100),
        ({"max_new_tokens": 1000}, MOST_GENERATED),
        ({"max_new_tokens": 1000, "ignore_eos": False}, MOST_GENERATED),
        ({"max_new_tokens": 1000, "ignore_eos": "yes"}, MOST_GENERATED),
        ({"max_new_tokens": 1000, "ignore_eos": True}, 1000),
        ({"max_new_tokens": 1000, "ignore_eos": True, "n": 3}, 3000),
        ({"max_new_tokens": 1000, "ignore_eos": True, "stop": None, "stop_token_ids": [], "regex": None}, 1000),
        ({"max_new_tokens": 1000, "ignore_eos": True, "stop": ["."]}, MOST_GENERATED),
        ({"max_new_tokens": 1000, "ignore_eos": True, "stop_token_ids": [7]}, MOST_GENERATED),
        ({"max_new_tokens": 1000, "ignore_eos": True, "stop_regex": "a+"}, MOST_GENERATED),
        ({"max_new_tokens": 1000, "ignore_eos": True, "json_schema": {}}, MOST_GENERATED),
        ({"max_new_tokens": 10**8, "ignore_eos": True}, 4096 - 96),  # the model's context ends it
        (SamplingParams(max_new_tokens=1000, ignore_eos=True), 1000),
        (SamplingParams(max_new_tokens=1000, ignore_eos=True, stop="."), MOST_GENERATED),  # type: ignore[arg-type]
        (SamplingParams(max_new_tokens=1000), MOST_GENERATED),
    ],
)
def test_an_output_that_only_its_limit_ends_counts_in_full(params: Any, expected: float) -> None:
    assert future_of([1] * 96, params, context=4096).generated == expected
    samples = params.get("n", 1) if isinstance(params, dict) else 1
    for several in ([params] * 5, params):
        bundle = future_of_prompts([[i] * 96 for i in range(5)], several, [samples] * 5, context=4096)
        assert (bundle.generated, bundle.prompt) == (5 * expected, 5 * 96)


def test_a_bundle_needs_what_its_prompts_need_but_shared_beginnings_once() -> None:
    own = [[1000 + i] * 50 for i in range(8)]
    beginning, other = list(range(640)), list(range(5000, 5640))
    assert future_of_prompts(own, {}, [1] * 8).prompt == 8 * 50
    together = future_of_prompts([beginning + each for each in own], {}, [1] * 8)
    assert together.prompt == 640 + 8 * 50
    two = [(beginning if i < 4 else other) + each for i, each in enumerate(own)]
    assert future_of_prompts(two, {}, [1] * 8).prompt == 8 * 690 - 5 * 640  # not 6: four are looked into
    nearly = [beginning[:-1] + each for each in own]
    assert future_of_prompts(nearly, {}, [1] * 8).prompt == 8 * 689 - 7 * 624  # whole blocks
    texts = ["a" * 6400 + str(i) * 400 for i in range(8)]
    assert future_of_prompts(texts, {}, [1] * 8).prompt == 1600 + 8 * 100


@given(st.integers(0, 600), st.integers(0, 200), st.integers(0, 200), st.integers(1, 20), st.booleans())
def test_blocks_that_two_prompts_begin_with(shared: int, left: int, right: int, size: int, as_text: bool) -> None:
    ids = [i * i % 251 for i in range(shared)]
    one, other = [*ids, *[300] * left], [*ids, *[301] * right]
    expected = min(shared // size, module.MOST_BLOCKS)
    if as_text:
        assert module._shared("".join(map(chr, one)), "".join(map(chr, other)), size) == expected
    assert module._shared(one, other, size) == expected
    assert module._shared(one, one, size) == min(len(one) // size, module.MOST_BLOCKS)
    assert module._shared(one, "".join(map(chr, one)), size) == 0


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
