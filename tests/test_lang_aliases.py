"""Fields that are read under aliases, at paths and from the first of several places are written where they are read."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Annotated, Any, TypedDict

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AliasChoices, AliasGenerator, AliasPath, ConfigDict, Field

import sgl
from benchmarks.json_generation import BYTES, random_text
from sgl.errors import InvalidRequest
from sgl.grammar import compile
from sgl.lang.typed.schema import typed
from tests.json_random import accepts


def model(config: ConfigDict | None = None, **fields: Any) -> type[pydantic.BaseModel]:
    """A model of integers: an alias for each, or a FieldInfo."""
    infos = {
        name: (int, item if isinstance(item, type(Field())) else Field(validation_alias=item))
        for name, item in fields.items()
    }
    made: type[pydantic.BaseModel] = pydantic.create_model("Made", __config__=config, **infos)  # type: ignore[call-overload]
    return made


def optional(alias: Any) -> Any:
    return Field(7, validation_alias=alias)


class Dictionary(TypedDict):
    """One of the kinds of types that have fields."""

    x: Annotated[int, Field(validation_alias=AliasPath("a", "b"))]


@dataclasses.dataclass
class Data:
    """Another."""

    x: Annotated[int, Field(validation_alias=AliasPath("a", "b"))]
    y: Annotated[int, Field(validation_alias=AliasPath("a", "c"))] = 5


class Inner(pydantic.BaseModel):
    """Within a list, and twice."""

    x: int = Field(validation_alias=AliasPath("at", "x"))


INSIDE = ConfigDict(alias_generator=AliasGenerator(validation_alias=lambda name: AliasPath("in", name)))
BY_NAME = ConfigDict(validate_by_name=True, validate_by_alias=False)
EITHER = ConfigDict(validate_by_name=True, validate_by_alias=True)

READ: list[tuple[Any, list[str], list[str]]] = [
    (model(x="a"), ['{"a":1}'], ['{"x":1}', "{}"]),
    (model(x=AliasPath("a")), ['{"a":1}'], ['{"x":1}']),
    (model(x=AliasPath("a", "b")), ['{"a":{"b":1}}'], ['{"x":1}', '{"a":1}', '{"a":{}}', "{}"]),
    (model(x=AliasPath("a", "b", "c")), ['{"a":{"b":{"c":1}}}'], ['{"a":{"b":1}}']),
    (model(x=optional(AliasPath("a", "b"))), ['{"a":{"b":1}}', '{"a":{}}', "{}"], ['{"a":{"b":null}}']),
    (model(x=AliasPath("p", 0)), ['{"p":[1]}'], ['{"p":[]}', '{"p":1}', "{}", '{"p":[1,2]}']),
    (model(x=AliasPath("p", 1)), ['{"p":["any",1]}'], ['{"p":[1]}', '{"p":[1,"any"]}']),
    (model(x=AliasPath("p", 0), y=AliasPath("p", 2)), ['{"p":[1,{},2]}'], ['{"p":[1]}', '{"p":[1,2]}']),
    (
        model(x=AliasPath("p", 0), y=optional(AliasPath("p", 1))),
        ['{"p":[1]}', '{"p":[1,2]}'],
        ['{"p":[1,"a"]}', '{"p":[]}'],
    ),
    (model(x=AliasPath("p", 0, "b"), y=AliasPath("q")), ['{"p":[{"b":1}],"q":2}'], ['{"p":[1],"q":2}']),
    (model(x=AliasChoices("a", "b")), ['{"a":1}'], ['{"x":1}', "{}"]),
    (model(x=AliasChoices(AliasPath("p", 0), "b")), ['{"b":1}'], ['{"x":1}', '{"p":["x"],"b":1}']),
    (model(x=AliasChoices(AliasPath("p", 0), AliasPath("q"))), ['{"q":1}'], ['{"x":1}']),
    (model(x=AliasChoices(AliasPath("p", 0), AliasPath("q", "r"))), ['{"p":[1]}'], ['{"x":1}']),
    (model(x=AliasChoices("a", "b"), y=AliasChoices("b", "a")), ['{"a":1,"b":2}'], ['{"a":1}', '{"x":1,"y":2}']),
    (
        model(INSIDE, x=Field(), y=Field(3)),
        ['{"in":{"x":1}}', '{"in":{"x":1,"y":2}}'],
        ['{"in":{"y":2}}', '{"x":1}'],
    ),
    (model(BY_NAME, x="a", y=AliasPath("p", 0)), ['{"x":1,"y":2}'], ['{"a":1,"y":2}', '{"x":1,"p":[2]}']),
    (model(EITHER, x="a", y=AliasPath("p", 0)), ['{"a":1,"y":2}'], ['{"a":"","y":2}']),
    (model(EITHER | ConfigDict(extra="allow"), x=optional("a")), ['{"a":1}', '{"b":"c"}'], ['{"x":"c"}']),
    (model(ConfigDict(extra="forbid"), x=AliasPath("a", "b")), ['{"a":{"b":1}}'], ['{"x":1}']),
    (Dictionary, ['{"a":{"b":1}}'], ['{"x":1}']),
    (Data, ['{"a":{"b":1}}', '{"a":{"b":1,"c":2}}'], ['{"x":1}', '{"a":{"c":1}}']),
    (list[Inner], ["[]", '[{"at":{"x":1}},{"at":{"x":2}}]'], ['[{"x":1}]']),
    (dict[str, Inner | None], ['{"k":{"at":{"x":1}}}', '{"k":null}'], ['{"k":{"x":1}}']),
]


@pytest.mark.parametrize(("schema", "allowed", "refused"), READ)
def test_a_field_is_written_where_it_is_read(schema: Any, allowed: list[str], refused: list[str]) -> None:
    known = typed(schema)
    grammar = compile(json_schema=known.constraint["json"], vocabulary=BYTES)
    for text in allowed:
        assert accepts(grammar, text.encode()), text
        known.parse(text)
    for text in refused:
        assert not accepts(grammar, text.encode()), text
    for seed in range(20):
        made = random_text(grammar, random.Random(seed), 120)
        if made is not None:
            known.parse(made.decode())


REFUSED: list[tuple[Any, str]] = [
    (model(x="a", y="a"), "'x' and 'y' are both read from 'a': give each a validation_alias of its own"),
    (model(x="a", y=AliasPath("a", "b")), "both read from 'a'"),
    (model(x=AliasPath("a", "b", "c"), y=AliasPath("a", "b")), "both read from 'a.b'"),
    (model(x=optional(AliasChoices("a", "b")), y="b"), "both read from 'b'"),
    (model(x=AliasChoices(AliasPath("p", 0), "a"), y=AliasPath("p", 0)), "both read from 'p.0'"),
    (model(EITHER, x=optional("y"), y="x"), "both read from 'x'"),
    (model(x=AliasPath("a", 0), y=AliasPath("a", "b")), "one value is a list and an object, which has 'b'"),
    (model(x=AliasPath("a", -1)), "from 0 to 999"),
    (model(x=AliasPath("a", 10**9)), "from 0 to 999"),
]


@pytest.mark.parametrize(("schema", "why"), REFUSED)
def test_fields_that_no_one_place_is_for_are_refused(schema: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        typed(schema)


_STEPS = st.sampled_from(["a", "b", "x", "y", 0, 1])
_PATHS = st.builds(
    lambda first, rest: AliasPath(first, *rest), st.sampled_from("abxy"), st.lists(_STEPS, max_size=2)
)
_ALIASES = st.one_of(
    st.none(),
    st.sampled_from("abxy"),
    _PATHS,
    st.lists(st.one_of(st.sampled_from("abxy"), _PATHS), min_size=1, max_size=3).map(
        lambda some: AliasChoices(*some)
    ),
)
_FIELDS = st.dictionaries(st.sampled_from("xyz"), st.tuples(_ALIASES, st.booleans()), min_size=1)


@given(_FIELDS, st.sampled_from([(True, True), (True, False), (False, True)]), st.sampled_from(["allow", "ignore"]))
def test_whatever_is_written_is_read(
    fields: dict[str, tuple[Any, bool]], by: tuple[bool, bool], extra: Any
) -> None:
    """Of texts for models with any aliases, or the models are refused."""
    config = ConfigDict(validate_by_alias=by[0], validate_by_name=by[1], extra=extra)
    infos = {name: optional(alias) if has_default else alias for name, (alias, has_default) in fields.items()}
    try:
        known = typed(model(config, **infos))
    except InvalidRequest:
        return
    grammar = compile(json_schema=known.constraint["json"], vocabulary=BYTES)
    for seed in range(8):
        made = random_text(grammar, random.Random(seed), 60)
        if made is not None:
            known.parse(made.decode())


def test_a_program_gets_the_fields_from_their_places() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a " + sgl.gen("x", schema=Data, max_tokens=200)

    state = program.run(seed=1)
    written = json.loads(state["x"])
    assert state.value("x") == Data(written["a"]["b"], written["a"].get("c", 5))
