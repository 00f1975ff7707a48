"""The IR on a wire: what a program records survives JSON, fits its JSON Schema, and nothing else gets in."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sgl
from sgl.errors import InvalidRequest
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.check import Checker, Limits, json_schema, program_from_wire
from sgl.lang.ir.encoding import node_from_json, segment_from_json, to_json
from tests.lang_mocks import MockBackend, ProgramBackend

pytestmark = pytest.mark.usefixtures("unhurried")

SCHEMA_FILE = Path(__file__).resolve().parent.parent / "docs" / "ir.schema.json"
PROGRAM = {"v": ir.VERSION, "name": "test", "seed": 1, "args": {"a": "text"}}


def validator(kind: str) -> Any:
    """Of a program header or a segment, by an independent implementation of JSON Schema."""
    return jsonschema.Draft202012Validator({**json_schema(), "anyOf": [{"$ref": f"#/$defs/{kind}"}]})


SEGMENTS, HEADERS = validator("segment"), validator("program")


def test_the_schema_file_is_the_schema() -> None:
    """Regenerate: python -c "import json; from sgl.lang.ir.check import json_schema;
    print(json.dumps(json_schema(), indent=1))" > docs/ir.schema.json"""
    assert json.loads(SCHEMA_FILE.read_text()) == json_schema()
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_the_example_of_the_documentation_is_a_program() -> None:
    page = SCHEMA_FILE.with_name("ir.md").read_text(encoding="utf-8")
    header, segment = page.split("```json\n")[1].split("```")[0].split("\n\n")
    checker = Checker(program_from_wire(json.loads(header)))
    assert len(checker.segment(json.loads(segment)).nodes) == 6
    SEGMENTS.validate(json.loads(segment))
    for op in ir.NODES:
        assert f"`{op}`" in page


def fields_of(node: type[ir.Node]) -> set[str]:
    """The fields that travel."""
    return {field.name for field in dataclasses.fields(node) if field.name != "client"}  # type: ignore[arg-type]


def test_every_kind_of_node_has_a_schema_with_its_fields() -> None:
    definitions = json_schema()["$defs"]
    for op, node in ir.NODES.items():
        fields = fields_of(node)
        assert set(definitions[op]["properties"]) - {"st", "op"} == fields


@sgl.function
def everything(s, a):
    """A program with every kind of node."""
    s += sgl.system("sys") + sgl.user(a + sgl.image(b"png"))
    s += sgl.assistant_begin()
    with s.var_scope("scope"):
        s += sgl.gen("x", max_tokens=3, stop=["a", "b"], stop_token_ids=[1], logit_bias={5: 1.5}, extra={"k": [1]})
    s += sgl.gen("y", regex="a+") + sgl.gen("z", dtype=int) + sgl.gen("j", schema={"type": "object"})
    s += sgl.gen("e", ebnf="root ::= 'a'") + sgl.separate_reasoning(sgl.gen("r"), "qwen3")
    s += sgl.gen("t", tools=[tool])
    s += sgl.assistant_end()
    s += sgl.select("c", ["one", "two"], choices_method="greedy_token_selection")
    s += s.ref("scope").strip().lower().upper().split(",", take=-1).slice(0, None).replace("a", "b")
    s["set"] = "value"
    forks = s.fork(2)
    forks += sgl.gen("f")
    forks.join()
    s.fork(1).join("concate_and_append")


def tool(x: int) -> int:
    """Doubles."""
    return 2 * x


def recorded() -> list[dict[str, Any]]:
    """The segments of that program, as a server got them."""
    backend = ProgramBackend(MockBackend(lambda *_: "text", chat_template="qwen2-vl"))
    everything.run("hi", backend=backend, seed=3).sync()
    return backend.sessions[0].segments


def test_what_programs_record_fits_the_schema_and_comes_back_the_same() -> None:
    seen = set()
    for segment in recorded():
        SEGMENTS.validate(segment)
        seen |= {node["op"] for node in segment["nodes"]}
        assert json.loads(json.dumps(to_json(segment_from_json(segment)))) == segment
    assert seen | {"arg"} == set(ir.NODES)


