"""A model whose layers are transformers' modules, with our attention over our cache."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from sgl.kernels.attention.base import AttentionBackend, AttentionShape, AttentionStep
from sgl.kernels.attention.flashinfer import HEAD_DIMS
from sgl.kernels.attention.torch import TorchAttention
from sgl.kernels.collectives import Collectives, Links
from sgl.kernels.layers.linear import prepare
from sgl.runtime.model.config import DtypeName
from sgl.runtime.model.hf import weights
from sgl.runtime.model.hf.attention import NAME, LayerAttention, Step
from sgl.runtime.model.hf.config import TransformersConfig, empty_module, plain_config, tensor_prefixes
from sgl.runtime.model.hf.fuse import Logits, Part, Product, fuse
from sgl.runtime.model.hf.rotary import fix_frequencies
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.loader import LoadFormat, resolve_dtype
from sgl.runtime.model.lora import LoraStep, Source
from sgl.runtime.model.lora import Product as LoraProduct
from sgl.runtime.model.part import warm_up_sizes
from sgl.runtime.model.tokens import Tokens
from sgl.runtime.model.weights import matrix_tensors

_FEW = 4  # tokens to compare replaced parts with


def load_transformers(
    config: TransformersConfig,
    *,
    device: str | torch.device = "cpu",
    dtype: Literal["auto"] | DtypeName = "auto",
    load_format: LoadFormat = "auto",
    max_positions: int | None = None,
) -> TransformersModel:
    """The model of a config with its weights on the device; arguments as for `load_decoder`. Raises WeightsError."""
    device = torch.device(device)
    torch_dtype = resolve_dtype(config, dtype, device)
    module = empty_module(plain_config(config.path), config.architecture, NAME, torch_dtype)
    if load_format == "dummy":
        weights.fill(module, torch_dtype, device)
    else:
        prefixes = tensor_prefixes(config.architecture)
        weights.load(module, Path(config.path), torch_dtype, device, config.scheme, prefixes)
    if device.type == "cuda" and torch_dtype.itemsize == 2:  # so that FlashInfer can serve other sizes, too
        config = replace(
            config, cached_head_dim=min((its for its in HEAD_DIMS if its >= config.head_dim), default=0)
        )
    return TransformersModel(config, module, torch_dtype, device, max_positions)


class TransformersWeights:
    """A module's parameters and buffers, and the matrices that took the place of some."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.products: list[Product | Logits] = []
        multiplied = {id(its): its.numel() for its in module.parameters() if its.dim() > 1}
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        if head is None or head.weight is not embedding.weight:
            multiplied.pop(id(embedding.weight), None)
        self.num_multiplied = sum(multiplied.values())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor once."""
        embedding = self._module.get_input_embeddings().weight
        yield from self._module.parameters()
        yield from self._module.buffers()
        for product in self.products:
            if not isinstance(product.matrix, torch.Tensor) or product.matrix.data_ptr() != embedding.data_ptr():
                yield from matrix_tensors(product.matrix)
            if product.bias is not None:
                yield product.bias

    def prepare(self, most_rows: int) -> None:
        """See `linear.prepare`."""
        for product in self.distinct_products():
            prepare(product.matrix, product.bias, most_rows)

    def distinct_products(self) -> list[Product | Logits]:
        """One of each shape."""
        alike = {
            (type(each), next(matrix_tensors(each.matrix)).shape, each.bias is None): each for each in self.products
        }
        return list(alike.values())


class TransformersModel:
    """A `Model` of transformers' modules."""

    collectives: Collectives | None = None
    links: Links | None = None

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
        self.names = _names(module)
        """Of its tensors: which one each is first, and its shape. Tied ones have several."""
        self.device = device
        self.dtype = dtype
        self.max_positions = max_positions or config.context_length
        self.vocabulary = range(config.vocab_size)
        self.most_layers = config.num_layers
        # transformers multiplies experts in other dtypes one by one, which takes their numbers on the host
        self.captures = dtype == torch.bfloat16 or all(its.dim() < 3 for its in module.parameters())
        self.weights = TransformersWeights(module)
        self._body = module.get_submodule(config.body)
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        for name, each in list(module.named_children()):
            if each is head and type(each) is torch.nn.Linear:
                module._modules[name] = Logits(each, embedding.weight)
        self._head = _with_body(module, config.body.split("."), _Given(config.output_class))
        fix_frequencies(module, self.max_positions)
        self.module = module
        self._step: list[Step] = []
        self._lora: LoraStep | None = None
        self._is_hooked = False
        self._scale = config.layers[0].scale
        self.windows = tuple(
            None if layer.window is None or layer.window >= self.max_positions else layer.window
            for layer in config.layers
        )
        for index, (layer, window) in enumerate(zip(config.layers, self.windows, strict=True)):
            module.get_submodule(layer.module).sgl_attention = LayerAttention(
                *(index, layer.num_heads, layer.num_kv_heads, layer.key_dim, window),
                *(layer.scale / self._scale, self._step),
            )
        self._shared: list[Product] = []
        self._fuse()

    def _fuse(self) -> None:
        """See `fuse`."""
        kv = KVCache(self.config, 2, _FEW, self.dtype, self.device)
        attention = TorchAttention(self.attention_shape(_FEW))
        length, pages = np.array([_FEW], np.int32), np.ones((1, 1), np.int32)
        attention.plan(AttentionStep(length, length, pages))
        places = torch.arange(_FEW, device=self.device)
        late = places + max(0, self.max_positions - _FEW)  # where queries may be scaled by position
        ids = places % self.config.vocab_size
        with torch.inference_mode():
            fuse(self._body, lambda: self.forward(Tokens(ids, late, places + _FEW), kv, attention))
        self.weights.products = [each for each in self.module.modules() if isinstance(each, (Product, Logits))]
        self._shared = [each for each in self._body.modules() if isinstance(each, Product) and len(each.sizes) > 1]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # return the old matrices' memory, for KV pages

    def attention_shape(self, page_size: int, kv_dtype: torch.dtype | None = None) -> AttentionShape:
        """See `Model`."""
        layer = self.config.layers[0]
        return AttentionShape(
            num_heads=layer.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            page_size=page_size,
            scale=self._scale,
            dtype=self.dtype,
            device=self.device,
            windows=tuple(dict.fromkeys(self.windows)),
            kv_dtype=kv_dtype,
            softcap=layer.softcap,
            has_sinks=any(layer.has_sinks for layer in self.config.layers),
        )

    @torch.inference_mode()
    def forward(
        self, tokens: Tokens, kv: KVCache, attention: AttentionBackend, *, captured: bool = False
    ) -> torch.Tensor:
        """See `Model`."""
        self._step[:] = [Step(tokens.slots, kv, attention)]
        self._lora = tokens.lora
        if self._lora is not None and not self._is_hooked:
            self._hook()
        out = self._body(input_ids=tokens.ids[None], position_ids=tokens.positions[None], use_cache=False)
        for product in self._shared:
            product.forget()
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden if tokens.wanted is None else hidden.index_select(0, tokens.wanted)

    @cached_property
    def lora_products(self) -> dict[str, LoraProduct]:
        """Its linear modules, those that are one product together, by the name of the first."""
        shapes = self.config.linears
        return {
            names[0]: LoraProduct(
                tuple(Source(its, torch.arange(shapes[its][0])) for its in names), shapes[names[0]][1]
            )
            for _, names in self._linears()
        }

    def _linears(self) -> list[tuple[Any, list[str]]]:
        """What computes linear modules, and their names."""
        found: dict[int, tuple[Any, list[str]]] = {}
        for path, its in self._body.named_modules():
            if (name := f"{self.config.body}.{path}") in self.config.linears:
                product = its.product if isinstance(its, Part) else its
                found.setdefault(id(product), (product, []))[1].append(name)
        return list(found.values())

    def _hook(self) -> None:
        """Add what adapters do behind the modules that they change."""
        self._is_hooked = True
        for module, names in self._linears():

            def add(_: Any, inputs: tuple[torch.Tensor], out: torch.Tensor, name: str = names[0]) -> None:
                if self._lora is not None:
                    rows = out.view(-1, out.shape[-1])
                    begun = self._lora.begin(0, name, inputs[0].reshape(-1, inputs[0].shape[-1]), is_half=True)
                    self._lora.add_(0, name, begun, rows, rows)

            module.register_forward_hook(add)

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
        """See `Model`; of the products that our kernels compute."""
        products = self.weights.distinct_products()
        for num_tokens in warm_up_sizes(most_rows, most_tokens):
            for product in products:
                if isinstance(product, Product) or num_tokens <= most_rows:
                    product(torch.zeros(1, num_tokens, product.width, dtype=self.dtype, device=self.device))


def _names(module: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    first: dict[int, str] = {}
    found = {name: its for name, its in module.state_dict(keep_vars=True).items() if its.is_floating_point()}
    for name, its in found.items():
        first.setdefault(id(its), name)
    return {name: (first[id(its)], tuple(its.shape)) for name, its in found.items()}


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
