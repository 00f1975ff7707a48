"""Reads a checkpoint's config.json and generation_config.json, in transformers' old and new spellings, or a GGUF file's
metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from sgl.errors import ModelError, UnsupportedModel
from sgl.runtime.gguf import is_gguf
from sgl.runtime.media.config import MediaConfig, Towers
from sgl.runtime.model.checkpoint import find_checkpoint
from sgl.runtime.model.families import BODIES, FAMILIES, RENAMED, ExpertNames, Family
from sgl.runtime.model.fields import Fields, read_config_json, read_json
from sgl.runtime.model.gguf_checkpoint import GgufCheckpoint
from sgl.runtime.model.quantized.scheme import QuantScheme
from sgl.runtime.model.weight_files import stored_dtype

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
DtypeName = Literal["float32", "bfloat16", "float16"]
_MOST_PARTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. The fields after `theta` only matter to types that scale frequencies."""

    type: RopeType
    theta: float
    factor: float
    original_context_length: int  # tokens, before scaling
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool
    axes: tuple[int, ...] = ()
    """[head_dim / 2] which position each frequency turns by: 0 time, 1 height, 2 width; none: there is one position."""
    part: float = 1.0  # of each head's numbers, which is rotated
    short_factors: tuple[float, ...] = ()  # of LongRoPE, for contexts up to the original length
    long_factors: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's numbers are rotated."""
        return int(head_dim * self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixtures of experts of a model."""

    num_experts: int
    top_k: int  # experts of a token
    intermediate_size: int  # of an expert
    shared_size: int | None  # intermediate size of the expert for all tokens
    normalises: bool  # the weights of a token's experts, to a sum of one
    layers: tuple[bool, ...]  # [num_layers] whether a layer has one; others have a dense feed-forward
    clamped: tuple[float, float] | None = None  # see `Experts`; then there are biases, too


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What decoder and loader need to know of a checkpoint."""

    path: str  # the checkpoint's folder, or its GGUF file
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None  # of the layers in `is_local`, if they have one of their own
    interleaved_rope: bool  # pairs neighbours
    is_local: tuple[bool, ...]  # [num_layers] whether a layer is of the kind with a window
    attention_scale: float  # of scores
    score_cap: float | None
    logit_cap: float | None
    embedding_scale: float
    context_length: int  # tokens, scaling included
    windows: tuple[int | None, ...]  # [num_layers] tokens that a token sees, itself included; None: all
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    wide_qk_norm: bool  # of all heads together
    tie_word_embeddings: bool
    initializer_range: float
    dtype: DtypeName  # of the checkpoint
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    checkpoint_format: str = "safetensors"  # with the types of a GGUF file's tensors, or the scheme
    scheme: QuantScheme | None = None  # of a quantised checkpoint
    media: MediaConfig | None = None  # of a model that sees images
    experts: ExpertsConfig | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether the layer's feed-forward is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def feed_forward_width(self) -> int:
        """Elements that a token takes at most within a feed-forward."""
        dense = 3 * self.intermediate_size
        if self.experts is None:
            return dense
        its = self.experts
        return max(dense, its.top_k * (its.intermediate_size + self.hidden_size) + 3 * (its.shared_size or 0))

    @property
    def latent_dim(self) -> int:
        """Values are cached beside keys."""
        return 0

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read a checkpoint folder, a config.json, a GGUF file, or a hub id (downloads the checkpoint). Raises
        UnsupportedModel for missing features of the decoder, ModelError for a missing or inconsistent config."""
        folder = find_checkpoint(path)
        path = str(folder)
        gguf = GgufCheckpoint(path) if is_gguf(path) else None
        fields = Fields(path, read_config_json(folder) if gguf is None else gguf.config)
        architectures = fields.listed("architectures", str) or []
        name = str(architectures[0]) if len(architectures) == 1 else None
        name = BODIES.get(str(name), name)
        if name not in FAMILIES:
            raise UnsupportedModel(
                f"{path}: architecture {name or architectures} is not supported; supported: {', '.join(FAMILIES)}",
                architecture=name,
                supported=tuple(FAMILIES),
                path=path,
            )
        family = FAMILIES[name]
        whole = fields.data
        fields = Fields(path, {**family.defaults, **_text_fields(whole)}, architecture=name)
        _refuse_unsupported(fields, family)
        config = _model_config(fields, family, special_tokens(folder, fields.data))
        if family.vision is not None:
            config = replace(config, media=MediaConfig.read(folder, family.vision, whole))
        if (quantized := fields.data.get("quantization_config")) is not None:
            scheme = QuantScheme.of(quantized, path, name)
            config = replace(config, scheme=scheme, checkpoint_format=scheme.checkpoint_format)
        return config if gguf is None else replace(config, checkpoint_format=gguf.types())


def _model_config(fields: Fields, family: Family, special: tuple[int | None, tuple[int, ...]]) -> ModelConfig:
    hidden_size = fields.integer("hidden_size")
    num_heads, num_kv_heads, head_dim = fields.heads(hidden_size)
    num_layers = fields.integer("num_hidden_layers")
    for key, value in fields.data.items():
        if (
            "num_" in key
            and key.endswith(("layers", "experts"))
            and isinstance(value, int | float)
            and value > _MOST_PARTS
        ):
            raise fields.error(f"{key!r} is {value}, and at most {_MOST_PARTS} are built")
    rope, local_rope = _ropes(fields, family, head_dim)
    rotary_dim = rope.rotary_dim(head_dim)
    if rotary_dim % 2:
        raise fields.unsupported(f"a rope over an odd number of a head's {head_dim} numbers, {rotary_dim}")
    if rope.type == "longrope" and {len(rope.short_factors), len(rope.long_factors)} != {rotary_dim // 2}:
        raise fields.error(f"short_factor and long_factor are not {rotary_dim // 2} numbers each")
    # what scales Gemma 3's rope is counted in max_position_embeddings
    context_length = read_context_length(fields, rope if local_rope is None else local_rope)
    has_qkv_bias = family.attention_bias == "qkv" or (
        family.attention_bias == "qkv option" and fields.flag("qkv_bias", default=True)
    )
    has_bias = family.attention_bias.endswith("configured") and fields.flag("attention_bias")
    is_local = _is_local(fields, family, num_layers)
    window = fields.integer("sliding_window") if any(is_local) else None
    return ModelConfig(
        path=fields.path,
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=rope,
        local_rope=local_rope,
        interleaved_rope=family.has_interleaved_rope,
        is_local=is_local,
        attention_scale=(fields.number("query_pre_attn_scalar") if family.has_query_scalar else head_dim) ** -0.5,
        score_cap=fields.optional("attn_logit_softcapping") if family.has_score_cap else None,
        logit_cap=fields.optional("final_logit_softcapping"),
        embedding_scale=hidden_size**0.5 if family.scales_embedding else 1.0,
        context_length=context_length,
        windows=tuple(
            None if not its or window is None or window >= context_length else window for its in is_local
        ),
        qkv_bias=has_qkv_bias or has_bias,
        output_bias=family.attention_bias == "configured" and has_bias,
        mlp_bias=family.has_mlp_bias_option and fields.flag("mlp_bias"),
        qk_norm=family.has_qk_norm,
        wide_qk_norm=family.has_wide_qk_norm,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        initializer_range=fields.number("initializer_range", default=0.02),
        dtype=read_dtype(fields),
        bos_token_id=special[0],
        eos_token_ids=special[1],
        experts=None if family.experts is None else _experts(fields, family.experts, num_layers),
    )


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    key, known = {"silu": ("hidden_act", "silu"), "gelu": ("hidden_activation", "gelu_pytorch_tanh")}[
        family.activation
    ]
    if fields.data.get(key) not in (None, known):
        raise fields.unsupported(f"activation {fields.data[key]!r}")
    if str(fields.data.get("model_type")) in RENAMED:
        raise fields.unsupported(f"the other names of fields and tensors of {fields.data['model_type']!r}")
    if fields.data.get("use_bidirectional_attention"):
        raise fields.unsupported("attention to later tokens (use_bidirectional_attention)")
    for key in ("num_experts", "num_local_experts"):
        if fields.data.get(key) and family.experts is None:
            raise fields.unsupported(f"a mixture of experts ({key})")


def _experts(fields: Fields, names: ExpertNames, num_layers: int) -> ExpertsConfig:
    """The number of experts by its old or new name."""
    key = "num_local_experts" if fields.data.get("num_local_experts") else "num_experts"
    num_experts, top_k = fields.integer(key), fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.error(f"num_experts_per_tok {top_k} is more than {key} {num_experts}")
    dense = fields.listed("mlp_only_layers", int) or []
    step = fields.integer("decoder_sparse_step", default=1)
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer(names.size),
        shared_size=fields.integer("shared_expert_intermediate_size") if names.has_shared else None,
        normalises=names.always_normalises or fields.flag("norm_topk_prob"),
        clamped=(fields.number("swiglu_alpha"), fields.number("swiglu_limit")) if names.is_turned else None,
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


def _text_fields(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's fields of a config that may keep them in a section."""
    text = data.get("text_config")
    if not isinstance(text, Mapping):
        return data
    above = {key: data[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if data.get(key) is not None}
    return {**data, **{key: value for key, value in text.items() if value is not None}, **above}


def _ropes(fields: Fields, family: Family, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """That of all layers; or of those without a window, and of those with one."""
    if not family.has_local_rope:
        return read_rope(fields, family.vision, head_dim, is_partial=family.has_partial_rope), None
    data, by_type = fields.data, fields.section(fields.mapping("rope_parameters"))
    given = {name: by_type.mapping(f"{name}_attention") for name in ("full", "sliding")}
    given["full"] = {**given["full"], **fields.mapping("rope_scaling")}  # older configs scale only these
    thetas = {"full": data["rope_theta"], "sliding": data["rope_local_base_freq"]}
    full, local = (
        fields.section({**data, "rope_theta": thetas[name], "rope_scaling": None, "rope_parameters": its})
        for name, its in given.items()
    )
    return read_rope(full), read_rope(local)


def read_rope(
    fields: Fields, vision: Towers | None = None, head_dim: int = 0, *, is_partial: bool = False
) -> RopeConfig:
    """The rope parameters, from `rope_parameters`, or from `rope_scaling` and `rope_theta`. is_partial: whether the
    rope may be over a part of each head."""
    given = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise fields.unsupported("a rope of its own for each layer type")
    top_level = {key: fields.data[key] for key in ("rope_theta", "partial_rotary_factor") if key in fields.data}
    rope = fields.section({**top_level, **{key: value for key, value in given.items() if value is not None}})
    kind = rope.data.get("rope_type", rope.data.get("type", "default"))
    if kind == "mrope" and vision is not None:
        kind = "default"
    if kind in ("su", "yarn") and fields.architecture == "Phi3ForCausalLM":
        kind = "longrope"  # by its older names
    if kind not in get_args(RopeType):
        raise fields.unsupported(f"rope type {kind!r}")
    part = rope.number("partial_rotary_factor", default=1.0)
    if part != 1.0 and not is_partial:
        raise fields.unsupported("a rope over a part of the head (partial_rotary_factor)")
    if "mrope_section" in rope.data and vision is None:
        raise fields.unsupported("a multimodal rope (mrope_section)")
    max_positions = fields.integer("max_position_embeddings")
    original = max_positions
    if kind in ("llama3", "yarn", "longrope"):
        given_original = rope.integer("original_max_position_embeddings", default=max_positions)
        original = fields.integer("original_max_position_embeddings", default=given_original)

    def factors(key: str) -> tuple[float, ...]:
        its = rope.data.get(key) if kind == "longrope" else ()
        if not isinstance(its, list | tuple) or not all(isinstance(each, int | float) and each > 0 for each in its):
            raise rope.error(f"{key!r} is {its!r:.100}, not a list of numbers above 0")
        return tuple(map(float, its))

    needs_factor = kind in ("linear", "dynamic", "llama3")
    return RopeConfig(
        type=cast(RopeType, kind),
        theta=float(rope.number("rope_theta", default=10000.0)),
        factor=rope.number("factor", default=None if needs_factor else max_positions / original),
        original_context_length=original,
        low_freq_factor=rope.number("low_freq_factor", default=None if kind == "llama3" else 1.0),
        high_freq_factor=rope.number("high_freq_factor", default=None if kind == "llama3" else 4.0),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        attention_factor=rope.optional("attention_factor"),
        mscale=rope.optional("mscale"),
        mscale_all_dim=rope.optional("mscale_all_dim"),
        truncate=rope.flag("truncate", default=True),
        axes=() if vision is None else _axes(rope, vision, head_dim // 2),
        part=part,
        short_factors=factors("short_factor"),
        long_factors=factors("long_factor"),
    )


def _axes(rope: Fields, vision: Towers, num_frequencies: int) -> tuple[int, ...]:
    """Which of a token's positions each frequency turns by: 0 time, 1 height, 2 width."""
    interleaves = vision == "qwen3_vl"
    sections = rope.data.get("mrope_section") or ([24, 20, 20] if interleaves else [16, 24, 24])
    if not isinstance(sections, list) or len(sections) != 3 or not all(isinstance(its, int) for its in sections):
        raise rope.error(f"'mrope_section' is {sections!r}, not three numbers")
    if interleaves:
        return tuple(at % 3 if at < 3 * sections[at % 3] else 0 for at in range(num_frequencies))
    if sum(sections) != num_frequencies:
        raise rope.error(f"'mrope_section' {sections} does not make up {num_frequencies} frequencies")
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def read_context_length(fields: Fields, rope: RopeConfig) -> int:
    """Scaled types reach factor times the original length, or max_position_embeddings if longer; llama3 reaches the
    latter."""
    max_positions = fields.integer("max_position_embeddings")
    if rope.type in ("linear", "dynamic", "yarn"):
        return max(max_positions, int(rope.original_context_length * rope.factor))
    return max_positions


def _is_local(fields: Fields, family: Family, num_layers: int) -> tuple[bool, ...]:
    """[num_layers] whether a layer attends to a window."""
    kind, is_given = family.sliding_window, fields.data.get("sliding_window") is not None
    is_optional = kind in ("if used", "by layer", "every other")
    has_window = is_given and (not is_optional or fields.flag("use_sliding_window"))
    if kind in ("none", "all layers", "if used"):
        return (has_window and kind != "none",) * num_layers
    layer_types = fields.listed("layer_types", str)
    if layer_types is None and kind == "by pattern":
        pattern = fields.integer("sliding_window_pattern")
        layer_types = [
            "full_attention" if layer % pattern == pattern - 1 else "sliding_attention"
            for layer in range(num_layers)
        ]
    if layer_types is None:
        first = fields.data.get("max_window_layers")
        if kind == "every other":
            return tuple(
                has_window and first is not None and its < first and not its % 2 for its in range(num_layers)
            )
        return tuple(has_window and first is not None and layer >= first for layer in range(num_layers))
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise fields.unsupported(f"layer type {layer_type!r}")
    if len(layer_types) != num_layers:
        raise fields.error(f"layer_types names {len(layer_types)} layers and num_hidden_layers {num_layers}")
    if "sliding_attention" in layer_types and not has_window:
        raise fields.error("layer_types has sliding_attention, but use_sliding_window or sliding_window is unset")
    return tuple(layer_type == "sliding_attention" for layer_type in layer_types)


def read_dtype(fields: Fields) -> DtypeName:
    """The checkpoint's; that of its numbers if its config does not say one."""
    name = str(fields.data.get("dtype") or fields.data.get("torch_dtype") or "auto").removeprefix("torch.")
    name = stored_dtype(Path(fields.path)) if name == "auto" else name
    if name not in get_args(DtypeName):
        raise fields.unsupported(f"dtype {name!r}")
    return cast(DtypeName, name)


def _token_ids(data: Mapping[str, Any], key: str, folder: Path) -> tuple[int, ...]:
    """One, several or none; negative ones stand for none."""
    value = data.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int for each in ids):
        raise ModelError(
            f"{folder}: {key!r} is {value!r:.100}, neither a token nor a list of them", path=str(folder)
        )
    return tuple(each for each in ids if each >= 0)


def special_tokens(folder: Path, data: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """Ids of the token that begins a text, and of those that end one, by generation_config.json or else config.json,
    whose fields are `data`."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    begin = _token_ids(generation if "bos_token_id" in generation else data, "bos_token_id", folder)
    ends = _token_ids(generation, "eos_token_id", folder) or _token_ids(data, "eos_token_id", folder)
    return (begin[0] if begin else None), ends