def test_nodes_come_back_equal() -> None:
    nodes: list[ir.Node] = [
        ir.Text("t"),
        ir.Gen("x", {"stop": ("a",), "temperature": 0.5}, {"json": {"enum": [[1], "a"]}}),
        ir.Select(None, ("a", "b")),
        ir.Ref(0, 1).split(None, take=2),
        ir.Fork((1, 2)),
        ir.Join((1, 2), "append"),
        ir.Media("image", "aGk="),
    ]
    for node in nodes:
        again = node_from_json(json.loads(json.dumps(to_json(node))))
        assert to_json(again) == to_json(node)
    assert ir.Media("image", "aGk=").bytes() == b"hi"


def check(*nodes: Any, final: bool = False, limits: Limits | None = None) -> ir.Segment:
    """What a server does with one segment."""
    data: dict[str, Any] = {"nodes": list(nodes)}
    return Checker(program_from_wire(PROGRAM), limits).segment({**data, "final": True} if final else data)


def text(content: str = "t", stream: int = 0) -> dict[str, Any]:
    """A text node."""
    return {"st": stream, "op": "text", "text": content}


def gen(**fields: Any) -> dict[str, Any]:
    """A gen node."""
    return {"st": 0, "op": "gen", "name": "x", **fields}


FORK = {"st": 0, "op": "fork", "children": [1, 2]}

BAD_HEADERS: list[tuple[Any, str]] = [
    ("x", "expected object"),
    ({**PROGRAM, "v": 99}, "version 99"),
    ({"v": ir.VERSION, "seed": 1}, "'name' is missing"),
    ({**PROGRAM, "seed": "1"}, "expected integer, not str"),
    ({**PROGRAM, "seed": True}, "expected integer, not bool"),
    ({**PROGRAM, "code": "import os"}, "unknown field 'code'"),
    ({**PROGRAM, "defaults": {"temprature": 1}}, "unknown field 'temprature'"),
    ({**PROGRAM, "lease_s": -1}, "less than 0"),
    ({**PROGRAM, "args": {"a": 1}}, "expected string"),
]


