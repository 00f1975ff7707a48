"""The torch and the CPU's attention backends against attention written out row by row in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl.kernels import cpu, limits
from sgl.kernels.attention import cpu as attention_cpu
from sgl.kernels.attention import torch as attention_torch
from sgl.kernels.attention.base import AttentionBackend, AttentionShape, AttentionStep
from sgl.kernels.attention.cpu import CpuAttention
from sgl.kernels.attention.decode import DecodeAttention
from sgl.kernels.attention.pools import for_pools
from sgl.kernels.attention.prefixes import shared_prefixes
from sgl.kernels.attention.torch import TorchAttention
from sgl.runtime.runner.pack import windowed_step


class Way(NamedTuple):
    """To attend."""

    backend: Callable[[AttentionShape], AttentionBackend]
    device: str = "cpu"


TORCH, COMPILED = Way(TorchAttention), Way(CpuAttention)


def is_there(way: Way) -> Way:
    if way is COMPILED and cpu.why_not() is not None:
        pytest.skip(f"the CPU's kernels cannot be compiled: {cpu.why_not()}")
    return way


@pytest.fixture(params=[TORCH, pytest.param(Way(TorchAttention, "cuda"), marks=pytest.mark.gpu), COMPILED])
def way(request: pytest.FixtureRequest) -> Way:
    return is_there(request.param)


@pytest.mark.parametrize(
    ("kib", "is_nvidia", "heads", "head_dim", "dtype", "tiles"),
    [  # the limits of an L40, an A100, an H100 and an MI300X
        (99, True, 16, 128, torch.bfloat16, (32, 64)),
        (99, True, 16, 256, torch.bfloat16, (16, 16)),
        (99, True, 8, 256, torch.float32, None),
        (163, True, 16, 256, torch.float32, None),
        (163, True, 16, 128, torch.float32, (32, 64)),
        (227, True, 32, 256, torch.bfloat16, (16, 32)),
        (64, False, 16, 128, torch.bfloat16, (32, 64)),
        (64, False, 16, 256, torch.bfloat16, None),
        (64, False, 4, 128, torch.bfloat16, (32, 64)),
        (None, False, 32, 256, torch.float32, (16, 32)),
    ],
)
def test_rows_have_several_tokens_where_shared_memory_holds_them(
    kib: int | None,
    is_nvidia: bool,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    tiles: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With tiles for several rows and one; None: not even a tile of one row's fits beside them."""
    its = limits.Limits(None if kib is None else kib << 10, warp=32, is_nvidia=is_nvidia, overlaps=False)
    monkeypatch.setattr(limits, "of", lambda device: its)
    shape = AttentionShape(2 * heads, 2, head_dim, 16, 1.0, dtype, torch.device("cpu"))
    decodes = DecodeAttention(shape, max_queries=8)
    assert decodes.max_queries == (1 if tiles is None else 8)
    assert DecodeAttention(shape).max_queries == 1
    if tiles is not None:
        assert tuple(decodes.programs(rows, of_several=True).tile for rows in (2, 1)) == tiles


