"""The fenced blocks of a page, and the commands in them, each held to what there is."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from sgl.bench.datasets import Source
from sgl.bench.load import Load
from sgl.cli import main
from sgl.cli.options import configs, from_flags
from sgl.runtime.config import EngineConfig, ServerConfig
from sgl.runtime.model.checkpoint import PACKAGES
from tests.patience import PATIENCE

REPOSITORY = Path(__file__).resolve().parent.parent
SERVER = re.compile(r"(?:http://)?(?:localhost|127\.0\.0\.1):30000")
MODEL = "path/to/checkpoint"
"""What pages write for a model: here, the embedded one."""
CLUSTER = tuple(f"cluster.{name}" for name in ("up", "status", "scale", "update", "down"))
ADAPTER = "path/to/adapter"
"""What they write for a LoRA adapter's folder."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: what its first fence says, its text, and the line of the page that it begins at."""

    kind: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    """Those of a page in order. A block without a kind is a console if it has prompts, and else commands or text."""
    found = []
    for match in re.finditer(r"^```(\S*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        kind, text = match[1], match[2]
        first = text.split(maxsplit=1)[0]
        kind = kind or ("console" if first == "$" else "sh" if first in COMMANDS else "text")
        found.append(Block(kind, text, page[: match.start()].count("\n") + 1))
    return found


def commands(block: Block) -> Iterator[tuple[list[str], str]]:
    """Each command of a block, in words, and the output that is shown below it."""
    lines = iter(block.text.splitlines())
    waiting: list[tuple[list[str], list[str]]] = []
    for line in lines:
        if block.kind == "sh" or line.startswith("$ "):
            text = line.removeprefix("$ ")
            while (words := _words(text)) is None:  # a quotation or a line goes on
                text = text.removesuffix("\\") + "\n" + next(lines)
            if words:
                waiting.append((words, []))
        else:
            waiting[-1][1].append(line)
    yield from ((words, "\n".join(output)) for words, output in waiting)


def _words(text: str) -> list[str] | None:
    try:
        return None if text.endswith("\\") else shlex.split(text, comments=True)
    except ValueError:
        return None


def check(words: list[str], output: str, url: str) -> None:
    """Run a command against the server at `url`, or hold it to what it names: options, files, extras, targets."""
    while re.fullmatch(r"\w+=.*", words[0]):
        name = words.pop(0).partition("=")[0]
        assert name in VARIABLES, name
    COMMANDS[words[0]](words, output, url)


def _sgl(words: list[str], output: str, url: str) -> None:
    """Parse the command line; what it would run, it does not."""
    del output, url
    given: list[SimpleNamespace] = []
    with pytest.MonkeyPatch.context() as patch:
        for does in (
            *CLUSTER,
            "gateway.gateway",
            "serve.serve",
            "programs.run",
            "programs.trace",
            "chat.chat",
            "bench.bench",
        ):
            patch.setattr(f"sgl.cli.{does}", lambda options: given.append(options) or 0)
        with pytest.raises(SystemExit) as ended:
            main(["embedded" if word == MODEL else word for word in words[1:]])
    assert ended.value.code == 0, words
    for options in given:
        if options.does in ("cluster:up", "cluster:update"):
            assert (REPOSITORY / options.file).is_file(), options.file
        elif options.does == "serve:serve":
            configs(options, (EngineConfig, ServerConfig))
        elif options.does.startswith("programs:"):
            assert (REPOSITORY / options.file).is_file() or options.file == "program.py", options.file
        elif options.kind == "serving":
            from_flags(options, Source), from_flags(options, Load)
        elif options.does == "bench:bench":
            from_flags(options, Source), configs(options, (EngineConfig,))


def _python(words: list[str], output: str, url: str) -> None:
    """A file that there is (tests/test_examples.py runs the examples), or a module that knows the options."""
    if words[1:2] != ["-m"]:
        assert (REPOSITORY / words[1]).is_file(), words
        return
    if words[2] in ("sgl", "sgl.launch_server"):
        _sgl(["sgl", *words[3:]] if words[2] == "sgl" else ["sgl", "serve"], output, url)
        return
    spec = importlib.util.find_spec(words[2])
    spec = importlib.util.find_spec(f"{words[2]}.__main__") if spec and spec.submodule_search_locations else spec
    assert spec is not None, words
    source = Path(str(spec.origin)).read_text(encoding="utf-8")
    assert [option for option in re.findall(r"--[\w-]+", " ".join(words)) if f'"{option}"' not in source] == []


def _pip(words: list[str], output: str, url: str) -> None:
    del output, url
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert words[1] == "install"
    if words[2] == "--no-deps":
        assert set(words[3:]) <= set(PACKAGES.values())
        return
    for word in words[2:]:
        asked = Requirement(re.sub(r"^\.(?=\[|$)", project["name"], word))
        assert asked.name == project["name"]
        assert asked.extras <= set(project["optional-dependencies"])


def _make(words: list[str], output: str, url: str) -> None:
    del output, url
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in words[1:] if "=" not in word} <= targets


