"""The process of a cluster's replica: `sgl serve` on any free port, whose parent tells it the options and hears where
it serves. It ends when its parent does, however that ends."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import select
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from sgl.cli.logs import configure_logging
from sgl.cli.serve import follow, serve_engine
from sgl.errors import SglError
from sgl.runtime.config import EngineConfig, ServerConfig
from sgl.runtime.server.engine_process import prepare

_SPARE_SECONDS = 1.0  # whoever is told nothing for so long has time
_FILES: list[str] = []  # to be removed at the end


def main() -> None:
    """Run. Standard input: a line of JSON, and then nothing until the parent ends; standard output: one, too."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is for the log
    threading.Thread(target=watch, name="sgl-parent", daemon=True).start()
    if not select.select([0], [], [], _SPARE_SECONDS)[0]:
        prepare()
    given = json.loads(sys.stdin.buffer.readline())

    def tell(**facts: Any) -> None:
        told.write(json.dumps(facts) + "\n")
        told.flush()

    if "secret" in given:
        given["engine"]["dist_key_file"] = _kept(given["secret"])
    if "transfer_secret" in given:
        given["engine"]["disaggregation_key_file"] = _kept(given["transfer_secret"])
    try:
        engine, server = EngineConfig.from_options(given["engine"]), ServerConfig.from_options(given["server"])
        configure_logging(server.log_level, server.log_format)
        if engine.node_rank:
            tell(url=None)
            follow(engine)
        else:
            asyncio.run(serve_engine(engine, server, lambda url, config: tell(url=url)))
    except SglError as error:
        tell(failed=str(error), kind=type(error).__name__)
        sys.exit(1)


def _kept(secret: str) -> str:
    """A file of this process that holds it, which only its user can read."""
    handle, path = tempfile.mkstemp(prefix="sgl-ranks-")
    with os.fdopen(handle, "w") as file:
        file.write(secret)
    _FILES.append(path)
    atexit.register(_forget)
    return path


def _forget() -> None:
    for path in _FILES:
        Path(path).unlink(missing_ok=True)


def watch() -> None:
    """Wait for the end of standard input, that is of the parent, and end. Nothing is read here."""
    its = select.poll()
    its.register(0, 0)
    its.poll()
    _forget()
    os._exit(1)  # the engine and its ranks end with this process
