"""A model whose layers are transformers' modules, with our attention over our cache."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from sgl.kernels.attention.base import AttentionBackend, AttentionShape
from sgl.kernels.collectives import Collectives, Links
from sgl.runtime.model.config import DtypeName
from sgl.runtime.model.hf import weights
from sgl.runtime.model.hf.attention import NAME, LayerAttention, Step
from sgl.runtime.model.hf.config import TransformersConfig, empty_module
from sgl.runtime.model.hf.rotary import fix_frequencies
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.loader import LoadFormat, resolve_dtype

logger = logging.getLogger(__name__)


def load_transformers(
    config: TransformersConfig,
    *,
    device: str | torch.device = "cpu",
    dtype: Literal["auto"] | DtypeName = "auto",
    load_format: LoadFormat = "auto",
    max_positions: int | None = None,
    seed: int = 0,
) -> TransformersModel:
    """The model of a config with its weights on the device; arguments as for `load_decoder`. Raises WeightsError."""
    device = torch.device(device)
    torch_dtype = resolve_dtype(config, dtype, device)
    its = transformers.AutoConfig.from_pretrained(config.path, local_files_only=True, trust_remote_code=False)
    module = empty_module(its, config.architecture, NAME, torch_dtype)
    if load_format == "dummy":
        weights.fill(module, torch_dtype, device, seed)
    else:
        weights.load(module, Path(config.path), torch_dtype, device)
    return TransformersModel(config, module, torch_dtype, device, max_positions)


class TransformersWeights:
    """A module's parameters and buffers."""

    def __init__(self, module: Any) -> None:
        self._module = module
        multiplied = {id(its): its.numel() for its in module.parameters() if its.dim() > 1}
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        if head is None or head.weight is not embedding.weight:
            multiplied.pop(id(embedding.weight), None)
        self.num_multiplied = sum(multiplied.values())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor once."""
        yield from self._module.parameters()
        yield from self._module.buffers()

    def prepare(self, most_rows: int) -> None:
        """Nothing is packed."""


class TransformersModel:
    """A `Model` of transformers' modules."""

    collectives: Collectives | None = None
    links: Links | None = None
    captures = True

    def __init__(
        self,
        config: TransformersConfig,
        module: Any,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int | None = None,
    ) -> None:
        """module: the loaded one with logits. max_positions: positions it may be asked for (default: the context)."""
        self.config = config
        self.device = device
        self.dtype = dtype
        self.max_positions = max_positions or config.context_length
        self.vocabulary = range(config.vocab_size)
        self.most_layers = config.num_layers
        self.weights = TransformersWeights(module)
        self._body = module.get_submodule(config.body)
        self._head = _with_body(module, config.body.split("."), _Given(config.output_class))
        fix_frequencies(module, self.max_positions)
        self._step: list[Step] = []
        self._scale = config.layers[0].scale
        for index, layer in enumerate(config.layers):
            window = None if layer.window is None or layer.window >= self.max_positions else layer.window
            module.get_submodule(layer.module).sgl_attention = LayerAttention(
                index, window, layer.scale / self._scale, self._step
            )

    def attention_shape(self, page_size: int, kv_dtype: torch.dtype | None = None) -> AttentionShape:
        """See `Model`."""
        layer = self.config.layers[0]
        return AttentionShape(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=self.config.head_dim,
            page_size=page_size,
            scale=self._scale,
            dtype=self.dtype,
            device=self.device,
            windows=tuple(dict.fromkeys(layer.window for layer in self.config.layers)),
            kv_dtype=kv_dtype,
            softcap=layer.softcap,
            has_sinks=layer.has_sinks,
        )

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KVCache,
        slots: torch.Tensor,
        attention: AttentionBackend,
        wanted: torch.Tensor | None = None,
        captured: bool = False,
    ) -> torch.Tensor:
        """See `Model`."""
        self._step[:] = [Step(slots, kv, attention)]
        out = self._body(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden if wanted is None else hidden.index_select(0, wanted)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Model`."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float() if out is None else out.copy_(logits)

    def whole_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return self.logits(hidden)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return logits

    @torch.inference_mode()
    def warm_up_gemms(self, most_rows: int, most_tokens: int) -> None:
        """See `Model`."""


class _Given(torch.nn.Module):
    """Stands for a body: its hidden states are the embeddings that it is given."""

    def __init__(self, output_class: type[Any]) -> None:
        super().__init__()
        self._output_class = output_class

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        return self._output_class(last_hidden_state=inputs_embeds)


def _with_body(module: Any, path: list[str], body: torch.nn.Module) -> Any:
    """A shallow copy of the module with another submodule at the path."""
    if not path:
        return body
    copied = copy.copy(module)
    copied._modules = {**module._modules, path[0]: _with_body(module._modules[path[0]], path[1:], body)}
    return copied
