"""`python -m sgl.bench_serving`: `sgl bench serving` with the original's flags, defaults and file of results."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests

from sgl.cli import bench, entry
from sgl.cli.options import check_output
from sgl.cli.original import Flags, neutral_values, one, words_of
from sgl.errors import ConfigError, ServerUnreachable, SglError
from sgl.lang.backends.http import with_scheme
from sgl.lang.backends.launch import wait_for_server

_COMMAND = "python -m sgl.bench_serving"
_HELP = f"""{_COMMAND} [FLAGS]

Loads a server like the original's command of that name, and tells what `sgl bench serving` tells. Lengths are counted
in words, about a token each. --output-file appends a line of JSON with the original's names. Flags:
"""
_APIS = {
    **dict.fromkeys(("sglang", "sglang-native"), "native"),
    **dict.fromkeys(("sglang-oai", "vllm", "lmdeploy"), "openai"),
    **dict.fromkeys(("sglang-oai-chat", "vllm-chat", "lmdeploy-chat"), "openai-chat"),
}
_PORTS = {"vllm": "8000", "vllm-chat": "8000", "lmdeploy": "23333", "lmdeploy-chat": "23333"}
_OWN = {"random": "random", "random-ids": "random", "generated-shared-prefix": "generated-shared-prefix"}
_FILES = ("sharegpt", "custom", "openai", "mooncake")
_DEFAULTS = {
    "backend": "sglang",
    "host": "127.0.0.1",
    "dataset-name": "sharegpt",
    "num-prompts": "1000",
    "random-input-len": "1024",
    "random-output-len": "1024",
    "random-range-ratio": "0",
    "request-rate": "inf",
    "seed": "42",
    "temperature": "0",
    "warmup-requests": "1",
    "mooncake-slowdown-factor": "1",
    "gsp-num-groups": "64",
    "gsp-prompts-per-group": "16",
    "gsp-system-prompt-len": "2048",
    "gsp-question-len": "128",
    "gsp-output-len": "256",
}
_OTHERS = words_of(
    """base-url port dataset-path model served-model-name tokenizer max-concurrency output-file goodput tag header
    ready-check-timeout-sec"""
)
_SWITCHES = words_of(
    "use-trace-timestamps disable-ignore-eos disable-tqdm flush-cache cache-report gsp-fast-prepare"
)
_NEUTRAL = neutral_values(
    """dataset-offset=0 top-p=1 top-logprobs-num=0 logprob-start-len=-1 extra-request-body={} prompt-suffix=
    lora-request-distribution=uniform lora-zipf-alpha=1.5 gsp-range-ratio=1 gsp-num-turns=1
    gsp-group-distribution=uniform mooncake-num-rounds=1 mooncake-workload=conversation image-count=1
    image-resolution=1080p image-format=jpeg image-content=random speed-bench-output-len=512"""
)
_FLAGS = Flags(_COMMAND, {*_DEFAULTS, *_OTHERS, *_SWITCHES}, _NEUTRAL)
_SEVERAL = ("goodput", "header")
_WHOLE = {
    "num-prompts",
    "seed",
    "max-concurrency",
    *(flag for flag in _DEFAULTS if re.search("-(len|groups?)$", flag)),
}
_NUMBERS = {"random-range-ratio", "mooncake-slowdown-factor", "request-rate", "ready-check-timeout-sec"}
_PATIENCE = 60.0  # seconds for an answer


def main() -> None:
    """Measure with the command line's flags; exits like `sgl`."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        flags = "\n".join(f"  --{flag} {_DEFAULTS.get(flag, '')}".rstrip() for flag in sorted(_FLAGS.taken))
        sys.stdout.write(f"{_HELP}{flags}\n")
        sys.exit(0)
    try:
        sys.exit(_measure(words))
    except SglError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _measure(words: list[str]) -> int:
    given = _given(words)
    url = _url(given)
    if "output-file" in given:
        check_output(given["output-file"])
    if "tokenizer" in given:
        sys.stderr.write("--tokenizer has no effect: lengths are counted in words, about a token each\n")
    arguments = translated(words)
    if given.get("ready-check-timeout-sec", 0) > 0:
        wait_for_server(url, given["ready-check-timeout-sec"])
    key = _key(given)
    if "--model" not in arguments and _APIS[given["backend"]] != "native":
        arguments += ["--model", _served(url, key)]
    if "flush-cache" in given:
        _flush(url, key)
    options = entry.parsed(["bench", "serving", *arguments])
    options.is_quiet = "disable-tqdm" in given
    report = bench.measured(options)
    bench.show(report)
    if "output-file" in given:
        with Path(given["output-file"]).open("a") as file:
            file.write(json.dumps(line(report, given)) + "\n")
    return 1 if report.get("failed") else 0


def _given(words: list[str]) -> dict[str, Any]:
    """The flags' values; switches have none. Raises ConfigError."""
    given: dict[str, Any] = dict(_DEFAULTS)
    for flag, values in _FLAGS.read(words):
        if flag in _SWITCHES:
            if values:
                raise ConfigError(f"--{flag} is a switch: it has no value", option=flag)
            given[flag] = True
        else:
            given[flag] = values if flag in _SEVERAL else one(flag, values)
    for flag in _WHOLE & given.keys():
        given[flag] = _number(flag, given[flag], int)
    for flag in _NUMBERS & given.keys():
        given[flag] = _number(flag, given[flag], float)
    if given["backend"] not in _APIS:
        message = f"--backend {given['backend']}: there are {', '.join(_APIS)}"
        raise ConfigError(message, option="backend")
    return given


def _number(flag: str, text: str, kind: type[float]) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"--{flag} {text}: it takes a number", option=flag) from None


