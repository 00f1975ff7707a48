"""The wheel carries the embedded model: installed elsewhere, it runs the quick start without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from tests.patience import PATIENCE

REPOSITORY = Path(__file__).resolve().parent.parent
PACKED = ("pyproject.toml", "README.md", "LICENSE", "sgl")

NO_NETWORK = """
import socket

def refuse(self, address):
    raise OSError(f"a connection was tried, to {address}")

socket.socket.connect = socket.socket.connect_ex = refuse
"""


def run(*command: str, cwd: Path) -> str:
    """What a command prints; its errors are the test's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SGL_", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_what_is_compiled_on_the_machine_is_packed() -> None:
    packed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["sgl"]
    sources = {str(path.relative_to(REPOSITORY / "sgl")) for path in (REPOSITORY / "sgl").rglob("*.c")}
    assert sources
    assert sources <= set(packed)


@pytest.mark.slow
def test_the_wheel_runs_the_quick_start_offline(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"  # building writes into the tree
    source.mkdir()
    for name in PACKED:
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
        copy(REPOSITORY / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(tmp_path), cwd=tmp_path)
    [wheel] = tmp_path.glob("sgl-*.whl")
    assert wheel.stat().st_size < 15_000_000

    elsewhere = tmp_path / "venv"
    venv.create(elsewhere, with_pip=False, symlinks=True)
    python = elsewhere / "bin" / "python"
    [site] = elsewhere.glob("lib/python*/site-packages")
    run(*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    # The dependencies are this interpreter's; a .pth in a folder that a .pth adds is not read, so its sgl is not seen.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "sitecustomize.py").write_text(NO_NETWORK)
    shutil.copy(REPOSITORY / "examples" / "quickstart.py", tmp_path)

    where = run(str(python), "-c", "import sgl; print(sgl.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(elsewhere)
    said = run(str(python), "quickstart.py", cwd=tmp_path)
    assert "20 of 20 fields right" in said
    assert "= 408" in said
