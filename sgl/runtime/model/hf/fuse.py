"""Replaces parts of transformers' modules by our kernels where they compute the same.

A forward pass of a few tokens notes what each module was given and what it returned. A replacement that gives the same
for that stays; another goes again. So names only suggest what to try: `q_proj`, `k_proj` and `v_proj` as one product,
with the rotation and the write to the cache behind it; `gate_proj` and `up_proj` as one; RMS norms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from sgl.kernels.layers.activation import silu_and_mul
from sgl.kernels.layers.linear import Matrix, linear
from sgl.kernels.layers.norm import rms_norm
from sgl.kernels.layers.qkv import rotate_and_store
from sgl.runtime.model.hf.attention import LayerAttention
from sgl.runtime.model.weights import MAX_HELD_TWICE, packed

logger = logging.getLogger(__name__)

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of the largest number


class Product(nn.Module):
    """Linear modules (nn.Linear or Conv1D) of the same input as one product, in their order."""

    def __init__(self, linears: list[Any]) -> None:
        super().__init__()
        matrices = [_matrix(its) for its in linears]
        self.sizes = [len(its) for its in matrices]
        self.are_turned = [type(its) is Conv1D for its in linears]  # their own weights are [k, n]
        self.width = matrices[0].shape[1]
        self.matrix: Matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        self.bias: torch.Tensor | None = None
        if any(its.bias is not None for its in linears):
            biases = zip(linears, matrices, strict=True)
            self.bias = torch.cat(
                [matrix.new_zeros(len(matrix)) if its.bias is None else its.bias.detach() for its, matrix in biases]
            )
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        self._num_left = 0

    def pack(self) -> None:
        """For a CPU."""
        self.matrix = packed(self.matrix)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of x [..., k]: [..., n], one module's after the other's."""
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) == 1 and x.is_cuda and x.dtype.itemsize == 2:
            from sgl.kernels.layers.single_triton import project

            out = project(flat, None, 0.0, self.matrix, self.bias)
        else:
            out = linear(flat, self.matrix, self.bias)
        return out.view(*x.shape[:-1], -1)

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The product of one of the modules. Those of one input are computed together, with the first that is asked
        for."""
        if self._input is not x:
            self._input, self._parts, self._num_left = x, self(x).split(self.sizes, -1), len(self.sizes)
        part = self._parts[index]
        self._num_left -= 1
        if not self._num_left:
            self.forget()
        return part

    def forget(self) -> None:
        """Hold no input."""
        self._input, self._parts = None, ()


class Part(nn.Module):
    """Stands for one of the modules of a `Product`."""

    def __init__(self, product: Product, index: int) -> None:
        super().__init__()
        self.product = product
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `Product.part`."""
        return self.product.part(self.index, x)


class Logits(nn.Module):
    """The last product: float32 logits, not rounded to the weights' dtype before."""

    def __init__(self, head: nn.Linear, embedding: torch.Tensor) -> None:
        super().__init__()
        self.width = head.in_features
        self.matrix: Matrix = head.weight.detach().contiguous()
        self.bias = None if head.bias is None else head.bias.detach()
        if head.weight is not embedding or embedding.nbytes <= MAX_HELD_TWICE:
            self.matrix = packed(self.matrix)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., vocab] of hidden states x [..., hidden]."""
        flat = x.reshape(-1, x.shape[-1])
        if x.is_cuda and x.dtype.itemsize == 2 and isinstance(self.matrix, torch.Tensor):
            logits = torch.mm(flat, self.matrix.t(), out_dtype=torch.float32)
            if self.bias is not None:
                logits += self.bias
        else:
            logits = linear(flat, self.matrix, self.bias).float()
        return logits.view(*x.shape[:-1], -1)


@dataclass(slots=True)
class _Call:
    """Of a module."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    output: Any


def fuse(body: Any, run: Callable[[], Any]) -> None:
    """Replace what can be in the body of a model. run: compute a few tokens with it."""
    candidates = [each for each in body.modules() if _linears(each) or _is_norm(each)]
    calls: dict[int, _Call] = {}
    with _noted(candidates, calls):
        run()
    met = [(module, calls[id(module)]) for module in candidates if id(module) in calls]
    num_norms = sum(_try_norm(module, call) for module, call in met if _is_norm(module))
    num_products = num_attentions = num_gates = 0
    for module, call in met:
        products = _try_products(module, call)
        if products:
            num_products += len(products)
            num_attentions += _try_attention(module, call)
            num_gates += _try_gate(module, call)
    logger.info(
        "sgl's kernels for %d products, %d attention modules, %d gates and %d norms of transformers",
        *(num_products, num_attentions, num_gates, num_norms),
    )


@contextmanager
def _noted(modules: list[Any], calls: dict[int, _Call]) -> Iterator[None]:
    def note(module: Any, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        calls[id(module)] = _Call(args, options, output)

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _linears(module: Any) -> dict[str, Any]:
    return {name: its for name, its in module.named_children() if type(its) in (nn.Linear, Conv1D)}


def _matrix(linear_module: Any) -> torch.Tensor:
    """[n, k]"""
    weight: torch.Tensor = linear_module.weight.detach()
    return (weight.t() if type(linear_module) is Conv1D else weight).contiguous()


def _is_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm") and isinstance(weight, torch.Tensor) and _eps(module) is not None
    )


