"""The language on a real engine, end to end: a tiny model with random weights, or a trained one where there is one."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest

import sgl
from sgl.errors import EngineDead, InvalidRequest, ProgramError, RequestAborted
from sgl.lang.ir.chat_template import PrefixTemplate
from sgl.runtime.engine import Engine
from tests.live_server import slow_steps
from tests.patience import wait_until
from tests.test_lang_defects import SOON, within
from tests.tiny_models import calling_checkpoint, tiny_checkpoint

pytestmark = pytest.mark.usefixtures("unhurried")

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), with_tokenizer=True, max_position_embeddings=2048)
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", max_total_tokens=8192, check_ledger=True) as engine:
        yield engine
        assert engine.check_ledger() == []


@sgl.function
def everything(s, question):
    """A line, a turn, branches of branches, samples, a select."""
    s += "Q: " + question + "\n" + sgl.gen("a", max_tokens=6) + sgl.gen("many", max_tokens=4, n=2)
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += f"\n{i}:" + sgl.gen("b", max_tokens=5)
        inner = fork.fork(2)
        inner += lambda j: f"{j}" + sgl.gen("c", max_tokens=3)
        inner.join()
    forks.join()
    s += "\nSo: " + sgl.select("d", ["yes", "no", "yesterday"]) + sgl.user("Sure?") + sgl.assistant(sgl.gen("e", 6))


def values(state: Any) -> dict[str, Any]:
    """All that was generated, and the text."""
    return {name: state[name] for name in ("a", "many", "b", "c", "d", "e")} | {"text": state.text()}


def test_same_seed_same_text_alone_streamed_in_batches_of_any_order(engine: Engine) -> None:
    rows = [{"question": f"question {i}"} for i in range(6)]
    alone = [values(everything.run(**row, backend=engine, seed=11)) for row in rows]
    assert len({result["text"] for result in alone}) == len(rows)
    assert values(everything.run(**rows[2], backend=engine, seed=11, stream=True)) == alone[2]
    order = list(range(len(rows)))
    random.Random(1).shuffle(order)
    states = everything.run_batch([rows[i] for i in order], backend=engine, seed=11)
    assert [values(state) for state in states] == [alone[i] for i in order]
    engine.flush_cache()
    assert values(everything.run(**rows[3], backend=engine, seed=11)) == alone[3]
    assert values(everything.run(**rows[3], backend=engine, seed=12)) != alone[3]


def test_a_program_is_one_request_and_says_what_it_cost(engine: Engine) -> None:
    state = everything.run("why", backend=engine, seed=1)
    text = state.text()
    assert state.usage["requests"] == 1
    assert state.usage["completion_tokens"] > 20
    assert state.usage["cached_tokens"] > 0
    assert text.startswith(
        "Q: why\n" + state["a"] + state["many"][0] + "\nSo: " + state["d"] + "<s>user\nSure?</s>"
    )
    assert [message["role"] for message in state.messages()] == ["user", "assistant"]


def test_streamed_pieces_join_to_the_text(engine: Engine) -> None:
    state = everything.run("why", backend=engine, seed=5, stream=True)
    assert "".join(state.text_iter()) == state.text()
    assert "".join(state.text_iter("e")) == state["e"]

    async def read() -> str:
        streamed = everything.run("why", backend=engine, seed=5, stream=True)
        return "".join([piece async for piece in streamed.text_async_iter("a")])

    assert asyncio.run(read()) == state["a"]


class Record(TypedDict):
    """What is extracted."""

    name: str
    kind: Literal["cat", "dog"]


def test_constraints_hold(engine: Engine) -> None:
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("int", dtype=int, max_tokens=6) + sgl.gen("bool", dtype=bool)
        s += sgl.gen("regex", regex=r"[ab]{2,4}!", max_tokens=20)
        s += sgl.gen("choice", schema=Literal["left", "right"])
        s += sgl.gen("json", schema=Record, max_tokens=300)

    for state in program.run_batch([{}] * 4, backend=engine):
        assert isinstance(state.value("int"), int)
        assert state["bool"] in ("True", "False")
        assert re.fullmatch(r"[ab]{2,4}!", state["regex"])
        assert state.value("choice") in ("left", "right")
        assert state.usage["completion_tokens"] > state.usage["forced_tokens"] > 0
        finish = state.get_meta_info("json")["finish_reason"]["type"]
        assert finish == "length" or state.value("json")["kind"] in ("cat", "dog")


def test_observing_and_going_on_in_python(engine: Engine) -> None:
    @sgl.function
    async def program(s, n):
        total = 0
        for i in range(n):
            s += f"number {i}: " + sgl.gen("x", regex="[0-9]")
            total += int(await s["x"])
        s += f"total: {total}"
        return total

    async def main() -> None:
        states = await program.arun_batch([(3,)] * 5, backend=engine, max_concurrency=3)
        for state in states:
            assert state["x"].isdigit()
            assert state.text().endswith(f"total: {state.ret_value}")
            assert state.usage["requests"] <= 4

    asyncio.run(main())


def test_chat_templates_of_any_kind(engine: Engine) -> None:
    def custom(messages: Any, add_generation_prompt: bool) -> str:
        return "".join(f"({m['role']}){m['content']}" for m in messages) + "(assistant)" * add_generation_prompt

    @sgl.function
    def chat(s):
        s += sgl.user("hi") + sgl.assistant(sgl.gen("x", max_tokens=2))

    named = PrefixTemplate("mine", {"user": ("U:", "|"), "assistant": ("A:", "|")})
    begun = ["(user)hi(assistant)", "U:hi|A:", "USER:hi\nASSISTANT:", "<s>user\nhi</s>"]
    for template, text in zip([custom, named, "default", None], begun, strict=True):
        assert chat.run(backend=engine, chat_template=template).text().startswith(text)


def test_errors_come_from_the_engine_with_their_cause(engine: Engine) -> None:
    @sgl.function
    def too_long(s):
        s += "x" * 5000 + sgl.gen("x")

    @sgl.function
    def unknown(s):
        s += "x" + sgl.gen("x", extra={"nonsense": 1})

    for program in (too_long, unknown):
        with pytest.raises(ProgramError) as caught:
            within(10 * SOON, lambda program=program: program.run(backend=engine)["x"])
        assert isinstance(caught.value.__cause__, InvalidRequest)
        assert caught.value.node == "1"


def num_running(engine: Engine) -> int:
    return int(engine.get_server_info()["internal_states"][0]["num_running_reqs"])


@pytest.mark.usefixtures("slowly")
def test_cancelling_frees_the_engine(engine: Engine) -> None:
    @sgl.function
    def endless(s):
        s += "x"
        s.fork(4).__iadd__(sgl.gen("y", max_tokens=1500, ignore_eos=True))
        s += sgl.gen("x", max_tokens=1500, ignore_eos=True)

    state = endless.run(backend=engine)
    wait_until(lambda: num_running(engine) == 5)
    state.cancel()
    assert isinstance(within(SOON, state.error).__cause__, RequestAborted)
    wait_until(lambda: num_running(engine) == 0)
    assert engine.check_ledger() == []


def test_a_closed_engine_fails_what_runs_and_what_comes(folder: Path) -> None:
    @sgl.function
    def long(s):
        s += "x" + sgl.gen("x", max_tokens=1500, ignore_eos=True)

    engine = Engine(str(folder), device="cpu", max_total_tokens=4096)
    with slow_steps(engine):
        state = long.run(backend=engine)
        wait_until(lambda: num_running(engine) == 1)
        engine.shutdown()
    for one in (state, long.run(backend=engine)):
        with pytest.raises(ProgramError) as caught:
            within(SOON, lambda one=one: one["x"])
        assert isinstance(caught.value.__cause__, EngineDead)


def test_a_trained_model_tells_a_story(checkpoint: Callable[[str], Path]) -> None:
    @sgl.function
    def story(s):
        s += "Once upon a time, there was a little"
        s += sgl.select("who", [" girl", " xqzzt"]) + sgl.gen("rest", max_tokens=40, temperature=0, stop=".")

    with Engine(str(checkpoint("stories260K")), device="cpu") as engine:
        state = story.run(backend=engine)
        assert state["who"] == " girl"
        assert state["rest"].startswith(" named")
        assert "." not in state["rest"]


def test_a_call_that_a_model_begins_is_a_call_of_a_tool(tmp_path: Path) -> None:
    """The model is random; a bias makes it begin calls, and none is malformed."""

    def add(a: int, b: set[int]) -> int:
        return a + len(b)

    def now() -> str:
        return "noon"

    @sgl.function
    def ask(s, begin, seed):
        s += sgl.user("Go on.")
        s += sgl.assistant(
            sgl.gen("x", tools=[add, now], max_tokens=300, temperature=1.0, seed=seed, logit_bias={begin: 8.0})
        )

    with Engine(calling_checkpoint(tmp_path), device="cpu", max_total_tokens=8192) as engine:
        [begin] = engine.get_tokenizer().encode("<tool_call>", add_special_tokens=False)
        calls = [call for seed in range(6) for call in ask.run(begin, seed, backend=engine).value("x")]
    assert {call.name for call in calls} == {"add", "now"}
    for call in calls:
        assert call.error is None
        assert call.result == (add(**call.arguments) if call.name == "add" else "noon")


def test_reasoning_that_is_left_out_leaves_no_open_thought(engine: Engine) -> None:
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}[assistant]<think>{% endif %}"

    @sgl.function
    def program(s, is_thought):
        thought = sgl.separate_reasoning(sgl.gen("x", regex="hm</think>four"), model_type="deepseek-r1")
        s += sgl.user("1") + sgl.assistant(thought if is_thought else "four")
        s += sgl.user("2") + sgl.assistant(sgl.gen("y", max_tokens=8, temperature=0))

    thought, said = (
        program.run(is_thought, backend=engine, chat_template=template) for is_thought in (True, False)
    )
    assert thought.text() == said.text()
    assert thought.text().startswith("[user]1[assistant]four[user]2[assistant]<think>")
    assert thought["y"] == said["y"]
    assert (thought["x"], thought["x_reasoning_content"]) == ("four", "hm")
