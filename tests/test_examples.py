"""Every example runs, offline, on the embedded model: alone, and wherever `sgl run` and `sgl trace` send it. What it
prints has the right form."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.cli import main
from tests.live_server import LiveServer, served

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

# What must be in the output of each.
EXPECTED = {
    "few_shot": r"Who wrote Hamlet\?.*\n.*tokens, \d+ of them from the cache",
    "chat": r"assistant: .*\n.*user: 'And what do they eat\?'\n *assistant: .*\nin 1 request",
    "parallel_decoding": r"- how they sleep:.*\.\nIn one word:(.|\n)*3 branches and a summary in 1 request",
    "tree_of_thought": r"Step 1:(.|\n)*Step 4:(.|\n)*right\? (yes|no)\n\nthe surest of 16 leaves .* in 1 request",
    "choose": r"(praise|complaint|question) +\(praise \d+%, complaint \d+%, question \d+%\)",
    "grammar": r"apples: (\d{1,3}|\(.*\)) [-+] (\d{1,3}|\(.*\));\n *trains: .*;\n *money: .*;\n",
    "extract": r"object: Booking\(name=.*, people=\d+, meal='(lunch|dinner)', vegetarian=(True|False)\)",
    "streaming": r"(?s)A story about a fox\..*the moral of another came in \d+ pieces",
    "batch": r"-: a city without a name\n(.|\n)*16 rows done, 4 failed",
    "async_agent": r"(temperature_in|packing_list)\(\{.*\}\) gave .*\n  \d+ turns in \d requests",
    "image": r"This model takes no images: sgl run --model ",
    "react": r"Thought 1:(.|\n)*Action 1: (calculate|finish)(.|\n)*Answer:(.|\n)*\d requests",
    "quickstart": r"(?s)\d+ of 20 fields right.*negative \(.*calculate\(.*= 408.*tokens/s .* requests, ",
}


LONG = "quickstart", "rl", "deterministic", "speculation", "lora", "memory"
OWN = {
    "deterministic": r"False: \d+ log-probabilities differ between .*\n.*True: 0 log-probabilities differ",
    "rl": r"step +1 +reward 0\.\d+\nstep +2 +reward 0\.\d+\nreward .* -> .*; logprobs differ by \d\.\de-0[5-9] at most",
    "lora": r"adapters: noise\nthe model alone: '.*'\nnoise: '.*'\nin a program: '.*'",
    "memory": r"first engine: \d+ prompt tokens, \d+ cached,(.|\n)*second engine: \d+ prompt tokens",
    "speculation": r"off +\d+ steps(.|\n)*auto +\d+ steps, \d+ of \d+ drafts stood\nthe outputs are the same\n",
}
"""Of those that need an engine of their own."""


@pytest.fixture(scope="module")
def engine() -> Iterator[sgl.Engine]:
    with sgl.Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: sgl.Engine) -> Iterator[LiveServer]:
    """One server of the one engine, for all examples."""
    with served(engine) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_other_engine(engine: sgl.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No example loads a model of its own."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a second engine is loaded")

    monkeypatch.setattr(sgl.Engine, "__init__", refuse)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", sys.argv)


def command(arguments: list[str]) -> None:
    """`sgl` with these arguments, in this process; it must succeed."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*EXPECTED, *OWN}


@pytest.mark.costly
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_example_runs_on_the_default_backend(
    name: str, engine: sgl.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    sgl.set_default_backend(engine)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(EXPECTED[name], out), out


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_example_runs_on_a_server(name: str, server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    command(["run", "--url", server.url, str(EXAMPLES / f"{name}.py")])
    said = capsys.readouterr()
    assert re.search(EXPECTED[name], said.out), said.out
    assert "sgl:" not in said.err


@pytest.mark.costly
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_example_is_traced(
    name: str, server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "trace.html"
    command(["trace", "--url", server.url, "--output", str(page), str(EXAMPLES / f"{name}.py")])
    said = capsys.readouterr()
    assert re.search(EXPECTED[name], said.out), said.out
    found = re.search(r'<script id="snapshot" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    timelines = json.loads(found[1])
    assert f"{len(timelines)} program" in said.err
    assert timelines
    assert all(timeline["events"][-1]["type"] == "done" for timeline in timelines)
    assert any(node["op"] in ("gen", "select") for timeline in timelines for node in timeline["nodes"])


@pytest.mark.costly
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=pytest.mark.slow if each in LONG else ())
        for each in ["quickstart", "extract", *OWN]
    ],
)
def test_the_example_runs_as_a_script(name: str, tmp_path: Any) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr
    assert re.search({**EXPECTED, **OWN}[name], run.stdout), run.stdout
    assert " ".join(run.stderr.split()).count("embedded model, a toy") == 1
