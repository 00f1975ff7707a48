"""Every Triton kernel compiles for five GPUs of two vendors, as engines launch it there, and no program asks for more
shared memory than there is. No GPU is needed, and nothing is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
MOST_SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64, "gfx950": 160}
"""KiB of a program, by device."""
WHOLE = MOST_SHARED if "SGL_EVERY_PROGRAM" in os.environ else ("sm_80",)
"""Devices for which every program is compiled, the one of the least memory; for others each kernel is, once, since all
of sm_100 take a core for a quarter of an hour: `make every-program`."""
MOST_SPILLED = 512
"""Bytes of a thread that registers have no room for."""
SPILLING = {
    ("sgl.kernels.attention.decode_triton._attend", "fp32"),  # kernels are compared in float32, and seldom served
    ("sgl.kernels.attention.triton._attend", "fp32"),
    ("sgl.kernels.gdn.delta_triton._delta_prepare", "fp32"),
    ("sgl.kernels.gdn.delta_triton._delta_scan", "fp32"),
    ("sgl.kernels.layers.grouped_triton._linear", "fp32"),
    ("sgl.kernels.gdn.delta_triton._delta_prepare", "bf16"),  # 1,600 bytes on sm_80 alone
    ("sgl.kernels.latent.attend_triton._decodes", "bf16"),  # 728 bytes on sm_100 alone
    ("sgl.kernels.layers.invariant_triton._multiply", "bf16"),  # two sums: up to 2,024 bytes on sm_80
    ("sgl.kernels.moe.single_triton._down", "bf16"),  # 664 to 784 bytes where a token has nine experts or more
}
"""Kernels that may spill more, with the dtype of their inputs."""
LACKING = {"sm_80": {"sgl.kernels.layers.fused_triton._quantize_rows"}}
"""What a device cannot do: it has no such numbers of eight bits."""

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists(),
    reason="compiles where Triton is and no GPU, which would run the kernels",
)


def launched(device: str, cache: Path, *arguments: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernel_launches", device, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=6 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
@pytest.mark.timeout(6 * PATIENCE)
@pytest.mark.parametrize("device", MOST_SHARED)
def test_every_kernel_compiles_as_engines_launch_it(device: str, tmp_path: Path) -> None:
    report = launched(device, tmp_path, *(() if device in WHOLE else ("once",)))
    assert report["unreached"] == [], "no engine of tests/kernel_launches.py launches these"
    fitting = [program for program in report["programs"] if "error" not in program]
    failed = [program for program in report["programs"] if "error" in program]
    failed = [program for program in failed if _name(program)[0] not in LACKING.get(device, ())]
    assert failed == [], "these do not compile"
    large = [program for program in fitting if program["shared"] > MOST_SHARED[device] << 10]
    assert large == [], f"there are {MOST_SHARED[device]} KiB"
    spilling = [program for program in fitting if program["spilled"] > MOST_SPILLED]
    assert [program for program in spilling if _name(program) not in SPILLING] == []


def _name(program: dict[str, Any]) -> tuple[str, str]:
    """A kernel's, and the dtype of its first argument."""
    name, _, arguments = program["kernel"].partition("(")
    return name, arguments.partition(",")[0].removeprefix("*")
