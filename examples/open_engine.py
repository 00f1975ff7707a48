"""The engine that an example runs on: the model named on the command line, or a tiny one with random weights."""

from __future__ import annotations

import sys

from random_model import random_model

import sgl


def open_engine() -> sgl.Engine:
    """The engine of `python examples/NAME.py [MODEL]`; close it, or use it as a context manager."""
    if len(sys.argv) > 1:
        return sgl.Engine(model_path=sys.argv[1])
    print("No MODEL given: a tiny model with random weights writes gibberish, in the right form.\n")
    return sgl.Engine(model_path=random_model(), load_format="dummy")


def chat_template(engine: sgl.Engine) -> str | None:
    """None where the model brings its own template; the one with random weights borrows a registered one."""
    return None if engine.chat_template else "chatml"
