"""Engines of several GPUs: they answer like one, never wait for the device, and end when a rank does."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu.deterministic import Sizes, compared
from benchmarks.gpu.workloads import cut_tokenizer
from sgl.kernels.collectives import Collectives, Folder, Links
from sgl.kernels.exchange import Exchange
from sgl.kernels.peer_sums import PeerSums
from sgl.runtime.config import EMBEDDED
from sgl.runtime.engine import Engine
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.parallel import group as group_module
from tests.patience import PATIENCE
from tests.test_models import MODELS
from tests.tiny_models import tiny_checkpoint

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs"),
    pytest.mark.xdist_group("gpus"),
]
HIDDEN = (576, 896, 2880, 4096, 5120)
OPTIONS: dict[str, Any] = {"device": "cuda", "max_total_tokens": 16_384, "random_seed": 5, "check_ledger": True}


def on_gpus(work: Callable[..., Any], folder: Path, *arguments: Any, size: int = 2) -> list[Any]:
    """What each of two processes with a GPU each returns, or of so many that share two."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(size, mp_context=context) as pool:
        return [
            future.result(PATIENCE)
            for future in [pool.submit(_on_gpu, work, rank, str(folder), *arguments) for rank in range(size)]
        ]


def _on_gpu(work: Callable[..., Any], rank: int, folder: str, *arguments: Any) -> Any:
    torch.cuda.set_device(rank % 2)
    return work(Folder(folder), rank, *arguments)


