"""A GPU that is not there, for compiling what would run on it: tensors on "cuda" have shapes and no contents,
torch.cuda says what such a device says, and Triton notes each launch instead of running it.

Runs where no GPU is, in a process of its own: what it replaces stays replaced.
"""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default so far, and quietly

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """A kind of GPU."""

    name: str
    target: GPUTarget
    processors: int
    shared_memory: int  # bytes, most that a program may have

    @property
    def is_amd(self) -> bool:
        return self.target.backend == "hip"

    @property
    def capability(self) -> tuple[int, int]:
        return (9, 4) if self.is_amd else divmod(int(self.target.arch), 10)


DEVICES = {
    "sm_80": Device("A100", GPUTarget("cuda", 80, 32), 108, 163 << 10),
    "sm_90": Device("H100", GPUTarget("cuda", 90, 32), 132, 227 << 10),
    "sm_100": Device("B200", GPUTarget("cuda", 100, 32), 148, 227 << 10),
    "gfx942": Device("MI300X", GPUTarget("hip", "gfx942", 64), 304, 64 << 10),
    "gfx950": Device("MI355X", GPUTarget("hip", "gfx950", 64), 256, 160 << 10),
}


@dataclass(frozen=True)
class Launch:
    """What a kernel is compiled for: one of the signatures that it was launched with."""

    kernel: Any  # JITFunction
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: Any

    def __str__(self) -> str:
        constants = {self.kernel.arg_names[path[0]]: value for path, value in self.constants.items()}
        types = [str(kind) for kind in self.signature.values() if kind != "constexpr"]
        return f"{name_of(self.kernel)}({', '.join(types)}; {constants}; {self.options.num_warps} warps)"


@dataclass(frozen=True)
class Compiled:
    """What a program of a compiled kernel takes of a device."""

    shared_memory: int  # bytes
    spilled: int  # bytes of a thread


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


