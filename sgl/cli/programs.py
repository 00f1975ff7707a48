"""`sgl run` and `sgl trace`: a file's programs on a server or an engine of their own."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from sgl.cli import replay
from sgl.cli.options import check_output
from sgl.cli.saved import Saved
from sgl.errors import ConfigError, InvalidRequest, ProgramError, needs_extra
from sgl.lang.backends.base import Backend, Session
from sgl.lang.backends.launch import Runtime
from sgl.lang.backends.server import RuntimeEndpoint
from sgl.lang.config import backend_of, fallback_model, set_default_backend
from sgl.lang.ir import nodes as ir
from sgl.lang.view.html import trace_page


def run(options: SimpleNamespace) -> int:
    """Run the file; without --url and --model, on its own backend. Or record it, or replay what was recorded."""
    if options.replay or options.record is not None:
        return _record_or_replay(options)
    _check(options)
    if options.url is None and options.model is None:
        _execute(options)
        return 0
    backend: Backend
    if options.url is not None:
        backend = RuntimeEndpoint(options.url, api_key=options.api_key)
    else:
        with needs_extra("engine", "--model", option="model"):
            from sgl.runtime.engine import Engine

        backend = backend_of(Engine(model_path=options.model))
    programs = _Counted(backend)
    _execute(options, backend)
    if not programs.number:
        _say(f"sgl: {_elsewhere(options, backend)}")
    return 0


def _record_or_replay(options: SimpleNamespace) -> int:
    """On an engine of its own: its weights decide what comes out."""
    if options.url is not None or (options.replay and options.record is not None):
        raise ConfigError("--record and --replay are for an engine of their own, and not for both", option="record")
    given: Any = {}
    if options.replay:
        if replay.read(options.file)["options"].get("deterministic"):
            given["deterministic"] = True
    else:
        _check(options)
        check_output(options.record)
    with needs_extra("engine", "--record and --replay", option="record"):
        from sgl.runtime.engine import Engine

    engine = Engine(options.model or fallback_model(), **given)
    backend = backend_of(engine)
    if options.replay:
        try:
            replay.replay(options.file, engine, backend, _say)
        finally:
            engine.shutdown()
        return 0
    recorder = replay.Recorder(backend, engine)
    try:
        _execute(options, backend)
    finally:
        number = recorder.write(options.record)
    _say(f"{number} programs in {options.record}" if number else f"sgl: {_elsewhere(options, backend)}")
    return 0


def trace(options: SimpleNamespace) -> int:
    """Run the file and write its programs' timelines. Raises ProgramError if none ran."""
    _check(options)
    check_output(options.output)
    with contextlib.nullcontext(options.url) if options.url is not None else _own_server(options.model) as url:
        backend = _Traced(url, api_key=options.api_key)
        if not backend.model_info.get("programs"):
            raise ConfigError(
                f"{url} executes no programs, so it knows no timelines: is it `sgl serve`?", option="url"
            )
        programs = _Counted(backend)
        try:
            _execute(options, backend)
        except SystemExit as error:
            if error.code:  # the file reports its own errors
                raise
        finally:  # failed programs are the ones to look at
            if backend.ids:
                _write_page(Path(options.output), backend)
        if not backend.ids:
            why = _ONE_BY_ONE if programs.number else _elsewhere(options, backend)
            raise ProgramError(f"there is nothing to trace: {why}")
    return 0


class _Traced(RuntimeEndpoint):
    """A server that remembers the programs sent to it."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        super().__init__(url, api_key=api_key)
        self.ids: list[str] = []

    def opened(self, program_id: str) -> None:
        self.ids.append(program_id)


class _Counted:
    """Count a backend's programs from now on."""

    def __init__(self, backend: Backend) -> None:
        self.number = 0
        self._open = backend.open
        backend.open = self._opened  # type: ignore[method-assign]  # of this one object

    def _opened(self, program: ir.Program, sink: ir.Sink) -> Session:
        self.number += 1
        return self._open(program, sink)


_ONE_BY_ONE = (
    "the server got the file's programs as single calls, because it does not know their chat template; "
    "`sgl serve --chat-template` gives it one"
)


def _elsewhere(options: SimpleNamespace, backend: Backend) -> str:
    where = options.url or f"the model {options.model or backend.model_name}"
    return (
        f"no program of {options.file} went to {where}. Either it runs none, or they name a backend of their own: "
        "leave out its backend=… and set_default_backend(…), so that they take the default one"
    )


def _say(text: str) -> None:
    Console(soft_wrap=True, highlight=False, stderr=True).print(text, markup=False)


def _check(options: SimpleNamespace) -> None:
    if options.url is not None and options.model is not None:
        raise ConfigError("give either --url or --model", option="url")
    if not Path(options.file).is_file():
        raise ConfigError(f"there is no file {options.file} to run", option="file")
    is_saved = Path(options.file).suffix == ".json"
    options.saved = Saved.read(options.file, list(options.arguments)) if is_saved else None


def _execute(options: SimpleNamespace, backend: Backend | None = None) -> None:
    """Run the file, as a script or a saved program, on the backend, and shut that down."""
    set_default_backend(backend)
    try:
        if options.saved is not None:
            options.saved.run()
            return
        sys.argv = [options.file, *options.arguments]
        sys.path.insert(0, str(Path(options.file).resolve().parent))
        runpy.run_path(options.file, run_name="__main__")
    finally:
        if backend is not None:
            backend.shutdown()


@contextlib.contextmanager
def _own_server(model: str | None) -> Iterator[str]:
    """A server's URL within the context."""
    runtime = Runtime(model_path=model or fallback_model())
    try:
        yield runtime.url
    finally:
        runtime.shutdown()


def _write_page(path: Path, backend: _Traced) -> None:
    """Write what the server still knows of the programs."""
    timelines = [timeline for id in backend.ids if (timeline := _ended(backend, id)) is not None]
    _write(path, timelines)
    ran, kept = len(backend.ids), len(timelines)
    what = f"{ran} program{'' if ran == 1 else 's'}" if kept == ran else f"the last {kept} of {ran} programs"
    _say(f"{what} in {path}")


def _ended(backend: RuntimeEndpoint, program_id: str, patience: float = 5.0) -> dict[str, Any] | None:
    """A program's timeline; after `patience` seconds even without its end. None if the server dropped it."""
    until = time.monotonic() + patience
    while True:
        try:
            found: dict[str, Any] = backend.request(f"/v1/programs/{program_id}/timeline")
        except InvalidRequest:
            return None
        if any(event["type"] == "done" for event in found["events"]) or time.monotonic() > until:
            return found
        time.sleep(0.02)


def _write(path: Path, timelines: list[dict[str, Any]]) -> None:
    """A page with these timelines, and their data."""
    text = json.dumps(timelines).replace("</", "<\\/")
    path.write_text(trace_page(timelines, text), encoding="utf-8")
