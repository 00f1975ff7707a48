"""What launches of kernels know of their device: its limits, and whose compiler it has, by torch's names for AMD's GPUs
too."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sgl.kernels import limits
from sgl.kernels.attention import flashinfer
from sgl.kernels.limits import Limits
from sgl.runtime.platform.cuda import Cuda
from tests.patience import PATIENCE
from tests.test_attention import Case

ROOT = Path(__file__).resolve().parent.parent
MI300X = Limits(shared_memory=64 << 10, warp=64, is_nvidia=False, overlaps=False)
KERNELS = (
    "test_fused_kernels.py",
    "test_gdn_kernels.py",
    "test_grouped_matrices.py",
    "test_lora_kernels.py",
    "test_mla_kernels.py",
    "test_moe_kernels.py",
    "test_moe_packed.py",
    "test_triton_attention.py",
)


def test_a_loop_has_as_many_stages_as_shared_memory_holds() -> None:
    assert [MI300X.stages(4, 1024 * kib) for kib in (8, 20, 40, 100)] == [4, 3, 1, 1]
    assert [MI300X.stages(4, 1024 * 20, 1024 * kib) for kib in (0, 4, 5, 60)] == [3, 3, 2, 1]
    assert limits.of(torch.device("cpu")).stages(4, 1 << 30, 1 << 30) == 4


def test_a_gpu_that_torch_calls_cuda_may_be_amds(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI300X")
    assert not limits.is_nvidia(device)
    assert Cuda().why_no_fp8(device) == "needs an NVIDIA GPU, and this is AMD Instinct MI300X"
    shape = Case([(1, 4)], device="cpu").shape
    assert "needs an NVIDIA GPU" in str(flashinfer.why_not(shape))
    monkeypatch.setattr(torch.version, "hip", None)
    assert limits.is_nvidia(device)
    assert not limits.is_nvidia(torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(),
    reason="the interpreter's, without a GPU",
)
@pytest.mark.parametrize("device", ["gfx942"])
def test_kernels_are_right_as_they_are_launched_on_amds_gpus(device: str) -> None:
    """Interpreted, with that device's shared memory and waves: tests/amd_limits.py."""
    files = [str(ROOT / "tests" / name) for name in KERNELS]
    environment = {**os.environ, "SGL_TEST_LIMITS": device, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    options = [
        "-q",
        "-x",
        "-p",
        "tests.amd_limits",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-k",
        "not decoders",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=6 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
