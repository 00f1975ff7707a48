"""`python -m sgl.launch_server`: `sgl serve` with the original's flags, each as ours or with its neutral value only."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgl.cli import entry
from sgl.cli.options import SYNONYMS, options_of_file
from sgl.cli.original import Flags, neutral_values, one, words_of
from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig, ServerConfig

_COMMAND = "python -m sgl.launch_server"
_HELP = f"""{_COMMAND} --model-path MODEL [FLAGS]

Serves a model like the original's command of that name. Flags that both have: --help of `sgl serve` explains them.
Others are translated ({{translated}}),
taken since what they ask for is so ({{so}}),
or, where the feature is not there yet, taken with the value that changes nothing, such as --ep 1.
"""
_FIELDS = {
    field.name.replace("_", "-"): field.type in ("bool", "bool | None")
    for cls in (EngineConfig, ServerConfig)
    for field in dataclasses.fields(cls)
}
"""Our flags, and whether they are switches."""
_SEVERAL = words_of("lora-paths lora-target-modules")
"""Those with several values."""
_VALUES = {
    "dtype": {"half": "float16", "float": "float32"},
    "attention-backend": {"torch_native": "torch"},
    "grammar-backend": {"xgrammar": "sgl"},
}
"""Their values that are called otherwise here."""
_SO = words_of(
    """trust-remote-code skip-server-warmup enable-metrics enable-cache-report enable-mixed-chunk nccl-port
    nccl-init-addr dist-timeout enable-p2p-check sampling-backend disable-custom-all-reduce
    disable-outlines-disk-cache disable-flashinfer-autotune disable-shared-experts-fusion
    disable-fast-image-processor disable-priority-preemption disable-attn-tp-gather enable-memory-saver
    enable-weights-cpu-backup"""
)
"""They change nothing: metrics are always told, memory can always be released, one process needs no addresses, what is
switched off is not there."""
_NEUTRAL = neutral_values(
    """ep=1 ep-size=1 expert-parallel-size=1 dcp-size=1 decode-context-parallel-size=1 attn-dp-size=1
    attention-data-parallel-size=1 attn-cp-size=1 attention-context-parallel-size=1 moe-dp-size=1
    moe-data-parallel-size=1 dwdp-size=1 pp-async-batch-depth=0 gpu-id-step=1
    load-balance-method=auto ep-num-redundant-experts=0 init-expert-location=trivial moe-a2a-backend=none
    moe-runner-backend=auto deepep-mode=auto eplb-algorithm=auto eplb-rebalance-num-iterations=1000
    expert-balancedness-report-mode=off cpu-offload-gb=0 offload-group-size=-1 offload-num-in-group=1
    offload-prefetch-step=1 offload-mode=cpu lora-eviction-policy=lru lora-backend=csgmv
    max-lora-chunk-size=16 radix-eviction-policy=lru hicache-host-memory-mode=cache
    hicache-host-memory-fraction=0.8 hicache-write-policy=write_through hicache-io-backend=kernel
    hicache-mem-layout=page_first hicache-storage-prefetch-policy=timeout
    disaggregation-transfer-backend=mooncake num-reserved-decode-tokens=512
    disaggregation-decode-polling-interval=1 encoder-transfer-backend=auto encoder-bootstrap-port=8997
    mm-processor-worker-num=0 mm-io-worker-num=0 image-processor-backend=auto model-loader-extra-config={}
    model-impl=auto json-model-override-args={} fp8-gemm-backend=auto fp4-gemm-backend=auto bf16-gemm-backend=auto
    prefill-kv-cache-dequant-dtype=auto triton-attention-num-kv-splits=8 torch-compile-max-bs=32
    mamba-backend=triton mamba-radix-cache-strategy=auto linear-attn-backend=triton startup-weight-load-mode=serial
    weight-loader-prefetch-num-threads=4 weight-version=default log-requests-level=2 log-requests-format=text
    gc-warning-threshold-secs=0 decode-log-interval=40 kv-canary=none max-prefill-tokens=16384
    prefill-decode-interval-min-bs=0 retraction-policy=length priority-scheduling-preemption-threshold=10
    num-continuous-decode-steps=1 scheduler-recv-interval=1 tokenizer-mode=auto tokenizer-backend=huggingface
    tokenizer-worker-num=1 detokenizer-worker-num=1 batch-notify-size=16
    dynamic-batch-tokenizer-batch-size=32 dynamic-batch-tokenizer-batch-timeout=0.002
    speculative-accept-threshold-single=1 speculative-accept-threshold-acc=1 speculative-attention-mode=prefill
    speculative-eagle-topk=1 speculative-draft-model-revision=main speculative-draft-load-format=auto
    speculative-draft-model-quantization=unquant speculative-moe-runner-backend=auto
    speculative-ngram-min-match-window-size=1 speculative-ngram-max-match-window-size=12
    speculative-ngram-min-bfs-breadth=1 speculative-ngram-max-bfs-breadth=10 speculative-ngram-match-type=BFS
    speculative-ngram-branch-length=18 speculative-ngram-capacity=10000000
    speculative-ngram-max-trie-depth=18 otlp-traces-endpoint=localhost:4317 trace-modules=request
    revision=main fastapi-root-path= prefill-delayer-max-delay-passes=30"""
)
_ALGORITHM = "speculative-algorithm"
_RENAMED = {
    **{name.removeprefix("--"): flag.replace("_", "-") for flag, names in SYNONYMS.items() for name in names},
    "model": "model-path",
    "cuda-graph-max-bs-decode": "cuda-graph-max-bs",
    "disaggregation-bootstrap-port": "disaggregation-port",
}
"""Flags that are called otherwise here."""


def _algorithm(values: list[str]) -> list[str]:
    """In any case, as the original reads it."""
    name = one(_ALGORITHM, values)
    if name.upper() in ("EAGLE", "NEXTN", "DFLASH"):
        message = (
            f"--{_ALGORITHM} {name}: such heads are not read here yet; EAGLE3 takes an EAGLE-3 head, STANDALONE a "
            "draft model, and NGRAM needs neither"
        )
        raise ConfigError(message, option=_ALGORITHM)
    return [f"--{_ALGORITHM}", low if (low := name.lower()) in ("auto", "off", "none") else name.upper()]


_TRANSLATED: dict[str, Callable[[list[str]], list[str]]] = {
    "base-gpu-id": lambda values: [] if values == ["0"] else ["--device", f"cuda:{one('base-gpu-id', values)}"],
    "enable-priority-scheduling": lambda values: ["--schedule-policy", "priority"],
    "disable-hybrid-swa-memory": lambda values: ["--swa-full-tokens-ratio", "1"],
    "constrained-json-disable-any-whitespace": lambda values: ["--json-whitespace", "compact"],
    _ALGORITHM: _algorithm,
    "tool-call-parser": lambda values: (
        [] if values == ["auto"] else ["--tool-call-parser", one("tool-call-parser", values)]
    ),
}
_FLAGS = Flags(_COMMAND, {*_FIELDS, *_RENAMED, *_TRANSLATED, *_SO, "config", "help"}, _NEUTRAL)


def main() -> None:
    """Serve with the command line's flags; exits like `sgl`."""
    try:
        words = translated(sys.argv[1:])
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    if words is None:
        sys.stdout.write(_HELP.format(translated=_listed({*_RENAMED, *_TRANSLATED}), so=_listed(_SO)))
        sys.exit(0)
    sys.argv[1:] = ["serve", *words]
    entry.main()


