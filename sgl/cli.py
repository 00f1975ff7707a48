"""The `sgl` command. Flags are the fields of the two configs: a flag, its default and its meaning exist once."""

from __future__ import annotations

import argparse
import ast
import asyncio
import dataclasses
import functools
import inspect
import json
import logging
import runpy
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from sgl.errors import BackendError, ConfigError, SglError, nearest_name
from sgl.runtime.config import Config, EngineConfig, ServerConfig, parse_options

CONFIGS: tuple[Config, ...] = (EngineConfig, ServerConfig)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 when it is done, 1 when it failed, 2 when it was called wrongly."""
    parser = _Parser(prog="sgl", description="A structured-generation language and the runtime that serves it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP: native API, OpenAI API, programs",
        description="Serve a model over HTTP. Every option may also come from a YAML file (--config) or from an "
        "SGL_<NAME> variable; flags win over the file, and the file over variables.",
    )
    _add_options(serve)
    serve.set_defaults(run=_serve)
    _add_bench(commands)
    _add_run(commands)
    _add_trace(commands)
    _add_chat(commands)
    options = parser.parse_args(arguments)
    try:
        sys.exit(options.run(options))
    except SglError as error:
        print(f"sgl: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


class _Parser(argparse.ArgumentParser):
    """Refuses unknown flags with the nearest known one, and takes no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        known = [flag for action in self._actions for flag in action.option_strings]
        for argument in unknown:
            if argument.startswith("-") and known:
                flag = argument.partition("=")[0]
                self.error(f"unknown option {flag}{nearest_name(flag, known)}")
        return parsed, unknown


