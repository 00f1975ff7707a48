"""The schema of a Python type allows only texts that pydantic reads as the type, and those that people write."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import json
import random
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from pydantic import Field

from benchmarks.json_generation import BYTES, random_text
from sgl.errors import InvalidRequest
from sgl.grammar import compile
from sgl.lang.schema import typed
from tests.json_random import accepts


class Level(enum.IntEnum):
    """Items of a set of which no two are equal."""

    LOW = 1
    HIGH = 2


class Tree(pydantic.BaseModel):
    """Everything inside others, and inside itself."""

    price: decimal.Decimal = Field(max_digits=6, decimal_places=2)
    seen: dict[int, set[int]]
    next: list[Tree] = Field(default_factory=list, max_length=1)


TYPES: list[tuple[Any, list[Any]]] = [
    (decimal.Decimal, [19.99, -3]),
    (Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2, ge=0)], [19.99, 999.99]),
    (Annotated[decimal.Decimal, Field(max_digits=4)], [19.99]),
    (pydantic.FiniteFloat, [0.5, -123456.75]),
    (fractions.Fraction, ["3/4"]),
    (complex, ["1.5-2j"]),
    (dt.date, ["2024-02-29", "0476-09-04"]),
    (dt.time, ["23:59:59Z"]),
    (dt.datetime, ["2024-02-29T12:00:00.5+01:00"]),
    (pydantic.AwareDatetime, ["2024-02-29T12:00:00Z"]),
    (pydantic.NaiveDatetime, ["2024-02-29T12:00:00", "2023-04-30T23:59:59.25"]),
    (dt.timedelta, ["P3DT4H"]),
    (pydantic.HttpUrl, ["https://example.org:8080/a/b?c=d#e", "http://localhost", "http://10.0.0.1/x"]),
    (pydantic.FileUrl, ["file:///etc/hosts"]),
    (pydantic.PostgresDsn, ["postgresql://ada:secret@db.example.org:5432/main"]),
    (uuid.UUID, ["12345678-1234-5678-1234-567812345678"]),
    (pydantic.UUID4, ["12345678-1234-4678-9234-567812345678"]),
    (pydantic.IPvAnyAddress, ["10.0.0.1", "::1"]),
    (ipaddress.IPv4Interface, ["10.0.0.1/8"]),
    (ipaddress.IPv4Network, ["10.0.0.0/8", "192.168.1.0/24", "1.2.3.4"]),
    (ipaddress.IPv6Network, ["2001:db8::"]),
    (pydantic.Base64Bytes, ["aGVsbG8=", ""]),
    (dict[int, str], [{"1": "a", "-20": "b"}]),
    (dict[float, int], [{"1.5": 1}]),
    (dict[bool, int], [{"true": 1}]),
    (dict[Level, int], [{}]),
    (dict[dt.date, int], [{"2024-02-29": 1}]),
    (set[int], [[1, 2, 1]]),
    (frozenset[str], [["a", "b"]]),
    (set[Level], [[1, 2]]),
    (set, [["a", 1, None]]),
    (Annotated[set[int], Field(min_length=1, max_length=3)], [[3]]),
    (Annotated[str, pydantic.StringConstraints(strip_whitespace=True, min_length=2)], ["a b", "ab"]),
    (Tree, [{"price": 9.5, "seen": {"3": [1]}, "next": [{"price": 1, "seen": {}}]}]),
    (Literal["a", 1, None] | bool, ["a", None, True]),
]


@pytest.mark.parametrize(("schema", "values"), TYPES, ids=[str(case[0])[:40] for case in TYPES])
def test_what_a_type_allows_is_read_back(schema: Any, values: list[Any]) -> None:
    wanted = typed(schema)
    constraint = wanted.constraint["json"]
    grammar = compile(json_schema=constraint, vocabulary=BYTES)
    own = pydantic.TypeAdapter(schema).json_schema()
    for value in values:
        text = json.dumps(value, separators=(",", ":"))
        assert accepts(grammar, text.encode()), text
        wanted.parse(text)
    num_texts = 0
    for seed in range(60):
        made = random_text(grammar, random.Random(seed), 120)
        if made is not None:
            num_texts += 1
            wanted.parse(made.decode())
            if '"uniqueItems"' not in json.dumps(own):
                jsonschema.validate(json.loads(made), own)
    assert num_texts > 5


def test_repeats_are_told_apart_where_a_grammar_can() -> None:
    def unique(schema: Any) -> bool:
        return bool(typed(schema).constraint["json"].get("uniqueItems"))

    assert unique(set[str])
    assert unique(set[Level])
    assert unique(set[Literal[1, 2]])
    assert not unique(set[int])
    assert unique(Annotated[set[int], Field(min_length=2)])  # which no repeat may stand for


def test_a_type_that_pydantic_cannot_read_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="look-around"):
        typed(Annotated[str, Field(pattern="^(?!x)a+$")])
