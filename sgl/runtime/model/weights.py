"""A decoder's weights, with projections of the same input fused into one matrix.

Maps checkpoint tensors to weights; the loader fills them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Literal, TypeVar

import torch

from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.kernels.layers.invariant import InvariantExperts, InvariantMatrix
from sgl.kernels.layers.linear import Fp8Matrix, Matrix, PackedMatrix, prepare
from sgl.kernels.moe.experts import Experts
from sgl.kernels.moe.packed import ExpertMatrices, PackedExperts
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.families import FAMILIES, ExpertNames
from sgl.runtime.model.rotary import rotary_order
from sgl.runtime.model.shard import DOWN, GATE_UP, WHOLE, Shard

MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Those of a dense layer, and the modules that each has the rows of."""
L = TypeVar("L")
_NORMS = ("input_norm", "q_norm", "k_norm", "output_norm", "post_attention_norm", "down_norm")
_LEAST_PACKED = 1 << 16  # elements: a oneDNN call takes 10 µs, others as little as one
MAX_HELD_TWICE = 1 << 26  # bytes of a tied head that is packed beside the embedding


@dataclass(slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in]; biases and norms that the family lacks are None.

    Beside experts, gate_up and down are those of the shared expert, or None."""

    input_norm: torch.Tensor | None  # [hidden]
    qkv: Matrix  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim], or of all heads
    k_norm: torch.Tensor | None
    output: Matrix  # [hidden, num_heads * head_dim]
    output_bias: torch.Tensor | None
    output_norm: torch.Tensor | None  # [hidden], of what attention adds
    post_attention_norm: torch.Tensor | None  # [hidden]
    gate_up: Matrix | None  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: Matrix | None  # [hidden, intermediate]
    down_bias: torch.Tensor | None
    down_norm: torch.Tensor | None  # [hidden], of what the feed-forward adds
    experts: Experts | None = None
    sinks: torch.Tensor | None = None  # [num_heads]

    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        """Those that all tokens are multiplied with, but the router, by their fields."""
        for name in MATRICES:
            matrix: Matrix | None = getattr(self, name)
            if matrix is not None:
                yield name, matrix


@dataclass(slots=True)
class DecoderWeights(Generic[L]):
    """What the weights of all decoders have. Matrices are [out, in]."""

    embedding: torch.Tensor  # [vocab, hidden]; like norm and head, empty in stages that lack it
    layers: list[L]
    norm: torch.Tensor  # [hidden]
    lm_head: Matrix  # [vocab, hidden]; tied: the embedding itself
    is_tied: bool = False
    """Whether the head is the embedding, perhaps packed. Known once packed."""

    def parts(self) -> Iterator[Any]:
        """What layers consist of: dataclasses of tensors, matrices and experts."""
        yield from self.layers

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor once."""
        yield self.embedding
        for part in self.parts():
            for field in fields(part):
                value = getattr(part, field.name)
                if isinstance(value, Matrix | Experts):
                    yield from matrix_tensors(value)
        yield self.norm
        yield from (tensor for tensor in matrix_tensors(self.lm_head) if tensor is not self.embedding)

    def pack_head(self) -> None:
        """Pack the head for the CPU where possible, unless it is large and tied."""
        self.is_tied |= self.lm_head is self.embedding
        if self.lm_head is not self.embedding or self.embedding.nbytes <= MAX_HELD_TWICE:
            self.lm_head = packed(self.lm_head)


