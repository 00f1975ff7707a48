"""The Triton attention kernels (interpreted where there is no GPU) against attention written out in float64."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.interpreter  # noqa: F401 - mends it
from sgl.kernels.attention import decode
from sgl.kernels.attention.base import MAX_INPUTS, AttentionShape, AttentionStep
from sgl.kernels.attention.decode import DecodeAttention, DecodePlan, SharedOutput, SplitWork
from sgl.kernels.attention.pools import PooledAttention
from sgl.kernels.attention.ragged import RaggedRows
from tests.test_attention import Case, PooledCase

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
from sgl.kernels.attention.triton import TritonAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def case_options(draw: st.DrawFn, *softcaps: float) -> dict[str, Any]:
    """Of a `Case`."""
    num_heads, num_kv_heads = draw(st.sampled_from([(4, 2), (3, 3), (6, 2), (16, 1)]))
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "page_size": draw(st.sampled_from([1, 4, 16])),
        "windows": (draw(st.sampled_from([None, 1, 30])),),
        "softcap": draw(st.sampled_from([None, *softcaps])),
        "has_sinks": draw(st.booleans()),
    }


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-4, atol=1e-5)


@settings(max_examples=20)
@given(
    rows=st.lists(st.tuples(st.just(1) | st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=4),
    options=case_options(0.7, 50.0),
    num_programs=st.sampled_from([1, 3]),
    overlaps=st.booleans(),
)
def test_any_step_equals_attention_written_out(
    rows: list[tuple[int, int]], options: dict[str, Any], num_programs: int, overlaps: bool
) -> None:
    case = Case([(q, q + past) for q, past in rows], **options, device=DEVICE)
    [window] = case.shape.windows
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(decode, "_PER_PROCESSOR", 2 * case.shape.num_kv_heads * num_programs)
            patch.setattr(decode, "_LEAST_SHARE", 32)
        backend = TritonAttention(case.shape)
        backend.plan(case.step)
    caches = case.key_cache, case.value_cache
    found = backend.run(case.query, *caches, window, sinks=case.sinks, overlaps=overlaps)
    near(found, case.expected(window))


@settings(max_examples=20)
@given(
    rows=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 90)), min_size=1, max_size=4),
    options=case_options(0.7),
    num_programs=st.sampled_from([1, 2, 6]),
    overlaps=st.booleans(),
)
def test_rows_of_a_few_tokens_each_are_attended_as_one_and_padding_harms_nobody(
    rows: list[tuple[int, int]], options: dict[str, Any], num_programs: int, overlaps: bool
) -> None:
    case = Case([(q, q + past) for q, past in rows], **options, device=DEVICE)
    [window] = case.shape.windows
    queries = next(each for each in (2, 4, 8) if each >= case.q_lens.max())
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(decode, "_PER_PROCESSOR", 2 * case.shape.num_kv_heads * num_programs)
            patch.setattr(decode, "_LEAST_SHARE", 32)
        backend = TritonAttention(case.shape, max_graph_rows=4, max_pages=200, max_queries=8)
        placed, firsts = backend.plan_verify(case.step, queries, [np.arange(len(rows) * queries)])
    assert placed.tolist() == list(range(len(rows) * queries))
    real = np.concatenate([b * queries + np.arange(q) for b, (q, _) in enumerate(rows)])
    padded = torch.full((len(rows) * queries, *case.query.shape[1:]), 7.0, device=DEVICE)
    padded[real] = case.query
    found = backend.run(padded, case.key_cache, case.value_cache, window, sinks=case.sinks, overlaps=overlaps)
    near(found[real], case.expected(window))
    assert firsts.tolist() == [past for _, past in rows]
    if window is None:  # rows may turn out to begin earlier
        back = np.array([min(past, 3) for _, past in rows], np.int32)
        firsts -= torch.from_numpy(back).to(DEVICE)
        found = backend.run(padded, case.key_cache, case.value_cache, window, sinks=case.sinks, overlaps=overlaps)
        case.kv_lens = case.kv_lens - back
        near(found[real], case.expected(window))


@settings(max_examples=20)
@given(
    pasts=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    options=case_options(0.7),
    num_programs=st.sampled_from([1, 2, 6]),
    of_several=st.booleans(),
    overlaps=st.booleans(),
)
def test_one_token_a_row_sees_no_key_behind_it(
    pasts: list[int], options: dict[str, Any], num_programs: int, of_several: bool, overlaps: bool
) -> None:
    """One plan over the keys of three passes serves each of them."""
    case = Case([(3, 3 + past) for past in pasts], **options, device=DEVICE)
    [window] = case.shape.windows
    rows = RaggedRows.of(case.step, slice(None), case.shape.page_size)
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(decode, "_PER_PROCESSOR", 2 * case.shape.num_kv_heads * num_programs)
            patch.setattr(decode, "_LEAST_SHARE", 32)
        attention = DecodeAttention(case.shape)
        begins = np.maximum(np.array(pasts, np.int32) - (window or 1000) + 1, 0)
        programs = attention.programs(len(pasts), of_several=of_several)
        arrays = *attention.cut(begins, rows.kv_lens, rows.page_starts[:-1], programs), rows.pages
    *shares, pages = (torch.from_numpy(each).to(DEVICE) for each in arrays)
    caches, shape = (case.key_cache, case.value_cache), (len(pasts), 3, *case.query.shape[1:])
    for turn in range(3):
        firsts = torch.tensor(pasts, device=DEVICE) + turn
        plan = DecodePlan(len(pasts), pages, {window: (shares[0], shares[1])}, programs, 1, firsts)
        query = case.query.view(shape)[:, turn].contiguous()
        out = torch.empty_like(query)
        attention.run(plan, query, *caches, window, out, sinks=case.sinks, overlaps=overlaps)
        near(out, case.expected(window).view(shape)[:, turn])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_heads_of_any_size_with_caps_and_sinks(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are cut between programs, and some are not."""
    if DEVICE == "cpu":
        monkeypatch.setattr(decode, "_PER_PROCESSOR", 12)
    rows = [(1, 200), (1, 7), (1, 150), (9, 70)]
    case = Case(rows, head_dim=head_dim, softcap=5.0, has_sinks=True, windows=(None, 40), device=DEVICE)
    backend = TritonAttention(case.shape)
    backend.plan(case.step)
    assert backend._decodes is not None
    assert parts_of(backend._decodes) > 1
    for window in case.shape.windows:
        found = backend.run(case.query, case.key_cache, case.value_cache, window, sinks=case.sinks)
        near(found, case.expected(window))


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize(("num_rows", "fewer"), [(1, (2, 4)), (2, (2, 2)), (8, (2, 2)), (9, (1, 2))])
def test_few_rows_and_those_of_several_tokens_are_shared_among_fewer_programs(
    num_rows: int, fewer: tuple[int, int], queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all of as many warps. fewer: by so much, rows of one token and of several."""
    case = Case([(queries, 90 + 30 * (b % 3)) for b in range(num_rows)], device=DEVICE)
    if DEVICE == "cpu":
        monkeypatch.setattr(decode, "_PER_PROCESSOR", 16 * case.shape.num_kv_heads)
        monkeypatch.setattr(decode, "_LEAST_SHARE", 32)
    bounds = {"max_graph_rows": num_rows, "max_pages": 200, "max_queries": 2}
    attention = DecodeAttention(case.shape, **bounds)
    programs = attention.programs(num_rows, of_several=queries > 1)
    assert programs.number == attention.num_programs // fewer[queries - 1]
    assert programs.number * programs.warps == attention.num_programs * attention.programs(9).warps
    if queries > 1:
        plan, _ = attention.plan_verify(case.step, queries, [])
    else:
        plan = attention.plan(case.step, num_rows)
    assert plan.programs == programs
    assert parts_of(plan) > 1
    out = torch.empty_like(case.query)
    attention.run(plan, case.query, case.key_cache, case.value_cache, None, out)
    near(out, case.expected())


def parts_of(plan: DecodePlan) -> int:
    """Programs that a row's keys are cut for, at most."""
    return int(max(segments[:, 5].max() for _, segments in plan.shares.values()))


@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    window=st.none() | st.integers(1, 300),
    num_programs=st.integers(1, 50),
    tile=st.sampled_from([32, 64]),
    least_share=st.sampled_from([1, 32, 128]),
)
def test_keys_are_shared_out_evenly_and_each_once(
    lengths: list[int], window: int | None, num_programs: int, tile: int, least_share: int
) -> None:
    ends = np.array(lengths, np.int32)
    begins = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0).astype(np.int32)
    first_pages = np.arange(len(lengths), dtype=np.int32)
    shares = SplitWork.of(begins, ends, first_pages, num_programs, tile, least_share)
    total = sum(decode._ROW_COST + tile * -(-n // tile) for n in ends - begins)
    share = max(least_share, tile, -(-total // num_programs))
    seen = [np.zeros(length, int) for length in lengths]
    programs: list[list[int]] = [[] for _ in lengths]
    sizes = []
    assert len(shares.segments) <= len(lengths) + num_programs
    assert shares.starts[0] == 0
    assert shares.starts[-1] == len(shares.segments)
    for program in range(num_programs):
        cost = 0
        for row, begin, end, first_page, first_program, num_parts in shares.segments[
            slice(*shares.starts[program:][:2])
        ]:
            assert begin < end
            assert first_page == row
            seen[row][begin:end] += 1
            programs[row].append(program)
            assert first_program == programs[row][0]
            assert first_program <= program < first_program + num_parts
            cost += -(-(end - begin) // tile) * tile
            cost += decode._ROW_COST * (begin == begins[row])
        sizes.append(cost)
    for row, begin in enumerate(begins):
        assert (seen[row] == (np.arange(lengths[row]) >= begin)).all()
        assert programs[row] == list(range(programs[row][0], programs[row][-1] + 1))
    for row, *_, num_parts in shares.segments:
        assert num_parts == len(programs[row])  # or nobody merges them
    *full, last = [size for size in sizes if size]
    assert all(abs(size - share) <= tile + decode._ROW_COST for size in full)
    assert last <= share + tile // 2 + decode._ROW_COST
    works = np.diff(shares.starts) > 0
    assert (shares.programs[works, :6] == shares.segments[shares.starts[:-1][works]]).all()
    assert (shares.programs[:, 6:] == np.stack((shares.starts[:-1], shares.starts[1:]), axis=1)).all()


@given(
    steps=st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=4), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 4, 16, 48]),
    skips=st.booleans(),
    data=st.data(),
)
def test_steps_that_go_on_get_the_shares_that_they_would_get_by_themselves(
    steps: list[list[int]], page_size: int, skips: bool, data: st.DataObject
) -> None:
    """One planner for all, and one for each step."""
    shape = AttentionShape(4, 2, 16, page_size, 1.0, torch.float32, torch.device("cpu"))
    kept = DecodeAttention(shape)

    def compare(kv_lens: list[int], table: npt.NDArray[np.int32]) -> None:
        lengths = np.array(kv_lens, np.int32)
        step = AttentionStep(np.ones(len(lengths), np.int32), lengths, table)
        skipped = (lengths - 1) // page_size // 2 if skips else None
        fresh = DecodeAttention(shape)
        for attention in (kept, fresh):
            attention.num_programs = 7
        programs = kept.programs(len(lengths), of_several=data.draw(st.booleans()))
        ways = (attention._host(step, len(lengths), skipped, programs) for attention in (kept, fresh))
        for ours, theirs in zip(*ways, strict=True):
            np.testing.assert_array_equal(ours, theirs)

    for lengths in steps:
        table = np.arange(len(lengths) * 600, dtype=np.int32).reshape(-1, 600)
        for _ in range(data.draw(st.integers(1, 40))):
            compare(lengths, table)
            lengths = [length + 1 for length in lengths]
        compare(lengths, table)
        compare(lengths, table[::-1])  # others of the same lengths
        compare(lengths, table + 1)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    places=st.lists(st.integers(-1, 3), min_size=5, max_size=5),
    num_programs=st.integers(1, 4),
    has_sinks=st.booleans(),
)
def test_own_keys_are_merged_with_common_ones(
    lengths: list[int], places: list[int], num_programs: int, has_sinks: bool
) -> None:
    """Against attention over all of a row's keys at once, wherever rows are cut; a sink counts once."""
    num_rows, heads, dim = len(lengths), 4, 16
    case = Case(
        [(1, length) for length in lengths],
        num_heads=heads,
        num_kv_heads=2,
        head_dim=dim,
        device=DEVICE,
        page_size=4,
        has_sinks=has_sinks,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_LEAST_SHARE", 32)
        if DEVICE == "cpu":
            patch.setattr(decode, "_PER_PROCESSOR", 4 * num_programs)
        attention = DecodeAttention(case.shape)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 10, 2, dim, generator=generator).to(DEVICE)
    scores = torch.einsum("nhd,khd->nhk", case.query, keys.repeat_interleave(2, 1)) * case.shape.scale
    everyone = torch.einsum("nhk,khd->nhd", scores.softmax(-1), values.repeat_interleave(2, 1)).contiguous()
    # Place i of the common part belongs to the row that names it; a row's place is where its result lies.
    chosen = np.array([row if place >= 0 else -1 for row, place in enumerate(places[:num_rows])], np.int32)
    lse = (scores.logsumexp(-1) / math.log(2)).contiguous()
    common = SharedOutput(everyone, lse, torch.from_numpy(chosen).to(DEVICE))
    out = torch.full_like(case.query, math.nan)
    plan = attention.plan(case.step, num_rows)
    attention.run(plan, case.query, case.key_cache, case.value_cache, None, out, common, sinks=case.sinks)
    alone = case.expected()
    for row in range(num_rows):
        if chosen[row] < 0:
            near(out[row], alone[row])
            continue
        pages = torch.from_numpy(case.page_table[row, : -(-lengths[row] // 4)]).long().to(DEVICE)
        row_keys = torch.cat((keys, case.key_cache[pages].flatten(0, 1)[: lengths[row]])).repeat_interleave(2, 1)
        row_values = torch.cat((values, case.value_cache[pages].flatten(0, 1)[: lengths[row]]))
        scores = torch.einsum("hd,khd->hk", case.query[row], row_keys) * case.shape.scale
        if case.sinks is not None:
            scores = torch.cat((scores, case.sinks[:, None]), 1)
        weights = scores.softmax(-1)[:, : len(row_keys)]
        near(out[row], torch.einsum("hk,khd->hd", weights, row_values.repeat_interleave(2, 1)))
    assert not attention._counters.any()


def test_a_cache_in_eight_bits_is_widened_as_it_is_read() -> None:
    case = Case([(1, 200), (1, 3), (20, 90)], device=DEVICE)
    narrow = [cache.to(torch.float8_e4m3fn) for cache in (case.key_cache, case.value_cache)]
    case.key_cache, case.value_cache = (cache.float() for cache in narrow)
    backend = TritonAttention(case.shape)
    backend.plan(case.step)
    for overlaps in (False, True):
        near(backend.run(case.query, narrow[0], narrow[1], overlaps=overlaps), case.expected())


@pytest.mark.costly
@pytest.mark.parametrize("num_programs", [1, 2, 12])
@pytest.mark.parametrize("window", [None, 50])
def test_what_was_captured_attends_for_later_steps(
    num_programs: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows cut between programs or not; a replay runs the plan that was captured over later inputs."""
    if DEVICE == "cpu":
        monkeypatch.setattr(decode, "_PER_PROCESSOR", 4 * num_programs)
    rng = np.random.default_rng(0)
    case = Case([(1, 300)] * 3, windows=(window,), device=DEVICE)
    backend = TritonAttention(case.shape, max_graph_rows=3, max_pages=19)
    ones = np.ones(3, np.int32)
    nothing = [np.zeros(3, np.int64)] * MAX_INPUTS
    placed = backend.plan_decode(AttentionStep(ones, ones, np.zeros((3, 1), np.int32)), 0, nothing)
    captured = backend._decodes
    for longest in (300, 1, 70):
        case.kv_lens = rng.integers(1, longest + 1, 3).astype(np.int32)
        inputs = list(rng.integers(0, 1000, (MAX_INPUTS, 3)))
        backend.plan_decode(case.step, 0, inputs)
        assert [array.tolist() for array in placed] == [array.tolist() for array in inputs]
        backend._decodes = captured
        for overlaps in (False, True):
            found = backend.run(case.query, case.key_cache, case.value_cache, window, overlaps=overlaps)
            near(found, case.expected(window))


def test_a_captured_decode_takes_the_pages_of_both_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(decode, "_PER_PROCESSOR", 8)
    case = PooledCase([(1, 300)] * 3, 50, device=DEVICE)
    backend = PooledAttention(case.shape, lambda its: TritonAttention(its, max_graph_rows=3, max_pages=19))
    ones, slots = np.ones(3, np.int32), np.zeros((2, 4), np.int64)
    first = AttentionStep(ones, ones, np.zeros((3, 1), np.int32))
    nothing = [ones.astype(np.int64), ones.astype(np.int64), slots, ones.astype(np.int64)]
    placed = backend.plan_decode(replace(first, windowed=first), 0, nothing)
    captured = [each._decodes for each in backend._backends.values()]  # type: ignore[attr-defined]
    for lens in ([300, 7, 120], [1, 299, 50]):
        case.full.kv_lens[:] = case.windowed.kv_lens[:] = lens
        slots = np.arange(sum(lens), sum(lens) + 8).reshape(2, 4)
        backend.plan_decode(case.step, 0, [*nothing[:2], slots, nothing[3]])
        assert placed[2].tolist() == slots.tolist()
        for each, plan in zip(backend._backends.values(), captured, strict=True):
            each._decodes = plan  # type: ignore[attr-defined]
        case.check(backend)


def test_rows_that_verify_drafts_take_the_pages_of_both_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(decode, "_PER_PROCESSOR", 8)
    rows = [(3, 300), (1, 7), (4, 120), (2, 60)]
    case = PooledCase(rows, 50, device=DEVICE)
    bounds = {"max_graph_rows": 4, "max_pages": 19, "max_queries": 4}
    backend = PooledAttention(case.shape, lambda its: TritonAttention(its, **bounds))
    assert backend.max_queries == 4
    backend.plan_verify(case.step, 4, [np.arange(16)])
    real = np.concatenate([4 * b + np.arange(q) for b, (q, _) in enumerate(rows)])
    padded = torch.zeros(16, *case.full.query.shape[1:], device=DEVICE)
    padded[real] = case.full.query
    for its, window in ((case.full, None), (case.windowed, 50)):
        found = backend.run(padded, its.key_cache, its.value_cache, window)
        near(found[real], its.expected(window))
