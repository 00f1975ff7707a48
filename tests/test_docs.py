"""The pages say what is there: links lead somewhere, every option is listed with its default, examples run."""

from __future__ import annotations

import ast
import doctest
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from benchmarks.picture import draw
from sgl.runtime.config import EngineConfig
from tests.tiny_models import tiny_checkpoint

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("**/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_what_the_table_of_places_names_is_there() -> None:
    text = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!what happens|---).*", text.partition("## Where things happen")[2], re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        first, *others = re.split(r"\]\(\.\./([^)]+\.(?:py|c))\)", row)
        assert others, f"no file is named: {first}"
        for path, behind in zip(others[::2], others[1::2], strict=True):
            named = re.findall(r"`([A-Za-z_][\w.]*)`", behind)
            assert named, f"nothing of {path} is named: {row}"
            assert set(named) <= set(defined_in(REPOSITORY / path)), path


def defined_in(path: Path) -> Iterator[str]:
    """Functions, classes, their methods and variables of a file, by qualified name."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".c":
        yield from re.findall(r"^[a-z].*?(\w+)\(", source, re.MULTILINE)
        return
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            methods = (its for its in node.body if isinstance(its, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from (f"{node.name}.{method.name}" for method in methods)
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_every_option_of_the_engine_is_listed_with_its_default() -> None:
    text = (REPOSITORY / "docs" / "engine.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.MULTILINE))
    assert list(listed) == [field.name for field in fields(EngineConfig)]
    for field in fields(EngineConfig):
        default = "required" if field.default is MISSING else repr(field.default).replace("'", '"')
        assert listed[field.name].replace("'", '"') == default, field.name


def test_the_examples_of_the_engine_run(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "engine.md").read_text(encoding="utf-8")
    first, second = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    folder = tiny_checkpoint(tmp_path, with_tokenizer=True)
    names: dict[str, object] = {"print": lambda *_: None}
    for block in (first, second):
        exec(block.replace("path/to/checkpoint", str(folder)), names)
    assert names["result"]["text"].startswith('{"name":"')  # type: ignore[index]


def test_the_stages_of_a_schema_are_as_shown() -> None:
    page = REPOSITORY / "docs" / "schema_to_mask.md"
    found = doctest.testfile(str(page), module_relative=False)
    assert found.attempted > 20
    assert found.failed == 0


def test_the_picture_shows_the_committed_figures(tmp_path: Path) -> None:
    results = json.loads((REPOSITORY / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    for panel in results["panels"]:
        assert len(panel["values"]) == len(results["engines"]), panel["title"]
    drawn = tmp_path / "figures.svg"
    draw(results, drawn)
    committed, fresh = (path.read_text(encoding="utf-8") for path in (REPOSITORY / "docs" / "figures.svg", drawn))
    maker = re.search(r"Matplotlib v[\d.]+", fresh)
    assert maker is not None
    if maker[0] in committed:  # other versions draw the same a little differently
        assert committed == fresh, "run python benchmarks/picture.py"
