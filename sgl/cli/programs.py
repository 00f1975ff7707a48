"""`sgl run` and `sgl trace`: a Python file whose programs go to a server, or to an engine of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from sgl.cli.options import check_output
from sgl.errors import ConfigError
from sgl.lang.api import set_default_backend
from sgl.lang.backends.launch import Runtime
from sgl.lang.backends.server import RuntimeEndpoint


def run(options: argparse.Namespace) -> int:
    """Run the file."""
    _check(options)
    if options.url is not None:
        _execute(options, RuntimeEndpoint(options.url, api_key=options.api_key))
        return 0
    from sgl.runtime.engine import Engine

    _execute(options, Engine(model_path=options.model))
    return 0


def trace(options: argparse.Namespace) -> int:
    """Run the file and write the timelines of the programs that it ran."""
    _check(options)
    check_output(options.output)
    with contextlib.nullcontext(options.url) if options.url is not None else _own_server(options.model) as url:
        backend = RuntimeEndpoint(url, api_key=options.api_key)
        before = {program["id"] for program in backend.request("/v1/programs")}
        try:
            _execute(options, backend)
        finally:  # also of a program that failed: that is when it is looked at
            ids = [program["id"] for program in backend.request("/v1/programs") if program["id"] not in before]
            timelines = [_ended(backend, id) for id in ids]
            _write(Path(options.output), timelines)
            text = f"{len(ids)} program{'' if len(ids) == 1 else 's'} in {options.output}"
            Console(soft_wrap=True, highlight=False, stderr=True).print(text, markup=False)
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.url is not None and options.model is not None:
        raise ConfigError("give either --url or --model", option="url")
    if not Path(options.file).is_file():
        raise ConfigError(f"there is no file {options.file} to run", option="file")


def _execute(options: argparse.Namespace, backend: Any) -> None:
    """Run the file as a script whose programs go to the backend."""
    set_default_backend(backend)
    sys.argv = [options.file, *options.arguments]
    sys.path.insert(0, str(Path(options.file).resolve().parent))
    try:
        runpy.run_path(options.file, run_name="__main__")
    finally:
        backend.shutdown()


@contextlib.contextmanager
def _own_server(model: str | None) -> Iterator[str]:
    """The URL of a server that lasts as long as the context."""
    runtime = Runtime(model_path=model)
    try:
        yield runtime.url
    finally:
        runtime.shutdown()


def _ended(backend: RuntimeEndpoint, program_id: str, patience: float = 5.0) -> dict[str, Any]:
    """A program's timeline with its end, which comes a moment after its last value; without, past `patience` seconds,
    where the program is left waiting for its client."""
    until = time.monotonic() + patience
    while True:
        found: dict[str, Any] = backend.request(f"/v1/programs/{program_id}/timeline")
        if any(event["type"] == "done" for event in found["events"]) or time.monotonic() > until:
            return found
        time.sleep(0.02)


def _write(path: Path, timelines: list[dict[str, Any]]) -> None:
    """The server's page with these timelines in it and no server behind it."""
    text = json.dumps(timelines).replace("</", "<\\/")
    page = resources.files("sgl.runtime.server").joinpath("page.html").read_text(encoding="utf-8")
    path.write_text(page.replace(">null</script>", f">{text}</script>"), encoding="utf-8")
