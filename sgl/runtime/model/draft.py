"""A draft model: a decoder that gives logits of another model's tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.weights import Weights


class DraftDecoder(Decoder):
    """The vocabularies are the same, but one may have more rows than there are tokens, to be of a round size."""

    def __init__(self, config: ModelConfig, weights: Weights, vocab_size: int, max_positions: int) -> None:
        """vocab_size: the other model's."""
        super().__init__(replace(config, vocab_size=vocab_size), weights, max_positions)
        self._num_common = min(config.vocab_size, vocab_size)
        self._is_padded = config.vocab_size != vocab_size

    def _embedded(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super()._embedded(input_ids.clamp(max=self._num_common - 1) if self._is_padded else input_ids)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Decoder`; -inf for tokens that only the other model has."""
        if not self._is_padded:
            return super().logits(hidden, out)
        own = super().logits(hidden)[:, : self._num_common]
        if out is None:
            out = torch.empty(len(own), self.config.vocab_size, dtype=own.dtype, device=own.device)
        out[:, : self._num_common].copy_(own)
        out[:, self._num_common :].fill_(-math.inf)
        return out
