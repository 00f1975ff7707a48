"""A hybrid's weights, with projections of the same input fused into one matrix, and what fills them.

Heads' dimensions are reordered so that those that rotate together lie half a head apart (`qkv.rotate_and_store`), and
norms hold 1 + w.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl.kernels.layers.linear import Matrix, prepare
from sgl.kernels.moe.experts import Experts
from sgl.runtime.model.gdn.config import ExpertsConfig, HybridConfig
from sgl.runtime.model.gdn.order import grouped_order, query_order, rotary_order
from sgl.runtime.model.gdn.parts import cut, local, matrix_part
from sgl.runtime.model.loader import check_tensors, read_quantized, say_dequantized
from sgl.runtime.model.quantized.experts import pack_both, whole_experts
from sgl.runtime.model.shard import WHOLE, Shard
from sgl.runtime.model.weight_files import model_headers, opened, read
from sgl.runtime.model.weights import DecoderWeights, keeps_groups, matrix_tensors, packed

_HEAD = "lm_head.weight"
IGNORED = ("mtp.", "model.visual.", "visual.")  # drafts of further tokens, and eyes


@dataclass(slots=True)
class AttentionWeights:
    """Attention. Matrices are [out, in]."""

    qkvg: Matrix  # queries, keys, values and gates of heads [(2 num_heads + 2 num_kv_heads) * head_dim, hidden]
    qkvg_bias: torch.Tensor | None
    norm: torch.Tensor  # float32 [num_heads + num_kv_heads, head_dim] of queries and keys
    output: Matrix  # [hidden, num_heads * head_dim]
    output_bias: torch.Tensor | None


@dataclass(slots=True)
class DeltaWeights:
    """A gated delta net."""

    inputs: Matrix  # [conv_channels + value_heads * (value_dim + 2), hidden] to qkv, output gates, beta and decay
    convolution: torch.Tensor  # [width, conv_channels]
    a_log: torch.Tensor  # float32 [value_heads]
    dt_bias: torch.Tensor  # float32 [value_heads]
    norm: torch.Tensor  # [value_dim]
    output: Matrix  # [hidden, value_heads * value_dim]


@dataclass(slots=True)
class DenseWeights:
    """A SwiGLU MLP."""

    gate_up: Matrix  # [2 * intermediate, hidden]
    down: Matrix  # [hidden, intermediate]


@dataclass(slots=True)
class SparseWeights:
    """An MLP of experts, with one that all tokens take through a gate."""

    experts: Experts
    shared: DenseWeights


@dataclass(slots=True)
class HybridLayer:
    """One layer."""

    input_norm: torch.Tensor  # float32 [hidden]
    mixer: AttentionWeights | DeltaWeights
    post_norm: torch.Tensor  # float32 [hidden]
    mlp: DenseWeights | SparseWeights


class HybridWeights(DecoderWeights[HybridLayer]):
    """All weights; norms are float32."""

    @property
    def num_multiplied(self) -> int:
        """Elements of the matrices that a token is multiplied with."""
        total = next(matrix_tensors(self.lm_head)).numel()
        for part in self.parts():
            if isinstance(part, SparseWeights):
                total += part.experts.num_multiplied
            else:
                total += sum(next(matrix_tensors(getattr(part, name))).numel() for name in _matrices(part))
        return total

    def pack(self) -> None:
        """Pack matrices for the CPU where possible; see `weights.Weights.pack`."""
        for part in self.parts():
            for name in _matrices(part):
                setattr(part, name, packed(getattr(part, name)))
        self.pack_head()

    def prepare(self, most_rows: int) -> None:
        """See `linear.prepare`."""
        for matrix in [*self.distinct_matrices(), self.lm_head]:
            prepare(matrix, None, most_rows)

    def distinct_matrices(self) -> list[Matrix]:
        """One of each shape in the layers."""
        matrices = [getattr(part, name) for part in self.parts() for name in _matrices(part)]
        return list({next(matrix_tensors(matrix)).shape: matrix for matrix in matrices}.values())

    def parts(self) -> Iterator[HybridLayer | AttentionWeights | DeltaWeights | DenseWeights | SparseWeights]:
        """See `DecoderWeights`."""
        for layer in self.layers:
            yield layer
            yield layer.mixer
            yield layer.mlp
            if isinstance(layer.mlp, SparseWeights):
                yield layer.mlp.shared


def _matrices(part: object) -> list[str]:
    """That are packed."""
    names = {
        AttentionWeights: ["qkvg", "output"],
        DeltaWeights: ["inputs", "output"],
        DenseWeights: ["gate_up", "down"],
    }
    return names.get(type(part), [])


@dataclass(frozen=True, slots=True)
class Slot:
    """What becomes of a checkpoint's tensor."""

    shape: tuple[int, ...]
    put: Callable[[torch.Tensor], object]


