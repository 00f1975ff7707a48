"""One request with drafts of which so many stand, in this engine and in SGLang's and vLLM's, simulated alike.

    python -m benchmarks.gpu.speculate_beside CONFIG --rows ROWS.jsonl [--peers KIT PARTS] [--engine sgl sglang vllm]
                                              [--algorithm off eagle3 ngram draft] [--drafts 4] [--stand 3] [--table]

CONFIG is a folder with a config.json; weights are random, those of the EAGLE-3 head, too, which is one of the target's
sizes with 32,000 draft tokens, and of the draft model, which has the shape of Llama-3.2-1B and the target's tokens; the
peers are not asked for that one. Each step verifies --drafts drafts, whatever they are, and --stand of them stand; what
look-ups find is filled up with other tokens, as SGLang does. A row of ROWS.jsonl has the tokens a second of one engine
and algorithm, of one request with a cached prompt, from its first token to its last, and tokens a step where there were
drafts. --table prints what ROWS.jsonl has, and the ratios.
KIT and PARTS: see benchmarks.gpu.peers.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu import speculate_peers
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.speculate_peers import REPS, prompt
from sgl import Engine
from sgl.runtime.scheduler import verification
from sgl.runtime.scheduler.request import Request
from sgl.runtime.speculate.drafter import Draft, Drafter, DraftRequest
from sgl.runtime.speculate.speculator import Speculator
from tests.every_draft import every_draft

ALGORITHMS = "off", "eagle3", "ngram", "draft"
ADAPTERS = {"sglang": "SGLang", "vllm": "VLLM"}  # of speculate_peers
DRAFT_TOKENS = 32_000
OUTPUT = 256


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--peers", nargs=2, type=Path, metavar=("KIT", "PARTS"))
    parser.add_argument("--engine", nargs="+", choices=("sgl", *PEERS), default=["sgl"])
    parser.add_argument("--algorithm", nargs="+", choices=ALGORITHMS, default=ALGORITHMS[:3])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--stand", type=int, default=3)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if arguments.table:
        table(arguments.rows)
        return
    if arguments.peers is None and set(arguments.engine) & set(PEERS):
        parser.error("engines beside sgl need --peers KIT PARTS")
    if "draft" in arguments.algorithm and set(arguments.engine) != {"sgl"}:
        parser.error("--algorithm draft is sgl's alone")
    with tempfile.TemporaryDirectory() as folder:
        drafters = {"eagle3": Path(folder) / "eagle3-head", "draft": Path(folder) / "draft"}
        if "eagle3" in arguments.algorithm:
            random_head(arguments.model, drafters["eagle3"], arguments.device)
        if "draft" in arguments.algorithm:
            draft_shape(arguments.model, drafters["draft"])
        for engine in arguments.engine:
            for algorithm in arguments.algorithm:
                path, numbers = drafters.get(algorithm), (arguments.drafts, arguments.stand)
                if engine == "sgl":
                    row = own(arguments.model, algorithm, *numbers, path, arguments.device)
                else:
                    options = {"algorithm": algorithm, "drafts": arguments.drafts, "stand": arguments.stand}
                    row = of_peer(engine, *arguments.peers, arguments.model, {**options, "head": str(path or "")})
                print(json.dumps(row), flush=True)
                with arguments.rows.open("a", encoding="utf-8") as file:
                    print(json.dumps(row), file=file)


def own(model: Path, algorithm: str, drafts: int, stand: int, path: Path | None, device: str) -> dict[str, Any]:
    """A row of this engine. path: of what drafts."""
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "context_length": 2048}
    options |= {"speculative_algorithm": algorithm.upper() if algorithm != "off" else "off", "device": device}
    if algorithm != "off":
        options |= {"speculative_num_draft_tokens": drafts + 1}
    if path is not None:
        options |= {"speculative_num_steps": drafts, "speculative_draft_model_path": str(path)}
    verification.simulated_acceptance = lambda number: min(stand, number)
    rates, steps = [], []
    try:
        with Engine(str(model), **options) as engine, every_draft(engine):
            if algorithm == "ngram":
                engine._loop.call(functools.partial(fill_up, engine._loop._speculator))
            for rep in range(REPS + 1):
                seconds, counted = [], []
                for number in (1, 1, OUTPUT):  # the first one caches the prompt
                    began, before = time.perf_counter(), engine._scheduler.counters.steps
                    params = {"temperature": 0.0, "max_new_tokens": number, "ignore_eos": True}
                    engine.generate(input_ids=prompt(rep), sampling_params=params)
                    seconds.append(time.perf_counter() - began)
                    counted.append(engine._scheduler.counters.steps - before)
                if rep:
                    rates.append((OUTPUT - 1) / (seconds[2] - seconds[1]))
                    steps.append(counted[2] - counted[1])
    finally:
        verification.simulated_acceptance = None
    row: dict[str, Any] = {"engine": "sgl", "algorithm": algorithm, "rates": rates}
    row |= {"tokens_a_second": statistics.median(rates)}
    return row | {"tokens_a_step": (OUTPUT - 1) / statistics.median(steps)}


class Filled:
    """Look-ups, whose drafts are filled up."""

    def __init__(self, lookup: Drafter) -> None:
        self._lookup, self.name = lookup, lookup.name

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter`."""
        found = zip(self._lookup.propose(wanted), wanted, strict=True)
        return [Draft([*draft.token_ids, *range(1000, 1000 + asked.most)][: asked.most]) for draft, asked in found]

    def ended(self, request: Request) -> None:
        """See `Drafter`."""
        self._lookup.ended(request)


