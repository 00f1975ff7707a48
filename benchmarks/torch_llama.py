"""A Llama in plain torch, to train drafts for: read from a checkpoint of any form that sgl reads, written as a Hugging
Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.weight_files import opened, read, read_headers


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    context_length: int

    @staticmethod
    def of(config: ModelConfig) -> Shape:
        """Of a checkpoint. Raises ValueError where it is no plain Llama."""
        if config.architecture != "LlamaForCausalLM" or config.rope.type != "default" or config.qkv_bias:
            raise ValueError(f"{config.path}: drafts are trained for plain Llamas, not {config.architecture}")
        return Shape(
            config.vocab_size,
            config.hidden_size,
            config.intermediate_size,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            config.rope.theta,
            config.context_length,
        )

    def fields(self) -> dict[str, Any]:
        """As in a config.json."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.context_length,
            "vocab_size": self.vocab_size,
            "torch_dtype": "bfloat16",
        }


class Norm(nn.Module):
    """RMS normalisation."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size]"""
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Queries or keys [B, heads, T, head_dim] at positions 0 to T - 1."""
    length, head_dim = x.shape[-2:]
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=x.device, dtype=torch.float32) / head_dim)
    angles = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().repeat(1, 2).to(x.dtype), angles.sin().repeat(1, 2).to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Projections of causal attention over inputs of any width."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, q_size, bias=False)
        self.k_proj = nn.Linear(width, kv_size, bias=False)
        self.v_proj = nn.Linear(width, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of x [B, T, width]: [B, num_heads, T, head_dim] each, before the rope."""
        shape = self.shape
        query, key, value = (
            its(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
            for its in (self.q_proj, self.k_proj, self.v_proj)
        )
        times = shape.num_heads // shape.num_kv_heads
        return query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, width] → [B, T, hidden]"""
        query, key, value = self.heads(x)
        query, key = rotated(query, self.shape.rope_theta), rotated(key, self.shape.rope_theta)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The gated product."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden]"""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.eps)
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, hidden]"""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class TorchLlama(nn.Module):
    """Whole sequences, no cache. Embedding and output matrix are one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, shape.eps)

    @staticmethod
    def read(path: str | Path) -> TorchLlama:
        """From a folder or a GGUF file, in float32. Raises ValueError where it is no plain Llama with tied
        embeddings."""
        config = ModelConfig.from_pretrained(path)
        model = TorchLlama(Shape.of(config))
        entries = read_headers(Path(config.path))
        if not config.tie_word_embeddings and "lm_head.weight" in entries:
            raise ValueError(f"{path}: embedding and output matrix are two")
        named = dict(model.named_parameters())
        for file in {entry.file for entry in entries.values()}:
            with opened(file) as tensors:
                for name, entry in entries.items():
                    target = named.get(name.removeprefix("model."))
                    if target is not None and entry.file == file:
                        target.data.copy_(read(tensors, entry.name, file))
        return model

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """ids [B, T] → hidden states after the last norm, [B, T, hidden], and before and between the layers."""
        states = [self.embed_tokens(ids)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return self.norm(states[-1]), states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., vocab]"""
        return functional.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))

    def with_layers(self, chosen: list[int]) -> TorchLlama:
        """A copy of the model that has only these of its layers."""
        smaller = TorchLlama(replace(self.shape, num_layers=len(chosen))).to(self.norm.weight.device)
        smaller.embed_tokens.load_state_dict(self.embed_tokens.state_dict())
        smaller.norm.load_state_dict(self.norm.state_dict())
        for target, number in zip(smaller.layers, chosen, strict=True):
            target.load_state_dict(self.layers[number].state_dict())
        return smaller

    def save(self, folder: Path, eos_ids: tuple[int, ...]) -> None:
        """As a Hugging Face folder in bfloat16, without a tokenizer."""
        fields = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "eos_token_id": list(eos_ids)}
        write(folder, {**self.shape.fields(), **fields}, {f"model.{k}": v for k, v in self.state_dict().items()})


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """A checkpoint; floats in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    kept = {k: (v.bfloat16() if v.is_floating_point() else v).cpu().contiguous() for k, v in tensors.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
