"""The process of a cluster's replica: `sgl serve` on any free port, whose parent tells it the options and hears where
it serves. It ends when its parent does, however that ends."""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from sgl.cli.logs import configure_logging
from sgl.cli.serve import follow, serve_engine
from sgl.errors import SglError
from sgl.runtime.cluster.spares import SpareAddress, wait
from sgl.runtime.config import EngineConfig, ServerConfig
from sgl.runtime.forks import PARENT_WATCHER
from sgl.runtime.server.engine_process import prepare

_SPARE_SECONDS = 1.0  # whoever is told nothing for so long has time
_FILES: list[str] = []  # to be removed at the end


def main(spare_address: SpareAddress | None = None) -> None:
    """Run. Standard input: a line of JSON, and then nothing until the parent ends; standard output: one, too.
    spare_address: see `Member`."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is for the log
    spare = None if spare_address is None else Spare(spare_address)
    threading.Thread(target=watch, args=(spare,), name=PARENT_WATCHER, daemon=True).start()
    if not select.select([0], [], [], _SPARE_SECONDS)[0]:
        prepare()
    line = sys.stdin.buffer.readline()
    if line and spare is not None:
        spare.was_told.set()
    if not line and spare is not None:
        parent = spare.parent.get()  # or this process ends
        os.dup2(parent.fileno(), 0)
        told = parent.makefile("w")
        threading.Thread(target=watch, name=PARENT_WATCHER, daemon=True).start()
        with open(0, "rb", buffering=0, closefd=False) as its:
            line = its.readline()
    if not line:
        sys.exit(1)
    given = json.loads(line)

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
            serve_engine(engine, server, lambda url, config: tell(url=url))
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


@dataclass(frozen=True, slots=True)
class Spare:
    """A process that may get another parent until it is told what to do."""

    address: SpareAddress
    was_told: threading.Event = field(default_factory=threading.Event)
    parent: SimpleQueue[socket.socket] = field(default_factory=SimpleQueue)


def watch(spare: Spare | None = None) -> None:
    """Wait for the end of standard input, that is of the parent, and end. Nothing is read here."""
    its = select.poll()
    its.register(0, 0)
    its.poll()
    its.register(0, select.POLLIN)
    was_told = any(event & select.POLLIN for _, event in its.poll(0))  # and has not read it yet
    if spare is not None and not spare.was_told.is_set() and not was_told:
        parent = wait(spare.address)
        if parent is not None:
            spare.parent.put(parent)
            return
    _forget()
    os._exit(1)  # the engine and its ranks end with this process
