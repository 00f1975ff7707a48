"""One rank's part of a model: where it is among the others, and what all decoders do at both ends of their layers."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch
from torch.nn import functional

from sgl.kernels.collectives import Collectives, Links
from sgl.kernels.layers.activation import cap_
from sgl.kernels.layers.embedding import embedding_part
from sgl.kernels.layers.invariant import InvariantMatrix
from sgl.kernels.layers.linear import Matrix, linear
from sgl.kernels.layers.norm import add_rms_norm
from sgl.runtime.model.lora import LoraStep, adapted, added
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import WHOLE

_EACH, _STEP, _MANY = 512, 32, 16_384  # numbers of tokens to warm up: each, then every 32nd, up to these


def warm_up_sizes(most_rows: int, most_tokens: int) -> list[int]:
    """Numbers of tokens to warm up, the largest first: smaller ones reuse its memory."""
    steps = range(_STEP, min(max(most_tokens, most_rows), _MANY), _STEP)
    return sorted({most_tokens, most_rows, *range(1, min(most_rows, _EACH) + 1), *steps}, reverse=True)


class Ends(Protocol):
    """Weights at both ends, of this rank's part of the vocabulary."""

    embedding: torch.Tensor
    lm_head: Matrix

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""


class Whole(Protocol):
    """A whole model's config."""

    @property
    def vocab_size(self) -> int:
        """Tokens."""

    @property
    def context_length(self) -> int:
        """Positions that it was made for."""

    @property
    def rms_norm_eps(self) -> float:
        """Of the norms on the residual."""


W = TypeVar("W", bound=Ends)


class ModelPart(Generic[W]):
    """The base of decoders."""

    def __init__(self, config: Whole, weights: W, max_positions: int | None, ranks: Ranks | None) -> None:
        """config: the whole model's. max_positions: positions it may be asked for (default: the context). ranks: among
        which the model is cut."""
        self.shard = shard = WHOLE if ranks is None else ranks.shard
        self.vocabulary = shard.vocabulary(config.vocab_size)
        """The tokens whose logits it computes."""
        self.collectives: Collectives | None = None if ranks is None else ranks.stage
        self.links: Links | None = None if ranks is None else ranks.links
        self.is_first, self.is_last = shard.stage == 0, shard.is_last
        self.weights = weights
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.max_positions = max_positions or config.context_length
        self.logit_cap: float | None = None
        self._eps = config.rms_norm_eps
        self._vocab_size = config.vocab_size
        self._vocabulary_width = shard.vocabulary_width(config.vocab_size)

    def _embedded(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedding = self.weights.embedding
        if self.collectives is None:
            return functional.embedding(input_ids, embedding)
        return self.collectives.sum(embedding_part(input_ids, embedding, self.vocabulary.start))

    def _add_product(
        self,
        x: torch.Tensor,
        matrix: Matrix,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        index: int,
        name: str,
        lora: LoraStep | None,
        *,
        captured: bool,
    ) -> torch.Tensor | None:
        """`lora.added`; of several ranks, this one's part, all of which is left."""
        if self.collectives is None:
            return added(x, matrix, bias, residual, index, name, lora, captured=captured)
        return adapted(x, matrix, bias, index, name, lora)

    def _add_norm(self, rest: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`norm.add_rms_norm` of what `_add_product`, or experts, left."""
        if rest is None or self.collectives is None:
            return add_rms_norm(rest, residual, weight, self._eps)
        return self.collectives.add_rms_norm(rest if rest.dim() == 2 else rest.sum(0), residual, weight, self._eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [n, len(vocabulary)] of hidden states [n, hidden], in `out` if given."""
        head, cap = self.weights.lm_head, self.logit_cap
        if isinstance(head, InvariantMatrix):
            logits = hidden.new_empty(len(hidden), len(head), dtype=torch.float32) if out is None else out
            head.times(hidden, None, logits)
        elif hidden.is_cuda and self.dtype != torch.float32 and len(hidden) > 1 and isinstance(head, torch.Tensor):
            # neither rounded to the weights' dtype nor written twice
            logits = torch.mm(hidden, head.t(), out_dtype=torch.float32, out=out)
        else:
            logits = linear(hidden, head, None)
            logits = logits.float() if out is None else out.copy_(logits)
        return logits if cap is None else cap_(logits, cap)

    def whole_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab] of hidden states [n, hidden]."""
        return self.whole(self.logits(hidden))

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab] of `logits` [n, len(vocabulary)], from all ranks."""
        if self.collectives is None:
            return logits
        padded = functional.pad(logits, (0, self._vocabulary_width - logits.shape[1]))
        return self.collectives.gather_columns(padded)[:, : self._vocab_size]