def translated(words: list[str]) -> list[str]:
    """The arguments of `sgl bench serving`, but for a model that only the server knows. Raises ConfigError."""
    given = _given(words)
    found = ["--url", _url(given), "--api", _APIS[given["backend"]], "--seed", str(given["seed"])]
    found += ["--temperature", given["temperature"], "--warmup", given["warmup-requests"], *_dataset(given)]
    rate = given["request-rate"]
    found += ["--request-rate", "0" if rate == float("inf") else f"{rate:g}"]
    if "use-trace-timestamps" in given:
        found += ["--arrivals", "trace", "--trace-speed", f"{1 / (given['mooncake-slowdown-factor'] or 1):g}"]
    if "max-concurrency" in given:
        found += ["--max-concurrency", str(given["max-concurrency"])]
    if "disable-ignore-eos" in given:
        found.append("--no-ignore-eos")
    if model := given.get("served-model-name", given.get("model")):
        found += ["--model", model]
    for bound in given.get("goodput", ()):
        name, _, value = bound.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput {bound}: there are ttft, tpot and e2el", option="goodput")
        found += ["--slo", f"{name.replace('e2el', 'e2e')}={value}"]
    key = _key(given)
    return found if key is None else [*found, "--api-key", key]


def _key(given: Mapping[str, Any]) -> str | None:
    """The API key among the headers. Raises ConfigError for others."""
    key = None
    for header in given.get("header", ()):
        name, _, value = header.partition("=")
        if name.lower() != "authorization" or not value.lower().startswith("bearer "):
            message = f"--header {name}: of headers there is Authorization=Bearer KEY"
            raise ConfigError(message, option="header")
        key = value[len("bearer ") :]
    return key


def _dataset(given: Mapping[str, Any]) -> list[str]:
    name, path = given["dataset-name"], given.get("dataset-path")
    if name in _FILES:
        if not path:
            message = f"--dataset-name {name} needs a --dataset-path here: nothing is downloaded"
            raise ConfigError(message, option="dataset_path")
        return ["--dataset", "file", "--dataset-path", path, "--num-prompts", str(given["num-prompts"])]
    if name not in _OWN:
        message = f"--dataset-name {name}: there are {', '.join((*_FILES, *_OWN))}"
        raise ConfigError(message, option="dataset-name")
    if name == "generated-shared-prefix":
        number = given["gsp-num-groups"] * given["gsp-prompts-per-group"]
        sizes = {"num-prompts": number, "groups": given["gsp-num-groups"]}
        sizes |= {"prefix-len": given["gsp-system-prompt-len"], "input-len": given["gsp-question-len"]}
        sizes |= {"output-len": given["gsp-output-len"]}
    else:  # from ratio * length to length, which is a spread around its middle
        ratio = given["random-range-ratio"]
        if not 0 <= ratio <= 1:
            raise ConfigError(f"--random-range-ratio {ratio:g}: it is from 0 to 1", option="random-range-ratio")
        sizes = {"num-prompts": given["num-prompts"], "spread": f"{(1 - ratio) / (1 + ratio):g}"}
        for kind in ("input-len", "output-len"):
            sizes[kind] = max(1, round(given[f"random-{kind}"] * (1 + ratio) / 2))
    return ["--dataset", _OWN[name], *(word for flag, size in sizes.items() for word in (f"--{flag}", str(size)))]


def _url(given: Mapping[str, Any]) -> str:
    if "base-url" in given:
        return with_scheme(given["base-url"])
    host = "127.0.0.1" if given["host"] == "0.0.0.0" else given["host"]
    return f"http://{host}:{given.get('port', _PORTS.get(given['backend'], '30000'))}"


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _flush(url: str, key: str | None) -> None:
    """Raises ServerUnreachable."""
    try:
        requests.post(f"{url}/flush_cache", headers=_headers(key), timeout=_PATIENCE).raise_for_status()
    except requests.RequestException as error:
        raise ServerUnreachable(f"the cache of {url} is not flushed: {error}", url=url) from error


def _served(url: str, key: str | None) -> str:
    """The first model that the server lists."""
    try:
        answer = requests.get(f"{url}/v1/models", headers=_headers(key), timeout=_PATIENCE)
        return str(answer.json()["data"][0]["id"])
    except (requests.RequestException, ValueError, LookupError, TypeError) as error:
        message = f"{url} does not say which model it serves ({error}): name it with --model"
        raise ConfigError(message, option="model") from error


def line(report: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The report with the original's names."""
    figures = {
        "duration": report["seconds"],
        "completed": report["requests"] - report["failed"],
        "total_input_tokens": report["input_tokens"],
        "total_output_tokens": report["output_tokens"],
        "request_throughput": report["requests_per_second"],
        "input_throughput": report["input_tokens_per_second"],
        "output_throughput": report["output_tokens_per_second"],
        "total_throughput": report["input_tokens_per_second"] + report["output_tokens_per_second"],
        "concurrency": report["mean_concurrency"],
        "cache_hit_rate": report["cache_hit_rate"],
    }
    for ours, theirs in (("e2e", "e2e_latency"), ("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl")):
        figures |= {f"{name}_{theirs}_ms": value for name, value in report[f"{ours}_ms"].items()}
    if "goodput_requests_per_second" in report:
        figures["request_goodput"] = report["goodput_requests_per_second"]
    names = ("tag", "backend", "dataset-name", "max-concurrency", "random-input-len", "random-output-len")
    told = {name.replace("-", "_"): given.get(name) for name in (*names, "random-range-ratio")}
    rate = given["request-rate"]
    return {**told, "request_rate": "inf" if rate == float("inf") else rate, **figures, "errors": report["errors"]}
