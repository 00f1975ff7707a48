"""Every example runs, offline, on the embedded model; what it prints has the right form."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sgl

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
HELPERS = {"open_engine"}

# What must be in the output of each.
EXPECTED = {
    "few_shot": r"Who wrote Hamlet\?.*\n.*tokens, \d+ of them from the cache",
    "chat": r"assistant: .*\n.*user: 'And what do they eat\?'\n *assistant: .*\nin 1 request",
    "parallel_decoding": r"- how they sleep:.*\.\nIn one word:(.|\n)*3 branches and a summary in 1 request",
    "tree_of_thought": r"Step 1:(.|\n)*Step 4:(.|\n)*right\? (yes|no)\n\nthe surest of 16 leaves .* in 1 request",
    "choose": r"(praise|complaint|question) +\(praise \d+%, complaint \d+%, question \d+%\)",
    "extract": r"object: Booking\(name=.*, people=\d+, meal='(lunch|dinner)', vegetarian=(True|False)\)",
    "streaming": r"(?s)A story about a fox\..*the moral of another came in \d+ pieces",
    "batch": r"-: a city without a name\n(.|\n)*16 rows done, 4 failed",
    "async_agent": r"(temperature_in|packing_list)\(\{.*\}\) gave .*\n  \d+ turns in \d requests",
    "react": r"Thought 1:(.|\n)*Action 1: (calculate|finish)(.|\n)*Answer:(.|\n)*\d requests",
    "quickstart": r"(?s)\d+ of 20 fields right.*negative \(.*calculate\(.*= 408.*tokens/s .* requests, ",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[sgl.Engine]:
    with sgl.Engine() as engine:
        yield engine


def example(name: str) -> ModuleType:
    """An example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} - HELPERS == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_example_runs(name: str, engine: sgl.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    example(name).main(engine)
    out = capsys.readouterr().out
    assert re.search(EXPECTED[name], out), out


@pytest.mark.parametrize("name", ["quickstart", "extract"])
def test_the_example_runs_as_a_script(name: str, tmp_path: Any) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    assert re.search(EXPECTED[name], run.stdout), run.stdout
    assert "embedded model" in run.stderr