def load(config: HybridConfig, dtype: torch.dtype, device: torch.device, shard: Shard = WHOLE) -> HybridWeights:
    """A part of the checkpoint's. Raises WeightsError."""
    folder = Path(config.path)
    used = {name: entry for name, entry in model_headers(folder).items() if not name.startswith(IGNORED)}
    # a tied checkpoint may hold the head, too
    entries, quantized = read_quantized(used, config.scheme, device)
    tied = config.tie_word_embeddings and _HEAD not in entries
    packable, own, first = {}, local(config, shard), shard.layers_of(len(config.attends)).start
    if config.experts is not None and keeps_groups(device):
        mlps = {
            its: f"{config.prefix}layers.{first + its}.mlp"
            for its, is_sparse in enumerate(own.is_sparse)
            if is_sparse
        }
        packable = whole_experts(mlps, config.experts.num_experts, quantized)
    weights = allocate(own, dtype, device, tied=tied, without=packable, shard=shard)
    fused = any(name.endswith("experts.gate_up_proj") for name in entries)
    check_tensors(entries, tensor_shapes(config, tied=tied, fused=fused), folder)
    for index, experts in packable.items():
        mlp = weights.layers[index].mlp
        assert isinstance(mlp, SparseWeights)
        gate_up, down = (
            [[(name, matrix_part(name, config, shard)) for name, _ in modules] for modules in each]
            for each in experts
        )
        mlp.experts = pack_both(mlp.experts, gate_up, down, quantized, device)
    places = slots(own, weights, fused=fused, first=first)
    for file in sorted({entry.file for entry in entries.values()}):
        with opened(file) as tensors:
            for name, slot in places.items():
                if entries[name].file == file:
                    is_quantized = name in quantized.shapes
                    its = quantized.dequantized(name) if is_quantized else read(tensors, entries[name].name, file)
                    slot.put(cut(name, its, config, shard))
    say_dequantized(quantized, config.scheme, dtype)
    head = next(matrix_tensors(weights.lm_head))
    if config.tie_word_embeddings and not tied and torch.equal(head, weights.embedding):
        weights.lm_head = weights.embedding
    return weights


def fill(config: HybridConfig, dtype: torch.dtype, device: torch.device, shard: Shard = WHOLE) -> HybridWeights:
    """Random ones, initialised like transformers'. All parts are cut from the same."""
    tied, own = config.tie_word_embeddings, local(config, shard)
    weights = allocate(own, dtype, device, tied=tied, shard=shard)
    places = slots(own, weights, fused=True, first=shard.layers_of(len(config.attends)).start)
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in tensor_shapes(config, tied=tied, fused=True).items():
        drawn = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith("A_log"):
            drawn.uniform_(0.01, 16.0, generator=generator).log_()
        elif name.endswith((".dt_bias", "linear_attn.norm.weight")):
            drawn.fill_(1.0)
        elif name.endswith((".bias", "norm.weight")):  # other norms hold one less
            drawn.zero_()
        else:
            drawn.normal_(0.0, config.initializer_range, generator=generator)
        if name in places:
            places[name].put(cut(name, drawn, config, shard))
    return weights


def tensor_shapes(config: HybridConfig, *, tied: bool, fused: bool) -> dict[str, tuple[int, ...]]:
    """Of every tensor of a checkpoint, whole."""
    weights = allocate(config, torch.float32, torch.device("meta"), tied=tied)
    return {name: slot.shape for name, slot in slots(config, weights, fused=fused).items()}


def num_weights(config: HybridConfig) -> int:
    """Of the whole model."""
    return sum(map(math.prod, tensor_shapes(config, tied=config.tie_word_embeddings, fused=True).values()))


