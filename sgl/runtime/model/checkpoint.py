"""Finds a checkpoint's files: a folder, a config.json, or a hub id that is downloaded once.

config.py and loader.py read the files.
"""

from __future__ import annotations

import re
from pathlib import Path

from sgl.errors import ModelError

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*|[\w][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def checkpoint_folder(path: str | Path) -> Path:
    """The local folder of a checkpoint. Raises ModelError if it exists neither here nor on the hub."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.is_file() and local.name == "config.json":
        return local.parent
    if local.exists() or not isinstance(path, str) or not _HUB_ID.fullmatch(path):
        raise ModelError(f"{path} is neither a checkpoint folder, nor a config.json, nor a hub id", path=str(path))
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
