"""Reads the config.json of an EAGLE-3 head: flat, as its authors publish it (`LlamaForCausalLMEagle3`), or as
speculators writes it, with the layer's part in `transformer_layer_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl.runtime.gguf import is_gguf
from sgl.runtime.model.checkpoint import checkpoint_folder, find_checkpoint
from sgl.runtime.model.config import DtypeName, RopeConfig, read_dtype, read_rope
from sgl.runtime.model.fields import Fields, read_json

NUM_LAYERS_READ = 3
_WRAPPED = "speculators_model_type"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """What loader and head need to know of a checkpoint."""

    path: str
    architecture: str
    vocab_size: int  # of the target
    draft_vocab_size: int  # tokens that the head may draft
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    layers: tuple[int, ...] | None
    """The target's layers behind which it reads hidden states; None: `default_layers`."""
    num_norms: int
    """Of what the layers made, before it is fused: 1 of all together (`norm_before_fc`), 3 of each (`fc_norm`), 0."""
    norm_before_residual: bool
    norm_output: bool  # what it made of a token, as the feature of the next: behind its last norm
    tie_word_embeddings: bool
    window: int | None  # tokens that its layer sees; None: all
    logit_scale: float
    dtype: DtypeName
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_format: str = "safetensors"

    @property
    def num_layers(self) -> int:
        """Of its own."""
        return 1

    @property
    def latent_dim(self) -> int:
        """Values are cached beside keys."""
        return 0

    @property
    def context_length(self) -> int:
        """Any: its positions are the target's."""
        return 1 << 30

    @classmethod
    def from_pretrained(cls, path: str | Path) -> EagleConfig:
        """Read a checkpoint folder, a config.json, or a hub id (downloads the checkpoint). Raises UnsupportedModel for
        anything else than a head of one Llama layer, ModelError for a missing or inconsistent config."""
        folder = checkpoint_folder(path)
        whole = Fields(str(folder), read_json(folder / "config.json"))
        wrapped, whole.architecture = whole.data.get(_WRAPPED), _architecture(whole.data)
        if not _is_eagle3(whole.data):
            what = whole.architecture if wrapped is None else wrapped
            raise whole.unsupported(f"{what} as an EAGLE-3 head (LlamaForCausalLMEagle3; DRAFT asks a model)")
        layer = whole.data if wrapped is None else whole.data.get("transformer_layer_config")
        if not isinstance(layer, Mapping):
            raise whole.error(f"'transformer_layer_config' is {layer!r:.100}, not an object")
        return _config(whole, whole.section(layer))

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers to read of a target with so many. Raises ModelError if it has too few."""
        layers = default_layers(num_layers) if self.layers is None else self.layers
        fields = Fields(self.path, {})
        if len(set(layers)) != NUM_LAYERS_READ or sorted(layers) != list(layers) or layers[0] < -1:
            raise fields.error(
                f"the head reads behind layers {list(layers)} of a target with {num_layers}: they must be three, "
                "ascending (eagle_config.eagle_aux_hidden_state_layer_ids names others)"
            )
        if layers[-1] > num_layers - 2:
            raise fields.error(
                f"the head reads behind layer {layers[-1]}, and the target has {num_layers} layers, of which the last "
                "one computes only the tokens to sample after: it is a head for another model"
            )
        return layers


def is_head(path: str | Path) -> bool:
    """Whether a checkpoint is an EAGLE-3 head, by its config. Raises ModelError."""
    folder = find_checkpoint(path)
    return not is_gguf(folder) and _is_eagle3(read_json(folder / "config.json"))


def _architecture(data: Mapping[str, Any]) -> str:
    return ", ".join(map(str, data.get("architectures") or [])) or str(data.get("model_type"))


def _is_eagle3(data: Mapping[str, Any]) -> bool:
    """Some heads have their target's architecture, and only they have tokens that are drafted."""
    if (wrapped := data.get(_WRAPPED)) is not None:
        return bool(wrapped == "eagle3")
    name, drafts = _architecture(data).lower(), data.get("draft_vocab_size") is not None
    return "eagle3" in name or (drafts and name.endswith(("forcausallm", "forconditionalgeneration")))


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Behind which heads read whose config names none, of a target with so many: near its beginning, middle and
    end."""
    return tuple(sorted((1, num_layers // 2 - 1, num_layers - 4)))


def _config(whole: Fields, layer: Fields) -> EagleConfig:
    if layer.integer("num_hidden_layers", default=1) != 1:
        raise whole.unsupported(f"a head of {layer.data['num_hidden_layers']} layers")
    if layer.data.get("hidden_act") not in (None, "silu"):
        raise whole.unsupported(f"activation {layer.data['hidden_act']!r}")
    hidden_size = layer.integer("hidden_size")
    num_heads, num_kv_heads, head_dim = layer.heads(hidden_size)
    vocab_size = layer.integer("vocab_size")
    draft_vocab_size = whole.integer("draft_vocab_size", default=vocab_size)
    if draft_vocab_size > vocab_size:
        raise whole.error(f"draft_vocab_size {draft_vocab_size} is more than vocab_size {vocab_size}")
    inner = whole.section(whole.mapping("eagle_config"))
    is_normed, is_each_normed = (
        any(its.flag(key) for its in (inner, whole)) for key in ("norm_before_fc", "fc_norm")
    )
    if is_normed and is_each_normed:
        raise whole.error("'norm_before_fc' and 'fc_norm' are both true: one of them norms what is fused")
    is_llama4 = layer.data.get("model_type") == "llama4_text"
    return EagleConfig(
        path=whole.path,
        architecture=str(whole.architecture),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=hidden_size,
        target_hidden_size=whole.integer("target_hidden_size", default=hidden_size),
        intermediate_size=layer.integer("intermediate_size_mlp" if is_llama4 else "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=layer.number("rms_norm_eps", default=1e-6),
        rope=_rope(layer),
        layers=_layers(whole, inner),
        num_norms=NUM_LAYERS_READ if is_each_normed else int(is_normed),
        norm_before_residual=whole.flag("norm_before_residual"),
        norm_output=whole.flag("norm_output"),
        tie_word_embeddings=any(its.flag("tie_word_embeddings") for its in (whole, layer)),
        window=_window(layer),
        logit_scale=whole.number("logit_scale", default=1.0),
        dtype=read_dtype(whole if whole.data.get("dtype") or whole.data.get("torch_dtype") else layer),
    )


def _rope(layer: Fields) -> RopeConfig:
    """Nothing is drafted behind images, and for texts a multimodal rope is a plain one."""
    data, marks = dict(layer.data), {"mrope_section", "mrope_interleaved"}
    for key in ("rope_scaling", "rope_parameters"):
        its = {name: value for name, value in layer.mapping(key).items() if name not in marks and value != "mrope"}
        data[key] = its
    return read_rope(layer.section(data))


def _window(layer: Fields) -> int | None:
    """Trainers copy the target's sliding_window, and their heads do not slide unless more is said."""
    kinds = layer.listed("layer_types", str) or []
    for kind in kinds[:1]:
        if kind not in ("full_attention", "sliding_attention"):
            raise layer.unsupported(f"a head's layer of {kind!r}")
    is_sliding = kinds[0] == "sliding_attention" if kinds else layer.flag("use_sliding_window")
    if is_sliding and (kinds or layer.data.get("sliding_window") is not None):
        return layer.integer("sliding_window")
    return None


def _layers(whole: Fields, inner: Fields) -> tuple[int, ...] | None:
    """In `eagle_config`, the numbers of layers; outside, those of the layers that follow them."""
    key = "eagle_aux_hidden_state_layer_ids"
    if inner.data.get("use_aux_hidden_state") is False:
        raise whole.unsupported("a head that reads only the last hidden states (use_aux_hidden_state)")
    for fields, behind in ((inner, 0), (whole, 1)):
        if given := fields.listed(key, int):
            return tuple(its - behind for its in given)
    return None
