"""Which tokens of a step use which adapter, and which of its matrices, as kernels and the host read it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]

NO_ADAPTER = -1
SMALL, LARGE = 16, 64  # rows of a tile: a tensor core's least, and what many tokens of one adapter deserve
_MANY = 1024  # tokens
_FEW_OF_EXPERT = 32  # pairs with an expert, on average


@dataclass(frozen=True)
class AdapterRows:
    """T tokens, those of one adapter side by side, cut into tiles."""

    order: torch.Tensor  # int32 [T] token indices
    tiles: torch.Tensor  # int32 [n, 3] slot or NO_ADAPTER, first place in `order`, number of tokens; 0: unused
    block: int  # tokens of a tile at most
    slots: torch.Tensor | None = (
        None  # int32 [T], each token's slot or NO_ADAPTER; None: `of_experts` is not asked for
    )

    @cached_property
    def groups(self) -> list[tuple[int, torch.Tensor | slice, slice]]:
        """Each tile's slot, its tokens, int64, and their places, of those with adapter. Waits for the device."""
        order, tiles = self.order.long(), self.tiles.tolist()
        if len(tiles) == 1 and tiles[0][0] != NO_ADAPTER:
            return [(tiles[0][0], slice(None), slice(None))]
        return [
            (slot, order[first : first + count], slice(first, first + count))
            for slot, first, count in tiles
            if slot != NO_ADAPTER and count
        ]

    def of_experts(
        self, ids: torch.Tensor, num_slots: int, num_experts: int, block: int | None = None
    ) -> AdapterRows:
        """Pairs of these tokens and experts ids [T, k], pair slot * T + token, with adapter. The slots of their tiles
        are slot * num_experts + expert. block: pairs of a tile at most, if not as many as suit the
        device. There are at least two tiles. Never waits for the device."""
        assert self.slots is not None, "they were given"
        num_groups, num_pairs = num_slots * num_experts, ids.numel()
        if block is None and ids.is_cuda:
            block = SMALL if num_pairs <= _FEW_OF_EXPERT * num_experts else LARGE
        block = block or num_pairs
        group = (self.slots * num_experts + ids.T).where(self.slots != NO_ADAPTER, num_groups).flatten()
        group, order = group.sort(stable=True)
        # shapes follow from T alone: bounds by search, and as many tiles as there may be
        bounds = torch.searchsorted(group, torch.arange(num_groups + 1, dtype=group.dtype, device=ids.device))
        firsts, counts = bounds[:-1], bounds.diff()
        ends = ((counts + block - 1) // block).cumsum(0)
        tile = torch.arange(min(num_pairs, num_groups) + num_pairs // block, device=ids.device)
        its = torch.searchsorted(ends, tile, right=True)
        is_used, its = its < num_groups, its.clamp(max=num_groups - 1)
        first = torch.where(its > 0, ends[its - 1], 0).sub(tile).mul(-block)  # of the group's pairs
        sizes = (counts[its] - first).clamp(max=block).where(is_used, 0)
        tiles = torch.stack((its, firsts[its] + first, sizes), 1)
        return AdapterRows(order.int(), tiles.int(), block)


def block_of(num_tokens: int) -> int:
    """Tokens of a tile at most, on a GPU."""
    return SMALL if num_tokens < _MANY else LARGE


def most_tiles(num_tokens: int, num_slots: int, block: int) -> int:
    """That so many tokens can make."""
    return min(num_tokens, num_slots + 1) + num_tokens // block


def tiled(slots: Int32Array, block: int | None, num_tiles: int | None = None) -> tuple[Int32Array, Int32Array]:
    """`order` and `tiles` of tokens with these slots, int32 [T]. block: None: as many as there are. num_tiles: to pad
    to."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    found, counts = np.unique(slots, return_counts=True)
    firsts = np.cumsum(counts) - counts
    size = block or max(1, len(slots))
    numbers = -(-counts // size)
    of_group = np.repeat(np.arange(len(found)), numbers)
    place = np.arange(len(of_group)) - np.repeat(np.cumsum(numbers) - numbers, numbers)  # of a tile in its group
    tiles = np.zeros((len(of_group) if num_tiles is None else num_tiles, 3), np.int32)
    used = tiles[: len(of_group)]
    used[:, 0] = found[of_group]
    used[:, 1] = firsts[of_group] + place * size
    used[:, 2] = np.minimum(size, counts[of_group] - place * size)
    return order, tiles