class Case:
    """A step over random pages: rows are (q_len, kv_len), and `shared` leading pages are the same for all rows."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        *,
        page_size: int = 16,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 8,
        shared: int = 0,
        in_order: bool = False,
        windows: tuple[int | None, ...] = (None,),
        softcap: float | None = None,
        has_sinks: bool = False,
        dtype: torch.dtype = torch.float32,
        way: Way = TORCH,
        device: str | None = None,
        seed: int = 0,
    ) -> None:
        device = device or way.device
        self.way = way
        rng = np.random.default_rng(seed)
        self.q_lens = np.array([q for q, _ in rows], np.int32)
        self.kv_lens = np.array([kv for _, kv in rows], np.int32)
        pages = -(-self.kv_lens // page_size)
        num_pages = int(pages.sum()) + 1
        # Past a row's last page the table may hold anything.
        self.page_table = rng.integers(-5, 10**6, (len(rows), int(pages.max()) + 1), dtype=np.int32)
        free = (np.arange(num_pages - 1) if in_order else rng.permutation(num_pages - 1)) + 1
        for row, count in enumerate(pages):
            self.page_table[row, :count], free = free[:count], free[count:]
        self.page_table[:, :shared] = self.page_table[0, :shared]
        self.shape = AttentionShape(
            *(num_heads, num_kv_heads, head_dim, page_size, head_dim**-0.5, dtype, torch.device(device), windows),
            softcap=softcap,
            has_sinks=has_sinks,
        )
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

        self.query = draw(int(self.q_lens.sum()), num_heads, head_dim)
        self.key_cache = draw(num_pages, page_size, num_kv_heads, head_dim)
        self.value_cache = draw(num_pages, page_size, num_kv_heads, head_dim)
        self.sinks = 2 * draw(num_heads) if has_sinks else None

    @property
    def step(self) -> AttentionStep:
        return AttentionStep(self.q_lens, self.kv_lens, self.page_table)

    def run(self, window: int | None = None) -> torch.Tensor:
        backend = self.way.backend(self.shape)
        backend.plan(self.step)
        return backend.run(self.query, self.key_cache, self.value_cache, window, sinks=self.sinks)

    def expected(self, window: int | None = None) -> torch.Tensor:
        """Token by token and head by head, in float64."""
        outputs, start = [], 0
        shape = self.shape
        for q_len, kv_len, pages in zip(self.q_lens, self.kv_lens, self.page_table, strict=True):
            row_pages = torch.from_numpy(pages[: -(-kv_len // shape.page_size)]).to(shape.device).long()
            keys = self.key_cache[row_pages].flatten(0, 1)[:kv_len].double()
            values = self.value_cache[row_pages].flatten(0, 1)[:kv_len].double()
            for i in range(q_len):
                last = int(kv_len - q_len + i)
                first = 0 if window is None else max(0, last - window + 1)
                for head in range(shape.num_heads):
                    kv_head = head * shape.num_kv_heads // shape.num_heads
                    query = self.query[start + i, head].double()
                    scores = keys[first : last + 1, kv_head] @ query * shape.scale
                    if shape.softcap is not None:
                        scores = shape.softcap * (scores / shape.softcap).tanh()
                    if self.sinks is not None:
                        scores = torch.cat((scores, self.sinks[head : head + 1].double()))
                    weights = scores.softmax(0)[: last + 1 - first]
                    outputs.append(weights @ values[first : last + 1, kv_head])
            start += q_len
        return torch.stack(outputs).view(*self.query.shape[:2], -1)

    def check(self, window: int | None = None) -> None:
        tolerance = 1e-5 if self.shape.dtype == torch.float32 else 2e-2
        actual = self.run(window)
        assert actual.dtype == self.shape.dtype
        assert actual.shape == self.query.shape
        torch.testing.assert_close(actual.double(), self.expected(window), atol=tolerance, rtol=tolerance)


CPU = torch.device("cpu")
DECODES = [(1, kv) for kv in (1, 5, 16, 17, 40, 33)]
MIXED = [*DECODES, (7, 30), (20, 20), (3, 64), (1, 64)]


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("rows", [[(1, 23)], [(1, 32)], DECODES, [(13, 13)], [(5, 40)], MIXED])
def test_every_mix_of_rows_attends_to_its_own_past(
    rows: list[tuple[int, int]], page_size: int, in_order: bool, way: Way
) -> None:
    Case(rows, page_size=page_size, in_order=in_order, way=way).check()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 8), (6, 2, 16), (9, 3, 24), (80, 1, 8), (1, 1, 256)]
)
def test_heads_share_the_keys_of_their_group(num_heads: int, num_kv_heads: int, head_dim: int, way: Way) -> None:
    Case(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, way=way).check()


@pytest.mark.parametrize("head_dim", [4, 12, 264])
def test_heads_of_any_size(head_dim: int, device: str) -> None:
    case = Case(MIXED, head_dim=head_dim, device=device)
    case.check()
    assert "multiple of 8 and at most 256 numbers" in str(attention_cpu.why_not(replace(case.shape, device=CPU)))


@pytest.mark.parametrize("window", [1, 5, 16, 31, 1000])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_window_hides_what_is_further_back(window: int, page_size: int, way: Way) -> None:
    Case(MIXED, page_size=page_size, windows=(None, window), way=way).check(window)


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_behind_a_window_may_be_anybodys(page_size: int, way: Way) -> None:
    """They have been given back where every layer has a window: what is there now is large."""
    window = 9
    case = Case([(1, 400), (1, 33), (3, 70), (40, 150)], page_size=page_size, windows=(window,), way=way)
    expected = case.expected(window)
    for row, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        case.page_table[row, : max(kv_len - q_len - window, 0) // page_size] = 0
    case.key_cache[0] = case.value_cache[0] = 1e4
    torch.testing.assert_close(case.run(window).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [0.3, 2.0, 50.0])
def test_scores_are_capped(softcap: float, way: Way) -> None:
    Case(MIXED, softcap=softcap, way=way).check()
    Case(MIXED, softcap=softcap, windows=(None, 5), way=way, num_heads=6, head_dim=24).check(5)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_sinks_take_their_part_of_the_weight(softcap: float | None, way: Way) -> None:
    Case(MIXED, has_sinks=True, softcap=softcap, way=way).check()
    Case(MIXED, has_sinks=True, softcap=softcap, windows=(None, 5), way=way, num_heads=6).check(5)
    shared = [(1 + i % 3, 280 + i) for i in range(24)]
    Case(shared, shared=16, has_sinks=True, softcap=softcap, way=way).check()


class PooledCase:
    """A step of a model whose layers with a window have pages of their own."""

    def __init__(self, rows: list[tuple[int, int]], window: int, **options: Any) -> None:
        self.window = window
        self.full = Case(rows, windows=(None,), **options)
        self.windowed = Case(rows, windows=(window,), seed=1, **options)
        self.windowed.query, self.windowed.sinks = self.full.query, self.full.sinks
        self.shape = replace(self.full.shape, windows=(None, window), pooled_windows=(window,))

    @property
    def step(self) -> AttentionStep:
        full, table = self.full, self.windowed.page_table.copy()
        for row, (kv_len, q_len) in enumerate(zip(full.kv_lens, full.q_lens, strict=True)):
            table[row, : max(kv_len - q_len - self.window, 0) // full.shape.page_size] = 0  # given back
        rows: Any = SimpleNamespace(rows=np.arange(len(table)), q_lens=full.q_lens, kv_lens=full.kv_lens)
        return replace(full.step, windowed=windowed_step(rows, table, self.window, full.shape.page_size))

    def check(self, backend: AttentionBackend) -> None:
        for case, window in ((self.full, None), (self.windowed, self.window)) * 2:
            found = backend.run(case.query, case.key_cache, case.value_cache, window, sinks=case.sinks)
            torch.testing.assert_close(found.double(), case.expected(window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 9, 60])
def test_layers_with_a_window_read_pages_of_their_own(window: int, way: Way) -> None:
    rows = [(1, 400), (1, 33), (3, 70), (40, 150), (90, 90)]
    case = PooledCase(rows, window, has_sinks=True, page_size=4, way=way)
    assert case.step.windowed is not None
    assert case.step.windowed.page_table.shape[1] <= (90 + window + 6) // 4
    backend = for_pools(case.shape, way.backend)
    backend.plan(case.step)
    case.check(backend)


def test_layers_with_and_without_a_window_share_a_plan(way: Way) -> None:
    case = Case([(1, 300 + i) for i in range(9)], windows=(None, 5, 9), shared=16, way=way)
    backend = way.backend(case.shape)
    backend.plan(case.step)
    for window in (5, None, 9, None, 5):
        actual = backend.run(case.query, case.key_cache, case.value_cache, window)
        torch.testing.assert_close(actual.double(), case.expected(window), atol=1e-5, rtol=1e-5)


def num_groups(case: Case) -> int:
    """Of rows that the compiled kernels let attend to what they share together."""
    backend = CpuAttention(case.shape)
    backend.plan(case.step)
    return int(backend._layouts[True].step.num_groups)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("shares", [TORCH, COMPILED])
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 300 + i) for i in range(24)],
        [(1 + i % 3, 280 + i) for i in range(24)],
        [(8, 280 + i) for i in range(24)],
    ],
)
def test_rows_that_share_a_prefix_attend_as_if_alone(
    rows: list[tuple[int, int]], shares: Way, in_order: bool
) -> None:
    case = Case(rows, shared=16, in_order=in_order, way=is_there(shares))
    if shares is COMPILED:
        assert num_groups(case) == 1, "the case is meant to take that path"
    case.check()
    start = 0
    for row, (q_len, _) in enumerate(rows):
        alone = Case(rows, shared=16, in_order=in_order, way=shares)
        alone.q_lens, alone.kv_lens = case.q_lens[row : row + 1], case.kv_lens[row : row + 1]
        alone.page_table, alone.query = case.page_table[row : row + 1], case.query[start : start + q_len]
        torch.testing.assert_close(case.run()[start : start + q_len], alone.run(), atol=2e-6, rtol=2e-6)
        start += q_len


@pytest.mark.parametrize("shares", [TORCH, COMPILED])
def test_two_groups_and_loners_in_one_step(shares: Way) -> None:
    rows = [(1, 290 + i) for i in range(20)] + [(1, 30), (4, 12)] + [(1, 310)] * 3
    case = Case(rows, num_kv_heads=4, head_dim=32, way=is_there(shares))
    case.page_table[0:10:2, :18] = case.page_table[0, :18]
    case.page_table[1:10:2, :17] = case.page_table[1, :17]
    case.page_table[10:20, :12] = case.page_table[10, :12]
    if shares is COMPILED:
        assert num_groups(case) == 3
    case.check()


@pytest.mark.parametrize(
    "change", ["none", "a shared page", "another row's length", "a page of its own", "a row less"]
)
def test_rows_that_go_on_keep_their_layout_and_others_get_one(change: str) -> None:
    """A step after another one: as planned before, or anew where anything but the rows' ends is different."""
    case = Case([(1, 300 + i) for i in range(6)], shared=10, way=is_there(COMPILED))
    backend = CpuAttention(case.shape)
    case.kv_lens -= 1
    backend.plan(case.step)
    before = backend._layouts[True]
    case.kv_lens += 1
    if change == "a shared page":
        case.page_table[3, 4] = case.page_table[0, 15]
    elif change == "another row's length":
        case.kv_lens[2] -= 50
    elif change == "a page of its own":
        case.page_table[3, 15] = case.page_table[0, 15]
    elif change == "a row less":
        case.kv_lens, case.q_lens, case.page_table = case.kv_lens[1:], case.q_lens[1:], case.page_table[1:]
        case.query = case.query[1:]
    backend.plan(case.step)
    assert (backend._layouts[True] is before) == (change in ("none", "a page of its own"))
    actual = backend.run(case.query, case.key_cache, case.value_cache)
    torch.testing.assert_close(actual.double(), case.expected(), atol=1e-5, rtol=1e-5)


