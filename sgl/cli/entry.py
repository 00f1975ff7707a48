"""`sgl COMMAND`: the commands and their flags. What a command does, and what that needs, is imported when it runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from sgl.bench.datasets import Source
from sgl.bench.load import URL, Load
from sgl.cli.options import add_fields, add_options
from sgl.cli.title import hide
from sgl.errors import ConfigError, SglError, nearest_name
from sgl.runtime.config import EngineConfig, ServerConfig

_BENCHES = {
    "serving": "load a server over HTTP: latencies, throughput, goodput",
    "offline": "throughput of the engine on one large batch",
    "latency": "milliseconds of a small batch's prompts and tokens",
}


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 when it is done, 1 when it failed, 2 when it was called wrongly."""
    options = _parser().parse_args(arguments)
    if arguments is None:
        keys = [getattr(options, name, None) or () for name in ("api_key", "admin_api_key")]
        hide(key for given in keys for key in ([given] if isinstance(given, str) else given))
    module, name = options.does
    try:
        command: Callable[[argparse.Namespace], int] = getattr(importlib.import_module(module), name)
        sys.exit(command(options))
    except SglError as error:
        sys.stderr.write(f"sgl: {error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="sgl",
        usage="sgl COMMAND [OPTIONS]",
        description="A structured-generation language and the runtime that serves it.",
        epilog="`sgl COMMAND --help` explains a command. Every command runs on the small embedded model where no "
        "other is named.",
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", prog=parser.prog
    )
    _add_serve(commands)
    _add_run(commands)
    _add_trace(commands)
    _add_chat(commands)
    _add_bench(commands)
    return parser


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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            there_are = ", ".join(map(str, action.choices))
            hint = nearest_name(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"there is no {value!r}{hint}; there are {there_are}")


def _add(commands: Any, name: str, does: str, summary: str, *, usage: str, more: str = "") -> Any:
    description = f"{summary[0].upper()}{summary[1:]}.{more and ' ' + more}"
    parser = commands.add_parser(name, help=summary, description=description, usage=usage)
    module, _, function = does.partition(":")
    parser.set_defaults(does=(f"sgl.cli.{module}", function))
    return parser


def _add_serve(commands: Any) -> None:
    serve = _add(
        commands,
        "serve",
        "serve:serve",
        "serve a model over HTTP: native API, OpenAI API, programs",
        usage="sgl serve [MODEL] [OPTIONS]",
        more="Every option may also come from a YAML file (--config) or from an SGL_<NAME> variable; flags win "
        "over the file, and the file over variables.",
    )
    add_options(serve, (ServerConfig, EngineConfig))


def _add_run(commands: Any) -> None:
    run = _add(
        commands,
        "run",
        "programs:run",
        "run a Python file whose programs go to a server or an engine",
        usage="sgl run [--url URL | --model MODEL] FILE [ARGUMENTS]",
        more="What follows FILE is the file's own.",
    )
    _add_target(run)


def _add_trace(commands: Any) -> None:
    trace = _add(
        commands,
        "trace",
        "programs:trace",
        "run a Python file and write its programs' timelines as an HTML page",
        usage="sgl trace [--url URL | --model MODEL] [--output PAGE] FILE [ARGUMENTS]",
        more="What follows FILE is the file's own.",
    )
    trace.add_argument("--output", default="trace.html", metavar="PAGE", help="where to write it [%(default)s]")
    _add_target(trace)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--api-key", metavar="KEY", help="of that server")
    text = "instead: an engine of its own, on a Hugging Face folder or hub id [the embedded model]"
    parser.add_argument("--model", help=text)
    parser.add_argument("file", metavar="FILE", help="a Python file")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="its own arguments")
    rest.required = False  # argparse says that the rest is missing where FILE is


def _add_chat(commands: Any) -> None:
    usage = "sgl chat [OPTIONS]"
    chat = _add(commands, "chat", "chat:chat", "talk with a model that is served", usage=usage)
    chat.add_argument("--url", default=URL, help="where the server is [%(default)s]")
    chat.add_argument("--api-key", metavar="KEY", help="of the server")
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    text = "of an answer [what the context holds]"
    chat.add_argument("--max-tokens", type=int, metavar="N", help=text)
    chat.add_argument("--temperature", type=float, default=0.7, metavar="T", help="[%(default)s]")


def _add_bench(commands: Any) -> None:
    text = "measure a server, or the engine alone"
    bench = commands.add_parser("bench", help=text, description=f"{text[0].upper()}{text[1:]}.")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND", title="kinds", prog=bench.prog)
    for kind, summary in _BENCHES.items():
        usage = f"sgl bench {kind} [{'' if kind == 'serving' else 'MODEL] ['}OPTIONS]"
        parser = _add(kinds, kind, "bench:bench", summary, usage=usage)
        group = parser.add_argument_group("the report")
        group.add_argument("--json", action="store_true", help="print it as JSON")
        group.add_argument("--output", metavar="FILE", help="write it as JSON to a file as well")
        if kind == "serving":
            text = "draw it as well, as .html, .png, .svg or .pdf; needs sgl[plot]"
            group.add_argument("--plot", metavar="FILE", help=text)
            add_fields(parser, Load, "the load")
            text = "a bound in milliseconds on ttft, tpot or e2e, for the goodput; may be repeated"
            parser.add_argument("--slo", action="append", default=[], metavar="NAME=MS", help=text)
        add_fields(parser, Source, "what is sent")
        if kind != "serving":
            add_options(parser, (EngineConfig,))
