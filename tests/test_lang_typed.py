"""Typed results: from a Python type to a constraint, and from the text back to the object."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from typing import Any, Literal, NotRequired, TypedDict

import jsonschema
import pydantic
import pytest

import sgl
from sgl.errors import InvalidRequest, ProgramError
from tests.lang_mocks import MockBackend


class Model(pydantic.BaseModel):
    """A model with a default and a bound."""

    name: str
    age: int = pydantic.Field(ge=0)
    tags: list[str] = []


class Typed(TypedDict):
    """A typed dictionary."""

    name: str
    age: NotRequired[int]


class Nested(TypedDict):
    """One inside a list."""

    inner: list[Typed]


@dataclasses.dataclass
class Point:
    """A dataclass."""

    x: int
    y: float = 0.0


class Colour(enum.Enum):
    """Strings."""

    RED = "red"
    GREEN = "green (light)"


class Level(enum.IntEnum):
    """Numbers."""

    LOW = 1
    HIGH = 2


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}

CASES: list[tuple[Any, str, Any]] = [
    (Model, '{"name": "Ada", "age": 36}', Model(name="Ada", age=36)),
    (Typed, '{"name": "Ada"}', {"name": "Ada"}),
    (Nested, '{"inner": [{"name": "Ada", "age": 1}]}', {"inner": [{"name": "Ada", "age": 1}]}),
    (Point, '{"x": 1, "y": 2.5}', Point(1, 2.5)),
    (list[int], "[1, 2, 3]", [1, 2, 3]),
    (list[Point], '[{"x": 1}]', [Point(1)]),
    (dict[str, int], '{"a": 1}', {"a": 1}),
    (int | None, "null", None),
    (int, "42", 42),
    (bool, "true", True),
    (Literal["yes", "no (never)"], "no (never)", "no (never)"),
    (Literal[1, 2], "2", 2),
    (Colour, "green (light)", Colour.GREEN),
    (Level, "2", Level.HIGH),
    (PERSON, '{"name": "Ada"}', {"name": "Ada"}),
    (json.dumps(PERSON), '{"name": "Ada"}', {"name": "Ada"}),
]


@pytest.mark.parametrize(("schema", "text", "expected"), CASES, ids=[str(case[0])[:30] for case in CASES])
def test_the_object_comes_back_and_the_text_matches_its_constraint(schema: Any, text: str, expected: Any) -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("x", schema=schema)

    backend = MockBackend(lambda *_: text)
    state = program.run(backend=backend)
    assert state.value("x") == expected
    assert type(state.value("x")) is type(expected)
    assert state["x"] == text
    [(kind, constraint)] = [backend.calls[0][1].constraint]
    if kind == "json":
        jsonschema.validate(json.loads(text), constraint)
    else:
        assert re.fullmatch(constraint, text)
        assert not re.fullmatch(constraint, text + "x")


@pytest.mark.parametrize(
    ("dtype", "text", "expected"),
    [(int, "-7 ", -7), (float, "2.5\n", 2.5), (bool, "False", False), (bool, "True", True), (str, '"a b"', "a b")],
)
def test_dtypes_have_values(dtype: type, text: str, expected: Any) -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("x", dtype=dtype)
        s += sgl.gen_int("i") if dtype is int else sgl.gen_string("i")

    state = program.run(backend=MockBackend(lambda *_: text))
    assert state.value("x") == expected
    assert state["x"] == text


def test_json_schema_arguments_and_several_samples_have_values() -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("a", json_schema=json.dumps(PERSON)) + sgl.gen("b", json_schema=PERSON, n=2) + sgl.gen("c")
        s += sgl.select("d", ["x", "y"])
        s["e"] = "set"

    state = program.run(backend=MockBackend(lambda *_: '{"name": "Ada"}'))
    assert state.value("a") == {"name": "Ada"}
    assert state.value("b") == [{"name": "Ada"}] * 2
    assert state.value("c") == '{"name": "Ada"}'
    assert state.value("d") == "y"
    assert state.value("e") == "set"


def test_values_are_there_after_joins_and_in_async_programs() -> None:
    @sgl.function
    async def program(s):
        async with s.fork(2) as forks:
            forks += sgl.gen("x", schema=list[int])
        return [await forks[0].value("x"), await s.value("x")]

    assert program.run(backend=MockBackend(lambda *_: "[1]")).ret_value == [[1], [[1], [1]]]


def test_a_text_that_does_not_match_says_why() -> None:
    @sgl.function
    def program(s):
        s += "p" + sgl.gen("x", schema=Model, max_tokens=3)

    state = program.run(backend=MockBackend(lambda *_: '{"name": "A'))
    with pytest.raises(ProgramError, match="'x' does not match its schema") as caught:
        state.value("x")
    assert caught.value.node == "1"
    assert isinstance(caught.value.__cause__, pydantic.ValidationError)
    assert state["x"] == '{"name": "A'


def test_what_is_no_type_is_refused() -> None:
    for wrong in (object(), "not json", "[1]", lambda: None):
        with pytest.raises(InvalidRequest, match="schema"):
            sgl.gen("x", schema=wrong)
    with pytest.raises(InvalidRequest, match="schema="):
        sgl.gen("x", json_schema=Literal["a"])


def test_objects_of_types_have_no_fields_but_theirs() -> None:
    class Open(pydantic.BaseModel, extra="allow"):
        inner: Model

    class Tree(pydantic.BaseModel):
        children: list[Tree] = []
        properties: dict[str, int] = {}

    Tree.model_rebuild(_types_namespace={"Tree": Tree})
    person = {"name": "Ada", "age": 36}
    for schema, good, bad in (
        (Model, person, {**person, "more": 1}),
        (list[Point], [{"x": 1}], [{"x": 1, "z": 2}]),
        (Open, {"inner": person, "more": 1}, {"inner": {**person, "more": 1}}),
        (Tree, {"children": [{"properties": {"a": 1}}]}, {"children": [{"more": 1}]}),
        (Model | Point, {"x": 1}, {"x": 1, "name": "Ada"}),
    ):
        constraint = sgl.gen("x", schema=schema).constraint["json"]
        jsonschema.validate(good, constraint)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, constraint)
    assert sgl.gen("x", schema=PERSON).constraint["json"] == PERSON  # a schema is taken at its word


def test_typed_dicts_keep_what_is_required() -> None:
    node = sgl.gen("x", schema=Nested)
    schema = node.constraint["json"]
    jsonschema.validate({"inner": [{"name": "a"}]}, schema)
    for wrong in ({}, {"inner": [{"age": 1}]}, {"inner": [{"name": 1}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
