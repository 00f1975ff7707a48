"""The next drafts and the step that verifies them, launched while the drafts before them are being verified.

The host makes their inputs as if all of those stood; the device moves them to where they did.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Verifying(NamedTuple):
    """A launched step of rows of as many drafts each, of which the host knows nothing yet."""

    sampled: torch.Tensor  # int64 [R, k + 1]
    computed: torch.Tensor  # int64, `queries` of each row: its last token and k drafts
    queries: int


class VerifyInputs(NamedTuple):
    """Of a step that verifies drafts, on the device, `queries` of each row."""

    rows: torch.Tensor  # int64, as are
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    firsts: torch.Tensor  # int32 [rows] each row's first position
    queries: int


class Ahead(NamedTuple):
    """A step's sampled positions, on the device alone, [R, k + 1]."""

    rows: torch.Tensor  # int64 [R * (k + 1)]
    positions: torch.Tensor  # likewise, of the tokens to sample
    tokens: torch.Tensor  # int64 [R, k + 1] that it computes: the last one known, and the drafts


class PassInputs(NamedTuple):
    """Of a head's passes: see `kernels.ahead_triton.accept`."""

    first: tuple[torch.Tensor, int, torch.Tensor]
    later: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Shift:
    """What the device knows of some rows before the host does."""

    def __init__(self, max_rows: int, max_tokens: int, device: torch.device) -> None:
        """max_tokens: of a row."""
        self._stood, *self._compact = (
            torch.zeros(size, dtype=torch.int64, device=device) for size in (max_rows, *[max_rows * max_tokens] * 3)
        )
        self._window = self._stood
        self._ahead: Ahead | None = None

    def accept(self, behind: Verifying, window: torch.Tensor, simulated: int, inputs: PassInputs) -> None:
        """See how many drafts stand, and move the inputs of the passes that draft behind them. window: int64 [R, n]
        slots from the place of the first draft on, 2 * k or more. simulated: see `kernels.ahead_triton.accept`."""
        # imported only where a Triton kernel runs
        from sgl.kernels import ahead_triton

        num_rows, num_tokens = behind.sampled.shape
        rows, positions, tokens = (its[: num_rows * num_tokens] for its in self._compact)
        self._window, self._ahead = window, Ahead(rows, positions, tokens.view(num_rows, num_tokens))
        ahead_triton.accept(*behind, window, simulated, self._stood, self._ahead.tokens, *inputs)

    def place(self, drafts: torch.Tensor, inputs: VerifyInputs) -> Ahead:
        """Move the inputs of the step that verifies these, int64 [passes, R or more]."""
        # imported only where a Triton kernel runs
        from sgl.kernels import ahead_triton

        ahead = self._ahead
        assert ahead is not None, "what stands before is known"
        sampling = ahead.rows, ahead.positions
        ahead_triton.place(drafts, self._window, self._stood, ahead.tokens, inputs[:5], inputs.queries, sampling)
        return ahead
