"""The next drafts and the step that verifies them, launched while the drafts before them are being verified.

The host makes their inputs as if all of those stood; the device moves them to where they did.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from sgl.kernels.staging import Uploader
from sgl.runtime.batch import Int64Array


class Verifying(NamedTuple):
    """A launched step that verifies drafts, of which the host knows nothing yet."""

    sampled: torch.Tensor  # int64 [S] what it samples after each of its tokens
    computed: torch.Tensor  # int64, `queries` of each row: its last token and its drafts
    queries: int
    num_drafts: Int64Array  # [R], on the host


class VerifyInputs(NamedTuple):
    """Of a step that verifies drafts, on the device, `queries` of each row."""

    rows: torch.Tensor  # int64, as are
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    firsts: torch.Tensor  # int32 [rows] each row's first position
    queries: int


class Ahead(NamedTuple):
    """A step's tokens, on the device alone, int64 [S]."""

    rows: torch.Tensor
    positions: torch.Tensor  # of what is sampled after them
    tokens: torch.Tensor  # of each row the last one known, and the drafts


class PassInputs(NamedTuple):
    """Of passes that draft: see `kernels.ahead_triton.accept`."""

    first: tuple[torch.Tensor, int, torch.Tensor]
    later: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Shift:
    """What the device knows of some rows before the host does."""

    def __init__(self, max_rows: int, max_tokens: int, device: torch.device) -> None:
        """max_tokens: of a row."""
        self._stood, *self._compact = (
            torch.zeros(size, dtype=torch.int64, device=device) for size in (max_rows, *[max_rows * max_tokens] * 3)
        )
        self._known = self._stood
        self._ahead: Ahead | None = None

    def accept(
        self,
        behind: Verifying,
        wanted: Int64Array,
        simulated: Int64Array,
        slots: Int64Array,
        inputs: PassInputs,
        uploader: Uploader,
    ) -> None:
        """See how many drafts stand, and move the inputs of the passes that draft behind them. Of R rows: wanted:
        drafts of the next step. simulated: drafts that stand, whatever was sampled; -1: those that equal it. slots: [R,
        n] from the place of the first draft on, as many as both steps' drafts."""
        # imported only where a Triton kernel runs
        from sgl.kernels import ahead_triton

        starts = [np.cumsum(its + 1) - its - 1 for its in (behind.num_drafts, wanted)]
        known = np.column_stack((starts[0], behind.num_drafts, starts[1], wanted, simulated, slots))
        (self._known,) = uploader.upload(known)
        self._ahead = Ahead(*(its[: wanted.sum() + len(wanted)] for its in self._compact))
        ahead_triton.accept(*behind[:3], self._known, self._stood, self._ahead.tokens, *inputs)

    def warm_up(self, inputs: PassInputs, uploader: Uploader) -> None:
        """Compile what it launches, on the inputs of a graph of one token, which mean nothing then."""
        nothing, none = self._compact[0][:1], np.zeros(1, np.int64)
        behind = Verifying(nothing, self._compact[1], 2, none)
        self.accept(behind, none, none, np.zeros((1, 1), np.int64), inputs, uploader)
        firsts = nothing.to(torch.int32)
        self.place(nothing.view(1, 1), VerifyInputs(nothing, nothing, nothing, nothing, firsts, 1))

    def place(self, drafts: torch.Tensor, inputs: VerifyInputs) -> Ahead:
        """Move the inputs of the step that verifies these, int64 [passes, R or more]."""
        # imported only where a Triton kernel runs
        from sgl.kernels import ahead_triton

        ahead = self._ahead
        assert ahead is not None, "what stands before is known"
        sampling = ahead.rows, ahead.positions
        ahead_triton.place(drafts, self._known, self._stood, ahead.tokens, inputs[:5], inputs.queries, sampling)
        return ahead
