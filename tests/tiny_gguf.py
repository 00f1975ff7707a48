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
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3-moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
}
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_SCALES |= dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"), (0,))
"""Bytes of a block where its two-byte scales begin."""
_SCALES["IQ1_M"] = ()  # in the highest bits of the last four pairs of bytes


def tiny_gguf(
    folder: Path,
    family: str = "llama",
    kind: str = "F32",
    *,
    change: Callable[[GGUFWriter], None] = lambda writer: None,
    tokenizer: Tokenizer | None = None,
    experts: str | None = None,
    **overrides: Any,
) -> tuple[Path, Path]:
    """A GGUF file whose matrices have that type, and a folder with the same numbers in float32.

    change: adds metadata or tensors. experts: another type, of experts. overrides: fields of config.json.
    """
    source = tiny_checkpoint(folder / "source", family, **overrides)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    architecture = family if family in ARCHITECTURES else "llama"
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], model.config.num_hidden_layers)
    writer = GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[ARCHITECTURES[architecture]])
    add_config(writer, model.config)
    random = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            heads = heads_of(name, model.config) if architecture == "llama" else 0
            for own, part in parts_of(names.get_name(name, (".weight", ".bias")), name, parameter, architecture):
                values = turned(part.numpy(), heads)
                more = 1 if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight") else 0
                its = experts if experts is not None and "_exps.weight" in own else kind
                is_matrix = values.ndim > 1 and not own.endswith("bias")
                stored, packed, read = quantized(values + more, its if is_matrix else "F32", random)
                writer.add_tensor(own, packed, raw_dtype=stored)
                part.copy_(torch.from_numpy(turned_back(read, heads)) - more)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    change(writer)
    finish(writer)
    model.save_pretrained(folder / "same")
    return folder / "model.gguf", folder / "same"


def parts_of(
    own: str | None, name: str, parameter: torch.Tensor, architecture: str
) -> list[tuple[str, torch.Tensor]]:
    """Tensors of a file, with views of a parameter: transformers has gates and ups of experts in one."""
    layer = name.removeprefix("model.layers.").split(".")[0]
    if own == f"blk.{layer}.attn_sinks":
        own += ".weight"
    if architecture == "gpt-oss" and ".experts." in name:  # [experts, in, out], with each gate before its up
        kind = "bias" if name.endswith("_bias") else "weight"
        its = parameter if kind == "bias" else parameter.transpose(1, 2)
        if "down_proj" in name:
            return [(f"blk.{layer}.ffn_down_exps.{kind}", its)]
        return [(f"blk.{layer}.ffn_{part}_exps.{kind}", its[:, at::2]) for at, part in enumerate(("gate", "up"))]
    if name.endswith("experts.gate_up_proj"):
        halves = parameter.chunk(2, 1)
        return [
            (f"blk.{layer}.ffn_{part}_exps.weight", its) for part, its in zip(("gate", "up"), halves, strict=True)
        ]
    if name.endswith("experts.down_proj"):
        own = f"blk.{layer}.ffn_down_exps.weight"
    assert own is not None, name
    return [(own, parameter)]


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
    part = (
        1.0
        if "full_attention" in config.rope_parameters
        else config.rope_parameters.get("partial_rotary_factor", 1.0)
    )
    writer.add_rope_dimension_count(int(head_dim * part))
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    experts = getattr(config, "num_local_experts", getattr(config, "num_experts", None))
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if (size := getattr(config, "moe_intermediate_size", None)) is not None:
            writer.add_expert_feed_forward_length(size)
    if config.model_type in ("gemma2", "gemma3_text", "phi3", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window or 0)
    for add, cap in (("attn", "attn_logit_softcapping"), ("final", "final_logit_softcapping")):
        if getattr(config, cap, None) is not None:
            getattr(writer, f"add_{add}_logit_softcapping")(getattr(config, cap))
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope") or config.model_type == "phi3":
        original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        writer.add_rope_scaling_orig_ctx_len(original)
    for which in ("long", "short") if rope["rope_type"] == "longrope" else ():
        writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))
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
    """The type, the blocks, and what these stand for. The package makes no K and IQ types: their blocks are random."""
    stored = Type[kind]
    if kind not in _SCALES:
        packed = gguf.quantize(values, stored)
    else:
        size, block_bytes = gguf.GGML_QUANT_SIZES[stored]
        packed = random.integers(0, 256, (len(values), values.shape[1] // size, block_bytes), np.uint8)
        for at in _SCALES[kind]:
            scales = random.uniform(1e-4, 3e-4, packed.shape[:2]) / (5 if kind in ("Q6_K", "IQ4_XS") else 1)
            packed[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
        if kind == "IQ1_M":
            bits = random.uniform(1e-4, 3e-4, packed.shape[:2]).astype(np.float16).view(np.uint16)
            nibbles = bits[..., None] >> np.array([0, 4, 8, 12], np.uint16) & 15
            packed[..., 49::2] = packed[..., 49::2] & 15 | nibbles.astype(np.uint8) << 4
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
