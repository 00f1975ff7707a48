"""benchmarks/gpu/tiers.py, without a GPU: the same agents with the peers' copies, by a kit that is made up."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import tier_peers, tiers

BENCH = """
import importlib, json, sys
args = sys.argv[1:]
given = [args[i + 1].split("=", 1) for i in range(len(args)) if args[i] == "--opt"]
opts = {name: json.loads(value) for name, value in given}
module, name = args[args.index("--engine") + 1].split(":")
getattr(importlib.import_module(module), name)(args[args.index("--model") + 1], None, **opts)
"""
SGLANG = """
class Engine:
    def __init__(self, **options):
        assert options["enable_hierarchical_cache"] and options["hicache_size"] == 7
        self.most = options["max_total_tokens"]
    def generate(self, input_ids, sampling_params, stream):
        assert len(input_ids) < self.most
        for number in range(1, sampling_params["max_new_tokens"] + 1):
            yield {"output_ids": [5] * number}
    def shutdown(self):
        print("shut down")
"""
VLLM = """
from types import SimpleNamespace as N
SamplingParams = N
class LLM:
    def __init__(self, model, **options):
        assert options["kv_offloading_size"] == 7 and options["num_gpu_blocks_override"]
    def generate(self, asked, params, use_tqdm):
        return [N(outputs=[N(token_ids=[7] * params.max_tokens)]) for _ in asked]
"""


def test_agents_come_back_to_the_peers_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fake").mkdir()
    for name, text in (("bench", BENCH), ("fake/sglang", SGLANG), ("fake/vllm", VLLM)):
        (tmp_path / f"{name}.py").write_text(text)
    run = f'PYTHONPATH="$PWD/fake:$PYTHONPATH" "{sys.executable}" bench.py --engine "$ADAPTER" "$@"\n'
    (tmp_path / "on_gpu.sh").write_text(f"shift 2\ncd {tmp_path}\n{run}")
    arguments = argparse.Namespace(agents=3, turns=2, host_gb=7, model=tmp_path)
    for peer in ("sglang", "vllm"):
        found = tiers._of_peer(peer, tmp_path, tmp_path, arguments)
        assert set(found) == {"agents: first token p50, ms", "agents: first token p95, ms", "agents: all, s"}
        assert min(found.values()) > 0
    (tmp_path / "on_gpu.sh").write_text("echo it is broken; exit 3\n")
    assert tiers._of_peer("vllm", tmp_path, tmp_path, arguments) == {}
    assert "vllm ended with status 3:\nit is broken" in capsys.readouterr().out


def test_a_turn_goes_on_from_the_last_answer_and_the_first_does_not_count() -> None:
    asked: list[list[int]] = []

    def first_token(prompt: list[int], number: int) -> tuple[float, list[int]]:
        asked.append(list(prompt))
        return 1.0 if len(prompt) < tier_peers.FIRST + 700 and len(asked) <= 2 else 0.25, [99_999] * number

    found = tier_peers.run_agents(first_token, agents=2, turns=3)
    assert found["agents: first token p50, ms"] == 250.0
    assert len(asked) == 6
    for before, after in zip(asked[:-2], asked[2:], strict=True):
        assert after[: len(before)] == before
        assert after[len(before) :][: tier_peers.GENERATED] == [99_999] * tier_peers.GENERATED
        assert len(after) - len(before) - tier_peers.ANSWER in tier_peers.OBSERVED
    assert max(map(len, asked)) * 2 < 3 * tier_peers.pool_tokens(2, 3) + 2 * 3 * 610
