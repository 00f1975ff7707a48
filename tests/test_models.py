"""Every family against transformers, float32, through a paged cache: logits of every position, however cut up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from sgl.kernels.attention.base import AttentionStep
from sgl.kernels.attention.torch import TorchAttention
from sgl.kernels.layers import linear as linear_module
from sgl.kernels.layers.linear import PackedMatrix, linear, prepare
from sgl.kernels.layers.norm import add_rms_norm, rms_norm
from sgl.kernels.layers.rope import apply_rotary, rotary_rows
from sgl.runtime.model import decoder as decoder_module
from sgl.runtime.model import lora as lora_module
from sgl.runtime.model import part as part_module
from sgl.runtime.model import weights as weights_module
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.model.tokens import Tokens
from tests.tiny_models import tiny_checkpoint

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 9.0],
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-mha": {"num_key_value_heads": 4},
    "llama-gqa": {},
    "llama-mqa-tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama-wide-heads": {"head_dim": 32, "rms_norm_eps": 1e-3},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-theta": {"rope_theta": 500000.0},
    "llama-linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama-dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "llama-llama3": {"rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 64}},
    "llama-yarn": {"rope_scaling": YARN},
    "llama-yarn-options": {
        "rope_scaling": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.3}
    },
    "llama-yarn-mscale": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    "mistral": {"family": "mistral"},
    "mistral-window": {"family": "mistral", "sliding_window": 24, "head_dim": 8},
    "mistral-narrow": {"family": "mistral", "sliding_window": 1, "head_dim": 8},
    "qwen2": {"family": "qwen2"},
    "qwen2-mha-tied": {"family": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen2-window": {"family": "qwen2", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": {"family": "qwen3"},
    "qwen3-bias-yarn": {"family": "qwen3", "attention_bias": True, "rope_scaling": YARN, "head_dim": 8},
    "qwen3-layer-types": {
        "family": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mixtral": {"family": "mixtral"},
    "mixtral-window": {"family": "mixtral", "sliding_window": 24, "num_local_experts": 3, "num_experts_per_tok": 3},
    "qwen2-moe": {"family": "qwen2-moe"},
    "qwen2-moe-some": {
        "family": "qwen2-moe",
        "mlp_only_layers": [0],
        "qkv_bias": False,
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 2,
    },
    "qwen3-moe": {"family": "qwen3-moe"},
    "qwen3-moe-some": {
        "family": "qwen3-moe",
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 20,
    },
    "gemma2": {"family": "gemma2"},
    "gemma2-without-caps": {
        "family": "gemma2",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "gemma3": {"family": "gemma3", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "gemma3-wide-window": {"family": "gemma3", "sliding_window": 4096, "final_logit_softcapping": 3.0},
    "phi3": {"family": "phi3"},
    "phi3-partial-window": {"family": "phi3", "partial_rotary_factor": 0.75, "sliding_window": 20},
    "phi3-longrope": {"family": "phi3", "rope_scaling": LONGROPE, "original_max_position_embeddings": 256},
    "olmo2": {"family": "olmo2"},
    "olmo2-mha-bias": {"family": "olmo2", "num_key_value_heads": 4, "attention_bias": True},
    "glm": {"family": "glm", "tie_word_embeddings": True},
    "glm4": {"family": "glm4"},
    "gpt-oss": {"family": "gpt-oss"},
    "gpt-oss-all-experts": {"family": "gpt-oss", "num_experts_per_tok": 4, "attention_bias": False},
    "glm4-whole-rope": {"family": "glm4", "partial_rotary_factor": 1.0, "attention_bias": False},
}
BROADER = {
    *("gemma2-without-caps", "gemma3-wide-window", "phi3", "phi3-longrope", "olmo2-mha-bias", "glm"),
    *("glm4-whole-rope", "gpt-oss-all-experts"),
}
"""Whose parts only slow tests compare."""
REAL = ["stories260K", "stories260K-qwen2", "babyllama-105"]

Step = list[tuple[int, int]]
"""(sequence, how many of its tokens), each sequence at most once."""


class Paged:
    """A decoder over random pages, fed some sequences step by step."""

    def __init__(self, decoder: Decoder, sequences: list[list[int]], page_size: int, seed: int = 0) -> None:
        self.decoder = decoder
        self.sequences = sequences
        self.done = [0] * len(sequences)
        rng = np.random.default_rng(seed)
        max_pages = max(-(-len(sequence) // page_size) for sequence in sequences)
        pages = rng.permutation(len(sequences) * max_pages) + 1
        self.page_table = pages.reshape(len(sequences), max_pages).astype(np.int32)
        self.kv = KVCache(decoder.config, pages.size + 1, page_size, decoder.dtype, decoder.device)
        self.attention = TorchAttention(decoder.attention_shape(page_size))
        self.logits = [torch.empty(0) for _ in sequences]  # of every position done so far

    def step(self, rows: Step) -> None:
        device = self.decoder.device
        chosen = [sequence for sequence, _ in rows]
        q_lens = np.array([count for _, count in rows], np.int32)
        kv_lens = np.array([self.done[sequence] + count for sequence, count in rows], np.int32)
        spans = [range(kv - q, kv) for q, kv in zip(q_lens.tolist(), kv_lens.tolist(), strict=True)]
        ids = [self.sequences[row][p] for row, span in zip(chosen, spans, strict=True) for p in span]
        page_size = self.kv.page_size
        slots = [
            int(self.page_table[row, p // page_size]) * page_size + p % page_size
            for row, span in zip(chosen, spans, strict=True)
            for p in span
        ]
        table = self.page_table[chosen]
        self.attention.plan(AttentionStep(q_lens, kv_lens, table))
        positions = torch.tensor([p for span in spans for p in span], device=device)
        tokens = Tokens(torch.tensor(ids, device=device), positions, torch.tensor(slots, device=device))
        hidden = self.decoder.forward(tokens, self.kv, self.attention)
        for row, logits in zip(chosen, self.decoder.logits(hidden).cpu().split(q_lens.tolist()), strict=True):
            self.logits[row] = torch.cat((self.logits[row], logits))
        for row, kv_len in zip(chosen, kv_lens.tolist(), strict=True):
            self.done[row] = kv_len

    def run(self, steps: Iterator[Step]) -> list[torch.Tensor]:
        for rows in steps:
            self.step(rows)
        return self.logits


def at_once(sequences: list[list[int]]) -> Iterator[Step]:
    yield [(index, len(sequence)) for index, sequence in enumerate(sequences)]


def in_chunks(sequences: list[list[int]], size: int) -> Iterator[Step]:
    for start in range(0, max(map(len, sequences)), size):
        yield [(i, min(size, len(s) - start)) for i, s in enumerate(sequences) if len(s) > start]


def mixed(sequences: list[list[int]], seed: int = 0) -> Iterator[Step]:
    """Decodes of some beside chunks of others, in any order."""
    rng = random.Random(seed)
    left = [len(sequence) for sequence in sequences]
    while any(left):
        rows = [(i, min(left[i], rng.choice([1, 1, 1, 7, 30]))) for i in range(len(left)) if left[i]]
        rows = rng.sample(rows, rng.randint(1, len(rows)))
        for index, count in rows:
            left[index] -= count
        yield rows


def random_sequences(vocab_size: int, lengths: tuple[int, ...] = (50, 1, 90, 33)) -> list[list[int]]:
    """The last one shares its first 20 tokens with the first."""
    rng = random.Random(1)
    sequences = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    sequences[-1][:20] = sequences[0][:20]
    return sequences


def reference_logits(path: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([sequence])).logits[0] for sequence in sequences]


def check(actual: list[torch.Tensor], expected: list[torch.Tensor], device: str = "cpu") -> None:
    # A GPU sums in another order: at logits of 24 that alone makes 1e-4.
    rtol = 0 if device == "cpu" else 1e-5
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=rtol)
        best = theirs.topk(2).values
        clear = best[:, 0] - best[:, 1] > 2e-4  # a closer race may go either way
        assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])


@pytest.mark.parametrize("name", MODELS)
def test_random_models_equal_transformers(
    name: str, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "_LEAST_PACKED", 0)
    monkeypatch.setattr(linear_module, "MOST_PLAIN", 0)
    path = tiny_checkpoint(tmp_path, **MODELS[name])
    decoder = load_decoder(ModelConfig.from_pretrained(path), device=device, dtype="float32")
    sequences = random_sequences(decoder.config.vocab_size)
    expected = reference_logits(path, sequences)
    check(Paged(decoder, sequences, page_size=16).run(at_once(sequences)), expected, device)
    check(Paged(decoder, sequences, page_size=1).run(mixed(sequences)), expected, device)
    check(Paged(decoder, sequences, page_size=4).run(mixed(sequences, seed=1)), expected, device)


@pytest.mark.parametrize("name", REAL)
def test_trained_models_equal_transformers(name: str, checkpoint: Callable[[str], Path], device: str) -> None:
    path = checkpoint(name)
    decoder = load_decoder(ModelConfig.from_pretrained(path), device=device, dtype="float32")
    sequences = random_sequences(decoder.config.vocab_size, lengths=(70, 1, 130, 40))
    expected = reference_logits(path, sequences)
    for chunk in (1, 7, 64):
        check(Paged(decoder, sequences, page_size=4).run(in_chunks(sequences, chunk)), expected, device)
    check(Paged(decoder, sequences, page_size=16).run(mixed(sequences)), expected, device)


@pytest.mark.parametrize(("max_positions", "context_length"), [(64, 256), (512, 512)])
def test_a_context_is_as_long_as_the_rope_or_the_config_says(
    max_positions: int, context_length: int, tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path, max_position_embeddings=max_positions, rope_scaling=YARN)
    assert ModelConfig.from_pretrained(path).context_length == context_length


def test_dynamic_rope_beyond_the_original_context_equals_transformers_token_by_token(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0}
    path = tiny_checkpoint(tmp_path, max_position_embeddings=32, rope_scaling=rope)
    config = ModelConfig.from_pretrained(path)
    assert config.context_length == 128
    sequence = random_sequences(config.vocab_size, lengths=(80, 40))[0]
    reference = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()
    with torch.inference_mode():
        out = reference(torch.tensor([sequence[:20]]), use_cache=True)
        expected = [out.logits[0]]
        for token in sequence[20:]:
            out = reference(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            expected.append(out.logits[0])
    decoder = load_decoder(config)
    for chunk in (1, 13, 80):  # transformers itself has no one answer for the larger ones
        check(Paged(decoder, [sequence], page_size=4).run(in_chunks([sequence], chunk)), [torch.cat(expected)])


def test_rows_sharing_pages_of_a_long_prefix_equal_transformers(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, num_attention_heads=8, num_key_value_heads=4, head_dim=16)
    decoder = load_decoder(ModelConfig.from_pretrained(path))
    prefix = random_sequences(decoder.config.vocab_size, lengths=(130, 20))[0]
    rng = random.Random(2)
    sequences = [[*prefix[:128], *(rng.randrange(384) for _ in range(5 + index))] for index in range(20)]
    paged = Paged(decoder, sequences, page_size=16)
    paged.step([(0, 128)])
    paged.page_table[:, :8] = paged.page_table[0, :8]
    paged.done = [128] * len(sequences)
    for start in range(25):
        rows = [(i, 1) for i, s in enumerate(sequences) if len(s) > 128 + start]
        if rows:
            paged.step(rows)
    expected = reference_logits(path, sequences)
    paged.logits[0] = paged.logits[0][128:]
    check(paged.logits, [logits[128:] for logits in expected])


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2"])
def test_bfloat16_stays_close_to_float32(family: str, tmp_path: Path, device: str) -> None:
    path = tiny_checkpoint(tmp_path, family)
    config = ModelConfig.from_pretrained(path)
    sequences = random_sequences(config.vocab_size)
    (exact, *_), (rounded, *_) = (
        Paged(load_decoder(config, device=device, dtype=dtype), sequences, 16).run(mixed(sequences))
        for dtype in ("float32", "bfloat16")
    )
    assert rounded.dtype == torch.float32
    assert (exact - rounded).abs().mean() < 0.05 * exact.abs().mean()


@pytest.mark.parametrize("wanted", [[], [0], [4, 1]])
def test_only_wanted_tokens_come_out_and_all_are_cached(wanted: list[int], tmp_path: Path, device: str) -> None:
    decoder = load_decoder(ModelConfig.from_pretrained(tiny_checkpoint(tmp_path)), device=device)
    ids = torch.arange(5, device=device)
    outs, caches = [], []
    for some in (None, torch.tensor(wanted, dtype=torch.int64, device=device)):
        kv = KVCache(decoder.config, 2, 16, decoder.dtype, decoder.device)
        attention = TorchAttention(decoder.attention_shape(16))
        length = np.array([5], np.int32)
        attention.plan(AttentionStep(length, length, np.ones((1, 1), np.int32)))
        outs.append(decoder.forward(Tokens(ids, ids, ids + 16, some), kv, attention))
        caches.append(torch.stack(kv.keys + kv.values))
    torch.testing.assert_close(outs[1], outs[0][wanted])
    torch.testing.assert_close(caches[1], caches[0])


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_transformers_to_the_bit(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, 48, dtype=dtype)
    reference = LlamaRMSNorm(48, eps=1e-5)
    reference.weight.data = torch.randn(48, dtype=dtype)
    with torch.inference_mode():
        assert torch.equal(rms_norm(x, reference.weight, 1e-5), reference(x))
        total = x + residual
        assert torch.equal(add_rms_norm(x, residual, reference.weight, 1e-5), reference(total))
        assert torch.equal(residual, total)


def test_products_of_all_numbers_of_rows_are_met(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each of a layer's matrices and, as many as may be sampled, the output's."""
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path, "qwen2"))
    model = load_decoder(config, device=device, dtype="bfloat16")
    layer = model.weights.layers[0]
    matrices = {"qkv": layer.qkv, "output": layer.output, "gate_up": layer.gate_up, "down": layer.down}
    names = {id(matrix): name for name, matrix in matrices.items()}
    met: dict[str, set[int]] = {}

    def noting(multiply: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: torch.Tensor, matrix: Any, *rest: Any, **options: Any) -> Any:
            met.setdefault(names.get(id(matrix), "logits"), set()).add(len(x))
            return multiply(x, matrix, *rest, **options)

        return call

    for module, name in ((decoder_module, "linear"), (decoder_module, "linear_add"), (lora_module, "linear")):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: noting(lambda x, _: logits(x))(hidden, None))
    monkeypatch.setattr(part_module, "_EACH", 40)
    model.warm_up_gemms(100, 300)
    sizes = {*range(1, 41), 64, 96, 100, 128, 160, 192, 224, 256, 288, 300}
    assert met == dict.fromkeys(matrices, sizes) | {"logits": {size for size in sizes if size <= 100}}
    met.clear()
    model.warm_up_gemms(3, 2)  # more rows than tokens of prompts
    assert met == {name: {1, 2, 3} for name in (*matrices, "logits")}


