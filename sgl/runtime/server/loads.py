"""What each engine has to do: what routers and trainers ask for at /v1/loads, and by gRPC."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sgl.errors import InvalidRequest, nearest_name
from sgl.runtime.metrics import Throughput
from sgl.runtime.server.replies import EngineLoad, EngineLoads
from sgl.runtime.server.service import VERSION, Service

_SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")


class Loads:
    """Of one service, since it was last asked."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._rates: defaultdict[int, Throughput] = defaultdict(Throughput)

    async def look(self, rank: int | None, include: Sequence[str]) -> EngineLoads:
        """Of each engine, or of one; include: further sections, by SGLang's names; none: all. Raises InvalidRequest and
        EngineDead."""
        for name in include:
            if name not in _SECTIONS:
                raise InvalidRequest(
                    f"include has no section {name!r}{nearest_name(name, _SECTIONS)}", param="include"
                )
        info = await self._service.info()
        states = info["internal_states"]
        if rank is not None and not 0 <= rank < len(states):
            raise InvalidRequest(f"dp_rank={rank}: there are {len(states)} engines, from 0", param="dp_rank")
        wanted = range(len(states)) if rank is None else [rank]
        sections = set(include) - {"all"} if include and "all" not in include else {*_SECTIONS}
        loads = [self._load(i, info, states[i], sections) for i in wanted]
        return {
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
            "version": VERSION,
            "dp_rank_count": len(states),
            "loads": loads,
            "aggregate": {
                "total_running_reqs": sum(its["num_running_reqs"] for its in loads),
                "total_waiting_reqs": sum(its["num_waiting_reqs"] for its in loads),
                "total_reqs": sum(its["num_total_reqs"] for its in loads),
                "avg_token_usage": _mean([its["token_usage"] for its in loads]),
                "avg_throughput": _mean([its["gen_throughput"] for its in loads]),
                "avg_utilization": _mean([its["utilization"] for its in loads]),
            },
        }

    def _load(self, rank: int, info: Mapping[str, Any], state: Mapping[str, Any], sections: set[str]) -> EngineLoad:
        total, most = info["max_total_tokens"], info["max_running_requests"]
        used = total - state["kv_available_tokens"] - state["kv_evictable_tokens"]
        running, waiting = state["num_running_reqs"], state["num_queue_reqs"]
        load: EngineLoad = {
            "dp_rank": rank,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_used_tokens": used,
            "max_total_num_tokens": total,
            "token_usage": used / total,
            "gen_throughput": self._rates[rank].of(state["generated_tokens"]),
            "cache_hit_rate": state["cache_hit_rate"],
            "utilization": running / most,
            "max_running_requests": most,
        }
        if "memory" in sections:
            load["memory"] = {
                "weight_gb": info["weight_bytes"] / 1e9,
                "kv_cache_gb": info["kv_bytes"] / 1e9,
                "token_capacity": total,
            }
        if "spec" in sections and state["drafted_tokens"]:
            load["speculative"] = {"accept_rate": state["verified_tokens"] / state["drafted_tokens"]}
        if "queues" in sections:
            load["queues"] = {"waiting": waiting}
        return load


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
