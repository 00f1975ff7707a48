"""Programs with planted mistakes, for type checkers; tests/test_lang_types.py runs one over this file.

Every `type: ignore` stands on a mistake. Strict checkers refuse one that hides nothing, so each mistake is found and
nothing else is taken for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, assert_type

import sgl
from sgl.lang.ir.nodes import Gen
from sgl.lang.record.function import SglFunction
from sgl.lang.record.trace import Explanation
from sgl.lang.typed.tools import ToolCall


@dataclass
class Order:
    """What is asked for below."""

    item: str
    quantity: int


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


MISSPELT = sgl.genn("x")  # type: ignore[attr-defined]
ORDER = sgl.gen("order", schema=Order, max_tokens=64)
BY_POSITION = sgl.gen("x", 16, 0, 1, "\n", [2])  # as SGLang's


@sgl.function
def ask(s: sgl.ProgramState, question: str, shots: int = 2) -> int:
    """Two arguments, one of them with a default."""
    s += question + ORDER + sgl.user(sgl.select("yes", ["yes", "no"]))
    s += None  # the state takes any object, and says at once what it cannot append
    s.apend("x")  # type: ignore[attr-defined]
    return shots


@sgl.function(num_api_spec_tokens=64)
async def later(s: sgl.AsyncProgramState, question: str) -> str:
    """An `async def` program."""
    s += question
    assert_type(await s.value(ORDER), Order)
    assert_type(await s.value("order", Order), Order)
    answer: str = await s["answer"]
    return answer


@sgl.function
def loose(s, text):  # type: ignore[no-untyped-def]
    """One without annotations: its names are still known."""
    s += text


@sgl.function
def nothing(s: sgl.ProgramState) -> None:
    """One without arguments."""


@sgl.function
def wide(s: sgl.ProgramState, a: int, b: int, c: int, d: str) -> None:
    """As many arguments by position as options may follow."""


def programs(engine: sgl.Engine) -> None:
    """Every way to run one."""
    state = ask.run("a", temperature=0.5, backend=engine)
    assert_type(state, sgl.ProgramState[int])
    assert_type(state.ret_value, int)
    assert_type(ask.run("a", shots=3).ret_value, int)
    assert_type(ask.run(question="a", shots=3, seed=7, stop=["\n"]).ret_value, int)
    assert_type(ask.stream("a", 3, max_new_tokens=8), sgl.ProgramState[int])
    assert_type(ask.with_options(seed=1, chat_template="chatml").run("a", shots=3), sgl.ProgramState[int])
    assert_type(ask.bind(shots=3).run("a", timeout=2.5), sgl.ProgramState[int])
    assert_type(ask.run_batch([{"question": "a"}, ("b", 3)], progress_bar=True, n=2), list[sgl.ProgramState[int]])
    assert_type(ask.run_batch([("a",)], return_exceptions=True), list[sgl.ProgramState[int] | Exception])
    assert_type(ask.explain("a"), Explanation)
    assert_type(ask.preview(question="a"), str)
    assert_type(nothing.run(temperature=0), sgl.ProgramState[None])
    assert_type(wide.run(1, 2, 3, "d", seed=1), sgl.ProgramState[None])
    loose.run("a", top_p=0.5)
    loose(text="a")

    ask.run(1)  # type: ignore[call-overload]
    ask.run()  # type: ignore[call-overload]
    ask.run(qestion="a")  # type: ignore[call-overload]
    ask.run("a", temprature=0)  # type: ignore[call-overload]
    ask.run("a", temperature="hot")  # type: ignore[call-overload]
    ask.run("a", backend="http://localhost")  # type: ignore[call-overload]
    ask.run("a", "b", seed=1)  # type: ignore[call-overload]
    ask.run("a", 2, 3, seed=1)  # type: ignore[call-overload]
    ask.stream("a", 3, 4)  # type: ignore[call-overload]
    ask.explain(1)  # type: ignore[call-overload]
    ask.with_options(temprature=0)  # type: ignore[call-arg]
    ask.with_options(temperature=0).run(qestion="a")  # type: ignore[call-overload]
    ask.run_batch("abc")  # type: ignore[arg-type]
    ask.run_batch([{"question": "a"}], num_thread=3)  # type: ignore[call-overload]
    ask("a", shots="3")  # type: ignore[call-overload]
    loose.run(txt="a")  # type: ignore[call-overload]
    loose.run("a", sed=1)  # type: ignore[call-overload]
    nothing.run("a")  # type: ignore[call-overload]
    wide.run(1, 2, 3, 4, seed=1)  # type: ignore[call-overload]


async def sessions(engine: sgl.Engine) -> None:
    """Conversations outside a function."""
    with sgl.session(engine, temperature=0.5, stream=True) as s:
        assert_type(s, sgl.ProgramState[Any])
        s += ORDER
        assert_type(s.value(ORDER), Order)
    async with sgl.session() as later:
        assert_type(await later.value(ORDER), Order)

    sgl.session(engine, temprature=0)  # type: ignore[call-arg]
    sgl.session("http://localhost")  # type: ignore[arg-type]


def values(state: sgl.ProgramState) -> None:
    """What a state's variables are."""
    assert_type(state.value(ORDER), Order)
    assert_type(state.value("order", Order), Order)
    assert_type(state.value("items", list[int]), list[int])
    assert_type(state.variables(), dict[str, Any])
    state.value(ORDER).quantity.bit_length()

    str(state.value(ORDER).quantty)  # type: ignore[attr-defined]
    str(state.value(ORDER).item + 1)  # type: ignore[operator]
    state.value("order", Order).quantity.upper()  # type: ignore[attr-defined]
    state.valeu("order")  # type: ignore[attr-defined]


