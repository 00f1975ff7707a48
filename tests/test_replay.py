"""What programs were answered is recorded, comes out again, and where it does not is shown."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import sgl
from sgl.cli import main, replay
from sgl.errors import ProgramError
from sgl.kernels import cpu
from sgl.lang.config import backend_of
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
    event["logprobs"][0]["output_token_logprobs"][2][0] -= 0.5
    (tmp_path / "changed.json").write_text(json.dumps(trace))
    assert run("--model", str(model), "--replay", str(tmp_path / "changed.json")) == 1
    assert "logprobs[0].output_token_logprobs[2][0]: expected -" in capsys.readouterr().err


def test_other_weights_and_files_that_are_no_traces_are_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_checkpoint(tmp_path / "other", vocab_size=259, with_tokenizer=True, seed=1)
    assert run("--model", str(other), "--replay", str(recorded)) == 2
    assert "with other weights" in capsys.readouterr().err
    wrong: list[tuple[Any, str]] = [
        ('{"format": "sgl trace", "v": 2, "programs": []}', "what engine it is of"),
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


def test_a_trace_of_nothing_is_no_success(
    model: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = json.loads(recorded.read_text())
    without = [{**its, "steps": [step for step in its["steps"] if "send" in step]} for its in trace["programs"]]
    for programs, has in ((without, "2 programs without a value"), ([], "no program")):
        (tmp_path / "empty.json").write_text(json.dumps({**trace, "programs": programs}))
        assert run("--model", str(model), "--replay", str(tmp_path / "empty.json")) == 2
        assert f"nothing was replayed: {tmp_path / 'empty.json'} has {has}" in capsys.readouterr().err


def test_a_hash_is_of_the_weights(model: Path) -> None:
    with Engine(model, device="cpu", max_total_tokens=512) as engine:
        before = engine.weights_hash()
        norm = engine.get_weights_by_name("model.norm.weight")
        engine.update_weights({"model.norm.weight": torch.tensor(norm) + 1})
        assert engine.weights_hash() != before
        engine.update_weights({"model.norm.weight": torch.tensor(norm)})
        assert engine.weights_hash() == before


@sgl.function
def inspect(s: Any, topic: str) -> None:
    """Gens with all kinds of logprobs, a fork, selects, constraints, and a value that Python makes of another."""
    asked: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2, "temperature": 1.0}
    s += f"About {topic}: " + sgl.gen("first", max_tokens=9, logprob_start_len=0, ignore_eos=True, **asked)
    s += f" {len(s['first'])} letters? " + sgl.select("is_long", choices=["yes", "no", "perhaps"])
    branches = s.fork(3)
    for i, branch in enumerate(branches):
        branch += f" {i}. " + sgl.gen("point", regex="[a-z ]{3,9}", max_tokens=10, n=2, **asked)
        branch += sgl.select("kind", choices=["a", "bc"], choices_method=sgl.greedy_token_selection)
    branches.join()
    s += "".join(branch["kind"] for branch in branches) + sgl.gen("last", max_tokens=5, seed=4, **asked)


def recording(engine: Engine, path: Path) -> None:
    backend = backend_of(engine)
    recorder = replay.Recorder(backend, engine)
    for i in range(3):
        inspect.run(f"{'cats and ' * i}dogs", backend=backend, seed=i).text()
    assert recorder.write(str(path)) == 3


def said_by(engine: Engine, path: Path) -> str:
    said: list[str] = []
    replay.replay(str(path), engine, backend_of(engine), said.append)
    return "\n".join(said)


@pytest.mark.slow
@pytest.mark.skipif(cpu.why_not() is not None, reason="deterministic=True needs a compiler")
def test_a_deterministic_trace_has_the_same_bits_whatever_the_engine_does(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options: dict[str, Any] = {"deterministic": True, "device": "cpu", "page_size": 4}
    with Engine(model, disable_radix_cache=True, max_total_tokens=4096, **options) as engine:
        recording(engine, path)
    assert path.read_text().count("output_top_logprobs") == 3 * (2 + 3 * 2)
    same = "27 values of 3 programs are the same"
    with Engine(model, chunked_prefill_size=5, max_total_tokens=4096, **options) as engine:
        assert said_by(engine, path) == same
        assert said_by(engine, path) == same  # warm
        stop = threading.Event()

        def disturb() -> None:
            for i in range(10_000):
                if not stop.is_set():
                    prompts = [f"About {'cats and ' * j}{i}" for j in range(4)]
                    engine.generate(prompts, {"max_new_tokens": 1 + i % 7, "temperature": 1.0})

        others = [threading.Thread(target=disturb) for _ in range(2)]
        try:
            for thread in others:
                thread.start()
            assert said_by(engine, path) == same
        finally:
            stop.set()
            for thread in others:
                thread.join()
    with Engine(model, max_total_tokens=512, speculative_algorithm="auto", **options) as engine:
        assert said_by(engine, path) == same
    trace = json.loads(path.read_text())
    gen = trace["programs"][2]["steps"][-1]["event"]
    gen["logprobs"][0]["output_token_logprobs"].pop()
    path.write_text(json.dumps(trace))
    with Engine(model, max_total_tokens=4096, **options) as engine, pytest.raises(ProgramError, match="'last'"):
        said_by(engine, path)


def test_a_replay_names_what_its_engine_does_otherwise(
    model: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", str(model), "--replay", str(recorded)) == 0
    assert "recorded without deterministic=True" in capsys.readouterr().err
    with Engine(model, deterministic=True, attention_backend="torch", device="cpu") as engine:
        recording(engine, tmp_path / "trace.json")
    assert run("--model", str(model), "--replay", str(tmp_path / "trace.json")) in (0, 1)
    said = capsys.readouterr().err
    assert "attention_backend was 'torch' and is 'cpu'" in said
    assert "deterministic was" not in said  # it follows the trace
    said_here: list[str] = []
    with Engine(model, device="cpu") as engine, contextlib.suppress(ProgramError):
        replay.replay(str(tmp_path / "trace.json"), engine, backend_of(engine), said_here.append)
    assert "deterministic was True and is False" in said_here[0]