def _eps(norm: Any) -> float | None:
    its = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return its if isinstance(its, float) else None


def _gives_the_same(call: _Call, compute: Callable[..., Any]) -> bool:
    try:
        given = compute(*call.args, **call.options)
    except Exception:  # whatever it is, the module stays as it was
        return False
    ours, theirs = (its[0] if isinstance(its, tuple) else its for its in (given, call.output))
    if not isinstance(ours, torch.Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    wide = theirs.float()
    return bool((ours.float() - wide).abs().max() <= _TOLERANCE[theirs.dtype] * wide.abs().max())


def _try_norm(module: Any, call: _Call) -> bool:
    weight, eps = module.weight.detach(), _eps(module)
    assert eps is not None, "it is a norm"
    for scales in (weight, 1.0 + weight.float()):  # the latter are Gemma's
        norm = partial(rms_norm, weight=scales, eps=eps)
        if _gives_the_same(call, norm):
            module.forward = norm
            module.scales = scales
            return True
    return False


def _try_products(module: Any, call: _Call) -> list[Product]:
    """Products in place of a module's linear ones."""
    linears, products = _linears(module), []
    grouped = [group for group in _GROUPS if linears.keys() >= {*group} and _alike(linears, group)]
    if not linears:
        return []
    groups = [*grouped, *((name,) for name in linears if not any(name in group for group in grouped))]
    for group in groups:
        product = Product([linears[name] for name in group])
        products.append(product)
        for index, name in enumerate(group):
            module._modules[name] = product if len(group) == 1 else Part(product, index)
    if _gives_the_same(call, module):
        for product in products:
            product.pack()
        return products
    module._modules.update(linears)
    return []


def _product(module: Any, *names: str) -> Product | None:
    """The product that is computed by one of these submodules."""
    found = next((its for name in names if (its := getattr(module, name, None)) is not None), None)
    its = found.product if isinstance(found, Part) else found
    return its if isinstance(its, Product) else None


def _alike(linears: dict[str, Any], group: tuple[str, ...]) -> bool:
    first = linears[group[0]].weight
    return all(
        (its.weight.shape[1], its.weight.dtype) == (first.shape[1], first.dtype)
        for its in map(linears.__getitem__, group)
    )


def _try_attention(module: Any, call: _Call) -> bool:
    """The attention of Llama and its many descendants, with or without norms of each head."""
    attention = getattr(module, "sgl_attention", None)
    product, output = _product(module, "q_proj", "qkv_proj"), _product(module, "o_proj")
    if not isinstance(attention, LayerAttention) or product is None or output is None:
        return False
    num_heads, num_kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    if sum(product.sizes) != (num_heads + 2 * num_kv_heads) * head_dim or attention.relative_scale != 1.0:
        return False
    if attention.step[0].kv.keys[attention.index].shape[-2:] != (num_kv_heads, head_dim):
        return False
    norm, eps = None, 0.0
    norms: list[Any] = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if norms != [None, None]:
        query_norm, key_norm = (getattr(its, "scales", None) for its in norms)
        if query_norm is None or key_norm is None or not query_norm.shape == key_norm.shape == (head_dim,):
            return False
        eps = _eps(norms[0]) or 0.0
        norm = torch.cat((query_norm.expand(num_heads, -1), key_norm.expand(num_kv_heads, -1)))

        def follow(into: torch.Tensor = norm) -> None:
            scales = (its.scales for its in norms)
            counts = num_heads, num_kv_heads
            into.copy_(torch.cat([each.expand(count, -1) for each, count in zip(scales, counts, strict=True)]))

    def attend(
        hidden_states: torch.Tensor, position_embeddings: Any, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        step = attention.step[0]
        qkv = product(hidden_states)[0].view(-1, num_heads + 2 * num_kv_heads, head_dim)
        cos, sin = position_embeddings
        rotary = step.rotary(cos, sin, head_dim)
        if rotary is None:
            raise ValueError("it rotates a part of each head")
        keys, values = step.kv.keys[attention.index], step.kv.values[attention.index]
        slots = step.kv.slots_of(attention.index, step.slots)
        query = rotate_and_store(qkv, num_heads, rotary, norm, eps, keys, values, slots)
        return output(attention.run(query, getattr(module, "sinks", None)).flatten(1)[None]), None

    if _gives_the_same(call, attend):
        module.forward = attend
        if norm is not None:
            module.sgl_follow = follow
        return True
    return False


def _try_gate(module: Any, call: _Call) -> bool:
    """The feed-forward layer of Llama and its many descendants."""
    product, output = _product(module, "gate_proj", "gate_up_proj"), _product(module, "down_proj")
    if product is None or output is None:
        return False

    def feed(x: torch.Tensor) -> torch.Tensor:
        return output(silu_and_mul(product(x)))  # type: ignore[no-any-return]

    if _gives_the_same(call, feed):
        module.forward = feed
        return True
    return False
