"""A state is a mapping of its variables: names, texts, objects, and plain data of them all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Literal

import pydantic
import pytest

import sgl
from sgl.errors import InvalidRequest, ProgramError
from tests.lang_mocks import MockBackend


class Order(pydantic.BaseModel):
    """What a gen below yields."""

    item: str
    quantity: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TEXTS = {
    "plain": "tea",
    "order": '{"item": "tea", "quantity": 2}',
    "mood": "good",
    "number": "3 ",
    "call": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
}
ORDER = sgl.gen("order", schema=Order)


def backend(**more: Any) -> MockBackend:
    return MockBackend(lambda prompt, params: TEXTS.get(str(params.node.name), "?"), **more)


@sgl.function
def everything(s: sgl.ProgramState) -> None:
    """Every kind of variable."""
    s += sgl.gen("plain") + sgl.gen() + ORDER + sgl.gen("mood", schema=Literal["good", "bad"])
    s += sgl.gen("number", dtype=int) + sgl.select("choice", ["a", "b"]) + sgl.gen("call", tools=[add])
    s["set"] = "by Python"
    with s.var_scope("scope"):
        s += "in " + sgl.gen("plain")
    branches = s.fork(2)
    branches += sgl.gen("number", dtype=int)
    branches.join()


NAMES = ["plain", "order", "mood", "number", "choice", "call", "set", "scope"]


def test_a_state_is_a_mapping_of_its_variables_in_the_order_in_which_they_were_set() -> None:
    state = everything.run(backend=backend())
    assert isinstance(state, Mapping)
    assert list(state) == list(state.keys()) == NAMES
    assert len(state) == len(NAMES)
    assert dict(state) == {**state} == state.variables() == {name: state[name] for name in NAMES}
    assert list(state.values()) == [state[name] for name in NAMES]
    assert dict(state.items())["order"] == TEXTS["order"]
    assert state["number"] == ["3 ", "3 "]
    assert "plain" in state
    assert None not in state


def test_plain_data_is_what_json_holds() -> None:
    data = everything.run(backend=backend()).to_dict()
    assert data == json.loads(json.dumps(data))
    assert data == {
        "plain": "tea",
        "order": {"item": "tea", "quantity": 2},
        "mood": "good",
        "number": [3, 3],
        "choice": "b",
        "call": [{"name": "add", "arguments": {"a": 1, "b": 2}, "content": "3"}],
        "set": "by Python",
        "scope": "in tea",
    }


def test_samples_are_plain_data_one_by_one() -> None:
    @sgl.function
    def several(s: sgl.ProgramState) -> None:
        s += sgl.gen("order", schema=Order, n=2)

    assert several.run(backend=backend()).to_dict() == {"order": [{"item": "tea", "quantity": 2}] * 2}


def test_a_state_stays_itself_beside_its_variables() -> None:
    @sgl.function
    def silent(s: sgl.ProgramState) -> None:
        s += "nothing"

    first, second = silent.run(backend=backend()), silent.run(backend=backend())
    assert first  # also without variables
    assert first != second
    assert len({first, second}) == 2
    assert (len(first), first.variables(), first.to_dict()) == (0, {}, {})


def test_a_missing_variable_has_a_default_and_a_failed_one_an_error() -> None:
    state = everything.run(backend=backend())
    assert state.get("plain") == "tea"
    assert state.get("orders") is None
    assert state.get("orders", "none") == "none"
    with pytest.raises(ProgramError, match="did you mean 'order'"):
        state["orders"]
    failed = everything.run(backend=backend(fail_on=["order"]))
    for look in (failed.variables, failed.to_dict, lambda: failed.get("order"), lambda: dict(failed)):
        with pytest.raises(ProgramError, match="told to fail"):
            look()


def test_a_streaming_state_is_complete_before_it_is_listed() -> None:
    mock = backend(held=["plain"])

    @sgl.function
    def late(s: sgl.ProgramState) -> None:
        s += sgl.gen("plain")
        if s["plain"]:
            s += sgl.gen("mood")

    state = late.run(stream=True, backend=mock)
    mock.release()
    assert list(state) == ["plain", "mood"]
    state = late.run(stream=True, backend=backend())
    assert state.variables() == {"plain": "tea", "mood": "good"}
    state = late.run(stream=True, backend=backend())
    assert state.get("moods", "none") == "none"


def test_a_body_sees_the_variables_so_far() -> None:
    @sgl.function
    def body(s: sgl.ProgramState) -> list[Any]:
        s += sgl.gen("plain")
        before = [*s]
        s += sgl.gen("mood")
        [branch] = s.fork(1)
        branch += sgl.gen("order", schema=Order)
        return [before, [*s], branch.to_dict()]

    before, after, of_branch = body.run(backend=backend()).ret_value
    assert (before, after) == (["plain"], ["plain", "mood"])
    assert of_branch == {"plain": "tea", "mood": "good", "order": {"item": "tea", "quantity": 2}}


def test_a_value_is_looked_up_by_its_gen_and_parsed_as_any_type() -> None:
    state = everything.run(backend=backend())
    assert state.value(ORDER) == state.value("order") == Order(item="tea", quantity=2)
    assert state.value("order", dict[str, str | int]) == {"item": "tea", "quantity": 2}
    assert state.value("number", int) == [3, 3]
    assert state.value(sgl.select("choice", ["a"])) == "b"
    assert state.value("mood", Literal["good"]) == "good"
    state["json"] = "[1, 2]"
    assert state.value("json", list[int]) == [1, 2]
    with pytest.raises(ProgramError, match="'plain' does not match its schema"):
        state.value("plain", Order)
    with pytest.raises(ProgramError, match="'json' does not match its schema"):
        state.value("json", Order)
    with pytest.raises(ProgramError, match="a gen or select that has one"):
        state.value(sgl.gen())
    with pytest.raises(InvalidRequest, match="is a function, not a type"):
        state.value("plain", add)


def test_asynchronous_states_have_the_same_looks() -> None:
    @sgl.function
    async def program(s: sgl.AsyncProgramState) -> list[Any]:
        s += sgl.gen("plain") + ORDER
        found = [await s.variables(), await s.to_dict(), await s.get("plain"), await s.get("none", 1)]
        return [*found, await s.value(ORDER), await s.value("order", dict)]

    async def main() -> list[Any]:
        return (await program.arun(backend=backend())).ret_value

    texts = {"plain": "tea", "order": TEXTS["order"]}
    order = {"item": "tea", "quantity": 2}
    assert asyncio.run(main()) == [texts, {"plain": "tea", "order": order}, "tea", 1, Order(**order), order]


@sgl.function
def echo(s: sgl.ProgramState, question: str, temperature: str = "") -> None:
    """A program with an argument that is named like an option."""
    s += question + temperature + sgl.gen("plain")


def test_options_are_given_beforehand_and_a_call_overrides_them() -> None:
    mock = backend()
    warm = echo.with_options(backend=mock, temperature=0.5, seed=7, max_tokens=9)
    assert warm.run("a").seed == 7
    warm.run("a", max_new_tokens=5, sampling={"temperature": 0.25})
    warm.with_options(top_k=3, sampling={"min_p": 0.5}).run(question="a", temperature="b", seed=8)
    warm.bind(question="a").run_batch([{}, {}])
    assert echo.with_options(chat_template="chatml").preview("a") == "a{plain}"
    keys = ("temperature", "max_tokens", "top_k", "min_p")
    given = [[params.sampling[key] for key in keys] for _, params in mock.calls]
    assert given == [[0.5, 9, -1, 0.0], [0.25, 5, -1, 0.0], [0.5, 9, 3, 0.5], *[[0.5, 9, -1, 0.0]] * 2]
    assert [prompt.text for prompt, _ in mock.calls] == ["a", "a", "ab", "a", "a"]


def test_an_unknown_option_is_refused_beforehand() -> None:
    with pytest.raises(TypeError, match=r"'temprature' is no option of a run.*did you mean 'temperature'"):
        echo.with_options(temprature=0)  # type: ignore[call-arg]