def translated(words: list[str]) -> list[str] | None:
    """The arguments of `sgl serve`; None: help is wanted. Raises ConfigError."""
    if {"-h", "--help"} & set(words):
        return None
    given = _FLAGS.read(words)
    for flag, values in given:
        if flag == "config":  # flags win over the file
            given = [*_FLAGS.read(_of_file(Path(one(flag, values)))), *given]
    found: list[str] = []
    for flag, values in given:
        if flag in _TRANSLATED:
            found += _TRANSLATED[flag](values)
        elif flag in _SEVERAL and values:
            found += [word for value in values for word in (f"--{flag}", value)]
        elif (name := _RENAMED.get(flag, flag)) in _FIELDS:
            found.append(f"--{name}")
            if not _FIELDS[name]:
                text = one(flag, values)
                found.append(_VALUES.get(name, {}).get(text, text))
            elif values:
                raise ConfigError(f"--{flag} is a switch: it has no value", option=flag)
    return found


def _of_file(path: Path) -> list[str]:
    """The flags of a YAML file."""
    words: list[str] = []
    for name, value in options_of_file(path).items():
        if value is not False and value is not None:
            several: list[Any] = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name}", *map(str, several)]
    return words


def _listed(flags: Any) -> str:
    return ", ".join(f"--{flag}" for flag in sorted(flags))
