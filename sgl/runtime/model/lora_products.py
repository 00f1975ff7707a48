"""Which of a model's modules LoRA adapters may change, and where each is in our products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sgl.runtime.lora_options import LORA_FUSED, LORA_TARGETS
from sgl.runtime.model.base import Config, SizedModel
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.families import FAMILIES
from sgl.runtime.model.gdn.config import HybridConfig
from sgl.runtime.model.gdn.model import Hybrid
from sgl.runtime.model.gdn.order import grouped_order, query_order, rotary_order
from sgl.runtime.model.gdn.parts import cuts as hybrid_cuts
from sgl.runtime.model.gdn.parts import local as hybrid_local
from sgl.runtime.model.gdn.parts import matrix_part
from sgl.runtime.model.lora import Fused, Modules, Product, Shape, Source
from sgl.runtime.model.lora_experts import Mixture
from sgl.runtime.model.mla.config import LatentConfig
from sgl.runtime.model.mla.loader import paired_by_halves
from sgl.runtime.model.mla.model import LatentDecoder
from sgl.runtime.model.mla.parts import part as latent_part
from sgl.runtime.model.rotary import rotary_order as decoder_order
from sgl.runtime.model.shard import Shard

if TYPE_CHECKING:
    from sgl.runtime.model.hf.config import TransformersConfig
    from sgl.runtime.model.hf.model import TransformersModel

_PARTS = {
    "qkv": LORA_TARGETS[:3],
    "output": LORA_TARGETS[3:4],
    "gate_up": LORA_TARGETS[4:6],
    "down": LORA_TARGETS[6:],
}
_EXPERTS = "adapters of its experts are not supported, of attention and of MLPs that all tokens take they are"
_ROUTER = "adapters of what chooses experts are not supported, of the experts they are"
_SHARED_GATE = "adapters of the gate of a shared expert are not supported, of its other modules they are"
_OF_MIXTURES = {
    ".shared_expert_gate.": _SHARED_GATE,
    **dict.fromkeys((".mlp.gate.", ".block_sparse_moe.gate.", ".mlp.router."), _ROUTER),
}
_UP = (
    "adapters of it need model_impl='transformers', since sgl's own latent attention never computes keys and values"
)
_SHARED = "adapters of shared experts need model_impl='transformers'"
_TOWERS = (".visual.", ".vision_tower.", ".vision_model.", ".multi_modal_projector.", ".audio_tower.")
_TOWER = "adapters of what sees are not supported, of the language model they are"
_ENDS = "adapters of embedding and head are not supported"


def lora_modules(config: Config) -> Modules:
    """Those of a checkpoint's model."""
    its = _of_text(config)
    why = _TOWER if isinstance(config, ModelConfig) and config.media is not None else ""
    return replace(its, refused={**dict.fromkeys(_TOWERS, why), **its.refused})


def _of_text(config: Config) -> Modules:
    if isinstance(config, ModelConfig):
        return decoder_modules(config)
    if isinstance(config, LatentConfig):
        refused = {".kv_b_proj.": _UP, ".shared_experts.": _SHARED, ".experts.": _EXPERTS}
        return Modules(_latent_shapes(config), refused, _ends("model"))
    if isinstance(config, HybridConfig):
        shapes, fused = _hybrid_shapes(config), dict[str, Fused]()
        for mixture in filter(None, (_hybrid_mixture(config, layer) for layer in range(len(config.attends)))):
            shapes |= mixture.shapes()
            fused |= mixture.fused()
        return Modules(shapes, _OF_MIXTURES, _ends(config.prefix[:-1]), fused)
    its: TransformersConfig = config  # type: ignore[assignment]
    return Modules(its.linears, {".experts.": _EXPERTS}, _ends(its.body))


def lora_products(model: SizedModel) -> list[dict[str, Product]]:
    """Of each layer of this rank's part, by name."""
    if isinstance(model, Decoder):
        return decoder_products(model.whole_config, model.shard)
    if isinstance(model, LatentDecoder):
        return _latent_products(model.whole_config, model.shard)
    if isinstance(model, Hybrid):
        return _hybrid_products(model.whole_config, model.shard)
    its: TransformersModel = model  # type: ignore[assignment]
    return [its.lora_products]


def _ends(body: str) -> dict[str, str]:
    return {f"{body}.embed_tokens": _ENDS, "lm_head": _ENDS}


def decoder_modules(config: ModelConfig) -> Modules:
    """Of the decoder's families."""
    fused = FAMILIES[config.architecture].fused_modules
    whole = {part: name for name in fused for part in LORA_FUSED[name]}
    shapes: dict[str, Shape] = {}
    for layer in range(config.num_layers):
        for name, parts in _PARTS.items():
            if (prefix := _place(config, layer, name)) is not None:
                for part in parts:
                    module = f"{prefix}.{whole.get(part, part)}"
                    out, width = _shape(part, config, layer)
                    shapes[module] = shapes.get(module, (0, 0))[0] + out, width
    experts: dict[str, Fused] = {}
    for mixture in filter(None, (_mixture(config, layer) for layer in range(config.num_layers))):
        shapes |= mixture.shapes()
        experts |= mixture.fused()
    return Modules(shapes, _OF_MIXTURES, _ends(_body(config)), experts)


