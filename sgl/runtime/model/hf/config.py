"""Reads a checkpoint that transformers has a class for, and checks that it can be served."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from sgl.errors import ModelError, UnsupportedModel
from sgl.runtime.model.checkpoint import checkpoint_folder
from sgl.runtime.model.config import DtypeName, special_tokens
from sgl.runtime.model.families import FAMILIES, RENAMED
from sgl.runtime.model.fields import read_config_json, read_json
from sgl.runtime.model.hf import probe
from sgl.runtime.model.hf.probe import AttentionLayer, Refused
from sgl.runtime.model.hf.rotary import fix_frequencies
from sgl.runtime.model.quantized.scheme import QuantScheme
from sgl.runtime.model.weight_files import stored_dtype

_COUNT = re.compile(r"(\w+_)?(num|n)_(\w+_)?(layer|expert|block)s?")  # fields that number modules
_MOST_PARTS = 4096
_RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})  # layer types
_STATELESS = frozenset({"attention", "full_attention", "sliding_attention", "mlp", "moe"})
_TEXT_CLASSES = {"Llama4ForConditionalGeneration": "Llama4ForCausalLM"}  # whose own forward pass needs images
_CHUNKED = "chunked_attention"
_DECODERS = frozenset(
    {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """What engine and loader need to know of a checkpoint."""

    path: str  # the checkpoint's folder
    architecture: str
    vocab_size: int
    hidden_size: int
    context_length: int
    dtype: DtypeName  # of the checkpoint
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    layers: tuple[AttentionLayer, ...]
    body: str  # see `Probed`
    output_class: type[Any]
    num_weights: int
    settings: str  # all else that its modules read
    linears: Mapping[str, tuple[int, int]]  # [out, in] of the linear modules of the body
    cached_head_dim: int = 0
    """Numbers of a cached key or value, if more than the layers'."""
    checkpoint_format: str = "safetensors"
    scheme: QuantScheme | None = None  # of a quantised checkpoint

    @property
    def num_layers(self) -> int:
        """Layers with keys and values."""
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """Of each layer in the cache: where layers have fewer, each is cached several times."""
        return max(layer.num_kv_heads for layer in self.layers)

    @property
    def head_dim(self) -> int:
        """Numbers of a cached key or value: zeros fill up narrower ones."""
        return max(self.cached_head_dim, *(max(layer.key_dim, layer.value_dim) for layer in self.layers))

    @property
    def latent_dim(self) -> int:
        """Values are cached beside keys."""
        return 0

    @classmethod
    def from_pretrained(cls, path: str | Path) -> TransformersConfig:
        """Read a checkpoint folder, a config.json, or a hub id (downloads the checkpoint). Raises UnsupportedModel for
        architectures that cannot be served so, ModelError for a missing or inconsistent config."""
        folder = checkpoint_folder(path)
        data = read_config_json(folder)
        architecture = _architecture(str(folder), data)
        _check(str(folder), data)
        with _refusing(str(folder), architecture):
            config = plain_config(folder)
            if config.is_encoder_decoder:
                raise Refused("an encoder-decoder")
            context_length = _context_length(config)
            dtype = _dtype(str(folder), architecture, config)  # before a module is made of it, which sets another
            # some products have no other dtype on the meta device
            try:
                module = empty_module(config, architecture, probe.NAME, torch.bfloat16)
            except KeyError as error:
                raise (Refused(probe.OWN_ATTENTION) if error.args == (probe.NAME,) else error) from error
            _check_states(config, module)
            settings = json.dumps({**config.to_diff_dict(), "_name_or_path": ""}, sort_keys=True, default=str)
            fix_frequencies(module, context_length)
            probed = probe.probe(module, context_length)
            _check_layers(probed.layers)
        bos, eos = special_tokens(folder, {**config.get_text_config().to_dict(), **data})
        scheme = None
        text = data.get("text_config")
        for fields in (data, text if isinstance(text, Mapping) else {}):
            if fields.get("quantization_config") is not None:
                scheme = QuantScheme.of(fields["quantization_config"], str(folder), architecture)
        return cls(
            path=str(folder),
            architecture=architecture,
            vocab_size=probed.vocab_size,
            hidden_size=probed.hidden_size,
            context_length=context_length,
            dtype=dtype,
            bos_token_id=bos,
            eos_token_ids=eos,
            layers=tuple(probed.layers),
            body=probed.body,
            output_class=probed.output_class,
            num_weights=sum(its.numel() for its in {id(its): its for its in module.parameters()}.values()),
            settings=settings,
            linears={
                f"{probed.body}.{name}": tuple(its.weight.t().shape if type(its) is Conv1D else its.weight.shape)
                for name, its in module.get_submodule(probed.body).named_modules()
                if type(its) in (nn.Linear, Conv1D)
            },
            checkpoint_format="safetensors" if scheme is None else scheme.checkpoint_format,
            scheme=scheme,
        )


def plain_config(folder: str | Path) -> Any:
    """transformers' config of a checkpoint, as if it were not quantised."""
    data = read_json(Path(folder) / "config.json")
    is_auto = "auto" in (data.get("dtype"), data.get("torch_dtype"))  # which transformers looks for in torch
    options = {"dtype": "float32"} if is_auto else {}
    config = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, **options
    )
    if is_auto:
        config.dtype = None
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    text = config.get_text_config()
    if _CHUNKED in (types := getattr(text, "layer_types", None) or ()):
        # Within the first chunk a token sees all before it, and nothing depends on how many tokens are cached.
        text.layer_types = ["full_attention" if its == _CHUNKED else its for its in types]
        most = min(
            text.attention_chunk_size, int(text.floor_scale) - 1 if text.attn_temperature_tuning else 1 << 30
        )
        text.max_position_embeddings = min(text.max_position_embeddings, most)
        text.attn_temperature_tuning = False
    return config