def reductions(folder: Folder, rank: int) -> list[tuple[Any, float, float]]:
    """Errors of sums, eager and in graphs, of parts that both ranks can make."""
    device, errors = torch.device("cuda", rank), []
    for hidden in HIDDEN:
        for dtype in (torch.bfloat16, torch.float32):
            collectives = Collectives(folder, f"group{hidden}{dtype}", rank, 2, device)
            collectives.fuse(hidden, dtype, 8192)
            most = collectives.fused_tokens
            assert bool(most) == (dtype == torch.bfloat16 and find_spec("flashinfer") is not None)
            for tokens in (1, 2, 3, 17, 256, 700, *((most, most + 1, 8191) if most else (5000,))):
                random = torch.Generator(device).manual_seed(tokens)
                *parts, residual = torch.randn(3, tokens, hidden, generator=random, device=device).to(dtype)
                weight = torch.randn(hidden, generator=random, device=device).to(dtype)
                total = parts[0].double() + parts[1].double()
                expected = total + residual.double()
                wanted = expected * torch.rsqrt(expected.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
                held = residual.clone()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    captured = collectives.add_rms_norm(parts[rank].clone(), held, weight, 1e-5)
                for replays in (False, True, True):
                    held.copy_(residual)
                    if replays:
                        graph.replay()
                        normed = captured
                    else:
                        normed = collectives.add_rms_norm(parts[rank].clone(), held, weight, 1e-5)
                    pairs = ((normed, wanted), (held, expected), (collectives.sum(parts[rank].clone()), total))
                    far = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
                    bar = 4e-3 if dtype == torch.bfloat16 else 1e-6
                    errors.append(((hidden, dtype, tokens, replays), far, bar))
                print(hidden, dtype, tokens, flush=True)  # shown if one hangs
            collectives.close()
    return errors


def test_sums_are_right_eager_and_in_graphs(tmp_path: Path) -> None:
    for errors in on_gpus(reductions, tmp_path):
        assert errors
        assert all(far < bar for _, far, bar in errors), [each for each in errors if not each[1] < each[2]]


def sums_in_a_row(folder: Folder, rank: int) -> int:
    """How many numbers are wrong of sums without a pause, which one rank begins late at times."""
    device, dtype, hidden = torch.device("cuda", rank), torch.bfloat16, 1024
    collectives = Collectives(folder, "row", rank, 2, device)
    collectives.fuse(hidden, dtype, 8192)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    draws = np.random.default_rng(3)
    for number in range(3000):
        tokens, late = int(draws.integers(1, 8192)), int(draws.integers(0, 40))
        if late < 2 and late == rank:
            torch.cuda._sleep(200_000)
        room = collectives.room(tokens)
        part = torch.empty(tokens, hidden, dtype=dtype, device=device) if room is None else room
        part.fill_((number % 80) * (rank + 1))
        wrong += (collectives.sum(part) != number % 80 * 3).sum()
    collectives.close()
    return int(wrong)


def test_sums_in_a_row_do_not_overtake_each_other(tmp_path: Path) -> None:
    assert on_gpus(sums_in_a_row, tmp_path) == [0, 0]


def sums_of_four(folder: Folder, rank: int) -> float:
    """The largest relative error."""
    device, dtype, hidden, size = torch.device("cuda", rank % 2), torch.bfloat16, 512, 4
    peers = PeerSums(
        Exchange(folder.store("four", size), rank, size).allgather, rank, size, device, (300, hidden), dtype
    )
    worst = 0.0
    for tokens in (1, 2, 3, 5, 64, 299, 300):
        random = torch.Generator(device).manual_seed(tokens)
        *parts, residual = torch.randn(size + 1, tokens, hidden, generator=random, device=device).to(dtype)
        expected = torch.stack([*parts, residual]).double().sum(0)
        wanted = expected * torch.rsqrt(expected.square().mean(-1, keepdim=True) + 1e-5)
        normed = peers.add_rms_norm(parts[rank], residual, torch.ones(hidden, dtype=dtype, device=device), 1e-5)
        for found, exact in ((normed, wanted), (residual, expected)):
            worst = max(worst, float((found.double() - exact).norm() / exact.norm()))
    Exchange(folder.store("end", size), rank, size).allgather(None)
    return worst


def test_four_ranks_sum_slices(tmp_path: Path) -> None:
    assert max(on_gpus(sums_of_four, tmp_path, size=4)) < 6e-3


def exchanges(folder: Folder, rank: int) -> None:
    device = torch.device("cuda", rank)
    collectives = Collectives(folder, "keys", rank, 2, device)
    keys = torch.arange(300, device=device) * (-1) ** rank + (1 << 60) * rank
    assert torch.equal(collectives.largest_(keys), torch.arange(300, device=device) * -1 + (1 << 60))
    columns = collectives.gather_columns(torch.full((3, 2), rank, device=device))
    assert columns.tolist() == [[0, 0, 1, 1]] * 3
    masks = torch.full((4, 5), 7 - rank, dtype=torch.int32, device=device)
    assert bool((collectives.broadcast_(masks) == 7).all())
    links = Links(folder, "chain", rank, 2, device)
    for size in (1, 1 << 22):  # larger than what NCCL buffers: both send before they receive
        for number in range(3):
            links.send(torch.full((size,), float(10 * number + rank), device=device))
        for number in range(3):
            came = links.receive(torch.empty(size, device=device))
            assert bool((came == 10 * number + 1 - rank).all())
    torch.cuda.synchronize()
    collectives.close()
    links.close()


def test_keys_rows_and_links(tmp_path: Path) -> None:
    on_gpus(exchanges, tmp_path)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, which FlashInfer takes."""
    options = {"with_tokenizer": True, "head_dim": 64, "hidden_size": 512, "num_attention_heads": 8}
    options |= {"num_key_value_heads": 2, "intermediate_size": 1024, "max_position_embeddings": 1024}
    return Path(tiny_checkpoint(tmp_path_factory.mktemp("model"), **options))


def requests(vocab_size: int, count: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    rng = np.random.default_rng(7)
    prompts = [rng.integers(2, vocab_size, rng.integers(1, 90)).tolist() for _ in range(count)]
    plain: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    kinds = [
        plain,
        {"regex": "([a-f]{2,5} )*[0-9]{3}"},
        {"temperature": 0.9, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.3},
        {"temperature": 0.9, "seed": 5, "regex": "[a-z]{9}", "top_k": 7},
        {"temperature": 0.9, "seed": 5},
    ]
    return prompts, [{**plain, **kinds[i % len(kinds)]} for i in range(count)]


@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_ranks_generate_what_one_gpu_does(path: Path, ranks: dict[str, int]) -> None:
    """In float32, where the order of sums decides nothing."""
    prompts, params = requests(ModelConfig.from_pretrained(path).vocab_size, 100)
    found = []
    for options in ({}, ranks):
        with Engine(path, dtype="float32", chunked_prefill_size=256, **OPTIONS, **options) as engine:
            results = engine.generate(input_ids=prompts, sampling_params=params)
            scored = engine.generate(
                input_ids=prompts[:20],
                sampling_params=params[0],
                return_logprob=True,
                logprob_start_len=0,
                top_logprobs_num=3,
            )
            assert engine.check_ledger() == []
            found.append((results, scored))
    (one, one_scored), (two, two_scored) = found
    assert [result["output_ids"] for result in two] == [result["output_ids"] for result in one]
    for left, right in zip(one_scored, two_scored, strict=True):
        for key in ("input_token_logprobs", "output_token_logprobs"):
            values = [[entry[0] for entry in each["meta_info"][key][1:]] for each in (left, right)]
            np.testing.assert_allclose(*values, atol=1e-3)


@pytest.mark.parametrize(
    "options", [{}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "triton"}], ids=str
)
def test_rounding_on_two_gpus_is_as_on_one(path: Path, options: dict[str, str]) -> None:
    """Their logprobs are as far from float32's."""
    prompts, params = requests(ModelConfig.from_pretrained(path).vocab_size, 40)
    rounded: dict[str, Any] = {"dtype": "bfloat16", **options}
    values = []
    for chosen in ({"dtype": "float32"}, rounded, {**rounded, "tp_size": 2}):
        with Engine(path, **OPTIONS, **chosen) as engine:
            results = engine.generate(
                input_ids=prompts, sampling_params=params[0], return_logprob=True, logprob_start_len=0
            )
        entries = [entry for each in results for entry in each["meta_info"]["input_token_logprobs"][1:]]
        values.append(np.array([entry[0] for entry in entries]))
    of_one, of_two = (np.abs(each - values[0]).mean() for each in values[1:])
    assert 0 < of_two < 1.3 * of_one


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_family_runs_on_two_gpus(name: str, tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path, **MODELS[name], with_tokenizer=True, max_position_embeddings=256))
    prompts, params = requests(ModelConfig.from_pretrained(model).vocab_size, 20)
    answers = []
    for options in ({}, {"tp_size": 2}):
        with Engine(model, dtype="float32", attention_backend="torch", **OPTIONS, **options) as engine:
            results = engine.generate(input_ids=prompts, sampling_params=params)
            answers.append([result["output_ids"] for result in results])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma2", "olmo2"])