class _Kernel:
    """A compiled kernel that does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *_: Any) -> None: ...

    def __getitem__(self, _: Any) -> Callable[..., None]:
        """A launch of what was compiled before."""
        return self.run


class _Nothing:
    """A stream, an event, a graph, a context."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Tensors(FakeTensorMode):
    """On "cuda" tensors are fakes, elsewhere real."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        fakes = any(isinstance(its, FakeTensor) for its in tree_leaves((args, kwargs)))
        if not fakes and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            return func(*args, **kwargs)
        if isinstance(kwargs.get("out"), FakeTensor):
            return kwargs["out"]
        if func is torch.ops.aten.equal.default:
            return False  # nobody knows: of products, that no library's agree, so that sgl's own are compiled
        args, kwargs = tree_map(self._faked, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _faked(self, its: Any) -> Any:
        if not isinstance(its, torch.Tensor) or isinstance(its, FakeTensor):
            return its
        like = {"dtype": its.dtype, "device": torch.device("cpu")}
        make = torch.ops.aten.empty_strided.default
        return super().__torch_dispatch__(make, (), (its.shape, its.stride()), like)


class FakeGpu:
    """`device`, whose launches are noted while it is `present`. One a process."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.launches: dict[tuple[Any, Any], Launch] = {}
        self.utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": device.shared_memory})
        driver.set_active(self)
        JITFunction._do_compile = self._note()  # type: ignore[method-assign]
        self._replace_torch()
        if not device.is_amd:
            _install_flashinfer()

    @contextmanager
    def present(self) -> Iterator[None]:
        with _Tensors(allow_non_fake_inputs=True):
            yield

    # what Triton asks of a driver

    def get_current_target(self) -> GPUTarget:
        return self.device.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def _note(self) -> Any:
        launches = self.launches

        def note(
            kernel: Any,
            key: Any,
            signature: Any,
            device: int,
            constants: Any,
            options: Any,
            attributes: Any,
            _: bool,
        ) -> _Kernel:
            launches[kernel, key] = Launch(kernel, signature, constants, attributes, options)
            kernel.device_caches[device][0][key] = nothing
            return nothing

        nothing = _Kernel()
        return note

    def compile(self, launch: Launch) -> Compiled:
        """Raises what the compiler does."""
        source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
        made = triton.compile(source, target=self.device.target, options=launch.options.__dict__)
        return Compiled(made.metadata.shared, _spilled(made, is_amd=self.device.is_amd))

    def _replace_torch(self) -> None:
        device, real = self.device, torch.tensor
        properties = SimpleNamespace(
            name=device.name,
            multi_processor_count=device.processors,
            total_memory=80 * GIB,
            major=device.capability[0],
            minor=device.capability[1],
            L2_cache_size=50 << 20,
        )
        for name, its in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_capability": lambda _=None: device.capability,
            "get_device_properties": lambda _=None: properties,
            "get_device_name": lambda _=None: device.name,
            "mem_get_info": lambda _=None: (60 * GIB, 80 * GIB),
            "current_stream": _Nothing,
            "default_stream": _Nothing,
            **dict.fromkeys(("empty_cache", "synchronize", "graph_pool_handle"), lambda *_: None),
            **dict.fromkeys(("Stream", "Event", "CUDAGraph", "graph", "device", "stream"), _Nothing),
        }.items():
            setattr(torch.cuda, name, its)
        if device.is_amd:
            torch.version.hip = "7.0"

        def tensor(data: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
            with unset_fake_temporarily():
                made = real(data, dtype=dtype)
            if torch.device(device or "cpu").type == "cpu":
                return made
            return torch.empty(made.shape, dtype=made.dtype, device=device)

        generator = torch.Generator
        new = {"__new__": lambda its, device=None: generator.__new__(its)}
        torch.tensor = tensor
        torch.Generator = type("Generator", (generator,), new)  # type: ignore[misc]
        # These look for the device before they ask the mode.
        FakeTensor.data_ptr = lambda its: GIB + its.storage_offset() * its.dtype.itemsize  # type: ignore[method-assign]
        FakeTensor.copy_ = lambda its, *_, **__: its  # type: ignore[method-assign]
        FakeTensor.contiguous = _contiguous  # type: ignore[method-assign]
        FakeTensor.__getitem__ = _part  # type: ignore[method-assign]
        FakeTensor.__setitem__ = lambda its, key, value: None  # type: ignore[method-assign]


def _contiguous(its: torch.Tensor, **_: Any) -> torch.Tensor:
    return its if its.is_contiguous() else torch.empty(its.shape, dtype=its.dtype, device=its.device)


def _part(its: torch.Tensor, key: Any) -> torch.Tensor:
    keys = list(key) if isinstance(key, tuple) else [key]
    is_rest = [each is Ellipsis for each in keys]
    if any(is_rest):
        rest = is_rest.index(True)
        keys[rest : rest + 1] = [slice(None)] * (its.dim() - sum(each is not None for each in keys) + 1)
    dim = 0
    for each in keys:
        if each is None:
            its, dim = its.unsqueeze(dim), dim + 1
        elif isinstance(each, slice):
            its, dim = torch.ops.aten.slice.Tensor(its, dim, each.start, each.stop, each.step or 1), dim + 1
        elif isinstance(each, torch.Tensor):
            its, dim = torch.ops.aten.index.Tensor(its, [None] * dim + [each]), dim + each.dim()
        elif isinstance(each, list):
            its, dim = torch.cat([its.narrow(dim, 0, 1)] * len(each), dim), dim + 1
        else:
            its = its.select(dim, int(each))
    return its


def _install_flashinfer() -> None:
    """As if it were installed; its kernels do nothing."""
    module = ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.__version__ = "0.6.6"  # type: ignore[attr-defined]
    sys.modules["flashinfer"] = module
    from sgl.kernels.attention import flashinfer_modules
    from sgl.kernels.latent import flashinfer as latent

    kernels = SimpleNamespace(plan=lambda *_: [0], paged_run=lambda *_: None, run=lambda *_: None)
    flashinfer_modules.module = lambda *_: kernels  # type: ignore[assignment]
    latent.FlashInferPrompts._compiled = lambda *_: kernels  # type: ignore[assignment,method-assign]


def _spilled(made: Any, *, is_amd: bool) -> int:
    """Bytes of a thread's memory outside registers."""
    if is_amd:
        lines = made.asm["amdgcn"].splitlines()
        [size] = {int(line.split()[-1]) for line in lines if ".private_segment_fixed_size:" in line}
        return size
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    [size] = [int(word.split(":")[1]) for word in said.split() if word.startswith("STACK:")]
    return size
