"""Where packed token masks live on the device: uploaded once and found again by the host array they came from, or
worked out there.

Grammars hand out the same read-only array wherever the same mask holds, so a row that has been used before costs a
dictionary look-up and four bytes a step. Called by the sampler; knows no grammar.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from sgl.grammar.closure import Standing
from sgl.runtime.batch import Int32Array, TokenMask
from sgl.runtime.runner.device_masks import DeviceMasks
from sgl.runtime.runner.pack import Uploader


class MaskTable:
    """`rows` int32 [num_rows, ceil(vocab_size / 32)] on the device, for `kernels.mask.apply_token_mask_`.

    The least recently used masks make room for new ones. Uploads are in stream order: a step that was launched
    before still reads what it was launched with.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        walker: DeviceMasks | None = None,
        num_walked: int = 0,
    ) -> None:
        """num_rows: at least the most masks that one step needs. walker works out masks of places, at most num_walked
        a step."""
        self.rows = torch.zeros(num_rows + num_walked, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self._num_kept = num_rows
        self._walker = walker
        self._uploader = Uploader(device)
        self._places: OrderedDict[int, int] = OrderedDict()  # id of the array → row, least recently used first
        self._arrays: dict[int, Int32Array] = {}  # keeps every id in use

    def find(self, masks: Sequence[TokenMask | None]) -> Int32Array:
        """The row of each mask, uploading or working out those that are not there; -1 for None and for the one token
        that follows. int32 [len(masks)].

        Arrays must never change once they were handed in. Does not wait for the device.
        """
        found = np.full(len(masks), -1, np.int32)
        missing: dict[int, Int32Array] = {}
        for mask in masks:
            if isinstance(mask, np.ndarray):
                if id(mask) in self._places:
                    self._places.move_to_end(id(mask))
                else:
                    missing[id(mask)] = mask
        if missing:
            self._upload(list(missing.values()))
        for i, mask in enumerate(masks):
            if isinstance(mask, np.ndarray):
                found[i] = self._places[id(mask)]
        standing = [i for i, mask in enumerate(masks) if isinstance(mask, Standing)]
        if standing:
            assert self._walker is not None, "places are handed in where they can be walked"
            places = [mask for mask in masks if isinstance(mask, Standing)]
            found[standing] = self._num_kept + self._walker.walk(places, self.rows[self._num_kept :])
        return found

    def _upload(self, masks: list[Int32Array]) -> None:
        """Put in new masks; those of the same step are the most recently used, so none of them gives way."""
        places = np.empty(len(masks), np.int64)
        for i, mask in enumerate(masks):
            place = len(self._places)
            if place == self._num_kept:
                oldest, place = self._places.popitem(last=False)
                del self._arrays[oldest]
            self._places[id(mask)] = places[i] = place
            self._arrays[id(mask)] = mask
        index, rows = self._uploader.upload(places, np.stack(masks))
        self.rows.index_copy_(0, index, rows)
