"""Config fields as flags, file entries and variables. Imports configs on demand: `sgl --help` is quick."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import rich_click as click

from sgl.errors import ConfigError, nearest_name

SYNONYMS = {
    "tp_size": ("--tp", "--tensor-parallel-size"),
    "pp_size": ("--pp", "--pipeline-parallel-size"),
    "dp_size": ("--dp", "--data-parallel-size"),
    "deterministic": ("--enable-deterministic-inference",),
}
"""The original's other flags for a field."""


_MOST_CHARACTERS = 1 << 20  # of a file
_SEVERAL = {
    "--lora-paths": re.compile(r"[^-].*=.*|\{.*\}"),
    "--lora-target-modules": re.compile(r"[a-z_]+_proj(_\w+)?|experts|all|all-linear"),
}
"""Flags that take several values at once, as the original's do, and what those behind the first look like."""


def spread(words: list[str]) -> list[str]:
    """A command line with such a flag before each of its values."""
    found: list[str] = []
    flag, number = "", 0
    for word in words:
        if word.startswith("--"):
            flag, number = word, 0
        elif flag in _SEVERAL:
            number += 1
            if number > 1 and _SEVERAL[flag].fullmatch(word):
                found.append(flag)
            elif number > 1:
                flag = ""
        found.append(word)
    return found


class Option(click.RichOption):
    """An option that refuses another option as its value: its own was forgotten."""

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """See click."""
        for text in value if isinstance(value, tuple | list) else [value]:
            is_flag = isinstance(text, str) and text.startswith("-")  # arguments have names that may be values
            if is_flag and any(text in other.opts for other in ctx.command.get_params(ctx)):
                raise click.BadOptionUsage(self.opts[0], f"{self.opts[0]} needs a value, not {text}", ctx)
        return super().type_cast_value(ctx, value)


class _Words(click.Choice[str]):
    """One of a few words; suggests the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            there_are = ", ".join(self.choices)
            self.fail(
                f"there is no {value!r}{nearest_name(value, self.choices)}; there are {there_are}", param, ctx
            )
        return str(value)


def field_options(cls: type[Any], groups: dict[str, str]) -> list[click.Parameter]:
    """An option for each field of a dataclass, explained by the text below it. `groups`: titles by first field."""
    docs, hints = option_docs(cls), get_type_hints(cls)  # type: ignore[arg-type]  # classes are hashable
    found: list[click.Parameter] = []
    group = ""
    for field in dataclasses.fields(cls):
        group = groups.get(field.name, group)
        name, hint, synonyms = field.name.replace("_", "-"), hints[field.name], SYNONYMS.get(field.name, ())
        shown: dict[str, Any] = {"help": docs.get(field.name, ""), "panel": group}
        if hint in (bool, bool | None):
            pair = f"--{name}" if field.default is False else f"--{name}/--no-{name}"
            found.append(Option([pair, *synonyms, field.name], type=bool, flag_value=True, default=None, **shown))
            if field.default is False:  # the opposite overrides a file or variable
                found.append(Option([f"--no-{name}", field.name], type=bool, flag_value=False, hidden=True))
            continue
        words = _words(hint)
        if words:
            shown["type"] = _Words([*words, *(["none"] if type(None) in get_args(hint) else [])])
        else:
            shown["metavar"] = field.name.split("_")[-1].upper()
        if field.default not in (None, "", dataclasses.MISSING):
            shown["help"] += f" [default: {field.default}]"
        found.append(Option([f"--{name}", *synonyms, field.name], multiple=_is_repeated(hint), **shown))
    return found


def from_flags(options: SimpleNamespace, cls: type[Any]) -> dict[str, Any]:
    """Fields given by options of `field_options`. Raises ConfigError."""
    from sgl.runtime.config import parse_options

    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(cls)}
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    return {name: value for name, value in values.items() if value not in (None, ())} | parse_options(cls, texts)


def _is_repeated(hint: Any) -> bool:
    """Whether a flag may be repeated."""
    return any(get_origin(part) is tuple for part in (hint, *get_args(hint)))


def _words(hint: Any) -> list[str]:
    """The words of a Literal option, also if it may be None."""
    if get_origin(hint) in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not type(None)]
        return _words(parts[0]) if len(parts) == 1 else []
    return [word for word in get_args(hint) if isinstance(word, str)] if get_origin(hint) is Literal else []


@functools.cache
def option_docs(cls: type) -> dict[str, str]:
    """The texts below a class's fields."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        item.target.id: " ".join(below.value.value.split())
        for item, below in zip(body.body, body.body[1:], strict=False)
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def configs(options: SimpleNamespace, classes: tuple[type[Any], ...]) -> list[Any]:
    """The configs from flags, file and variables. Raises ConfigError."""
    known = [{field.name for field in dataclasses.fields(cls)} for cls in classes]
    everything = set().union(*known)
    _refuse_misspelt_variables()
    given = {} if options.config is None else options_of_file(Path(options.config))
    for name in given:
        if name not in everything:
            message = f"{options.config}: there is no option {name!r}{nearest_name(name, everything)}"
            raise ConfigError(message, option=name)
    for cls in classes:
        given |= from_flags(options, cls)
    if options.model is not None:
        given["model_path"] = options.model
    return [
        cls.from_options({name: value for name, value in given.items() if name in names})
        for cls, names in zip(classes, known, strict=True)
    ]


def check_output(name: str) -> None:
    """Raise ConfigError if no such file can be written, before the work."""
    path = Path(name)
    if path.is_dir() or not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise ConfigError(f"{name} cannot be written: there is no such folder, or it may not be", option="output")


def ray_address() -> str | None:
    """The Ray cluster that the environment names, as Ray's own commands read it."""
    return os.environ.get("RAY_ADDRESS") or None


def _refuse_misspelt_variables() -> None:
    """Refuse variables named almost like an option; others share the prefix."""
    from sgl.runtime.config import EngineConfig, ServerConfig

    known = {
        f"SGL_{field.name.upper()}" for cls in (EngineConfig, ServerConfig) for field in dataclasses.fields(cls)
    }
    for name in sorted(os.environ):
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.85) if name.startswith("SGL_") else []
        if close and name not in known:
            raise ConfigError(f"the variable {name} is no option (did you mean {close[0]}?)", option=name)


def options_of_file(path: Path) -> dict[str, Any]:
    """The options of a YAML file, by name with underscores. Raises ConfigError."""
    import yaml  # type: ignore[import-untyped]  # its stubs are not among what is installed

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # of any type
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)  # as it is written: `<<` is followed later
            scalars = (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            _check_once(scalars, path)  # YAML's own reader takes the last one
            return node

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
                message = f"this is no {node.tag.rpartition(':')[2]}: {error}"  # of int() or datetime, say
                raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from error

    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
        if len(text) > _MOST_CHARACTERS:
            raise OSError(f"it has more than {_MOST_CHARACTERS} characters")
        data = yaml.load(text, Loader)
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"the options in {path} cannot be read: {error}", option="config") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold names and values of options", option="config")
    names = [str(name).replace("-", "_") for name in data]
    _check_once(names, path)
    return dict(zip(names, data.values(), strict=True))


def _check_once(names: Iterable[Any], path: Path) -> None:
    """Raises ConfigError for a name that is given twice."""
    for name, times in Counter(map(str, names)).items():
        if times > 1:
            raise ConfigError(f"{path} gives {name} {times} times: give it once", option=name)
