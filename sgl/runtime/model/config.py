"""Reads a checkpoint's config.json and generation_config.json, in transformers' old and new spellings, or a GGUF file's
metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from sgl.errors import ModelError, UnsupportedModel
from sgl.runtime.gguf import is_gguf
from sgl.runtime.media.config import MediaConfig, Towers
from sgl.runtime.model.checkpoint import find_checkpoint
from sgl.runtime.model.families import FAMILIES, ExpertNames, Family
from sgl.runtime.model.gguf_checkpoint import GgufCheckpoint
from sgl.runtime.model.quantized.scheme import QuantScheme

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
DtypeName = Literal["float32", "bfloat16", "float16"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixtures of experts of a model."""

    num_experts: int
    top_k: int  # experts of a token
    intermediate_size: int  # of an expert
    shared_size: int | None  # intermediate size of the expert for all tokens
    normalises: bool  # the weights of a token's experts, to a sum of one
    layers: tuple[bool, ...]  # [num_layers] whether a layer has one; others have a dense feed-forward


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
    context_length: int  # tokens, scaling included
    windows: tuple[int | None, ...]  # [num_layers] tokens that a token sees, itself included; None: all
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
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
        fields = Fields(path, read_json(folder / "config.json") if gguf is None else gguf.config)
        architectures = fields.data.get("architectures") or []
        name = str(architectures[0]) if len(architectures) == 1 else None
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
        if gguf is not None:
            return replace(config, checkpoint_format=gguf.types())
        if (quantized := fields.data.get("quantization_config")) is None:
            return config
        scheme = QuantScheme.of(quantized, path, name)
        return replace(config, scheme=scheme, checkpoint_format=f"safetensors: {scheme}")


def _model_config(fields: Fields, family: Family, special: tuple[int | None, tuple[int, ...]]) -> ModelConfig:
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    head_dim = fields.integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise fields.unsupported(f"an odd head_dim, {head_dim}")
    num_layers = fields.integer("num_hidden_layers")
    rope = read_rope(fields, family.vision, head_dim)
    context_length = read_context_length(fields, rope)
    has_qkv_bias = family.attention_bias == "qkv" or (
        family.attention_bias == "qkv option" and fields.flag("qkv_bias", default=True)
    )
    configured_bias = family.attention_bias == "configured" and fields.flag("attention_bias")
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
        context_length=context_length,
        windows=tuple(
            None if window is None or window >= context_length else window
            for window in _windows(fields, family, num_layers)
        ),
        qkv_bias=has_qkv_bias or configured_bias,
        output_bias=configured_bias,
        mlp_bias=family.has_mlp_bias_option and fields.flag("mlp_bias"),
        qk_norm=family.has_qk_norm,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        initializer_range=fields.number("initializer_range", default=0.02),
        dtype=read_dtype(fields),
        bos_token_id=special[0],
        eos_token_ids=special[1],
        experts=None if family.experts is None else _experts(fields, family.experts, num_layers),
    )


class Fields:
    """A config.json, with path and architecture for errors; null counts as absent. Raises ModelError."""

    def __init__(self, path: str, data: Mapping[str, Any], architecture: str | None = None) -> None:
        self.path = path
        self.data = data
        self.architecture = architecture

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"config.json has no {key!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(f"{key!r} is {value!r}, not a number above 0")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self.number(key, default)
        if value != int(value):
            raise self.error(f"{key!r} is {value!r}, not a whole number")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{key!r} is {value!r}, neither true nor false")
        return default if value is None else value

    def section(self, data: Mapping[str, Any]) -> Fields:
        """Fields of a part of it."""
        return Fields(self.path, data, self.architecture)

    def error(self, message: str) -> ModelError:
        """For a missing or inconsistent field."""
        return ModelError(f"{self.path}: {message}", path=self.path)

    def unsupported(self, feature: str) -> UnsupportedModel:
        """For a feature that our own layers lack."""
        return UnsupportedModel(
            f"{self.path}: {feature} is not supported ({self.architecture})",
            architecture=self.architecture,
            supported=tuple(FAMILIES),
            path=self.path,
        )


