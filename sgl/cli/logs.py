"""How the command logs: to standard error, as text or as one JSON object a line, each with its request's id."""

from __future__ import annotations

import json
import logging

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


class _TextFormatter(logging.Formatter):
    """`[id]` stands before the message of a line that belongs to a request."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(about)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """A line, and the traceback if there is one."""
        identity = request_id.get()
        record.about = f"[{identity}] " if identity else ""
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    """`request` and the record's `fields`, where there are any, stand beside time, level and message."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        line = {"time": record.created, "level": record.levelname.lower(), "logger": record.name}
        line |= {"request": request_id.get()} if request_id.get() else {}
        line |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