@dataclass(slots=True)
class Weights(DecoderWeights[LayerWeights]):
    """All weights of a `Decoder`."""

    is_invariant: bool = False
    """Whether products are to give a row the same bits among any others."""

    @property
    def num_multiplied(self) -> int:
        """Elements of the matrices that a token is multiplied with; of experts, as many as are chosen."""
        matrices = [matrix for layer in self.layers for _, matrix in layer.matrices()]
        of_experts = sum(layer.experts.num_multiplied for layer in self.layers if layer.experts is not None)
        return of_experts + sum(_count(matrix) for matrix in [*matrices, self.lm_head])

    def arrange(self, config: ModelConfig) -> None:
        """Bring what was read from a checkpoint into the form that the decoder computes with. Only before `quantize`
        and `pack`. config: of this part."""
        family = FAMILIES[config.architecture]
        order = rotary_order(config)
        for layer in self.layers:
            for its in _rows(layer.qkv, layer.qkv_bias) if order is not None else ():
                heads = its.view(-1, config.head_dim, *its.shape[1:])
                rotated = heads[: config.num_heads + config.num_kv_heads]
                rotated.copy_(rotated[:, order])
            if family.experts is not None and family.experts.is_turned and layer.experts is not None:
                _part_gates(layer.experts)
        for norm in self.norms() if family.norms_add_one else ():
            norm.add_(1.0)

    def norms(self) -> Iterator[torch.Tensor]:
        """The weights of all norms."""
        for layer in self.layers:
            yield from (its for name in _NORMS if (its := getattr(layer, name)) is not None)
        yield self.norm

    def quantize(self, kind: Literal["fp8", "int4"]) -> None:
        """Quantise the layers' matrices to 8 or 4 bits, experts to 4; embedding, head and routers stay. On a CPU, which
        has no kernel for 4 bits, the rounded numbers stay in the matrices' dtype."""
        for layer in self.layers:
            if layer.experts is not None:
                gate_up, down = map(_rounded_experts, (layer.experts.gate_up, layer.experts.down))
                layer.experts = replace(layer.experts, gate_up=gate_up, down=down)
            for name, matrix in layer.matrices():
                if isinstance(matrix, torch.Tensor):
                    setattr(layer, name, _rounded(matrix, kind))

    def pack(self) -> None:
        """Pack matrices for the CPU where possible. A packed matrix replaces its original, unless that is small; a
        large tied head stays unpacked. Invariant ones are made of all instead, if that is wanted."""
        pack = _invariant if self.is_invariant else packed
        for layer in self.layers:
            for name, matrix in layer.matrices():
                setattr(layer, name, pack(matrix))
            if self.is_invariant and layer.experts is not None:
                layer.experts = layer.experts.invariant()
        if self.is_invariant:
            self.is_tied |= self.lm_head is self.embedding
            self.lm_head = _invariant(self.lm_head, for_logits=True)
        else:
            self.pack_head()

    def prepare(self, most_rows: int) -> None:
        """See `linear.prepare`; once for each shape."""
        prepared = set()
        for layer in self.layers:
            for name, matrix in layer.matrices():
                if (shape := next(matrix_tensors(matrix)).shape) not in prepared:
                    prepared.add(shape)
                    prepare(matrix, getattr(layer, f"{name}_bias"), most_rows)
        prepare(self.lm_head, None, most_rows)


def keeps_groups(device: torch.device) -> bool:
    """Whether kernels there multiply with a `GroupedMatrix`."""
    return device.type == "cuda"


def _rounded(matrix: torch.Tensor, kind: Literal["fp8", "int4"]) -> Matrix:
    if kind == "fp8":
        return Fp8Matrix.of(matrix)
    rounded = GroupedMatrix.rounded(matrix)
    return rounded if keeps_groups(matrix.device) else rounded.dequantized(matrix.dtype)


def _rounded_experts(matrices: ExpertMatrices) -> ExpertMatrices:
    """In four bits."""
    assert isinstance(matrices, torch.Tensor), "quantised checkpoints are refused"
    if keeps_groups(matrices.device):
        return PackedExperts.rounded(matrices)
    for matrix in matrices:
        matrix.copy_(GroupedMatrix.rounded(matrix).dequantized(matrix.dtype))
    return matrices


def _count(matrix: Matrix) -> int:
    """Its elements."""
    return math.prod(matrix.shape if isinstance(matrix, GroupedMatrix) else next(matrix_tensors(matrix)).shape)


def packed(matrix: Matrix) -> Matrix:
    """For the CPU, if that is worth it."""
    if isinstance(matrix, torch.Tensor) and matrix.numel() >= _LEAST_PACKED and PackedMatrix.can_hold(matrix):
        return PackedMatrix.of(matrix)
    return matrix


def _invariant(matrix: Matrix, *, for_logits: bool = False) -> Matrix:
    assert isinstance(matrix, torch.Tensor | InvariantMatrix), "startup refuses others"
    return InvariantMatrix.of(matrix, for_logits=for_logits) if isinstance(matrix, torch.Tensor) else matrix


