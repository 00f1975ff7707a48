"""Loads an EAGLE-3 head for a target from safetensors, by the names of its authors' files (`midlayer.`) or vLLM's
(`layers.0.`). What a file lacks of embedding and output matrix is the target's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch

from sgl.errors import ConfigError, WeightsError
from sgl.runtime.gguf import is_gguf
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.eagle.config import NUM_LAYERS_READ, EagleConfig
from sgl.runtime.model.eagle.head import EagleHead, HeadWeights
from sgl.runtime.model.loader import check_tensors, dtype_name
from sgl.runtime.model.weight_files import Entry, opened, read, read_headers
from sgl.runtime.model.weights import packed

_LAYER = "midlayer."
_EMBEDDING, _LM_HEAD, _FUSE = "embed_tokens.weight", "lm_head.weight", "fc.weight"
_TO_TARGET, _OF_TARGET = "d2t", "t2d"
_PARTS = {
    "fuse": ("fc",),
    "input_norm": (f"{_LAYER}input_layernorm",),
    "hidden_norm": (f"{_LAYER}hidden_norm",),
    "qkv": tuple(f"{_LAYER}self_attn.{name}_proj" for name in "qkv"),
    "output": (f"{_LAYER}self_attn.o_proj",),
    "post_attention_norm": (f"{_LAYER}post_attention_layernorm",),
    "gate_up": (f"{_LAYER}mlp.gate_proj", f"{_LAYER}mlp.up_proj"),
    "down": (f"{_LAYER}mlp.down_proj",),
    "norm": ("norm",),
}
"""Fields of `HeadWeights`, and the modules that each has the rows of."""


def load_head(config: EagleConfig, target: Decoder) -> EagleHead:
    """A head on its target's device, in its dtype. Raises WeightsError, and ConfigError if it is one for another
    model."""
    its = target.whole_config
    _check_fits("hidden_size", config.target_hidden_size, its.hidden_size, config, target)
    _check_fits("vocab_size", config.vocab_size, its.vocab_size, config, target)
    folder = Path(config.path)
    entries = {_name(name): entry for name, entry in read_headers(folder).items() if not name.endswith("inv_freq")}
    maps = {name: entries.pop(name) for name in (_TO_TARGET, _OF_TARGET) if name in entries}
    if _EMBEDDING not in entries and config.hidden_size == its.hidden_size and target.collectives is not None:
        entries |= _whole_embedding(target)
    shapes = _shapes(config, entries)
    check_tensors(entries, shapes, folder)
    tensors = {name: _read(entries[name]).to(target.device, target.dtype) for name in shapes}
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            message = f"{name} in {entries[name].file} is not finite as {dtype_name(target.dtype)}"
            raise WeightsError(message, path=str(entries[name].file), tensor=name)
    borrowed = frozenset(
        field for field, name in (("embedding", _EMBEDDING), ("lm_head", _LM_HEAD)) if name not in tensors
    )
    embedding = tensors.get(_EMBEDDING, target.weights.embedding)
    for name in (_EMBEDDING,) if config.tie_word_embeddings else (_EMBEDDING, _LM_HEAD):
        if name not in tensors and (config.hidden_size != its.hidden_size or target.collectives is not None):
            raise WeightsError(
                f"{folder} lacks {name}, and the target's {'is cut among ranks' if target.collectives else 'is'} "
                f"of width {its.hidden_size}: this head needs its own of width {config.hidden_size}",
                path=str(folder),
                tensor=name,
            )
    if "lm_head" in borrowed and config.draft_vocab_size != config.vocab_size:
        message = f"{folder} lacks {_LM_HEAD} of its {config.draft_vocab_size} draft tokens"
        raise WeightsError(message, path=str(folder), tensor=_LM_HEAD)
    parts: dict[str, torch.Tensor] = {}
    for field, modules in _PARTS.items():
        for kind, name in (("weight", field), ("bias", f"{field}_bias")):
            found = [tensors[f"{module}.{kind}"] for module in modules if f"{module}.{kind}" in tensors]
            if found:
                parts[name] = found[0] if len(found) == 1 else torch.cat(found)
    weights = HeadWeights(
        **{field.name: parts.get(field.name) for field in fields(HeadWeights) if field.name not in _OTHERS},  # type: ignore[arg-type]
        embedding=embedding,
        fuse_norms=torch.stack(norms) if (norms := [tensors[name] for name in _norms(config)]) else None,
        lm_head=tensors.get(_LM_HEAD, embedding if config.tie_word_embeddings else target.weights.lm_head),
        target_ids=_target_ids(config, maps, target.device),
        borrowed=borrowed,
    )
    for field in ("fuse", "qkv", "output", "gate_up", "down", "lm_head"):
        setattr(weights, field, packed(getattr(weights, field)))
    return EagleHead(config, weights, target.max_positions)


_OTHERS = {"embedding", "fuse_norms", "lm_head", "target_ids", "borrowed"}


def _check_fits(what: str, own: int, targets: int, config: EagleConfig, target: Decoder) -> None:
    if own != targets:
        raise ConfigError(
            f"speculative_draft_model_path={config.path!r}: this EAGLE-3 head is for a target with a {what} of {own}, "
            f"and {target.whole_config.path} has one of {targets}: it needs the head that was trained for it",
            option="speculative_draft_model_path",
        )


def _whole_embedding(target: Decoder) -> dict[str, Entry]:
    """The embedding of a target that is cut among ranks, where its files have it."""
    its = target.whole_config
    if is_gguf(folder := Path(its.path)) or not any(folder.glob("*.safetensors")):
        return {}
    shape = its.vocab_size, its.hidden_size
    named = (entry for name, entry in read_headers(folder).items() if name.endswith(_EMBEDDING))
    found = next((entry for entry in named if entry.shape == shape), None)
    return {} if found is None else {_EMBEDDING: found}


def _name(name: str) -> str:
    """A tensor's name in the authors' files."""
    return name.removeprefix("model.").replace("layers.0.", _LAYER)


def _norms(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    if config.num_norms == 1:
        return {"input_norm.weight": (NUM_LAYERS_READ * config.target_hidden_size,)}
    return {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(config.num_norms)}


def _shapes(config: EagleConfig, entries: Mapping[str, Entry]) -> dict[str, tuple[int, ...]]:
    """Of every tensor that a head needs, and of those that it may have and has."""
    hidden, size = config.hidden_size, config.intermediate_size
    rows = {"q": config.num_heads * config.head_dim} | dict.fromkeys("kv", config.num_kv_heads * config.head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        _FUSE: (hidden, NUM_LAYERS_READ * config.target_hidden_size),
        **{f"{_LAYER}self_attn.{name}_proj.weight": (count, 2 * hidden) for name, count in rows.items()},
        f"{_LAYER}self_attn.o_proj.weight": (hidden, rows["q"]),
        f"{_LAYER}mlp.gate_proj.weight": (size, hidden),
        f"{_LAYER}mlp.up_proj.weight": (size, hidden),
        f"{_LAYER}mlp.down_proj.weight": (hidden, size),
        **{f"{module}.weight": (hidden,) for (module, *_) in _PARTS.values() if module.endswith("norm")},
        **_norms(config),
    }
    of_qkv = [f"{module}.bias" for module in _PARTS["qkv"]]
    optional: dict[str, tuple[int, ...]]
    optional = {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items() if len(shape) == 2}
    optional[_EMBEDDING] = config.vocab_size, hidden
    optional[_LM_HEAD] = config.draft_vocab_size, hidden
    needed = of_qkv if any(name in entries for name in of_qkv) else []
    return shapes | {name: shape for name, shape in optional.items() if name in entries or name in needed}


def _read(entry: Entry) -> torch.Tensor:
    with opened(entry.file) as tensors:
        return read(tensors, entry.name, entry.file)


def _target_ids(config: EagleConfig, maps: Mapping[str, Entry], device: torch.device) -> torch.Tensor | None:
    """Draft ids as tokens of the target: each is `d2t` less than its token, and `t2d` says which tokens have one."""
    if _TO_TARGET not in maps:
        if config.draft_vocab_size != config.vocab_size:
            message = (
                f"{config.path} lacks {_TO_TARGET}: which {config.draft_vocab_size} tokens it drafts is unknown"
            )
            raise WeightsError(message, path=config.path, tensor=_TO_TARGET)
        return None
    offsets, wrong = _read(maps[_TO_TARGET]), None
    if offsets.dtype not in (torch.int64, torch.int32) or tuple(offsets.shape) != (config.draft_vocab_size,):
        wrong = f"is {offsets.dtype} {list(offsets.shape)}, not integers [{config.draft_vocab_size}]"
    else:
        ids = torch.arange(len(offsets)) + offsets.long()
        drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
            wrong = f"names tokens {int(ids.min())} to {int(ids.max())} of {config.vocab_size}"
        elif int(drafted.index_fill_(0, ids, True).sum()) < len(ids):
            wrong = "names a token twice"
        elif _OF_TARGET in maps and not torch.equal(_read(maps[_OF_TARGET]).bool(), drafted):
            wrong = f"names other tokens than {_OF_TARGET}"
    if wrong is not None:
        raise WeightsError(f"{_TO_TARGET} in {config.path} {wrong}", path=config.path, tensor=_TO_TARGET)
    return ids.to(device)