def _curl(words: list[str], output: str, url: str) -> None:
    """Really send it. The answer has the names that the page shows."""
    done = subprocess.run(
        [SERVER.sub(url, word) for word in words], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, words
    shown, got = ([_json(line) for line in text.splitlines()] for text in (output, done.stdout))
    if any(shown):
        assert _names(shown[-1] if len(shown) == 1 else shown[1]) <= _names(got[0] if len(shown) == 1 else got[1])
    elif done.stdout.startswith("{"):
        assert "error" not in json.loads(done.stdout), done.stdout


def _json(line: str) -> Any:
    """A line's JSON, with or without what server-sent events put ahead of it; None for none."""
    text = line.removeprefix("data: ")
    return json.loads(text.replace("{…}", "{}")) if text.startswith("{") else None


def _names(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(_names, value))
    return set(value).union(*map(_names, value.values())) if isinstance(value, dict) else set()


def _docker(words: list[str], output: str, url: str) -> None:
    """The files that are named are there; tests/test_deploy.py looks into them."""
    del output, url
    files = [after for word, after in itertools.pairwise(words) if word == "-f"]
    assert files or words[1] == "run"
    assert all((REPOSITORY / file).is_file() for file in files)


def _npx(words: list[str], output: str, url: str) -> None:
    """It needs a registry of packages; what it reads from the server is there."""
    del output
    [source] = [word for word in words if SERVER.match(word)]
    _curl(["curl", "-sf", source], "", url)


def _git(words: list[str], output: str, url: str) -> None:
    del output, url
    assert words[1] in ("clone", "worktree"), words


def _ray(words: list[str], output: str, url: str) -> None:
    """Another project's command."""
    del output, url
    assert words[1] == "start", words


def _smg(words: list[str], output: str, url: str) -> None:
    """Another project's command."""
    del output, url
    assert words[1] == "launch", words


COMMANDS = {
    "sgl": _sgl,
    ".venv/bin/sgl": _sgl,
    "python": _python,
    "pip": _pip,
    "make": _make,
    "curl": _curl,
    "docker": _docker,
    "git": _git,
    "npx": _npx,
    "ray": _ray,
    "smg": _smg,
}
VARIABLES = {
    f"SGL_{field.name.upper()}" for cls in (EngineConfig, ServerConfig) for field in dataclasses.fields(cls)
}
VARIABLES |= set(re.findall(r"\$\{(\w+)", (REPOSITORY / "docker" / "compose.yaml").read_text()))
VARIABLES |= {"CUDA_VISIBLE_DEVICES"}  # of CUDA


def documents(text: str) -> list[Any]:
    """The JSON documents that a block holds, one after another."""
    found, rest = [], text.strip()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        found.append(value)
        rest = rest[end:].strip()
    return found


def options_file(text: str) -> dict[str, Any]:
    """A YAML block: names and values of options."""
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded
