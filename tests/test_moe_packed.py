"""Mixtures of experts in four and eight bits: the torch reference equals dequantised matrices, the Triton kernels
(interpreted where there is no GPU) equal the reference."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.interpreter  # noqa: F401 - mends it
from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.kernels.layers.norm import rms_norm
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.mixture import mixture
from sgl.kernels.moe.packed import ExpertMatrices, PackedExperts, matrix_of
from sgl.runtime.model import decoder as decoder_module
from sgl.runtime.model import loader, weights
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.gdn import weights as hybrid_weights
from sgl.runtime.model.gdn.config import HybridConfig
from sgl.runtime.model.gdn.weights import SparseWeights
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.model.mla import loader as latent_loader
from sgl.runtime.model.mla.config import LatentConfig
from sgl.runtime.model.quantized.codes import dequantize_mxfp4
from sgl.runtime.model.shard import Shard
from tests.test_gdn_models import tiny_hybrid
from tests.test_models import Paged, mixed, random_sequences, reference_logits
from tests.test_models import check as check_models
from tests.test_moe import forward_single, forwarded
from tests.test_moe_kernels import DEVICE, check, draw, made
from tests.tiny_models import tiny_checkpoint
from tests.tiny_quantized import quantize_folder, tiny_quantized
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)
from sgl.kernels.moe import grouped_triton, packed_single_triton, packed_triton, single_triton

KINDS: dict[str, dict[str, Any]] = {
    "int4": {"group": 32},
    "int4 with zeros": {"group": 64, "has_zeros": True},
    "int4 in wide groups": {"group": 192},
    "e2m1": {},
    "int8": {"bits": 8, "group": 96, "has_zeros": True},
    "e4m3": {"bits": 0, "group": 192},
    "e4m3 in blocks": {"bits": 0, "group": 64},
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As each takes an interpreter long."""
    if DEVICE == "cpu":
        monkeypatch.setattr(packed_single_triton, "_LEAST_PROGRAMS", 1)


