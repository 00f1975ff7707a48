"""The config of a hybrid: layers of gated delta nets between layers of attention, with dense or sparse MLPs.

Qwen3-Next, and Qwen3.5's text model, dense and sparse, alone or within a checkpoint that also sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl.runtime.model.checkpoint import find_checkpoint
from sgl.runtime.model.config import (
    DtypeName,
    RopeConfig,
    read_context_length,
    read_dtype,
    read_rope,
    special_tokens,
)
from sgl.runtime.model.fields import Fields, read_config_json
from sgl.runtime.model.quantized.scheme import QuantScheme

_SEES = "ForConditionalGeneration"
_QWEN3_NEXT, _QWEN3_5, _QWEN3_5_MOE = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
HYBRIDS = (_QWEN3_NEXT, _QWEN3_5, _QWEN3_5_MOE, f"Qwen3_5{_SEES}", f"Qwen3_5Moe{_SEES}")
"""The entries of `architectures` that are served; of models that see, the text part."""
_DEFAULTS: dict[str, Any] = {
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "max_position_embeddings": 32768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The sparse MLPs."""

    num_experts: int
    num_chosen: int  # experts of a token
    intermediate_size: int
    shared_size: int  # intermediate size of the expert that all tokens take
    is_normed: bool  # whether the chosen experts' weights add up to one


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """What model and loader need to know of a checkpoint. A `base.Config`."""

    path: str  # the checkpoint's folder
    architecture: str
    prefix: str  # of the names of tensors
    vocab_size: int
    hidden_size: int
    attends: tuple[bool, ...]  # whether a layer has attention, not a delta net
    is_sparse: tuple[bool, ...]  # whether its MLP has experts
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # of a head, the rest is not rotated
    rope: RopeConfig
    attention_bias: bool
    key_heads: int  # of delta nets
    value_heads: int
    key_dim: int
    value_dim: int
    is_grouped: bool  # whether their input projection has one key head after the other
    conv_width: int  # tokens that the convolution sees
    intermediate_size: int  # of dense MLPs; 0 if there are none
    experts: ExpertsConfig | None
    rms_norm_eps: float
    context_length: int  # tokens, scaling included
    tie_word_embeddings: bool
    initializer_range: float
    dtype: DtypeName  # of the checkpoint
    eos_token_ids: tuple[int, ...]
    checkpoint_format: str = "safetensors"
    scheme: QuantScheme | None = None  # of a quantised checkpoint

    @property
    def latent_dim(self) -> int:
        """Values are cached apart."""
        return 0

    @property
    def num_layers(self) -> int:
        """Layers with keys and values."""
        return sum(self.attends)

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values of a delta net."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @classmethod
    def from_pretrained(cls, path: str | Path) -> HybridConfig:
        """Read a checkpoint whose architecture is one of `HYBRIDS`. Raises UnsupportedModel for features that are
        missing here, ModelError for an inconsistent config."""
        folder = find_checkpoint(path)
        data = read_config_json(folder)
        architecture = str(data["architectures"][0])
        text = data.get("text_config") if architecture.endswith(_SEES) else None
        if text is not None:  # what is not of the text part alone stands outside
            outside = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
            data = {**text, **{key: data[key] for key in outside if data.get(key) is not None}}
        data = {**_DEFAULTS, **{key: value for key, value in data.items() if value is not None}}
        fields = Fields(str(folder), data, architecture)
        prefix = "model.language_model." if text is not None else "model."
        return _read(fields, prefix, special_tokens(folder, data)[1])


def _read(fields: Fields, prefix: str, eos_token_ids: tuple[int, ...]) -> HybridConfig:
    data = fields.data
    if data.get("hidden_act") not in (None, "silu"):
        raise fields.unsupported(f"activation {data['hidden_act']!r}")
    scheme = None
    if data.get("quantization_config") is not None:
        scheme = QuantScheme.of(data["quantization_config"], fields.path, fields.architecture)
    num_layers = fields.integer("num_hidden_layers")
    attends = _attends(fields, num_layers)
    is_sparse, experts = _experts(fields, num_layers)
    num_heads, num_kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    key_heads, value_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    for these, those in ((num_heads, num_kv_heads), (value_heads, key_heads)):
        if these % those:
            raise fields.error(f"{these} heads cannot share {those} equally")
    given = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    head_dim, part = fields.integer("head_dim"), fields.section({**data, **given}).number("partial_rotary_factor")
    rotary_dim = int(head_dim * part)
    if head_dim % 2 or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise fields.unsupported(f"rotating {rotary_dim} of {head_dim} dimensions")
    # A text has the same positions in all of mrope's sections.
    others = {key: value for key, value in given.items() if key not in ("partial_rotary_factor", "mrope_section")}
    rope = read_rope(fields.section({**data, "partial_rotary_factor": None, "rope_scaling": others or None}))
    return HybridConfig(
        path=fields.path,
        architecture=str(fields.architecture),
        prefix=prefix,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        attends=attends,
        is_sparse=is_sparse,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope=rope,
        attention_bias=fields.flag("attention_bias"),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        is_grouped=fields.architecture == _QWEN3_NEXT,
        conv_width=fields.integer("linear_conv_kernel_dim"),
        intermediate_size=0 if all(is_sparse) else fields.integer("intermediate_size"),
        experts=experts,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        context_length=read_context_length(fields, rope),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        initializer_range=fields.number("initializer_range", default=0.02),
        dtype=read_dtype(fields),
        eos_token_ids=eos_token_ids,
        scheme=scheme,
        checkpoint_format="safetensors" if scheme is None else scheme.checkpoint_format,
    )


def _attends(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    types = fields.listed("layer_types", str)
    if types is None:
        interval = fields.integer("full_attention_interval")
        types = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]
    if len(types) != num_layers:
        raise fields.error(f"layer_types names {len(types)} layers and num_hidden_layers {num_layers}")
    for its in types:
        if its not in ("linear_attention", "full_attention"):
            raise fields.unsupported(f"layer type {its!r}")
    if len(set(types)) == 1:
        raise fields.unsupported(f"a model with only {types[0]} layers")
    return tuple(its == "full_attention" for its in types)


def _experts(fields: Fields, num_layers: int) -> tuple[tuple[bool, ...], ExpertsConfig | None]:
    is_next = fields.architecture == _QWEN3_NEXT
    if fields.architecture in (_QWEN3_5, f"Qwen3_5{_SEES}") or not fields.data.get("num_experts"):
        return (False,) * num_layers, None
    step = fields.integer("decoder_sparse_step") if is_next else 1
    dense = fields.listed("mlp_only_layers", int) or [] if is_next else []
    config = ExpertsConfig(
        num_experts=fields.integer("num_experts"),
        num_chosen=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_size=fields.integer("shared_expert_intermediate_size"),
        is_normed=fields.flag("norm_topk_prob") if is_next else True,
    )
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)), config
