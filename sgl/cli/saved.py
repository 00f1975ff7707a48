"""A saved program, run with the arguments of a command line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import rich_click as click

from sgl.errors import ConfigError, nearest_name
from sgl.lang.record.compiled import CompiledProgram, load


@dataclass(frozen=True)
class Saved:
    """A saved program and its arguments."""

    program: CompiledProgram
    arguments: dict[str, str]
    as_json: bool

    @classmethod
    def read(cls, path: str, words: list[str]) -> Saved:
        """From a file and the words after it. Raises ConfigError for wrong arguments, InvalidRequest for a wrong
        file."""
        program, given = load(path), _parsed(path, words)
        return cls(program, _arguments(program, given["arg"]), given["json"])

    def run(self) -> None:
        """Run on the default backend and print the text as it comes, or the variables. Raises the program's errors."""
        state = self.program.run(stream=not self.as_json, **self.arguments)
        if self.as_json:
            sys.stdout.write(json.dumps(state.to_dict(), ensure_ascii=False) + "\n")
            return
        for piece in state.text_iter():
            sys.stdout.write(piece)
            sys.stdout.flush()
        state.sync()
        sys.stdout.write("\n")


def _parsed(path: str, words: list[str]) -> dict[str, Any]:
    command = click.Command(
        path,
        params=[click.Option(["--arg"], multiple=True), click.Option(["--json"], is_flag=True)],
        add_help_option=False,
    )
    try:
        return command.make_context(path, words).params
    except click.UsageError as error:
        message = f"{error.format_message()} A saved program takes --arg NAME=TEXT, and --json"
        raise ConfigError(message, option="arg") from error


def _arguments(program: CompiledProgram, pairs: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, is_pair, text = pair.partition("=")
        if not is_pair:
            raise ConfigError(f"--arg takes NAME=TEXT, not {pair!r}", option="arg")
        if name not in program.args:
            known = ", ".join(program.args) or "none"
            message = (
                f"the program has no argument {name!r}{nearest_name(name, program.args)}; its arguments: {known}"
            )
            raise ConfigError(message, option="arg")
        if name in found:
            raise ConfigError(f"--arg {name}= is given twice", option="arg")
        found[name] = text
    if missing := [name for name in program.args if name not in found]:
        wanted = " ".join(f"--arg {name}=TEXT" for name in missing)
        raise ConfigError(f"the program takes more arguments: {wanted}", option="arg")
    return found
