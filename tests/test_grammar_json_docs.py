"""docs/json_schema.md says of every keyword and format what the compiler does with it."""

from __future__ import annotations

import re

import pytest

from benchmarks.json_generation import BYTES
from sgl.errors import UnsupportedSchema
from sgl.grammar import compile
from sgl.grammar.schema.document import Dialect
from sgl.grammar.text.formats import FORMATS, KNOWN_BUT_UNDECIDABLE
from tests.house import REPOSITORY

DRAFTS = (4, 6, 7, 2019, 2020)
TEXT = (REPOSITORY / "docs" / "json_schema.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \| (\d+)( only|–) \|", TEXT, re.MULTILINE)


def test_the_table_lists_the_keywords_of_every_draft() -> None:
    listed: dict[int, set[str]] = {draft: set() for draft in DRAFTS}
    for keyword, first, until in ROWS:
        for draft in DRAFTS:
            if draft == int(first) or (draft > int(first) and until == "–"):
                listed[draft].add(keyword)
    assert listed == {draft: set(Dialect(draft).keywords) for draft in DRAFTS}


def test_the_formats_are_listed() -> None:
    table = TEXT.split("## Formats")[1].split("## Texts")[0]
    rows = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    refused = {name for row in rows if row.startswith("refused") for name in re.findall("`([^`]+)`", row)}
    enforced = {name for row in rows if not row.startswith("refused") for name in re.findall("`([^`]+)`", row)}
    assert enforced == FORMATS
    assert refused == set(KNOWN_BUT_UNDECIDABLE)


@pytest.mark.parametrize("name", sorted(KNOWN_BUT_UNDECIDABLE))
def test_undecidable_formats_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        compile(json_schema={"format": name}, vocabulary=BYTES)
    assert caught.value.keyword == "format"
