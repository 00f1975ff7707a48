"""Deterministic mode on one GPU: log-probabilities of many prompts bit for bit, whatever else the engine does.

    python -m benchmarks.gpu.deterministic [MODEL …] [--layers 2] [--prompts 200] [--without] [--only CELL,…] [--tp 2]
    python -m benchmarks.gpu.deterministic [MODEL …] --cost [--layers N] [--reps 3] [--peers KIT PARTS]
    python -m benchmarks.gpu.deterministic [MODEL …] --peers KIT PARTS [--engine sglang vllm] [--without]

MODEL is a folder with a config.json, or one of llama, qwen3, moe: the shapes of Llama-3.1-8B, Qwen3-8B and
Qwen3-30B-A3B, which are all if none is given. Weights are random, and of so many layers. Each prompt runs alone, whole,
without cache and without CUDA graphs; then, in an engine for each cell and in several ways, among others, 256 in all. A
line says how many prompts, and how many numbers, are not the same to the last bit, and how much the engine had to do
with the cell's name. A quarter of the prompts have a regular expression to follow, half are sampled. Ends with status 1
if any differ. --without: then the same without the mode. --only: parts of cells' names. --tp, --pp: engines of several
GPUs, without a draft model.

--peers: SGLang's and vLLM's own modes over the same prompts, all greedy, by the kit of benchmarks.gpu.peers: alone,
among others, cold and warm. Nothing of theirs is an error.

--cost: W1's output tokens a second with the mode and without, with all layers unless --layers says otherwise; with
--peers, then those of SGLang and vLLM in their modes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import deterministic_peers, peers
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.workloads import Workloads, cut_tokenizer
from sgl import Engine
from sgl.runtime.config import EMBEDDED, EngineConfig, parse_options
from tests.bits import CELLS, Bits, Requests, differing

logger = logging.getLogger(__name__)
BAR = 0.8  # of the throughput without the mode
AT_ONCE = 256
TOKENS = 12
LAYERS = 2
REGEX = r"(yes|no|perhaps), as was said before: [a-z ]{1,40}"
ADAPTERS = {"sglang": "SGLang", "vllm": "VLLM"}  # of deterministic_peers
MODES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {  # options and environment, as there
    "sglang": (("enable_deterministic_inference=true", "attention_backend=fa3"), {}),
    "vllm": ((), {"VLLM_BATCH_INVARIANT": "1"}),
}
GROUPS, SAMPLES = 50, 4  # of the cell "forked"
PAUSES, PAUSE_SECONDS = 8, 0.05
_COMMON = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "rope_theta": 5e5,
    },
    "qwen3": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "intermediate_size": 12_288,
        "vocab_size": 151_936,
    },
    "moe": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_key_value_heads": 4,
        "vocab_size": 151_936,
    },
}
_COUNTED = {  # what a cell is about, among the engine's counters
    "drafts": "drafted_tokens",
    "a draft model": "verified_tokens",
    "retracted": "retractions",
    "tokens alone": "forced_tokens",
    "host memory": "host_loaded_tokens",
    "files": "host_loaded_tokens",
    "among others": "cached_tokens",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A way of a cell: what is not the same as alone."""

    cell: str
    way: str
    prompts: int
    numbers: int
    note: str = ""

    def line(self) -> str:
        """Of the table."""
        return f"{self.cell:18} {self.way:20} {self.prompts:8} {self.numbers:8}  {self.note}".rstrip()


HEADER = f"{'cell':18} {'way':20} {'prompts':>8} {'numbers':>8}"