# ── options ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _add_options(parser: argparse.ArgumentParser, classes: tuple[Config, ...] = CONFIGS) -> None:
    """A flag for each field of the configs."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a Hugging Face folder or hub id")
    parser.add_argument("--config", metavar="FILE", help="a YAML file of options, named as the flags")
    for cls in classes:
        group = parser.add_argument_group(f"options of the {cls.__name__.removesuffix('Config').lower()}")
        docs, hints = option_docs(cls), get_type_hints(cls)  # type: ignore[arg-type]  # classes are hashable
        for field in dataclasses.fields(cls):
            flag = "--" + field.name.replace("_", "-")
            text = docs.get(field.name, "").replace("%", "%%")
            if hints[field.name] in (bool, bool | None):
                group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
            else:
                default = "" if field.default in (None, dataclasses.MISSING) else f" [{field.default}]"
                group.add_argument(flag, metavar=field.name.split("_")[-1].upper(), help=text + default)


@functools.cache
def option_docs(cls: type) -> dict[str, str]:
    """What each option means: the texts below the fields."""
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


def configs(options: argparse.Namespace, classes: tuple[Config, ...] = CONFIGS) -> list[Any]:
    """The configs that flags, file and variables amount to. Raises ConfigError."""
    given = {} if options.config is None else _from_file(Path(options.config))
    for cls in classes:
        for field in dataclasses.fields(cls):
            value = getattr(options, field.name)
            if isinstance(value, str):
                given |= parse_options(cls, {field.name: value})
            elif value is not None:
                given[field.name] = value
    if options.model is not None:
        given["model_path"] = options.model
    known = [{field.name for field in dataclasses.fields(cls)} for cls in classes]
    for name in given:
        if not any(name in names for names in known):
            raise ConfigError(f"unknown option {name!r}{nearest_name(name, set().union(*known))}", option=name)
    return [
        cls.from_options({name: value for name, value in given.items() if name in names})
        for cls, names in zip(classes, known, strict=True)
    ]


def _from_file(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]  # its stubs are not among what is installed

    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the options in {path} cannot be read: {error}", option="config") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold names and values of options", option="config")
    return {str(name).replace("-", "_"): value for name, value in data.items()}


# ── serve ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _serve(options: argparse.Namespace) -> int:
    engine, server = configs(options)
    configure_logging(server.log_level, server.log_format)
    asyncio.run(_serve_until_stopped(engine, server))
    return 0


async def _serve_until_stopped(engine_config: EngineConfig, config: ServerConfig) -> None:
    from sgl.runtime.server.handle import EngineHandle
    from sgl.runtime.server.process import EngineProcess
    from sgl.runtime.server.serve import listen, serve
    from sgl.runtime.server.service import Service

    began = time.monotonic()
    template = _chat_template(config)
    bound = listen(config.host, config.port)
    engine: EngineHandle
    if config.in_process:
        from sgl.runtime.engine import Engine
        from sgl.runtime.server.local import LocalEngine

        engine = LocalEngine(await asyncio.to_thread(Engine, **dataclasses.asdict(engine_config)))
    else:
        configure = partial(configure_logging, config.log_level, config.log_format)
        engine = EngineProcess(engine_config, configure=configure, watchdog_timeout=config.watchdog_timeout)
        await engine.start()
    service = Service(config, engine, chat_template=template)

    def on_ready(url: str) -> None:
        print(f"sgl serves {service.model_name} at {url} (ready in {time.monotonic() - began:.1f} s)", flush=True)

    await serve(service, bound, on_ready)


def _chat_template(config: ServerConfig) -> str | None:
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template cannot be read: {error}", option="chat_template") from error


# ── bench ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _add_bench(commands: Any) -> None:
    from sgl.bench import command

    bench = commands.add_parser("bench", help="measure a server, or the engine alone")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=_Parser)
    for kind, text in command.KINDS.items():
        parser = kinds.add_parser(kind, help=text, description=text)
        if kind == "serving":
            command.add_load(parser)
        else:
            _add_options(parser, (EngineConfig,))
        command.add_dataset(parser)
        parser.add_argument("--json", action="store_true", help="print the report as JSON")
        parser.add_argument("--output", metavar="FILE", help="write the report as JSON to a file as well")
        parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    from sgl.bench import command

    def progress(num_done: int, num_all: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{num_done}/{num_all} ", end="\n" * (num_done == num_all), file=sys.stderr, flush=True)

    if options.kind == "serving":
        report = command.serving_report(options, progress)
    else:
        report = command.engine_report(options, dataclasses.asdict(configs(options, (EngineConfig,))[0]))
    _show(report, options)
    return 1 if report.get("failed") else 0


def _show(report: dict[str, Any], options: argparse.Namespace) -> None:
    """A report as a table, or as JSON."""
    text = json.dumps(report, indent=2)
    if options.output is not None:
        Path(options.output).write_text(text + "\n")
    if options.json:
        print(text)
        return
    for name, value in report.items():
        if isinstance(value, dict):
            value = "   ".join(f"{inner} {number:.2f}" for inner, number in value.items())
        elif isinstance(value, list):
            value = "; ".join(map(str, value))
        elif isinstance(value, float):
            value = f"{value:.3f}"
        print(f"{name.replace('_', ' '):32}{value}")


# ── run, trace, chat ────────────────────────────────────────────────────────────────────────────────────────────────


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="run a Python file whose programs go to a server or an engine")
    run.add_argument("file", help="the program")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    run.add_argument("--url", help="a server; with --model instead: an engine in this process")
    run.add_argument("--model", help="a Hugging Face folder or hub id")
    run.add_argument("--api-key", help="of the server")
    run.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from sgl.lang.backends.server import RuntimeEndpoint
    from sgl.runtime.engine import Engine

    if options.url is not None and options.model is not None:
        raise ConfigError("give either --url or --model", option="url")
    if options.url is not None:
        _execute(options, RuntimeEndpoint(options.url, api_key=options.api_key))
    else:
        _execute(options, Engine(model_path=options.model))
    return 0


def _execute(options: argparse.Namespace, backend: Any) -> None:
    """Run the file as a script whose programs go to the backend."""
    from sgl.lang.api import set_default_backend

    set_default_backend(backend)
    sys.argv = [options.file, *options.arguments]
    sys.path.insert(0, str(Path(options.file).resolve().parent))
    try:
        runpy.run_path(options.file, run_name="__main__")
    except OSError as error:
        raise ConfigError(f"{options.file} cannot be run: {error}", option="file") from error
    finally:
        backend.shutdown()


def _add_trace(commands: Any) -> None:
    trace = commands.add_parser("trace", help="run a Python file on a server and write its programs' timelines")
    trace.add_argument("file", help="the program")
    trace.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    trace.add_argument("--url", default="http://127.0.0.1:30000", help="where the server is [%(default)s]")
    trace.add_argument("--api-key", help="of the server")
    trace.add_argument("--output", default="trace.html", metavar="FILE", help="the page to write [%(default)s]")
    trace.set_defaults(run=_trace)


def _trace(options: argparse.Namespace) -> int:
    from sgl.lang.backends.server import RuntimeEndpoint

    def get(path: str) -> Any:
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        answer = requests.get(options.url.rstrip("/") + path, headers=headers, timeout=60)
        if answer.status_code != 200:
            raise BackendError(f"{path} failed: {answer.text}", status=answer.status_code)
        return answer.json()

    import requests

    backend = RuntimeEndpoint(options.url, api_key=options.api_key)
    before = {program["id"] for program in get("/v1/programs")}
    _execute(options, backend)
    ids = [program["id"] for program in get("/v1/programs") if program["id"] not in before]
    timelines = json.dumps([_ended(partial(get, f"/v1/programs/{id}/timeline")) for id in ids])
    timelines = timelines.replace("</", "<\\/")
    page = resources.files("sgl.runtime.server").joinpath("page.html").read_text(encoding="utf-8")
    Path(options.output).write_text(page.replace(">null</script>", f">{timelines}</script>"), encoding="utf-8")
    print(f"{len(ids)} programs in {options.output}")
    return 0


def _ended(timeline: Callable[[], dict[str, Any]], patience: float = 5.0) -> dict[str, Any]:
    """A program's timeline with its end, which comes a moment after its last value; without, past `patience` seconds,
    where the program is left waiting for its client."""
    until = time.monotonic() + patience
    while True:
        found = timeline()
        if any(event["type"] == "done" for event in found["events"]) or time.monotonic() > until:
            return found
        time.sleep(0.02)


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser("chat", help="talk with a model that is served")
    chat.add_argument("--url", default="http://127.0.0.1:30000", help="where the server is [%(default)s]")
    chat.add_argument("--api-key", help="of the server")
    chat.add_argument("--system", help="the system prompt")
    chat.add_argument("--max-tokens", type=int, default=1024, help="of an answer [%(default)s]")
    chat.add_argument("--temperature", type=float, default=0.7, help="[%(default)s]")
    chat.set_defaults(run=_chat)


def _chat(options: argparse.Namespace) -> int:
    """Lines in, answers out as they are written; an empty line or the end of the input leaves."""
    import requests

    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    messages = [{"role": "system", "content": options.system}] if options.system else []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if not line:
            return 0
        messages.append({"role": "user", "content": line})
        body = {"messages": messages, "max_tokens": options.max_tokens, "temperature": options.temperature}
        written = ""
        try:
            url = options.url.rstrip("/") + "/v1/chat/completions"
            answer = requests.post(url, json={**body, "stream": True}, headers=headers, stream=True, timeout=600)
            for event in answer.iter_lines():
                if answer.status_code != 200:
                    raise BackendError(f"the server refused: {event.decode()}", status=answer.status_code)
                if event.startswith(b"data: {"):
                    delta = json.loads(event[6:])["choices"][0]["delta"].get("content") or ""
                    written += delta
                    print(delta, end="", flush=True)
        except requests.RequestException as error:
            raise BackendError(f"{options.url} cannot be reached: {error}", retryable=True) from error
        print()
        messages.append({"role": "assistant", "content": written})


# ── logging ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def configure_logging(level: str, style: str) -> None:
    """Log to standard error, as text or as one JSON object a line."""
    handler = logging.StreamHandler()
    if style == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("sgl").setLevel(level.upper())
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a traceback for each request that is not HTTP


class _JsonFormatter(logging.Formatter):
    """`fields`, where a record has them, stand beside time, level and message."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        line = {"time": record.created, "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


if __name__ == "__main__":
    main()
