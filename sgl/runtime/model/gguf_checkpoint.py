"""A GGUF file as the Hugging Face checkpoint it was made from: its config.json, and its tensors by their names there.

For Llama, llama.cpp orders the rows of queries and keys for a rope that turns neighbouring pairs. Here pairs are half a
head apart, as in the original checkpoint, and the rows get their order back.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl.errors import UnsupportedModel
from sgl.runtime.gguf import GgufFile

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
_YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_WITHOUT_EFFECT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MAX_SIZE = 1 << 24


class GgufCheckpoint:
    """Opened as `safetensors.safe_open` opens a file. All tensors are read as float32."""

    def __init__(self, path: str) -> None:
        """Raises WeightsError, and UnsupportedModel for other architectures."""
        self._file = GgufFile(path)
        self._tensors = self._file.tensors
        self._arch = str(self._file.metadata.get("general.architecture"))
        if self._arch not in _ARCHITECTURES:
            names = ", ".join(_ARCHITECTURES)
            raise self._unsupported(f"GGUF of another architecture than {names} (serve its folder of safetensors)")
        self._names: dict[str, str] = {}  # Hugging Face's and llama.cpp's
        for name in self._tensors:
            if (hf := _hf_name(name)) is not None:
                self._names[hf] = name
            elif name != _ROPE_FACTORS:
                raise self._unsupported(f"the tensor {name:.100}")
        self.config = self._config()

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        """The file is closed when nothing refers to it any more."""

    def keys(self) -> list[str]:
        """Hugging Face's names."""
        return list(self._names)

    def get_tensor(self, name: str) -> torch.Tensor:
        """The whole tensor. Raises WeightsError."""
        return self.get_slice(name)[()]

    def get_slice(self, name: str) -> _Slice:
        """What reads a part of it."""
        is_turned = self._arch == "llama" and re.search(r"\.[qk]_proj\.", name)
        return _Slice(self._file, self._names[name], self.config["head_dim"] if is_turned else 0)

    def types(self) -> str:
        """Of the tensors, with how many there are of each."""
        counts = Counter(tensor.type for tensor in self._tensors.values()).most_common()
        return "GGUF: " + ", ".join(f"{count} x {name}" for name, count in counts)

    def _config(self) -> dict[str, Any]:
        """What config.json would say."""
        metadata, tensors, prefix = self._file.metadata, self._tensors, f"{self._arch}."
        own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        if "token_embd.weight" not in tensors:
            raise self._file.error("lacks the tensor token_embd.weight", "token_embd.weight")
        own.setdefault("attention.head_count_kv", own.get("attention.head_count"))
        if "attention.key_length" not in own:
            heads = self._size("attention.head_count", own.get("attention.head_count"))
            own["attention.key_length"] = self._size("embedding_length", own.get("embedding_length")) // heads
        config: dict[str, Any] = {hf: self._size(name, own.pop(name, None)) for name, hf in _SIZES.items()}
        head_dim = config["head_dim"]
        for name in ("attention.value_length", "rope.dimension_count"):
            if (length := own.pop(name, head_dim)) != head_dim:
                raise self._unsupported(f"{name}={length!r:.100} beside heads of {head_dim}")
        if config["num_hidden_layers"] > len(tensors):
            raise self._file.error(f"has {len(tensors)} tensors, too few for {config['num_hidden_layers']} layers")
        bos, *eos = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot", "eom"))
        config |= {
            "architectures": [_ARCHITECTURES[self._arch]],
            "rms_norm_eps": self._number(own, "attention.layer_norm_rms_epsilon"),
            "vocab_size": self._size("vocab_size", tensors["token_embd.weight"].shape[0]),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "rope_parameters": self._rope(own, head_dim),
            "bos_token_id": None if bos is None else self._size("bos_token_id", bos, 0),
            "eos_token_id": list(dict.fromkeys(self._size("eos_token_id", i, 0) for i in eos if i is not None)),
            "dtype": self._dtype(),
        }
        if own.pop("attention.causal", True) is not True:
            raise self._unsupported("attention to later tokens")
        for name, value in own.items():
            if name not in _WITHOUT_EFFECT and value not in (0, "none"):
                raise self._unsupported(f"{name}={value!r:.100}")
        return config

    def _rope(self, own: dict[str, Any], head_dim: int) -> dict[str, Any]:
        own.setdefault("rope.freq_base", 10000.0)
        theta, kind = self._number(own, "rope.freq_base"), own.pop("rope.scaling.type", "none")
        if kind not in ("none", "linear", "yarn"):
            raise self._unsupported(f"rope.scaling.type={kind!r:.100}")
        rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta}
        names = {} if kind == "none" else {"factor": "factor"} | (_YARN if kind == "yarn" else {})
        for name, hf in names.items():
            if f"rope.scaling.{name}" in own:
                rope[hf] = self._number(own, f"rope.scaling.{name}")
        if _ROPE_FACTORS not in self._tensors:
            return rope
        # of llama3's rope there is only what it divides each frequency by
        factors = self._file.read(_ROPE_FACTORS).astype(np.float64).ravel()
        turns = theta ** (np.arange(head_dim // 2) * -2 / head_dim) / (2 * math.pi) * 8192
        blend = np.clip((turns - 1) / (4 - 1), 0, 1)
        divisors = 1 / ((1 - blend) / factors.max(initial=1) + blend)
        if kind != "none" or len(factors) != len(divisors) or not np.allclose(factors, divisors, 1e-4, 0):
            raise self._unsupported(f"a rope by {_ROPE_FACTORS} that is not Llama 3's")
        return rope | _LLAMA3 | {"rope_type": "llama3", "factor": float(factors.max())}

    def _dtype(self) -> str:
        """A GPU's default, by the type of most matrices."""
        kinds = Counter(its.type for its in self._tensors.values() if len(its.shape) > 1) or {"F32": 1}
        return {"F32": "float32", "F16": "float16"}.get(max(kinds, key=kinds.__getitem__), "bfloat16")

    def _size(self, name: str, value: Any, least: int = 1) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_SIZE:
            raise self._file.error(f"has {name}={value!r:.100}, not a whole number from {least} to {_MAX_SIZE}")
        return value

    def _number(self, own: dict[str, Any], name: str) -> float:
        value = own.pop(name, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._file.error(f"has {name}={value!r:.100}, not a number above 0")
        return value

    def _unsupported(self, feature: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self._file.path}: {feature} is not supported ({self._arch:.100})",
            architecture=_ARCHITECTURES.get(self._arch, self._arch),
            supported=tuple(_ARCHITECTURES),
            path=self._file.path,
        )


class _Slice:
    """Parts of a tensor. `head_dim`: of heads whose rows have llama.cpp's order, else 0."""

    def __init__(self, file: GgufFile, name: str, head_dim: int) -> None:
        self._file = file
        self._name = name
        self._head_dim = head_dim

    def get_shape(self) -> tuple[int, ...]:
        return self._file.tensors[self._name].shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        rows: slice | npt.NDArray[np.int64] = part[0] if part else slice(None)
        if self._head_dim:
            rows = np.arange(self.get_shape()[0]).reshape(-1, self._head_dim // 2, 2).swapaxes(1, 2).ravel()[rows]
        return torch.from_numpy(self._file.read(self._name, rows)[(slice(None), *part[1:])])


def _hf_name(name: str) -> str | None:
    if (inner := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)) and inner[2] in _INNER:
        return f"model.layers.{inner[1]}.{_INNER[inner[2]]}.{inner[3]}"
    outer, _, kind = name.partition(".")
    return f"{_OUTER[outer]}.{kind}" if outer in _OUTER else None