def gens(schema: Any) -> None:
    """What a gen yields."""
    assert_type(sgl.gen("x", 8, stop="\n"), Gen[str])
    assert_type(sgl.gen("x", regex="[a-z]+"), Gen[str])
    assert_type(sgl.gen("x", schema=Order), Gen[Order])
    assert_type(sgl.gen("x", schema=list[Order], temperature=0), Gen[list[Order]])
    assert_type(sgl.gen("x", dtype=int), Gen[int])
    assert_type(sgl.gen("x", tools=[add], tool_choice="required"), Gen[list[ToolCall]])
    sgl.gen("x", choices=["a", "b"])
    sgl.gen("x", schema=Literal["a", "b"])
    sgl.gen("x", schema=int | None, n=3)
    sgl.gen("x", schema=schema)
    sgl.gen("x", json_schema={"type": "object"}, dtype="int")
    sgl.gen("x", 8, 2, 3, "\n")

    sgl.gen("x", max_token=8)  # type: ignore[call-overload]
    sgl.gen("x", max_tokens="8")  # type: ignore[call-overload]
    sgl.gen("x", schema=Order, temprature=0)  # type: ignore[call-overload]
    sgl.gen("x", tools=[add], tool_choice="never")  # type: ignore[call-overload]
    sgl.select("x", choices=["a"], temprature=0)  # type: ignore[call-arg]


def engines() -> None:
    """Options of engines and servers."""
    with sgl.Engine(model_path="x", max_total_tokens=4096, device="cpu") as engine:
        engine.generate("a", {"temperature": 0.5}, timeout=3)
        sgl.set_default_backend(engine)
        loose.run("a", backend=sgl.Runtime(model_path="x", log_level="info", read_timeout=3.5))
        loose.run("a", backend=sgl.OpenAI("gpt-5"))

        engine.generate("a", tmeout=3)  # type: ignore[call-arg]
        sgl.set_default_backend("engine")  # type: ignore[arg-type]
    sgl.Engine(model_path="x", max_totl_tokens=4096)  # type: ignore[call-arg]
    sgl.Engine(max_total_tokens="4096")  # type: ignore[arg-type]
    sgl.Engine(schedule_policy="fastest")  # type: ignore[arg-type]
    sgl.Runtime(model="x")  # type: ignore[call-arg]


def kept(program: SglFunction[[str], int]) -> int:
    """A program as an argument."""
    return program.run("a").ret_value
