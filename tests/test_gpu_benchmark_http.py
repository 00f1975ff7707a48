"""W10 and W11 of the GPU benchmarks on a CPU: small, over HTTP, each beside a peer that is a server of ours."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import disaggregated, peers, program_trace, programs, serving
from benchmarks.gpu.flush import flush_cache
from benchmarks.gpu.program_client import Programs, fixed
from benchmarks.gpu.served import texts
from sgl.runtime.config import EMBEDDED
from sgl.runtime.engine import Engine
from tests.fake_servers import FakeServer
from tests.live_server import OPTIONS, LiveServer, served
from tests.tiny_models import tiny_checkpoint

CONTEXT = 8192
PEER_PACKAGE = (
    "from sgl import *\nfrom sgl import RuntimeEndpoint, assistant, function, gen, select, set_default_backend"
)
WORDS = "one two three four five six"
SMALL: dict[str, Any] = {
    "gsm8k_shots": WORDS,
    "gsm8k": [WORDS],
    "hella_shots": WORDS,
    "hella": [[WORDS, [" seven", " eight", " nine", " ten"]]],
    "topics": ["cats", "dogs"],
    "names": ["Ann", "Bob"],
    "articles": [WORDS],
    "chats": [[f"{n} {WORDS}" for n in range(5)]],
    "react_shots": WORDS,
    "react": [[WORDS, [WORDS] * 4]],
    "json_shots": WORDS,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_checkpoint(folder, with_tokenizer=True, vocab_size=384, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    with Engine(str(model), **{**OPTIONS, "max_total_tokens": 32_768}) as engine, served(engine) as server:
        yield server


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


@pytest.mark.slow
def test_one_client_measures_a_server_of_its_own_and_a_peers_at_each_rate(
    model: Path,
    server: LiveServer,
    small: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, report = tmp_path / "shape", tmp_path / "report.json"
    shape.mkdir()  # config.json alone: weights are made up, the tokenizer is the other folder's
    body = json.loads((model / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps({**body, "vocab_size": 1024}))
    command = ["serving", str(shape), str(model), "--rates", "20,48", "--requests", "6", "--outputs", "2,3"]
    command += ["--texts", small, "--peer", f"peer={server.url}", "--option", "max_total_tokens=65536"]
    monkeypatch.setattr("sys.argv", [*command, "--json", str(report)])
    serving.main()
    rows = json.loads(report.read_text())["rows"]
    assert [(row["name"], row["rate"]) for row in rows] == [("sgl", 20), ("peer", 20), ("sgl", 48), ("peer", 48)]
    sent = serving.jobs(SMALL, 6, [2, 3], "")
    for row in rows:
        assert (row["requests"], row["failed"], row["output_tokens"]) == (6, 0, sum(job.max_tokens for job in sent))
        assert {"median", "p95", "p99"} <= set(row["ttft_ms"])
        assert row["slo_ms"] == {"ttft": 200, "tpot": 20}
        assert 0 <= row["goodput_share"] <= 1
    printed = capsys.readouterr().out
    assert "peer at 48 requests/s: TTFT p50 ms" in printed
    assert "SGLang " not in printed.replace("SGLang and vLLM: in this run", "")


@pytest.mark.slow
@pytest.mark.parametrize("transport", [None, "cuda_ipc"])
def test_chats_are_timed_with_prefill_apart_and_together(
    transport: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    command = ["disaggregated", str(EMBEDDED), str(EMBEDDED), "--chats", "2", "--prompts", "1", "--seconds", "3"]
    command += ["--words", "90", "--context-length", "512", "--buffer-mb", "64", "--json", str(report)]
    command += ["--min-prefill-tokens", "64"]
    command += ["--parts", "apart", "--option", f"disaggregation_transport={transport}"] if transport else []
    monkeypatch.setattr("sys.argv", command)
    disaggregated.main()
    found = json.loads(report.read_text())
    assert list(found) == ["apart", "together"][: 1 if transport else 2]
    assert found["apart"]["pulled"] > 0
    parts = found["apart"].pop("parts")
    for its in found.values():
        assert 90 <= its["tokens"] < 400
        assert min(its.values()) > 0
        assert its["idle p50"] <= its["idle p99"]
    printed = capsys.readouterr().out
    assert "(bar 1.15)" in printed
    assert re.search(r"apart: pulled \d+\.\d\d GB at \d+\.\d GB/s", printed)
    assert set(parts) >= ({"asked", "told", "launched", "copied", "runs"} if transport else {"asked"})
    assert f"apart: of a pull: asked {1e3 * parts['asked']:.2f} ms" in printed


def test_bars_hold_at_their_edges_and_recorded_figures_fill_the_same_columns() -> None:
    kept = {"TTFT p50 ms": 55.0, "TPOT p50 ms": 11.0, "goodput": 0.98}
    assert serving.verdicts(kept).count("ok") == 3
    assert serving.verdicts({name: value * 0.99 for name, value in kept.items()}).count("MISSED") == 1
    assert serving.verdicts({name: value * 1.01 for name, value in kept.items()}).count("MISSED") == 2
    for rate, by_name in peers.SERVING.items():
        for name, values in by_name.items():
            assert set(values) <= set(serving.TITLES)
            assert len(serving.line(name, rate, values)) == len(serving.HEADING.splitlines()[-1])


@pytest.mark.slow
def test_programs_run_beside_a_peers_front_end_and_are_traced(
    server: LiveServer,
    small: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer's package stands for the original language; --peer-path is where it is found."""
    packages, report = tmp_path / "packages", tmp_path / "report.json"
    (packages / "sglang").mkdir(parents=True)
    (packages / "sglang" / "__init__.py").write_text(PEER_PACKAGE)
    monkeypatch.setattr(programs, "served", lambda *_: contextlib.nullcontext(server.url))
    command = ["programs", "MODEL", "--only", "choose,tips_fixed,chat_fixed", "--scale", "0.016", "--reps", "1"]
    command += ["--texts", small, "--peer", server.url, "--peer-path", str(packages), "--trace"]
    command += ["--json", str(report)]
    monkeypatch.setattr("sys.argv", command)
    programs.main()
    found = json.loads(report.read_text())
    ours, theirs = ({row["name"]: row for row in found[who]} for who in ("rows", "peer"))
    assert list(ours) == list(theirs) == ["choose", "tips_fixed", "chat_fixed"]
    assert {name: row["programs"] for name, row in ours.items()} == {
        name: row["programs"] for name, row in theirs.items()
    }
    fixed_length = len(_tips("cats") + _tips("dogs"))
    assert ours["tips_fixed"]["characters"] == theirs["tips_fixed"]["characters"] == fixed_length
    assert [trace["name"] for trace in found["traces"]] == ["tips_fixed", "chat_fixed"]
    for trace in found["traces"]:
        medians, num_programs = trace["medians"], trace["programs"]
        generated = [value["generated"] for value in medians.values()]
        assert trace["traced"] == num_programs
        assert trace["opened_within_ms"] >= 0
        if trace["name"] == "tips_fixed":
            assert list(medians) == ["outline", "paragraph", "summary"]
            assert generated == [48, 96, 64]
            assert trace["counted"]["generated_tokens"] == num_programs * (48 + 5 * 96 + 64)
            assert trace["counted"]["segments"] >= num_programs  # Python reads the paragraphs
        else:
            assert generated == [64] * 5
    printed = capsys.readouterr().out
    assert "geometric mean of 1" in printed  # of choose
    assert "SGLang: in this run" in printed
    assert "longest chain" in printed


