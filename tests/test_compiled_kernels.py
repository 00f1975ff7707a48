"""Every Triton kernel compiles for the GPUs of two vendors, as engines launch it there, and no program asks for more
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
MOST_SHARED = {"sm_80": 163, "sm_100": 227}
"""KiB of a program. sm_90, gfx942 and gfx950 take longer, by hand: `python -m tests.kernel_launches sm_90`."""
MOST_SPILLED = 2048
"""Bytes of a thread that registers have no room for; float32, in which kernels are compared and not served, spills."""
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
@pytest.mark.parametrize("device", MOST_SHARED)
def test_every_kernel_compiles_as_engines_launch_it(device: str, tmp_path: Path) -> None:
    report = launched(device, tmp_path)
    assert report["unreached"] == [], "no engine of tests/kernel_launches.py launches these"
    failed = [program for program in report["programs"] if "error" in program]
    failed = [program for program in failed if program["kernel"].partition("(")[0] not in LACKING.get(device, ())]
    assert failed == [], "these do not compile"
    fitting = [program for program in report["programs"] if "error" not in program]
    large = [program for program in fitting if program["shared"] > MOST_SHARED[device] << 10]
    assert large == [], f"there are {MOST_SHARED[device]} KiB"
    spilling = [program for program in fitting if program["spilled"] > MOST_SPILLED]
    assert [program for program in spilling if "(*fp32" not in program["kernel"]] == []
