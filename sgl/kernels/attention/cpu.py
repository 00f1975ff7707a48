"""Paged attention on a CPU in float32, by cpu.c. Keys and values are read in place, shared ones once for all rows."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from sgl.kernels import cpu
from sgl.kernels.attention.base import AttentionBackend, AttentionShape, AttentionStep
from sgl.kernels.attention.prefixes import SharedPrefix, shared_prefixes

_MOST_SHARING = 8  # rows with more query tokens keep the tiles busy by themselves
_LEAST_SAVED = 256  # keys
_FEW = 1 << 18  # multiplications that are not worth a second thread

_Int32Array = npt.NDArray[np.int32]


_ARRAYS = "pages starts q_lens kv_lens shared_keys groups members blocks max_scores weight_sums"
_NUMBERS = "table_width num_groups num_blocks num_heads num_kv_heads head_dim page_size is_small"


class _Step(ctypes.Structure):
    """`Step` of cpu.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _ARRAYS.split()),
        *((name, ctypes.c_int64) for name in _NUMBERS.split()),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class _Layout:
    """The part of a plan that stays while each row advances by its query tokens. `step` is the planned one."""

    def __init__(
        self, shape: AttentionShape, q_lens: _Int32Array, kv_lens: _Int32Array, pages: _Int32Array, *, shares: bool
    ) -> None:
        prefixes: list[SharedPrefix] = []
        if shares:
            prefixes = shared_prefixes(
                q_lens, kv_lens, pages, shape.page_size, min_saved_keys=_LEAST_SAVED, max_q=_MOST_SHARING
            )
        shared_keys = np.zeros_like(q_lens)
        for prefix in prefixes:
            shared_keys[prefix.rows] = len(prefix.pages) * shape.page_size // cpu.TILE * cpu.TILE
        groups = np.cumsum([0, *(len(prefix.rows) for prefix in prefixes)], dtype=np.int32)
        members = np.concatenate([np.empty(0, np.int32), *(prefix.rows for prefix in prefixes)], dtype=np.int32)
        counts = -(-q_lens * (shape.num_heads // shape.num_kv_heads) // cpu.MAX_QUERIES)
        rows = np.repeat(np.arange(len(q_lens)), counts)
        firsts = (np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]) * cpu.MAX_QUERIES
        blocks = np.stack((rows, firsts), axis=1, dtype=np.int32)
        starts = np.cumsum(q_lens, dtype=np.int32) - q_lens
        self._shared_pages = pages[:, : max(1, -(-int(shared_keys.max()) // shape.page_size))].copy()
        self._q_lens, self._kv_lens = q_lens, kv_lens.copy()
        self._workspace = torch.empty(
            2, int(q_lens.sum()), shape.num_heads, dtype=torch.float32, device=shape.device
        )
        # the structure holds only addresses
        self._held = starts, shared_keys, groups, members, blocks
        self.step = _Step(
            None,
            *(array.ctypes.data for array in (starts, self._q_lens, self._kv_lens, shared_keys)),
            *(array.ctypes.data for array in (groups, members, blocks)),
            *(half.data_ptr() for half in self._workspace),
            0,
            len(prefixes),
            len(blocks),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            True,
            shape.scale,
            shape.softcap or 0.0,
        )
        self._take(kv_lens, pages)

    def goes_on(self, q_lens: _Int32Array, kv_lens: _Int32Array, pages: _Int32Array) -> bool:
        """Whether this step has the same layout; if so, plan it."""
        if not (
            np.array_equal(q_lens, self._q_lens)
            and np.array_equal(kv_lens, self._kv_lens + q_lens)
            and np.array_equal(pages[:, : self._shared_pages.shape[1]], self._shared_pages)
        ):
            return False
        self._take(kv_lens, pages)
        return True

    def _take(self, kv_lens: _Int32Array, pages: _Int32Array) -> None:
        self._kv_lens[:], self._pages = kv_lens, pages
        step = self.step
        step.pages, step.table_width = pages.ctypes.data, pages.shape[1]
        pairs = self._workspace[0].numel() * int(kv_lens.max())
        step.is_small = pairs * step.head_dim < _FEW


def why_not(shape: AttentionShape) -> str | None:
    """Why these kernels cannot serve the model here; None: they can."""
    if shape.device.type != "cpu":
        return f"it is for CPUs, and this is {shape.device}"
    if {shape.dtype, shape.cache_dtype} != {torch.float32}:
        return f"it computes in float32, and this is {str(shape.dtype).removeprefix('torch.')}"
    if shape.latent_dim:
        return "it reads values apart from keys, and this model's are a part of them"
    size, most = shape.head_dim, cpu.MAX_HEAD_DIM
    if size % 8 or size > most:
        return f"its heads have a multiple of 8 and at most {most} numbers, and these have {size}"
    return cpu.why_not()


class CpuAttention(AttentionBackend):
    """The `AttentionBackend` for CPUs, if `why_not` returns None."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._attend = cpu.library().sgl_attend
        self._layouts: dict[bool, _Layout] = {}  # by whether keys are shared
        self._addresses: dict[int | None, int] = {}  # of the planned step, by window

    def plan(self, step: AttentionStep) -> None:
        # copies: the step's arrays are the caller's
        q_lens, kv_lens, pages = (
            np.array(array, np.int32, order="C") for array in (step.q_lens, step.kv_lens, step.page_table)
        )
        longest = int(kv_lens.max())
        # no window may hide a shared key
        shares = {window: window is None or window >= longest for window in self._shape.windows}
        for each in set(shares.values()):
            if each not in self._layouts or not self._layouts[each].goes_on(q_lens, kv_lens, pages):
                self._layouts[each] = _Layout(self._shape, q_lens, kv_lens, pages, shares=each)
        self._addresses = {window: ctypes.addressof(self._layouts[each].step) for window, each in shares.items()}

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        window: int | None = None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = query.contiguous()
        if sinks is not None:
            sinks = sinks.float().contiguous()
        out = torch.empty_like(query)
        self._attend(
            self._addresses[window],
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            out.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            window or 0,
        )
        return out
