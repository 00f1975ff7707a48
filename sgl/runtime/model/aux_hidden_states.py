"""Hidden states of some layers, kept for what drafts from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class AuxHiddenStates:
    """The latest step's hidden states behind some layers, with the residual. They lie at fixed addresses, so that steps
    replayed from CUDA graphs write there, too."""

    def __init__(
        self, layers: tuple[int, ...], most_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """layers: numbers of layers; -1: the embeddings; never the last one, which computes only the tokens to sample
        after. most_tokens: of a step that is replayed, with its padding."""
        self.layers = layers
        self.is_on = False
        """Whether steps that are launched, or captured, keep theirs."""
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._kept = torch.zeros(len(layers), most_tokens, hidden_size, dtype=dtype, device=device)
        self._large = list(self._kept.unbind())  # of a step of more tokens

    @property
    def num_bytes(self) -> int:
        """That it takes on the device."""
        return self._kept.nbytes

    def keep(self, layer: int, residual: torch.Tensor) -> None:
        """Copy what came out of a layer, [T, hidden_size], if it is one of them."""
        place = self._places.get(layer) if self.is_on else None
        if place is None:
            return
        if len(residual) <= self._kept.shape[1]:
            self._kept[place, : len(residual)].copy_(residual)
        else:
            self._large[place] = residual.clone()

    def hidden(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """[num_tokens, hidden_size] of each layer for the first tokens of the latest step, until the next one."""
        if num_tokens <= self._kept.shape[1]:
            return self._kept[:, :num_tokens].unbind()
        return tuple(self._large)


@contextmanager
def keeping(model: object, *, is_on: bool = True) -> Iterator[None]:
    """Meanwhile a model keeps the hidden states that are wanted of it, if any, or none."""
    aux: AuxHiddenStates | None = getattr(model, "aux_hidden_states", None)
    if aux is None:
        yield
        return
    before, aux.is_on = aux.is_on, is_on
    try:
        yield
    finally:
        aux.is_on = before
