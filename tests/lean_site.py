"""A folder of packages as `pip install sgl` alone leaves it: what the core depends on, and nothing else."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent


def lean_site(folder: Path) -> Path:
    """Link the core's dependencies, and theirs, out of this interpreter's packages. Needs no index."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    folder.mkdir()
    for distribution in _closure(project["dependencies"]):
        for top in {
            file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            (folder / top).symlink_to(str(distribution.locate_file(top)))
    return folder


def _closure(lines: Iterable[str]) -> list[metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    waiting = [Requirement(line) for line in lines]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in found:
            found[name] = metadata.distribution(name)
            waiting += [
                needed
                for needed in map(Requirement, found[name].requires or ())
                if needed.marker is None or needed.marker.evaluate({"extra": ""})
            ]
    return list(found.values())