def packed(kind: str, num_experts: int, n: int, k: int, seed: int) -> PackedExperts:
    """Random matrices."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "e2m1":
        blocks = torch.randint(0, 256, (num_experts, n, k // 32, 16), dtype=torch.uint8, generator=generator)
        exponents = torch.randint(122, 126, (num_experts, n, k // 32), dtype=torch.uint8, generator=generator)
        matrices = PackedExperts.of_e2m1(blocks, exponents - 2)
        assert matrices is not None
        return matrices
    options = KINDS[kind]
    bits, group = options.get("bits", 4), next(its for its in (options["group"], 64, 32) if k % its == 0)
    of_each = []
    for expert in range(num_experts):
        codes = torch.randint(0, 1 << (bits or 6), (n, k), dtype=torch.uint8, generator=generator)
        numbers = (codes.float() / 32 - 1).to(torch.float8_e4m3fn) if bits == 0 else codes
        scales = torch.rand(n, k // group, generator=generator) / (k**0.5 * (1 if bits == 0 else 1 << (bits - 2)))
        zeros = torch.randint(0, 1 << (bits or 1), scales.shape, dtype=torch.uint8, generator=generator)
        has_zeros = options.get("has_zeros") and expert != 1
        of_each.append(GroupedMatrix.of(numbers, scales, zeros if has_zeros else None, bits=bits or 8))
    matrices = PackedExperts.of(of_each)
    assert matrices is not None
    return matrices


def moved(matrices: ExpertMatrices, device: str, dtype: torch.dtype) -> ExpertMatrices:
    if isinstance(matrices, torch.Tensor):
        return matrices.to(device, dtype)
    zeros = None if matrices.zeros is None else matrices.zeros.to(device)
    return PackedExperts(matrices.values.to(device), matrices.scales.to(device), zeros)


def made_packed(kind: str, *shape: int, is_packed: tuple[bool, bool] = (True, True), **options: Any) -> Experts:
    """`made`, with packed matrices."""
    experts = made(*shape, **options)
    (num_experts, n, k), size = experts.gate_up.shape, shape[2]
    gate_up, down = packed(kind, num_experts, n, k, 1), packed(kind, num_experts, k, size, 2)
    return replace(
        experts, gate_up=gate_up if is_packed[0] else experts.gate_up, down=down if is_packed[1] else experts.down
    )


def to_device(experts: Experts, dtype: torch.dtype) -> Experts:
    biases = {
        name: None if (bias := getattr(experts, name)) is None else bias.to(DEVICE, dtype)
        for name in ("router_bias", "gate_up_bias", "down_bias")
    }
    gate_up, down = (moved(its, DEVICE, dtype) for its in (experts.gate_up, experts.down))
    return replace(experts, router=experts.router.to(DEVICE, dtype), gate_up=gate_up, down=down, **biases)


def plain(experts: Experts) -> Experts:
    """With the numbers that packed matrices say, in float32."""
    gate_up, down = (
        torch.stack([matrix_of(its, expert, torch.float32) for expert in range(len(its))])
        for its in (experts.gate_up, experts.down)
    )
    return replace(experts, gate_up=gate_up, down=down)


def test_four_bit_floats_are_those_of_their_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(0, 129, (3, 5, 2), dtype=torch.uint8, generator=generator)
    matrices = PackedExperts.of_e2m1(blocks, exponents)
    assert matrices is not None
    assert (matrices.shape, len(matrices), matrices.group, matrices.numel()) == ((3, 5, 64), 3, 32, 3 * 5 * 64)
    for expert, expected in enumerate(dequantize_mxfp4(blocks, exponents)):
        assert torch.equal(matrices.dequantized(expert, torch.float32), expected)
    exponents[1, 2, 1] = 129
    assert PackedExperts.of_e2m1(blocks, exponents) is None


def test_only_matrices_of_one_kind_are_packed_together() -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)
    first = GroupedMatrix.of(codes, scales, None, bits=4)
    others = [
        replace(first, order=torch.arange(64).int()),
        GroupedMatrix.of(codes, scales.half(), None, bits=4),
        GroupedMatrix.of(codes, torch.ones(4, 1), None, bits=4),
        GroupedMatrix.of(codes, scales, None, bits=8),
    ]
    assert PackedExperts.of([first, first]) is not None
    assert [PackedExperts.of([first, other]) for other in others] == [None] * len(others)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_dequantizes_the_experts_that_are_used(kind: str) -> None:
    experts, x = made_packed(kind, 6, 192, 64, 2), draw(5, 192)
    check(mixture(x, experts), mixture(x, plain(experts)), 1e-6)


CASES = {  # tokens, experts, hidden, intermediate, top_k
    "few tokens": (5, 6, 192, 64, 2),
    "many of one": (45, 2, 64, 96, 1),
    "no multiples": (9, 5, 96, 160, 3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_packed_kernels_equal_the_reference(kind: str, case: str, dtype: torch.dtype) -> None:
    """In float16 where 16 bits are meant: Triton's interpreter multiplies no bfloat16."""
    if (list(KINDS).index(kind) + list(CASES).index(case) + (dtype == torch.float32)) % 3:
        pytest.skip("a third of all combinations has each with each")
    num_tokens, *shape = CASES[case]
    experts, x = made_packed(kind, *shape), draw(num_tokens, shape[1])
    parts = grouped_triton.mixture(x.to(DEVICE, dtype), to_device(experts, dtype))
    check(parts.double().sum(0), mixture(x, plain(experts)), 1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens_take_a_dequantized_copy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_triton, "_MANY", 2)
    monkeypatch.setattr(packed_triton, "_MANY_FLOATS", 2)
    experts, x = made_packed(kind, 2, 96, 64, 1), draw(9, 96)
    on_device = to_device(experts, torch.float32)
    for matrices, expected in zip((on_device.gate_up, on_device.down), plain(experts).unpacked, strict=True):
        assert isinstance(matrices, PackedExperts)
        copy = packed_triton.dequantized(matrices, torch.ones(2, dtype=torch.int32, device=DEVICE), torch.float32)
        assert torch.equal(copy.cpu(), expected)
    monkeypatch.delattr(packed_triton, "multiply")
    check(grouped_triton.mixture(x.to(DEVICE), on_device).sum(0), mixture(x, plain(experts)), 1e-5)


@pytest.mark.parametrize("is_packed", [(True, True), (True, False), (False, True)])
def test_packed_experts_may_have_biases_and_clamped_gates(is_packed: tuple[bool, bool]) -> None:
    experts, x = made_packed("e2m1", 4, 64, 96, 2, is_packed=is_packed, has_biases=True), draw(7, 64)
    expected = mixture(x, plain(experts))
    check(mixture(x, experts), expected, 1e-6)
    parts = grouped_triton.mixture(x.to(DEVICE), to_device(experts, torch.float32))
    check(parts.double().sum(0), expected, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6, 192, 64, 2), (3, 96, 160, 3)])