def decoder_products(config: ModelConfig, shard: Shard) -> list[dict[str, Product]]:
    """Of one rank's part of the decoder. config: the whole model's."""
    layers = []
    for layer in shard.layers(config):
        places = {name: _place(config, layer, name) for name in _PARTS}
        products = {
            name: _product(config, shard, layer, place, _PARTS[name])
            for name, place in places.items()
            if place is not None
        }
        if (mixture := _mixture(config, layer)) is not None:
            products |= mixture.products(lambda name: shard.part(name, config))
        layers.append(products)
    return layers


def _mixture(config: ModelConfig, layer: int) -> Mixture | None:
    """A layer's experts, if it has some."""
    experts, names = config.experts, FAMILIES[config.architecture].experts
    if experts is None or names is None or not config.has_experts(layer):
        return None
    place = f"{_body(config)}.layers.{layer}"
    return Mixture(
        f"{place}.mlp.experts",
        f"{place}.{names.block}.experts",
        (names.gate, names.up, names.down),
        experts.num_experts,
        experts.intermediate_size,
        config.hidden_size,
        names.is_turned,
    )


def _product(config: ModelConfig, shard: Shard, layer: int, place: str, parts: tuple[str, ...]) -> Product:
    order, sources, first, before = decoder_order(config), [], 0, ""
    fused = FAMILIES[config.architecture].fused_modules
    for part in parts:
        module = next((name for name in fused if part in LORA_FUSED[name]), part)
        first = first if module == before else 0  # the row of its module that it begins with
        out, width = _shape(part, config, layer)
        cut = (*shard.part(f"{place}.{part}.weight", config), slice(None), slice(None))[:2]
        rows = torch.arange(first, first + out)[cut[0]]
        if order is not None and part in ("q_proj", "k_proj"):
            rows = rows.view(-1, config.head_dim)[:, order].flatten()
        sources.append(Source(f"{place}.{module}", rows, cut[1]))
        first, before = first + out, module
    return Product(tuple(sources), len(range(width)[cut[1]]))


def _place(config: ModelConfig, layer: int, product: str) -> str | None:
    """The module that a product is in; None: experts compute it."""
    inside = "self_attn"
    if product in ("gate_up", "down"):
        inside = "mlp"
        if config.has_experts(layer):
            assert config.experts is not None, "the layer has some"
            if not config.experts.shared_size:
                return None
            inside = "mlp.shared_expert"
    return f"{_body(config)}.layers.{layer}.{inside}"


def _body(config: ModelConfig) -> str:
    """Where transformers has the layers."""
    return "model.language_model" if config.architecture.endswith("ForConditionalGeneration") else "model"


