"""What may watch a runner's steps on the device: a drafter that computes from the model's hidden states or beside
its KV pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sgl.runtime.batch import Batch, Int32Array
from sgl.runtime.model.aux_hidden_states import AuxHiddenStates
from sgl.runtime.runner.ahead import Ahead, VerifyInputs
from sgl.runtime.runner.verify_graphs import Verified


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """A step of T tokens whose forward pass was launched. Tensors are valid until the next step is launched, in
    stream order: work on them must be launched on the current stream before `observe` returns."""

    batch: Batch
    pages: Int32Array  # [B, n] the batch's rows of the page table, on the host
    slots: torch.Tensor  # int64 [T] page * page_size + offset, where each token's keys and values went
    hidden: tuple[torch.Tensor, ...]  # by `layers`: [T, hidden_size] in the model's dtype
    inputs: VerifyInputs | None = None  # of a replayed step that verifies drafts


class Observer(Protocol):
    """Sees the steps of one runner that are marked so (`Batch.is_observed`), prompts and padding aside, in launch
    order. Rank 0 alone has one: hidden states behind a layer are whole on each tensor-parallel rank."""

    layers: tuple[int, ...]
    """The target's layers behind which hidden states (with the residual) are wanted, ascending; they are kept for
    every token of such a step. Empty: none."""

    def observe(self, step: ObservedStep) -> None:
        """A step was launched. Must not wait for the device."""
        return

    def sampled(self, ids: torch.Tensor) -> None:
        """The latest step that was seen has sampled these, int64 [S]; they stay as they are."""
        return

    def place(self, inputs: VerifyInputs) -> Ahead:
        """Before a batch is replayed that `is_ahead`: put what it computes where the drafts before end."""
        raise AssertionError("nobody asked for such a batch")

    def close(self) -> None:
        """Give the device's memory back after the last step. Idempotent."""


def observed(
    batch: Batch,
    pages: Int32Array,
    slots: torch.Tensor,
    aux: AuxHiddenStates | None,
    verified: Verified | None = None,
) -> ObservedStep:
    """A step as observers see it. slots: perhaps padded behind the step's. aux: what kept its hidden states."""
    hidden: tuple[torch.Tensor, ...] = ()
    if verified is None:
        num_tokens = int(batch.q_lens.sum())
        hidden = hidden if aux is None else aux.hidden(num_tokens)
        return ObservedStep(batch, pages, slots[:num_tokens], hidden)
    places = verified.places
    if aux is not None:
        hidden = tuple(each.index_select(0, places) for each in aux.hidden(len(slots)))
    return ObservedStep(batch, pages, slots.index_select(0, places), hidden, verified.moved)
