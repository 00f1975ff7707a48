"""FlashInfer's compiled kernels for prompts: found on the machine, or compiled there."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Literal

import torch

from sgl.kernels.attention.base import AttentionShape

logger = logging.getLogger(__name__)

PrefillKernel = Literal["fa2", "fa3"]

_COMPILING = 2.0  # seconds; loading compiled kernels takes less
_NO_POSITIONS = 0  # positions are encoded elsewhere


class CannotCompile(Exception):
    """FlashInfer's kernels are not compiled and cannot be here."""


def load(shape: AttentionShape, prefill: PrefillKernel) -> dict[tuple[PrefillKernel, bool], Any]:
    """The modules by kernel, and whether for layers with a window. Missing ones are compiled with nvcc in parallel:
    fa2 takes 13 s, fa3 49 s (16 cores). Raises CannotCompile."""
    kernels: list[PrefillKernel] = ["fa2"] if prefill == "fa2" else ["fa2", "fa3"]
    windows = dict.fromkeys(window is not None for window in shape.windows)
    variants = [(kernel, has_window) for kernel in kernels for has_window in windows]
    what = f"FlashInfer's {' and '.join(kernels)} kernels for {shape.dtype} and heads of {shape.head_dim}"
    try:
        with ThreadPoolExecutor(len(variants)) as threads:
            modules = {variant: threads.submit(module, shape, *variant) for variant in variants}
            if wait(modules.values(), timeout=_COMPILING).not_done:
                logger.info("%s are compiled with nvcc, once on a machine: about a minute", what)
            return {variant: found.result() for variant, found in modules.items()}
    except (RuntimeError, OSError) as error:
        note = str(error).strip().splitlines() or [type(error).__name__]
        raise CannotCompile(f"{what} cannot be compiled, which takes CUDA's nvcc ({note[0]})") from error


def module(shape: AttentionShape, kernel: PrefillKernel, has_window: bool) -> Any:
    """One of them."""
    from flashinfer.prefill import get_batch_prefill_module

    types = shape.dtype, shape.cache_dtype, shape.dtype, torch.int32
    rest = shape.head_dim, shape.head_dim, _NO_POSITIONS, has_window, shape.softcap is not None, False
    return get_batch_prefill_module(kernel, *types, *rest)
