"""The `sgl` command. Flags are the fields of the two configs: a flag, its default and its meaning exist once."""

from __future__ import annotations

import argparse
import ast
import asyncio
import dataclasses
import inspect
import json
import logging
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from sgl.errors import ConfigError, SglError, nearest_name
from sgl.runtime.config import EngineConfig, ServerConfig, parse_options

CONFIGS = (EngineConfig, ServerConfig)


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


def _add_options(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of the configs."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a Hugging Face folder or hub id")
    parser.add_argument("--config", metavar="FILE", help="a YAML file of options, named as the flags")
    for cls, title in zip(CONFIGS, ("engine", "server"), strict=True):
        group = parser.add_argument_group(f"options of the {title}")
        docs, hints = option_docs(cls), get_type_hints(cls)
        for field in dataclasses.fields(cls):
            flag = "--" + field.name.replace("_", "-")
            text = docs.get(field.name, "").replace("%", "%%")
            if hints[field.name] in (bool, bool | None):
                group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
            else:
                default = "" if field.default in (None, dataclasses.MISSING) else f" [{field.default}]"
                group.add_argument(flag, metavar=field.name.split("_")[-1].upper(), help=text + default)


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


def configs(options: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """The configs that flags, file and variables amount to. Raises ConfigError."""
    given = {} if options.config is None else _from_file(Path(options.config))
    for cls in CONFIGS:
        for field in dataclasses.fields(cls):
            value = getattr(options, field.name)
            if isinstance(value, str):
                given |= parse_options(cls, {field.name: value})
            elif value is not None:
                given[field.name] = value
    if options.model is not None:
        given["model_path"] = options.model
    known = [{field.name for field in dataclasses.fields(cls)} for cls in CONFIGS]
    for name in given:
        if not any(name in names for names in known):
            raise ConfigError(f"unknown option {name!r}{nearest_name(name, set().union(*known))}", option=name)
    engine, server = ({name: value for name, value in given.items() if name in names} for names in known)
    return EngineConfig.from_options(engine), ServerConfig.from_options(server)


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
    from sgl.runtime.engine import Engine
    from sgl.runtime.server.handle import EngineHandle, LocalEngine
    from sgl.runtime.server.process import EngineProcess
    from sgl.runtime.server.serve import listen, serve
    from sgl.runtime.server.service import Service

    began = time.monotonic()
    template = _chat_template(config)
    bound = listen(config.host, config.port)
    engine: EngineHandle
    if config.in_process:
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