class Sizes:
    """Of what is compared."""

    def __init__(self, prompts: int, longest: int, tokens: int, at_once: int, device: str | None) -> None:
        """longest: tokens of a prompt. at_once: requests that are sent together, of which the first are compared."""
        self.prompts = prompts
        self.longest = longest
        self.tokens = tokens
        self.at_once = max(at_once, prompts)
        self.is_small = longest < 200
        self.on_gpu = device != "cpu" and torch.cuda.is_available()
        self.is_cut = False
        """Whether engines have several ranks."""
        self.pool_tokens = self.at_once * (longest + tokens + 16)

    def cells(self, folder: Path, files: Path) -> dict[str, dict[str, Any]]:
        """Options by name. folder: the model's, which drafts for itself. files: an empty one."""
        few = 4 * (self.longest + self.tokens + 16)
        tiers = {
            "max_total_tokens": few,
            "enable_hierarchical_cache": True,
            "hicache_ratio": 2.0 * self.pool_tokens / few,
            "hicache_storage_backend": "file",
            "hicache_storage_dir": str(files),
        }
        others: dict[str, dict[str, Any]] = {
            "chunks of 500": {"chunked_prefill_size": 500},
            "no graphs": {"disable_cuda_graph": True},
            "a draft model": {"speculative_algorithm": "DRAFT", "speculative_draft_model_path": str(folder)},
            "few pages": {"max_total_tokens": few},
            "host memory": tiers,
            "files": tiers,  # which the engine before has written
        }
        dull = {"chunks of 1", "run ahead" if self.on_gpu else "synchronous"}
        if self.is_small:
            dull |= {"chunks of 500", "chunks of 64"}
        else:
            dull |= {"chunks of 7", "one at once"}  # they would take minutes
        if not self.on_gpu:
            dull.add("no graphs")
        if self.is_cut:
            dull |= {"a draft model", "files"}  # options of engines of one rank
            del tiers["hicache_storage_backend"], tiers["hicache_storage_dir"]
        return {name: options for name, options in (CELLS | others).items() if name not in dull}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SHAPES))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=700, help="tokens of a prompt")
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--without", action="store_true")
    parser.add_argument("--only", default="", help="parts of cells' names")
    parser.add_argument("--peers", nargs=2, type=Path, metavar=("KIT", "PARTS"))
    parser.add_argument("--engine", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], help="of the engines, NAME=VALUE")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    options = parse_options(EngineConfig, dict(option.split("=", 1) for option in arguments.option))
    options |= {"tp_size": arguments.tp, "pp_size": arguments.pp}
    is_cut = arguments.tp * arguments.pp > 1
    wrong = 0
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.cost:
                made(name, arguments.layers, Path(folder))
                print(cost(name, Path(folder), arguments.reps, options), flush=True)
                for peer in arguments.engine if arguments.peers else ():
                    print(cost_of_peer(name, peer, *arguments.peers, Path(folder)), flush=True)
                continue
            made(name, arguments.layers or LAYERS, Path(folder))
            sizes = Sizes(arguments.prompts, arguments.longest, TOKENS, arguments.at_once, options.get("device"))
            sizes.is_cut = is_cut
            only = [part for part in arguments.only.split(",") if part]
            for mode in (True, False) if arguments.without else (True,):
                said = f"{name}, {'deterministic' if mode else 'without'}"
                for peer in arguments.engine if arguments.peers else ():
                    print(f"{said}, {peer}\n{HEADER}", flush=True)
                    for found in of_peer(peer, *arguments.peers, Path(folder), sizes, deterministic=mode):
                        print(found.line(), flush=True)
                if arguments.peers:
                    continue
                print(f"{said}\n{HEADER}", flush=True)
                for found in compared(Path(folder), sizes, {**options, "deterministic": mode}, only):
                    print(found.line(), flush=True)
                    wrong += mode and found.numbers
    if wrong:
        raise SystemExit(f"deterministic: {wrong} numbers differ")


def made(name: str, layers: int | None, folder: Path) -> None:
    """Write the config.json of a shape or of another folder, perhaps with fewer layers, and a tokenizer."""
    config = SHAPES.get(name) or json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    config = {**config, "num_hidden_layers": layers or config["num_hidden_layers"]}
    if layers is not None:
        config.pop("layer_types", None)  # one entry for each layer
    (folder / "config.json").write_text(json.dumps(config))
    cut_tokenizer(EMBEDDED, config["vocab_size"], folder)


