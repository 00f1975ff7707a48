"""Programs in files and pickles: what they hold runs as the function does, and what they cannot hold is said."""

from __future__ import annotations

import copy
import json
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest

import sgl
from sgl.cli import main
from sgl.errors import InvalidRequest, ProgramError
from sgl.lang.record import compiled
from tests.lang_mocks import MockBackend, ProgramBackend
from tests.live_server import LiveServer


class Order(pydantic.BaseModel):
    """What a gen below yields."""

    item: str
    quantity: int


@sgl.function
def everything(s: sgl.ProgramState, topic: str, more: str = "more") -> None:
    """Every node that a file can hold."""
    s += sgl.system("Be brief about " + topic)
    with s.user():
        s += topic + "?" + more
    s += sgl.assistant(sgl.gen("plain", max_tokens=4, stop=["\n", "."]))
    s += sgl.gen("samples", n=2, max_tokens=3) + sgl.gen("number", dtype=int, max_tokens=3)
    s += sgl.select("choice", ["a", "b"], choices_method=sgl.greedy_token_selection)
    with s.var_scope("scope"):
        s += sgl.gen("letters", regex="[a-z]{2}")
        s += s.ref("letters").upper()
    branches = s.fork(2)
    branches += lambda i: f"{i}" + sgl.gen("branch", max_tokens=2)
    inner = branches[1].fork(2)
    inner += sgl.gen("inner", max_tokens=2)
    inner.join("concate_and_append")
    s += branches[1].ref("branch").strip()
    branches.join()
    with s.copy() as aside:
        aside += sgl.gen("aside", max_tokens=2)
    s["set"] = "by Python"


@sgl.function
def order(s: sgl.ProgramState, text: str) -> None:
    """A typed one."""
    s += text + sgl.gen("order", schema=Order)


def test_a_loaded_program_has_its_functions_greedy_text(engine: sgl.Engine, tmp_path: Path) -> None:
    everything.compile().save(tmp_path / "program.json")
    greedy = {"topic": "rain", "backend": engine, "temperature": 0}
    loaded = sgl.load(tmp_path / "program.json").run(**greedy)
    expected = everything.run(**greedy)
    assert loaded.text() == expected.text()
    assert loaded.variables() == expected.variables()
    assert loaded.to_dict() == expected.to_dict()


@sgl.function
def outer(s: sgl.ProgramState, text: str) -> None:
    """One that calls another."""
    s += order(text)["order"]


@pytest.fixture(params=["engine", "server", "single calls", "programs"])
def backend(request: pytest.FixtureRequest) -> Any:
    match request.param:
        case "engine":
            return request.getfixturevalue("engine")
        case "server":
            return sgl.RuntimeEndpoint(request.getfixturevalue("server").url)
        case "single calls":
            return MockBackend()
    return ProgramBackend()


