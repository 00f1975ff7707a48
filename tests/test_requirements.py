"""What pip brings for the package and each of its extras is what the code accepts."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from sgl.kernels import flashinfer_version
from tests.patience import PATIENCE

REPOSITORY = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
WITHOUT_ENGINE = (None, "ebnf", "otel", "plot", "docs")


def requirements(extra: str | None) -> dict[str, Requirement]:
    """What an extra asks for, that of the extras in it too; None: what the package asks for alone."""
    found: dict[str, Requirement] = {}
    for requirement in map(Requirement, PROJECT["dependencies"] if extra is None else EXTRAS[extra]):
        if requirement.name == PROJECT["name"]:
            for inner in requirement.extras:
                found |= requirements(inner)
        else:
            found[requirement.name] = requirement
    return found


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def test_the_extra_asks_for_just_the_flashinfer_that_is_accepted() -> None:
    asked = requirements("cuda").pop("flashinfer-python")
    oldest, unknown = flashinfer_version.OLDEST, flashinfer_version.FIRST_UNKNOWN
    assert str(asked.specifier) in (
        f"<{dotted(unknown)},>={dotted(oldest)}",
        f">={dotted(oldest)},<{dotted(unknown)}",
    )


def test_the_extras_are_those_that_messages_name() -> None:
    assert set(EXTRAS) == {
        "engine",
        "cuda",
        "quant",
        "ebnf",
        "jax",
        "gateway",
        "grpc",
        "dist",
        "otel",
        "plot",
        "video",
        "nixl",
        "docs",
        "dev",
    }
    named = {
        extra
        for path in (REPOSITORY / "sgl").rglob("*.py")
        for extra in re.findall(r"sgl\[(\w+)\]", path.read_text(encoding="utf-8"))
    }
    assert named - {"extra"} <= set(EXTRAS)


def test_an_engine_is_a_part_of_what_needs_one() -> None:
    assert "torch" not in requirements(None)
    for extra in ("cuda", "quant", "dist", "dev"):
        assert requirements("engine").keys() <= requirements(extra).keys()


@pytest.mark.parametrize("extra", [None, *EXTRAS])
def test_every_requirement_has_a_lower_bound(extra: str | None) -> None:
    for requirement in requirements(extra).values():
        assert {"==", ">="} & {one.operator for one in requirement.specifier}, requirement


@pytest.mark.slow
@pytest.mark.parametrize("resolution", ["highest", "lowest-direct"])
@pytest.mark.parametrize("extra", [None, *EXTRAS])
def test_the_package_with_an_extra_can_be_resolved_to_what_is_accepted(
    extra: str | None, resolution: str, tmp_path: Path
) -> None:
    found = resolve(extra, resolution, tmp_path)
    for name, requirement in (requirements(None) | (requirements(extra) if extra else {})).items():
        if requirement.marker is None or requirement.marker.evaluate():
            assert requirement.specifier.contains(found[name.lower()], prereleases=True)
    if extra in WITHOUT_ENGINE:
        assert "torch" not in found
    if "flashinfer-python" in found:
        numbers = found["flashinfer-python"].release[:3]
        assert flashinfer_version.OLDEST <= numbers < flashinfer_version.FIRST_UNKNOWN


def resolve(extra: str | None, resolution: str, folder: Path) -> dict[str, Version]:
    """The version of each package that would be installed beside sgl on this machine."""
    pytest.importorskip("uv")
    asked = folder / "requirements.in"
    lines = {**requirements(None), **(requirements(extra) if extra else {})}.values()
    asked.write_text("\n".join(map(str, lines)) + "\n")
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python", sys.executable, "--resolution", resolution, str(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if "error sending request" in done.stderr or "dns error" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-4000:]
    pairs = (line.split(";")[0].strip().partition("==") for line in done.stdout.splitlines() if "==" in line)
    return {name.lower(): Version(version) for name, _, version in pairs}