@pytest.mark.parametrize(("family", "takes_parts"), [("llama", True), ("qwen3", True), ("olmo2", False)])
def test_captured_steps_rotate_parts_of_products(
    tmp_path: Path, device: str, family: str, takes_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where a norm over all heads comes first."""

    def in_parts(
        x: torch.Tensor, matrix: Any, bias: torch.Tensor | None, *, has_parts: bool = False
    ) -> torch.Tensor | None:
        assert has_parts is takes_parts
        product = linear(x, matrix, bias)
        return torch.stack((product - 1.0, torch.ones_like(product))) if has_parts else None

    monkeypatch.setattr(decoder_module, "linear_overlapped", in_parts)
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path, family))
    decoder = load_decoder(config, device=device)
    ids = torch.tensor([3, 1, 2], device=device)
    found = []
    for captured in (False, True):
        kv = KVCache(config, 2, 16, decoder.dtype, decoder.device)
        for its in (*kv.keys, *kv.values):
            its.zero_()
        state = decoder.embed(Tokens(ids, ids + 4, ids + 16))
        found.append((decoder.before_attention(0, state, kv, captured=captured), kv.keys[0], kv.values[0]))
        assert state.overlaps is (captured and takes_parts)
    for plain, summed in zip(*found, strict=True):
        assert plain.any()
        torch.testing.assert_close(summed, plain, rtol=1e-4, atol=1e-5)


def test_rotation_equals_transformers() -> None:
    table = torch.randn(40, 16)
    positions = torch.tensor([3, 39, 0, 7])
    query, key = torch.randn(4, 6, 16), torch.randn(4, 2, 16)
    cos, sin = (half.repeat(1, 2)[positions] for half in table.chunk(2, dim=-1))
    expected = torch.cat(apply_rotary_pos_emb(query, key, cos, sin), dim=1)
    actual = apply_rotary(torch.cat((query, key), dim=1), *rotary_rows(table, positions, torch.float32))
    torch.testing.assert_close(actual, expected)


def test_a_token_takes_as_many_bytes_as_the_cache_allocates(tmp_path: Path) -> None:
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path, "qwen3"))
    kv = KVCache(config, num_pages=3, page_size=4, dtype=torch.float16, device=torch.device("cpu"))
    allocated = sum(tensor.nbytes for tensor in [*kv.keys, *kv.values])
    assert allocated == 3 * 4 * KVCache.bytes_per_token(config, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 16, 17, 130, 512, 513, 1100])
def test_packed_matrices_multiply_as_others(rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, matrix, bias = (torch.randn(shape).to(dtype) for shape in ((rows, 2 * 96), (40, 96), (40,)))
    x = x[:, ::2]
    if not PackedMatrix.can_hold(matrix):
        pytest.skip(f"oneDNN packs no {dtype} here")
    packed = PackedMatrix.of(matrix)
    assert (packed.plain is None) == (dtype != torch.float32)
    expected = linear(x.float(), matrix.float(), bias.float() if has_bias else None)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-1
    for its in (packed, replace(packed, plain=None)):
        actual = linear(x, its, bias if has_bias else None)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("num_threads", "most"), [(1, 22), (4, 37)])
def test_onednn_meets_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch, num_threads: int, most: int) -> None:
    """It keeps half a megabyte for each; those up to what was prepared are met then."""
    if not PackedMatrix.can_hold(torch.empty(8, 8)):
        pytest.skip("oneDNN packs nothing here")
    met: set[int] = set()

    def product(x: torch.Tensor, *_: object) -> torch.Tensor:
        met.add(len(x))
        return x

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", product)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(linear_module, "_HAS_THREADS", True)
    matrix = PackedMatrix(torch.empty(1, 1), None)
    prepare(matrix, None, 66)
    prepared = set(met)
    for num_rows in range(1, 8193):
        if num_rows == 67:
            assert met == prepared
        x = torch.arange(num_rows, dtype=torch.float32)[:, None]
        assert torch.equal(linear(x, matrix, None), x)
    assert len(met) == most
    assert max(met) == 512


@pytest.mark.parametrize("tied", [False, True])
def test_packing_holds_nothing_twice_but_a_small_tied_head(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not PackedMatrix.can_hold(torch.empty(8, 8)):
        pytest.skip("oneDNN packs nothing here")
    monkeypatch.setattr(weights_module, "_LEAST_PACKED", 0)
    monkeypatch.setattr(linear_module, "MOST_PLAIN", 0)
    config = ModelConfig.from_pretrained(tiny_checkpoint(tmp_path, tie_word_embeddings=tied))
    for limit in (0, 1 << 20):
        monkeypatch.setattr(weights_module, "MAX_HELD_TWICE", limit)
        weights = load_decoder(config, load_format="dummy").weights
        once = weights_module.allocate_weights(config, torch.float32, torch.device("cpu"), tied=tied)
        again = weights.embedding.nbytes if tied and limit else 0
        assert sum(its.nbytes for its in weights.tensors()) == sum(its.nbytes for its in once.tensors()) + again
        assert weights.num_multiplied == once.num_multiplied
        assert isinstance(weights.lm_head, PackedMatrix) == (not tied or limit > 0)
        assert all(isinstance(layer.down, PackedMatrix) for layer in weights.layers)
