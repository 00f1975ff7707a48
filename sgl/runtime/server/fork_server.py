"""The process that engines fork from: it imports everything once, and an engine starts in a fraction of the time."""

from __future__ import annotations

import importlib
import multiprocessing.forkserver
from typing import Any

from sgl.runtime.config import working_folder_left_out
from sgl.runtime.server import fork_guard

_IMPORTED = ("sgl.runtime.server.worker", "transformers.models.auto.tokenization_auto")


def forking() -> Any:
    """The context of multiprocessing whose processes fork from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    return context


def start() -> None:
    """Have it begin to import, beside what this process imports. From the main thread: it ends with the one that starts
    it."""
    forking().set_forkserver_preload([fork_guard.__name__, *_IMPORTED])
    with working_folder_left_out():
        multiprocessing.forkserver.ensure_running()


def import_tokenizers() -> None:
    """Import what this process needs to load a tokenizer."""
    importlib.import_module(_IMPORTED[1])
