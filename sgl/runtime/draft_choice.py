"""Loads what drafts on the device beside a model, a draft model or an EAGLE-3 head, and makes a drafter of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sgl.errors import ConfigError, ModelError, TokenizerError
from sgl.kernels.attention.base import AttentionBackend, AttentionShape
from sgl.runtime.attention_choice import choose_attention
from sgl.runtime.config import EngineConfig
from sgl.runtime.gguf import is_gguf
from sgl.runtime.memory_plan import DrafterMemory, gib
from sgl.runtime.model.base import Config, Model
from sgl.runtime.model.checkpoint import find_checkpoint
from sgl.runtime.model.choice import read_config
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.draft import DraftDecoder
from sgl.runtime.model.eagle.config import EagleConfig, is_head
from sgl.runtime.model.eagle.head import EagleHead
from sgl.runtime.model.eagle.loader import load_head
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.loader import dtype_name, load_decoder
from sgl.runtime.runner.drafts import DraftRunner, HeadRunner
from sgl.runtime.speculate.eagle import EagleDrafter
from sgl.runtime.speculate.models import ModelDrafter
from sgl.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_OPTION = "speculative_draft_model_path"
_NUM_STEPS = 5
_MOST_GRAPH_ROWS = 64  # of steps that draft
_MOST_GRAPH_TOKENS = 256
_TOKENIZER_FILES = "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"
_LEAST_COMMON = 0.9  # of the target's tokens


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Loaded weights, not yet with KV."""

    model: DraftDecoder | EagleHead
    layers: tuple[int, ...] = ()  # of the target that a head reads
    goes_ahead: bool = False  # whether a draft model's drafts can be verified before the host knows them

    @property
    def drafter_memory(self) -> DrafterMemory:
        """What it takes of the device's memory."""
        model = self.model
        of_token = KVCache.bytes_per_token(model.config, model.dtype)
        if isinstance(model, EagleHead):
            of_token += model.config.hidden_size * model.dtype.itemsize
        return DrafterMemory(sum(its.nbytes for its in model.weights.tensors()), of_token)

    def drafter(self, config: EngineConfig, num_pages: int, eos_ids: frozenset[int]) -> ModelDrafter:
        """With KV for as many pages as the target has. config: with every None resolved. Raises ConfigError."""
        model, page_size, context, rows = (
            self.model,
            config.page_size,
            config.context_length,
            config.max_running_requests,
        )
        assert page_size is not None and context is not None and rows is not None  # noqa: PT018
        options = {
            "num_slots": num_pages * page_size,
            "page_size": page_size,
            "max_positions": min(context, model.max_positions),
            "num_steps": config.speculative_num_steps or _NUM_STEPS,
            "most_tokens": max(_MOST_GRAPH_TOKENS, _most_tokens(config, num_pages * page_size)),
        }
        bounds = {"max_rows": rows, "max_pages": -(-context // page_size)}
        if isinstance(model, EagleHead):
            _, attention = _attention(config, model.attention_shape(1), with_graphs=False)
            head = HeadRunner(
                model,
                num_pages * page_size,
                page_size,
                attention,
                kv_dtype=model.dtype,
                max_chain_rows=min(_MOST_GRAPH_ROWS, config.cuda_graph_max_bs or 0),
                num_steps=options["num_steps"],
                **bounds,
            )
            _prepare(head, model.device, _most_tokens(config, options["num_slots"]))
            return EagleDrafter(head, self.layers, **options)
        kv = KVCache(model.config, num_pages, page_size, model.dtype, model.device)
        graph_rows, attention = _attention(config, model.attention_shape(page_size), with_graphs=True)
        runner = DraftRunner(
            model,
            kv,
            attention,
            device=model.device,
            eos_ids=eos_ids,
            max_graph_rows=graph_rows,
            max_graph_tokens=_MOST_GRAPH_TOKENS,
            max_chain_rows=graph_rows,
            num_steps=options["num_steps"],
            **bounds,
        )
        _prepare(runner, model.device, _most_tokens(config, options["num_slots"]))
        return ModelDrafter(runner, goes_ahead=self.goes_ahead, **options)


def check_drafts(config: EngineConfig) -> None:
    """Raise ConfigError, before the target is loaded, where there is nothing at a draft model's path."""
    if (path := config.speculative_draft_model_path) is not None:
        try:
            find_checkpoint(path)
        except ModelError as error:
            raise ConfigError(f"{_OPTION}={path!r}: {error}", option=_OPTION) from error


def load_drafts(
    config: EngineConfig, target_config: Config, target: Model, tokenizer: Tokenizer | None
) -> DraftModel | None:
    """What the options name to draft on the device, if anything. Raises ConfigError where it
    does not fit the target, and ModelError."""
    path, algorithm = config.speculative_draft_model_path, config.speculative_algorithm
    if path is None:
        return None
    if algorithm == "EAGLE3" or (algorithm == "auto" and is_head(path)):
        return load_eagle(path, config, target_config, target)
    return load_draft_model(path, config, target_config, target, tokenizer)


def load_draft_model(
    path: str,
    config: EngineConfig,
    target_config: Config,
    target: Model,
    tokenizer: Tokenizer | None,
) -> DraftModel:
    """A draft model for a target. Raises ConfigError where it does not fit the target, and
    ModelError."""
    _check_target(config, target_config, target, "a draft model")
    draft_config = read_config(path, "sgl")
    if not isinstance(draft_config, ModelConfig) or draft_config.media is not None:
        raise ConfigError(
            f"{_OPTION}={path!r} is a {draft_config.architecture}: a draft model is a decoder for texts with attention "
            "alone, such as a smaller one of the target's family",
            option=_OPTION,
        )
    _check_tokens(path, draft_config, target_config, tokenizer)
    positions = min(target.max_positions, draft_config.context_length)
    device, dtype = target.device, dtype_name(target.dtype)
    loaded = load_decoder(
        draft_config,
        device=device,
        dtype=dtype,
        load_format="dummy" if config.load_format == "dummy" else "auto",
        max_positions=positions,
    )
    model = DraftDecoder(draft_config, loaded.weights, target_config.vocab_size, positions)
    goes_ahead = target.collectives is None and all(window is None for window in target.windows)
    found = DraftModel(model, goes_ahead=goes_ahead)
    _say(path, found, f"a draft model of {draft_config.num_layers} layers")
    return found


def load_eagle(path: str, config: EngineConfig, target_config: Config, target: Model) -> DraftModel:
    """An EAGLE-3 head for a target; see `load_draft_model`."""
    _check_target(config, target_config, target, "an EAGLE-3 head")
    if not isinstance(target, Decoder):
        raise ConfigError(
            f"speculative_algorithm='EAGLE3': hidden states of {target_config.architecture} are not kept for a head; "
            "'DRAFT' takes any smaller model of the same tokenizer",
            option="speculative_algorithm",
        )
    head_config = EagleConfig.from_pretrained(path)
    layers = head_config.layers_of(target.whole_config.num_layers)
    found = DraftModel(load_head(head_config, target), layers)
    _say(path, found, f"an EAGLE-3 head that reads behind layers {', '.join(map(str, layers))}")
    return found


def _check_target(config: EngineConfig, target_config: Config, target: Model, what: str) -> None:
    windows = target_config.windows if isinstance(target_config, ModelConfig) else target.windows
    wrong = None
    if config.pp_size > 1:
        wrong = f"pp_size={config.pp_size}"
    elif all(window is not None and window < target.max_positions for window in windows):
        wrong = f"{target_config.architecture}, all of whose layers see only a window of tokens,"
    if wrong is not None:
        raise ConfigError(
            f"{_OPTION}: {wrong} cannot have {what}, which needs all tokens on one device; speculative_algorithm="
            "'NGRAM' works there",
            option=_OPTION,
        )


def _check_tokens(path: str, own: ModelConfig, target: Config, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError unless tokens of both models have the same ids. More embeddings than tokens do no harm."""
    folder = Path(own.path)
    if tokenizer is None or not (is_gguf(folder) or any((folder / name).exists() for name in _TOKENIZER_FILES)):
        if own.vocab_size != target.vocab_size:
            raise ConfigError(
                f"{_OPTION}={path!r} has {own.vocab_size} token ids, the target has {target.vocab_size}, and without "
                f"{'a tokenizer of its own' if tokenizer is not None else 'tokenizers'} nobody knows which are the "
                "same: a draft model needs the target's tokenizer",
                option=_OPTION,
            )
        return
    try:
        vocabulary = Tokenizer.load(path, vocab_size=own.vocab_size).hf.get_vocab()
    except TokenizerError as error:
        raise ConfigError(f"{_OPTION}={path!r}: {error}", option=_OPTION) from error
    theirs = {number: token for token, number in tokenizer.hf.get_vocab().items()}
    ours = {number: token for token, number in vocabulary.items()}
    common = sorted(theirs.keys() & ours.keys())
    other = next((number for number in common if theirs[number] != ours[number]), None)
    if other is None and len(common) >= _LEAST_COMMON * len(theirs):
        return
    example = f"{len(ours)} tokens, the target's has {len(theirs)}"
    if other is not None:
        example = f"{ours[other]!r} as token {other}, which the target's has as {theirs[other]!r}"
    raise ConfigError(
        f"{_OPTION}={path!r}: its tokenizer has {example}; a draft model needs the target's tokenizer, as smaller "
        "models of the same family have",
        option=_OPTION,
    )


def _attention(config: EngineConfig, shape: AttentionShape, *, with_graphs: bool) -> tuple[int, AttentionBackend]:
    """Rows of its largest graph, and the backend: that of the target where it can serve the shape."""
    rows = min(_MOST_GRAPH_ROWS, config.cuda_graph_max_bs or 0) if with_graphs else 0
    asked = config.attention_backend if config.attention_backend in ("torch", "triton") else None
    options = replace(
        config,
        attention_backend=asked,
        prefill_kernel=None,
        kv_cache_dtype="auto",
        cuda_graph_max_bs=rows or None,
        disable_cuda_graph=not rows,
    )
    chosen, attention = choose_attention(options, shape)
    return chosen.cuda_graph_max_bs or 0, attention


def _prepare(runner: DraftRunner, device: torch.device, most_tokens: int) -> None:
    """Capture graphs, and load kernels for steps of so many tokens."""
    if device.type == "cuda":
        runner.prepare(most_tokens)
        runner.warm_up(most_tokens)


def _most_tokens(config: EngineConfig, num_slots: int) -> int:
    size = config.chunked_prefill_size
    assert config.context_length is not None
    return min(config.context_length if size in (None, -1) else int(size or 0), num_slots)


def _say(path: str, found: DraftModel, what: str) -> None:
    its = found.drafter_memory
    logger.info("%s: %s, %s and %d bytes of each cached token", path, what, gib(its.weight_bytes), its.token_bytes)
