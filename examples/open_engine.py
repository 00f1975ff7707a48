"""The engine that an example runs on: the model named on the command line, or the one that comes with the package."""

from __future__ import annotations

import sys

import sgl


def open_engine() -> sgl.Engine:
    """The engine of `python examples/NAME.py [MODEL]`; close it, or use it as a context manager."""
    return sgl.Engine(sys.argv[1]) if len(sys.argv) > 1 else sgl.Engine()


def chat_template(engine: sgl.Engine) -> str | None:
    """None where the model brings its own template; another borrows a registered one."""
    return None if engine.chat_template else "chatml"
