"""The `sgl` command."""

from sgl.cli.entry import main

__all__ = ["main"]
