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
    norm_before_residual: bool
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
        wrapped, whole.architecture = _kind(whole.data)
        if not _is_eagle3(wrapped, whole.architecture):
            what = whole.architecture if wrapped is None else wrapped
            raise whole.unsupported(f"{what} as an EAGLE-3 head (LlamaForCausalLMEagle3)")
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
    return not is_gguf(folder) and _is_eagle3(*_kind(read_json(folder / "config.json")))


def _kind(data: Mapping[str, Any]) -> tuple[str | None, str]:
    """Of a speculators model, and the architecture."""
    name = ", ".join(map(str, data.get("architectures") or [])) or str(data.get("model_type"))
    return data.get("speculators_model_type"), name


def _is_eagle3(wrapped: str | None, architecture: str) -> bool:
    return "eagle3" in architecture.lower() if wrapped is None else wrapped == "eagle3"


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
    return EagleConfig(
        path=whole.path,
        architecture=str(whole.architecture),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=hidden_size,
        target_hidden_size=whole.integer("target_hidden_size", default=hidden_size),
        intermediate_size=layer.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=layer.number("rms_norm_eps", default=1e-6),
        rope=read_rope(layer),
        layers=_layers(whole),
        norm_before_residual=whole.flag("norm_before_residual"),
        logit_scale=whole.number("logit_scale", default=1.0),
        dtype=read_dtype(whole if whole.data.get("dtype") or whole.data.get("torch_dtype") else layer),
    )


def _layers(whole: Fields) -> tuple[int, ...] | None:
    """In `eagle_config`, the numbers of layers; outside, those of the layers that follow them."""
    key, inner = "eagle_aux_hidden_state_layer_ids", whole.data.get("eagle_config") or {}
    if not isinstance(inner, Mapping):
        raise whole.error(f"'eagle_config' is {inner!r:.100}, not an object")
    if inner.get("use_aux_hidden_state") is False:
        raise whole.unsupported("a head that reads only the last hidden states (use_aux_hidden_state)")
    for data, behind in ((inner, 0), (whole.data, 1)):
        given: Any = data.get(key)
        if given is None:
            continue
        if not isinstance(given, list) or not all(type(its) is int for its in given):
            raise whole.error(f"{key!r} is {given!r:.100}, not a list of layers")
        return tuple(its - behind for its in given)
    return None
