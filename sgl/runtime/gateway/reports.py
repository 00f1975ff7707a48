"""What a worker says of itself at /get_server_info: how much it has to do. A worker may say anything: what cannot be
read is not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_ADAPTERS, MOST_CHARACTERS = 1000, 256
"""Of a worker: their names go with each request that is read in another process."""


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's, of all its clients. kv_usage: 0 to 1, of what nothing else could take the place of."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    hit_rate: float | None = None  # of all its prompts' tokens; None: there were none

    @property
    def requests(self) -> int:
        """All of them."""
        return self.running + self.waiting


def load_of(info: Mapping[str, Any]) -> Load:
    """Of what a server says. Raises KeyError, TypeError and ValueError where that is not understood."""
    states = info["internal_states"]
    total = tokens_of(info)
    free = sum(_number(state[name]) for state in states for name in ("kv_available_tokens", "kv_evictable_tokens"))
    prompts, cached = (
        sum(_number(its.get(name, 0)) for its in states) for name in ("prompt_tokens", "cached_tokens")
    )
    return Load(
        int(sum(_number(state["num_running_reqs"]) for state in states)),
        int(sum(_number(state["num_queue_reqs"]) for state in states)),
        min(1.0, max(0.0, 1 - free / total)) if total else 0.0,
        min(1.0, cached / prompts) if prompts else None,
    )


def tokens_of(info: Mapping[str, Any]) -> int:
    """For which a server's caches have room. Raises as `load_of` does."""
    return int(len(info["internal_states"]) * _number(info["max_total_tokens"]))


def adapters_of(info: Mapping[str, Any]) -> frozenset[str]:
    """The names of its LoRA adapters, of so many as a router tells apart. Raises as `load_of` does."""
    return frozenset(
        str(each["lora_name"])[:MOST_CHARACTERS] for each in (info.get("lora_paths") or [])[:MOST_ADAPTERS]
    )


def mode_of(info: Mapping[str, Any]) -> str | None:
    """Its disaggregation_mode: prefill or decode; None: neither."""
    mode = info.get("disaggregation_mode")
    return mode if mode in ("prefill", "decode") else None


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e15:
        raise ValueError(f"{value!r:.99} is no count")
    return float(value)