def empty_module(config: Any, architecture: str, attention: str, dtype: torch.dtype) -> Any:
    """The model on the meta device, for inference. attention: a name in transformers' registry."""
    if architecture in _TEXT_CLASSES:
        config, architecture = config.get_text_config(), _TEXT_CLASSES[architecture]
    with torch.device("meta"):
        module = getattr(transformers, architecture)._from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    return module.eval()


def tensor_prefixes(architecture: str) -> tuple[str, ...]:
    """Of the tensors of what `empty_module` makes, in a checkpoint."""
    return ("language_model.",) if architecture in _TEXT_CLASSES else ("",)


def _architecture(path: str, data: Mapping[str, Any]) -> str:
    names = data.get("architectures") or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(data.get("model_type")))]
    name = str(names[0]) if isinstance(names, list) and len(names) == 1 else str(names)
    version = transformers.__version__
    mapped = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(data.get("model_type")))
    if isinstance(mapped, str) and (mapped.lower() == name.lower() or data.get("model_type") in RENAMED):
        name = mapped  # published as PhiMoEForCausalLM, or ExaoneForCausalLM
    if name in _DECODERS:
        return name
    if isinstance(getattr(transformers, name, None), type):
        message = (
            f"architecture {name} writes no text token by token (it is no causal language model of transformers)"
        )
    else:
        own = " Its own code (auto_map) is never run." if data.get("auto_map") else ""
        message = (
            f"architecture {name} is known neither to sgl nor to transformers {version}: it needs a transformers that "
            f"has it (pip install --upgrade transformers), or a Family in sgl/runtime/model/families.py.{own}"
        )
    raise UnsupportedModel(f"{path}: {message}", architecture=name, supported=tuple(FAMILIES), path=path)


def _check(path: str, data: Mapping[str, Any]) -> None:
    """Refuse what shows before anything is built."""
    text = data.get("text_config")
    for fields in (data, text if isinstance(text, Mapping) else {}):
        for key, value in fields.items():
            if _COUNT.fullmatch(key) and isinstance(value, int) and value > _MOST_PARTS:
                message = f"{path}: {key!r} is {value}, and at most {_MOST_PARTS} are built"
                raise ModelError(message, path=path)


@contextlib.contextmanager
def _refusing(path: str, architecture: str) -> Iterator[None]:
    """Turns refusals, and what transformers raises, into typed errors."""
    try:
        yield
    except Refused as error:
        raise unsupported(path, architecture, str(error)) from error
    except ModelError:
        raise
    except Exception as error:  # transformers checks configs with many classes of exceptions
        said = " ".join(str(error).split())
        raise ModelError(
            f"{path}: transformers {transformers.__version__} cannot build {architecture} of its config.json: {said}",
            path=path,
        ) from error


def unsupported(path: str, architecture: str, feature: str) -> UnsupportedModel:
    """The error for a feature that cannot be served."""
    return UnsupportedModel(
        f"{path}: {feature} is not supported with model_impl='transformers' ({architecture})",
        architecture=architecture,
        supported=tuple(FAMILIES),
        path=path,
    )


def _check_states(config: Any, module: Any) -> None:
    """Raise Refused for layers whose state is not keys and values."""
    types = {*(getattr(config.get_text_config(), "layer_types", None) or ())}
    recurrent = sorted(types & _RECURRENT)
    # Granite 4.0 Micro is a hybrid with attention alone.
    attends = bool(types) and types <= _STATELESS and not any(type(its) is nn.Conv1d for its in module.modules())
    if recurrent or (module._is_stateful and not attends):
        shown = f" ({', '.join(recurrent)})" if recurrent else ""
        raise Refused(f"a model with recurrent layers{shown}")


def _check_layers(layers: list[AttentionLayer]) -> None:
    """Raise Refused for layers that differ in what our cache and backends need alike."""
    most = max(layer.num_kv_heads for layer in layers)
    for what, alike in (
        ("attention heads", {layer.num_heads for layer in layers}),
        ("key-value heads", {most, *(layer.num_kv_heads for layer in layers if most % layer.num_kv_heads)}),
        ("soft caps", {layer.softcap for layer in layers}),
    ):
        if len(alike) > 1:
            raise Refused(f"layers with different {what} ({', '.join(map(str, sorted(alike, key=str)))})")


def _context_length(config: Any) -> int:
    """Tokens: max_position_embeddings, or what a scaled rope reaches."""
    text = config.get_text_config()
    given = getattr(text, "max_position_embeddings", None)
    if not isinstance(given, int) or given < 1:
        raise Refused(f"a context of max_position_embeddings={given!r}")
    reached = [given]
    parameters = getattr(text, "rope_parameters", None) or {}
    for rope in (
        parameters.values() if all(isinstance(its, Mapping) for its in parameters.values()) else [parameters]
    ):
        if rope and rope.get("rope_type") in ("linear", "yarn"):
            original = rope.get("original_max_position_embeddings") or given
            reached.append(int(original * rope.get("factor", 1.0)))
    return max(reached)


def _dtype(path: str, architecture: str, config: Any) -> DtypeName:
    name = str(config.dtype or config.get_text_config().dtype or stored_dtype(Path(path))).removeprefix("torch.")
    if name not in get_args(DtypeName):
        raise unsupported(path, architecture, f"dtype {name!r}")
    return cast(DtypeName, name)
