"""The GPU benchmark of the deterministic mode on a CPU, small: its cells, its counts and its cost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import deterministic, workloads
from benchmarks.gpu.deterministic import Difference, Sizes, compared, made
from sgl.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.why_not() is not None, reason=f"cannot be compiled: {cpu.why_not()}")
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
}
OPTIONS: dict[str, Any] = {"device": "cpu", "check_ledger": True, "page_size": 4}
COUNTED = {"among others": "retractions", "a draft model": "verified_tokens", "host memory": "host_loaded_tokens"}
SIZES = Sizes(6, 90, 14, 12, "cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(deterministic.SHAPES, "tiny", {**deterministic.SHAPES["moe"], **TINY})
    made("tiny", 2, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_no_number_differs_and_each_cell_does_what_it_is_called(folder: Path) -> None:
    found = list(compared(folder, SIZES, {**OPTIONS, "deterministic": True}, list(COUNTED)))
    assert [(its.cell, its.way) for its in found if its.numbers or its.prompts] == []
    assert {its.cell for its in found} == set(COUNTED)
    for cell, counted in COUNTED.items():
        notes = [its.note.split() for its in found if its.cell == cell and counted in its.note]
        assert int(notes[-1][0]) > 0, cell
    assert {its.way for its in found if its.cell == "among others"} >= {"cold", "warm", "retracted", "forked"}
    assert all(int(its.note.split()[0]) > 0 for its in found if its.way == "tokens alone")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_no_number_differs_among_ranks(folder: Path, ranks: dict[str, int]) -> None:
    sizes = Sizes(6, 90, 14, 12, "cpu")
    sizes.is_cut = True
    assert not {"a draft model", "files"} & sizes.cells(folder, folder).keys()
    found = list(compared(folder, sizes, {**OPTIONS, "deterministic": True, **ranks}, ["among others", "host"]))
    assert [(its.cell, its.way) for its in found if its.numbers or its.prompts] == []
    assert {its.cell for its in found} == {"among others", "host memory"}


@pytest.mark.slow
def test_no_number_differs_in_any_cell(folder: Path) -> None:
    found = list(compared(folder, SIZES, {**OPTIONS, "deterministic": True}))
    assert [(its.cell, its.way) for its in found if its.numbers or its.prompts] == []
    assert {"files", "drafts", "few pages", "chunks of 7"} <= {its.cell for its in found}


@pytest.mark.slow
def test_without_the_mode_some_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tiny", "--prompts", "4", "--longest", "80", "--at-once", "8", "--only", "among", "--without"]
    monkeypatch.setattr("sys.argv", ["deterministic", *arguments, "--option", "device=cpu"])
    deterministic.main()
    mode, without = capsys.readouterr().out.split("tiny, without\n")
    numbers = [
        [int(line[39:48]) for line in text.splitlines() if line.startswith("among")] for text in (mode, without)
    ]
    assert set(numbers[0]) == {0}
    assert min(numbers[1]) > 0


def test_numbers_that_differ_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        deterministic, "compared", lambda *_: [Difference("a", "cold", 1, 3), Difference("b", "w", 0, 0)]
    )
    monkeypatch.setattr("sys.argv", ["deterministic", "tiny"])
    with pytest.raises(SystemExit, match="3 numbers differ"):
        deterministic.main()


class Instant:
    """An engine that takes 30 ms for what it is asked, and in deterministic mode 40."""

    now = 0.0  # of a clock that only it moves

    def __init__(self, model: Path, **options: Any) -> None:
        self._seconds = 4e-2 if options["deterministic"] else 3e-2

    def __enter__(self) -> Instant:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def flush_cache(self) -> None:
        pass

    def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        Instant.now += self._seconds
        return [{"output_ids": [0] * params["max_new_tokens"]} for params in sampling_params]


def test_the_cost_is_a_ratio_of_throughputs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deterministic, "Engine", Instant)
    monkeypatch.setattr(workloads, "time", SimpleNamespace(perf_counter=lambda: Instant.now))
    monkeypatch.setattr("sys.argv", ["deterministic", "tiny", "--cost", "--reps", "2"])
    deterministic.main()
    line = capsys.readouterr().out
    assert "tok/s without" in line
    assert float(line.split("with: ")[1].split()[0]) == pytest.approx(0.75, abs=0.01)


BENCH = """
import importlib, json, sys
args = sys.argv[1:]
opts = dict(args[i + 1].split("=", 1) for i in range(len(args)) if args[i] == "--opt")
module, name = args[args.index("--engine") + 1].split(":")
opts["deterministic"] = json.loads(opts["deterministic"])
getattr(importlib.import_module(module), name)(args[args.index("--model") + 1], None, **opts)
"""
SGLANG = """
class Engine:
    def __init__(self, enable_deterministic_inference, **options):
        assert options["load_format"] == "dummy"
        self.exact, self.seen = enable_deterministic_inference, set()
    def flush_cache(self):
        self.seen.clear()
    def shutdown(self):
        print("shut down")
    def generate(self, input_ids, sampling_params, return_logprob):
        off = 0.0 if self.exact else 0.25 * (len(input_ids) > 1)
        made = [(ids, off + 0.5 * (tuple(ids) in self.seen)) for ids in input_ids]
        self.seen.update(map(tuple, input_ids))
        tokens = sampling_params["max_new_tokens"]
        return [
            {"output_ids": ids[:1] * tokens, "meta_info": {"output_token_logprobs": [(lp, 1, None)] * tokens}}
            for ids, lp in made
        ]
