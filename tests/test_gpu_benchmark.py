"""The GPU benchmark's table, picture and reading of the peers' rows, without a GPU."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.gpu import __main__ as everything
from benchmarks.gpu import fallback, peers, throughput, versions
from benchmarks.gpu.workloads import Figure, Multiplied
from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig, parse_options
from sgl.runtime.model.config import ModelConfig

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def test_the_peers_rows_become_medians_by_our_names() -> None:
    rows = [
        {"w": "start", "s": 57.6},
        *({"w": "W2", "cache": "cold", "req_s": value} for value in (183.1, 210.7, 210.6)),
        {"w": "W2", "cache": "warm", "req_s": 244.2},
        {"w": "W4", "batch": 64, "step_ms": 6.8},
        {"w": "W3", "ttft_ms": 14.9, "tpot_ms": 4.9},
        *({"w": "W6", "rep": i, "slowdown": value} for i, value in enumerate((1.3, 1.02, 1.04))),
        {"w": "W7", "batch": 64, "schemas": "new", "slowdown": 6.5},
    ]
    assert peers.of_rows(rows) == {
        "W2 cold cache": 210.6,
        "W2 warm cache": 244.2,
        "W4 step of 64": 6.8,
        "W3 TTFT": 14.9,
        "W3 TPOT": 4.9,
        "W6 first": 1.3,
        "W6 warm": 1.03,
        "W7 64 new": 6.5,
    }


def test_the_kits_engines_run_and_their_rows_are_read_back(tmp_path: Path) -> None:
    kit, model, tokenizer = (tmp_path / name for name in ("kit", "model", "tokenizer"))
    kit.mkdir()
    model.mkdir()
    tokenizer.mkdir()
    (kit / "on_gpu.sh").write_text(
        'peer=$1; shift 2; mkdir -p "$OUT"; echo "$@" > "$OUT/../$peer"\n'
        'echo "{\\"engine\\": \\"$peer\\", \\"w\\": \\"W5\\", \\"prefill_tok_s\\": ${#peer}}" > "$OUT/$peer.jsonl"\n'
        'case "$*" in *disable_any_whitespace*) ;; *) exit 3 ;; esac\n'
    )
    (model / "config.json").write_text(json.dumps(TINY_LLAMA))
    body = {
        "model": {"vocab": {"a": 0, "b": 1}, "merges": []},
        "added_tokens": [{"special": True, "content": "<e>"}],
    }
    (tokenizer / "tokenizer.json").write_text(json.dumps(body))
    rows = tmp_path / "rows.jsonl"
    peers.run(kit, tmp_path, model, tokenizer, "W5", peers.PEERS, rows)
    assert peers.figures_for(8, rows) == ({"W5 prefill": (6, 4)}, "in this run")
    with pytest.raises(SystemExit, match="no figures of sglang for a model of width 4096"):
        peers.figures_for(4096, rows)
    assert peers.figures_for(4096, None)[0]["W7 64 new"] == (7.0, 6.2)
    with pytest.raises(SystemExit, match="sglang ended with status 3"):
        peers.run(kit, tmp_path, model, None, "W5", peers.PEERS, rows)


def test_ratios_say_how_many_times_better_than_the_better_peer() -> None:
    faster = Figure("W4 step of 64", 5.0, "ms", 4.0, (5.0,))
    slower = Figure("W2 warm cache", 100.0, "req/s", None, (100.0,))
    assert " 80% " in throughput._line(faster, (7.5, 6.0))
    assert " 1.20 ms" in throughput._line(faster, (7.5, 6.0))
    assert " 0.50 req/s" in throughput._line(slower, (150.0, 200.0))
    assert throughput._line(slower, None).endswith("req/s")
    picture = throughput._picture([faster, slower], {"W4 step of 64": (7.5, 6.0)}, "recorded")
    texts = [element.text for element in ElementTree.fromstring(picture).iter() if element.text]
    assert {"80% of the floor", "1.20x the better"} <= set(texts)


@pytest.mark.parametrize("with_peers", [True, False])
def test_one_command_runs_the_peers_first_and_shows_them_everywhere(
    with_peers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(everything.subprocess, "run", lambda command, check: commands.append(command))
    kit = ["--peers", "KIT", "PARTS"] if with_peers else []
    monkeypatch.setattr("sys.argv", ["gpu", "MODEL", "TOKENIZER", "--out", str(tmp_path / "out"), *kit])
    everything.main()
    modules = [command[2].removeprefix("benchmarks.gpu.") for command in commands]
    assert modules == ["peers"] * with_peers + ["throughput", "constrained"]
    rows = str(tmp_path / "out" / "peers.jsonl")
    assert all((rows in command) == with_peers for command in commands)
    assert (tmp_path / "out").is_dir()


def test_versions_are_compared_by_medians_and_spread() -> None:
    before = {"W3 TPOT": [4.0, 4.2, 4.1], "W1 output": [10_500.0, 10_700.0]}
    lines = versions.table(before, {"W3 TPOT": [2.05, 2.0, 2.1], "W1 output": [10_600.0, 10_600.0]})
    assert [line.split() for line in lines[1:]] == [
        ["W3", "TPOT", "4.1", "(4", "to", "4.2)", "2.05", "(2", "to", "2.1)", "0.500"],
        ["W1", "output", "10,600", "(10,500", "to", "10,700)", "10,600", "(10,600", "to", "10,600)", "1.000"],
    ]


@pytest.mark.slow
def test_each_version_runs_its_own_engine_under_todays_benchmark(tmp_path: Path) -> None:
    package = tmp_path / "old" / "sgl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the old one ran')")
    with pytest.raises(SystemExit, match="the engine before ended with status 1"):
        versions.Version("before", package, [".", "."], tmp_path / "run")


def test_a_folder_without_the_package_is_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["versions", str(tmp_path), str(tmp_path)])
    with pytest.raises(SystemExit):
        versions.main()
    assert f"{tmp_path} is no checkout of sgl: it has no folder sgl" in capsys.readouterr().err


def test_floors_count_the_experts_that_tokens_choose(tmp_path: Path) -> None:
    dense = Multiplied.of(config_of(tmp_path, TINY_LLAMA))
    assert dense.by_token == dense.read(1) == dense.read(100) == 512 * 8 + 8 * 4 * 8 + 3 * 8 * 8
    shape = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 40_960,
    }
    mixture = Multiplied.of(config_of(tmp_path, shape))
    assert mixture.by_token == mixture.read(1)
    assert 3.0e9 < mixture.by_token < 3.1e9
    assert 1.9 * mixture.read(1) < mixture.read(2) + mixture.all_tokens < 2.1 * mixture.read(1)
    assert 30.1e9 < mixture.read(10_000) < 30.4e9


def config_of(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_pretrained(folder)


def test_the_fallbacks_ratio_is_of_speeds() -> None:
    assert fallback.line(Figure("W3 TPOT", 4.0, "ms", None, ()), Figure("W3 TPOT", 4.2, "ms", None, ())) == (
        "W3 TPOT                  4.00          4.20   0.95 ms"
    )
    slow = Figure("W1 output", 8000.0, "tok/s", None, ())
    assert fallback.line(Figure("W1 output", 10_000.0, "tok/s", None, ()), slow) == (
        "W1 output               10000          8000   0.80 tok/s  below 0.9"
    )


def test_what_runs_beside_an_older_engine_imports_little_of_it() -> None:
    old = {"sgl", "sgl.runtime.config", "sgl.runtime.model.config", "sgl.runtime.text.tokenizer"}
    for name in ("constrained", "peers", "prompts", "throughput", "versions", "workloads"):
        tree = ast.parse(Path(versions.__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
        imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert {module for module in imported if module and module.startswith("sgl")} <= old, name


def test_options_of_benchmarks_have_names_that_are_options() -> None:
    """The original's too; else the nearest is told."""
    assert parse_options(EngineConfig, {"enable_deterministic_inference": "true"}) == {"deterministic": True}
    with pytest.raises(ConfigError, match=r"unknown option 'page_sice' \(did you mean 'page_size'\?\)"):
        parse_options(EngineConfig, {"page_sice": "16"})
