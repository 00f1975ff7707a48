"""The site: every page is on it, every public name is in its reference, and it builds without a warning."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import sgl
from sgl.runtime.model.families import FAMILIES
from tests.command_rows import leaves, rows
from tests.patience import PATIENCE
from tools.site_links import on_page_markdown

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
SITE = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
API = (DOCS / "api.md").read_text()


def pages(nav: Any) -> list[str]:
    """Those that a navigation leads to, in order."""
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav
    return [page for item in items for page in pages(item)]


def test_every_page_is_on_the_site_once() -> None:
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {SITE["exclude_docs"]}
    assert sorted(pages(SITE["nav"])) == sorted(there)


def test_every_public_name_is_in_the_reference() -> None:
    listed = dict(re.findall(r"^::: (\S+)\n    options:\n      heading: sgl\.(\w+)$", API, re.MULTILINE))
    named = {name: path for path, name in listed.items()} | dict.fromkeys(re.findall(r"`sgl\.(\w+)(?:\(\))?`", API))
    assert set(sgl.__all__) - set(named) == set()
    for name, path in named.items():
        value = getattr(sgl, name)
        if path is not None and name != "errors":
            module, _, attribute = path.rpartition(".")
            found = getattr(importlib.import_module(module), attribute)
            assert found is value or isinstance(value, found), name


def test_every_option_of_every_command_is_listed() -> None:
    listed = (DOCS / "commands.md").read_text().splitlines()
    for name, command in leaves():
        assert f"`{name}" in "\n".join(listed), name
        if name != "sgl serve":  # whose options are those of docs/server.md and docs/engine.md, and tested there
            missing = [row for row in rows(command) if row not in listed]
            assert missing == [], f"{name}: python -m tests.command_rows prints what docs/commands.md should list"


def test_the_page_of_models_lists_every_family() -> None:
    text = (DOCS / "guide" / "models.md").read_text()
    table = text[: text.index("The folder holds")]
    listed = [name for name in re.findall(r"`(\w+For\w+)`", table) if name in FAMILIES]
    assert sorted(listed) == sorted(FAMILIES)


def test_the_page_of_installing_lists_every_extra_for_users() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (DOCS / "guide" / "install.md").read_text()
    listed = re.findall(r"^\| `sgl\[(\w+)\]` \|", text, re.MULTILINE)
    assert listed == [name for name in extras if name not in ("docs", "dev")]


def test_links_that_leave_the_pages_become_text() -> None:
    page = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(DOCS / "guide" / "install.md")))
    config = SimpleNamespace(docs_dir=str(DOCS))
    for text, expected in {
        "[`x`](../../examples/chat.py) and [y](../server.md#keys)": "`x` and [y](../server.md#keys)",
        "[z](gpu.md), [w](https://example.org/x)": "[z](gpu.md), [w](https://example.org/x)",
        "[none](../../no_such_file.py)": "[none](../../no_such_file.py)",  # which MkDocs warns of
    }.items():
        assert on_page_markdown(text, page=page, config=config) == expected


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs sgl[docs]")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for page in pages(SITE["nav"]):
        text = (tmp_path / page).with_suffix(".html").read_text()
        loaded = re.findall(r"<(?:script|img|link)[^>]*?(?:src|href)=\"(https?:[^\"]*)\"", text)
        assert loaded == [], f"{page} loads something from elsewhere"
    reference = (tmp_path / "api.html").read_text()
    for error in ("MissingExtra", "QueueFull", "UnsupportedSchema"):
        assert f'id="sgl.errors.{error}"' in reference
    assert 'id="sgl.lang.record.expr.gen"' in reference
