"""What is built is complete: installed elsewhere, it runs the quick start without a network, and programs without an
engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import sgl
from sgl import Engine
from tests.lean_site import lean_site
from tests.live_server import served
from tests.patience import PATIENCE

REPOSITORY = Path(__file__).resolve().parent.parent

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


def test_the_package_says_the_version_that_it_is_built_with() -> None:
    assert tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"] == sgl.__version__


def test_what_is_compiled_on_the_machine_is_packed() -> None:
    packed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["sgl"]
    sources = {str(path.relative_to(REPOSITORY / "sgl")) for path in (REPOSITORY / "sgl").rglob("*.c")}
    assert sources
    assert sources <= set(packed)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source distribution, a wheel of the tree and a wheel of the source distribution, built without an index."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"  # building writes into the tree
    for name in files_of_the_tree():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name)
    hook = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    for kind in ("sdist", "wheel"):
        run(sys.executable, "-c", hook, f"build_{kind}", str(folder / kind), cwd=source)
    [archive] = (folder / "sdist").glob("sgl-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(
            tarfile, "data_filter", lambda member, path: member
        )  # see tests/conftest.py
        tar.extractall(folder)
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    run(sys.executable, "-c", hook, "build_wheel", str(folder / "again"), cwd=unpacked)
    [wheel], [again] = ((folder / kind).glob("sgl-*.whl") for kind in ("wheel", "again"))
    return {"sdist": archive, "wheel": wheel, "wheel of the sdist": again}


def files_of_the_tree() -> set[str]:
    """What git keeps, or would; without git, what lies in the folders of the source distribution."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("the tree is no git checkout, which says what belongs to it")
    return {name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file()}


def environment(folder: Path, site: Path) -> Path:
    """A virtual environment whose packages beside sgl are those of `site`; its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    [own] = folder.glob("lib/python*/site-packages")
    # A .pth in a folder that a .pth adds is not read, so an editable sgl there is not seen.
    (own / "dependencies.pth").write_text(f"{site}\n")
    return folder / "bin" / "python"


def install(python: Path, wheel: Path) -> None:
    [own] = python.parents[1].glob("lib/python*/site-packages")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install")
    run(*pip, "--no-deps", "--no-index", "--target", str(own), str(wheel), cwd=own)
    where = run(str(python), "-c", "import sgl; print(sgl.__file__)", cwd=python.parent)
    assert Path(where.strip()).is_relative_to(own)


@pytest.mark.slow
def test_the_source_distribution_is_the_whole_tree(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as tar:
        packed = {member.name.partition("/")[2] for member in tar if member.isfile()}
    assert files_of_the_tree() - packed == set()
    added = {name for name in packed - files_of_the_tree() if not name.startswith("sgl.egg-info/")}
    assert added == {"PKG-INFO", "setup.cfg"}


@pytest.mark.slow
def test_both_wheels_hold_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    package = {name for name in files_of_the_tree() if name.startswith("sgl/")}
    for name in ("wheel", "wheel of the sdist"):
        with zipfile.ZipFile(built[name]) as wheel:
            packed = set(wheel.namelist())
        assert {file for file in packed if ".dist-info/" not in file} == package
        assert built[name].stat().st_size < 15_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wheel", "wheel of the sdist"])
def test_what_is_installed_runs_the_quick_start_offline(built: dict[str, Path], name: str, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", Path(sysconfig.get_path("purelib")))
    install(python, built[name])
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "sitecustomize.py").write_text(NO_NETWORK)
    shutil.copy(REPOSITORY / "examples" / "quickstart.py", tmp_path)
    said = run(str(python), "quickstart.py", cwd=tmp_path)
    assert "20 of 20 fields right" in said
    assert "= 408" in said


@pytest.mark.slow
def test_programs_run_on_a_server_where_the_core_alone_is_installed(built: dict[str, Path], tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", lean_site(tmp_path / "site"))
    install(python, built["wheel of the sdist"])
    shutil.copy(REPOSITORY / "examples" / "quickstart.py", tmp_path)
    without = subprocess.run(
        [python, "-c", "import torch"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert "No module named 'torch'" in without.stderr
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert run(str(python), "-m", "sgl", "--version", cwd=tmp_path) == f"sgl {version}\n"
    with Engine("embedded", device="cpu") as engine, served(engine) as server:
        for command in (
            ("-m", "sgl", "run", "--url", server.url, "quickstart.py"),
            ("-m", "sgl", "trace", "--url", server.url, "quickstart.py"),
        ):
            said = run(str(python), *command, cwd=tmp_path)
            assert "20 of 20 fields right" in said
            assert "= 408" in said
    assert (tmp_path / "trace.html").stat().st_size > 10_000