def allocate(
    config: HybridConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tied: bool,
    without: Container[int] = (),
    shard: Shard = WHOLE,
) -> HybridWeights:
    """Uninitialised weights of the part with this config. without: layers whose experts get no memory."""

    def tensor(*shape: int, wide: bool = False) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32 if wide else dtype, device=device)

    def dense(intermediate: int) -> DenseWeights:
        return DenseWeights(tensor(2 * intermediate, hidden), tensor(hidden, intermediate))

    def sparse(experts: ExpertsConfig, place: torch.device) -> SparseWeights:
        num_experts, size = experts.num_experts, experts.intermediate_size
        its = Experts(
            router=tensor(experts.num_experts + 1, hidden),
            gate_up=torch.empty(num_experts, 2 * size, hidden, dtype=dtype, device=place),
            down=torch.empty(num_experts, hidden, size, dtype=dtype, device=place),
            top_k=experts.num_chosen,
            normalises=experts.is_normed,
        )
        return SparseWeights(its, dense(experts.shared_size))

    def attention() -> AttentionWeights:
        size = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
        return AttentionWeights(
            qkvg=tensor(size, hidden),
            qkvg_bias=tensor(size) if config.attention_bias else None,
            norm=tensor(config.num_heads + config.num_kv_heads, config.head_dim, wide=True),
            output=tensor(hidden, config.num_heads * config.head_dim),
            output_bias=tensor(hidden) if config.attention_bias else None,
        )

    def delta() -> DeltaWeights:
        heads, values = config.value_heads, config.value_heads * config.value_dim
        return DeltaWeights(
            inputs=tensor(config.conv_channels + values + 2 * heads, hidden),
            convolution=tensor(config.conv_width, config.conv_channels),
            a_log=tensor(heads, wide=True),
            dt_bias=tensor(heads, wide=True),
            norm=tensor(config.value_dim),
            output=tensor(hidden, values),
        )

    hidden = config.hidden_size
    layers = [
        HybridLayer(
            input_norm=tensor(hidden, wide=True),
            mixer=attention() if attends else delta(),
            post_norm=tensor(hidden, wide=True),
            mlp=sparse(config.experts, torch.device("meta") if index in without else device)
            if is_sparse and config.experts
            else dense(config.intermediate_size),
        )
        for index, (attends, is_sparse) in enumerate(zip(config.attends, config.is_sparse, strict=True))
    ]
    num_tokens = len(shard.vocabulary(config.vocab_size))
    embedding = tensor(num_tokens, hidden)
    lm_head = embedding if tied else tensor(num_tokens, hidden)
    return HybridWeights(embedding, layers, tensor(hidden if shard.is_last else 0, wide=True), lm_head)


def slots(config: HybridConfig, weights: HybridWeights, *, fused: bool, first: int = 0) -> dict[str, Slot]:
    """Every tensor of a checkpoint of this config, or of a part's. fused: experts are stored together. first: the
    number of the part's first layer."""
    slots = {f"{config.prefix}embed_tokens.weight": _into(weights.embedding)} if len(weights.embedding) else {}
    for index, layer in enumerate(weights.layers):
        parts = {
            "input_layernorm.weight": _one_more(layer.input_norm),
            "post_attention_layernorm.weight": _one_more(layer.post_norm),
        }
        if isinstance(layer.mixer, AttentionWeights):
            parts |= _attention_slots(config, layer.mixer)
        else:
            parts |= _delta_slots(config, layer.mixer)
        if isinstance(layer.mlp, SparseWeights):
            parts |= _sparse_slots(layer.mlp, fused=fused)
        else:
            parts |= _dense_slots("mlp", layer.mlp)
        slots |= {f"{config.prefix}layers.{first + index}.{name}": slot for name, slot in parts.items()}
    if len(weights.norm):
        slots[f"{config.prefix}norm.weight"] = _one_more(weights.norm)
    if weights.lm_head is not weights.embedding and len(weights.embedding):
        slots[_HEAD] = _into(_plain(weights.lm_head))
    return slots