def _tips(topic: str) -> str:
    """What `tips_fixed` says with zeros for its answers."""
    points = "".join(f"Tip {i}: {'0' * 96}\n" for i in range(1, 6))
    return f"Suggest five tips about {topic}.\nOutline: {'0' * 48}\n{points}In summary, {'0' * 64}"


def test_a_chain_goes_back_over_what_each_generation_came_after() -> None:
    """Two branches side by side: the one that ended last counts, and neither comes after the other."""

    def done(stream: int, index: int, at: float, waited: float, prompt: float, took: float) -> dict[str, Any]:
        usage = {"new_tokens": 3, "cached_tokens": 4, "generated_tokens": 5}
        meta = {"queue_time": waited, "prefill_time": prompt, "e2e_latency": took, "usage": usage}
        return {"type": "node_done", "at": at, "stream": stream, "index": index, "meta": meta}

    def node(stream: int, op: str, **fields: Any) -> dict[str, Any]:
        return {"st": stream, "op": op, **fields}

    nodes = [
        node(0, "gen", name="outline"),
        node(0, "fork", children=[1, 2]),
        node(1, "gen", name="left"),
        node(2, "text", text="x"),
        node(2, "gen", name="right"),
        node(0, "text", text="y"),
        node(0, "gen", name="summary"),
    ]
    events = [
        {"type": "opened", "at": 0.0},
        done(0, 0, 1.0, 0.1, 0.2, 0.9),
        done(1, 0, 2.0, 0.0, 0.1, 0.9),
        done(2, 1, 4.0, 1.0, 0.1, 2.5),
        {"type": "node_done", "at": 4.0, "stream": 0, "index": 2, "meta": {}},
        done(0, 3, 6.0, 0.0, 0.5, 1.5),
    ]
    found = program_trace.generations({"nodes": nodes, "events": events})
    assert [(one.name, one.after and one.after.name) for one in found] == [
        ("outline", None),
        ("left", "outline"),
        ("right", "outline"),
        ("summary", "right"),
    ]
    chain = program_trace.longest_chain(found)
    assert {stage: round(ms) for stage, ms in chain.items()} == {
        "waited": 1100,
        "prompt": 800,
        "decode": 3000,
        "between": 1100,
    }
    assert round(sum(chain.values())) == 6000  # all of the program's time
    assert program_trace.longest_chain([]) == dict.fromkeys(program_trace.STAGES, 0.0)


