"""What programs were answered is recorded, comes out again, and where it does not is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl.cli import main
from sgl.runtime.engine import Engine
from tests.tiny_models import tiny_checkpoint

PROGRAM = """
import sys
import sgl

def length(text: str) -> int:
    sys.stderr.write("called\\\\n")
    return len(text)

@sgl.function
def story(s, x):
    s += f"Once {x}" + sgl.gen("begin", max_tokens=8, temperature=1.0, ignore_eos=True, return_logprob=True)
    s += f" {length(s['begin'])} then " + sgl.select("choice", choices=["yes", "no"])
    branches = s.fork(2)
    for branch in branches:
        branch += sgl.gen("end", max_tokens=4, temperature=1.0, n=2)
    branches.join()

for x in ("a", "b"):
    print(len(story.run(x, seed=3).text()))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), vocab_size=259, with_tokenizer=True)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    (folder / "story.py").write_text(PROGRAM)
    assert run("--model", str(model), "--record", str(folder / "trace.json"), str(folder / "story.py")) == 0
    return folder / "trace.json"


def test_a_trace_runs_again_and_calls_no_tool(
    model: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", str(model), "--replay", str(recorded)) == 0
    said = capsys.readouterr().err
    assert "8 values of 2 programs are the same" in said
    assert "called" not in said


def test_the_first_difference_is_shown(
    model: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = json.loads(recorded.read_text())
    event = next(step["event"] for step in trace["programs"][1]["steps"] if "event" in step)
    event["value"] = event["text"] = event["text"][:3] + "#" + event["text"][4:]
    (tmp_path / "changed.json").write_text(json.dumps(trace))
    assert run("--model", str(model), "--replay", str(tmp_path / "changed.json")) == 1
    said = capsys.readouterr().err
    assert "program 2 (story), 'begin' of stream 0, token " in said
    assert "expected '#" in said
    trace = json.loads(recorded.read_text())
    event = next(step["event"] for step in trace["programs"][0]["steps"] if "event" in step)
    event["logprobs"][2][0] -= 0.5
    (tmp_path / "changed.json").write_text(json.dumps(trace))
    assert run("--model", str(model), "--replay", str(tmp_path / "changed.json")) == 1
    assert "token 2: expected logprob" in capsys.readouterr().err


def test_other_weights_and_files_that_are_no_traces_are_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_checkpoint(tmp_path / "other", vocab_size=259, with_tokenizer=True, seed=1)
    assert run("--model", str(other), "--replay", str(recorded)) == 2
    assert "with other weights" in capsys.readouterr().err
    wrong: list[tuple[Any, str]] = [
        (recorded.read_text()[:-30], "a torn one"),
        ("[]", "is no trace"),
        ('{"format": "sgl trace", "v": 9, "programs": []}', "of version 9"),
    ]
    for text, message in wrong:
        (tmp_path / "wrong.json").write_text(text)
        assert run("--replay", str(tmp_path / "wrong.json")) == 2
        assert message in capsys.readouterr().err
    assert run("--replay", str(tmp_path / "none.json")) == 2
    assert run("--url", "http://localhost:1", "--replay", str(recorded)) == 2


def test_a_hash_is_of_the_weights(model: Path) -> None:
    with Engine(model, device="cpu", max_total_tokens=512) as engine:
        before = engine.weights_hash()
        norm = engine.get_weights_by_name("model.norm.weight")
        engine.update_weights({"model.norm.weight": torch.tensor(norm) + 1})
        assert engine.weights_hash() != before
        engine.update_weights({"model.norm.weight": torch.tensor(norm)})
        assert engine.weights_hash() == before
