"""The benchmark of several GPUs, without one: what it runs, what it writes down, its table and its bars."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks.gpu import parallel, parallel_table, peers
from benchmarks.gpu.parallel import Bench, OverHttp
from benchmarks.gpu.parallel_table import Bar
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.loader import num_weights
from tests.fake_servers import FakeServer
from tests.test_gpu_benchmark import TINY_LLAMA


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder


def bench(model: Path, **changed: Any) -> Bench:
    given: dict[str, Any] = {"model": model, "tokenizer": model, "out": model.parent, "kit": None, "size": 3}
    given |= {"reps": 2, "only": ("W3", "W2", "W1"), "counts": (4,), "options": ("device=cpu",)}
    return Bench(**{**given, **changed})


class Instant:
    """An engine that generates as many tokens as it is asked for, at once."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, model: Path, **options: Any) -> None:
        self.made.append({**options, "hidden_size": ModelConfig.from_pretrained(model).hidden_size})

    def __enter__(self) -> Instant:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def flush_cache(self) -> None:
        pass

    def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        time.sleep(1e-4)
        return [{"output_ids": [0] * params["max_new_tokens"]} for params in sampling_params]


def test_figures_of_engines_are_written_down_with_their_number_of_gpus(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "Engine", Instant)
    monkeypatch.setattr(Instant, "made", [])
    subject = bench(model)
    parallel.offline(subject, 1)
    parallel.offline(subject, 3)
    parallel.wide(subject, 3)
    assert [(made["tp_size"], made["hidden_size"], made["device"]) for made in Instant.made] == [
        (1, 8, "cpu"),
        (3, 8, "cpu"),
        (3, 5120, "cpu"),
    ]
    rows = [json.loads(line) for line in (model.parent / parallel_table.ROWS).read_text().splitlines()]
    names = ["ready", "W3 TTFT", "W3 TPOT", "W1 output", "W2 cold cache", "W2 warm cache"]
    assert [(row["of"], row["gpus"], row["name"]) for row in rows] == [
        *(("engine", gpus, name) for gpus in (1, 3) for name in names),
        *(("wide", 3, name) for name in names[:3]),
    ]
    assert all((row["size"], row["hidden_size"]) == (3, 8) for row in rows)
    lines = parallel_table.table(model.parent)
    assert len(lines) == 2 + len(names) + 3
    assert lines[0].startswith("| | one GPU | 3 GPUs |")
    assert lines[-1].startswith("| 32B shape, W3 TPOT, ms | – |")


def test_the_wide_model_is_one_of_32_billion_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(parallel.WIDE))
    config = ModelConfig.from_pretrained(tmp_path)
    assert config.qkv_bias
    assert 32.7e9 < num_weights(config) < 32.8e9


def test_each_client_sends_the_single_load_and_each_engines_share_is_known(model: Path) -> None:
    generated = [0, 5]

    def answer(path: str, body: Any) -> Any:
        if path != "/generate":
            return {}
        if len(body["input_ids"]) > 3:
            return 400, {"error": {"message": "too long a list"}}
        lengths = [params["max_new_tokens"] for params in body["sampling_params"]]
        generated[0 if lengths == [4, 4, 4] else 1] += sum(lengths)
        server.model_info = {"internal_states": [{"generated_tokens": number} for number in generated]}
        return [{"output_ids": [0] * length} for length in lengths]

    info = {"internal_states": [{"generated_tokens": number} for number in generated]}
    with FakeServer(answer, model_info=info) as server:
        subject = OverHttp(server.url, bench(model), 2)
        assert subject._timed([[i] for i in range(6)], [4, 4, 4, 4, 4, 5]) > 0
        assert server.requests[0][0] == "/flush_cache"
        sent = sorted(body["input_ids"] for path, body in server.requests if path == "/generate")
        assert sent == [[[0], [1], [2]], [[3], [4], [5]]]
        assert subject.shares == [[12, 13]]
        with pytest.raises(SystemExit, match=r"400.*too long a list"):
            subject._timed([[i] for i in range(8)], [4] * 8)


