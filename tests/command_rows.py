"""The options of the command line as rows of docs/commands.md: `python -m tests.command_rows` prints them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import rich_click as click

from sgl.cli.entry import _sgl
from sgl.runtime.config import EngineConfig

ENGINE = {field.name for field in dataclasses.fields(EngineConfig)} | {"config"}
"""Those of docs/engine.md, and the file of such options."""


def leaves(group: Any = None, path: str = "sgl") -> Iterator[tuple[str, Any]]:
    """Each command that can be run, by its whole name."""
    for name, command in (group or _sgl()).commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def rows(command: Any) -> list[str]:
    """One row an option, with the text of `--help`; without those of the engine."""
    found = []
    for option in command.get_params(click.Context(command)):
        if isinstance(option, click.Option) and not option.hidden and option.name not in {"help", *ENGINE}:
            names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
            help_text = (option.help or "").replace("|", "\\|")
            found.append(f"| {names} | {help_text} |")
    return found


if __name__ == "__main__":
    for name, command in leaves():
        print(f"\n## {name}\n", *rows(command), sep="\n")