def test_a_row_that_grows_gets_more_threads() -> None:
    case = Case([(1, 100)], way=is_there(COMPILED))
    backend = CpuAttention(case.shape)
    with patch.object(attention_cpu, "_FEW", 100 * 4 * 8):  # keys, heads, numbers of each
        planned = []
        for kv_len in (98, 99, 100):
            case.kv_lens[:] = kv_len
            backend.plan(case.step)
            planned.append(backend._layouts[True])
    assert planned[0] is planned[2]
    assert not planned[2].step.is_small
    case.kv_lens[:] = 99
    with patch.object(attention_cpu, "_FEW", 100 * 4 * 8):
        backend.plan(case.step)
    assert backend._layouts[True].step.is_small


@pytest.mark.parametrize("num_threads", [1, 3])
def test_any_number_of_threads(num_threads: int, way: Way) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        Case([(150, 400), *((1, 290 + i) for i in range(16))], shared=9, head_dim=64, way=way).check()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_scores_of_any_size(scale: float, way: Way) -> None:
    """Rising along the keys, so that each tile's are the largest so far, and falling."""
    for order in (1, -1):
        case = Case([(1, 300), (9, 200)], num_heads=2, num_kv_heads=1, way=way)
        for kv_len, pages in zip(case.kv_lens, case.page_table, strict=True):
            used = torch.from_numpy(pages[: -(-kv_len // 16)]).to(case.key_cache.device).long()
            steps = order * torch.arange(len(used) * 16).to(case.key_cache)
            case.key_cache[used] = (steps * scale / 8).view(len(used), 16, 1, 1).expand(-1, -1, 1, 8)
        case.query.abs_()
        torch.testing.assert_close(case.run().double(), case.expected(), atol=1e-4, rtol=1e-4)


def test_a_long_prompt_is_cut_into_blocks_of_queries(way: Way) -> None:
    with patch.object(attention_torch, "_MOST_SCORES", 50_000):
        Case([(300, 310), (1, 290), (140, 140)], num_heads=2, num_kv_heads=1, way=way).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, device: str) -> None:
    Case(MIXED, dtype=dtype, device=device).check()
    sharing = [(1, 290 + i) for i in range(16)]
    Case(sharing, shared=16, num_kv_heads=4, head_dim=32, dtype=dtype, device=device).check()
    assert "computes in float32" in str(attention_cpu.why_not(Case([(1, 1)], dtype=dtype).shape))


def test_unwritten_slots_of_the_last_page_do_not_matter(way: Way) -> None:
    case = Case([(1, 18), (3, 7)], way=way)
    before = case.run()
    for row, kv_len in enumerate(case.kv_lens):
        last = case.page_table[row, (kv_len - 1) // 16]
        case.key_cache[last, kv_len % 16 :] = 1e4
        case.value_cache[last, kv_len % 16 :] = -1e4
    assert torch.equal(case.run(), before)


def test_planning_again_forgets_the_step_before(way: Way) -> None:
    backend = way.backend(Case([(1, 1)], way=way).shape)
    for rows in ([(1, 300 + i) for i in range(20)], [(5, 9)], MIXED):
        case = Case(rows, shared=18 if rows[0][1] > 290 else 0, way=way)
        backend.plan(case.step)
        actual = backend.run(case.query, case.key_cache, case.value_cache)
        torch.testing.assert_close(actual.double(), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_planning_and_running_never_wait_for_the_device() -> None:
    case = Case(MIXED, windows=(None, 9), device="cuda")
    step, backend = case.step, TorchAttention(case.shape)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.plan(step)
        for window in (None, 9):
            backend.run(case.query, case.key_cache, case.value_cache, window)
    finally:
        torch.cuda.set_sync_debug_mode("default")


rows_of_a_step = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 80)).map(lambda row: (row[0], row[0] + row[1])),
    min_size=1,
    max_size=9,
)


@given(
    rows=rows_of_a_step,
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    window=st.sampled_from([None, 1, 7, 50]),
    shared=st.integers(0, 5),
    seed=st.integers(0, 100),
)
def test_any_step_equals_attention_written_out(
    rows: list[tuple[int, int]], page_size: int, heads: tuple[int, int], window: int | None, shared: int, seed: int
) -> None:
    shared = min(shared, min((kv - q) // page_size for q, kv in rows))
    case = Case(
        rows,
        page_size=page_size,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        windows=(window,),
        shared=shared,
        seed=seed,
    )
    backends: list[AttentionBackend] = [TorchAttention(case.shape)]
    if cpu.why_not() is None:
        backends.append(CpuAttention(case.shape))
    # So that small prefixes are shared, and small steps cut into blocks.
    with patch.object(attention_cpu, "_LEAST_SAVED", 4), patch.object(attention_torch, "_MOST_SCORES", 1000):
        for backend in backends:
            backend.plan(case.step)
            actual = backend.run(case.query, case.key_cache, case.value_cache, window)
            torch.testing.assert_close(actual.double(), case.expected(window), atol=1e-5, rtol=1e-5)


@given(
    tables=st.lists(st.lists(st.integers(1, 3), min_size=0, max_size=6), min_size=1, max_size=8),
    min_saved=st.integers(1, 12),
)
def test_shared_prefixes_save_as_many_keys_as_any_grouping(tables: list[list[int]], min_saved: int) -> None:
    # Page size 1, one query token: a row's past is its table.
    width = max(len(table) for table in tables) + 1
    page_table = np.array(
        [table + [row + 100] * (width - len(table)) for row, table in enumerate(tables)], np.int32
    )
    kv_lens = np.array([len(table) + 1 for table in tables], np.int32)
    groups = shared_prefixes(np.ones_like(kv_lens), kv_lens, page_table, 1, min_saved, max_q=1)
    rows = [row for group in groups for row in group.rows.tolist()]
    assert len(set(rows)) == len(rows)
    for group in groups:
        assert (len(group.rows) - 1) * len(group.pages) >= min_saved
        for row in group.rows.tolist():
            assert tables[row][: len(group.pages)] == group.pages.tolist()

    def best(prefix: tuple[int, ...]) -> int:
        """Keys saved below a node of the trie: all its rows in one group, or each branch for itself."""
        below = [table for table in tables if tuple(table[: len(prefix)]) == prefix]
        whole = (len(below) - 1) * len(prefix)
        branches = {table[len(prefix)] for table in below if len(table) > len(prefix)}
        return max(whole if whole >= min_saved else 0, sum(best((*prefix, page)) for page in branches))

    assert sum((len(group.rows) - 1) * len(group.pages) for group in groups) == best(())