def compared(folder: Path, sizes: Sizes, options: dict[str, Any], only: Sequence[str] = ()) -> Iterator[Difference]:
    """Differences from each prompt alone, as they are found."""
    requests = _requests(folder, sizes)
    longest = sizes.longest + max(sizes.tokens, 64)
    given = {"load_format": "dummy", "context_length": longest, **options}
    plain = {"disable_radix_cache": True, "chunked_prefill_size": -1, "disable_cuda_graph": True}
    plain |= {"disable_jump_forward": True, "max_total_tokens": 2 * longest, "max_running_requests": 1}
    with Engine(folder, **{**given, **plain}) as reference, tempfile.TemporaryDirectory() as files:
        expected = Expected(reference, requests, sizes.prompts)
        for name, cell in sizes.cells(folder, Path(files)).items():
            if only and not any(part in name for part in only):
                continue
            if "speculative_algorithm" in cell and options.get("pp_size", 1) > 1:
                continue  # refused
            began = time.perf_counter()
            with Engine(folder, **{"max_total_tokens": sizes.pool_tokens, **given, **cell}) as engine:
                started = time.perf_counter() - began
                _load_what_is_there(engine)
                for way, prompts, numbers in _ways(expected, engine, whole=not cell):
                    counted = _COUNTED.get(way) or _COUNTED.get(name)
                    state = engine.get_server_info()["internal_states"][0]
                    yield Difference(name, way, prompts, numbers, f"{state[counted]} {counted}" if counted else "")
                problems = engine.check_ledger()
                assert not problems, problems
            took = time.perf_counter() - began
            logger.info("%s: %.1f s, of which the start %.1f", name, took, started)


