"""Where the processes of a replica go: as few hosts as hold them, each with an equal share."""

from __future__ import annotations

from collections.abc import Sequence
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


def placed(config: EngineConfig, hosts: Sequence[Host], replicas: int) -> Placement:
    """The placement of each replica. Raises ConfigError if so many do not fit."""
    uses_gpus = config.device != "cpu" and any(host.gpus >= 1 for host in hosts)
    if config.device == "cuda" and not uses_gpus:
        raise ConfigError("device='cuda': no host of the Ray cluster has a GPU", option="device")
    kind = "GPUs" if uses_gpus else "CPUs"
    free = [int(host.gpus if uses_gpus else host.cpus) for host in hosts]
    number = config.num_ranks * config.dp_size
    is_open = config.nnodes == 1 == config.dp_size  # several engines are one host's
    shares = _divisors(number) if is_open else [number // config.nnodes]
    for share in shares:
        if sum(each // share for each in free) >= replicas * (number // share):
            return Placement(number // share, share, uses_gpus)
    option = next(
        (name for name in ("nnodes", "tp_size", "pp_size", "dp_size") if getattr(config, name) > 1), "replicas"
    )
    raise ConfigError(
        f"{replicas} replicas of {number} processes do not fit: the Ray cluster's hosts have "
        f"{', '.join(map(str, free)) or 'no'} {kind}",
        option="replicas" if replicas > 1 else option,
    )


def _divisors(number: int) -> list[int]:
    """From the largest."""
    return [each for each in range(number, 0, -1) if number % each == 0]