def fill_up(speculator: Speculator) -> None:
    """Have every row drafted for in every step."""
    speculator._hosts = [Filled(each) for each in speculator._hosts]
    speculator._drafters = [*speculator._hosts, *speculator._models]


def of_peer(peer: str, kit: Path, parts: Path, model: Path, options: dict[str, Any]) -> dict[str, Any]:
    """A row of another engine."""
    with tempfile.TemporaryDirectory() as beside:
        shutil.copy(speculate_peers.__file__, beside)
        command = ["bash", str(kit / "on_gpu.sh"), peer, str(parts), "--model", str(model.resolve())]
        for name, value in options.items():
            command += ["--opt", f"{name}={value}"]
        adapter = f"speculate_peers:{ADAPTERS[peer]}"
        environment = os.environ | {"PYTHONPATH": beside, "ADAPTER": adapter, "OUT": f"{beside}/out"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode or not rows:
        raise SystemExit(f"{peer} ended with status {done.returncode}:\n{done.stdout}")
    row: dict[str, Any] = rows[-1]
    return row


def random_head(model: Path, folder: Path, device: str) -> None:
    """Write an EAGLE-3 head of one layer of the target's sizes."""
    target = json.loads((model / "config.json").read_text(encoding="utf-8"))
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    others = "rms_norm_eps", "rope_theta", "rope_parameters", "max_position_embeddings"
    config = {name: target[name] for name in (*names, *others) if name in target}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"draft_vocab_size": min(DRAFT_TOKENS, config["vocab_size"]), "tie_word_embeddings": False}
    config |= {"torch_dtype": "bfloat16", "hidden_act": "silu"}
    hidden, size = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (size, hidden),
        "midlayer.mlp.up_proj.weight": (size, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, size),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    norms = "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    tensors = {name: torch.randn(shape, **options).mul_(0.02).cpu() for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    tensors["d2t"] = torch.zeros(config["draft_vocab_size"], dtype=torch.int64)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def draft_shape(model: Path, folder: Path) -> None:
    """Write the config of a draft model."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def table(path: Path) -> None:
    """Print the latest row of each engine and algorithm, beside the better peer's."""
    rows = {(row["engine"], row["algorithm"]): row for row in map(json.loads, path.read_text().splitlines())}
    print(f"{'':8} " + " ".join(f"{engine:>16}" for engine in ("sgl", *PEERS)) + f" {'the better peer':>16}")
    for algorithm in ALGORITHMS:
        found = [rows.get((engine, algorithm)) for engine in ("sgl", *PEERS)]
        cells = [
            "-" if row is None else f"{row['tokens_a_second']:.0f} ({row.get('tokens_a_step', 1):.2f})"
            for row in found
        ]
        best = max((row["tokens_a_second"] for row in found[1:] if row is not None), default=None)
        ratio = "-" if found[0] is None or best is None else f"{found[0]['tokens_a_second'] / best:.2f}x"
        print(f"{algorithm:8} " + " ".join(f"{cell:>16}" for cell in cells) + f" {ratio:>16}")
    print("tokens a second (a step)")


if __name__ == "__main__":
    main()
