"""A CPU's kernels in float32: cpu.c, compiled for the processor it runs on and called with tensors.

The compiler takes a second, once on a machine. Where there is none, and for other numbers than float32, the plain torch
references do the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from sgl.kernels.machine import cache_folder

MOST_HEAD_DIM = 256
MOST_QUERIES = 64  # of a block of attention's

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = (
    *("-O3", "-shared", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wl,--as-needed"),
    *(f"-DMOST_HEAD_DIM={MOST_HEAD_DIM}", f"-DMOST_QUERIES={MOST_QUERIES}"),
)
_SECONDS = 120.0  # that the compiler may take
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_ARGUMENTS = {
    "sgl_add_rms_norm": "pipppiif",
    "sgl_rotate_and_store": "ppppppppiiiif",
    "sgl_silu_and_mul": "ppii",
    "sgl_attend": "pppppi",
}


class CannotCompile(Exception):
    """These kernels cannot be had here; says why."""


def takes(*tensors: torch.Tensor) -> bool:
    """Whether these kernels are for such numbers, and can be had."""
    for x in tensors:  # a step asks for each call: a generator would take twice as long
        if not x.is_cpu or x.dtype != torch.float32 or x.requires_grad:
            return False
    return why_not() is None


@functools.cache
def why_not() -> str | None:
    """Why these kernels cannot be had here; None: they can. The first call compiles them, once on a machine."""
    try:
        library()
    except CannotCompile as error:
        return str(error)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels, by their names in cpu.c. Raises CannotCompile."""
    # A second runtime of OpenMP would keep threads of its own, which wait for work on the same cores.
    runtimes = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if not runtimes:
        raise CannotCompile("this torch brings no libgomp, whose threads they would share")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise CannotCompile("there is no C compiler: install gcc")
    tuned = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    command = [compiler, *_FLAGS, tuned]
    macros = _run([*command, "-E", "-dM", "-x", "c", os.devnull])  # the compiler's version, what the processor has
    if "__clang__" in macros:
        raise CannotCompile(f"{compiler} is Clang: install gcc")
    command += [str(_SOURCE), str(runtimes[0])]
    key = hashlib.sha256("\0".join((*command, macros)).encode() + _SOURCE.read_bytes()).hexdigest()
    kept = _kept(f"cpu_{key[:20]}.so")
    if kept is not None:
        with contextlib.suppress(OSError, AttributeError):
            return _load(kept)
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            made = Path(folder) / "cpu.so"
            _run([*command, "-o", str(made)])
            if kept is not None:
                with contextlib.suppress(OSError):
                    _keep(made, kept)
                    return _load(kept)
            return _load(made)
    except (OSError, AttributeError) as error:
        raise CannotCompile(str(error)) from error


def _kept(name: str) -> Path | None:
    """Where a library is kept; None: there is no folder that only this user can write to."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    return folder / name if found.st_uid == os.geteuid() and not found.st_mode & 0o022 else None


def _keep(made: Path, kept: Path) -> None:
    """Copy what was made there, where others see it once it is whole."""
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
        try:
            file.write(made.read_bytes())
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, kept)
        except OSError:
            os.unlink(file.name)
            raise


def _load(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(found, name)
        function.argtypes = [_TYPES[each] for each in arguments]
        function.restype = None
    return found


def _run(command: list[str]) -> str:
    """What a compiler prints."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise CannotCompile(f"{command[0]} failed: {' '.join(done.stderr.split())[-300:]}")
    return done.stdout


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norm.rms_norm`. x: [..., n]; weight: [n]."""
    x, weight = x.contiguous(), weight.contiguous()
    return _add_rms_norm(None, 0, x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norm.add_rms_norm`."""
    return _add_rms_norm(x.contiguous(), 1 if x.dim() == residual.dim() else len(x), residual, weight, eps)


def _add_rms_norm(
    x: torch.Tensor | None, num_parts: int, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    out = torch.empty_like(residual)
    width = residual.shape[-1]
    library().sgl_add_rms_norm(
        None if x is None else x.data_ptr(),
        num_parts,
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


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `activation.silu_and_mul`; gate_up is contiguous."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    library().sgl_silu_and_mul(gate_up.data_ptr(), out.data_ptr(), out.numel() // width, width)
    return out
