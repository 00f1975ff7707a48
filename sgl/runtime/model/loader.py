"""Loads a decoder: safetensors, quantised or not, a GGUF file or random weights. Errors in the files show in their
headers, before memory is taken."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, cast

import torch

from sgl.errors import ConfigError, WeightsError
from sgl.kernels import limits
from sgl.kernels.layers.grouped import GroupedMatrix
from sgl.kernels.moe.packed import PackedExperts
from sgl.runtime.gguf import is_gguf
from sgl.runtime.model.config import DtypeName, ModelConfig
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.families import FAMILIES
from sgl.runtime.model.image_features import VisionEncoder
from sgl.runtime.model.quantized.checkpoint import QuantizedCheckpoint
from sgl.runtime.model.quantized.experts import pack_experts, quantized_experts
from sgl.runtime.model.quantized.library import multiply_by_library
from sgl.runtime.model.quantized.pack import grouped
from sgl.runtime.model.quantized.scheme import QuantScheme
from sgl.runtime.model.ranks import Ranks
from sgl.runtime.model.shard import DOWN, GATE_UP, WHOLE, Shard
from sgl.runtime.model.weight_files import BODY, Entry, check_dtype, model_headers, opened, read
from sgl.runtime.model.weights import MATRICES, Weights, allocate_weights, checkpoint_tensors, keeps_groups


class HasDtype(Protocol):
    """A config."""

    @property
    def dtype(self) -> DtypeName:
        """The checkpoint's."""


logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]

_CPU = torch.device("cpu")
LM_HEAD = "lm_head.weight"
OF_TOWERS = tuple(
    f"{prefix}{tower}."
    for tower in ("visual", "vision_tower", "multi_modal_projector")
    for prefix in ("model.", "")
)
_OF_TEXTS = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head": "lm_head",
}
_ROPE = "rotary_emb.inv_freq"  # old checkpoints hold rope frequencies, which follow from the config


class Loading(TypedDict):
    """What all loaders take; see `load_decoder`."""

    device: torch.device
    dtype: Literal["auto"] | DtypeName
    load_format: LoadFormat
    max_positions: int


def load_decoder(
    config: ModelConfig,
    *,
    device: str | torch.device = "cpu",
    dtype: Literal["auto"] | DtypeName = "auto",
    load_format: LoadFormat = "auto",
    max_positions: int | None = None,
    quantization: Literal["fp8", "int4"] | None = None,
    ranks: Ranks | None = None,
    vision: VisionEncoder | None = None,
    deterministic: bool = False,
) -> Decoder:
    """The model of a config with its weights on the device. Raises WeightsError, and ConfigError for another
    load_format or a model that cannot be cut.

    load_format: dummy draws random weights, equal on the same kind of device; otherwise the checkpoint's are
    read. max_positions: see `Decoder`. quantization: see `Weights.quantize`. ranks: among which the model is
    cut; only this one's part is read. vision: see `Decoder`. deterministic: see `Weights.is_invariant`.
    """
    device = torch.device(device)
    torch_dtype = resolve_dtype(config, dtype, device)
    shard = WHOLE if ranks is None else ranks.shard
    weights = load_weights(config, torch_dtype, device, load_format, shard)
    if quantization is not None:
        weights.quantize(quantization)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # return the old matrices' memory, for KV pages
    weights.is_invariant = deterministic
    weights.pack()
    if keeps_groups(device):
        multiply_by_library(weights, torch_dtype)
    return Decoder(config, weights, max_positions, ranks, vision)


def load_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    shard: Shard = WHOLE,
) -> Weights:
    """A part's weights as the decoder computes with them, neither quantised by an option nor packed. Raises as
    `load_decoder`, whose arguments these are."""
    shard.check(config)
    found = "gguf" if is_gguf(config.path) else "safetensors"
    if load_format not in ("auto", "dummy", found):
        raise ConfigError(f"load_format={load_format!r}: {config.path} is {found}", option="load_format")
    if load_format != "dummy":
        return _load_weights(config, dtype, device, shard)
    if config.scheme is not None:
        logger.warning("random weights are not quantised as the checkpoint is (%s)", config.scheme)
    return _random_weights(config, dtype, device, shard)