class Expected:
    """What each of the first prompts gets alone."""

    def __init__(self, reference: Engine, requests: Requests, number: int) -> None:
        self.requests = requests
        self._reference = reference
        self._found = [requests.bits(reference, [i])[0] for i in range(number)]

    def counts(self, found: Sequence[Bits], start: int = -1) -> tuple[int, int]:
        """Prompts and numbers that differ. start: as they were asked for."""
        kept = self._found if start == 0 else [_of_outputs(its) for its in self._found]
        found = found[: len(kept)] if start == 0 else [_of_outputs(its) for its in found[: len(kept)]]
        pairs = list(zip(kept, found, strict=True))
        return sum(one != other for one, other in pairs), differing(kept, found)

    def ids(self, engine: Engine) -> tuple[int, int]:
        """Of all at once, without logprobs."""
        found = self.requests.ids(engine, range(len(self.requests)))[: len(self._found)]
        kept = [ids for ids, *_ in self._found]
        return sum(one != other for one, other in zip(kept, found, strict=True)), differing(kept, found)

    def forked(self, engine: Engine) -> tuple[int, int]:
        """Groups of samples as forks of a prompt: their logprobs, beside those of each whole text as a prompt."""
        prompts = self.requests.prompts[:GROUPS]
        sampled = {"temperature": 1.0, "n": SAMPLES, "ignore_eos": True}
        sampled["max_new_tokens"] = self.requests.params[0]["max_new_tokens"]
        params = [{**sampled, "seed": i} for i in range(len(prompts))]
        samples = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        by_text = []
        for i, sample in enumerate(samples):
            prompt = prompts[i // SAMPLES]
            scored = self._reference.generate(
                input_ids=prompt + sample["output_ids"],
                sampling_params={"max_new_tokens": 0, "temperature": 0.0},
                return_logprob=True,
                logprob_start_len=0,
            )
            by_text.append(_logprobs(scored, "input")[len(prompt) :])
        found = [_logprobs(sample, "output") for sample in samples]
        pairs = list(zip(by_text, found, strict=True))
        return sum(one != other for one, other in pairs), differing(by_text, found)


def _load_what_is_there(engine: Engine) -> None:
    """Rather than compute it again, however fast a few layers are."""
    tiers = engine._scheduler.memory.tiers
    if tiers is not None:
        rates = tiers.rates
        rates.compute.seconds, rates.load.seconds, rates.read.seconds, rates.step = 1.0, 1e-7, 1e-7, 0.0
        rates.is_fixed = True


def _ways(expected: Expected, engine: Engine, *, whole: bool) -> Iterator[tuple[str, int, int]]:
    """What is found at once and once more, with cached prefixes; all that can be asked of one engine if `whole`."""
    requests = expected.requests
    everyone = range(len(requests))
    yield "cold", *expected.counts(requests.bits(engine, everyone), 0)
    yield "warm", *expected.counts(requests.bits(engine, everyone, -1))
    yield "tokens alone", *expected.ids(engine)
    if not whole:
        return
    yield "in another order", *expected.counts(requests.bits(engine, everyone[::-1], -1)[::-1])
    yield "alone", *expected.counts(requests.alone(engine, -1))
    yield "retracted", *expected.counts(_retracted(requests, engine))
    yield "forked", *expected.forked(engine)


def _retracted(requests: Requests, engine: Engine) -> list[Bits]:
    """Of all, who give way a few times on the way."""
    engine.flush_cache()
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(requests.bits, engine, range(len(requests)), -1)
        for _ in range(PAUSES):
            with contextlib.suppress(TimeoutError):
                pending.result(PAUSE_SECONDS)
            engine.pause_generation("retract")
            engine.continue_generation()
        return pending.result(600)


def _of_outputs(bits: Bits) -> Bits:
    ids, _, logprobs, likeliest = bits
    return ids, [], logprobs, likeliest


def _logprobs(result: Any, side: str) -> list[float]:
    return [entry[0] for entry in result["meta_info"][f"{side}_token_logprobs"]]


def of_peer(
    peer: str, kit: Path, parts: Path, folder: Path, sizes: Sizes, *, deterministic: bool
) -> list[Difference]:
    """What another engine's outputs differ by from each prompt's alone."""
    with tempfile.TemporaryDirectory() as beside:
        shutil.copy(deterministic_peers.__file__, beside)
        asked = Path(beside) / "asked.json"
        prompts = _requests(folder, sizes).prompts
        asked.write_text(json.dumps({"prompts": prompts, "compared": sizes.prompts, "tokens": sizes.tokens}))
        command = ["bash", str(kit / "on_gpu.sh"), peer, str(parts), "--model", str(folder)]
        command += ["--opt", f"asked={asked}", "--opt", f"deterministic={json.dumps(deterministic)}"]
        adapter = f"deterministic_peers:{ADAPTERS[peer]}"
        environment = os.environ | {"PYTHONPATH": beside, "ADAPTER": adapter, "OUT": f"{beside}/out"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{peer} ended with status {done.returncode}:\n{done.stdout}")
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    return [Difference(row["engine"], row["way"], row["prompts"], row["numbers"]) for row in rows]


def _requests(folder: Path, sizes: Sizes) -> Requests:
    vocabulary = min(10_000, int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]))
    return Requests(sizes.at_once, vocabulary, sizes.longest, sizes.tokens, regex=REGEX)


def cost(name: str, folder: Path, reps: int, options: dict[str, Any]) -> str:
    """A line of W1's throughput with the mode and without, one engine after the other."""
    rates = []
    for mode in (False, True):
        with Engine(
            folder,
            **{
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "context_length": 4096,
                **options,
                "deterministic": mode,
            },
        ) as engine:
            workloads = Workloads(engine, folder, None, reps)
            workloads.warm_up()
            (figure,) = workloads.run(["W1"])
            rates.append(figure.value)
    without, with_mode = rates
    below = "" if with_mode >= BAR * without else f"  below {BAR:g}"
    return (
        f"{name:8} W1 output {without:9.0f} tok/s without, {with_mode:9.0f} with: {with_mode / without:.3f}{below}"
    )


def cost_of_peer(name: str, peer: str, kit: Path, parts: Path, folder: Path) -> str:
    """A line of W1's throughput in its mode."""
    options, environment = MODES[peer]
    with tempfile.TemporaryDirectory() as beside, mock.patch.dict(os.environ, environment):
        rows = Path(beside) / "rows.jsonl"
        peers.run(kit, parts, folder, None, "W1", (peer,), rows, options=options)
        figures = peers.of_rows(json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines())
    return f"{name:8} W1 output {figures['W1 output']:9.0f} tok/s of {peer} in its mode"


if __name__ == "__main__":
    main()
