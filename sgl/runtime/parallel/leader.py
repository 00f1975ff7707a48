"""The runner of rank 0: what it executes, all ranks do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

import torch

from sgl.grammar.automaton.finished import Configuration
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.runtime.batch import Batch, PageMoves, PendingMoves, PendingStep, StepResult, TokenMasks
from sgl.runtime.model.lora import Adapter
from sgl.runtime.parallel import wire
from sgl.runtime.parallel.group import RankGroup
from sgl.runtime.parallel.occupation import RankedOccupation
from sgl.runtime.parallel.times import Times
from sgl.runtime.runner.cut_vocabulary import outline
from sgl.runtime.runner.host_pages import HostPages
from sgl.runtime.runner.hybrid_host_memory import HybridHostMemory
from sgl.runtime.runner.runner import Launched, ModelRunner
from sgl.runtime.runner.shared_rows import SharedRows


class LeadingRunner:
    """See `batch.Runner`. Raises EngineDead when a rank is gone."""

    def __init__(self, own: ModelRunner, group: RankGroup, device: torch.device) -> None:
        self._own = own
        self._group = group
        self._times = Times(group.own_numbers, group.ranks, device)
        self.occupation = RankedOccupation(own.occupation, group)

    def forward(self, batch: Batch) -> Launched:
        """Start the forward pass of a step on all ranks."""
        self._times.begin()
        self._group.send(wire.Forward(batch))
        with self._group.failing():
            launched = (self._own.forward if self._group.ranks.links is None else self._own.enter)(batch)
        self._times.end(1)
        return launched

    def sample(self, launched: Launched, masks: TokenMasks | None = None) -> PendingStep:
        """Sample after a forward pass on all ranks."""
        self._times.begin()
        self._group.send(wire.Sample(None if masks is None else outline(masks)))
        with self._group.failing():
            pending = _LedStep(self._own.sample(launched, masks), self._group)
        self._times.end(0)
        return pending

    def launch(self, batch: Batch, masks: TokenMasks | None = None) -> PendingStep:
        """Both phases of a step at once."""
        return self.sample(self.forward(batch), masks)

    def move(self, moves: PageMoves) -> PendingMoves:
        """Copy pages on all ranks; done when this one's are, or where ranks share memory when all ranks' are."""
        self._group.send(wire.Move(moves))
        with self._group.failing():
            own = self._own.move(moves)
        hosts = [] if self.host is None else [self.host, *chain(*self.hybrid_host.hosts())]
        shared = [host.shared for host in hosts if host.shared is not None]
        return _LedMoves(own, shared) if shared else own

    @property
    def host(self) -> HostPages | None:
        """See ModelRunner: this rank's part."""
        return self._own.host

    def measure(self, num_tokens: int) -> tuple[float, float]:
        """See ModelRunner."""
        return self._own.measure(num_tokens, self.launch)

    @property
    def hybrid_host(self) -> HybridHostMemory:
        """See ModelRunner: this rank's part."""
        return self._own.hybrid_host

    def weights_hash(self, hash_of: Callable[[Iterable[torch.Tensor]], bytes]) -> bytes:
        """See ModelRunner: of how all ranks hold them."""
        self._group.send(wire.Hash(reads=False))
        with self._group.failing():
            return self._own.weights_hash(hash_of)

    def warm_up(self, num_tokens: int) -> None:
        """See ModelRunner."""
        self._own.warm_up(num_tokens, self.launch)

    def enable_device_masks(self, vocabulary: Vocabulary, example: Configuration) -> None:
        """See ModelRunner; only this rank's device works masks out."""
        self._own.enable_device_masks(vocabulary, example, self.launch)

    @property
    def num_encoded(self) -> int:
        """See ModelRunner."""
        return self._own.num_encoded

    def read_adapter(self, path: str) -> Adapter:
        """See ModelRunner; the others read it when it is added."""
        return self._own.read_adapter(path)

    def add_adapter(self, number: int, adapter: Adapter) -> None:
        """See ModelRunner."""
        self._group.send(wire.AddAdapter(number, adapter.path))
        self._own.add_adapter(number, adapter)

    def drop_adapter(self, number: int) -> None:
        """See ModelRunner."""
        self._group.send(wire.DropAdapter(number))
        self._own.drop_adapter(number)

    def close(self) -> None:
        """See ModelRunner; before its group ends, which the graphs are of."""
        self._own.close()

    def is_launching(self) -> bool:
        """See ModelRunner."""
        return self._own.is_launching()


class _LedMoves:
    """Copies of all ranks."""

    def __init__(self, own: PendingMoves, shared: list[SharedRows]) -> None:
        self._own = own
        self._shared = shared
        self.number = own.number

    @property
    def load_seconds(self) -> float:
        """See PendingMoves; of this rank."""
        return self._own.load_seconds

    def is_loaded(self) -> bool:
        """See PendingMoves."""
        return self._own.is_loaded() and all(its.all_have("loaded", self.number) for its in self._shared)

    def is_saved(self) -> bool:
        """See PendingMoves."""
        return self._own.is_saved() and all(its.all_have("saved", self.number) for its in self._shared)

    def comes_by_layer(self) -> bool:
        """See PendingMoves. Host memory that ranks share is let go of once all have loaded."""
        return not self._shared and self._own.comes_by_layer()


class _LedStep:
    """A launched step of all ranks."""

    def __init__(self, own: PendingStep, group: RankGroup) -> None:
        self._own = own
        self._group = group

    def wait(self) -> StepResult:
        """See PendingStep. Raises EngineDead: without a rank, results are worthless."""
        with self._group.failing():
            result = self._own.wait()
        self._group.check()
        return result
