"""Which of FlashInfer's kernels for prompts is the faster one here: measured once, then read from a file.

fa3 is written for Hopper and long prompts; fa2 packs the query heads of a kv head, which fills its tiles where prompts
are short. Which wins where depends on the heads.
"""

from __future__ import annotations

import json
import logging
import statistics
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from sgl.kernels.attention.base import AttentionShape, AttentionStep
from sgl.kernels.attention.flashinfer import FlashInferAttention, PrefillKernel

logger = logging.getLogger(__name__)

_STEPS = {"long": (4, 2048, 0), "short": (64, 64, 1024)}  # rows, tokens of each, tokens before them
_RUNS = 5


def choose_prefill(attention: FlashInferAttention, shape: AttentionShape, memory: Path | None) -> str:
    """Set the backend's kernels for long and for short prompts to the faster ones, and say how much faster they are.

    memory: a file that keeps measurements by GPU, version and heads; written to where it can be.
    """
    from flashinfer import __version__

    gpu = torch.cuda.get_device_name(shape.device)
    key = f"{gpu}, flashinfer {__version__}, {shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}"
    known = _read(memory)
    seconds = known.get(key)
    if not isinstance(seconds, dict) or set(seconds) != {
        f"{k} {s}" for k in get_args(PrefillKernel) for s in _STEPS
    }:
        seconds = known[key] = _measure(attention, shape)
        _write(memory, known)
    kernels: list[PrefillKernel] = []
    notes = []
    for name in _STEPS:
        slower, faster = sorted(get_args(PrefillKernel), key=lambda kernel: -float(seconds[f"{kernel} {name}"]))
        kernels.append(faster)
        ratio = float(seconds[f"{slower} {name}"]) / float(seconds[f"{faster} {name}"])
        notes.append(f"{name} prompts by {faster} ({ratio:.2f}x as fast)")
    attention.prefill, attention.short_prefill = kernels
    return ", ".join(notes)


def _measure(attention: FlashInferAttention, shape: AttentionShape) -> dict[str, float]:
    """Seconds of a layer, by kernel and kind of prompts; some tens of milliseconds in all."""
    num_pages = 512
    cache = (num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    keys, values = torch.randn(2, *cache, device=shape.device).to(shape.dtype)
    seconds = {}
    for name, (num_rows, q_len, past) in _STEPS.items():
        query = torch.randn(num_rows * q_len, shape.num_heads, shape.head_dim, device=shape.device).to(shape.dtype)
        counts = np.full(num_rows, q_len, np.int32)
        width = -(-(q_len + past) // shape.page_size)
        table = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width) % num_pages
        for kernel in get_args(PrefillKernel):
            attention.prefill = attention.short_prefill = kernel
            attention.plan(AttentionStep(counts, counts + np.int32(past), table))
            times = []
            for _ in range(_RUNS + 1):
                start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                start.record()
                attention.run(query, keys, values, shape.windows[0])
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 1e3)
            seconds[f"{kernel} {name}"] = statistics.median(times[1:])
    return seconds


def _read(memory: Path | None) -> dict[str, object]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8")) if memory is not None else {}
    except (OSError, ValueError):
        known = {}
    return known if isinstance(known, dict) else {}


def _write(memory: Path | None, known: dict[str, object]) -> None:
    if memory is None:
        return
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        memory.write_text(json.dumps(known, indent=1), encoding="utf-8")
    except OSError as error:
        logger.warning(
            "which prompt kernel is faster is measured again next time: cannot write %s: %s", memory, error
        )