def _attention_slots(config: HybridConfig, its: AttentionWeights) -> dict[str, Slot]:
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    order = rotary_order(dim, config.rotary_dim)
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim, heads * dim]
    slots = {"self_attn.o_proj.weight": _into(_plain(its.output))}
    both = [("weight", _plain(its.qkvg))]
    if its.qkvg_bias is not None and its.output_bias is not None:
        slots["self_attn.o_proj.bias"] = _into(its.output_bias)
        both.append(("bias", its.qkvg_bias))
    for kind, whole in both:
        queries, keys, values, gates = (torch.unflatten(part, 0, (-1, dim)) for part in torch.split(whole, sizes))

        def put_queries(given: torch.Tensor, queries: torch.Tensor = queries, gates: torch.Tensor = gates) -> None:
            for target, rows in zip((queries, gates), query_order(config), strict=True):
                target.copy_(given[rows].view_as(target))

        def put_keys(given: torch.Tensor, keys: torch.Tensor = keys) -> None:
            keys.copy_(torch.unflatten(given, 0, (-1, dim))[:, order])

        rest = tuple(whole.shape[1:])
        slots[f"self_attn.q_proj.{kind}"] = Slot((2 * heads * dim, *rest), put_queries)
        slots[f"self_attn.k_proj.{kind}"] = Slot((kv_heads * dim, *rest), put_keys)
        slots[f"self_attn.v_proj.{kind}"] = _into(values.flatten(0, 1))
    queries, keys = torch.split(its.norm, [heads, kv_heads])
    for name, part in (("q_norm", queries), ("k_norm", keys)):
        slots[f"self_attn.{name}.weight"] = _one_more(part, order)
    return slots


def _delta_slots(config: HybridConfig, its: DeltaWeights) -> dict[str, Slot]:
    keys = config.key_heads * config.key_dim
    values, heads = config.value_heads * config.value_dim, config.value_heads
    whole = _plain(its.inputs)
    hidden = whole.shape[1]
    slots = {
        "linear_attn.conv1d.weight": Slot(
            (config.conv_channels, 1, config.conv_width), lambda given: its.convolution.copy_(given[:, 0].t())
        ),
        "linear_attn.A_log": _into(its.a_log),
        "linear_attn.dt_bias": _into(its.dt_bias),
        "linear_attn.norm.weight": _into(its.norm),
        "linear_attn.out_proj.weight": _into(_plain(its.output)),
    }
    if config.is_grouped:
        main, gates = grouped_order(config)

        def put_main(given: torch.Tensor) -> None:
            whole[: len(main)].copy_(given[main])

        def put_gates(given: torch.Tensor) -> None:
            whole[len(main) :].copy_(given[gates])

        slots["linear_attn.in_proj_qkvz.weight"] = Slot((2 * keys + 2 * values, hidden), put_main)
        slots["linear_attn.in_proj_ba.weight"] = Slot((2 * heads, hidden), put_gates)
        return slots
    for name, part in zip(
        ("qkv", "z", "b", "a"), torch.split(whole, [config.conv_channels, values, heads, heads]), strict=True
    ):
        slots[f"linear_attn.in_proj_{name}.weight"] = _into(part)
    return slots


def _dense_slots(name: str, its: DenseWeights) -> dict[str, Slot]:
    gate, up = _plain(its.gate_up).chunk(2)
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": _plain(its.down)}
    return {f"{name}.{part}.weight": _into(tensor) for part, tensor in parts.items()}


def _sparse_slots(its: SparseWeights, *, fused: bool) -> dict[str, Slot]:
    experts = its.experts
    slots = {
        "mlp.gate.weight": _into(experts.plain_router[:-1]),
        "mlp.shared_expert_gate.weight": _into(experts.plain_router[-1:]),
        **_dense_slots("mlp.shared_expert", its.shared),
    }
    if experts.is_packed:
        return slots
    gate_ups, downs = experts.unpacked
    if fused:
        return {
            **slots,
            "mlp.experts.gate_up_proj": _into(gate_ups),
            "mlp.experts.down_proj": _into(downs),
        }
    for expert, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
        slots |= _dense_slots(f"mlp.experts.{expert}", DenseWeights(gate_up, down))
    return slots


def _into(target: torch.Tensor) -> Slot:
    return Slot(tuple(target.shape), target.copy_)


def _one_more(target: torch.Tensor, order: list[int] | None = None) -> Slot:
    """Into each row of the target, in this order."""
    return Slot(
        tuple(target.shape[-1:]),
        lambda given: target.copy_((given if order is None else given[order]).float() + 1.0),
    )


def _plain(matrix: Matrix) -> torch.Tensor:
    assert isinstance(matrix, torch.Tensor), "matrices are packed when they are filled"
    return matrix
