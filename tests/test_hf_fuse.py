"""Parts of transformers' modules that our kernels replace: where they compute the same, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from sgl.runtime.model import weights as weights_module
from sgl.runtime.model.hf.config import TransformersConfig
from sgl.runtime.model.hf.fuse import Product, fuse
from sgl.runtime.model.hf.model import TransformersModel, load_transformers
from tests.test_models import Paged, at_once, check, mixed, random_sequences
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer

REPLACED: dict[str, tuple[int, int, int, int]] = {  # products, attention modules, gates, norms
    "LlamaForCausalLM": (12, 3, 3, 7),
    "Phi3ForCausalLM": (12, 3, 3, 7),  # one matrix in the checkpoint
    "Qwen3MoeForCausalLM": (6, 3, 0, 13),  # with norms of heads
    "GraniteForCausalLM": (12, 3, 3, 7),
    "StableLmForCausalLM": (12, 0, 3, 0),  # rotates a part of each head, and has other norms
    "GlmForCausalLM": (12, 0, 3, 7),  # rotates neighbours
    "GptOssForCausalLM": (6, 3, 0, 7),  # sinks
    "Gemma3ForCausalLM": (12, 3, 0, 19),  # norms scale by 1 + weight
    "GPT2LMHeadModel": (12, 0, 0, 0),
}


def loaded(path: Path, architecture: str, **options: Any) -> TransformersModel:
    tiny_transformer(path, architecture, **ARCHITECTURES[architecture])
    return load_transformers(TransformersConfig.from_pretrained(path), **options)


@pytest.mark.parametrize("architecture", REPLACED)
def test_what_computes_the_same_is_replaced(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        loaded(tmp_path, architecture)
    (line,) = (its for its in caplog.messages if its.startswith("sgl's kernels"))
    assert tuple(map(int, re.findall(r"\d+", line))) == REPLACED[architecture]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel"])
def test_packed_products_equal_transformers(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "_LEAST_PACKED", 0)
    model = loaded(tmp_path, architecture)
    model.weights.prepare(4)
    sequences = random_sequences(384)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = [reference(torch.tensor([sequence])).logits[0] for sequence in sequences]
    check(Paged(model, sequences, page_size=16).run(at_once(sequences)), expected)
    check(Paged(model, sequences, page_size=4).run(mixed(sequences)), expected)


def test_products_of_all_numbers_of_rows_are_met(tmp_path: Path) -> None:
    model = loaded(tmp_path, "LlamaForCausalLM")
    met: dict[str, set[int]] = {}
    products = model.weights.distinct_products()
    for product in products:
        product.register_forward_pre_hook(
            lambda module, args: met.setdefault(f"{type(module).__name__} {module.width}", set()).add(
                args[0].shape[1]
            )
        )
    model.warm_up_gemms(20, 100)
    sizes = {*range(1, 21), 32, 64, 96, 100}
    assert met == {"Product 64": sizes, "Product 96": sizes, "Logits 64": {*range(1, 21)}}
    assert len(products) == 5  # q|k|v, output, gate|up, down, logits


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM"])
def test_sixteen_bits_stay_close_to_float32(architecture: str, dtype: Any, tmp_path: Path) -> None:
    exact = loaded(tmp_path, architecture)
    rounded = load_transformers(exact.config, dtype=dtype)
    sequences = random_sequences(384)
    ours, theirs = (Paged(its, sequences, 16).run(mixed(sequences))[0] for its in (rounded, exact))
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().mean() < 0.05 * theirs.abs().mean()


def test_products_of_several_modules_are_those_of_each() -> None:
    wide, narrow = nn.Linear(6, 5), nn.Linear(6, 3, bias=False)
    product = Product([wide, narrow])
    with torch.inference_mode():
        x, other = torch.randn(2, 4, 6), torch.randn(2, 4, 6)
        for index, its in enumerate((wide, narrow)):
            torch.testing.assert_close(product.part(index, x), its(x))
        for index, its, given in ((0, wide, x), (1, narrow, other), (0, wide, other), (0, wide, x), (1, narrow, x)):
            torch.testing.assert_close(product.part(index, given), its(given))
        product.forget()
        torch.testing.assert_close(product(x), torch.cat((wide(x), narrow(x)), -1))


class Body(nn.Module):
    """A module with names that promise more than it keeps."""

    def __init__(self, compute: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(6, 8), nn.Linear(6, 8)
        self.down_proj = nn.Linear(8, 6)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, x)


@pytest.mark.parametrize(
    "compute",
    [
        lambda its, x: its.down_proj(nn.functional.silu(its.gate_proj(x)) * its.up_proj(x)),
        lambda its, x: its.down_proj(nn.functional.silu(its.up_proj(x)) * its.gate_proj(x)),
        lambda its, x: its.down_proj(nn.functional.gelu(its.gate_proj(x)) * its.up_proj(x)),
        lambda its, x: its.down_proj(nn.functional.silu(its.gate_proj(x)) * its.up_proj(x + 1)),
        lambda its, x: its.down_proj(its.gate_proj(x) @ its.up_proj.weight @ its.up_proj.weight.t()),
        lambda its, x: x * its.down_proj.weight.sum(),
    ],
)
def test_misleading_names_change_nothing(compute: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    body = Body(compute)
    with torch.inference_mode():
        x, other = torch.randn(3, 6), torch.randn(2, 6)
        expected = [body(x), body(other)]
        fuse(body, lambda: body(x))
        for given, its in zip((x, other), expected, strict=True):
            torch.testing.assert_close(body(given), its, atol=1e-5, rtol=1e-5)
