"""The schema of a Python type allows only texts that pydantic reads as the type, and those that people write."""

from __future__ import annotations

import collections
import collections.abc
import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import json
import random
import uuid
import zoneinfo
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from pydantic import Field

from benchmarks.json_generation import BYTES, random_text
from sgl.errors import InvalidRequest
from sgl.grammar import compile
from sgl.lang.typed.schema import typed
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
    (pydantic.Base64Str, ["aGVsbG8=", ""]),
    (pydantic.Base64UrlStr, ["aGVsbG8="]),
    (pydantic.Base64Bytes, ["//79"]),
    (pydantic.ByteSize, ["10 MiB", 5]),
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
    (dict[int | Literal["a"], int], [{"1": 1, "a": 2}, {}]),
    (dict[int | str, int], [{"1": 1, "any": 2}]),
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


def named(**options: Any) -> Any:
    return Annotated[str, pydantic.StringConstraints(**options)]


KEYS: list[tuple[Any, list[str], list[str]]] = [
    (named(pattern="^[a-z]{2}$"), ["ab"], ["a", "AB", ""]),
    (named(min_length=3), ["abc"], ["ab"]),
    (named(max_length=2, pattern="^x"), ["x", "xy"], ["xyz", "y"]),
    (Literal["a", "b"], ["a", "b"], ["c"]),
    (Annotated[int, Field(ge=5, le=20)], ["5", "20"], ["4", "21", "05", "x"]),
    (Annotated[int, Field(gt=0, lt=100, multiple_of=25)], ["25", "75"], ["0", "10", "100"]),
    (decimal.Decimal, ["1.5", "-3"], ["x", ""]),
    (int | Literal["a", "b"], ["7", "-1", "a"], ["c", "1.5", "01", ""]),
    (Annotated[int, Field(ge=5, le=20)] | dt.date | bool, ["5", "2024-02-29", "true"], ["4", "2023-02-29", "x"]),
    (uuid.UUID, ["12345678-1234-5678-1234-567812345678"], ["1"]),
    (dt.date, ["2024-02-29"], ["2023-02-29", "x"]),
    (dt.timedelta, ["P3DT4H"], ["x"]),
    (pydantic.HttpUrl, ["http://localhost"], ["localhost"]),
]


@pytest.mark.parametrize(("key", "allowed", "refused"), KEYS)
@pytest.mark.parametrize("kind", [dict, collections.abc.Mapping, collections.defaultdict])
def test_keys_are_those_of_their_type(kind: Any, key: Any, allowed: list[str], refused: list[str]) -> None:
    known = typed(kind[key, int])
    grammar = compile(json_schema=known.constraint["json"], vocabulary=BYTES)
    for name in allowed:
        assert accepts(grammar, json.dumps({name: 1}, separators=(",", ":")).encode())
        known.parse(json.dumps({name: 1}))
    for name in refused:
        assert not accepts(grammar, json.dumps({name: 1}, separators=(",", ":")).encode())
    for seed in range(10):
        text = random_text(grammar, random.Random(seed), 200)
        if text is not None:
            known.parse(text.decode())


class Holder(pydantic.BaseModel):
    """A field that no grammar can tell."""

    held: pydantic.Json[list[int]] | None = None


@pytest.mark.parametrize(
    "schema",
    [
        pydantic.Json[list[int]],
        pydantic.Json,
        list[pydantic.Json[int] | None],
        Holder,
        dict[pydantic.Json[int], int],
        dict[tuple[int, int], int],
        dict[int | None, int],
        dict[int | tuple[int, int], int],
        dict[Annotated[int, Field(ge=5)], int],
    ],
)
def test_what_no_grammar_can_tell_is_refused_by_name(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"Json, a text that holds JSON|the keys of a dict"):
        typed(schema)


def even(value: int) -> int:
    assert value % 2 == 0
    return value


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        (Annotated[int, pydantic.AfterValidator(even)], "the validator even"),
        (list[Annotated[int, pydantic.BeforeValidator(even)]], "the validator even"),
        (
            Annotated[int, pydantic.WrapValidator(lambda value, handler: even(handler(value)))],
            "the validator <lambda>",
        ),
        (Annotated[int, pydantic.PlainValidator(even)], "the validator even"),
        (pydantic.PastDate, "in the past"),
        (pydantic.condate(gt=dt.date(2020, 1, 1)), "gt 2020-01-01"),
        (Annotated[dt.datetime, Field(ge=dt.datetime(2020, 1, 1))], "ge 2020-01-01"),
        (Annotated[dt.timedelta, Field(le=dt.timedelta(days=1))], "le 1 day"),
        (Annotated[dt.time, Field(lt=dt.time(12))], "lt 12:00:00"),
        (zoneinfo.ZoneInfo, "iana_tz"),
        (pydantic.FutureDatetime, "in the future"),
        (pydantic.FilePath, "validate_file"),
        (pydantic.ImportString, "import_string"),
    ],
)
def test_what_only_code_can_tell_is_said(schema: Any, what: str, caplog: pytest.LogCaptureFixture) -> None:
    known = typed(schema)
    assert what in json.dumps(known.constraint["json"]), known.constraint
    assert what in caplog.text
    compile(json_schema=known.constraint["json"], vocabulary=BYTES)


def test_a_type_that_pydantic_cannot_read_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="look-around"):
        typed(Annotated[str, Field(pattern="^(?!x)a+$")])
