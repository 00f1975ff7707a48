"""Flags of the original's commands: reading them, and refusing what is not there by the name of its feature."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sgl.errors import ConfigError, nearest_name

Given = list[tuple[str, list[str]]]
"""Flags without dashes, in order, and the values behind each."""

_FEATURES = {
    r"lora": "that option of LoRA adapters",
    r"speculative|spec-|eagle": "that option of speculative decoding",
    r"disagg|^encoder-|pd-|pdmux|^(language|encoder)-|decode-tokens|sm-group": "servers for prefill or decode alone",
    r"hicache|hierarchical|hisparse|lmcache|flexkv|external-linker|radix-cache-backend": (
        "that option of KV beyond the device"
    ),
    r"moe|expert|deepep|eplb|^kt-|^ep|elastic-ep|fuseep|waterfill": "mixtures of experts",
    r"^mm-|multimodal|media|image|^asr-|-mm-": "images, video and audio",
    r"^(tp|dp|pp|cp|dcp|dwdp|attn-[dc]p|tensor|data|pipeline|decode-context|attention-\w+)(-|$)|parallel|nnodes|"
    r"node-rank|dp-attention|load-balance|all-?reduce|nccl|mscclpp|symm-mem": "more than one GPU",
    r"mamba|linear-attn|replayssm": "state-space layers",
    r"offload": "weights kept off the device",
    r"torch-compile": "torch.compile",
    r"torchao|modelopt|quantiz|qsa|gemm|dsa|dsv4|mxfp|fp4|fp8": "that quantisation",
    r"dllm": "diffusion language models",
    r"embedding": "embeddings",
    r"grpc|sidecar": "gRPC in the place of HTTP: see --grpc-port of sgl serve",
    r"ssl-|http2|uvicorn|fastapi": "TLS and HTTP/2: put a proxy in front",
    r"deterministic|rl-on-policy": "that option of the deterministic mode",
    r"watermark": "watermarks",
    r"hidden-states|routed-experts|indexer": "inner states as answers",
    r"trace|otlp": "traces in the original's form: see --otlp-endpoint of sgl serve",
    r"weight-|checkpoint-engine|remote-instance|modelexpress|memory-saver": "weights that change while it serves",
    r"^return-logprob|^token-ids-logprob": "log-probabilities in a benchmark",
    r"^sharegpt-": "lengths of answers other than a dataset's: see --max-output-len of sgl bench serving",
    r"^output-details|^print-requests": "each request's figures",
    r"^plot-": "plots on a terminal: see --plot of sgl bench serving",
    r"^apply-chat-template|^tokenize-prompt": "prompts made by the client: see --backend sglang-oai-chat",
    r"^disable-stream$": "answers that are not streamed",
    r"^gsp-|^agentic-|^speed-bench": "that kind of dataset",
    r"^rust-": "another client",
    r"log-requests": "requests' contents in the log",
    r"profile|nvtx|debug|dump|canary|hooks": "debugging by flags: see /start_profile",
}
"""By what a flag's name holds."""


@dataclass(frozen=True)
class Flags:
    """What a command of the original takes. Names are without dashes."""

    command: str
    taken: Collection[str]
    """With any value: they are translated, or what they ask for is so."""
    neutral: Mapping[str, str]
    """With this value alone: what they are for is not there."""

    def read(self, words: Sequence[str]) -> Given:
        """The taken flags of a command line. Raises ConfigError for others and for values that are not neutral."""
        found: Given = []
        for word in words:
            if word.startswith("--"):
                flag, equals, value = word[2:].partition("=")
                found.append((self._known(flag.replace("_", "-")), [value] if equals else []))
            elif found:
                found[-1][1].append(word)
            else:
                raise ConfigError(f"{self.command}: what is {word!r}? Its arguments are flags")
        for flag, values in found:
            if flag in self.neutral:
                self._check_neutral(flag, values)
        return [(flag, values) for flag, values in found if flag not in self.neutral]

    def _known(self, flag: str) -> str:
        """The flag that is meant: the original takes beginnings, too. Raises ConfigError."""
        if flag in self.taken or flag in self.neutral:
            return flag
        meant = [each for each in self.taken if each.startswith(flag)]
        if len(meant) == 1:
            return meant[0]
        if len(meant) > 1:
            message = f"--{flag} may mean {', '.join(f'--{each}' for each in sorted(meant))}: write it out"
            raise ConfigError(message, option=flag)
        if feature := feature_of(flag):
            raise ConfigError(f"--{flag}: there is no such thing here yet ({feature}): leave it out", option=flag)
        hint = nearest_name(f"--{flag}", [f"--{each}" for each in (*self.taken, *self.neutral)])
        message = f"{self.command}: there is no --{flag} here{hint}; --help lists what there is"
        raise ConfigError(message, option=flag)

    def _check_neutral(self, flag: str, values: list[str]) -> None:
        neutral = self.neutral[flag]
        if len(values) != 1 or not _same(values[0], neutral):
            what = feature_of(flag) or flag.removeprefix("enable-").replace("-", " ")
            shown = " ".join([f"--{flag}", *values])
            message = (
                f"{shown}: there is no such thing here yet ({what}): leave it out, or give {neutral or 'nothing'}"
            )
            raise ConfigError(message, option=flag)


def feature_of(flag: str) -> str | None:
    """The feature that a flag belongs to, if its name tells."""
    return next((feature for pattern, feature in _FEATURES.items() if re.search(pattern, flag)), None)


def one(flag: str, values: list[str]) -> str:
    """The one value of a flag. Raises ConfigError."""
    if len(values) != 1:
        raise ConfigError(f"--{flag} takes one value, and has {' '.join(values) or 'none'}", option=flag)
    return values[0]


def words_of(text: str) -> list[str]:
    """The words of a text, such as flags."""
    return text.split()


def neutral_values(text: str) -> dict[str, str]:
    """Flags and values of `flag=value` words."""
    return dict(word.split("=", 1) for word in text.split())


def _same(given: str, neutral: str) -> bool:
    try:
        return float(given) == float(neutral)
    except ValueError:
        return given.lower() == neutral.lower()
