"""Tools: schemas from functions, calls from texts, parallel execution, results as turns, the loop of an agent."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from typing import Any, Literal

import jsonschema
import pytest

import sgl
from sgl.errors import InvalidRequest, ProgramError
from sgl.lang.typed.tools import ToolCall, call_schema, calls_of, tools_of
from tests.lang_mocks import MockBackend, ProgramBackend
from tests.patience import PATIENCE
from tests.test_lang_defects import SOON, within

pytestmark = pytest.mark.usefixtures("unhurried")


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    They may be negative.

    Args:
        a: the first
        b (int): the second
    """
    return a + b


def weather(city: str, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """The weather.

    :param city: where
    """
    return {"city": city, "temperature": 21, "unit": unit}


async def slow_add(a: int, b: int) -> int:
    """Add, taking its time."""
    await asyncio.sleep(0.01)
    return a + b


def failing() -> None:
    """Fail."""
    raise LookupError("out of order")


def call(name: str, **arguments: Any) -> str:
    """A call as a model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_schemas_come_from_signatures_and_docstrings() -> None:
    assert tools_of([add])[0].schema == {
        "name": "add",
        "description": "Add two numbers.\n\nThey may be negative.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "the first"},
                "b": {"type": "integer", "default": 2, "description": "the second"},
            },
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    parameters = tools_of([weather])[0].schema["parameters"]
    assert parameters["properties"]["city"]["description"] == "where"
    assert parameters["properties"]["unit"]["enum"] == ["C", "F"]
    with pytest.raises(InvalidRequest, match="name its parameters"):
        tools_of([lambda *args: None])
    with pytest.raises(InvalidRequest, match="'int' has no JSON Schema: no signature"):
        tools_of([int])


def test_an_object_that_stands_for_a_function_is_a_tool() -> None:
    class Counted:
        def __init__(self, function: Any) -> None:
            functools.update_wrapper(self, function)
            self.function = function

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.function(*args, **kwargs)

    assert tools_of([Counted(add)])[0].schema == tools_of([add])[0].schema


def test_one_call_of_several_tools_is_a_schema() -> None:
    schema = call_schema([tool.schema for tool in tools_of([add, weather])])
    jsonschema.validate({"name": "add", "arguments": {"a": 1}}, schema)
    for wrong in ({"name": "add", "arguments": {}}, {"name": "other", "arguments": {}}, {"name": "weather"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


NOTATIONS = [
    (call("add", a=1), ["add"]),
    (call("add", a=1) + "\n" + call("weather", city="x"), ["add", "weather"]),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}}', ["add"]),
    ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', ["add"]),
    ('{"name": "add", "parameters": {"a": 1}}', ["add"]),
    ('```json\n[{"name": "add", "arguments": "{\\"a\\": 1}"}]\n```', ["add"]),
    ("no call at all", []),
    ('{"answer": 42}', []),
    ("[1, 2]", []),
    ("{broken", []),
]


@pytest.mark.parametrize(("text", "names"), NOTATIONS)
def test_calls_are_found_in_the_notations_of_models(text: str, names: list[str]) -> None:
    found = calls_of(text, {})
    assert [one.name for one in found] == names
    if names:
        assert found[0].arguments == {"a": 1}


def test_malformed_calls_become_errors_that_the_model_can_read() -> None:
    for text in ("<tool_call>nonsense</tool_call>", '<tool_call>{"name": "add", "arguments": "x"}</tool_call>'):
        [found] = calls_of(text, {})
        assert found.error is not None
        assert found.content().startswith("error: ValueError")


@sgl.function
def ask(s, question, tools):
    """One turn with tools and one after it."""
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("call", tools=tools))
    s += sgl.assistant(sgl.gen("answer"))


def scripted(*texts: str) -> Any:
    """A model that writes these texts one after the other, by the assistant turns so far."""

    def reply(prompt: Any, params: Any) -> str:
        return texts[sum(message["role"] == "assistant" for message in prompt.messages)]

    return reply


@pytest.mark.parametrize("programs", [False, True])
def test_calls_run_and_their_results_are_appended_as_turns(programs: bool) -> None:
    mock = MockBackend(scripted(call("add", a=3) + call("weather", city="Bonn"), "5 and 21"))
    backend = ProgramBackend(mock) if programs else mock
    state = ask.run("3 + 2?", [add, weather], backend=backend)
    assert state["answer"] == "5 and 21"
    calls = state.value("call")
    assert [(one.name, one.result) for one in calls] == [("add", 5), ("weather", weather("Bonn"))]
    assert [(m["role"], m["content"]) for m in state.messages()] == [
        ("user", "3 + 2?"),
        ("assistant", state["call"]),
        ("tool", "5"),
        ("tool", json.dumps(weather("Bonn"))),
        ("assistant", "5 and 21"),
    ]
    assert "<|im_start|>tool\n5<|im_end|>" in state.text()
    if programs:
        assert backend.requests == 2  # the program, and the results


def test_several_calls_run_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=PATIENCE)

    def meet(i: int) -> int:
        """Wait for the others."""
        together.wait()
        return i

    texts = "".join(call("meet", i=i) for i in range(3))
    state = ask.run("go", [meet], backend=MockBackend(scripted(texts, "met")))
    assert [one.result for one in state.value("call")] == [0, 1, 2]


def test_errors_of_tools_are_told_to_the_model_and_not_raised() -> None:
    texts = call("failing") + call("ad", a=1) + call("add", a="x") + call("add", a=1, c=2)
    state = ask.run("go", [failing, add], backend=MockBackend(scripted(texts, "sorry")))
    assert state["answer"] == "sorry"
    contents = [message["content"] for message in state.messages() if message["role"] == "tool"]
    assert contents[0] == "error: LookupError: out of order"
    assert "did you mean 'add'" in contents[1]
    assert contents[2].startswith("error: ValidationError")
    assert contents[3].startswith("error: ValidationError")
    assert isinstance(state.value("call")[0].error, LookupError)


def test_a_gen_without_calls_appends_nothing() -> None:
    state = ask.run("hello", [add], backend=MockBackend(scripted("hi", "bye")))
    assert state.value("call") == []
    assert [message["role"] for message in state.messages()] == ["user", "assistant", "assistant"]


def test_outside_of_chats_results_are_lines() -> None:
    @sgl.function
    def plain(s):
        s += "compute: " + sgl.gen("call", tools=[add]) + "so: " + sgl.gen("rest")

    state = plain.run(backend=MockBackend(lambda prompt, params: call("add", a=1) if params.node.tools else "ok"))
    assert state.text() == f"compute: {call('add', a=1)}\n3\nso: ok"


def test_required_tools_constrain_the_text() -> None:
    node = sgl.gen("x", tools=[add], tool_choice="required")
    jsonschema.validate({"name": "add", "arguments": {"a": 1}}, node.constraint["json"])
    with pytest.raises(InvalidRequest, match="exclude each other"):
        sgl.gen("x", tools=[add], tool_choice="required", regex="a")


def agent_reply(prompt: Any, params: Any) -> str:
    """Adds up to 3 steps, then answers."""
    steps = sum(message["role"] == "tool" for message in prompt.messages)
    return call("slow_add", a=steps, b=1) if steps < 3 else f"done after {steps}"


def test_the_agent_loop_ends_with_the_first_answer_without_calls() -> None:
    @sgl.function
    def program(s):
        s += sgl.user("count")
        return sgl.agent(s, [slow_add])

    @sgl.function
    async def async_program(s):
        s += sgl.user("count")
        return await sgl.agent(s, [slow_add], name="final", max_steps=4)

    backend = ProgramBackend(MockBackend(agent_reply))
    state = program.run(backend=backend)
    assert state.ret_value == "done after 3" == state["answer"]
    assert backend.requests <= 1 + 2 * 4
    assert asyncio.run(async_program.arun(backend=MockBackend(agent_reply))).ret_value == "done after 3"


def test_the_agent_loop_has_a_limit() -> None:
    @sgl.function
    def program(s):
        s += sgl.user("count")
        return sgl.agent(s, [slow_add], max_steps=2)

    with pytest.raises(ProgramError, match="still calls tools after 2 steps"):
        program.run(backend=MockBackend(agent_reply))


def test_coroutine_tools_run_on_the_programs_own_loop() -> None:
    loops = []

    async def where() -> str:
        """Say where it runs."""
        loops.append(asyncio.get_running_loop())
        return "here"

    @sgl.function
    async def program(s):
        s += sgl.user("go") + sgl.assistant(sgl.gen("call", tools=[where]))
        await s.value("call")

    async def main() -> None:
        await program.arun(backend=MockBackend(lambda *_: call("where")))
        assert loops == [asyncio.get_running_loop()]

    asyncio.run(main())


def test_cancelling_does_not_wait_for_a_tool() -> None:
    started, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        """Take long."""
        started.set()
        go_on.wait(PATIENCE)

    state = ask.run("go", [hang], backend=MockBackend(scripted(call("hang"), "x")))
    state.when_done(lambda: None)
    threading.Thread(target=state.error, daemon=True).start()
    assert started.wait(PATIENCE)
    state.cancel()
    with pytest.raises(ProgramError, match="cancelled"):
        within(SOON, lambda: state["answer"])
    go_on.set()


def test_tools_described_for_models_without_a_notion_of_them() -> None:
    text = sgl.describe_tools([add, weather])
    assert '"name": "add"' in text
    assert "<tool_call>" in text


def test_results_that_are_no_json_are_shown_as_text() -> None:
    assert ToolCall("x", {}, result={1, 2}).content() == '"{1, 2}"'
    assert ToolCall("x", {}, result="plain").content() == "plain"
    assert ToolCall("x", {}, result=None).content() == "null"


@pytest.mark.parametrize("is_async", [False, True])
def test_programs_that_tools_call_inherit_the_run(is_async: bool) -> None:
    @sgl.function
    def inner(s, word):
        s += word + sgl.gen("y")

    def ask(word: str) -> str:
        return inner.run(word)["y"]

    async def ask_async(word: str) -> str:
        return (await inner.arun(word))["y"]

    @sgl.function
    async def outer(s, tool):
        s += "q" + sgl.gen("x", tools=[tool])
        return (await s.value("x"))[0].result

    def reply(prompt: Any, params: Any) -> str:
        return "inside" if params.node.name == "y" else call(tool.__name__, word="w")

    tool = ask_async if is_async else ask
    backend = MockBackend(reply)
    assert outer.run(tool, backend=backend, temperature=0.3).ret_value == "inside"
    assert [params.sampling["temperature"] for _, params in backend.calls] == [0.3, 0.3]
