"""This rank's connections to the others that hold parts of the same model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl.kernels.collectives import Collectives, Links, Rendezvous
from sgl.runtime.model.shard import Shard


@dataclass(frozen=True, slots=True)
class Ranks:
    """`shard`: which part this one holds."""

    shard: Shard
    stage: Collectives | None
    """Of the ranks with other heads of the same layers, if there are any."""
    links: Links | None
    """To the ranks with the layers before and behind, if there are any."""

    @staticmethod
    def join(rendezvous: Rendezvous, shard: Shard, device: torch.device, *, in_order: bool = False) -> Ranks:
        """Wait for the others; see Collectives."""
        stage = links = None
        if shard.size > 1:
            stage = Collectives(
                rendezvous, f"stage{shard.stage}", shard.rank, shard.size, device, in_order=in_order
            )
        if shard.stages > 1:
            links = Links(rendezvous, f"chain{shard.rank}", shard.stage, shard.stages, device)
        return Ranks(shard, stage, links)

    @property
    def waited_ns(self) -> int:
        """For which this process waited for what others had to give."""
        return sum(each.waited_ns for each in (self.stage, self.links) if each is not None)

    def sum(self, numbers: list[int], device: torch.device) -> list[int]:
        """`total` of numbers."""
        return self.total(torch.tensor(numbers, dtype=torch.int64, device=device)).tolist()

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, which goes round the ring of stages; rank 0 alone has that of all stages. All
        ranks wait for those before them. Between steps."""
        if self.stage is not None:
            own = self.stage.sum(own)
        if self.links is not None:
            others = torch.empty_like(own)
            if self.shard.stage:
                own = own + self.links.receive(others)
            self.links.send(own)
            if not self.shard.stage:
                own = self.links.receive(others)
        return own

    def close(self) -> None:
        """End what waits for others. Idempotent."""
        for each in (self.stage, self.links):
            if each is not None:
                each.close()