def test_a_single_token_of_packed_experts_equals_the_reference(kind: str, shape: tuple[int, ...]) -> None:
    if (list(KINDS).index(kind) + shape[3]) % 2:
        pytest.skip("each kind has one shape")
    experts, residual = made_packed(kind, *shape), draw(1, shape[1])
    norm = draw(shape[1], seed=3)
    expected = residual + mixture(rms_norm(residual, norm, 1e-5), plain(experts))
    row = residual.to(DEVICE, copy=True)
    single_triton.mixture_add_(row, norm.to(DEVICE), 1e-5, to_device(experts, torch.float32), None, row)
    check(row, expected, 1e-5)


@pytest.mark.parametrize("is_packed", [(True, True), (True, False), (False, True)])
def test_a_single_token_of_packed_experts_may_have_biases(
    is_packed: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rows of more units than a program holds."""
    monkeypatch.setattr(packed_single_triton, "_MOST_UNITS", 2)
    experts, x = made_packed("e2m1", 4, 96, 160, 3, is_packed=is_packed, has_biases=True), draw(1, 96)
    row = torch.zeros_like(x).to(DEVICE)
    single_triton.mixture_add_(x.to(DEVICE), None, 1e-5, to_device(experts, torch.float32), None, row)
    check(row, mixture(x, plain(experts)), 1e-5)


def is_of_experts(module: str) -> bool:
    return ".experts." in module


LAYOUTS = [("awq", "mixtral"), ("gptq-8-bit", "qwen3-moe"), ("packed", "qwen2-moe"), ("mxfp4", "gpt-oss")]


@pytest.mark.parametrize(("layout", "family"), LAYOUTS)
def test_experts_stay_as_they_are_where_kernels_multiply_with_them(
    layout: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and cut among ranks."""
    monkeypatch.setattr(loader, "keeps_groups", lambda device: True)
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    folder, dense = tiny_quantized(tmp_path, layout, family, is_quantized=is_of_experts, **sizes)
    config, plain_config = (ModelConfig.from_pretrained(path) for path in (folder, dense))
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        ours, theirs = (
            loader._load_weights(its, torch.float32, torch.device("cpu"), shard).layers
            for its in (config, plain_config)
        )
        for layer, expected in zip(ours, theirs, strict=True):
            assert layer.experts is not None
            assert expected.experts is not None
            for its, numbers in zip(
                (layer.experts.gate_up, layer.experts.down), expected.experts.unpacked, strict=True
            ):
                assert isinstance(its, PackedExperts)
                assert its.nbytes < numbers.nbytes / 3
                found = [its.dequantized(expert, torch.float32) for expert in range(len(its))]
                assert torch.equal(torch.stack(found), numbers)
    decoder = load_decoder(config, dtype="float32")
    sequences = random_sequences(config.vocab_size)
    check_models(Paged(decoder, sequences, page_size=4).run(mixed(sequences)), reference_logits(dense, sequences))


@pytest.mark.parametrize("layout", ["gptq-order", "fp8-block", "mxfp4"])
def test_experts_that_no_kernel_reads_are_dequantized(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With columns in activation order, in blocks of 40, and a rank's part of 16 columns of 32."""
    monkeypatch.setattr(loader, "keeps_groups", lambda device: True)
    family, size = ("gpt-oss", 32) if layout == "mxfp4" else ("qwen3-moe", 64)
    sizes = {"intermediate_size": size, "moe_intermediate_size": size}
    folder, dense = tiny_quantized(tmp_path, layout, family, is_quantized=is_of_experts, **sizes)
    shard = Shard(1, 2) if layout == "mxfp4" else Shard()
    ours, theirs = (
        loader._load_weights(ModelConfig.from_pretrained(path), torch.float32, torch.device("cpu"), shard)
        for path in (folder, dense)
    )
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        assert layer.experts is not None
        assert expected.experts is not None
        assert isinstance(layer.experts.down, torch.Tensor)
        assert torch.equal(layer.experts.down, expected.experts.unpacked[1])


@pytest.mark.parametrize("is_packed", [True, False])
def test_experts_may_be_rounded_to_four_bits(
    is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `quantization="int4"`: the same numbers, packed or not."""
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path, "qwen3-moe", moe_intermediate_size=64))
    plain_experts = load_decoder(config, dtype="float32").weights.layers[0].experts
    monkeypatch.setattr(weights, "keeps_groups", lambda device: is_packed)
    experts = load_decoder(config, dtype="float32", quantization="int4").weights.layers[0].experts
    assert experts is not None
    assert plain_experts is not None
    assert isinstance(experts.gate_up, PackedExperts) == isinstance(experts.down, PackedExperts) == is_packed
    for its, numbers in zip((experts.gate_up, experts.down), plain_experts.unpacked, strict=True):
        for expert, matrix in enumerate(numbers):
            expected = GroupedMatrix.rounded(matrix).dequantized(torch.float32)
            assert torch.equal(matrix_of(its, expert, torch.float32), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "family"), [("mxfp4", "gpt-oss"), pytest.param("packed-zeros", "qwen2-moe", marks=pytest.mark.slow)]
)
def test_decoders_with_packed_experts_by_the_kernels_of_a_gpu(
    layout: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted: several tokens, and then one, with biases, clamped gates and sinks."""
    monkeypatch.setattr(loader, "keeps_groups", lambda device: True)
    sizes = {"num_hidden_layers": 2, "intermediate_size": 32, "shared_expert_intermediate_size": 32}
    folder, _ = tiny_quantized(tmp_path, layout, family, is_quantized=is_of_experts, **sizes)
    decoder = load_decoder(ModelConfig.from_pretrained(folder), dtype="float32")
    expected = forwarded(decoder, Decoder.forward)
    monkeypatch.setattr(decoder_module, "mixture", grouped_triton.mixture)
    torch.testing.assert_close(forwarded(decoder, Decoder.forward), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(forwarded(decoder, forward_single), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_experts_beside_latent_attention_stay_packed(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared ones too, each cut among ranks, unless they are not quantised."""
    options = {**ARCHITECTURES[architecture], "moe_intermediate_size": 64, "n_shared_experts": 2}
    dense = tiny_transformer(tmp_path / "dense", architecture, **options)
    folder = quantize_folder(tmp_path / "packed", dense, "packed", is_quantized=lambda module: "experts" in module)
    partly = quantize_folder(tmp_path / "partly", dense, "packed", is_quantized=lambda module: ".experts" in module)
    configs = [LatentConfig.from_pretrained(path) for path in (folder, partly, dense)]
    for is_kept, shards in ((True, (Shard(), Shard(0, 2), Shard(1, 2))), (False, (Shard(),))):
        monkeypatch.setattr(latent_loader, "keeps_groups", lambda device, is_kept=is_kept: is_kept)
        for shard in shards:
            ours, some, theirs = (
                latent_loader._load_weights(its, torch.float32, torch.device("cpu"), shard).layers[-1].experts
                for its in configs
            )
            assert ours is not None
            assert some is not None
            assert theirs is not None
            assert ours.is_packed == is_kept
            assert not some.is_packed
            for its, numbers in zip((ours.gate_up, ours.down), theirs.unpacked, strict=True):
                found = [matrix_of(its, expert, torch.float32) for expert in range(len(its))]
                assert torch.equal(torch.stack(found), numbers)


def test_experts_beside_delta_nets_stay_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"hidden_size": 96, "moe_intermediate_size": 64}
    dense, _ = tiny_hybrid(tmp_path / "dense", "next", **options)
    folder = quantize_folder(tmp_path / "packed", dense, "packed", is_quantized=is_of_experts)
    monkeypatch.setattr(hybrid_weights, "keeps_groups", lambda device: True)
    ours, theirs = (
        hybrid_weights.load(HybridConfig.from_pretrained(path), torch.float32, torch.device("cpu"))
        for path in (folder, dense)
    )
    assert sum(its.nbytes for its in ours.tensors()) < sum(its.nbytes for its in theirs.tensors())
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        assert isinstance(layer.mlp, SparseWeights)
        assert isinstance(expected.mlp, SparseWeights)
        assert layer.mlp.experts.is_packed
        x = draw(5, 96)
        check(mixture(x, layer.mlp.experts), mixture(x, expected.mlp.experts), 1e-5)
