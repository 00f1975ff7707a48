"""New weights of the decoder that sgl's families share."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

import torch

from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.families import FAMILIES
from sgl.runtime.model.loader import LM_HEAD, fused_sizes, tensor_shapes, text_name
from sgl.runtime.model.rotary import rotary_order
from sgl.runtime.model.shard import GATE_UP
from sgl.runtime.model.update.own import OwnWriter
from sgl.runtime.model.update.writer import unpack
from sgl.runtime.model.weights import Weights, checkpoint_tensors

_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_BLOCKS = {"qkv_proj": ".self_attn", "gate_up_proj": ".mlp"}


class DecoderWriter(OwnWriter[Weights]):
    """A `Writer`."""

    why_not_read: str | None = None

    def __init__(self, model: Decoder) -> None:
        self._model, self._shard, self._config = model, model.shard, model.whole_config
        self._family = FAMILIES[self._config.architecture]
        each, fused = (
            tensor_shapes(self._config, tied=model.weights.is_tied, fused=fused) for fused in (False, True)
        )
        super().__init__(model.weights, _EMBEDDING, each, fused)
        self._rows: dict[str, dict[str, int]] = {}  # of tensors that are several of ours, one behind the other
        for whole, sizes in fused_sizes(self._config).items():
            first = next(iter(sizes))
            for name in [name for name in each if f"{_BLOCKS[whole]}.{first}_proj." in name]:
                parts = {name.replace(f".{first}_proj.", f".{part}_proj."): size for part, size in sizes.items()}
                place = name.replace(f".{first}_proj.", f".{whole}.")
                self._rows[place] = parts
                self.shapes[place] = (sum(sizes.values()), *each[name][1:])
        self._order = rotary_order(self._config)
        self._targets: dict[str, torch.Tensor] = {}

    def name(self, given: str) -> str:
        return text_name(given) if self._config.architecture.endswith("ForConditionalGeneration") else given

    def missing(self, names: Collection[str]) -> list[str]:
        return super().missing([part for name in names for part in self._rows.get(name, [name])])

    def begin(self, names: Collection[str]) -> None:
        first = self._shard.layers(self._config).start
        touched = {int(found[1]) - first for name in names if (found := _LAYER.match(name)) is not None}
        unpack(self._weights.layers[index] for index in sorted(touched) if 0 <= index < len(self._weights.layers))
        if _EMBEDDING in names or LM_HEAD in names:
            self._unpack_head()
        views = [checkpoint_tensors(self._config, self._weights, self._shard, fused=its) for its in (False, True)]
        self._targets = {**views[0], **views[1]}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._rows:
            parts = self._rows[name]
            for part, rows in zip(parts, torch.split(tensor, list(parts.values())), strict=True):
                self.put(part, rows)
            return
        name = self.aliases.get(name, name)
        target = self._targets.get(name)
        if target is None:  # another rank's
            return
        if not self._shard.adds(name):
            target.zero_()
            return
        cuts = [tensor[part] for part in self._shard.parts(name, self._config)]
        value = cuts[0] if len(cuts) == 1 else torch.cat(cuts, dim=1)
        target.copy_(self._arranged(name, value, target))

    def _arranged(self, name: str, value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """As the decoder computes with it; see `Weights.arrange`."""
        if self._family.norms_add_one and name.endswith("norm.weight"):
            return value.float() + 1.0
        if self._order is not None and _is_rotated(name):
            heads = value.reshape(-1, self._config.head_dim, *value.shape[1:])
            return heads[:, self._order].reshape(target.shape)
        if self._has_pairs(name):
            return torch.cat((value[..., ::2], value[..., 1::2]), -1)
        return value

    def _has_pairs(self, name: str) -> bool:
        """Whether each gate is beside its up in checkpoints."""
        experts = self._family.experts
        return experts is not None and experts.is_turned and name.endswith((GATE_UP, f"{GATE_UP}_bias"))

    def finish(self) -> None:
        self._targets = {}
        self._weights.pack()
        self._model.weights_changed()

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        if name in self._rows:
            found, start = [], 0
            for each, size in self._rows[name].items():
                begin, end = max(first - start, 0), min(last - start, size)
                if begin < end:
                    found.append(self.rows(each, begin, end))
                start += size
            return torch.cat(found)
        name = self.aliases.get(name, name)
        num_rows, *rest = self.shapes[name]
        whole = torch.zeros(last - first, *rest, device=self._model.device)
        target, shard, config = self._targets.get(name), self._shard, self._config
        part, *more = parts = shard.parts(name, config)
        # Heads of keys and values may lie on several ranks, and norms lie on all of a stage.
        is_first = all(replace(shard, rank=rank).parts(name, config) != parts for rank in range(shard.rank))
        start, stop, _ = (part[0] if part else slice(None)).indices(num_rows)
        begin, end = max(first, start), min(last, stop)
        if target is None or begin >= end or not is_first or not shard.adds(name):
            return whole
        step = config.head_dim if self._order is not None and _is_rotated(name) else 1  # whole heads
        low, high = (begin - start) // step * step, -(-(end - start) // step) * step
        value = self._as_given(name, target[low:high])[begin - start - low : end - start - low]
        for its, numbers in zip(parts, value.chunk(len(parts), 1) if more else [value], strict=True):
            whole[begin - first : end - first][(slice(None), *its[1:])] = numbers
        return whole

    def _as_given(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The inverse of `_arranged`."""
        if self._family.norms_add_one and name.endswith("norm.weight"):
            return value - 1.0
        if self._order is not None and _is_rotated(name):
            heads = value.reshape(-1, self._config.head_dim, *value.shape[1:])
            return heads[:, _inverse(self._order)].reshape(value.shape)
        if self._has_pairs(name):
            return torch.stack(value.chunk(2, -1), -1).flatten(-2)
        return value


def _is_rotated(name: str) -> bool:
    return name.split(".")[-2] in ("q_proj", "k_proj")


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
