"""Where the processes of a replica go: as few hosts as hold them, each with an equal share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Host:
    """What a host of the Ray cluster has in all."""

    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Placement:
    """A replica's hosts."""

    hosts: int
    share: int  # processes of each
    uses_gpus: bool

    @property
    def resources(self) -> dict[str, float]:
        """What each host's bundle of a placement group reserves."""
        return {"CPU": 1, "GPU": self.share} if self.uses_gpus else {"CPU": self.share}

    @property
    def actor(self) -> dict[str, Any]:
        """The same for an actor within a bundle."""
        return {"num_cpus": self.resources["CPU"], "num_gpus": self.resources.get("GPU", 0)}


def placed(
    engines: Mapping[str, EngineConfig], hosts: Sequence[Host], counts: Mapping[str, int]
) -> dict[str, Placement]:
    """The placement of each replica, by kind. Raises ConfigError if so many do not fit."""
    device = next(iter(engines.values())).device  # is all kinds'
    uses_gpus = device != "cpu" and any(host.gpus >= 1 for host in hosts)
    if device == "cuda" and not uses_gpus:
        raise ConfigError("device='cuda': no host of the Ray cluster has a GPU", option="device")
    free = [int(host.gpus if uses_gpus else host.cpus) for host in hosts]
    more = {"uses_gpus": uses_gpus, "is_whole": len(engines) > 1}
    return {kind: _placed(config, free, counts[kind], kind, **more) for kind, config in engines.items()}


def _placed(
    config: EngineConfig, free: list[int], replicas: int, kind: str, *, uses_gpus: bool, is_whole: bool
) -> Placement:
    """Of one kind, which takes what hosts have. is_whole: each replica is on one host."""
    number = config.num_ranks * config.dp_size
    is_open = config.nnodes == 1 == config.dp_size and not is_whole  # several engines are one host's
    divisors = [each for each in range(number, 0, -1) if number % each == 0]
    shares = divisors if is_open else [number // config.nnodes]
    for share in shares:
        wanted = replicas * (number // share)
        if sum(each // share for each in free) >= wanted:
            for host, each in enumerate(free):
                taken = min(wanted, each // share)
                free[host], wanted = each - taken * share, wanted - taken
            return Placement(number // share, share, uses_gpus)
    option = "replicas" if kind == "worker" else f"{kind}_replicas"
    if replicas == 1:
        sizes = (name for name in ("nnodes", "tp_size", "pp_size", "dp_size") if getattr(config, name) > 1)
        option = next(sizes, option)
    whose, left = ("", "") if kind == "worker" else (f"{kind} ", " beside those of the others")
    raise ConfigError(
        f"{replicas} {whose}replicas of {number} processes do not fit: the Ray cluster's hosts have "
        f"{', '.join(map(str, free)) or 'no'} {'GPUs' if uses_gpus else 'CPUs'}{left}",
        option=option,
    )
