"""One rank's part of a model: some layers, and of these some heads, MLP columns and tokens of the vocabulary.

Projections into heads and MLP are cut by rows, those back by columns, so that a layer's sums are added up twice
(tensor parallelism: Shoeybi et al. 2019, "Megatron-LM"). Where there are fewer KV heads than ranks, several ranks hold
the same one. Stages have layers one after the other (pipeline parallelism); the first has embedding and head, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from sgl.errors import ConfigError
from sgl.runtime.model.config import ModelConfig

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
"""The ends of the names of a layer's fused experts in a checkpoint."""
_WORD = 32  # tokens: packed masks are cut between words


class HasLayers(Protocol):
    """A model's config."""

    @property
    def num_layers(self) -> int:
        """Of the whole model."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`, in stage `stage` of `stages`."""

    rank: int = 0
    size: int = 1
    stage: int = 0
    stages: int = 1

    @staticmethod
    def of(rank: int, tp_size: int, pp_size: int) -> Shard:
        """Of a rank among all: those of a stage follow each other."""
        stage, rank = divmod(rank, tp_size)
        return Shard(rank, tp_size, stage, pp_size)

    @property
    def is_last(self) -> bool:
        """Whether it is of the last stage, which has the last norm."""
        return self.stage == self.stages - 1

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError for a model that cannot be cut into so many parts."""
        size, kv, experts = self.size, config.num_kv_heads, config.experts
        sizes = (
            {}
            if experts is not None and all(experts.layers)
            else {"an intermediate_size": config.intermediate_size}
        )
        if experts is not None:
            sizes |= {"experts with an intermediate size": experts.intermediate_size}
            sizes |= {"a shared expert with an intermediate size": experts.shared_size or 0}
        wrong = None
        if config.num_heads % size:
            wrong = f"{config.num_heads} attention heads"
        elif kv % size and size % kv:
            wrong = f"{kv} key-value heads"
        elif uncut := [name for name, its in sizes.items() if its % size]:
            wrong = f"{uncut[0]} of {sizes[uncut[0]]}"
        elif len(Shard(size - 1, size).vocabulary(config.vocab_size)) < 1:
            wrong = f"a vocabulary of {config.vocab_size}"
        if wrong:
            raise ConfigError(
                f"tp_size={size}: {config.path} has {wrong}, which {size} ranks cannot share equally",
                option="tp_size",
            )
        self.check_stages(config.path, config.num_layers)
        first, deep = replace(self, stage=0).layers(config), 0 if config.media is None else config.media.num_deep
        if self.stages > 1 and len(first) < deep:
            raise ConfigError(
                f"pp_size={self.stages}: the first stage of {config.path} would have {len(first)} layers, and what its "
                f"vision tower makes is added behind the first {deep}",
                option="pp_size",
            )

    def check_stages(self, path: str, num_layers: int) -> None:
        """Raise ConfigError for a model with fewer layers than there are stages."""
        if num_layers < self.stages:
            raise ConfigError(
                f"pp_size={self.stages}: {path} has {num_layers} layers, fewer than stages", option="pp_size"
            )

    def local(self, config: ModelConfig) -> ModelConfig:
        """The config of this part; hidden size and vocabulary stay the model's."""
        if self.size == self.stages == 1:
            return config
        layers, experts = self.layers(config), config.experts
        if experts is not None:
            experts = replace(
                experts,
                layers=experts.layers[layers.start : layers.stop],
                intermediate_size=experts.intermediate_size // self.size,
                shared_size=None if experts.shared_size is None else experts.shared_size // self.size,
            )
        return replace(
            config,
            num_layers=len(layers),
            windows=config.windows[layers.start : layers.stop],
            is_local=config.is_local[layers.start : layers.stop],
            num_heads=config.num_heads // self.size,
            num_kv_heads=max(1, config.num_kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
            experts=experts,
        )

    def layers(self, config: HasLayers) -> range:
        """Its layers."""
        return self.layers_of(config.num_layers)

    def layers_of(self, num_layers: int) -> range:
        """Its layers of so many."""
        first, after = (stage * num_layers // self.stages for stage in (self.stage, self.stage + 1))
        return range(first, after)

    def vocabulary(self, vocab_size: int) -> range:
        """Its token ids."""
        if self.stage:
            return range(0)
        width = self.vocabulary_width(vocab_size)
        return range(min(vocab_size, self.rank * width), min(vocab_size, (self.rank + 1) * width))

    def vocabulary_width(self, vocab_size: int) -> int:
        """Token ids of each part but the last, which may have fewer."""
        return -(-vocab_size // (_WORD * self.size)) * _WORD if self.size > 1 else vocab_size

    def parts(self, name: str, config: ModelConfig) -> list[tuple[slice, ...]]:
        """Where this part lies in a checkpoint's tensor, to be joined along the second dimension: fused experts have
        gates, and then ups. config: the whole model's."""
        part = self.part(name, config)
        if not name.endswith(GATE_UP) or config.experts is None or config.experts.clamped is not None:
            return [part]
        every, gates = part
        size = config.experts.intermediate_size
        return [part, (every, slice(gates.start + size, gates.stop + size))]

    def part(self, name: str, config: ModelConfig) -> tuple[slice, ...]:
        """Where this part lies in a checkpoint's tensor, the first of `parts`. config: the whole model's."""
        *_, module, _ = name.split(".")
        local, dim = self.local(config), config.head_dim
        if module in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "experts"):
            return self._feed_forward_part(name, module, local)
        if module == "q_proj" or (module == "q_norm" and config.wide_qk_norm):
            return (_nth(self.rank, local.num_heads * dim),)
        if module in ("k_proj", "v_proj") or (module == "k_norm" and config.wide_qk_norm):
            first = self.rank * config.num_kv_heads // self.size
            return (slice(first * dim, (first + local.num_kv_heads) * dim),)
        if name.endswith("self_attn.sinks"):
            return (_nth(self.rank, local.num_heads),)
        if module in ("embed_tokens", "lm_head"):
            its = self.vocabulary(config.vocab_size)
            return (slice(its.start, its.stop),)
        if name.endswith("o_proj.weight"):
            return slice(None), _nth(self.rank, local.num_heads * dim)
        return ()

    def _feed_forward_part(self, name: str, module: str, local: ModelConfig) -> tuple[slice, ...]:
        size = local.intermediate_size
        if local.experts is not None and ".experts." in name:
            size = local.experts.intermediate_size
        elif local.experts is not None and ".shared_expert." in name:
            size = local.experts.shared_size or 0
        its, every = _nth(self.rank, size), slice(None)
        if module == "experts" and local.experts is not None and local.experts.clamped is not None:
            pairs = slice(2 * its.start, 2 * its.stop)  # each gate is beside its up
            if name.endswith("_bias"):
                return (every, pairs) if "gate_up" in name else ()
            return (every, every, pairs) if name.endswith(GATE_UP) else (every, its)
        if module == "experts":
            return (every, its) if name.endswith(GATE_UP) else (every, every, its)
        if module in ("gate_proj", "up_proj", "w1", "w3"):
            return (its,)
        return (every, its) if name.endswith(".weight") else ()

    def adds(self, name: str) -> bool:
        """Whether this part holds a tensor's values, or zeros: biases of what is summed up count once."""
        return self.rank == 0 or not name.endswith(("o_proj.bias", "down_proj.bias", "down_proj_bias"))


def _nth(index: int, width: int) -> slice:
    return slice(index * width, (index + 1) * width)


WHOLE = Shard()
