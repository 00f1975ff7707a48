"""Looking at programs without a model: explain, preview, trace, compile, cache."""

from __future__ import annotations

from typing import Any

import pytest

import sgl
from sgl.errors import ProgramError
from sgl.lang.ir import nodes as ir
from tests.lang_mocks import MockBackend, ProgramBackend
from tests.test_lang_requests import chat, few_shot, mixed, parallel, requests_of, tree_of_thought

pytestmark = pytest.mark.usefixtures("unhurried")


def echo(prompt: Any, params: Any) -> str:
    """A reply that is the gen's name in brackets."""
    return f"<{params.node.name}>"


@sgl.function
def observing(s, question):
    """Looks at two values."""
    s += question + sgl.gen("a", dtype=int, max_tokens=4)
    total = int(s["a"]) + 1
    s += f" plus one is {total}. " + sgl.select("b", ["good", "bad"])
    if s["b"] == "good":
        s += "!"


@pytest.mark.parametrize(
    ("program", "args"),
    [
        (few_shot, ("q",)),
        (chat, ("a", "b")),
        (parallel, ("t",)),
        (tree_of_thought, ("q",)),
        (mixed, ()),
        (observing, ("q",)),
    ],
)
def test_explain_counts_the_requests_that_a_run_takes(program: Any, args: Any) -> None:
    explained = program.explain(*args)
    assert explained.stopped is None
    if program is not observing:  # whose body depends on a value
        assert explained.requests == requests_of(program, *args)
    assert explained.requests == (3 if program is observing else 1)


def test_explain_shows_every_node_with_its_path() -> None:
    explained = parallel.explain("cats")
    shown = str(explained)
    assert [path for path, _ in explained.nodes][:4] == ["0", "1", "1.0/0", "1.0/1"]
    assert "gen name='tip'" in shown
    assert shown.endswith("1 request")


def test_preview_is_the_rendered_prompt_with_made_up_values() -> None:
    assert few_shot.preview("why").endswith("Q: why\nA:{answer}")
    rendered = chat.preview("hi", "bye", chat_template="chatml")
    assert rendered.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")
    assert "<|im_start|>assistant\n{a}<|im_end|>" in rendered
    assert chat.preview("hi", "bye", backend=MockBackend(chat_template="qwen")) == rendered
    assert observing.preview("1") == "10 plus one is 1. good!"


def test_explain_says_where_made_up_values_do_not_do() -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("x")
        s += {"yes": "sure"}[s["x"]]

    explained = program.explain()
    assert "KeyError" in explained.stopped
    assert "at least 2 requests" in str(explained) or "at least 1 request" in str(explained)

    @sgl.function
    def endless(s):
        while True:
            s += sgl.gen("x")
            if s["x"] == "stop":
                break

    assert "does not end" in endless.explain().stopped


def test_async_programs_can_be_explained_but_not_traced() -> None:
    @sgl.function
    async def program(s):
        s += "a" + sgl.gen("x")
        await s["x"]
        s += "b"

    assert program.preview() == "a{x}b"
    assert program.explain().requests == 2
    with pytest.raises(ProgramError, match="asynchronous"):
        program.trace()


def test_trace_records_symbols_for_missing_arguments() -> None:
    @sgl.function
    def program(s, a, b="B"):
        s += "const " + a + b + sgl.gen("x")
        s += s["x"]
        forks = s.fork(2)
        forks += "branch"
        return "returned"

    trace = program.trace()
    assert [type(node).__name__ for node in trace.nodes] == ["Text", "Arg", "Text", "Gen", "Ref", "Fork"]
    assert len(trace.flatten_nodes()) == 8
    assert len(trace.child_states) == 2
    assert "x" in trace.variables
    assert trace.ret_value == "returned"
    given = program.trace(a="given")
    assert not any(isinstance(node, ir.Arg) for node in given.nodes)

    @sgl.function
    def formatting(s, a):
        s += f"{a}"

    with pytest.raises(TypeError, match="f-string"):
        formatting.trace()


def test_print_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Gen(name='answer'" in few_shot.trace().last_node.print_graph_dfs() + "\n"
    few_shot.compile().print_graph()
    assert "Gen(name='answer'" in capsys.readouterr().out


def test_programs_that_call_others_are_compiled_to_themselves_and_not_traced(capsys: Any) -> None:
    @sgl.function
    def expand(s, tip):
        s += "More on " + tip + sgl.gen("more")

    @sgl.function
    def tips(s, topic, end):
        s += "A tip on " + topic + sgl.gen("tip")
        s += "More:" + expand(tip=s["tip"])["more"] + end

    with pytest.raises(ProgramError, match="calls 'expand'"):
        tips.trace()
    compiled = tips.compile(end="!")
    compiled.print_graph()
    assert "calls other programs" in capsys.readouterr().out
    backend = MockBackend(echo)
    assert compiled.run(topic="rain", backend=backend).text() == "A tip on rain<tip>More:<more>!"
    states = compiled.run_batch([{"topic": "a"}, {"topic": "b"}], backend=backend, temperature=0)
    assert [state["tip"] for state in states] == ["<tip>", "<tip>"]


def test_a_compiled_program_runs_without_its_body() -> None:
    executed = []

    @sgl.function
    def program(s, a):
        executed.append(1)
        s += "Q: " + a + sgl.gen("x")
        with s.var_scope("scope"):
            s += "in scope " + sgl.gen("y")
        forks = s.fork(2)
        forks += sgl.gen("z")
        forks.join()
        s += s.ref("scope").upper()

    backend = ProgramBackend(MockBackend(echo))
    compiled = program.compile(backend=backend)
    state = compiled.run(a="first", temperature=0.5)
    assert state.text() == "Q: first<x>in scope <y>IN SCOPE <Y>"
    assert state["z"] == ["<z>", "<z>"]
    assert state["scope"] == "in scope <y>"
    states = compiled.run_batch([{"a": "1"}, {"a": "2"}], seed=1)
    assert [state.text()[:4] for state in states] == ["Q: 1", "Q: 2"]
    assert executed == [1]
    assert backend.requests == 3
    assert backend.sessions[0].segments[0]["nodes"][1] == {"st": 0, "op": "arg", "name": "a"}
    for wrong in ({}, {"a": 1}, {"a": "x", "temprature": 1}):
        with pytest.raises((TypeError, ValueError)):
            compiled.run(**wrong)


def test_a_compiled_program_generates_what_the_program_generates() -> None:
    direct = few_shot.run("why", backend=MockBackend(echo))
    compiled = few_shot.compile(backend=MockBackend(echo)).run(question="why")
    assert compiled["answer"] == direct["answer"]
    assert compiled.text() == direct.text()
    again = few_shot.compile(backend=MockBackend())
    assert again.run(question="a", seed=5)["answer"] == again.run(question="a", seed=5)["answer"]


def test_cache_sends_long_constant_prefixes() -> None:
    sent: list[str] = []

    class Caching(MockBackend):
        def cache_prefix(self, text: str) -> None:
            sent.append(text)

    @sgl.function
    def long(s, a):
        s += "x" * 70 + a

    long.cache(Caching())
    few_shot.bind(question="q" * 60).cache(Caching())
    assert sent[0] == "x" * 70
    assert sent[1].startswith("Q: 0")

    @sgl.function
    def short(s, a):
        s += "short" + a

    short.cache(Caching())
    assert len(sent) == 2
