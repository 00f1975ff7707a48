"""The kernels of attention over latents, interpreted where there is no GPU, against attention written out in float64,
and those of the products around it against torch."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.interpreter  # noqa: F401 - mends it
from sgl.kernels.attention.base import AttentionStep
from sgl.kernels.attention.torch import TorchAttention
from sgl.kernels.latent import attend_triton, products_triton
from sgl.kernels.latent.attention import LatentAttention, TritonPrompts
from sgl.kernels.latent.products import enter, expand
from sgl.kernels.layers.rope import rotary_rows
from sgl.kernels.moe import grouped_triton, single_triton
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.mixture import mixture
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.mla.config import LatentConfig
from sgl.runtime.model.mla.loader import load_latent
from sgl.runtime.model.tokens import Tokens
from tests.test_attention import Case
from tests.tiny_transformers import LATENT, SHARED, tiny_transformer

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-4, atol=1e-5)


def latents(
    rows: list[tuple[int, int]], *, num_heads: int = 4, rank: int = 16, rope_dim: int = 8, page_size: int = 4
) -> Case:
    """A step over cached latents, whose first numbers are the values."""
    case = Case(
        rows,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=rank + rope_dim,
        page_size=page_size,
        device=DEVICE,
    )
    case.shape = replace(case.shape, latent_dim=rank)
    case.value_cache = case.key_cache[..., :rank]
    return case


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(attend_triton, "programs_per_processor", lambda num_heads: 4)


def attention(case: Case, **bounds: int) -> LatentAttention:
    return LatentAttention(case.shape, TritonPrompts(case.shape), **bounds)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.just(1) | st.integers(1, 30), st.integers(0, 90)), min_size=1, max_size=4),
    num_heads=st.sampled_from([1, 4, 6, 16]),
    sizes=st.sampled_from([(16, 8), (24, 4), (32, 16)]),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_any_step_equals_attention_written_out(
    rows: list[tuple[int, int]], num_heads: int, sizes: tuple[int, int], page_size: int
) -> None:
    case = latents(
        [(q, q + past) for q, past in rows],
        num_heads=num_heads,
        rank=sizes[0],
        rope_dim=sizes[1],
        page_size=page_size,
    )
    expected = case.expected()
    for backend in (attention(case), TorchAttention(case.shape)):
        backend.plan(case.step)
        near(backend.run(case.query, case.key_cache, case.value_cache), expected)


@pytest.mark.parametrize("num_heads", [96, 35])
def test_many_heads_are_shared_among_programs(num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # some for each group of heads, which cut rows
    monkeypatch.setattr(attend_triton, "programs_per_processor", lambda num_heads: 6)
    case = latents([(1, 190), (1, 5), (3, 40)], num_heads=num_heads)
    backend = attention(case)
    backend.plan(case.step)
    near(backend.run(case.query, case.key_cache, case.value_cache), case.expected())


@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_what_was_captured_attends_for_later_steps(num_rows: int) -> None:
    """With padding, and rows of any length."""
    rng = np.random.default_rng(0)
    case = latents([(1, 60)] * num_rows)
    backend = attention(case, max_graph_rows=num_rows, max_pages=15)
    inputs = (np.arange(num_rows, dtype=np.int64),) * 2
    placed = backend.plan_decode(case.step, 0, inputs)
    captured = backend._decodes
    for _ in range(3):
        later = latents([(1, int(n)) for n in rng.integers(1, 60, num_rows)])
        addresses = [each.data_ptr() for each in placed]
        placed = backend.plan_decode(later.step, backend.variant(later.step), inputs)
        assert [each.data_ptr() for each in placed] == addresses
        assert backend._decodes is captured
        near(backend.run(later.query, later.key_cache, later.value_cache), later.expected())


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("sizes", [(16, 8, 6, 4), (96, 12, 10, 6)])
def test_queries_and_latents_are_those_of_torch(num_tokens: int, sizes: tuple[int, int, int, int]) -> None:
    rank, nope_dim, value_dim, rope_dim = sizes
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    products = draw(num_tokens, 3 * (nope_dim + rope_dim) + rank + rope_dim)  # as one matrix makes them
    query, latents = torch.split(products, [3 * (nope_dim + rope_dim), rank + rope_dim], 1)
    up, norm = draw(3, nope_dim + value_dim, rank), draw(rank)
    rotary = rotary_rows(draw(50, rope_dim).cpu(), torch.arange(7, 7 + num_tokens), torch.float32)
    slots = torch.randperm(12, generator=generator)[:num_tokens].to(DEVICE)
    given = query.unflatten(1, (3, -1)), latents, up, norm, 1e-6, tuple(its.to(DEVICE) for its in rotary)
    cache, expected_cache = (torch.zeros(3, 4, 1, rank + rope_dim, device=DEVICE) for _ in range(2))
    out = torch.full((num_tokens, 3, rank + rope_dim), torch.nan, device=DEVICE)
    products_triton.enter(*given, cache, slots, out)
    if num_tokens > 1:
        assert out[..., :rank].isnan().all()  # a product's
    at_home = [each.cpu() if isinstance(each, torch.Tensor) else each for each in given[:5]]
    expected_cache = expected_cache.cpu()
    expected = enter(*at_home, rotary, expected_cache, slots.cpu())
    near(cache.cpu(), expected_cache)
    first = rank if num_tokens > 1 else 0
    near(out[..., first:].cpu(), expected[..., first:])


@pytest.mark.parametrize("kv_len", [3, 190])
def test_a_row_in_parts_is_merged_and_expanded(kv_len: int) -> None:
    case = latents([(1, kv_len)], num_heads=6, rank=24)
    up = torch.randn(6, 10 + 20, 24, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    backend = attention(case)
    backend.plan(case.step)
    parts, programs = backend.run_parts(case.query, case.key_cache)
    assert int(programs[0, 5]) == (1 if kv_len == 3 else min(-(-kv_len // 64), backend._decode.num_programs))
    attended = case.expected().float()
    near(products_triton.expand_parts(parts, programs, up, 10), expand(attended, up, 10))


def experts(**fields: Any) -> Experts:
    """Of DeepSeek: five of twelve in four groups, and two for every token."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    bias = 0.3 * draw(12) * 12**0.5 if fields.get("scores") == "sigmoid" else None
    matrices = 3 * draw(12, 32), draw(14, 32, 32), draw(14, 32, 16)
    return Experts(*matrices, top_k=5, bias=bias, num_shared=2, **fields)