def _shape(part: str, config: ModelConfig, layer: int) -> Shape:
    """[out, in] of a product's matrix."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, size = config.hidden_size, config.intermediate_size
    if config.experts is not None and config.has_experts(layer):
        size = config.experts.shared_size or 0
    return {
        "q_proj": (heads, hidden),
        "k_proj": (kv_heads, hidden),
        "v_proj": (kv_heads, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (size, hidden),
        "up_proj": (size, hidden),
        "down_proj": (hidden, size),
    }[part]


def _mlp_shapes(mlp: str, hidden: int, size: int) -> dict[str, Shape]:
    ups = {f"{mlp}.{name}": (size, hidden) for name in _PARTS["gate_up"]}
    return {**ups, f"{mlp}.down_proj": (hidden, size)}


def _latent_shapes(config: LatentConfig) -> dict[str, Shape]:
    hidden, queries = config.hidden_size, config.num_heads * config.query_dim
    of_queries = {"q_proj": (queries, hidden)}
    if config.q_rank is not None:
        of_queries = {"q_a_proj": (config.q_rank, hidden), "q_b_proj": (queries, config.q_rank)}
    attention: dict[str, Shape] = {
        **of_queries,
        "kv_a_proj_with_mqa": (config.head_dim, hidden),
        "o_proj": (hidden, config.num_heads * config.value_dim),
    }
    shapes: dict[str, Shape] = {}
    for layer in range(config.num_layers):
        place = f"model.layers.{layer}"
        shapes |= {f"{place}.self_attn.{name}": its for name, its in attention.items()}
        if layer < config.num_dense:
            shapes |= _mlp_shapes(f"{place}.mlp", hidden, config.intermediate_size)
    return shapes


def _latent_products(config: LatentConfig, shard: Shard) -> list[dict[str, Product]]:
    """Of one rank's part. config: the whole model's."""
    shapes = _latent_shapes(config)

    def product(*modules: str) -> Product:
        sources = []
        for module in modules:
            name, (out, width) = f"{module}.weight", shapes[module]
            cut = (*latent_part(name, config, shard), slice(None), slice(None))[:2]
            sources.append(Source(module, paired_by_halves(name, torch.arange(out)[cut[0]], config), cut[1]))
        return Product(tuple(sources), len(range(width)[cut[1]]))

    layers = []
    for layer in shard.layers(config):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        query = "q_proj" if config.q_rank is None else "q_a_proj"
        products = {
            "qkv": product(f"{attention}.{query}", f"{attention}.kv_a_proj_with_mqa"),
            "output": product(f"{attention}.o_proj"),
        }
        if config.q_rank is not None:
            products["query_up"] = product(f"{attention}.q_b_proj")
        if layer < config.num_dense:
            products["gate_up"] = product(f"{mlp}.gate_proj", f"{mlp}.up_proj")
            products["down"] = product(f"{mlp}.down_proj")
        layers.append(products)
    return layers


def _hybrid_shapes(config: HybridConfig) -> dict[str, Shape]:
    hidden, dim = config.hidden_size, config.head_dim
    values, heads = config.value_heads * config.value_dim, config.value_heads
    attention: dict[str, Shape] = {
        "self_attn.q_proj": (2 * config.num_heads * dim, hidden),
        "self_attn.k_proj": (config.num_kv_heads * dim, hidden),
        "self_attn.v_proj": (config.num_kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, config.num_heads * dim),
    }
    inputs = {"qkv": config.conv_channels, "z": values, "b": heads, "a": heads}
    if config.is_grouped:
        inputs = {"qkvz": config.conv_channels + values, "ba": 2 * heads}
    delta: dict[str, Shape] = {f"linear_attn.in_proj_{name}": (out, hidden) for name, out in inputs.items()}
    delta["linear_attn.out_proj"] = hidden, values
    shapes: dict[str, Shape] = {}
    for layer, (attends, is_sparse) in enumerate(zip(config.attends, config.is_sparse, strict=True)):
        place = f"{config.prefix}layers.{layer}"
        shapes |= {f"{place}.{name}": its for name, its in (attention if attends else delta).items()}
        if is_sparse and config.experts is not None:
            shapes |= _mlp_shapes(f"{place}.mlp.shared_expert", hidden, config.experts.shared_size)
        else:
            shapes |= _mlp_shapes(f"{place}.mlp", hidden, config.intermediate_size)
    return shapes


def _hybrid_mixture(config: HybridConfig, layer: int) -> Mixture | None:
    """A layer's experts, if it has some."""
    experts, place = config.experts, f"{config.prefix}layers.{layer}.mlp.experts"
    if experts is None or not config.is_sparse[layer]:
        return None
    names = ("gate_proj", "up_proj", "down_proj")
    return Mixture(place, place, names, experts.num_experts, experts.intermediate_size, config.hidden_size)


def _hybrid_products(config: HybridConfig, shard: Shard) -> list[dict[str, Product]]:
    """Of one rank's part. config: the whole model's."""
    shapes, dim, own = _hybrid_shapes(config), config.head_dim, hybrid_local(config, shard)
    queries, gates = query_order(own)
    key_rows = torch.arange(own.num_kv_heads * dim).view(-1, dim)[:, rotary_order(dim, config.rotary_dim)]

    def product(place: str, *modules: str, orders: Mapping[str, torch.Tensor] | None = None) -> Product:
        sources, depth = [], 0
        for module in modules:
            out, depth = shapes[f"{place}.{module}"]
            dim, parts = hybrid_cuts(f"{place}.{module}.weight", config, shard)
            rows = torch.arange(out) if dim else torch.cat([torch.arange(out)[its] for its in parts])
            if orders is not None and module in orders:
                rows = rows[orders[module]]
            sources.append(Source(f"{place}.{module}", rows, parts[0] if dim else slice(None)))
        return Product(tuple(sources), len(range(depth)[sources[0].columns]))

    layers = []
    for layer in shard.layers_of(len(config.attends)):
        attends, is_sparse, place = config.attends[layer], config.is_sparse[layer], f"{config.prefix}layers.{layer}"
        mlp = f"{place}.mlp.shared_expert" if is_sparse else f"{place}.mlp"
        mixer = f"{place}.self_attn" if attends else f"{place}.linear_attn"
        products = {"gate_up": product(mlp, "gate_proj", "up_proj"), "down": product(mlp, "down_proj")}
        if attends:
            orders = {"q_proj": queries, "k_proj": key_rows.flatten()}
            products["qkv"] = product(mixer, "q_proj", "k_proj", "v_proj", orders=orders)
            products["gate"] = product(mixer, "q_proj", orders={"q_proj": gates})
            products["output"] = product(mixer, "o_proj")
        else:
            names: list[tuple[str, ...]] = [("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")]
            orders = {}
            if config.is_grouped:
                names = [("in_proj_qkvz",), ("in_proj_ba",)]
                orders = dict(zip(("in_proj_qkvz", "in_proj_ba"), grouped_order(own), strict=True))
            products["inputs"], products["gates"] = (product(mixer, *its, orders=orders) for its in names)
            products["output"] = product(mixer, "out_proj")
        if (mixture := _hybrid_mixture(config, layer)) is not None:
            products |= mixture.products(lambda name: matrix_part(name, config, shard))
        layers.append(products)
    return layers
