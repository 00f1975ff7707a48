"""Every block of Python in docs/language.md runs, in order, on a real engine; what links and names it, exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl
from tests.test_lang_engine import folder as folder

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "language.md").read_text(encoding="utf-8")


@pytest.fixture
def engine(folder: Path) -> Iterator[sgl.Engine]:
    with sgl.Engine(model_path=str(folder), device="cpu", max_total_tokens=8192) as engine:
        yield engine


def test_every_block_runs(engine: sgl.Engine) -> None:
    namespace: dict[str, Any] = {"engine": engine, "__name__": "docs"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    assert len(blocks) > 12
    for block in blocks:
        line = PAGE[: block.start()].count("\n") + 1
        source = "\n" * line + block.group(1)  # so that a failure names the line of the page
        exec(compile(source, str(DOCS / "language.md"), "exec", dont_inherit=True), namespace)


def test_every_public_name_is_mentioned() -> None:
    names = set(sgl.__all__) - {"AsyncProgramState", "ProgramState", "SglFunction", "EngineConfig", "ServerArgs"}
    names -= {f"{role}_{edge}" for role in ("system", "user") for edge in ("begin", "end")}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", PAGE)) == []


def test_every_parameter_of_gen_is_explained() -> None:
    import inspect

    parameters = set(inspect.signature(sgl.gen).parameters) - {"name"}
    assert sorted(name for name in parameters if not re.search(rf"\b{name}\b", PAGE)) == []
