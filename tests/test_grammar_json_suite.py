"""The JSON-Schema-Test-Suite: every group is fully right, or refused by keyword."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.json_generation import BYTES
from sgl.errors import GrammarError, UnsupportedSchema
from sgl.grammar import compile
from tests.json_random import accepts, text_of

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
RIGHT = {"draft4": 0.92, "draft7": 0.92, "draft2020-12": 0.92}
"""The share of groups that must be right, and not refused."""


def groups(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            yield f"{path.stem}: {group['description']}", group


def wrong_verdicts(schema: object, tests: list[dict[str, Any]], name: str) -> list[str]:
    """The tests of a group that are judged wrongly. Raises UnsupportedSchema."""
    try:
        grammar = compile(json_schema=schema, vocabulary=BYTES, key_order="any", whitespace="flexible")  # type: ignore[arg-type]
    except UnsupportedSchema:
        raise
    except GrammarError:  # no value at all satisfies it
        return [f"{name}: {test['description']}" for test in tests if test["valid"]]
    return [
        f"{name}: {test['description']}"
        for test in tests
        if accepts(grammar, text_of(test["data"])) != test["valid"]
    ]


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_group_is_right_or_refused_by_name(draft: str, unpacked: Callable[[str], Path]) -> None:
    wrong: list[str] = []
    right = refused = 0
    for name, group in groups(unpacked("json-schema-test-suite") / draft):
        schema = group["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": DRAFTS[draft], **schema}
        try:
            found = wrong_verdicts(schema, group["tests"], name)
        except UnsupportedSchema as error:
            refused += 1
            found = [] if error.keyword else [f"{name}: refused without a keyword"]
        else:
            right += not found
        wrong += found
    assert wrong == []
    assert right / (right + refused) >= RIGHT[draft], f"{right} right, {refused} refused"


FORMAT_FILES = [
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference", "iri",
    "iri-reference", "uri-template", "json-pointer", "relative-json-pointer",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMAT_FILES)
def test_formats(name: str, unpacked: Callable[[str], Path]) -> None:
    path = unpacked("json-schema-test-suite") / "draft2020-12" / "optional" / "format" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no {path}")
    wrong: list[str] = []
    for group in json.loads(path.read_text()):
        schema = {key: value for key, value in group["schema"].items() if key != "$schema"}
        # Whether a label that begins with xn-- decodes to a valid name is beyond any lexeme: it is taken as it stands.
        tests = [test for test in group["tests"] if name != "hostname" or "xn--" not in str(test["data"]).lower()]
        wrong += wrong_verdicts(schema, tests, name)
    assert wrong == []