def resolve_dtype(config: HasDtype, dtype: Literal["auto"] | DtypeName, device: torch.device) -> torch.dtype:
    """auto: the checkpoint's dtype on a GPU; float32 on a CPU, which is slow at others."""
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else config.dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """Of one that `resolve_dtype` returns."""
    return cast(DtypeName, str(dtype).removeprefix("torch."))


def _random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard) -> Weights:
    """Initialised like transformers: normal matrices, no biases, norms of one. All parts are cut from the same."""
    tied = config.tie_word_embeddings
    weights = allocate_weights(config, dtype, device, tied=tied, shard=shard)
    targets = checkpoint_tensors(config, weights, shard)
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in tensor_shapes(config, tied=tied).items():
        target = targets.get(name)
        if name.endswith("norm.weight"):
            value = 0.0 if FAMILIES[config.architecture].norms_add_one else 1.0
        elif name.endswith(".bias"):
            value = 0.0
        else:  # drawn also where others hold it
            is_whole = target is not None and tuple(target.shape) == shape
            drawn = target if is_whole and target is not None else torch.empty(shape, dtype=dtype, device=device)
            _draw(drawn, config.initializer_range, generator)
            if target is not None and drawn is not target:
                target.copy_(drawn[shard.part(name, config)])
            continue
        if target is not None:
            target.fill_(value)
    weights.arrange(shard.local(config))
    return weights


def _draw(to: torch.Tensor, deviation: float, generator: torch.Generator) -> None:
    """Normal numbers; on a CPU in float32, since torch 2.11 takes minutes for billions of 16 bits."""
    if to.is_cpu and to.dtype.itemsize < 4:
        to.copy_(torch.empty(to.shape).normal_(0.0, deviation, generator=generator))
    else:
        to.normal_(0.0, deviation, generator=generator)


def tensor_shapes(config: ModelConfig, *, tied: bool, fused: bool = False) -> dict[str, tuple[int, ...]]:
    """Of every tensor of a checkpoint, whole; see `checkpoint_tensors`."""
    weights = allocate_weights(config, torch.float32, torch.device("meta"), tied=tied)
    tensors = checkpoint_tensors(config, weights, fused=fused)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def num_weights(config: ModelConfig) -> int:
    """Of the whole model."""
    return sum(math.prod(shape) for shape in tensor_shapes(config, tied=config.tie_word_embeddings).values())


def _load_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard) -> Weights:
    folder = Path(config.path)
    headers = model_headers(folder)
    if config.architecture.endswith("ForConditionalGeneration"):
        headers = {text_name(name): entry for name, entry in headers.items() if not name.startswith(OF_TOWERS)}
    entries, quantized = read_quantized(headers, config.scheme, device)
    without_use = {(its.file, its.name) for name, its in entries.items() if quantized.adds_nothing(name)}
    entries = _unfused(entries, config)
    # A tied checkpoint may hold the head, too; like transformers, use it if it differs.
    tied, is_body = config.tie_word_embeddings, any(entry.name == BODY for entry in entries.values())
    if is_body and not tied and LM_HEAD not in entries:
        logger.warning("%s embeds texts and has no head: what it generates means nothing", folder)
    tied = LM_HEAD not in entries and (tied or is_body)
    fused = any(name.endswith(GATE_UP) for name in entries)
    shapes = tensor_shapes(config, tied=tied, fused=fused)
    transposed = _transposed(config, entries, shapes)
    shapes |= {name: entries[name].shape for name in transposed}
    check_tensors(
        {name: its for name, its in entries.items() if name in shapes or (its.file, its.name) not in without_use},
        shapes,
        folder,
    )
    packed = _packed_matrices(config, entries, quantized, shard) if keeps_groups(device) else {}
    of_experts = quantized_experts(config, entries, quantized, shard) if keeps_groups(device) else {}
    without = packed.keys() | of_experts.keys()
    weights = allocate_weights(config, dtype, device, tied=tied, shard=shard, without=without)
    pack_experts(weights, of_experts, config, entries, quantized, shard, device)
    for (layer, name), modules in packed.items():
        parts = [(entries[module].name, entries[module].part(shard.part(module, config))) for module in modules]
        dense = getattr(weights.layers[layer], name)
        matrix = grouped([quantized.codes(*part) for part in parts]) or torch.empty_like(dense, device=device)
        setattr(weights.layers[layer], name, matrix)
    targets = checkpoint_tensors(config, weights, shard, fused=fused)
    targets |= {name: targets[name].transpose(1, 2) for name in transposed}
    for file in sorted({entry.file for entry in entries.values()}):
        with opened(file) as tensors:
            for name, target in targets.items():
                if not shard.adds(name):
                    target.zero_()
                elif entries[name].file == file:
                    cuts = shard.parts(name, config)
                    target.copy_(_read_cuts(tensors, entries[name], cuts, quantized, is_turned=name in transposed))
    if quantized.shapes:
        _say_packed(weights, config.scheme, dtype)
    if config.tie_word_embeddings and not tied and torch.equal(targets[LM_HEAD], weights.embedding):
        weights.lm_head = weights.embedding
    weights.arrange(shard.local(config))
    return weights


