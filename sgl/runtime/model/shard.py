"""One rank's part of a model: heads, MLP columns and tokens of the vocabulary (tensor parallelism).

Projections into heads and MLP are cut by rows, those back by columns, so that a layer's sums are added up twice
(Shoeybi et al. 2019, "Megatron-LM"). Where there are fewer KV heads than ranks, several ranks hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sgl.errors import ConfigError
from sgl.runtime.model.config import ModelConfig

_WORD = 32  # tokens: packed masks are cut between words


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError for a model that cannot be cut into so many parts."""
        size, kv = self.size, config.num_kv_heads
        wrong = None
        if config.num_heads % size:
            wrong = f"{config.num_heads} attention heads"
        elif kv % size and size % kv:
            wrong = f"{kv} key-value heads"
        elif config.intermediate_size % size:
            wrong = f"an intermediate_size of {config.intermediate_size}"
        elif len(Shard(size - 1, size).vocabulary(config.vocab_size)) < 1:
            wrong = f"a vocabulary of {config.vocab_size}"
        if wrong:
            raise ConfigError(
                f"tp_size={size}: {config.path} has {wrong}, which {size} ranks cannot share equally",
                option="tp_size",
            )

    def local(self, config: ModelConfig) -> ModelConfig:
        """The config of this part; hidden size, vocabulary and layers stay the model's."""
        if self.size == 1:
            return config
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=max(1, config.num_kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
        )

    def vocabulary(self, vocab_size: int) -> range:
        """Its token ids."""
        width = self.vocabulary_width(vocab_size)
        return range(min(vocab_size, self.rank * width), min(vocab_size, (self.rank + 1) * width))

    def vocabulary_width(self, vocab_size: int) -> int:
        """Token ids of each part but the last, which may have fewer."""
        return -(-vocab_size // (_WORD * self.size)) * _WORD if self.size > 1 else vocab_size

    def part(self, name: str, config: ModelConfig) -> tuple[slice, ...]:
        """Where this part lies in a checkpoint's tensor. config: the whole model's."""
        if self.size == 1:
            return ()
        *_, module, _ = name.split(".")
        local, dim = self.local(config), config.head_dim
        if module == "q_proj":
            return (_nth(self.rank, local.num_heads * dim),)
        if module in ("k_proj", "v_proj"):
            first = self.rank * config.num_kv_heads // self.size
            return (slice(first * dim, (first + local.num_kv_heads) * dim),)
        if module in ("gate_proj", "up_proj"):
            return (_nth(self.rank, local.intermediate_size),)
        if module in ("embed_tokens", "lm_head"):
            its = self.vocabulary(config.vocab_size)
            return (slice(its.start, its.stop),)
        if name.endswith("o_proj.weight"):
            return slice(None), _nth(self.rank, local.num_heads * dim)
        if name.endswith("down_proj.weight"):
            return slice(None), _nth(self.rank, local.intermediate_size)
        return ()

    def adds(self, name: str) -> bool:
        """Whether this part holds a tensor's values, or zeros: biases of what is summed up count once."""
        return self.rank == 0 or not name.endswith(("o_proj.bias", "down_proj.bias"))


def _nth(index: int, width: int) -> slice:
    return slice(index * width, (index + 1) * width)


WHOLE = Shard()
