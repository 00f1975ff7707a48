"""Models with mixtures of experts on sgl's own layers: checkpoints, configs and refusals; engines against transformers.

tests/test_models.py and tests/test_shards.py hold their logits and parts beside the dense families';
tests/test_moe_kernels.py the kernels.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tests.interpreter  # noqa: F401 - mends it
from sgl.errors import ConfigError, ModelError, WeightsError
from sgl.kernels.attention.base import AttentionStep
from sgl.kernels.attention.torch import TorchAttention
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.mixture import mixture
from sgl.runtime.config import EngineConfig
from sgl.runtime.devices import check_quantization
from sgl.runtime.engine import Engine
from sgl.runtime.model import decoder as decoder_module
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.layer_state import LayerState
from sgl.runtime.model.loader import load_decoder, num_weights
from sgl.runtime.model.shard import Shard
from sgl.runtime.model.tokens import Tokens
from sgl.runtime.model.weights import checkpoint_tensors
from tests.test_hf_models import MAX_NEW, OPTIONS, made_prompts
from tests.test_models import MODELS, Paged, check, mixed, random_sequences, reference_logits
from tests.test_shards import on_ranks
from tests.tiny_models import edit_json, tiny_checkpoint
from tests.tiny_quantized import tiny_quantized
from tests.tiny_transformers import ARCHITECTURES, tiny_transformer
from tests.transformers_reference import Reference

FAMILIES = ["mixtral", "qwen2-moe", "qwen3-moe"]
MIXTURES = [name for name, fields in MODELS.items() if fields.get("family") in FAMILIES]


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("MixtralForCausalLM", marks=pytest.mark.slow),
        pytest.param("Qwen2MoeForCausalLM", marks=pytest.mark.slow),
        "Qwen3MoeForCausalLM",
    ],
)
def test_engines_give_the_tokens_and_logprobs_of_transformers(architecture: str, tmp_path: Path) -> None:
    path = tiny_transformer(tmp_path, architecture, **ARCHITECTURES[architecture])
    reference, prompts = Reference(path, architecture), made_prompts()
    expected = [reference.greedy(prompt, MAX_NEW) for prompt in prompts]
    logprobs = [reference.logprobs(prompt) for prompt in prompts]
    greedy = {"temperature": 0.0, "max_new_tokens": MAX_NEW}
    ways: list[tuple[dict[str, Any], list[int]]] = [
        ({"chunked_prefill_size": -1}, [0, 1, 2, 3, 4, 5]),
        ({"chunked_prefill_size": 1, "page_size": 4}, [0, 3]),
        ({"chunked_prefill_size": 7, "page_size": 1}, [0, 1, 2, 3]),
        ({"chunked_prefill_size": 64, "page_size": 4, "max_total_tokens": 84}, [0, 1, 2, 3, 5]),
    ]
    for options, rows in ways:
        with Engine(str(path), **{**OPTIONS, "model_impl": "auto", **options}) as engine:
            assert engine.config.model_impl == "sgl"
            for order in (rows, rows[::-1]):  # the second time cached
                results = engine.generate(
                    input_ids=[prompts[row] for row in order],
                    sampling_params=greedy,
                    return_logprob=True,
                    logprob_start_len=0,
                )
                for row, result in zip(order, results, strict=True):
                    assert result["output_ids"] == expected[row]
                    given = torch.tensor([each[0] for each in result["meta_info"]["input_token_logprobs"][1:]])
                    torch.testing.assert_close(given, logprobs[row], atol=1e-4, rtol=0)
            if "max_total_tokens" in options and all(len(expected[row]) == MAX_NEW for row in rows):
                assert engine.get_server_info()["internal_states"][0]["retractions"] > 0
            forked = engine.generate(input_ids=prompts[0], sampling_params={**greedy, "n": 2})
            assert [result["output_ids"] for result in forked] == [expected[0]] * 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_checkpoints_may_hold_the_experts_of_a_layer_as_one_tensor(
    family: str, tp_size: int, tmp_path: Path
) -> None:
    paths = tmp_path / "one_by_one", tmp_path / "fused"
    for path, fused in zip(paths, (False, True), strict=True):
        tiny_checkpoint(path, family, fused_experts=fused)
    names = set(load_file(paths[1] / "model.safetensors"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    one_by_one, fused = (ModelConfig.from_pretrained(path) for path in paths)

    def loaded(config: ModelConfig) -> list[dict[str, torch.Tensor]]:
        if tp_size == 1:
            return [checkpoint_tensors(config, load_decoder(config).weights)]
        folder = tmp_path / f"ranks{config.path[-5:]}"
        return on_ranks(
            folder,
            tp_size,
            1,
            lambda ranks: checkpoint_tensors(config, load_decoder(config, ranks=ranks).weights, ranks.shard),
        )

    for ours, theirs in zip(loaded(one_by_one), loaded(fused), strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("layout", "family"),
    [("awq", "mixtral"), ("gptq", "qwen3-moe"), ("packed", "qwen2-moe"), ("fp8-block", "qwen3-moe")],
)
def test_quantized_experts_are_dequantized(layout: str, family: str, tmp_path: Path) -> None:
    shared = {"shared_expert_intermediate_size": 64} if family == "qwen2-moe" else {}
    folder, dense = tiny_quantized(tmp_path, layout, family, **shared)
    decoder = load_decoder(ModelConfig.from_pretrained(folder), dtype="float32")
    sequences = random_sequences(decoder.config.vocab_size)
    check(Paged(decoder, sequences, page_size=4).run(mixed(sequences)), reference_logits(dense, sequences))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_are_missing_or_of_another_shape_are_named(family: str, fused: bool, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, family, fused_experts=fused)
    config, file = ModelConfig.from_pretrained(path), path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "layers.1" in name and ".experts." in name)
    router = next(
        name for name in tensors if name.endswith("1.mlp.gate.weight") or "1.block_sparse_moe.gate" in name
    )
    for wrong in (name, router):
        for change in (None, tensors[wrong][:1].contiguous()):
            others = {its: tensor for its, tensor in tensors.items() if its != wrong}
            save_file(others if change is None else {**others, wrong: change}, file)
            with pytest.raises(WeightsError) as caught:
                load_decoder(config)
            assert caught.value.tensor == wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted_whole_and_as_a_token_is_multiplied(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, family)
    config = ModelConfig.from_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    weights = load_decoder(config).weights
    assert num_weights(config) == sum(tensor.numel() for tensor in tensors.values())
    assert sum(tensor.nbytes for tensor in weights.tensors()) == sum(tensor.nbytes for tensor in tensors.values())
    assert config.experts is not None
    share = config.experts.top_k / config.experts.num_experts
    multiplied = sum(
        tensor.numel() * (share if ".experts." in name else 1)
        for name, tensor in tensors.items()
        if tensor.dim() > 1 and "embed" not in name
    )
    assert weights.num_multiplied == round(multiplied)


@pytest.mark.parametrize(
    "name", [name if name == "qwen2-moe-some" else pytest.param(name, marks=pytest.mark.slow) for name in MIXTURES]
)
def test_decoders_by_the_kernels_of_a_gpu_equal_those_by_the_reference(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted: several tokens, and then one, which has kernels of its own."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed (pip install triton)")
    from sgl.kernels.moe import grouped_triton

    path = tiny_checkpoint(tmp_path, **MODELS[name], num_hidden_layers=2, hidden_size=32, num_key_value_heads=1)
    decoder = load_decoder(ModelConfig.from_pretrained(path))
    expected = forwarded(decoder, Decoder.forward)
    monkeypatch.setattr(decoder_module, "mixture", grouped_triton.mixture)
    torch.testing.assert_close(forwarded(decoder, Decoder.forward), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(forwarded(decoder, forward_single), expected, atol=1e-4, rtol=1e-4)


def forward_single(decoder: Decoder, tokens: Tokens, kv: KVCache, attention: Any) -> torch.Tensor:
    """`Decoder.forward`, of one token as on a GPU."""
    if len(tokens.ids) > 1:
        return Decoder.forward(decoder, tokens, kv, attention)
    state: LayerState = decoder.embed(tokens)
    with torch.inference_mode():
        return decoder._forward_single(state, kv, attention)


def forwarded(decoder: Decoder, forward: Any) -> torch.Tensor:
    """Hidden states of 5 tokens of a prompt and of one after them."""
    kv = KVCache(decoder.config, 2, 16, decoder.dtype, decoder.device)
    attention, outs = TorchAttention(decoder.attention_shape(16)), []
    for start, stop in ((0, 5), (5, 6)):
        ids = torch.arange(start, stop)
        attention.plan(
            AttentionStep(np.array([stop - start], np.int32), np.array([stop], np.int32), np.ones((1, 1), np.int32))
        )
        outs.append(forward(decoder, Tokens(ids + 7, ids, ids + 16), kv, attention))
    return torch.cat(outs)


def test_layers_without_experts_are_those_that_the_config_names(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen3-moe", mlp_only_layers=[1], num_hidden_layers=6, decoder_sparse_step=2)
    config = ModelConfig.from_pretrained(path)
    assert config.experts is not None
    assert [config.has_experts(layer) for layer in range(6)] == [False, False, False, True, False, True]
    assert [Shard(stage=1, stages=2).local(config).has_experts(layer) for layer in range(3)] == [True, False, True]
    decoder = load_decoder(config)
    assert [layer.experts is not None for layer in decoder.weights.layers] == list(config.experts.layers)
    assert decoder.first_layers() == [0, 3]


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mixtral", {"sliding_window": 20}, [20, 20, 20]),
        ("qwen2-moe", {"sliding_window": 20, "layer_types": ...}, [None, None, None]),
        ("qwen2-moe", {"sliding_window": 20, "use_sliding_window": True, "layer_types": ...}, [20, None, 20]),
        (
            "qwen2-moe",
            {"sliding_window": 20, "use_sliding_window": True, "layer_types": ..., "max_window_layers": 2},
            [20, None, None],
        ),
        ("qwen3-moe", {"sliding_window": 20}, [None, None, None]),
        ("qwen3-moe", {"sliding_window": 20, "use_sliding_window": True}, [20, 20, 20]),
    ],
)
def test_windows_are_those_of_the_family(
    family: str, changes: dict[str, Any], windows: list[int | None], tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path, family)
    edit_json(path / "config.json", **changes)
    assert list(ModelConfig.from_pretrained(path).windows) == windows


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 is more than num_local_experts 6"),
        ({"mlp_only_layers": "none"}, "'mlp_only_layers' is 'none', not a list of numbers"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' is 0, not a number above 0"),
        ({"norm_topk_prob": 1}, "'norm_topk_prob' is 1, neither true nor false"),
        ({"moe_intermediate_size": "32"}, "'moe_intermediate_size' is '32', not a number above 0"),
    ],
)
def test_configs_of_experts_that_cannot_be_say_why(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen3-moe")
    edit_json(path / "config.json", **changes)
    with pytest.raises(ModelError, match=words):
        ModelConfig.from_pretrained(path)


def test_the_number_of_experts_goes_by_two_names(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen3-moe")
    edit_json(path / "config.json", num_local_experts=..., num_experts=6)
    experts = ModelConfig.from_pretrained(path).experts
    assert experts is not None
    assert experts.num_experts == 6
    load_decoder(ModelConfig.from_pretrained(path))


@pytest.mark.parametrize(
    ("family", "overrides", "words"),
    [
        ("qwen3-moe", {"moe_intermediate_size": 33}, "has experts with an intermediate size of 33"),
        (
            "qwen2-moe",
            {"shared_expert_intermediate_size": 33},
            "has a shared expert with an intermediate size of 33",
        ),
        ("qwen3-moe", {"mlp_only_layers": [0], "intermediate_size": 33}, "an intermediate_size of 33"),
    ],
)
def test_experts_that_cannot_be_cut_are_refused(
    family: str, overrides: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path, family, **overrides))
    with pytest.raises(ConfigError, match=words):
        Shard(0, 2).check(config)


def test_a_dense_size_without_dense_layers_need_not_be_cut(tmp_path: Path) -> None:
    Shard(0, 2).check(ModelConfig.from_pretrained(tiny_checkpoint(tmp_path, "qwen3-moe", intermediate_size=33)))


def test_experts_in_eight_bits_are_refused(tmp_path: Path) -> None:
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path, "qwen3-moe"))
    options = EngineConfig(model_path=config.path, quantization="fp8")
    with pytest.raises(ConfigError, match="mixtures of experts") as caught:
        check_quantization(options, config, torch.device("cpu"))
    assert caught.value.option == "quantization"
    check_quantization(EngineConfig(model_path=config.path, quantization="int4"), config, torch.device("cpu"))
    options = EngineConfig(model_path=config.path, quantization="int4", tp_size=2)
    with pytest.raises(ConfigError, match="multiples of 32"):
        check_quantization(options, config, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 300, 2000])
@pytest.mark.parametrize(
    ("num_experts", "hidden", "size", "top_k"), [(128, 2048, 768, 8), (8, 1024, 1792, 2), (60, 1024, 352, 4)]
)
def test_mixtures_on_a_gpu_are_near_those_in_float32(
    num_tokens: int, num_experts: int, hidden: int, size: int, top_k: int
) -> None:
    from sgl.kernels.moe.single_triton import mixture_add_

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, device="cuda") * shape[-1] ** -0.5
        return drawn.bfloat16()

    experts = Experts(
        draw(num_experts, hidden) * 30,
        draw(num_experts, 2 * size, hidden),
        draw(num_experts, hidden, size),
        top_k,
        True,
    )
    wide = Experts(
        experts.router.cpu().float(), experts.gate_up.cpu().float(), experts.down.cpu().float(), top_k, True
    )
    x = draw(num_tokens, hidden) * hidden**0.5
    expected = mixture(x.cpu().float(), wide)
    actual = mixture(x, experts).float().sum(0).cpu()
    errors = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    assert (errors < 2e-2).float().mean() > 0.98  # of a few tokens, two experts' scores are as good as equal
    again = mixture(x, experts).float().sum(0).cpu()
    assert torch.equal(actual, again)
    if num_tokens == 1:
        residual = torch.zeros_like(x)
        mixture_add_(x, None, 1e-5, experts, None, residual)
        torch.testing.assert_close(residual.float().cpu(), actual, atol=2e-2, rtol=2e-2)