def _part_gates(experts: Experts) -> None:
    """Bring rows of each gate and its up into an order of all gates, then all ups, in place."""
    for its in (experts.gate_up, experts.gate_up_bias):
        for expert in its if isinstance(its, torch.Tensor) else ():
            expert.copy_(torch.cat((expert[::2], expert[1::2])))


def _rows(matrix: Matrix, bias: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Tensors [n, ...] of a matrix of n rows and its bias, before it is packed."""
    assert isinstance(matrix, torch.Tensor | GroupedMatrix), "it is as in the checkpoint"
    its = (matrix,) if isinstance(matrix, torch.Tensor) else (matrix.values, matrix.scales, matrix.zeros)
    yield from (tensor for tensor in (*its, bias) if tensor is not None)


def matrix_tensors(matrix: Matrix | Experts | PackedExperts | InvariantExperts) -> Iterator[torch.Tensor]:
    """That hold it."""
    if isinstance(matrix, torch.Tensor):
        yield matrix
    else:
        for field in fields(matrix):
            value = getattr(matrix, field.name)
            if isinstance(value, torch.Tensor | PackedExperts | InvariantExperts | InvariantMatrix):
                yield from matrix_tensors(value)
        if isinstance(matrix, GroupedMatrix) and matrix.of_several is not None:
            yield from matrix.of_several.tensors()


def allocate_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tied: bool,
    shard: Shard = WHOLE,
    without: Set[tuple[int, str]] = frozenset(),
) -> Weights:
    """Uninitialised weights of a part of the model of this config. without: matrices, by layer and name, that get no
    memory."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def matrix(layer: int, name: str, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta" if (layer, name) in without else device)

    def bias(wanted: bool, size: int) -> torch.Tensor | None:
        return tensor(size) if wanted else None

    family = FAMILIES[config.architecture]

    def norm(wanted: bool, size: int) -> torch.Tensor | None:
        return torch.empty(size, dtype=norm_dtype, device=device) if wanted else None

    norm_dtype = torch.float32 if family.norms_add_one else dtype
    num_tokens, config = len(shard.vocabulary(config.vocab_size)), shard.local(config)
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size = config.num_heads * head_dim
    kv_size = config.num_kv_heads * head_dim
    qkv_size, has_qk_norm = q_size + 2 * kv_size, config.qk_norm or config.wide_qk_norm
    embedding = tensor(num_tokens, hidden)
    layers = []
    for layer in range(config.num_layers):
        experts = config.experts if config.has_experts(layer) else None
        intermediate = config.intermediate_size if experts is None else experts.shared_size
        its = LayerWeights(
            input_norm=norm("input_norm" in family.norms, hidden),
            qkv=matrix(layer, "qkv", qkv_size, hidden),
            qkv_bias=bias(config.qkv_bias, qkv_size),
            q_norm=norm(has_qk_norm, q_size if config.wide_qk_norm else head_dim),
            k_norm=norm(has_qk_norm, kv_size if config.wide_qk_norm else head_dim),
            output=matrix(layer, "output", hidden, q_size),
            output_bias=bias(config.output_bias, hidden),
            output_norm=norm("output_norm" in family.norms, hidden),
            post_attention_norm=norm("post_attention_norm" in family.norms, hidden),
            gate_up=None if intermediate is None else matrix(layer, "gate_up", 2 * intermediate, hidden),
            gate_up_bias=None if intermediate is None else bias(config.mlp_bias, 2 * intermediate),
            down=None if intermediate is None else matrix(layer, "down", hidden, intermediate),
            down_bias=bias(config.mlp_bias, hidden),
            down_norm=norm("down_norm" in family.norms, hidden),
            sinks=bias(family.has_sinks, config.num_heads),
        )
        if experts is not None:
            its.experts = Experts(
                router=tensor(experts.num_experts + (experts.shared_size is not None), hidden),
                gate_up=matrix(
                    layer, "experts.gate_up", experts.num_experts, 2 * experts.intermediate_size, hidden
                ),
                down=matrix(layer, "experts.down", experts.num_experts, hidden, experts.intermediate_size),
                top_k=experts.top_k,
                normalises=experts.normalises,
                clamped=experts.clamped,
            )
            if experts.clamped is not None:
                its.experts = replace(
                    its.experts,
                    router_bias=tensor(experts.num_experts),
                    gate_up_bias=tensor(experts.num_experts, 2 * experts.intermediate_size),
                    down_bias=tensor(experts.num_experts, hidden),
                )
        layers.append(its)
    lm_head = embedding if tied else tensor(num_tokens, hidden)
    last_norm = torch.empty(hidden if shard.is_last else 0, dtype=norm_dtype, device=device)
    return Weights(embedding, layers, last_norm, lm_head)


