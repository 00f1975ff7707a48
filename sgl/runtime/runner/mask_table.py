"""A cache of packed token masks on the device, by host array or place.

Grammars return the same array for the same mask, and requests revisit places: a hit costs a look-up and four bytes
a step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sgl.grammar.automaton.finished import Configuration
from sgl.kernels.staging import Uploader
from sgl.runtime.batch import Int32Array, Int64Array, TokenMask
from sgl.runtime.runner.device_masks import DeviceMasks


class MaskRows(NamedTuple):
    """Where the masks of a step lie in a table."""

    found: Int32Array  # [N] the row of each; -1 for None and for single tokens
    arrays: list[Int32Array]  # that are not there yet,
    array_rows: Int64Array  # and their rows
    places: list[Configuration]
    place_rows: Int64Array


class KnownMasks:
    """Which masks lie in a table of num_rows rows, with LRU eviction. Knows nothing of the device."""

    def __init__(self, num_rows: int) -> None:
        """num_rows: at least the masks of one step."""
        self._num_rows = num_rows
        self._known: OrderedDict[int | Configuration, tuple[int, Int32Array | None]] = OrderedDict()
        """By place or array id, least recently used first: the row, and the array, which keeps its id in use."""

    def find(self, masks: Sequence[TokenMask | None]) -> MaskRows:
        """The rows of a step's masks, with room for new ones. Arrays must never change."""
        found = np.full(len(masks), -1, np.int32)
        arrays: dict[int | Configuration, Int32Array] = {}
        places: dict[Configuration, None] = {}
        new: list[tuple[int, int | Configuration]] = []
        for i, mask in enumerate(masks):
            key: int | Configuration
            if isinstance(mask, Configuration):
                key = mask
            elif isinstance(mask, np.ndarray):
                key = id(mask)
            else:
                continue
            try:
                self._known.move_to_end(key)
            except KeyError:
                new.append((i, key))
                if isinstance(mask, Configuration):
                    places[mask] = None
                else:
                    arrays[key] = mask
            else:
                found[i] = self._known[key][0]
        array_rows, place_rows = self._room_for(arrays), self._room_for(places)
        for i, key in new:
            found[i] = self._known[key][0]
        return MaskRows(found, list(arrays.values()), array_rows, list(places), place_rows)

    def _room_for(self, masks: Mapping[Any, Int32Array | None]) -> Int64Array:
        """Rows for new masks; never evicts one of this step, since these are the most recently used."""
        rows = []
        num_known, num_rows = len(self._known), self._num_rows
        for key, array in masks.items():
            row = num_known
            if row == num_rows:
                row = self._known.popitem(last=False)[1][0]
            else:
                num_known += 1
            self._known[key] = row, array
            rows.append(row)
        return np.array(rows, np.int64)


class MaskTable:
    """`rows` int32 [num_rows, ceil(vocab_size / 32)] on the device, for `kernels.mask.apply_token_mask_`.

    Masks are replaced in stream order: earlier launches still read their own.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, walker: DeviceMasks | None = None
    ) -> None:
        """num_rows: at least the masks of one step. walker: computes masks of places."""
        self.rows = torch.zeros(num_rows, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self._walker = walker
        self._uploader = Uploader(device)
        self._known = KnownMasks(num_rows)

    def ensure_rows(self, masks: Sequence[TokenMask | None]) -> Int32Array:
        """The row of each mask, uploaded or computed as needed, int32 [len(masks)]; -1 for None and for single
        tokens. Arrays must never change. Does not wait for the device."""
        its = self._known.find(masks)
        if its.arrays:
            index, rows = self._uploader.upload(its.array_rows, np.stack(its.arrays))
            self.rows.index_copy_(0, index, rows)
        if its.places:
            assert self._walker is not None, "places are handed in where they can be walked"
            self._walker.walk(its.places, self.rows, its.place_rows.astype(np.int32))
        return its.found
