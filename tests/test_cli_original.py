"""`python -m sgl.launch_server` and `python -m sgl.bench_serving`: the original's flags mean what they mean there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl.cli import bench_serving, entry, launch_server
from sgl.cli.options import configs
from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig, ServerConfig
from sgl.runtime.engine import Engine
from sgl.runtime.lora_options import LoraPath
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served
from tests.patience import PATIENCE


def launched(line: str) -> tuple[EngineConfig, ServerConfig]:
    """The options of the server that a command line launches."""
    words = launch_server.translated(line.split())
    assert words is not None
    engine, server = configs(entry.parsed(["serve", *words]), (EngineConfig, ServerConfig))
    return engine, server


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--model-path some/model", {"model_path": "some/model"}),
        ("--model some/model --tp 1", {"model_path": "some/model"}),
        ("--model=some/model --ep-size 1", {}),
        ("--pipeline-parallel-size 3", {"pp_size": 3}),
        ("--pp=2", {"pp_size": 2}),
        ("--nnodes 2 --node-rank 1 --dist-init-addr a:1", {"nnodes": 2, "node_rank": 1, "dist_init_addr": "a:1"}),
        ("--dp 3", {"dp_size": 3}),
        ("--data-parallel-size=2 --tp 2", {"dp_size": 2, "tp_size": 2}),
        ("--tp-size=1", {"tp_size": 1}),
        ("--tp 2", {"tp_size": 2}),
        ("--tensor-parallel-size=8", {"tp_size": 8}),
        ("--host 0.0.0.0 --port 31000 --api-key k --served-model-name m", {"host": "0.0.0.0", "port": 31000}),
        (
            "--mem-fraction-static 0.8 --max-running-requests 7",
            {"mem_fraction_static": 0.8, "max_running_requests": 7},
        ),
        ("--mem-frac 0.8 --context-len 99 --served-model m", {"context_length": 99, "served_model_name": "m"}),
        (
            "--sampling-defaults model --served-model-name model",
            {"sampling_defaults": "model", "served_model_name": "model"},
        ),
        ("--sampling-defaults openai", {"sampling_defaults": "openai"}),
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype float", {"dtype": "float32"}),
        ("--dtype bfloat16", {"dtype": "bfloat16"}),
        ("--attention-backend torch_native --grammar-backend xgrammar", {"attention_backend": "torch"}),
        ("--grammar-backend xgrammar", {"grammar_backend": "sgl"}),
        ("--grammar-backend outlines", {"grammar_backend": "outlines"}),
        ("--disable-radix-cache --disable-cuda-graph", {"disable_radix_cache": True, "disable_cuda_graph": True}),
        (
            "--schedule-policy fcfs --chunked-prefill-size -1",
            {"schedule_policy": "fcfs", "chunked_prefill_size": -1},
        ),
        ("--enable-priority-scheduling", {"schedule_policy": "priority"}),
        ("--base-gpu-id 2", {"device": "cuda:2"}),
        ("--base-gpu-id 0", {"device": None}),
        ("--cuda-graph-max-bs-decode 64", {"cuda_graph_max_bs": 64}),
        (
            "--tool-call-parser qwen25 --reasoning-parser qwen3",
            {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3"},
        ),
        ("--tool-call-parser auto", {"tool_call_parser": None}),
        ("--trust-remote-code --enable-metrics --skip-server-warmup --nccl-port 4000", {}),
        ("--enable-memory-saver --enable-weights-cpu-backup", {}),
        ("--max-prefill-tokens 16384 --decode-log-interval 40 --cpu-offload-gb 0 --disaggregation-mode null", {}),
        ("--offload-group-size -1 --json-model-override-args {} --num-continuous-decode-steps 1", {}),
        ("--mem_fraction_static 0.5", {"mem_fraction_static": 0.5}),
        ("--constrained-json-disable-any-whitespace", {"json_whitespace": "compact"}),
        ("--check-ledger", {"check_ledger": True}),
        (
            "--disaggregation-mode prefill --disaggregation-bootstrap-port 8998",
            {"disaggregation_mode": "prefill", "disaggregation_port": 8998},
        ),
        ("--disaggregation-mode decode", {"disaggregation_mode": "decode", "disaggregation_port": 0}),
        (
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 4",
            {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4},
        ),
        ("--speculative-algorithm None", {"speculative_algorithm": None}),
        ("--speculative-algorithm Auto", {"speculative_algorithm": "auto"}),
        (
            "--speculative-algorithm eagle3 --speculative-draft-model-path /h --speculative-num-steps 3 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --speculative-ngram-branch-length 18",
            {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": "/h",
                "speculative_num_steps": 3,
                "speculative_num_draft_tokens": 4,
            },
        ),
        ("--enable-lora --max-lora-rank 64", {"enable_lora": True, "max_lora_rank": 64, "max_loras_per_batch": 8}),
        (
            "--lora-paths a=/x b=/y --max-loras-per-batch 2 --lora-target-modules q_proj v_proj",
            {
                "lora_paths": (LoraPath("a", "/x"), LoraPath("b", "/y")),
                "max_loras_per_batch": 2,
                "lora_target_modules": ("q_proj", "v_proj"),
            },
        ),
        (
            '--lora-paths /x {"lora_name":"b","lora_path":"/y","pinned":true} --lora-target-modules all',
            {
                "lora_paths": (LoraPath("/x", "/x"), LoraPath("b", "/y", True)),
                "lora_target_modules": ("all-linear",),
            },
        ),
    ],
)
def test_flags_of_the_server_are_ours_or_neutral(line: str, expected: dict[str, Any]) -> None:
    engine, server = launched(line)
    told = {name: getattr(server if hasattr(server, name) else engine, name) for name in expected}
    assert told == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--ep 2", "--ep 2: there is no such thing here yet (mixtures of experts): leave it out, or give 1"),
        ("--ep-size=8", "mixtures of experts"),
        ("--enable-dp-attention", "more than one GPU"),
        ("--ep", "--ep: there is no such thing here yet (mixtures of experts): leave it out, or give 1"),
        ("--tp", "takes one value, and has none"),
        ("--max-loaded-loras 4", "LoRA"),
        ("--lora-backend torch", "LoRA"),
        ("--speculative-algorithm NGRAM --speculative-eagle-topk 3", "that option of speculative decoding"),
        ("--speculative-algorithm NGRAM --speculative-eagle-topk 3", "leave it out, or give 1"),
        ("--speculative-algorithm EAGLE", "such heads are not read here yet; EAGLE3 takes an EAGLE-3 head"),
        ("--speculative-algorithm nextn", "STANDALONE a draft model, and NGRAM needs neither"),
        ("--disaggregation-transfer-backend mori", "servers for prefill or decode alone"),
        ("--hicache-write-policy write_back", "that option of KV beyond the device"),
        ("--enable-lmcache", "that option of KV beyond the device"),
        ("--moe-a2a-backend deepep", "mixtures of experts"),
        ("--enable-multimodal", "images"),
        ("--cpu-offload-gb 4", "weights kept off the device"),
        ("--enable-torch-compile", "torch.compile"),
        ("--is-embedding", "embeddings"),
        ("--ssl-keyfile k", "TLS"),
        ("--log-requests", "log"),
        ('--json-model-override-args {"a":1}', "give {}"),
        ("--tokenizer-pth x", "did you mean '--tokenizer-path'"),
        ("--frobnicate", "there is no --frobnicate here"),
        ("--max 3", "may mean --max-lora-rank, --max-loras-per-batch, --max-queued-requests, --max-request-bytes"),
        ("--context-length", "takes one value, and has none"),
        ("--context-length 3 4", "takes one value, and has 3 4"),
        ("--disable-radix-cache yes", "is a switch"),
        ("some/model", "Its arguments are flags"),
    ],
)
def test_what_is_not_there_is_refused_by_its_feature(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        launch_server.translated(line.split())
    assert words in str(refused.value)


def test_a_file_of_options_comes_before_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        "model-path: some/model\ntp-size: 1\nenable_metrics: true\ndisable-radix-cache: false\nport: 31000\n"
    )
    engine, server = launched(f"--config {file} --port 32000")
    assert (engine.model_path, engine.disable_radix_cache, server.port) == ("some/model", False, 32000)
    file.write_text("lora-paths: [a=/x, b=/y]\nenable-lora: true\n")
    engine, _ = launched(f"--config {file}")
    assert engine.lora_paths == (LoraPath("a", "/x"), LoraPath("b", "/y"))
    file.write_text("enable-hierarchical-cache: true\nhicache-ratio: 3.0\nhicache-storage-backend: file\n")
    engine, _ = launched(f"--config {file} --hicache-storage-dir /kv --hicache-write-policy write_through")
    assert (engine.enable_hierarchical_cache, engine.hicache_ratio) == (True, 3.0)
    assert (engine.hicache_storage_backend, engine.hicache_storage_dir) == ("file", "/kv")
    file.write_text("hicache-mem-layout: layer_first\n")
    with pytest.raises(ConfigError, match="KV beyond the device"):
        launched(f"--config {file}")


@pytest.mark.parametrize(
    ("module", "line", "code", "words"),
    [
        ("launch_server", "--ep 2", 2, "mixtures of experts"),
        ("launch_server", "--help", 0, "--model-path MODEL"),
        ("bench_serving", "--dataset-name mmmu", 2, "there are sharegpt"),
    ],
)
def test_the_modules_run(module: str, line: str, code: int, words: str) -> None:
    command = [sys.executable, "-m", f"sgl.{module}", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == code
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_what_ours_refuses_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["launch", "--quantization", "awq"])
    with pytest.raises(SystemExit) as stopped:
        launch_server.main()
    assert stopped.value.code == 2
    assert "there are fp8" in capsys.readouterr().err


def test_help_lists_flags_and_defaults(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    with pytest.raises(SystemExit) as stopped:
        bench_serving.main()
    assert stopped.value.code == 0
    assert "--random-input-len 1024" in capsys.readouterr().out


def options_of(line: str) -> dict[str, Any]:
    """What a benchmark's command line is for `sgl bench serving`, by flag."""
    words = bench_serving.translated(line.split())
    found = vars(entry.parsed(["bench", "serving", *words]))
    return {name: value for name, value in found.items() if value not in (None, (), False)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--backend sglang --dataset-name random", {"api": "native", "num_prompts": "1000", "seed": "42"}),
        ("--dataset-name random", {"url": "http://127.0.0.1:30000", "request_rate": "0", "input_len": "512"}),
        ("--dataset-name random", {"output_len": "512", "spread": "1", "warmup": "1", "temperature": "0"}),
        (
            "--dataset-name random --random-input 100 --random-output 10 --random-range-ratio 1",
            {"input_len": "100", "output_len": "10", "spread": "0"},
        ),
        ("--dataset-name random --random-range-ratio 0.5", {"input_len": "768", "spread": "0.333333"}),
        ("--backend vllm --dataset-name random --host a --port 3 --model m", {"url": "http://a:3", "model": "m"}),
        ("--backend vllm --dataset-name random", {"api": "openai", "url": "http://127.0.0.1:8000"}),
        ("--backend sglang-oai-chat --dataset-name random --base-url http://b:1", {"api": "openai-chat"}),
        ("--dataset-name random --request-rate 4.5 --max-concurrency 7", {"request_rate": "4.5"}),
        ("--dataset-name random --disable-ignore-eos --seed 3", {"seed": "3"}),
        ("--dataset-name random --goodput ttft:200 e2el:1000", {"slo": ("ttft=200", "e2e=1000")}),
        ("--dataset-name random --top-p 1.0 --cache-report --extra-request-body {} --dataset-offset 0", {}),
        (
            "--dataset-name generated-shared-prefix --gsp-num-groups 4 --gsp-prompts-per-group 8",
            {"num_prompts": "32", "groups": "4", "prefix_len": "2048", "input_len": "128", "output_len": "256"},
        ),
        (
            "--dataset-name sharegpt --dataset-path f.json --num-prompts 9",
            {"dataset": "file", "dataset_path": "f.json", "num_prompts": "9"},
        ),
        (
            "--dataset-name mooncake --dataset-path f --use-trace-timestamps --mooncake-slowdown-factor 2",
            {"arrivals": "trace", "trace_speed": "0.5"},
        ),
    ],
)
def test_flags_of_the_benchmark_are_ours_or_neutral(line: str, expected: dict[str, Any]) -> None:
    found = options_of(line)
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "--dataset-name sharegpt needs a --dataset-path here: nothing is downloaded"),
        ("--dataset-name mmmu", "there are sharegpt"),
        ("--backend trt --dataset-name random", "--backend trt: there are sglang"),
        ("--dataset-name random --lora-name a", "LoRA"),
        ("--dataset-name random --profile", "debugging"),
        ("--dataset-name random --top-p 0.5", "give 1"),
        ("--dataset-name random --sharegpt-output-len 9", "--max-output-len"),
        ("--dataset-name random --return-logprob", "log-probabilities"),
        ("--dataset-name random --disable-stream", "not streamed"),
        ("--dataset-name random --apply-chat-template", "sglang-oai-chat"),
        ("--dataset-name random --num-prompts many", "--num-prompts many: it takes a number"),
        ("--dataset-name random --random-range-ratio 2", "from 0 to 1"),
        ("--dataset-name random --random-range-ratio nan", "from 0 to 1"),
        ("--dataset-name random --goodput tps:3", "there are ttft, tpot and e2el"),
        ("--dataset-name random --header X-Key=a", "Authorization=Bearer KEY"),
        ("--dataset-name random --disable-tqdm yes", "is a switch"),
        ("--dataset-name random --nothing", "there is no --nothing here"),
    ],
)
def test_what_the_benchmark_has_not_is_refused(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        bench_serving.translated(line.split())
    assert words in str(refused.value)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = str(chat_checkpoint(tmp_path_factory.mktemp("model")))
    with Engine(model, **OPTIONS) as engine, served(engine, api_key="k", served_model_name="tiny") as server:
        yield server


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "vllm-chat"])
def test_the_benchmark_measures_and_appends_the_originals_line(
    server: LiveServer, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "results.jsonl"
    flags = f"--backend {backend} --base-url {server.url} --dataset-name random --random-input 8 --random-output 5"
    flags += f" --random-range-ratio 1 --num-prompts 6 --max-concurrency 3 --output-file {file} --tag mine"
    flags += " --flush-cache --disable-tqdm --tokenizer any --ready-check-timeout-sec 60 --goodput e2el:600000"
    monkeypatch.setattr(sys, "argv", ["bench", *flags.split(), "--header", "Authorization=Bearer k"])
    for _ in range(2):
        with pytest.raises(SystemExit) as stopped:
            bench_serving.main()
        assert stopped.value.code == 0
    shown = capsys.readouterr()
    assert "requests per second" in shown.out
    assert shown.err == "--tokenizer has no effect: lengths are counted in words, about a token each\n" * 2
    first, second = map(json.loads, file.read_text().splitlines())
    assert first.keys() == second.keys()
    told = {name: first[name] for name in ("tag", "backend", "dataset_name", "max_concurrency", "request_rate")}
    assert told == {
        "tag": "mine",
        "backend": backend,
        "dataset_name": "random",
        "max_concurrency": 3,
        "request_rate": "inf",
    }
    assert (first["completed"], first["total_output_tokens"], first["errors"]) == (6, 30, [])
    assert first["request_goodput"] == pytest.approx(first["request_throughput"])
    for kind in ("ttft", "tpot", "itl", "e2e_latency"):
        for name in ("mean", "median", "p90", "p95", "p99"):
            assert first[f"{name}_{kind}_ms"] > 0


def test_a_benchmark_without_a_server_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for more in ([], ["--flush-cache"], ["--backend", "sglang-oai"]):
        line = [
            "bench",
            "--dataset-name",
            "random",
            "--num-prompts",
            "1",
            "--base-url",
            "http://127.0.0.1:1",
            *more,
        ]
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit) as stopped:
            bench_serving.main()
        assert stopped.value.code in (1, 2)
        assert "http://127.0.0.1:1" in capsys.readouterr().err
