"""A GGUF file as the Hugging Face checkpoint it was made from: its config.json, and its tensors by their names there.

For Llama, llama.cpp orders the rows of queries and keys for a rope that turns neighbouring pairs. Here pairs are half a
head apart, as in the original checkpoint, and the rows get their order back. Of gpt-oss, experts in MXFP4 become the
blocks and scales of its own checkpoint, which kernels read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from sgl.errors import UnsupportedModel
from sgl.runtime.gguf import GgufFile
from sgl.runtime.model.families import FAMILIES, ExpertNames

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
_MIXTRAL = "MixtralForCausalLM"  # called llama, too
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
_ORIGINAL = "original_max_position_embeddings"
_YARN = {
    "original_context_length": _ORIGINAL,
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_OPTIONAL = {
    "gemma2": _WINDOW | _CAP | {"attn_logit_softcapping": "attn_logit_softcapping"},
    "gemma3": _WINDOW | _CAP | {"rope.freq_base_swa": "rope_local_base_freq"},
    "phi3": _WINDOW,
    "gpt-oss": _WINDOW,
}
_OF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
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
_GEMMAS = _INNER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_INNER_OF = {
    "gemma2": _GEMMAS,
    "gemma3": _GEMMAS,
    "olmo2": _GEMMAS,
    "phi3": _INNER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": _INNER | {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
}
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")
_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")  # of gpt-oss's messages; metadata name the first alone
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of those of 27B, which scale queries otherwise
_ROPE_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 8192}
_TURNED, _PART, _FACTOR = "rope.dimension_count", "partial_rotary_factor", "attention_factor"
_MAX_SIZE = 1 << 24
_BLOCK = 32  # numbers of MXFP4 that have a scale
_MOST_EXPERTS = 1 << 12


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
        self._architecture = _ARCHITECTURES[self._arch]
        if self._arch == "llama" and self._file.metadata.get("llama.expert_count"):
            self._architecture = _MIXTRAL
        self._names: dict[str, tuple[str, int | None]] = {}
        """By Hugging Face's, llama.cpp's, and which of its experts."""
        self._turned: dict[str, _Turned] = {}
        for name in self._tensors:
            experts = _EXPERTS.fullmatch(name)
            if experts and self._arch == "gpt-oss":
                self._add_turned(name, *experts.groups())
            elif experts and experts[3] == "weight" and FAMILIES[self._architecture].experts is not None:
                self._add_experts(name, experts[1], experts[2])
            elif (hf := self._hf_name(name)) is not None:
                self._names[hf] = name, None
            elif name != _ROPE_FACTORS and not (self._arch == "phi3" and name in (_LONG, _SHORT)):
                raise self._unsupported(f"the tensor {name:.100}")
        self.config = self._config()

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        """The file is closed when nothing refers to it any more."""

    def keys(self) -> list[str]:
        """Hugging Face's names."""
        return [*self._names, *self._turned]

    def get_tensor(self, name: str) -> torch.Tensor:
        """The whole tensor. Raises WeightsError."""
        return self.get_slice(name)[()]

    def get_slice(self, name: str) -> _Slice | _Turned:
        """What reads a part of it."""
        if name in self._turned:
            return self._turned[name]
        is_turned = self._arch == "llama" and re.search(r"\.[qk]_proj\.", name)
        adds_one = self._arch in ("gemma2", "gemma3") and name.endswith("norm.weight")
        own, expert = self._names[name]
        return _Slice(self._file, own, self.config["head_dim"] if is_turned else 0, expert, adds_one=adds_one)

    def types(self) -> str:
        """Of the tensors, with how many there are of each."""
        counts = Counter(tensor.type for tensor in self._tensors.values()).most_common()
        return "GGUF: " + ", ".join(f"{count} x {name}" for name, count in counts)

    def _hf_name(self, name: str) -> str | None:
        of_layers = _INNER_OF.get(self._arch, _INNER)
        if inner := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
            layer, its, kind = inner.groups()
            if its == "ffn_gate_inp" and f"blk.{layer}.ffn_gate_exps.weight" in self._tensors:
                return f"model.layers.{layer}.{self._names_of_experts.block}.{self._names_of_experts.router}.{kind}"
            if its == "attn_sinks" and its in of_layers:
                return f"model.layers.{layer}.{of_layers[its]}"
            return f"model.layers.{layer}.{of_layers[its]}.{kind}" if its in of_layers else None
        outer, _, kind = name.partition(".")
        return f"{_OUTER[outer]}.{kind}" if outer in _OUTER else None

    @property
    def _names_of_experts(self) -> ExpertNames:
        names = FAMILIES[self._architecture].experts
        assert names is not None, "it has experts"
        return names

    def _add_experts(self, name: str, layer: str, part: str) -> None:
        """Those of a layer that lie in one tensor [experts, out, in]."""
        names, shape = self._names_of_experts, self._tensors[name].shape
        if len(shape) != 3 or shape[0] > _MOST_EXPERTS:
            raise self._file.error(f"gives {name} the shape {list(shape)}, not that of experts", name)
        module = {"gate": names.gate, "up": names.up, "down": names.down}[part]
        for expert in range(shape[0]):
            self._names[f"model.layers.{layer}.{names.block}.experts.{expert}.{module}.weight"] = name, expert

    def _add_turned(self, name: str, layer: str, part: str, kind: str) -> None:
        """The same of gpt-oss, gates before their ups and transposed, or as blocks and scales."""
        if part == "up":
            return  # with their gates
        names = (name,) if part == "down" else (name, name.replace("gate", "up"))
        own = f"model.layers.{layer}.mlp.experts.{'down' if part == 'down' else 'gate_up'}_proj"
        for each in names:
            if each not in self._tensors:
                raise self._file.error(f"has {name} without {each}", each)
            shape, first = self._tensors[each].shape, self._tensors[name].shape
            if len(shape) != (2 if kind == "bias" else 3) or shape != first:
                raise self._file.error(f"gives {each} the shape {list(shape)}, not that of experts", each)
        if kind == "bias":
            self._turned[f"{own}_bias"] = _Turned(self._file, names, "bias")
        elif all(self._tensors[each].type == "MXFP4" for each in names):
            self._turned[f"{own}_blocks"] = _Turned(self._file, names, "blocks")
            self._turned[f"{own}_scales"] = _Turned(self._file, names, "scales")
        else:
            self._turned[own] = _Turned(self._file, names, "values")

    def _config(self) -> dict[str, Any]:
        """What config.json would say."""
        metadata, tensors, prefix = self._file.metadata, self._tensors, f"{self._arch}."
        own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        if "token_embd.weight" not in tensors:
            raise self._file.error("lacks the tensor token_embd.weight", "token_embd.weight")
        own.setdefault("attention.head_count_kv", own.get("attention.head_count"))
        if self._arch == "qwen3moe":
            own.setdefault("feed_forward_length", own.get("expert_feed_forward_length"))
        if self._arch == "gpt-oss":
            own["feed_forward_length"] = own.pop("expert_feed_forward_length", own.get("feed_forward_length"))
        if "attention.key_length" not in own:
            heads = self._size("attention.head_count", own.get("attention.head_count"))
            own["attention.key_length"] = self._size("embedding_length", own.get("embedding_length")) // heads
        config: dict[str, Any] = {hf: self._size(name, own.pop(name, None)) for name, hf in _SIZES.items()}
        head_dim = config["head_dim"]
        turned = own.pop("rope.dimension_count", head_dim)
        for name, length in (
            ("attention.value_length", own.pop("attention.value_length", head_dim)),
            (_TURNED, turned),
        ):
            if length != head_dim and not (self._arch == "phi3" and name == _TURNED and 0 < turned < head_dim):
                raise self._unsupported(f"{name}={length!r:.100} beside heads of {head_dim}")
        if config["num_hidden_layers"] > len(tensors):
            raise self._file.error(f"has {len(tensors)} tensors, too few for {config['num_hidden_layers']} layers")
        bos, *eos = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot", "eom"))
        config |= {
            "architectures": [self._architecture],
            "rms_norm_eps": self._number(own, "attention.layer_norm_rms_epsilon"),
            "vocab_size": self._size("vocab_size", tensors["token_embd.weight"].shape[0]),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "rope_parameters": self._rope(own, head_dim)
            | ({} if turned == head_dim else {_PART: turned / head_dim}),
            "bos_token_id": None if bos is None else self._size("bos_token_id", bos, 0),
            "eos_token_id": list(dict.fromkeys(self._size("eos_token_id", i, 0) for i in eos if i is not None)),
            "dtype": self._dtype(),
        }
        if FAMILIES[self._architecture].experts is not None:
            config |= {hf: self._size(name, own.pop(name, None)) for name, hf in _OF_EXPERTS.items() if name in own}
            config["norm_topk_prob"] = True
        if self._arch == "gpt-oss":
            config["num_local_experts"] = config.pop("num_experts", None)
            config["rope_parameters"]["truncate"] = False
            tokens = metadata.get("tokenizer.ggml.tokens")
            ends = [i for i, its in enumerate(tokens) if its in _ENDS] if isinstance(tokens, list) else []
            config["eos_token_id"] = list(dict.fromkeys(config["eos_token_id"] + ends))
            if any(name.endswith("_blocks") for name in self._turned):
                config["quantization_config"] = {"quant_method": "mxfp4"}
        if own.get("attention.sliding_window") == 0:  # there is none
            config["sliding_window"] = own.pop("attention.sliding_window") or None
        for name, hf in _OPTIONAL.get(self._arch, {}).items():
            if name in own:
                config[hf] = self._number(own, name)
        if self._arch in _LARGEST:
            is_largest = config["num_hidden_layers"] == _LARGEST[self._arch]
            scaled = config["hidden_size"] // config["num_attention_heads"] if is_largest else head_dim
            config |= {"query_pre_attn_scalar": scaled, "rope_theta": config["rope_parameters"]["rope_theta"]}
        if (original := config["rope_parameters"].get(_ORIGINAL)) is not None:
            config[_ORIGINAL] = original  # or else the family's
        if self._arch == "gemma3":  # of layers without a window
            config |= {"rope_scaling": config["rope_parameters"], "rope_parameters": None}
            pattern = own.pop("attention.sliding_window_pattern", None)
            if isinstance(pattern, list):  # whether each layer has one
                config["layer_types"] = [f"{'sliding' if its else 'full'}_attention" for its in pattern]
            elif pattern is not None:
                config["sliding_window_pattern"] = self._size("attention.sliding_window_pattern", pattern)
        if own.pop("attention.causal", True) is not True:
            raise self._unsupported("attention to later tokens")
        for name, value in own.items():
            if name not in _WITHOUT_EFFECT and value not in (0, "none"):
                raise self._unsupported(f"{name}={value!r:.100}")
        return config

    def _rope(self, own: dict[str, Any], head_dim: int) -> dict[str, Any]:
        own.setdefault("rope.freq_base", 10000.0)
        theta, kind = self._number(own, "rope.freq_base"), own.pop("rope.scaling.type", "none")
        if _LONG in self._tensors and _SHORT in self._tensors:
            return self._long_rope(own, theta, kind)
        if kind == "none":
            own.pop("rope.scaling.original_context_length", None)  # which converters write of every Phi
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

    def _long_rope(self, own: dict[str, Any], theta: float, kind: object) -> dict[str, Any]:
        if kind not in ("none", "longrope"):
            raise self._unsupported(f"rope.scaling.type={kind!r:.100} beside {_LONG}")
        rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": theta}
        for name, hf in {"original_context_length": _ORIGINAL, "attn_factor": _FACTOR}.items():
            if f"rope.scaling.{name}" in own:
                rope[hf] = self._number(own, f"rope.scaling.{name}")
        for name, hf in ((_LONG, "long_factor"), (_SHORT, "short_factor")):
            rope[hf] = self._file.read(name).astype(np.float64).ravel().tolist()
        return rope

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
    """Parts of a tensor. `head_dim`: of heads whose rows have llama.cpp's order, else 0. `expert`: whose part of it.
    `adds_one`: its numbers are one more than in the checkpoint."""

    def __init__(self, file: GgufFile, name: str, head_dim: int, expert: int | None, *, adds_one: bool) -> None:
        self._file = file
        self._name = name
        self._head_dim = head_dim
        self._expert = expert
        self._adds_one = adds_one

    def get_shape(self) -> tuple[int, ...]:
        shape = self._file.tensors[self._name].shape
        return shape if self._expert is None else shape[1:]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        rows: slice | npt.NDArray[np.int64] = part[0] if part else slice(None)
        num_rows = self.get_shape()[0]
        if self._head_dim:
            rows = np.arange(num_rows).reshape(-1, self._head_dim // 2, 2).swapaxes(1, 2).ravel()[rows]
        elif self._expert is not None:
            assert isinstance(rows, slice), "no heads"
            rows = slice(*(self._expert * num_rows + at for at in rows.indices(num_rows)[:2]))
        values = self._file.read(self._name, rows)[(slice(None), *part[1:])]
        return torch.from_numpy(values - 1 if self._adds_one else values)


class _Turned:
    """A layer's experts of gpt-oss as in its own checkpoint: each gate before its up, and [experts, in, out], or blocks
    [experts, out, in / 32, 16] of two numbers a byte and scales. `names`: of downs, or of gates and ups."""

    def __init__(
        self, file: GgufFile, names: tuple[str, ...], kind: Literal["bias", "values", "blocks", "scales"]
    ) -> None:
        self._file = file
        self._names = names
        self._kind = kind

    def get_shape(self) -> tuple[int, ...]:
        experts, n, *inner = self._file.tensors[self._names[0]].shape
        n *= len(self._names)
        if self._kind == "bias":
            return experts, n
        if self._kind == "values":
            return experts, inner[0], n
        return (experts, n, inner[0] // _BLOCK, *((_BLOCK // 2,) if self._kind == "blocks" else ()))

    def get_dtype(self) -> str:
        return "U8" if self._kind in ("blocks", "scales") else "F32"

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        first, count = self._read(self._names[0]), len(self._names)
        found = np.empty((len(first), count * first.shape[1], *first.shape[2:]), first.dtype)
        found[:, ::count] = first
        for at, name in enumerate(self._names[1:], 1):
            found[:, at::count] = self._read(name)
        whole = torch.from_numpy(found)
        return (whole.transpose(1, 2) if self._kind == "values" else whole)[part]

    def _read(self, name: str) -> npt.NDArray[Any]:
        shape = self._file.tensors[name].shape
        if self._kind in ("bias", "values"):
            return self._file.read(name).reshape(shape)
        packed = self._file.packed(name).reshape(*shape[:2], -1, 1 + _BLOCK // 2)
        if self._kind == "scales":
            return packed[..., 0].copy()
        even, odd = (
            packed[..., 1::2],
            packed[..., 2::2],
        )  # low halves have the first 16 numbers, high ones the others
        numbers: npt.NDArray[np.uint8] = np.concatenate((even & 15 | odd << 4, even >> 4 | odd & 0xF0), -1)
        return numbers