def read_json(path: Path) -> dict[str, Any]:
    """A checkpoint's JSON object. Raises ModelError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is no checkpoint: it has no {path.name}", path=str(path)) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}", path=str(path)) from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds no JSON object", path=str(path))
    return data


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    if fields.data.get("hidden_act") not in (None, "silu"):
        raise fields.unsupported(f"activation {fields.data['hidden_act']!r}")
    for key in ("num_experts", "num_local_experts"):
        if fields.data.get(key) and family.experts is None:
            raise fields.unsupported(f"a mixture of experts ({key})")


def _experts(fields: Fields, names: ExpertNames, num_layers: int) -> ExpertsConfig:
    """The number of experts by its old or new name."""
    key = "num_local_experts" if fields.data.get("num_local_experts") else "num_experts"
    num_experts, top_k = fields.integer(key), fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.error(f"num_experts_per_tok {top_k} is more than {key} {num_experts}")
    dense = fields.data.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.error(f"'mlp_only_layers' is {dense!r}, not a list of layers")
    step = fields.integer("decoder_sparse_step", default=1)
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer(names.size),
        shared_size=fields.integer("shared_expert_intermediate_size") if names.has_shared else None,
        normalises=names.always_normalises or fields.flag("norm_topk_prob"),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


def _text_fields(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's fields of a config that may keep them in a section."""
    text = data.get("text_config")
    if not isinstance(text, Mapping):
        return data
    above = {key: data[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if data.get(key) is not None}
    return {**data, **{key: value for key, value in text.items() if value is not None}, **above}


def read_rope(fields: Fields, vision: Towers | None = None, head_dim: int = 0) -> RopeConfig:
    """The rope parameters, from `rope_parameters`, or from `rope_scaling` and `rope_theta`."""
    given = fields.data.get("rope_scaling") or fields.data.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise fields.unsupported("a rope of its own for each layer type")
    top_level = {key: fields.data[key] for key in ("rope_theta", "partial_rotary_factor") if key in fields.data}
    rope = fields.section({**top_level, **{key: value for key, value in given.items() if value is not None}})
    kind = rope.data.get("rope_type", rope.data.get("type", "default"))
    if kind == "mrope" and vision is not None:
        kind = "default"
    if kind not in get_args(RopeType):
        raise fields.unsupported(f"rope type {kind!r}")
    if rope.number("partial_rotary_factor", default=1.0) != 1.0:
        raise fields.unsupported("a rope over a part of the head (partial_rotary_factor)")
    if "mrope_section" in rope.data and vision is None:
        raise fields.unsupported("a multimodal rope (mrope_section)")
    max_positions = fields.integer("max_position_embeddings")
    original = max_positions
    if kind in ("llama3", "yarn"):
        given_original = rope.integer("original_max_position_embeddings", default=max_positions)
        original = fields.integer("original_max_position_embeddings", default=given_original)

    def optional(key: str) -> float | None:
        return rope.number(key) if key in rope.data else None

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
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=rope.flag("truncate", default=True),
        axes=() if vision is None else _axes(rope, vision, head_dim // 2),
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


def _windows(fields: Fields, family: Family, num_layers: int) -> list[int | None]:
    window = fields.data.get("sliding_window")
    is_optional = family.sliding_window in ("if used", "by layer", "every other")
    if is_optional and not fields.flag("use_sliding_window"):
        window = None
    if window is not None:
        window = fields.integer("sliding_window")
    if family.sliding_window == "none":
        return [None] * num_layers
    if family.sliding_window in ("all layers", "if used"):
        return [window] * num_layers
    layer_types = fields.data.get("layer_types")
    if layer_types is None:
        first = fields.data.get("max_window_layers")
        if family.sliding_window == "every other":
            return [
                window if first is not None and layer < first and not layer % 2 else None
                for layer in range(num_layers)
            ]
        return [window if first is not None and layer >= first else None for layer in range(num_layers)]
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise fields.unsupported(f"layer type {layer_type!r}")
    if len(layer_types) != num_layers:
        raise fields.error(f"layer_types names {len(layer_types)} layers and num_hidden_layers {num_layers}")
    if "sliding_attention" in layer_types and window is None:
        raise fields.error("layer_types has sliding_attention, but use_sliding_window or sliding_window is unset")
    return [window if layer_type == "sliding_attention" else None for layer_type in layer_types]


def read_dtype(fields: Fields) -> DtypeName:
    """The checkpoint's."""
    name = str(fields.data.get("dtype") or fields.data.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in get_args(DtypeName):
        raise fields.unsupported(f"dtype {name!r}")
    return cast(DtypeName, name)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def special_tokens(folder: Path, data: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """Ids of the token that begins a text, and of those that end one, by generation_config.json or else config.json,
    whose fields are `data`."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    begin = _token_ids(generation.get("bos_token_id", data.get("bos_token_id")))
    ends = _token_ids(generation.get("eos_token_id")) or _token_ids(data.get("eos_token_id"))
    return (begin[0] if begin else None), ends
