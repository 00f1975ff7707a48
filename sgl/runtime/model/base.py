"""What the engine needs of a model.

`Decoder` serves the families that sgl knows, `gdn.model.Hybrid` hybrids of gated delta nets and attention,
`hf.model.TransformersModel` any other decoder of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from sgl.kernels.attention.base import AttentionBackend, AttentionShape
from sgl.kernels.collectives import Collectives, Links
from sgl.runtime.model.config import DtypeName
from sgl.runtime.model.gdn.states import StateCache
from sgl.runtime.model.kv_cache import KVCache, KVLayout
from sgl.runtime.model.tokens import Tokens


class Config(KVLayout, Protocol):
    """A checkpoint's config."""

    @property
    def path(self) -> str:
        """The checkpoint's folder."""

    @property
    def architecture(self) -> str:
        """The entry of `architectures`."""

    @property
    def vocab_size(self) -> int:
        """Token ids, and logits of a position."""

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""

    @property
    def context_length(self) -> int:
        """Positions that it was made for."""

    @property
    def dtype(self) -> DtypeName:
        """The checkpoint's."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Any of them ends a generation."""

    @property
    def checkpoint_format(self) -> str:
        """How its weights are stored."""


class HeadLayout(KVLayout, Protocol):
    """Heads of layers that are all alike."""

    @property
    def num_heads(self) -> int:
        """Of queries."""


def shape_of_heads(
    heads: HeadLayout, page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None, device: torch.device
) -> AttentionShape:
    """Of attention without windows, whose scores are scaled by the heads' width."""
    return AttentionShape(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        page_size=page_size,
        scale=heads.head_dim**-0.5,
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
    )


class SizedWeights(Protocol):
    """A model's weights on the device, for what concerns its memory."""

    @property
    def num_multiplied(self) -> int:
        """Elements of the matrices that tokens are multiplied with."""

    def tensors(self) -> Iterator[Any]:
        """Every tensor once, which knows its `nbytes`."""
        ...


class Weights(SizedWeights, Protocol):
    """Those that torch computes with."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor once."""
        ...

    def prepare(self, most_rows: int) -> None:
        """On a CPU, run the products of up to so many rows with the present number of threads."""


class SizedModel(Protocol):
    """A loaded model, or one rank's part of it, for what concerns its memory."""

    device: torch.device
    dtype: torch.dtype
    max_positions: int
    most_layers: int
    """Of any stage."""
    windows: tuple[int | None, ...]
    """[num_layers] tokens that a token sees in each layer of this rank's part, itself included; None: all."""

    @property
    def config(self) -> Config:
        """Of this rank's part."""

    @property
    def weights(self) -> SizedWeights:
        """Of this rank's part."""


class Model(SizedModel, Protocol):
    """One that torch computes with. Never waits for the device."""

    vocabulary: range
    """The tokens whose logits it computes."""
    collectives: Collectives | None
    """Of the ranks with other parts of the same layers."""
    links: Links | None
    """To the ranks with other layers."""
    captures: bool
    """Whether `forward` with `captured` can be captured in a CUDA graph."""

    @property
    def weights(self) -> Weights:
        """Of this rank's part."""

    def attention_shape(self, page_size: int, kv_dtype: torch.dtype | None = None) -> AttentionShape:
        """The attention backend's parameters. kv_dtype: the cache's, if not the weights'."""
        ...

    def forward(
        self, tokens: Tokens, kv: KVCache, attention: AttentionBackend, *, captured: bool = False
    ) -> torch.Tensor:
        """Hidden states of the wanted tokens after the last norm, [N, hidden] in the weights' dtype. attention: planned
        for this step. captured: for a CUDA graph."""
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [n, len(vocabulary)] of hidden states [n, hidden], in `out` if given."""
        ...

    def whole_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab] of hidden states [n, hidden]."""
        ...

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab] of `logits` [n, len(vocabulary)], from all ranks."""
        ...

    def warm_up_gemms(self, most_rows: int, most_tokens: int) -> None:
        """Load the kernels of products with up to most_tokens tokens, and of logits with up to most_rows."""


@runtime_checkable
class RecurrentModel(Model, Protocol):
    """A model with recurrent layers, whose sequences have states besides keys and values."""

    state_bytes: int
    """Of one sequence's states, in the stage with the most."""

    def new_states(self, num_slots: int) -> StateCache:
        """So many empty states."""
        ...
