"""CPU kernels in float32: cpu.c, compiled on first use (a second, once a machine).

Without a compiler, and for other dtypes, the plain torch references run instead.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch.nn import functional

from sgl import native_code
from sgl.native_code import CannotCompile

MAX_HEAD_DIM = 256
MAX_QUERIES = 64  # in one block of attention
TILE = 64  # keys that queries attend to at a time
COLUMNS = 32  # of a panel of a matrix

_FLAGS = (
    *("-fopenmp", "-fno-math-errno"),
    *(f"-DMAX_HEAD_DIM={MAX_HEAD_DIM}", f"-DMAX_QUERIES={MAX_QUERIES}", f"-DTILE={TILE}"),
)
_FUNCTIONS = {
    "sgl_add_rms_norm": "pipppiif",
    "sgl_rotate_and_store": "ppppppppiiiif",
    "sgl_gate": "ppiiiff",
    "sgl_cap": "pif",
    "sgl_multiply": "ppppiii",
    "sgl_attend": "ppppppi",
}


def takes(*tensors: torch.Tensor) -> bool:
    """Whether these kernels support such tensors and could be compiled."""
    for x in tensors:  # called often; a generator would take twice as long
        if not x.is_cpu or x.dtype != torch.float32 or x.requires_grad:
            return False
    return why_not() is None


@functools.cache
def why_not() -> str | None:
    """Why the kernels cannot be compiled here; None: they can. The first call compiles them."""
    try:
        library()
    except CannotCompile as error:
        return str(error)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels by their names in cpu.c. Raises CannotCompile."""
    # Share torch's OpenMP: a second one would keep its own threads, which wait on the same cores.
    runtimes = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if not runtimes:
        raise CannotCompile("this torch brings no libgomp, whose threads they would share")
    return native_code.load(Path(__file__).with_suffix(".c"), _FUNCTIONS, _FLAGS, libgomp=runtimes[0])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norm.rms_norm`. x: [..., n]; weight: [n]."""
    return add_rms_norm(None, x.contiguous(), weight.contiguous(), eps)


def add_rms_norm(x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norm.add_rms_norm`."""
    parts = None if x is None else x.contiguous()
    out = torch.empty_like(residual)
    width = residual.shape[-1]
    library().sgl_add_rms_norm(
        None if parts is None else parts.data_ptr(),
        0 if parts is None else 1 if parts.dim() == residual.dim() else len(parts),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        residual.numel() // width,
        width,
        eps,
    )
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    num_heads: int,
    rotary: tuple[torch.Tensor, torch.Tensor],
    norm: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `qkv.rotate_and_store`; qkv is contiguous."""
    num_tokens, _, head_dim = qkv.shape
    if out is None:
        out = qkv.new_empty(num_tokens, num_heads, head_dim)
    cos, sin = rotary
    library().sgl_rotate_and_store(
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        None if norm is None else norm.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slots.data_ptr(),
        out.data_ptr(),
        num_tokens,
        num_heads,
        key_cache.shape[2],
        head_dim,
        eps,
    )
    return out


def panels(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix [n, k] as `multiply` reads it: [ceil(n / COLUMNS), k, COLUMNS], filled up with zeros."""
    n, k = matrix.shape
    padded = functional.pad(matrix, (0, 0, 0, -n % COLUMNS))
    return padded.view(len(padded) // COLUMNS, COLUMNS, k).transpose(1, 2).contiguous()


def multiply(x: torch.Tensor, matrix: torch.Tensor, n: int, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, k] times `panels` of a matrix [n, k], plus the bias [n]: [T, n]. A row's result has the same bits among any
    others, on any number of threads."""
    x = x.contiguous()
    out = x.new_empty(len(x), n)
    bias = None if bias is None else bias.contiguous()
    pointer = None if bias is None else bias.data_ptr()
    library().sgl_multiply(x.data_ptr(), matrix.data_ptr(), pointer, out.data_ptr(), len(x), n, x.shape[1])
    return out


def gate(
    gate_up: torch.Tensor, *, is_gelu: bool = False, clamped: tuple[float, float] = (1.0, 0.0)
) -> torch.Tensor:
    """`activation.silu_and_mul`, `gelu_and_mul` or, with alpha and limit, `clamped_and_mul`; gate_up is contiguous."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    rows = out.numel() // width
    library().sgl_gate(gate_up.data_ptr(), out.data_ptr(), rows, width, is_gelu, *clamped)
    return out


def cap_(x: torch.Tensor, cap: float) -> torch.Tensor:
    """See `activation.cap_`; x is contiguous."""
    library().sgl_cap(x.data_ptr(), x.numel(), cap)
    return x