@pytest.mark.parametrize(("header", "message"), BAD_HEADERS)
def test_bad_headers_are_refused(header: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        program_from_wire(header)
    assert not HEADERS.is_valid(header)


BAD_SHAPES: list[tuple[Any, str]] = [
    ({"st": 0, "op": "exec", "code": "1"}, "unknown op 'exec'; there are .*text, "),
    ("text", "unknown op"),
    ({"st": 0, "op": "text"}, "'text' is missing"),
    ({"st": -1, "op": "text", "text": "x"}, "less than 0"),
    ({**text(), "more": 1}, "unknown field 'more'"),
    (gen(params={"n": 0}), "less than 1"),
    (gen(params={"n": 5000}), "more than 1024"),
    (gen(params={"stop": "a"}), "expected array"),
    (gen(constraint={"python": "x"}), "unknown field 'python'"),
    (gen(constraint={"regex": "a", "json": {}}), "2 fields are more than 1"),
    (gen(dtype="list"), "expected one of"),
    ({"st": 0, "op": "select", "name": "c", "choices": []}, "0 items are less than 1"),
    ({"st": 0, "op": "select", "name": "c", "choices": ["a"], "method": "best"}, "expected one of"),
    ({"st": 0, "op": "ref", "stream": 0, "index": 0, "functions": [["eval", "1"]]}, "forms"),
    ({"st": 0, "op": "ref", "stream": 0, "index": 0, "functions": [["split", ","]]}, "forms"),
    ({"st": 0, "op": "fork", "children": []}, "less than 1"),
    ({"st": 0, "op": "join", "children": [1], "mode": "mix"}, "expected one of"),
    ({"st": 0, "op": "media", "kind": "sound", "data": ""}, "expected one of"),
]


@pytest.mark.parametrize(("node", "message"), BAD_SHAPES)
def test_bad_shapes_are_refused_here_and_by_the_schema(node: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check(node)
    assert not SEGMENTS.is_valid({"nodes": [node]})


BAD_PROGRAMS: list[tuple[list[Any], str]] = [
    ([text(stream=1)], "stream 1 was never forked"),
    ([FORK, FORK], "stream 1 exists already"),
    ([{"st": 0, "op": "fork", "children": [0]}], "stream 0 exists already"),
    ([{"st": 0, "op": "join", "children": [1]}], "no open branch"),
    ([FORK, {"st": 1, "op": "join", "children": [2]}], "no open branch of stream 1"),
    ([FORK, {"st": 0, "op": "join", "children": [1, 1]}], "no open branch"),
    ([FORK, {"st": 0, "op": "join", "children": [1]}, text(stream=1)], "stream 1 was joined"),
    ([{"st": 0, "op": "role_end", "role": "user"}], "no user turn is open"),
    ([{"st": 0, "op": "role_begin", "role": "user"}] * 2, "cannot begin inside"),
    ([{"st": 0, "op": "arg", "name": "b"}], "without an argument 'b'"),
    ([text(), {"st": 0, "op": "ref", "stream": 0, "index": 0}], "no earlier gen"),
    ([{"st": 0, "op": "ref", "stream": 0, "index": 0}], "no earlier gen"),
    ([FORK, gen(), {"st": 1, "op": "ref", "stream": 0, "index": 2}], "no earlier gen"),
    ([gen(), {"st": 0, "op": "tool_results", "index": 0}], "no gen with tools"),
    ([{"st": 0, "op": "scope_end", "name": "a"}], "no scope 'a' is open"),
    ([{"st": 0, "op": "scope_begin", "name": "b"}, {"st": 0, "op": "scope_end", "name": "a"}], "no scope 'a'"),
]


@pytest.mark.parametrize(("nodes", "message"), BAD_PROGRAMS)
def test_programs_that_make_no_sense_are_refused_with_their_place(nodes: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check(*nodes)
    assert f"nodes[{len(nodes) - 1}]" in str(caught.value)
    assert SEGMENTS.is_valid({"nodes": nodes})  # which no schema can see


LIMITS = Limits(nodes=5, streams=3, characters=20, constraint_characters=10, choices=2)
TOO_MUCH: list[tuple[str, list[Any]]] = [
    ("nodes", [text()] * 6),
    ("streams", [{"st": 0, "op": "fork", "children": [1, 2, 3]}]),
    ("characters", [text("x" * 11), text("x" * 11)]),
    ("characters", [{"st": 0, "op": "set", "name": "x", "value": "y" * 21}]),
    ("characters", [{"st": 0, "op": "media", "kind": "image", "data": "y" * 21}]),
    ("characters", [{"st": 0, "op": "select", "name": "x", "choices": ["y" * 21]}]),
    (
        "characters",
        [gen(), {"st": 0, "op": "ref", "stream": 0, "index": 0, "functions": [["replace", "", "y" * 21]]}],
    ),
    ("characters", [gen(params={"stop": ["y" * 21]})]),
    ("characters", [gen(params={"extra": {"y" * 21: 1}})]),
    ("characters", [gen(tools=[{"name": "y" * 21}])]),
    ("constraint_characters", [gen(constraint={"regex": "a" * 11})]),
    ("choices", [{"st": 0, "op": "select", "name": "c", "choices": ["a", "b", "c"]}]),
]


@pytest.mark.parametrize(("what", "nodes"), TOO_MUCH)
def test_limits_hold(what: str, nodes: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{what}, and the limit is") as caught:
        check(*nodes, limits=LIMITS)
    assert caught.value.param == what


def test_limits_count_over_all_segments_and_nothing_follows_the_last() -> None:
    checker = Checker(program_from_wire(PROGRAM), LIMITS)
    checker.segment({"nodes": [text()] * 3})
    with pytest.raises(InvalidRequest, match="6 nodes"):
        checker.segment({"nodes": [text()] * 3})
    checker = Checker(program_from_wire(PROGRAM))
    checker.segment({"nodes": [], "final": True})
    with pytest.raises(InvalidRequest, match="after the final segment only answers"):
        checker.segment({"nodes": []})


def test_answers_are_taken_for_open_tool_calls_only() -> None:
    checker = Checker(program_from_wire(PROGRAM))
    answer = {"st": 0, "index": 1, "turns": [{"role": "tool", "content": "4"}]}
    with pytest.raises(InvalidRequest, match="waits for no answer"):
        checker.segment({"nodes": [], "answers": [answer]})
    checker = Checker(program_from_wire(PROGRAM))
    nodes = [gen(tools=[{"name": "f"}]), {"st": 0, "op": "tool_results", "index": 0}]
    checker.segment({"nodes": nodes})
    assert checker.segment({"nodes": [], "answers": [answer]}).answers[0][2][0].content == "4"
    with pytest.raises(InvalidRequest, match="waits for no answer"):
        checker.segment({"nodes": [], "answers": [answer]})
    with pytest.raises(InvalidRequest, match="unknown field"):
        checker.segment({"nodes": [], "answers": [{**answer, "code": 1}]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["st", "op", "text", "name", "children", "params", "index"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
NODE = st.fixed_dictionaries(
    {"op": st.sampled_from(sorted(ir.NODES)), "st": st.integers(0, 2) | JSON},
    optional={
        field: JSON | st.sampled_from(["user", "gather", "x"])
        for node in ir.NODES.values()
        for field in fields_of(node)
    },
)


@given(st.lists(NODE, max_size=4) | JSON)
def test_no_input_gets_past_the_check_that_the_schema_refuses_or_breaks_it(nodes: Any) -> None:
    """A segment is either an `InvalidRequest` or fits the schema and executes."""
    data = {"nodes": nodes, "final": True}
    try:
        segment = Checker(program_from_wire(PROGRAM)).segment(data)
    except InvalidRequest:
        return
    SEGMENTS.validate(data)
    assert len(segment.nodes) == len(nodes)


@given(st.text(max_size=30), st.text(min_size=1, max_size=3), st.integers(-5, 5), st.integers(-5, 5))
def test_text_functions_are_those_of_python(value: str, part: str, first: int, last: int) -> None:
    ref = ir.Ref(0, 0)
    parts = value.split(part)
    assert ir.apply_functions(value, ref.strip().lower().functions) == value.strip().lower()
    assert ir.apply_functions(value, ref.upper().functions) == value.upper()
    assert ir.apply_functions(value, ref.slice(first, last).functions) == value[first:last]
    assert ir.apply_functions(value, ref.replace(part, "-").functions) == value.replace(part, "-")
    taken = ir.apply_functions(value, ref.split(part, take=first).functions)
    with pytest.raises(InvalidRequest, match="would make a text of"):
        ir.apply_functions("aaaa", [("replace", "a", "a" * 300_000)])
    assert taken == (parts[first] if -len(parts) <= first < len(parts) else "")


def test_a_template_that_is_no_text_cannot_be_sent() -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        to_json(ir.Program("p", 1, chat_template=lambda messages, add: ""))


def test_parameters_resolve_gen_over_run_over_default() -> None:
    header = ir.Program("p", 1, defaults={"temperature": 0.5, "stop": ("r",)})
    node = ir.Gen("x", {"max_tokens": 7}, dtype="int")
    params, seeds = ir.params_and_seeds(header, node, "3", template_stops=["<end>", "r"])
    assert (params["temperature"], params["max_tokens"], params["top_p"]) == (0.5, 7, 1.0)
    assert params["stop"] == ["r", " ", "\n", "<end>"]
    assert seeds == [ir.node_seed(1, "3", 0)]
    params["stop"].append("mine")
    assert ir.params_and_seeds(header, node, "3")[0]["stop"] == ["r", " ", "\n"]