def test_no_bits_depend_on_others(family: str, ranks: dict[str, int], tmp_path: Path) -> None:
    """Of 200 prompts in every cell."""
    folder = tiny_checkpoint(tmp_path / family, family, vocab_size=1000, max_position_embeddings=2048)
    cut_tokenizer(EMBEDDED, 1000, folder)
    options = {"load_format": "auto", "dtype": "bfloat16", "device": "cuda", "deterministic": True, **ranks}
    sizes = Sizes(200, 900, 16, 256, "cuda")
    sizes.is_cut = True
    assert [its for its in compared(folder, sizes, options) if its.numbers] == []


WATCHED = """
import os, torch
from sgl.runtime import rank_start
from sgl.runtime.runner.runner import ModelRunner
build, follow = rank_start.follow, ModelRunner.follow
def watched(*arguments):
    runner = build(*arguments)
    steps = 0
    def counted(self, *launched):
        nonlocal steps
        follow(self, *launched)
        steps += 1
        if steps == 60:  # warm
            torch.cuda.set_sync_debug_mode("error")
            first = torch.cuda.memory_stats()
            counted.first = [first[name] for name in ("num_device_alloc", "reserved_bytes.all.current")]
        if steps > 60 and steps % 20 == 0:
            now = torch.cuda.memory_stats()
            now = [now[name] for name in ("num_device_alloc", "reserved_bytes.all.current")]
            with open(os.environ["SGL_TEST_STEPS"], "a") as file:
                print(steps, now == counted.first, file=file)
    ModelRunner.follow = counted
    return runner
rank_start.follow = watched
from sgl.runtime.follower import main
main()
"""


def test_followers_never_wait_and_allocate_nothing_after_ready(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "steps"
    monkeypatch.setenv("SGL_TEST_STEPS", str(log))
    monkeypatch.setattr(group_module, "_CODE", WATCHED)
    prompts, params = requests(ModelConfig.from_pretrained(path).vocab_size, 300)
    with Engine(path, dtype="bfloat16", tp_size=2, **OPTIONS) as engine:
        for _ in range(8):
            results = engine.generate(input_ids=prompts, sampling_params=params)
            assert len(results) == len(prompts)
    lines = log.read_text().splitlines()
    assert len(lines) > 3
    assert all(line.endswith("True") for line in lines), lines


DYING = """
import faulthandler, os, sys, threading, time
faulthandler.dump_traceback_later(60, exit=True)
from sgl.errors import EngineDead
from sgl.runtime.engine import Engine
engine = Engine(sys.argv[1], device="cuda", dtype="bfloat16", tp_size=2, rank_timeout=2.0, max_total_tokens=16384)
engine.generate("a", {"max_new_tokens": 1})
pid = engine._started.group._processes[1].pid
died = []
def ask():
    try:
        engine.generate(["hello"] * 8, {"max_new_tokens": 900, "ignore_eos": True})
    except EngineDead as error:
        died.append((time.monotonic(), str(error)))
askers = [threading.Thread(target=ask) for _ in range(3)]
for asker in askers: asker.start()
time.sleep(0.4)
began = time.monotonic()
os.kill(pid, int(sys.argv[2]))
for asker in askers: asker.join(60)
print("answers", len(died), round(max(when for when, _ in died) - began, 2), died[0][1])
engine.shutdown()
print("stopped", round(time.monotonic() - began, 2), flush=True)
"""


@pytest.mark.parametrize("number", [9, 19])
def test_a_rank_that_dies_or_hangs_ends_the_engine(path: Path, number: int) -> None:
    """In a process of its own: its GPU waits for the other for ever, and it must end all the same."""
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(path), str(number)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "answers 3" in done.stdout, done.stdout
    assert "rank 1 of 2" in done.stdout
    assert "stopped" in done.stdout
    print(done.stdout)
