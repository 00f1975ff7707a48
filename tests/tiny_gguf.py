"""GGUF files of tiny models, written with llama.cpp's own package, beside the Hugging Face folders that equal them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.tiny_models import tiny_checkpoint

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
}  # rows of whole blocks
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # bytes of a block where its two-byte scales begin


def tiny_gguf(
    folder: Path,
    family: str = "llama",
    kind: str = "F32",
    *,
    change: Callable[[GGUFWriter], None] = lambda writer: None,
    tokenizer: Tokenizer | None = None,
    **overrides: Any,
) -> tuple[Path, Path]:
    """A GGUF file whose matrices have that type, and a folder with the same numbers in float32.

    change: adds metadata or tensors. overrides: fields of config.json.
    """
    source = tiny_checkpoint(folder / "source", family, **overrides)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    architecture = family if family in ARCHITECTURES else "llama"
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], model.config.num_hidden_layers)
    writer = GGUFWriter(folder / "model.gguf", architecture)
    add_config(writer, model.config)
    random = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = parameter.numpy()
            heads = heads_of(name, model.config) if architecture == "llama" else 0
            values = turned(values, heads)
            stored, packed, read = quantized(values, kind if values.ndim > 1 else "F32", random)
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), packed, raw_dtype=stored)
            parameter.copy_(torch.from_numpy(turned_back(read, heads)))
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    change(writer)
    finish(writer)
    model.save_pretrained(folder / "same")
    return folder / "model.gguf", folder / "same"


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_config(writer: GGUFWriter, config: LlamaConfig) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def heads_of(name: str, config: LlamaConfig) -> int:
    """How many heads the rows belong to that llama.cpp orders in another way."""
    if "q_proj" in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if "k_proj" in name else 0


def turned(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Row i of a head's first half, then row i of its second half, and so on."""
    if not heads:
        return values
    dim = len(values) // heads
    order = [
        head * dim + half * (dim // 2) + i for head in range(heads) for i in range(dim // 2) for half in (0, 1)
    ]
    return np.ascontiguousarray(values[order])


def turned_back(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    if not heads:
        return values
    found = np.empty_like(values)
    found[turned(np.arange(len(values)), heads)] = values
    return found


def quantized(
    values: npt.NDArray[np.float32], kind: str, random: np.random.Generator
) -> tuple[Type, npt.NDArray[Any], npt.NDArray[np.float32]]:
    """The type, the blocks, and what these stand for. The package cannot make K types: their blocks are random."""
    stored = Type[kind]
    if kind not in _SCALES:
        packed = gguf.quantize(values, stored)
    else:
        size, block_bytes = gguf.GGML_QUANT_SIZES[stored]
        packed = random.integers(0, 256, (len(values), values.shape[1] // size, block_bytes), np.uint8)
        for at in _SCALES[kind]:
            scales = random.uniform(1e-4, 3e-4, packed.shape[:2]) / (5 if kind == "Q6_K" else 1)
            packed[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
        packed = packed.reshape(len(values), -1)
    return stored, packed, gguf.dequantize(packed, stored).reshape(values.shape)


def add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, pre: str = "gpt-2", num_tokens: int = 0) -> None:
    """What a converter writes of it: byte-level BPE or sentencepiece. num_tokens: as many, the last ones unused."""
    spec = json.loads(tokenizer.to_str())
    is_sentencepiece = spec["pre_tokenizer"] is None
    texts = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    num_tokens = max(num_tokens, max(texts) + 1)
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(num_tokens)]
    types = [gguf.TokenType.NORMAL if i in texts else gguf.TokenType.UNUSED for i in range(num_tokens)]
    for i, token in enumerate(tokens):
        if is_sentencepiece and len(token) == 6 and token.startswith("<0x"):
            types[i] = gguf.TokenType.BYTE
    for added in spec["added_tokens"]:
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in spec["model"]["merges"]]
    writer.add_tokenizer_model("llama" if is_sentencepiece else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if not is_sentencepiece:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(merge) for merge in merges])
        return
    rank: dict[str, int] = {}
    for i, merge in enumerate(merges):
        rank.setdefault("".join(merge), i)
    writer.add_token_scores([-float(rank.get(token, 0)) for token in tokens])
    writer.add_unk_token_id(tokens.index("<unk>"))
    writer.add_add_space_prefix("Prepend" in str(spec["normalizer"]))
