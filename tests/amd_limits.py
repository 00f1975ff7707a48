"""A plugin of pytest, for a process of its own (`-p tests.amd_limits`): Triton's interpreter runs what would be
launched on an AMD GPU, by its shared memory and its waves of 64 threads, and no launch has an option that such a GPU
lacks."""

from __future__ import annotations

import os
from typing import Any

import torch
from triton.runtime.interpreter import GridExecutor

from sgl.kernels import limits
from sgl.kernels.limits import Limits

AMD = {
    name: Limits(shared_memory=kib << 10, warp=64, is_nvidia=False, overlaps=False)
    for name, kib in (("gfx942", 64), ("gfx950", 160))
}
MOST_THREADS = 1024  # of a program

_limits = AMD[os.environ["SGL_TEST_LIMITS"]]
_execute = GridExecutor.__call__
limits.of = lambda device: _limits
torch.version.hip = "7.0"


def _checked(its: Any, *arguments: Any, **options: Any) -> None:
    foreign = options.keys() & {"maxnreg", "launch_pdl", "num_ctas"}
    assert not foreign, f"{its.fn.__name__} is launched with options of NVIDIA's compiler: {foreign}"
    assert options.get("num_warps", 4) * _limits.warp <= MOST_THREADS, f"{its.fn.__name__} has too many warps"
    assert options.get("precision", "ieee") == "ieee", f"{its.fn.__name__} multiplies as NVIDIA's tensor cores do"
    _execute(its, *arguments, **options)


GridExecutor.__call__ = _checked
