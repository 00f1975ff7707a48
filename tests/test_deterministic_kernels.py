"""Kernels of the deterministic mode for GPUs, in the interpreter and on a GPU: the same bits for a row in any step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.interpreter  # noqa: F401
from benchmarks.gpu.deterministic import Sizes, compared
from benchmarks.gpu.workloads import cut_tokenizer
from sgl.kernels import collectives
from sgl.kernels.attention.base import AttentionShape, AttentionStep
from sgl.kernels.collectives import Collectives, Folder
from sgl.runtime.config import EMBEDDED
from tests.tiny_models import tiny_checkpoint

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@needs_triton
@pytest.mark.parametrize(("n", "k"), [(40, 70), (96, 512)])
def test_a_product_is_the_same_for_any_rows(n: int, k: int) -> None:
    from sgl.kernels.layers.invariant_triton import multiply

    x, matrix, bias = draw(40, k), draw(n, k), draw(n)
    whole = multiply(x, matrix, bias, x.new_empty(len(x), n))
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, matrix, bias), rtol=1e-4, atol=1e-4)
    for start, stop in ((0, 1), (3, 20), (39, 40)):
        some = multiply(x[start:stop], matrix, bias, x.new_empty(stop - start, n))
        assert torch.equal(some, whole[start:stop])


@needs_triton
@pytest.mark.parametrize("window", [None, 40])
def test_attention_is_the_same_in_any_step(window: int | None) -> None:
    from sgl.kernels.attention.triton import InvariantAttention

    size, page = 150, 8
    num_pages = -(-size // page)
    shape = AttentionShape(8, 2, 24, page, 0.2, torch.float32, DEVICE, windows=(window,))
    keys, values, query = draw(40, page, 2, 24), draw(41, page, 2, 24)[1:], draw(size, 8, 24)
    table = np.random.default_rng(0).permutation(40).astype(np.int32)[:num_pages]
    attention = InvariantAttention(shape, max_graph_rows=8, max_pages=num_pages)

    def run(q_lens: Sequence[int], kv_lens: Sequence[int], *, is_graph: bool = False) -> list[torch.Tensor]:
        tables = np.stack([table] * len(q_lens))
        step = AttentionStep(np.array(q_lens, np.int32), np.array(kv_lens, np.int32), tables)
        if is_graph:
            (placed,) = attention.plan_decode(step, 0, [np.arange(len(q_lens), dtype=np.int64)])
            assert placed.tolist() == list(range(len(q_lens)))
        else:
            attention.plan(step)
        tokens = torch.cat([query[end - count : end] for count, end in zip(q_lens, kv_lens, strict=True)])
        return list(attention.run(tokens, keys, values, window).split(list(q_lens)))

    (whole,) = run([size], [size])
    ends = [1, 64, 65, size]
    for is_graph in (False, True):
        for end, one in zip(ends, run([1] * 4, ends, is_graph=is_graph), strict=True):
            assert torch.equal(one, whole[end - 1 : end])
    for end, some in zip((70, 149), run([3, 64], [70, 149]), strict=True):
        assert torch.equal(some, whole[end - len(some) : end])


ROWS = [*range(1, 20), 63, 64, 65, 127, 255, 256, 257, 300]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_and_norms_of_ranks_are_the_same_for_any_rows(tmp_path: Path, dtype: torch.dtype) -> None:
    """As on GPUs, where NCCL gathers instead of gloo: any number of rows, and any place of a row among them."""
    sizes = 48, 16
    parts, residual = draw(2, 300, 64).cpu().to(dtype), draw(300, 64).cpu().to(dtype)
    weight = draw(64).cpu().to(dtype)

    def of(rank: int) -> list[tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        ranks = Collectives(Folder(str(tmp_path)), "g", rank, 2, torch.device("cpu"), in_order=True)
        found = []
        for count in ROWS:
            for first in {0, 300 - count, (300 - count) // 2}:
                some, held = parts[rank, first : first + count], residual[first : first + count].clone()
                normed = ranks.add_rms_norm(some.clone(), held, weight, 1e-5)
                ranks.norm_parts_(heads := some.clone(), weight, sizes, 1e-5)
                found.append((first, count, ranks.sum(some.clone()), held, normed, heads))
        ranks.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(of, range(2))
    _, _, *whole = one[-1]
    torch.testing.assert_close(whole[0], parts[0] + parts[1], rtol=0, atol=0)
    wide = torch.cat([parts[0, :, :48], parts[1, :, :48]], 1).float()
    wide *= (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(whole[3][:, :48].float(), wide[:, :48] * weight[:48].float(), rtol=2e-2, atol=2e-2)
    for (first, count, *found), (*_, sums, held, normed, _) in zip(one, other, strict=True):
        for its, all_rows in zip(found, whole, strict=True):
            assert torch.equal(its, all_rows[first : first + count])
        assert all(map(torch.equal, (sums, held, normed), found[:3])), "every rank has the same"


@needs_triton
def test_norms_of_ranks_have_the_same_warps_for_any_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide the order of a row's sum on a GPU."""
    from sgl.kernels.layers import fused_triton

    warps: set[int] = set()

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, num_warps, **rest: warps.add(num_warps)

    def on_gpu(x: Any, residual: Any, weight: Any, eps: float, before: Any = None, **options: Any) -> Any:
        return fused_triton.add_rms_norm(x, residual, weight, eps, before, **options)

    monkeypatch.setattr(fused_triton, "_rms_norm", Kernel())
    monkeypatch.setattr(collectives, "add_rms_norm", on_gpu)
    ranks = Collectives(Folder(str(tmp_path)), "g", 0, 1, torch.device("cpu"), in_order=True)
    for count in (*ROWS, 1500):
        ranks.add_rms_norm(draw(count, 4096).cpu(), draw(count, 4096).cpu(), draw(4096).cpu(), 1e-5)
    assert len(warps) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_engines_on_a_gpu(tmp_path: Path, family: str, dtype: str) -> None:
    """200 prompts in every cell: 0 numbers differ."""
    sizes: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512}
    sizes |= {"max_position_embeddings": 2048, "head_dim": 64} if family != "llama" else {}
    folder = tiny_checkpoint(tmp_path / family, family, **sizes | {"max_position_embeddings": 2048})
    cut_tokenizer(EMBEDDED, 1000, folder)
    options = {"load_format": "auto", "dtype": dtype, "device": "cuda", "deterministic": True}
    found = list(compared(folder, Sizes(200, 900, 16, 256, "cuda"), options))
    assert [its for its in found if its.numbers] == []