def checkpoint_tensors(
    config: ModelConfig, weights: Weights, shard: Shard = WHOLE, *, fused: bool = False
) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face checkpoint as the view of the weights that it, or a part of it, fills. Only before
    `Weights.quantize` and `Weights.pack`. config: of the whole model. fused: of a checkpoint that holds a layer's
    experts as one tensor, as transformers itself does."""
    family = FAMILIES[config.architecture]
    norms, names = family.norms, family.experts
    first, config = shard.layers(config).start, shard.local(config)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors: dict[str, Matrix | None] = {"model.embed_tokens.weight": weights.embedding}
    for index, layer in enumerate(weights.layers, first):
        mlp = "mlp" if layer.experts is None else "mlp.shared_expert"
        parts: dict[str, Matrix | None] = {
            **{f"{name}.weight": getattr(layer, field) for field, name in norms.items()},
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.k_norm.weight": layer.k_norm,
            "self_attn.o_proj.weight": layer.output,
            "self_attn.o_proj.bias": layer.output_bias,
            "self_attn.sinks": layer.sinks,
            f"{mlp}.down_proj.weight": layer.down,
            "mlp.down_proj.bias": layer.down_bias,
        }
        for kind, qkv, gate_up in (
            ("weight", layer.qkv, layer.gate_up),
            ("bias", layer.qkv_bias, layer.gate_up_bias),
        ):
            if isinstance(qkv, torch.Tensor):
                query, key, value = torch.split(qkv, [q_size, kv_size, kv_size])
                parts[f"self_attn.q_proj.{kind}"] = query
                parts[f"self_attn.k_proj.{kind}"] = key
                parts[f"self_attn.v_proj.{kind}"] = value
            if isinstance(gate_up, torch.Tensor):
                parts[f"{mlp}.gate_proj.{kind}"], parts[f"{mlp}.up_proj.{kind}"] = gate_up.chunk(2)
        if layer.experts is not None and names is not None and isinstance(layer.experts.router, torch.Tensor):
            parts |= _expert_tensors(layer.experts, names, fused=fused)
        tensors |= {f"model.layers.{index}.{name}": part for name, part in parts.items()}
    tensors["model.norm.weight"] = weights.norm
    if weights.lm_head is not weights.embedding:
        tensors["lm_head.weight"] = weights.lm_head
    return {name: its for name, its in tensors.items() if isinstance(its, torch.Tensor) and its.numel()}


def _expert_tensors(experts: Experts, names: ExpertNames, *, fused: bool) -> Mapping[str, torch.Tensor | None]:
    """A layer's experts and routers by their names in it, but packed ones."""
    gate_ups, downs = (its if isinstance(its, torch.Tensor) else None for its in (experts.gate_up, experts.down))
    if names.is_turned:
        return {
            "mlp.router.weight": experts.plain_router,
            "mlp.router.bias": experts.router_bias,
            f"mlp.{GATE_UP}": None if gate_ups is None else gate_ups.transpose(1, 2),
            f"mlp.{GATE_UP}_bias": experts.gate_up_bias,
            f"mlp.{DOWN}": None if downs is None else downs.transpose(1, 2),
            f"mlp.{DOWN}_bias": experts.down_bias,
        }
    block = "mlp" if fused else names.block
    num_experts = len(experts.down)
    parts: dict[str, torch.Tensor | None] = {
        f"{block}.gate.weight": experts.plain_router[:num_experts],
        f"{block}.shared_expert_gate.weight": experts.plain_router[num_experts:],
    }
    if fused:
        return parts | {f"{block}.{GATE_UP}": gate_ups, f"{block}.{DOWN}": downs}
    for index in range(num_experts):
        expert = f"{block}.experts.{index}"
        if gate_ups is not None:
            gate, up = gate_ups[index].chunk(2)
            parts |= {f"{expert}.{names.gate}.weight": gate, f"{expert}.{names.up}.weight": up}
        if downs is not None:
            parts[f"{expert}.{names.down}.weight"] = downs[index]
    return parts
