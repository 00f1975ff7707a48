"""What may watch a runner's steps on the device: a drafter that computes from the model's hidden states or beside
its KV pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl.runtime.batch import Batch, Int32Array
from sgl.runtime.model.aux_hidden_states import AuxHiddenStates


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """A step of T tokens whose forward pass was launched. Tensors are valid until the next step is launched, in
    stream order: work on them must be launched on the current stream before `observe` returns."""

    batch: Batch
    pages: Int32Array  # [B, n] the batch's rows of the page table, on the host
    token_ids: torch.Tensor  # int64 [T], those from the device filled in
    positions: torch.Tensor  # int64 [T] as the layers see them
    slots: torch.Tensor  # int64 [T] page * page_size + offset, where each token's keys and values went
    hidden: tuple[torch.Tensor, ...]  # by `layers`: [T, hidden_size] in the model's dtype


class Observer(Protocol):
    """Sees every step of one runner, prompts and padding aside, in launch order. Rank 0 alone has one: hidden states
    behind a layer are whole on each tensor-parallel rank."""

    layers: tuple[int, ...]
    """The target's layers behind which hidden states (with the residual) are wanted, ascending; they are kept for
    every token of a step, also of replayed graphs. Empty: none, and `hidden` is empty."""

    def observe(self, step: ObservedStep) -> None:
        """A step was launched. Must not wait for the device."""

    def loaded(self, pages: Int32Array) -> None:
        """The model's part of these pages, [n], comes from host memory; nothing else of their tokens does."""

    def close(self) -> None:
        """Give the device's memory back after the last step. Idempotent."""


def observed(
    batch: Batch,
    pages: Int32Array,
    inputs: Sequence[torch.Tensor],
    aux: AuxHiddenStates | None,
    places: torch.Tensor | None,
) -> ObservedStep:
    """A step as observers see it. inputs: token ids, positions and slots, perhaps padded behind the step's, or with its
    tokens at `places`, int64 [T]. aux: what kept its hidden states."""
    num_tokens = int(batch.q_lens.sum())
    hidden = () if aux is None else aux.hidden(num_tokens if places is None else len(inputs[0]))
    if places is None:
        token_ids, positions, slots = (each[:num_tokens] for each in inputs)
    else:
        token_ids, positions, slots = (each.index_select(0, places) for each in inputs)
        hidden = tuple(each.index_select(0, places) for each in hidden)
    return ObservedStep(batch, pages, token_ids, positions, slots, hidden)
