"""Same seed, same text: alone, in a batch of any order, in forks, with and without streaming."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sgl
from sgl.lang.ir import nodes as ir
from tests.lang_mocks import MockBackend, ProgramBackend


@sgl.function
def program(s, question):
    """Gens in a line, in forks of forks, several samples, in a nested program."""
    s += question + sgl.gen("a") + sgl.gen("many", n=3)
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += f"{i}" + sgl.gen("b")
        inner = fork.fork(2)
        inner += sgl.gen("c")
        inner.join()
    forks.join()
    s["nested"] = nested("n")["d"]


@sgl.function
def nested(s, text):
    """Called by another program."""
    s += text + sgl.gen("d")


def values(state: Any) -> dict[str, Any]:
    """Everything that was generated."""
    return {name: state[name] for name in ("a", "many", "b", "c", "nested")}


ROWS = [{"question": f"q{i}"} for i in range(12)]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What seed 7 gives when a row is run alone."""
    return values(program.run("q0", backend=MockBackend(), seed=7))


def test_every_node_and_sample_has_a_seed_of_its_own(expected: dict[str, Any]) -> None:
    flat = [expected["a"], *expected["many"], *expected["b"], *[t for texts in expected["c"] for t in texts]]
    assert len({text.split(":")[1] for text in [*flat, expected["nested"]]}) == 1 + 3 + 3 + 6 + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("backend", [MockBackend, ProgramBackend])
def test_alone_and_streamed(expected: dict[str, Any], stream: bool, backend: Any) -> None:
    assert values(program.run("q0", backend=backend(), seed=7, stream=stream)) == expected


def test_in_a_batch_of_any_order(expected: dict[str, Any]) -> None:
    for order in (ROWS, random.Random(0).sample(ROWS, len(ROWS))):
        states = program.run_batch(order, backend=MockBackend(together=3), seed=7, num_threads=3)
        assert [values(state) for state in states] == [expected] * len(ROWS)  # the mock's text is its seed


def test_in_an_event_loop(expected: dict[str, Any]) -> None:
    async def main() -> Any:
        return await program.arun_batch(ROWS, backend=MockBackend(), seed=7)

    assert [values(state) for state in asyncio.run(main())] == [expected] * len(ROWS)


def test_another_seed_and_no_seed_give_other_texts(expected: dict[str, Any]) -> None:
    assert values(program.run("q0", backend=MockBackend(), seed=8))["a"] != expected["a"]
    states = program.run_batch(ROWS, backend=MockBackend())
    assert len({state["a"] for state in states}) == len(ROWS)
    again = program.run("q0", backend=MockBackend(), seed=states[0].seed)
    assert values(again) == values(states[0])


def test_a_seed_of_a_gen_is_taken_as_it_is() -> None:
    @sgl.function
    def seeded(s):
        s += sgl.gen("x", seed=42, n=2)

    backend = MockBackend()
    seeded.run(backend=backend).sync()
    seeds = backend.calls[0][1].seeds
    assert seeds[0] == 42
    assert seeds[1] != 42


def test_a_seed_depends_on_what_came_before_only_by_its_place() -> None:
    @sgl.function
    def changed(s, text):
        s += text + sgl.gen("x")

    assert len({changed.run(text, backend=MockBackend(), seed=1)["x"] for text in "abc"}) == 1


@given(st.integers(0, 2**63 - 1), st.text(alphabet="0123456789./", max_size=20), st.integers(0, 1023))
def test_node_seeds_are_63_bits_and_differ_by_sample(seed: int, path: str, sample: int) -> None:
    found = ir.node_seed(seed, path, sample)
    assert 0 <= found < 2**63
    assert found == ir.node_seed(seed, path, sample)
    assert found != ir.node_seed(seed, path, sample + 1)
    assert found != ir.node_seed(seed + 1, path, sample)