ROUTES: list[dict[str, Any]] = [
    {"normalises": False},
    {"normalises": False, "scale": 16.0, "num_groups": 4, "top_groups": 2},
    {
        "normalises": True,
        "scores": "sigmoid",
        "scale": 2.5,
        "num_groups": 4,
        "top_groups": 2,
        "best_of_group": 2,
    },
    {"normalises": True, "scores": "sigmoid"},
]


@pytest.mark.costly
@pytest.mark.parametrize("fields", ROUTES)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_deepseeks_experts_are_those_of_torch(fields: dict[str, Any], num_tokens: int) -> None:
    its = experts(**fields)
    x = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(1))
    expected = mixture(x, its)
    tensors = {name: getattr(its, name) for name in ("router", "gate_up", "down", "bias")}
    on_device = replace(its, **{name: each if each is None else each.to(DEVICE) for name, each in tensors.items()})
    parts = grouped_triton.mixture(x.to(DEVICE), on_device)
    assert parts.shape == (7, num_tokens, 32)
    near(parts.sum(0).cpu(), expected)
    if num_tokens == 1:
        residual = x.to(DEVICE, copy=True)
        single_triton.mixture_add_(residual, None, 1e-6, on_device, None, residual)
        near(residual.cpu(), x + expected)


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_hidden_layers": 2},
        pytest.param({"q_lora_rank": None, "first_k_dense_replace": 3}, marks=pytest.mark.slow),
    ],
)
def test_a_single_token_passes_as_several_do(overrides: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, "DeepseekV3ForCausalLM", **{**LATENT, **SHARED, **overrides})
    model = load_latent(LatentConfig.from_pretrained(path), device=DEVICE)
    shape = model.attention_shape(4)
    backends = TorchAttention(shape), LatentAttention(shape, TritonPrompts(shape))
    caches = [KVCache(model.config, 5, 4, model.dtype, model.device) for _ in backends]
    table, done, found = np.array([[3, 1, 4]], np.int32), 0, []
    for q_len in (9, 1):
        ids = torch.arange(5, 5 + q_len, device=DEVICE)
        positions = torch.arange(done, done + q_len)
        slots = torch.from_numpy(table[0].astype(np.int64))[positions // 4] * 4 + positions % 4
        done += q_len
        step = AttentionStep(np.array([q_len], np.int32), np.array([done], np.int32), table)
        found = []
        for backend, cache in zip(backends, caches, strict=True):
            backend.plan(step)
            found.append(model.forward(Tokens(ids, positions.to(DEVICE), slots.to(DEVICE)), cache, backend))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(caches[0].keys[1], caches[1].keys[1], rtol=1e-4, atol=1e-4)
