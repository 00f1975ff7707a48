"""Finds out what a model of transformers asks of attention, by a forward pass on the meta device.

Attention and masks are replaced by ones that take notes. What our backends have no word for is refused by its name,
before any weight is read: a mask that is neither causal nor a sliding window, biases, states beside keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import ModelOutput

NAME = "sgl_probe"
OWN_ATTENTION = "attention that does not go through transformers' registry of attention functions"
_NUM_TOKENS = 3  # unlike any other size of a tiny model's tensors
_LONGEST_MASK = 1 << 20  # tokens: wider windows count as none
_HARMLESS = frozenset(
    {"scaling", "dropout", "sliding_window", "position_ids", "is_causal", "softcap", "s_aux", "logits_to_keep"}
)


class Refused(Exception):
    """What the model needs and our attention cannot do."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer's attention."""

    module: str  # its name
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass(slots=True)
class Probed:
    """What a forward pass showed."""

    layers: list[AttentionLayer]
    body: str  # name of the module that gives hidden states, within the one that gives logits
    output_class: type[ModelOutput]  # of the body
    hidden_size: int
    vocab_size: int


@dataclass(slots=True)
class _Notes:
    names: dict[int, str]  # of modules, by id
    context_length: int
    layers: list[AttentionLayer] = field(default_factory=list)
    depth: int = 0
    body: tuple[str, Any] | None = None


_notes: ContextVar[_Notes] = ContextVar("_notes")


@dataclass(frozen=True, slots=True)
class _Mask:
    """Stands for a mask: a token sees `window` tokens, itself included; None: all before it."""

    window: int | None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Refused(f"a mask that its own code reads ({name})")

    def _read(self, *_: Any) -> Any:
        raise Refused("a mask that its own code reads")

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __rand__ = __invert__ = _read


class _NoCache:
    """Stands for transformers' cache: layers may write keys and values to it, and nothing else."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        return keys, values

    def get_seq_length(self, *layer: Any, **named: Any) -> int:
        if layer or named:
            raise Refused("a layer that depends on how many tokens it has cached")
        return 0

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        return query_length, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Refused(f"layers that keep a state beside keys and values ({name})")


def probe(module: Any, context_length: int) -> Probed:
    """module: on the meta device, built with `NAME` as its attention. Raises Refused."""
    notes = _Notes({id(each): name for name, each in module.named_modules()}, context_length)
    token = _notes.set(notes)
    ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(), _watched(module, notes):
            # A mask of ones keeps transformers from looking for several sequences in the positions.
            out = module(
                input_ids=ids,
                position_ids=ids,
                attention_mask=torch.ones_like(ids, device="cpu" if module._is_stateful else None),  # which read it
                past_key_values=_NoCache(),
                use_cache=False,
            )
    except Refused:
        raise
    except Exception as error:  # of any class: what transformers' modules do is not known
        said = " ".join(str(error).split())
        kind = "whose shapes depend on its data" if "meta" in said else "that does not go through"
        raise Refused(f"a forward pass {kind} ({said[:200]})") from error
    finally:
        _notes.reset(token)
    if not notes.layers:
        raise Refused(OWN_ATTENTION)
    if notes.body is None:
        raise Refused("a head that takes no hidden states from a module")
    name, output = notes.body
    hidden = output.last_hidden_state
    if out.logits.dim() != 3 or out.logits.shape[:2] != ids.shape or hidden.shape[:2] != ids.shape:
        raise Refused(f"logits of the shape {list(out.logits.shape)} for {_NUM_TOKENS} tokens")
    return Probed(notes.layers, name, type(output), hidden.shape[-1], out.logits.shape[-1])


@contextmanager
def _watched(module: Any, notes: _Notes) -> Iterator[None]:
    """Note the module right below this one that returns hidden states."""

    def enter(*_: Any) -> None:
        notes.depth += 1

    def leave(each: Any, _: Any, output: Any) -> None:
        notes.depth -= 1
        if notes.depth == 0 and isinstance(output, ModelOutput) and "last_hidden_state" in output:
            notes.body = notes.names[id(each)], output

    below = [each for each in module.modules() if each is not module]
    handles = [each.register_forward_pre_hook(enter) for each in below]
    handles += [each.register_forward_hook(leave) for each in below]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    notes = _notes.get()
    strange = sorted(
        name
        for name, option in options.items()
        if name not in _HARMLESS and option is not None and option is not False and not isinstance(option, _NoCache)
    )
    if strange:
        raise Refused(f"attention with {', '.join(strange)}")
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise Refused("attention to later tokens")
    batch, num_heads, num_tokens, key_dim = query.shape
    if batch != 1 or num_tokens != _NUM_TOKENS or key.shape[2] != num_tokens:
        raise Refused(f"attention of {list(query.shape)} to {list(key.shape)}, for {_NUM_TOKENS} tokens")
    if attention_mask is not None and not isinstance(attention_mask, _Mask):
        raise Refused("a mask of its own")
    name = notes.names[id(module)]
    if any(layer.module == name for layer in notes.layers):
        raise Refused(f"attention that is computed twice with the same weights ({name})")
    scale = options.get("scaling")
    notes.layers.append(
        AttentionLayer(
            module=name,
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            key_dim=key_dim,
            value_dim=value.shape[-1],
            scale=key_dim**-0.5 if scale is None else float(scale),
            window=None if attention_mask is None else attention_mask.window,
            softcap=options.get("softcap"),
            has_sinks=options.get("s_aux") is not None,
        )
    )
    return query.new_empty(1, num_tokens, num_heads, value.shape[-1]), None


def _mask(*, mask_function: Callable[..., torch.Tensor], **_: Any) -> _Mask:
    """Reads a window off a function of (batch, head, query, key) indices."""
    length = min(_notes.get().context_length, _LONGEST_MASK)

    def seen(position: int) -> torch.Tensor:
        """bool [length]"""
        zero = torch.zeros((), dtype=torch.int64)
        try:
            its = mask_function(zero, zero, torch.tensor(position), torch.arange(length))
            return torch.as_tensor(its).expand(length)
        except (RuntimeError, IndexError, NotImplementedError) as error:
            raise Refused(f"a mask that depends on more than positions ({error})") from error

    with torch.device("cpu"):
        window = int(seen(length - 1).sum())
        near = {0, 1, 2, 3, window - 1, window, window + 1, length // 3, length // 2, length - 2, length - 1}
        places = torch.arange(length)
        for position in sorted(position for position in near if 0 <= position < length):
            expected = (places <= position) & (places > position - window)
            if not torch.equal(seen(position), expected):
                raise Refused("a mask that is neither causal nor a sliding window")
    return _Mask(None if window >= length else window)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
