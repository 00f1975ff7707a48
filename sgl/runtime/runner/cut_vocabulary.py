"""Sampling where each rank has the logits of a part of the vocabulary, and rank 0 alone knows the grammars.

Each rank draws among its tokens, and the largest of all ranks' keys decides: eight bytes a row. Rows that need all
logits (top-k, top-p, min-p, logprobs) gather them; rank 0 decides those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl.kernels.collectives import Collectives
from sgl.kernels.sampling import ops as sampling
from sgl.kernels.staging import Uploader
from sgl.runtime.batch import BROADCAST, Int32Array, TokenMask, TokenMasks
from sgl.runtime.runner.mask_table import MaskTable

_NOTHING = torch.iinfo(torch.int64).min  # below every key


def outline(masks: TokenMasks) -> list[int | None]:
    """What other ranks need of a step's masks, beside what is broadcast."""
    return [mask if mask is None or isinstance(mask, int) else BROADCAST for mask in masks]


@dataclass(frozen=True, slots=True)
class CutVocabulary:
    """This rank's part."""

    own: range
    """Its token ids; the first is a multiple of 32."""
    vocab_size: int
    whole: Callable[[torch.Tensor], torch.Tensor]
    """All ranks' logits [n, vocab_size] of this one's, [n, len(own)]."""
    collectives: Collectives
    uploader: Uploader

    @property
    def decides(self) -> bool:
        """Whether this is rank 0."""
        return not self.collectives.rank

    def masks(
        self, token_masks: Sequence[TokenMask | None], table: MaskTable | None, device: torch.device
    ) -> tuple[torch.Tensor, Int32Array]:
        """Packed masks of its tokens, int32 [M, words], and the row of each position, -1 for none. table: rank 0's."""
        masked = np.array([mask == BROADCAST for mask in outline(token_masks)], np.bool_)
        rows = np.full(len(token_masks), -1, np.int32)
        rows[masked] = np.arange(masked.sum(), dtype=np.int32)
        if table is None:
            packed = torch.empty(int(masked.sum()), -(-self.vocab_size // 32), dtype=torch.int32, device=device)
        else:
            (found,) = self.uploader.upload(table.ensure_rows(token_masks)[masked].astype(np.int64))
            packed = table.rows.index_select(0, found)
        if len(packed):
            self.collectives.broadcast_(packed)
        return packed[:, self.own.start // 32 : -(-self.own.stop // 32)].contiguous(), rows

    def decided(
        self, keys: torch.Tensor, whole_rows: torch.Tensor | None, ids: torch.Tensor | None
    ) -> torch.Tensor:
        """The tokens, int64 [S], of all ranks' keys; those of whole_rows, int64 [W], are rank 0's ids, int64 [W]."""
        if whole_rows is not None and ids is not None:
            given = sampling.chosen_keys(ids) if self.decides else torch.full_like(ids, _NOTHING)
            keys.index_copy_(0, whole_rows, given)
        return sampling.drawn_ids(self.collectives.largest_(keys))
