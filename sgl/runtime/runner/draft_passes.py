"""What one pass of a draft model, or of a head, computes in CUDA graphs of drafts."""

from __future__ import annotations

from typing import Protocol

import torch

from sgl.kernels.attention.base import AttentionShape, PlannedAttention
from sgl.runtime.model.draft import DraftDecoder
from sgl.runtime.model.eagle.head import EagleHead
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.tokens import Tokens


class Passes(Protocol):
    """A pass computes an entry for each of a row's tokens but the first few. Never waits for the device."""

    name: str
    first: int  # tokens without an entry
    shape: AttentionShape
    num_slots: int

    def run(
        self, tokens: Tokens, previous: torch.Tensor, left: torch.Tensor | None, attention: PlannedAttention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states of the wanted tokens, [N, hidden], and what is left for the next pass, whose tokens stand
        behind these. previous: int64 [T] the slots of the tokens before, of a first pass. left: by the pass before."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [N, vocab] of the target's tokens."""
        ...

    def close(self) -> None:
        """Let go of everything."""


class ModelPasses:
    """Those of a draft model."""

    name = "a draft model"
    first = 0

    def __init__(self, model: DraftDecoder, kv: KVCache) -> None:
        self._model, self._kv = model, kv
        self.shape = model.attention_shape(kv.page_size)
        self.num_slots = kv.num_pages * kv.page_size

    def run(
        self, tokens: Tokens, previous: torch.Tensor, left: torch.Tensor | None, attention: PlannedAttention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Passes`."""
        return self._model.forward(tokens, self._kv, attention, captured=True), None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Passes`."""
        return self._model.logits(hidden)

    def close(self) -> None:
        """The model and its KV are the runner's."""


class HeadPasses:
    """Those of an EAGLE-3 head."""

    name = "a head"
    first = 1

    def __init__(self, head: EagleHead, kv: KVCache, features: torch.Tensor, max_rows: int) -> None:
        """features: by slot, of the target's tokens."""
        self._head, self._kv, self._features = head, kv, features
        self.shape = head.attention_shape(kv.page_size)
        self.num_slots = kv.num_pages * kv.page_size
        self._logits: torch.Tensor | None = None
        if head.weights.target_ids is not None:  # -inf stays where it is
            shape = max_rows, head.config.vocab_size
            self._logits = torch.full(shape, float("-inf"), dtype=torch.float32, device=head.device)

    def run(
        self, tokens: Tokens, previous: torch.Tensor, left: torch.Tensor | None, attention: PlannedAttention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Passes`. Features are left."""
        features = self._features.index_select(0, previous) if left is None else left
        return self._head.forward(tokens, features, self._kv, attention, captured=True)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Passes`."""
        logits = self._head.own_logits(hidden)
        target_ids = self._head.weights.target_ids
        if self._logits is not None and target_ids is not None:
            logits = self._logits[: len(hidden)].index_copy_(1, target_ids, logits)
        return logits

    def close(self) -> None:
        """See `Passes`."""
        self._features = self._features.new_empty(0)
        self._logits = None
