"""Logging to standard error: text or JSON lines, with request ids."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from sgl.runtime.server.identity import request_id


def configure_logging(level: str, style: str) -> None:
    """Set up the process's handlers."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if style == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("sgl").setLevel(level.upper())
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a traceback for each request that is not HTTP


def announce(text: str) -> None:
    """Tell whoever started the process."""
    from rich.console import Console  # engines, which only log, do without

    try:
        Console(soft_wrap=True, highlight=False).print(text, style="bold", markup=False)
    except (
        OSError,
        SystemExit,
    ) as error:  # the disk is full, or nobody reads (of which rich makes an exit): serve on
        with open(os.devnull, "wb") as nothing:  # what is left in the stream would fail at its end
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        logging.getLogger("sgl").warning("%s; standard output takes no more: %r", text, error)


_FRAMES = 15  # of a traceback's start and end: endless recursion has thousands


class _Formatter(logging.Formatter):
    """Cuts the middle of long tracebacks."""

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        """An exception's traceback and those of its causes."""
        blocks = super().formatException(ei).split("\n\n")
        return "\n\n".join(map(_shortened, blocks))


def _shortened(block: str) -> str:
    lines = block.split("\n")
    most = 3 * _FRAMES
    if len(lines) <= 2 * most + 1:
        return block
    return "\n".join([*lines[:most], f"  … {len(lines) - 2 * most} lines …", *lines[-most:]])


class _TextFormatter(_Formatter):
    """Text; `[id]` precedes messages about a request."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(about)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """A line and any traceback."""
        identity = request_id.get()
        record.about = f"[{identity}] " if identity else ""
        return super().format(record)


class _JsonFormatter(_Formatter):
    """JSON: time, level, message, and any `request` and `fields` of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        line = {"time": record.created, "level": record.levelname.lower(), "logger": record.name}
        line |= {"request": request_id.get()} if request_id.get() else {}
        line |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
