"""The network in training: a Llama whose parameters bear the names of Hugging Face checkpoints.

Only what training needs: whole sequences, padded at the right, no cache. `config` is the checkpoint's config.json.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tools.train_embedded.tokenizer import CONTEXT, VOCAB_SIZE

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, self.head_dim = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [rows, length, hidden_size]; cos, sin: [length, head_dim]."""
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return (x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin).to(x.dtype)


class Mlp(nn.Module):
    """Gated linear unit with SiLU."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = Mlp(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """All layers; the embedding is also the head."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        frequencies = config["rope_theta"] ** (-torch.arange(0, config["head_dim"], 2) / config["head_dim"])
        angles = torch.outer(torch.arange(config["max_position_embeddings"]).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        deep = (2 * config["num_hidden_layers"]) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=config["initializer_range"] * (deep if into_residual else 1.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 [rows, length]. Returns hidden states [rows, length, hidden_size] to be multiplied with the
        embedding."""
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = self.cos[: ids.shape[1]].to(x.dtype), self.sin[: ids.shape[1]].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


def loss_of(
    hidden: torch.Tensor, embedding: torch.Tensor, ids: torch.Tensor, picked: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Weighted mean of the cross-entropies of the tokens that follow some. hidden: [rows, length, hidden_size]; ids:
    [rows, length]; picked: int [n], flat positions, none of them the last of a row; weights: [n]."""
    logits = functional.linear(hidden.flatten(0, 1).index_select(0, picked), embedding.to(hidden.dtype)).float()
    following = ids.flatten().index_select(0, picked + 1).long()
    losses = functional.cross_entropy(logits, following, reduction="none")
    return (losses * weights).sum() / weights.sum()
