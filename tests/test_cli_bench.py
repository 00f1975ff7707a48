"""`sgl bench`, `sgl run` and `sgl chat`: against a live server with a tiny model, and their arithmetic."""

from __future__ import annotations

import io
import itertools
import json
import random
import re
import statistics
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from sgl.bench import about, datasets
from sgl.bench.load import PATHS, Load, Measured, arrivals
from sgl.bench.plot import panels, write_plot
from sgl.bench.report import report as report_of
from sgl.cli import main
from sgl.errors import ConfigError
from sgl.runtime.engine import Engine
from sgl.runtime.server.service import VERSION
from tests.fake_servers import FakeServer
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = str(chat_checkpoint(tmp_path_factory.mktemp("model")))
    with Engine(model, **OPTIONS) as engine, served(engine, api_key="k") as server:
        yield server


def run(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """What the command prints; it must end with that code."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    captured = capsys.readouterr()
    assert stopped.value.code == code, captured.err
    return captured.out


def bench(server: LiveServer, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    common = ["bench", "serving", "--url", server.url, "--api-key", "k", "--json", "--num-prompts", "12"]
    report: dict[str, Any] = json.loads(run([*common, "--input-len", "8", "--output-len", "5", *flags], capsys))
    return report


@pytest.mark.parametrize("api", list(PATHS))
def test_every_protocol_measures_every_token(
    server: LiveServer, capsys: pytest.CaptureFixture[str], api: str
) -> None:
    report = bench(server, capsys, "--api", api, "--max-concurrency", "4")
    assert (report["requests"], report["failed"], report["output_tokens"]) == (12, 0, 60)
    assert report["input_tokens"] > 12 * 8
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert set(report[name]) == {"mean", "median", "p90", "p95", "p99"}
        assert 0 <= report[name]["median"] <= report[name]["p99"] <= report["e2e_ms"]["p99"]
    assert report["ttft_ms"]["mean"] < report["e2e_ms"]["mean"]


def test_shared_prefixes_hit_the_cache_and_goodput_counts_who_was_in_time(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dataset", "generated-shared-prefix", "--groups", "2", "--prefix-len", "40", "--request-rate", "200"]
    report = bench(server, capsys, *flags, "--slo", "ttft=60000", "--slo", "e2e=60000")
    assert report["cache_hit_rate"] > 0.4
    assert report["goodput_requests_per_second"] == pytest.approx(report["requests_per_second"])
    assert bench(server, capsys, "--slo", "e2e=0.001")["goodput_requests_per_second"] == 0


def test_schemas_of_a_file_are_enforced(
    server: LiveServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "tasks.jsonl"
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    file.write_text("\n".join(json.dumps({"prompt": f"{i}", "max_tokens": 30, "schema": schema}) for i in range(3)))
    output = tmp_path / "report.json"
    report = bench(server, capsys, "--dataset", "file", "--dataset-path", str(file), "--output", str(output))
    assert (report["requests"], report["failed"]) == (3, 0)
    assert json.loads(output.read_text()) == report


def test_a_report_says_what_it_is_about(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = []
    monkeypatch.setattr("sgl.cli.bench.tqdm", lambda **options: bars.append(options["desc"]) or tqdm(**options))
    model = server.engine.config.model_path
    begin = datetime.now().astimezone().replace(microsecond=0)
    flags = [
        "--request-rate",
        "300",
        "--max-concurrency",
        "3",
        "--dataset",
        "generated-shared-prefix",
        "--groups",
        "2",
    ]
    report = bench(server, capsys, *flags, "--prefix-len", "9", "--max-output-len", "4", "--seed", "6")
    assert bars == [f"{model} at {server.url}"]
    assert begin <= datetime.fromisoformat(report["date"]) <= datetime.now().astimezone()
    assert (report["kind"], report["model"]) == ("serving", model)
    told = report["server"]
    assert (told["url"], told["engine"], told["version"], told["device"]) == (server.url, "sgl", VERSION, "cpu")
    assert (told["torch_version"], told["dtype"]) == (torch.__version__, "float32")
    assert "cores" in told["device_name"]
    assert report["client"]["sgl"] == VERSION
    assert report["load"] == {
        "api": "native", "request_rate": 300.0, "arrivals": "poisson", "max_concurrency": 3, "warmup": 1,
        "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    assert report["dataset"] == {
        "name": "generated-shared-prefix", "num_prompts": 12, "input_len": 8, "output_len": 5, "groups": 2,
        "prefix_len": 9, "max_output_len": 4, "seed": 6,
    }  # fmt: skip
    assert "k" not in {*report["load"].values(), *told.values()}, "the key is nobody's business"
    said = about.lines(report)
    assert said["model"] == model
    for line, words in {
        "server": [server.url, f"sgl {VERSION}", torch.__version__, "cores"],
        "load": ["300 requests a second (poisson)", "at most 3 in flight", "api native", "temperature 0"],
        "dataset": ["12 requests", "generated-shared-prefix", "2 prefixes of 9 words", "8 words in", "seed 6"],
        "measured": [report["date"], VERSION],
    }.items():
        assert all(word in said[line] for word in words), said[line]


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_bar_counts_requests_and_those_that_failed(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    screen = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("sgl.cli.bench.tqdm", partial(tqdm, mininterval=0))
    flags = ["--url", server.url, "--api-key", "k", "--num-prompts", "3", "--input-len", "2000"]
    run(["bench", "serving", *flags, "--max-concurrency", "1", "--warmup", "0"], capsys, code=1)
    if is_terminal:
        states = screen.getvalue().split("\r")
        assert any("3/3" in state and "failed=3" in state for state in states), states
    else:
        assert "3/3" not in screen.getvalue(), "a log is no place for a bar"


@pytest.mark.parametrize("kind", ["serving", "offline", "latency"])
def test_tables_say_what_they_are_about(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    model = server.engine.config.model_path
    target = ["--url", server.url, "--api-key", "k"] if kind == "serving" else [model, "--max-total-tokens", "4096"]
    flags = ["--num-prompts", "3", "--input-len", "4", "--output-len", "2"]
    out = run(["bench", kind, *target, *flags], capsys)
    assert f"sgl bench {kind}" in out
    assert "None" not in out
    for word in (
        model,
        f"sgl {VERSION}",
        torch.__version__,
        "random, 3 requests, 4 words in, 2 tokens out",
        "cores",
    ):
        assert word in out
    assert re.search(r"measured +\d{4}-\d\d-\d\dT", out)
    report = json.loads(run(["bench", kind, *target, *flags, "--json"], capsys))
    assert (report["kind"], report["model"], report["server"]["version"]) == (kind, model, VERSION)
    assert report["dataset"]["num_prompts"] == 3
    assert (report["load"] is None) == (kind != "serving")
    assert datetime.fromisoformat(report["date"]).tzinfo is not None


@pytest.mark.parametrize(
    ("info", "model", "version"),
    [
        ({"data": [{"id": "their/model"}], "version": "0.9"}, "their/model", "0.9"),
        ({"model_path": "m", "version": "0.5.23"}, "m", "0.5.23"),
        ({"data": []}, None, None),
        ({"data": "nonsense"}, None, None),
        ([], None, None),
    ],
)
def test_other_servers_are_named_as_far_as_they_tell(
    info: Any, model: str | None, version: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(path: str, body: Any) -> Any:
        yield {"choices": [{"index": 0, "text": "x"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}

    with FakeServer(answer) as fake:
        fake.model_info = info
        flags = [
            "bench",
            "serving",
            "--url",
            fake.url,
            "--api",
            "openai",
            "--num-prompts",
            "2",
            "--output-len",
            "1",
        ]
        report = json.loads(run([*flags, "--json"], capsys))
        assert (report["model"], report["server"]["version"], report["failed"]) == (model, version, 0)
        assert "of an unknown" in run(flags, capsys) or version
        assert json.loads(run([*flags, "--model", "mine", "--json"], capsys))["model"] == "mine"


def test_failures_are_counted_and_shown(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["bench", "serving", "--url", server.url, "--num-prompts", "3"]
    out = run(flags, capsys, code=1)
    assert "401" in out
    assert "failed" in out


def test_engines_are_measured_alone(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    model = server.engine.config.model_path
    flags = [
        model,
        "--max-total-tokens",
        "4096",
        "--num-prompts",
        "4",
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--json",
    ]
    report = json.loads(run(["bench", "offline", *flags], capsys))
    assert report["requests"] == 4
    assert report["output_tokens_per_second"] * report["seconds"] == pytest.approx(16)
    report = json.loads(run(["bench", "latency", *flags], capsys))
    assert report["prefill_ms"] > 0 < report["decode_ms_per_token"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--slo", "tftt=1"], "ttft"),
        (["--slo", "ttft=fast"], "200 ms"),
        (["--dataset", "file"], "dataset-path"),
        (["--dataset", "file", "--dataset-path", "/nowhere.json"], "nowhere"),
        (["--num-prompts", "0"], "greater than 0"),
        (["--dataste", "random"], "did you mean '--dataset'"),
        (["--dataset", "generated-shared-prefx"], "did you mean 'generated-shared-prefix'"),
        (["--plot", "run.gif"], ".html"),
        (["--plot", "/nowhere/run.html"], "nowhere"),
        (["--output", "/nowhere/run.json"], "/nowhere/run.json cannot be written"),
        (["--arrivals", "trace"], "when requests come"),
        (["--request-rate", "-1"], "greater than or equal to 0"),
        (["--request-rate", "inf"], "a finite number"),
        (["--trace-speed", "1e999"], "a finite number"),
        (["--temperature", "nan"], "a finite number"),
        (["--slo", "ttft=inf"], "write ttft=200"),
        (["--slo", "ttft=1_0"], "write ttft=200"),
        (["--max-concurrency", "0"], "greater than 0"),
        (["--spread", "2"], "less than or equal to 1"),
    ],
)
def test_wrong_flags_are_explained(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "serving", *flags])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_what_a_command_lacks_is_said_before_it_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl.cli.serve.configure_logging", lambda level, style: None)
    monkeypatch.setattr("sgl.cli.serve.EngineProcess", None)
    template, file = tmp_path / "bad.jinja", tmp_path / "program.py"
    template.write_text("{% for %}")
    file.write_text("raise SystemExit('it ran')")
    for arguments, words in [
        (["serve", "--reasoning-parser", "qwen4"], "--reasoning-parser: no reasoning format 'qwen4' (did you mean"),
        (["serve", "--chat-template", str(template)], "--chat-template: the chat template is not valid Jinja"),
        (["run"], "required: FILE (see"),
        (["trace", "--output", "/nowhere/t.html", str(file)], "/nowhere/t.html cannot be written"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err


def test_reports_agree_with_the_textbook() -> None:
    rng = random.Random(1)
    results = [
        Measured(
            events=[(rng.random(), 1), *((1 + i / 10, 1) for i in range(9))],
            latency=2 + rng.random(),
            prompt_tokens=10,
            cached_tokens=5,
            output_tokens=10,
        )
        for _ in range(201)
    ]
    results.append(Measured(error="x"))
    report = report_of(results, 4.0, {"ttft": 0.5})
    firsts = [result.first_token for result in results[:-1] if result.first_token is not None]
    cuts = statistics.quantiles(firsts, n=100, method="inclusive")
    for name, percent in (("median", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert report["ttft_ms"][name] == pytest.approx(1000 * cuts[percent - 1])
    assert report["ttft_ms"]["mean"] == pytest.approx(1000 * statistics.fmean(firsts))
    assert report["tpot_ms"]["mean"] == pytest.approx(
        statistics.fmean(1000 * (r.latency - (r.first_token or 0)) / 9 for r in results[:-1])
    )
    assert report["cache_hit_rate"] == 0.5
    assert report["goodput_requests_per_second"] == sum(first <= 0.5 for first in firsts) / 4
    assert (report["failed"], report["errors"]) == (1, ["1 x x"])


def test_arrivals_keep_the_rate() -> None:
    jobs = [datasets.Job("x", 1)] * 4000
    times = arrivals(jobs, Load(request_rate=50.0), random.Random(3))
    assert times[-1] / len(jobs) == pytest.approx(1 / 50, rel=0.06)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1), "as Poisson's are"
    assert arrivals(jobs[:3], Load(request_rate=4.0, arrivals="fixed"), random.Random(0)) == [0.0, 0.25, 0.5]
    assert arrivals(jobs[:2], Load(), random.Random(0)) == [0.0, 0.0]
    assert arrivals([datasets.Job("x", 1, 2.5)], Load(arrivals="trace"), random.Random(0)) == [2.5]


def test_files_of_many_kinds_are_read(tmp_path: Path) -> None:
    def jobs(name: str, text: str, count: int = 10) -> list[datasets.Job]:
        (tmp_path / name).write_text(text)
        return datasets.file_jobs(tmp_path / name, count, 7, random.Random(0))

    shared = [{"conversations": [{"value": "hi"}, {"value": "a b c"}]}, {"conversations": [{"value": "alone"}]}]
    assert jobs("share.json", json.dumps(shared)) == [datasets.Job("hi", 3)]
    assert jobs("turns.jsonl", '{"turns": ["one", "two"]}\n\n{"question": "q"}') == [
        datasets.Job("one", 7),
        datasets.Job("q", 7),
    ]
    lines = [
        {"timestamp": t, "input_length": n, "output_length": 4, "hash_ids": [1, 2]}
        for t, n in ((500, 600), (1500, 520))
    ]
    first, second = jobs("trace.jsonl", "\n".join(map(json.dumps, lines)))
    assert (first.at, second.at, len(first.prompt.split()), first.max_tokens) == (0.0, 1.0, 600, 4)
    assert first.prompt.split()[:520] == second.prompt.split(), "the same blocks are the same text"
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,3,44\n"
    rows += "2023-11-16 18:15:48.1805900,5,1\n"
    assert [(len(job.prompt.split()), job.max_tokens, job.at) for job in jobs("azure.csv", rows)] == [
        (3, 44, 0.0),
        (5, 1, pytest.approx(1.5)),
    ]
    assert [
        job.prompt for job in jobs("turns.json", '["a", {"question": [[{"content": "b"}]]}, {"topic": "c"}]')
    ] == [*"abc"]
    assert datasets.Job("a b c", 9).cut(2, 4) == datasets.Job("a b", 4)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "point.json").write_text('{"schema": {"type": "integer"}, "tests": []}')
    (tmp_path / "tasks" / "line.json").write_text('{"type": "string"}')
    tasks = datasets.file_jobs(tmp_path / "tasks", 5, 7, random.Random(0))
    assert [job.schema for job in tasks] == [{"type": "string"}, {"type": "integer"}]
    for text in ("{}", "[]", "nonsense", '[{"x": 1}]'):
        with pytest.raises(ConfigError):
            jobs("bad.json", text)


def test_run_sends_a_files_programs_to_the_server(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import sys\nimport sgl\n\n\n@sgl.function\ndef program(s):\n"
        "    s += sys.argv[1] + sgl.gen('x', max_tokens=4, temperature=0)\n\n\n"
        "if __name__ == '__main__':\n    print(program.run().text())\n"
    )
    page = tmp_path / "trace.html"
    out = run(
        ["trace", "--url", server.url, "--api-key", "k", "--output", str(page), str(file), "</script>"], capsys
    )
    assert out.startswith("</script>")
    found = re.search(r'<script id="snapshot" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    [timeline] = json.loads(found[1])
    assert [node["op"] for node in timeline["nodes"]] == ["text", "gen"]
    assert [event["type"] for event in timeline["events"]] == ["opened", "node_done", "done"]
    out = run(["run", "--url", server.url, "--api-key", "k", str(file), "hello"], capsys)
    assert out.startswith("hello")
    assert len(out) > len("hello\n")
    run(["run", "--url", server.url, "--model", "x", str(file)], capsys, code=2)
    run(["run", "--url", server.url, str(tmp_path / "nothing.py")], capsys, code=2)


@pytest.mark.slow
def test_traces_need_no_server(server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "program.py", tmp_path / "trace.html"
    file.write_text(
        "import sgl\n\n\n@sgl.function\ndef program(s):\n    s += 'a' + sgl.gen('x', max_tokens=4)\n\n\n"
        "program.run().text()\nprint('ran')\nraise SystemExit(3)\n"
    )
    model = server.engine.config.model_path
    assert run(["trace", "--model", model, "--output", str(page), str(file)], capsys, code=3) == "ran\n"
    found = re.search(r'<script id="snapshot" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    [timeline] = json.loads(found[1])
    assert [event["type"] for event in timeline["events"]] == ["opened", "node_done", "done"]


def test_chat_answers_line_by_line(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand then?\n"))
    flags = ["--url", server.url, "--api-key", "k", "--max-tokens", "6", "--temperature", "0"]
    assert len(run(["chat", *flags], capsys)) > 6
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    with pytest.raises(SystemExit) as stopped:
        main(["chat", "--url", server.url])
    assert stopped.value.code == 1
    assert "API key" in capsys.readouterr().err


def test_chat_without_a_server_says_how_to_start_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    with pytest.raises(SystemExit) as stopped:
        main(["chat", "--url", "http://127.0.0.1:1"])
    assert stopped.value.code == 1
    assert "`sgl serve` starts a server" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_runs_are_drawn(
    server: LiveServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"run{suffix}"
    bench(server, capsys, "--plot", str(path), "--request-rate", "300", "--slo", "ttft=50")
    if suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    page = path.read_text()
    assert page.count("<svg") == 1
    assert page.count('id="axes_') == 6
    assert not re.search(r'(src|href)="(?!#)|@import|url\((?!#)', page), "it loads nothing"
    assert "ttft SLO" in page
    for word in (
        server.engine.config.model_path,
        server.url,
        f"sgl {VERSION}",
        "300 requests a second",
        "12 requests",
    ):
        assert word in page
    assert re.search(r"<th>measured</th><td>\d{4}-", page)
    title = re.search("<title>(.*?)</title>", page)
    assert title is not None
    assert server.engine.config.model_path in title[1]
    assert "<td>TTFT</td>" in page


def test_pictures_of_extreme_runs_have_finite_axes(tmp_path: Path) -> None:
    """No request at all, failures only, one token in no time."""
    pytest.importorskip("matplotlib")
    for results in ([Measured(error="x")], [Measured(events=[(0.0, 1)], output_tokens=1)], [Measured(sent=1e-9)]):
        write_plot(tmp_path / "run.html", results, report_of(results, 1e-3, {}))
        page = (tmp_path / "run.html").read_text()
        assert "nan" not in page
        assert not re.search(r"\binf\b", page)


def test_rates_in_a_picture_add_up_to_the_tokens() -> None:
    results = [Measured(sent=i / 10, events=[(0.01, 1), (0.5, 3)], latency=0.5, output_tokens=4) for i in range(20)]
    throughput, in_flight, *_ = panels(results, 3.0, {})
    [rates] = throughput.series.values()
    assert sum(rate for _, rate in rates) * 3.0 / len(rates) == pytest.approx(80)
    [levels] = in_flight.series.values()
    assert max(level for _, level in levels) in (5, 6)
    assert levels[-1][1] == 0