def test_a_loaded_program_gives_what_its_function_gives(backend: Any, tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    everything.compile().save(path)
    loaded = sgl.load(path)
    assert loaded.args == ["topic"]
    expected = everything.compile().run(topic="rain", backend=backend, seed=3)
    for program in (loaded, pickle.loads(pickle.dumps(loaded))):
        state = program.run(topic="rain", backend=backend, seed=3)
        assert state.text() == expected.text()
        assert state.variables() == expected.variables()
        assert state.messages() == expected.messages()
    of_function = everything.run("rain", backend=backend)
    assert {name: type(value) for name, value in of_function.items()} == {n: type(v) for n, v in expected.items()}
    again = tmp_path / "again.json"
    loaded.save(str(again))
    assert again.read_text() == path.read_text()


def test_defaults_and_templates_are_kept_and_a_run_overrides_them(tmp_path: Path) -> None:
    path, mock = tmp_path / "program.json", MockBackend(lambda *_: '{"item": "tea", "quantity": 2}')
    asked = order.with_options(temperature=0.25, seed=9, chat_template="chatml", sampling={"top_k": 3})
    asked.compile().save(path)
    loaded = sgl.load(path)
    state = loaded.run(text="a", backend=mock)
    state.sync()
    assert state.seed == 9
    loaded.run(text="a", backend=mock, temperature=0.75, seed=1).sync()
    assert [(p.sampling["temperature"], p.sampling["top_k"]) for _, p in mock.calls] == [(0.25, 3), (0.75, 3)]
    assert json.loads(path.read_text())["chat_template"] == "chatml"
    states = loaded.run_batch([{"text": "a"}, {"text": "b"}], backend=mock)
    assert [state.value("order") for state in states] == [{"item": "tea", "quantity": 2}] * 2


def test_a_file_keeps_json_and_python_names_the_type_again(tmp_path: Path) -> None:
    mock = MockBackend(lambda *_: '{"item": "tea", "quantity": 2}')
    order.compile().save(tmp_path / "order.json")
    state = sgl.load(tmp_path / "order.json").run(text="a", backend=mock)
    assert state.value("order") == {"item": "tea", "quantity": 2}
    assert state.value("order", Order) == Order(item="tea", quantity=2)
    state = pickle.loads(pickle.dumps(order.compile())).run(text="a", backend=mock)
    assert state.value("order") == Order(item="tea", quantity=2)


def test_a_compiled_program_streams_and_inherits_from_a_body() -> None:
    mock, program = MockBackend(), order.compile()
    state = program.run(text="a", backend=mock, stream=True)
    assert "".join(state.text_iter()) == state.text()

    @sgl.function
    def caller(s: sgl.ProgramState) -> str:
        return program.run(text="a").text()

    texts = [caller.run(backend=mock, seed=4).ret_value for _ in range(2)]
    assert texts[0] == texts[1]


NODE = {"st": 0, "op": "gen", "name": "x"}
GOOD: dict[str, Any] = {"v": 1, "name": "p", "args": [], "nodes": [NODE]}
WRONG: list[tuple[Any, str]] = [
    ("", "it is not JSON"),
    ("{", "it is not JSON"),
    (b"\xff\xfe\x00", "it is not JSON"),
    ("[" * 200_000, "it is not JSON"),
    ([], "an object with v, name, args and nodes"),
    ({**GOOD, "args": None}, "args must be a list of names"),
    ({**GOOD, "args": [1]}, "args must be a list of names"),
    ({**GOOD, "nodes": None}, "nodes"),
    ({**GOOD, "v": 2}, "IR version 2 is not 1"),
    ({key: value for key, value in GOOD.items() if key != "name"}, "'name' is missing"),
    ({**GOOD, "defualts": {}}, "unknown field 'defualts'.*did you mean 'defaults'"),
    ({**GOOD, "seed": 3}, "seed is an option of a run"),
    ({**GOOD, "lease_s": 1e9}, "lease_s is an option of a run"),
    ({**GOOD, "defaults": {"temperature": -1}}, "temperature must be"),
    ({**GOOD, "defaults": {"temprature": 1}}, "temprature"),
    ({**GOOD, "chat_template": 5}, "chat_template"),
    ({**GOOD, "nodes": [{**NODE, "params": {"n": 10**9}}]}, "params.n"),
    ({**GOOD, "nodes": [{**NODE, "params": {"top_p": 3}}]}, "top_p must be"),
    ({**GOOD, "nodes": [{**NODE, "params": {"temperature": float("nan")}}]}, "finite"),
    ({**GOOD, "nodes": [{"st": 0, "op": "exec", "code": "1"}]}, r"nodes\[0\]: unknown op 'exec'"),
    ({**GOOD, "nodes": [{"st": 0, "op": "arg", "name": "y"}]}, "without an argument 'y'"),
    ({**GOOD, "nodes": [{"st": 1, "op": "text", "text": "a"}]}, "stream 1 was never forked"),
    ({**GOOD, "nodes": [{"st": 0, "op": "ref", "stream": 0, "index": 7}]}, "no earlier gen"),
    ({**GOOD, "nodes": [{"st": 0, "op": "role_end", "role": "user"}]}, "no user turn is open"),
    ({**GOOD, "nodes": [{**NODE, "tools": [{"name": "f"}]}]}, "tools, which no file can hold"),
    ({**GOOD, "nodes": [{**NODE, "constraint": {"json": {}, "regex": "a"}}]}, "constraint"),
    ({**GOOD, "nodes": [NODE] * 10_001}, "the limit is 10000"),
]


@pytest.mark.parametrize(("content", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_file_is_refused_with_the_place(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidRequest, match=message) as caught:
        sgl.load(path)
    assert "wrong.json is no program" in str(caught.value)


def test_no_file_and_one_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match=r"no program can be read from .*none.json: No such file"):
        sgl.load(tmp_path / "none.json")
    with pytest.raises(InvalidRequest, match="Is a directory"):
        sgl.load(tmp_path)
    monkeypatch.setattr(compiled, "MAX_FILE_BYTES", 1000)
    (tmp_path / "large.json").write_text(" " * 1001)
    with pytest.raises(InvalidRequest, match="more than 1000 bytes"):
        sgl.load(tmp_path / "large.json")


def test_streams_of_a_file_may_have_any_numbers(tmp_path: Path) -> None:
    nodes = [
        {"st": 0, "op": "fork", "children": [7, 5]},
        {"st": 5, "op": "gen", "name": "x"},
        {"st": 7, "op": "gen", "name": "x"},
        {"st": 0, "op": "ref", "stream": 5, "index": 0, "functions": [["upper"]]},
        {"st": 0, "op": "join", "children": [7, 5]},
    ]
    (tmp_path / "p.json").write_text(json.dumps({**GOOD, "nodes": nodes}))
    state = sgl.load(tmp_path / "p.json").run(backend=MockBackend(), seed=1)
    assert len(set(state["x"])) == 2
    assert state.text() == state["x"][1].upper()


def test_what_no_file_can_hold_is_said(tmp_path: Path) -> None:
    def tool(a: int) -> int:
        """A tool."""
        return a

    @sgl.function
    def calls(s: sgl.ProgramState) -> None:
        s += sgl.gen("x", tools=[tool])

    def render(messages: Any, add_generation_prompt: bool) -> str:
        return ""

    with pytest.raises(InvalidRequest, match="has tools, which no file can hold"):
        calls.compile().save(tmp_path / "p.json")
    with pytest.raises(InvalidRequest, match="only a chat template's name or Jinja source"):
        order.with_options(chat_template=render).compile().save(tmp_path / "p.json")
    with pytest.raises(ProgramError, match="calls other programs"):
        outer.compile().save(tmp_path / "p.json")
    with pytest.raises(InvalidRequest, match="cannot be written"):
        order.compile().save(tmp_path / "none" / "p.json")
    assert list(tmp_path.iterdir()) == []


LOOKS: list[Callable[[Any], Any]] = [
    lambda s: s.text(),
    lambda s: s.messages(),
    lambda s: s.value("x"),
    lambda s: s.get_meta_info("x"),
    lambda s: s.variables(),
    lambda s: s.to_dict(),
    lambda s: list(s.text_iter()),
]


@pytest.mark.parametrize("look", LOOKS)
def test_a_body_that_looks_at_values_cannot_be_compiled(look: Callable[[Any], Any]) -> None:
    @sgl.function
    def looking(s: sgl.ProgramState) -> None:
        s += "a" + sgl.gen("x")
        s += f"{look(s)}"

    with pytest.raises(ProgramError, match="'looking' cannot be compiled: it looks at what it generates"):
        looking.compile()


def test_a_body_that_sets_objects_cannot_be_compiled() -> None:
    @sgl.function
    def setting(s: sgl.ProgramState) -> None:
        s["x"] = 5

    with pytest.raises(ProgramError, match="it sets 'x' to int, and only texts are recorded"):
        setting.compile()


# Pickles


def test_programs_are_pickled_by_name() -> None:
    mock = MockBackend()
    assert pickle.loads(pickle.dumps(order)) is order
    assert copy.copy(order) is copy.deepcopy(order) is order
    bound = everything.bind(more="less").with_options(seed=5, temperature=0)
    again = pickle.loads(pickle.dumps(bound))
    assert (again.func, again.bind_arguments, again.options) == (bound.func, bound.bind_arguments, bound.options)
    assert again.run("a", backend=mock).text() == bound.run("a", backend=mock).text()
    nested = pickle.loads(pickle.dumps(outer.compile()))
    assert nested.run(text="a", backend=mock, seed=1).text() == outer.run("a", backend=mock, seed=1).text()
    assert b"be brief" not in pickle.dumps(everything).lower()  # no code travels


def plain(s: Any) -> None:
    """A function of that name, and a program of another."""


other_name = sgl.function(plain)


def test_what_cannot_be_found_by_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @sgl.function
    def local(s: sgl.ProgramState) -> None:
        """A closure."""

    anonymous = sgl.function(lambda s: None)
    for program, message in (
        (local, "'test_what_cannot.*<locals>.local' is defined inside a function.*at the top of a module"),
        (anonymous, "is a lambda"),
        (other_name, r"tests.test_lang_saved.plain is no program.*bind that name with @sgl.function"),
    ):
        for pickled in (program, program.with_options(seed=1), program.compile()):
            with pytest.raises(InvalidRequest, match=message):
                pickle.dumps(pickled)
        assert copy.deepcopy(program) is program
    text = pickle.dumps(order)
    monkeypatch.setattr("tests.test_lang_saved.order", everything)
    with pytest.raises(InvalidRequest, match="is another program"):
        pickle.dumps(the_order)
    monkeypatch.delattr("tests.test_lang_saved.order")
    with pytest.raises(InvalidRequest, match="order is no program"):
        pickle.loads(text)


the_order = order


def test_cloudpickle_sends_the_function_itself() -> None:
    """It asks programs as pickle does, and can do what pickle cannot."""
    module = types.ModuleType("cloudpickle.made_up")
    exec("def reduced(program): return program.__reduce_ex__(4)", module.__dict__)
    local = sgl.function(lambda s: None)
    assert module.reduced(local)[2]["func"] is local.func


# The command line


def command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = capsys.readouterr()
    return int(stopped.value.code or 0), said.out, said.err


def test_the_command_line_runs_a_saved_program(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "order.json")
    order.with_options(temperature=0, max_tokens=96).compile().save(path)
    expected = order.run("A = 1", backend=server.engine, temperature=0, max_tokens=96)
    run = ["run", "--url", server.url, path]
    assert command([*run, "--arg", "text=A = 1"], capsys) == (0, expected.text() + "\n", "")
    code, out, _ = command([*run, "--json", "--arg=text=A = 1"], capsys)
    assert (code, json.loads(out)) == (0, expected.to_dict())
    page = str(tmp_path / "page.html")
    code, out, said = command(["trace", "--url", server.url, "--output", page, path, "--arg", "text=A = 1"], capsys)
    assert (code, out) == (0, expected.text() + "\n")
    assert "1 program" in said
    for wrong, message in (
        ([], "takes more arguments: --arg text=TEXT"),
        (["--arg", "txt=a"], "no argument 'txt' (did you mean 'text'?); its arguments: text"),
        (["--arg", "text"], "--arg takes NAME=TEXT, not 'text'"),
        (["--arg", "text=a", "--arg", "text=b"], "--arg text= is given twice"),
        (["--seed", "1"], "takes --arg NAME=TEXT, and --json"),
        (["text"], "takes --arg NAME=TEXT, and --json"),
    ):
        code, out, said = command([*run, *wrong], capsys)
        assert (code, out) == (2, "")
        assert message in said
    (tmp_path / "wrong.json").write_text("{}")
    code, _, said = command(["run", str(tmp_path / "wrong.json")], capsys)
    assert code == 1
    assert "an object with v, name, args and nodes" in said