def test_every_engine_gets_a_process_and_one_that_fails_ends_no_other(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, str]] = []

    def run(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        job, gpus = command[command.index("--job") + 1], command[command.index("--gpus") + 1]
        ran.append((job, gpus))
        assert env["NCCL_NVLS_ENABLE"] == "0"
        parallel.Bench.record(bench(model), "engine", int(gpus), parallel.Figure(job, 1.0, "ms", None, (1.0,)))
        return SimpleNamespace(returncode=job == "wide")

    monkeypatch.setattr(parallel.subprocess, "run", run)
    command = ["parallel", str(model), "TOKENIZER", "--out", str(model.parent), "--size", "3"]
    monkeypatch.setattr(sys, "argv", [*command, "--peers", "KIT", "PARTS"])
    with pytest.raises(SystemExit, match=r"wide with 1 GPU.* wide with 3 GPU"):
        parallel.main()
    assert ran == [
        *(("offline", "1"), ("schemas", "1"), ("offline", "3"), ("schemas", "3"), ("wide", "1"), ("wide", "3")),
        *(("over_http", "1"), ("over_http", "3"), ("of_peers", "3")),
    ]
    assert "| wide, ms | 1.000 | 1.000 | 1.000 |" in capsys.readouterr().out
    ran.clear()
    monkeypatch.setattr(sys, "argv", [*command, "--only", "W1", "--parts", "tp,dp"])
    parallel.main()
    assert ran == [("offline", "3"), ("over_http", "1"), ("over_http", "3")]
    for wrong, why in ((["--parts", "two"], "no parts two"), (["--only", "W8"], "no workloads W8")):
        monkeypatch.setattr(sys, "argv", [*command, *wrong])
        with pytest.raises(SystemExit, match=why):
            parallel.main()


def test_the_peers_get_their_switches_and_their_rows_come_before_they_end(tmp_path: Path, model: Path) -> None:
    kit = tmp_path / "kit"
    kit.mkdir()
    (kit / "on_gpu.sh").write_text(
        'peer=$1; shift 2; mkdir -p "$OUT"\n'
        'echo "$peer $* $VLLM_ALLREDUCE_USE_SYMM_MEM$NCCL_NVLS_ENABLE" >> "$(dirname "$0")/called"\n'
        'row() { echo "{\\"engine\\": \\"$peer\\", \\"w\\": \\"W5\\", \\"prefill_tok_s\\": $1}"; }\n'
        '{ row 1; row 3; printf "{\\"cut"; } > "$OUT/$peer.jsonl"; [ $peer = vllm ] || exit 2\n'
    )
    subject = bench(model, kit=(kit, tmp_path))
    with pytest.raises(SystemExit, match="sglang ended with status 2"):
        parallel.of_peers(subject, 3)
    called = (kit / "called").read_text().splitlines()
    assert [line.split()[0] for line in called] == ["sglang", "vllm"]
    assert "--only W3,W1 --opt tp_size=3 --opt enforce_disable_flashinfer_allreduce_fusion=true 00" in called[0]
    assert "--only W3,W1 --opt tensor_parallel_size=3 00" in called[1]
    assert peers.figures_for(8, tmp_path / parallel_table.PEER_ROWS)[0] == {"W5 prefill": (2.0, 2.0)}


def test_lines_are_copied_whole_and_once(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    assert peers._copy_lines(source, 0, target, {}) == 0
    source.write_text('{"a": 1}\n{"a": 2')
    assert peers._copy_lines(source, 0, target, {"b": 0}) == 1
    source.write_text('{"a": 1}\n{"a": 2}\n')
    assert peers._copy_lines(source, 1, target, {"b": 0}) == 1
    assert target.read_text() == '{"b": 0, "a": 1}\n{"b": 0, "a": 2}\n'


def test_the_table_has_ratios_and_verdicts_and_the_latest_figures(tmp_path: Path) -> None:
    def row(of: str, gpus: int, name: str, value: float, unit: str, load: int = 1) -> str:
        its = {"of": of, "gpus": gpus, "load": load, "name": name, "value": value, "unit": unit}
        return json.dumps({**its, "all": [value], "size": 2, "hidden_size": 8})

    rows = [
        row("engine", 1, "W3 TPOT", 9.0, "ms"),
        row("engine", 1, "W3 TPOT", 4.0, "ms"),
        row("engine", 2, "W3 TPOT", 2.5, "ms"),
        row("engine", 1, "W1 output", 100.0, "tok/s"),
        row("engine", 2, "W1 output", 150.0, "tok/s"),
        row("schemas", 2, "W7 64 new", 1.2, "times"),
        row("server", 1, "W1 output", 90.0, "tok/s"),
        row("server", 2, "W1 output", 180.0, "tok/s", 2),
        row("server", 2, "W1 output", 120.0, "tok/s"),
        row("engine", 2, "W3 TPOT", 1.0, "ms")[:-9],  # cut off
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    theirs = [
        {"engine": engine, "w": "W1", "out_tok_s": value, "hidden_size": 8}
        for engine, value in (("sglang", 130.0), ("vllm", 125.0))
    ]
    (tmp_path / "peers.jsonl").write_text("".join(json.dumps(each) + "\n" for each in theirs))
    lines = parallel_table.table(tmp_path)
    assert lines[2:] == [
        "| W3 TPOT, ms | 4.000 | 2.500 | 0.625 | – | – | – | ≤ 2.6 ms ok |",
        "| W1 output, tok/s | 100 | 150 | 1.500 | 130 | 125 | 1.154 | "
        "≥ 1.08 of the better peer ok, ≥ 1.65 of one GPU MISSED |",
        "| under schemas, W7 64 new, times | – | 1.200 | – | – | – | – | ≤ 1.1 MISSED |",
        "| over HTTP, W1 output, the same load, tok/s | 90.00 | 120 | 1.333 | – | – | – |  |",
        "| over HTTP, W1 output, 2 times the load, tok/s | 90.00 | 180 | 2.000 | – | – | – | ≥ 1.95 of one GPU ok |",
        "W1 output on one GPU: over HTTP 0.900 of the 100 without a server",
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join([rows[0], rows[1].replace(": 8", ": 16"), ""]))
    with pytest.raises(SystemExit, match="rows of 2 models or sizes"):
        parallel_table.table(tmp_path)


def test_bars_hold_at_their_edges() -> None:
    assert Bar(0.92, "of the better peer").verdict(9.2, None, 10.0).endswith(" ok")
    assert Bar(0.92, "of the better peer").verdict(9.3, None, 10.0).endswith("MISSED")
    assert Bar(1.65, "of one GPU", is_least=True).verdict(1.65, 1.0, None).endswith(" ok")
    assert Bar(1.65, "of one GPU", is_least=True).verdict(1.64, 1.0, None).endswith("MISSED")
    assert Bar(1.10).verdict(None, None, None) == "≤ 1.1 ?"
    assert Bar(1.10, "of one GPU").verdict(1.0, None, None).endswith("?")
