"""EAGLE-3 heads: random ones, as published files hold them, and what they draft by an oracle in plain torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 384,
    "draft_vocab_size": 200,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]},
}


def tiny_head(
    path: Path,
    *,
    seed: int = 0,
    prefix: str = "midlayer.",
    has_embedding: bool = False,
    biases: bool = False,
    **changes: Any,
) -> Path:
    """Write a random head to path, and return it. changes: of config.json; ... leaves a field out."""
    config = {key: value for key, value in {**HEAD, **changes}.items() if value is not ...}
    layer = config.get("transformer_layer_config") or config
    hidden, size = layer["hidden_size"], layer.get("intermediate_size_mlp", layer["intermediate_size"])
    head_dim = layer.get("head_dim", hidden // layer["num_attention_heads"])
    q_size, kv_size = (layer[f"num_{name}_heads"] * head_dim for name in ("attention", "key_value"))
    vocab_size = layer["vocab_size"]
    drafted = config.get("draft_vocab_size", vocab_size)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5 * 1.5

    def norm() -> torch.Tensor:
        return 1.0 + 0.3 * torch.randn(hidden, generator=generator)

    tensors = {
        "fc.weight": drawn(hidden, 3 * (config.get("target_hidden_size") or hidden)),
        f"{prefix}input_layernorm.weight": norm(),
        f"{prefix}hidden_norm.weight": norm(),
        f"{prefix}post_attention_layernorm.weight": norm(),
        f"{prefix}self_attn.q_proj.weight": drawn(q_size, 2 * hidden),
        f"{prefix}self_attn.k_proj.weight": drawn(kv_size, 2 * hidden),
        f"{prefix}self_attn.v_proj.weight": drawn(kv_size, 2 * hidden),
        f"{prefix}self_attn.o_proj.weight": drawn(hidden, q_size),
        f"{prefix}mlp.gate_proj.weight": drawn(size, hidden),
        f"{prefix}mlp.up_proj.weight": drawn(size, hidden),
        f"{prefix}mlp.down_proj.weight": drawn(hidden, size),
        "norm.weight": norm(),
        "lm_head.weight": drawn(drafted, hidden),
    }
    if biases:
        matrices = [name for name in tensors if "proj" in name or name.startswith("fc")]
        tensors |= {name.replace("weight", "bias"): drawn(tensors[name].shape[0]) for name in matrices}
    read = 3 * (config.get("target_hidden_size") or hidden)
    if config.get("norm_before_fc") or (config.get("eagle_config") or {}).get("norm_before_fc"):
        tensors["input_norm.weight"] = 1.0 + 0.3 * torch.randn(read, generator=generator)
    if config.get("fc_norm"):
        tensors |= {
            f"fc_norm.{i}.weight": 1.0 + 0.3 * torch.randn(read // 3, generator=generator) for i in range(3)
        }
    if has_embedding:
        tensors["embed_tokens.weight"] = 8.0 * drawn(vocab_size, hidden)
    if drafted < vocab_size:
        chosen = torch.randperm(vocab_size, generator=generator)[:drafted].sort().values
        tensors["d2t"] = chosen - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    if config.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, path / "model.safetensors")
    return path


class HeadOracle:
    """A head by its tensors' names alone, over whole sequences, without a cache."""

    def __init__(self, path: Path, embedding: torch.Tensor) -> None:
        """embedding: the target's."""
        self.config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        self.layer = self.config.get("transformer_layer_config") or self.config
        named = load_file(path / "model.safetensors")
        self.tensors = {
            name.replace("layers.0.", "midlayer."): its.float() if its.is_floating_point() else its
            for name, its in named.items()
        }
        self.embedding = self.tensors.get("embed_tokens.weight", embedding)

    def logits(
        self, hidden: torch.Tensor, ids: list[int], given: list[torch.Tensor], holes: Sequence[int] = ()
    ) -> list[torch.Tensor]:
        """[hidden_size] logits over the target's vocabulary, and the state before the last norm, of the last entry.
        hidden: [n, 3 * target hidden], of the first n tokens of ids. given: states of the tokens behind, but for the
        last. holes: entries that nothing attends to."""
        if "input_norm.weight" in self.tensors:
            hidden = self._norm("input_norm", hidden)
        if "fc_norm.0.weight" in self.tensors:
            hidden = torch.cat([self._norm(f"fc_norm.{i}", its) for i, its in enumerate(hidden.chunk(3, -1))], -1)
        features = torch.cat((self._linear("fc", hidden), *(its[None] for its in given)))
        assert len(ids) == len(features) + 1
        embedded = self._norm("midlayer.input_layernorm", self.embedding[torch.tensor(ids[1:])])
        normed = self._norm("midlayer.hidden_norm", features)
        residual = normed if self.config.get("norm_before_residual") else features
        x = torch.cat((embedded, normed), -1)
        x = residual + self._linear("midlayer.self_attn.o_proj", self._attend(x, [hole - 1 for hole in holes]))
        y = self._norm("midlayer.post_attention_layernorm", x)
        gate, up = (self._linear(f"midlayer.mlp.{name}_proj", y) for name in ("gate", "up"))
        x = x + self._linear("midlayer.mlp.down_proj", functional.silu(gate) * up)
        normed = self._norm("norm", x[-1:])
        last = normed @ self.tensors.get("lm_head.weight", self.embedding).T
        last = last[0] * self.config.get("logit_scale", 1.0)
        drafted = torch.arange(len(last)) + self.tensors.get("d2t", 0)
        return [
            torch.full((self.layer["vocab_size"],), -math.inf).index_copy(0, drafted, last),
            normed[0] if self.config.get("norm_output") else x[-1],
        ]

    def drafts(self, hidden: torch.Tensor, ids: list[int], most: int, holes: Sequence[int] = ()) -> list[int]:
        """The likeliest tokens behind ids, one after the other. hidden: of the first tokens. holes: see `logits`."""
        ids, given, count = list(ids), [], len(ids)
        while len(ids) < count + most:
            known = len(hidden) + len(given)
            logits, state = self.logits(hidden, ids[: known + 1], given, holes)
            given.append(state)
            if known + 1 == len(ids):
                ids.append(int(logits.argmax()))
        return ids[count:]

    def _attend(self, x: torch.Tensor, holes: list[int]) -> torch.Tensor:
        heads, kv_heads = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        head_dim = self.layer.get("head_dim", self.layer["hidden_size"] // heads)
        query, key, value = (
            self._linear(f"midlayer.self_attn.{name}_proj", x).view(len(x), -1, head_dim) for name in "qkv"
        )
        angles = torch.arange(len(x))[:, None] * self.layer.get("rope_theta", 10000.0) ** -(
            torch.arange(0, head_dim, 2) / head_dim
        )
        cos, sin = (torch.cat((f(angles), f(angles)), -1)[:, None] for f in (torch.cos, torch.sin))

        def turned(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat((-second, first), -1) * sin

        query, key = turned(query), turned(key).repeat_interleave(heads // kv_heads, 1)
        value = value.repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * head_dim**-0.5
        hidden = torch.ones(len(x), len(x)).triu(1).bool()
        if self.layer.get("layer_types") == ["sliding_attention"]:
            hidden |= torch.ones(len(x), len(x)).tril(-self.layer["sliding_window"]).bool()
        hidden[:, holes] = True
        hidden[holes, holes] = False  # whose outputs nobody reads
        scores = scores.masked_fill(hidden, -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]
