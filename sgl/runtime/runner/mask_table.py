"""Where packed token masks live on the device: uploaded or worked out there once, and found again by the host array
they came from or by the place they are for.

Grammars hand out the same read-only array wherever the same mask holds, and requests stand in the same places again and
again, so a row that has been used before costs a dictionary look-up and four bytes a step. Called by the sampler; knows
no grammar.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sgl.grammar.automaton.finished import Standing
from sgl.runtime.batch import Int32Array, Int64Array, TokenMask
from sgl.runtime.runner.device_masks import DeviceMasks
from sgl.runtime.runner.pack import Uploader


class MaskTable:
    """`rows` int32 [num_rows, ceil(vocab_size / 32)] on the device, for `kernels.mask.apply_token_mask_`.

    The least recently used masks make room for new ones. All in stream order: a step that was launched before still
    reads what it was launched with.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, walker: DeviceMasks | None = None
    ) -> None:
        """num_rows: at least the most masks that one step needs. walker works out masks of places."""
        self.rows = torch.zeros(num_rows, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self._walker = walker
        self._uploader = Uploader(device)
        self._known: OrderedDict[int | Standing, tuple[int, Int32Array | None]] = OrderedDict()
        """By place or the array's id, the row and that array, which keeps the id in use; least recently used first."""

    def find(self, masks: Sequence[TokenMask | None]) -> Int32Array:
        """The row of each mask, uploading or working out those that are not there; -1 for None and for the one token
        that follows. int32 [len(masks)].

        Arrays must never change once they were handed in. Does not wait for the device.
        """
        found = np.full(len(masks), -1, np.int32)
        arrays: dict[int | Standing, Int32Array] = {}
        places: dict[Standing, None] = {}
        new: list[tuple[int, int | Standing]] = []
        for i, mask in enumerate(masks):
            key: int | Standing
            if isinstance(mask, Standing):
                key = mask
            elif isinstance(mask, np.ndarray):
                key = id(mask)
            else:
                continue
            try:
                self._known.move_to_end(key)
            except KeyError:
                new.append((i, key))
                if isinstance(mask, Standing):
                    places[mask] = None
                else:
                    arrays[key] = mask
            else:
                found[i] = self._known[key][0]
        if arrays:
            index, rows = self._uploader.upload(self._room_for(arrays), np.stack(list(arrays.values())))
            self.rows.index_copy_(0, index, rows)
        if places:
            assert self._walker is not None, "places are handed in where they can be walked"
            self._walker.walk(places, self.rows, self._room_for(places).astype(np.int32))
        for i, key in new:
            found[i] = self._known[key][0]
        return found

    def _room_for(self, masks: Mapping[Any, Int32Array | None]) -> Int64Array:
        """Rows for new masks; those of the same step are the most recently used, so none of them gives way."""
        rows = []
        num_known, num_rows = len(self._known), len(self.rows)
        for key, array in masks.items():
            row = num_known
            if row == num_rows:
                row = self._known.popitem(last=False)[1][0]
            else:
                num_known += 1
            self._known[key] = row, array
            rows.append(row)
        return np.array(rows, np.int64)