def _read_cuts(
    tensors: Any,
    entry: Entry,
    cuts: Sequence[tuple[slice, ...]],
    quantized: QuantizedCheckpoint,
    *,
    is_turned: bool,
) -> torch.Tensor:
    """These parts of a tensor, rows one after the other; is_turned: it is [experts, in, out] in its file."""
    places: list[Any] = [entry.part(cut) for cut in cuts]
    if is_turned:
        padded = ((*place, slice(None), slice(None))[:3] for place in places)
        places = [(experts, columns, rows) for experts, rows, columns in padded]
    if entry.name in quantized.shapes:
        parts = [quantized.dequantized(entry.name, place) for place in places]
    else:
        parts = [read(tensors, entry.name, entry.file, place) for place in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1 + is_turned)


def _transposed(
    config: ModelConfig, entries: Mapping[str, Entry], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """A family's tensors of experts, if they are [experts, in, out] in this checkpoint: one of them shows it."""
    names = FAMILIES[config.architecture].experts
    if names is None or not names.may_be_transposed:
        return []
    found = [name for name in shapes if name.endswith((GATE_UP, DOWN)) and name in entries]
    swapped = ((shapes[name][0], *shapes[name][:0:-1]) for name in found)
    are = any(entries[name].shape == its != shapes[name] for name, its in zip(found, swapped, strict=True))
    return found if are else []


def text_name(name: str) -> str:
    """A tensor of a language model beside a vision tower, by its name in a model for texts."""
    for prefix, without in _OF_TEXTS.items():
        if name.startswith(prefix):
            return without + name.removeprefix(prefix)
    return name


def say_dequantized(
    quantized: QuantizedCheckpoint, scheme: QuantScheme | None, dtype: torch.dtype, but: str = ""
) -> None:
    """Log that a checkpoint's matrices did not stay as they are; `but` which."""
    if quantized.shapes:
        logger.info("%s: %d matrices, dequantised to %s%s", scheme, len(quantized.shapes), dtype_name(dtype), but)


def _packed_matrices(
    config: ModelConfig, entries: Mapping[str, Entry], quantized: QuantizedCheckpoint, shard: Shard
) -> dict[tuple[int, str], list[str]]:
    """A part's matrices whose modules are all quantised, by layer there and name, with their tensors' names."""
    modules = {
        (layer, name): [f"model.layers.{index}.{module}.weight" for module in MATRICES[name]]
        for layer, index in enumerate(shard.layers(config))
        for name in MATRICES
    }
    return {
        key: names
        for key, names in modules.items()
        if all(name in entries and entries[name].name in quantized.shapes for name in names)
    }


def _say_packed(weights: Weights, scheme: QuantScheme | None, dtype: torch.dtype) -> None:
    matrices = [matrix for layer in weights.layers for _, matrix in layer.matrices()]
    experts = [layer.experts for layer in weights.layers if layer.experts is not None]
    of_experts = [matrices for its in experts for matrices in (its.gate_up, its.down)]
    num_packed = sum(isinstance(its, GroupedMatrix | PackedExperts) for its in (*matrices, *of_experts))
    message = "%s: of the layers' %d matrices, %d stay as they are, and the others are in %s"
    logger.info(message, scheme, len(matrices) + len(of_experts), num_packed, dtype_name(dtype))


def fused_sizes(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Modules that some checkpoints have for several of ours, with how many rows are whose: `q` is `q_proj`."""
    kv_size = config.num_kv_heads * config.head_dim
    sizes = {"q": config.num_heads * config.head_dim, "k": kv_size, "v": kv_size}
    return {"qkv_proj": sizes, "gate_up_proj": dict.fromkeys(("gate", "up"), config.intermediate_size)}


def _unfused(entries: dict[str, Entry], config: ModelConfig) -> dict[str, Entry]:
    """With the parts of projections that a checkpoint holds as one. Raises WeightsError."""
    fused, found = fused_sizes(config), {}
    for name, entry in entries.items():
        before, _, kind = name.rpartition(".")
        block, _, module = before.rpartition(".")
        if module not in fused:
            found[name] = entry
            continue
        first, num_rows = 0, sum(fused[module].values())
        if entry.shape[0] != num_rows:
            wrong = f"{list(entry.shape)}; its config.json makes it {[num_rows, *entry.shape[1:]]}"
            raise WeightsError(f"{name} in {entry.file} is {wrong}", path=str(entry.file), tensor=name)
        for part, size in fused[module].items():
            found[f"{block}.{part}_proj.{kind}"] = replace(entry, shape=(size, *entry.shape[1:]), first=first)
            first += size
    return found


def read_quantized(
    entries: dict[str, Entry], scheme: QuantScheme | None, device: torch.device = _CPU
) -> tuple[dict[str, Entry], QuantizedCheckpoint]:
    """A checkpoint's tensors with matrices in place of what they are quantised to, and what reads those to the
    device. Raises WeightsError."""
    files: dict[Path, Any] = {}

    def read_whole(name: str) -> torch.Tensor:
        file = entries[name].file
        files[file] = files.get(file) or opened(file)
        return read(files[file], entries[name].name, file).to(device)

    quantized = QuantizedCheckpoint(scheme, entries, read_whole)
    if scheme is not None and any(its.kind == "fp8" for its in scheme.layouts) and not limits.reads_e4m3(device):
        message = (
            "%s: kernels read e4m3 on GPUs of compute capability 8.9 and above: here it takes twice the memory"
        )
        logger.warning(message, scheme)
    dense = {name: entry for name, entry in entries.items() if name not in quantized.others}
    return dense | {
        name: Entry(quantized.file(name), name, shape, "F32") for name, shape in quantized.shapes.items()
    }, quantized


def check_tensors(entries: dict[str, Entry], shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Raise WeightsError unless the checkpoint has exactly the needed tensors and shapes."""
    missing = {name: shape for name, shape in shapes.items() if name not in entries}
    if missing:
        message = f"{folder} lacks {named(missing)[0]} that its config.json calls for: {named(missing)[1]}"
        raise WeightsError(message, path=str(folder), tensor=next(iter(missing)))
    more = {name: entry for name, entry in entries.items() if name not in shapes and not name.endswith(_ROPE)}
    for name, entry in more.items():
        count, first = named({other: its.shape for other, its in more.items()})
        message = f"{entry.file} has {count} that its config.json has no place for: {first}"
        raise WeightsError(message, path=str(entry.file), tensor=name)
    for name, shape in shapes.items():
        entry = entries[name]
        if entry.shape != shape:
            wrong = f"{list(entry.shape)}; its config.json makes it {list(shape)}"
            raise WeightsError(f"{name} in {entry.file} is {wrong}", path=str(entry.file), tensor=name)
        check_dtype(name, entry)


def named(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, str]:
    """How many tensors there are, and the first of them, for errors."""
    first = ", ".join(f"{name} {list(shape)}" for name, shape in list(shapes.items())[:3])
    return f"{len(shapes)} tensor{'s' if len(shapes) > 1 else ''}", first