def test_ratios_are_of_programs_a_second_and_fixed_kinds_stay_out_of_the_mean() -> None:
    rows = [
        {"name": name, "programs": 100, "seconds": 2.0} for name in ("few_shot", "chat", "chat_fixed", "tips_fixed")
    ]
    lines = programs.table(rows, {"few_shot": 10.0, "chat": 40.0, "chat_fixed": 50.0}, "here")
    assert lines[1].endswith("50.00     10.00   5.00")
    assert lines[3].endswith("1.00 (bar 1.05) MISSED")
    assert lines[4].endswith("50.00")
    assert lines[5].startswith("geometric mean of 2")
    assert lines[5].endswith("2.50 (bar 2.1) ok")


def test_made_up_texts_have_what_a_file_of_texts_has() -> None:
    made = texts(None)
    assert set(made) == set(SMALL)
    kinds = Programs(_Language, made).kinds(1.0)
    assert {name.removesuffix("_fixed") for name in kinds} == set(peers.PROGRAMS)
    assert {name: len(rows) for name, (_, rows) in kinds.items()} == {
        "few_shot": 512,
        "choose": 256,
        "tree_of_thought": 32,
        "tips": 128,
        "chat": 128,
        "react": 96,
        "record": 256,
        "judge": 96,
        "tips_fixed": 128,
        "chat_fixed": 128,
    }
    assert fixed(12)["regex"] == "[0-9]{12}"
    prompts = [job.prompt for job in serving.jobs(made, 40, [32], "48")]
    shared = made["gsm8k_shots"][: serving.SHARED_CHARACTERS]
    assert all(prompt.startswith(shared) for prompt in prompts)
    assert len({prompt[: len(shared) + 20] for prompt in prompts}) == 40  # nothing more is shared


class _Language:
    """A module of the language that runs nothing."""

    function = staticmethod(lambda program: program)


def test_the_cache_of_every_peer_is_emptied_or_nothing_is_measured(server: LiveServer) -> None:
    flush_cache(server.url)
    with FakeServer(lambda path, _: {}) as other:
        other.failures = [404]
        flush_cache(other.url)
        assert [path for path, _ in other.requests] == ["/flush_cache", "/reset_prefix_cache"]
        other.failures = [400, 404]  # busy
        flush_cache(other.url)
        assert len(other.requests) == 5
        other.failures = [404, 404]
        with pytest.raises(SystemExit, match="does not empty its prefix cache"):
            flush_cache(other.url)
