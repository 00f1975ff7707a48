"""W6 and W7 of the GPU benchmarks on a CPU, small: with random weights and prompts, and with a trained model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import constrained, prompts
from benchmarks.gpu.workloads import Machine, Workloads
from sgl.errors import InvalidRequest
from sgl.runtime.engine import Engine
from sgl.runtime.text.tokenizer import Tokenizer
from tests.live_server import CHAT_TEMPLATE
from tests.tiny_models import byte_tokenizer, edit_json, tiny_checkpoint

NAMES = ["W6 first", "W6 warm", "W7 2 new", "W7 2 seen"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tiny_checkpoint(tmp_path / "model", with_tokenizer=True, max_position_embeddings=2048)
    edit_json(path / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, False])
def test_each_figure_comes_from_the_weights_and_prompts_that_were_asked_for(
    trained: bool,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[list[list[int]], list[dict[str, Any]]]] = []
    outputs: list[list[dict[str, Any]]] = []
    flattened: list[Engine] = []
    generate = Engine.generate

    def recorded(engine: Engine, *, input_ids: Any, sampling_params: Any) -> Any:
        calls.append((input_ids, sampling_params))
        outputs.append(generate(engine, input_ids=input_ids, sampling_params=sampling_params))
        return outputs[-1]

    monkeypatch.setattr(Engine, "generate", recorded)
    monkeypatch.setattr(Machine, "measure", lambda: Machine(1.0, 1.0))
    monkeypatch.setattr(Workloads, "warm_up", lambda self: None)
    monkeypatch.setattr(constrained, "_flatten_weights", flattened.append)
    monkeypatch.setattr(constrained, "ROWS", 3)
    monkeypatch.setattr(prompts, "PROMPT_IDS", 300)
    shape, report = tmp_path / "shape", tmp_path / "report.json"
    shape.mkdir()
    config = json.loads((model / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps({**config, "vocab_size": 1024}))
    folder = model if trained else shape
    command = ["constrained", str(folder), str(model), "--counts", "2", "--reps", "1", "--json", str(report)]
    for option in ("context_length=1024", "max_total_tokens=8192", "device=cpu"):
        command += ["--option", option]
    monkeypatch.setattr("sys.argv", [*command, *["--trained"] * trained])
    constrained.main()

    found, printed = json.loads(report.read_text()), capsys.readouterr().out
    assert [row["name"] for row in found["rows"]] == NAMES
    assert all(row["slowdown"] > 0 and row["tokens"] > 0 for row in found["rows"])
    judged = [line for line in printed.splitlines() if line.endswith((" ok", " MISSED"))]
    assert len(judged) == (0 if trained else 2), "bars are of random weights, and of no W7 of two requests"
    assert found["caveat"] == (constrained.TRAINED if trained else constrained.CAVEAT)
    sent = [ids for ids, _ in calls]
    assert len({tuple(ids) for each in sent for ids in each}) == sum(map(len, sent)), "no prompt is sent twice"
    assert ["ignore_eos" in params[0] for _, params in calls] == [False, True] * len(NAMES)
    for (_, params), made in zip(calls[1::2], outputs[0::2], strict=True):
        lengths = [len(result["output_ids"]) for result in made]
        assert [its["max_new_tokens"] for its in params] == lengths, "free rows are as long as constrained ones"
    assert (found["config"]["load_format"], len(flattened)) == (("auto", 0) if trained else ("dummy", 1))
    if not trained:
        assert {len(ids) for each in sent for ids in each} == {prompts.RANDOM_LENGTH}
        return
    tokenizer = Tokenizer.load(str(model))
    for ids, params in calls:
        for row, its in zip(ids, params, strict=True):
            text = tokenizer.decode(row)
            assert text.startswith("[user]")
            assert text.endswith("[assistant]")
            assert all(f"{name} (" in text for name in its.get("json_schema", {}).get("properties", ()))
    ids, params = calls[1]  # free
    with Engine(str(model), device="cpu", context_length=1024, max_total_tokens=8192) as engine:
        again = engine.generate(input_ids=ids, sampling_params=params)
    assert [result["output_ids"] for result in again] == [result["output_ids"] for result in outputs[1]]


def test_a_tokenizer_without_a_chat_template_cannot_ask(tmp_path: Path) -> None:
    byte_tokenizer(384).save_pretrained(tmp_path)
    asks = prompts.requests_for_json(Tokenizer.load(str(tmp_path)))
    with pytest.raises(InvalidRequest, match="no chat template"):
        asks([constrained.PERSON])
