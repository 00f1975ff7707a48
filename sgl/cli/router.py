"""The process of a cluster's router. It ends when its parent does, however that ends."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading

from sgl.cli.logs import configure_logging
from sgl.cli.member import watch
from sgl.machine_limits import allow_open_files
from sgl.runtime.cluster.router import route


def main() -> None:
    """Run. Standard input: a line of JSON, and then nothing until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the cluster's process decides
    options = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=watch, name="sgl-parent", daemon=True).start()
    configure_logging(options["log_level"], options["log_format"])
    allow_open_files()
    asyncio.run(route(options))