"""
VLLM = """
import os
from types import SimpleNamespace as N
invariant = os.environ["VLLM_BATCH_INVARIANT"] == "1"
SamplingParams = N
class LLM:
    def __init__(self, model, **options):
        assert options["enable_prefix_caching"]
    def reset_prefix_cache(self):
        pass
    def generate(self, asked, params, use_tqdm):
        lp = 0.0 if invariant else float(len(asked))
        of = {7: N(logprob=lp)}
        made = N(token_ids=[7] * params.max_tokens, logprobs=[of] * params.max_tokens)
        return [N(outputs=[made]) for _ in asked]
"""


def test_the_peers_throughput_is_that_in_their_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit is a shell script here, which writes what it was told."""
    (tmp_path / "config.json").write_text(json.dumps({**deterministic.SHAPES["llama"], "num_hidden_layers": 1}))
    row = '{\\"engine\\": \\"$1\\", \\"w\\": \\"W1\\", \\"out_tok_s\\": $RATE}'
    told = f'mkdir -p $OUT; echo "$* [$VLLM_BATCH_INVARIANT]" >> {tmp_path}/told; echo "{row}" > $OUT/$1.jsonl\n'
    (tmp_path / "on_gpu.sh").write_text(told)
    for peer, rate, options in (
        ("sglang", "7000", "--opt enable_deterministic_inference=true --opt attention_backend=fa3 []"),
        ("vllm", "6000.5", "[1]"),
    ):
        monkeypatch.setenv("RATE", rate)
        line = deterministic.cost_of_peer("llama", peer, tmp_path, tmp_path, tmp_path)
        assert line.split() == [
            "llama",
            "W1",
            "output",
            f"{float(rate):.0f}",
            "tok/s",
            "of",
            peer,
            "in",
            "its",
            "mode",
        ]
        said = (tmp_path / "told").read_text().splitlines()[-1]
        assert said.endswith(options)
        assert "--only W1" in said


def test_the_peers_modes_are_counted_by_their_kit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = tmp_path / "kit"
    (kit / "fake").mkdir(parents=True)
    for name, text in (("bench", BENCH), ("fake/sglang", SGLANG), ("fake/vllm", VLLM)):
        (kit / f"{name}.py").write_text(text)
    run = f'PYTHONPATH="{kit}/fake:$PYTHONPATH" "{sys.executable}" "{kit}/bench.py" --engine "$ADAPTER" "$@"\n'
    (kit / "on_gpu.sh").write_text(f"shift 2\ncd {kit}\n{run}")
    arguments = ["tiny", "--prompts", "4", "--at-once", "6", "--longest", "40", "--peers", str(kit), str(kit)]
    monkeypatch.setattr("sys.argv", ["deterministic", *arguments, "--without"])
    deterministic.main()
    found = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = [[" ".join(words[:-2]), *words[-2:]] for words in found if words[0] in ("sglang", "vllm")]
    same, every = ["0", "0"], ["4", str(4 * deterministic.TOKENS)]
    ways = "alone, again", "cold", "warm", "alone, warm"
    expected = [("sglang", [same, same, every, every]), ("vllm", [same] * 4)]
    expected += [("sglang", [same, every, every, every]), ("vllm", [same, every, every, same])]
    assert found == [
        [f"{peer} {way}", *counts]
        for peer, all_counts in expected
        for way, counts in zip(ways, all_counts, strict=True)
    ]
    (kit / "on_gpu.sh").write_text("echo it is broken; exit 3\n")
    with pytest.raises(SystemExit, match="sglang ended with status 3:\nit is broken"):
        deterministic.main()
