"""`sgl COMMAND`: commands and their parameters; code is imported when a command runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import rich_click as click

from sgl.cli.exits import exit_code, failed
from sgl.cli.options import Option, field_options, spread
from sgl.cli.title import hide
from sgl.errors import nearest_name, needs_extra

Parameters = list[click.Parameter]


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 failed, 2 called wrongly."""
    sys.exit(exit_code(lambda: _called(arguments)))


def _called(arguments: list[str] | None) -> int:
    try:
        options = parsed(arguments)
    except click.UsageError as error:
        path = "sgl" if error.ctx is None else error.ctx.command_path
        return failed(f"{path}: {_explained(error)} (see {path} --help)", 2)
    except click.Abort:
        return 130
    if isinstance(options, int):  # of --help and --version
        return options
    if arguments is None:
        keys = [getattr(options, name, None) or () for name in ("api_key", "admin_api_key")]
        hide(key for given in keys for key in ([given] if isinstance(given, str) else given))
    module, _, function = options.does.partition(":")
    with needs_extra("engine", f"sgl {options.kind}"):
        home = importlib.import_module(f"sgl.cli.{module}")
    command: Callable[[SimpleNamespace], int] = getattr(home, function)
    return command(options)


def parsed(arguments: list[str] | None) -> Any:
    """The command that a command line names, and its parameters. Raises click's UsageError."""
    return _sgl().main(arguments, prog_name="sgl", standalone_mode=False)


def _explained(error: click.UsageError) -> str:
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"one thing more is required: {error.param.human_readable_name}"
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        options = error.ctx.command.get_params(error.ctx)
        known = [name for option in options for name in option.opts + option.secondary_opts]
        return f"unknown option {error.option_name}{nearest_name(error.option_name, known)}"
    return error.format_message().rstrip(".")


class _Group(click.RichGroup):
    """Lists commands in order; suggests the nearest for unknown ones."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in self.commands and not ctx.resilient_parsing:
            hint = nearest_name(args[0], self.commands)
            raise click.UsageError(f"there is no {args[0]!r}{hint}; there are {', '.join(self.commands)}", ctx)
        return super().resolve_command(ctx, args)


class _Command(click.RichCommand):
    """Its value: the parameters, and where `does` is. Makes options on demand, so that `sgl --help` reads no
    configuration."""

    def __init__(self, name: str, does: str, help: str, options: Callable[[], Parameters], **more: Any) -> None:
        panels = click.RichOptionPanel("Arguments"), click.RichOptionPanel("Options")
        super().__init__(name, help=help, panels=[*panels], **more)
        self._does, self._options = does, options

    def get_params(self, ctx: click.Context) -> Parameters:
        self.params = self.params or self._options()
        return super().get_params(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, spread(args))
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # some have none
            raise

    def invoke(self, ctx: click.Context) -> SimpleNamespace:
        return SimpleNamespace(does=self._does, kind=ctx.info_name, **ctx.params)


def _sgl() -> _Group:
    style = {"theme": "default-slim", "text_markup": None}
    the_rest_is_the_files = {"allow_interspersed_args": False}
    serving = "Load a server over HTTP: latencies, throughput, goodput."
    benches = [
        _Command("serving", "bench:bench", serving, _bench_serving),
        _Command("offline", "bench:bench", "Throughput of the engine on one large batch.", _bench_engine),
        _Command("latency", "bench:bench", "Milliseconds of a small batch's prompts and tokens.", _bench_engine),
    ]
    of_a_cluster = [
        _Command("up", "cluster:up", _CLUSTER_UP, _cluster_file),
        _Command(
            "status", "cluster:status", "Show a cluster's replicas, their processes and load.", _cluster_status
        ),
        _Command("scale", "cluster:scale", "Have N replicas; those that go finish what runs.", _cluster_scale),
        _Command("update", "cluster:update", _CLUSTER_UPDATE, _cluster_update),
        _Command("down", "cluster:down", "End a cluster, once what runs is finished.", _cluster_port),
    ]
    commands = [
        _Command("serve", "serve:serve", _SERVE, _serve),
        _Command("run", "programs:run", _RUN, _run, context_settings=the_rest_is_the_files),
        _Command("trace", "programs:trace", _TRACE, _trace, context_settings=the_rest_is_the_files),
        _Command("chat", "chat:chat", "Talk with a model that is served.", _chat),
        _Command("gateway", "gateway:gateway", _GATEWAY, _gateway),
        _Group(name="bench", commands=benches, help="Measure a server, or the engine alone."),
        _Group(name="cluster", commands=of_a_cluster, help="Replicas of a server on one or several hosts."),
    ]
    sgl = _Group(
        name="sgl",
        commands=commands,
        help="A structured-generation language and the runtime that serves it.",
        epilog=_EPILOG,
        context_settings={"help_option_names": ["-h", "--help"], "rich_help_config": style},
    )
    return click.version_option(package_name="sgl", message="%(prog)s %(version)s")(sgl)


_SERVE = """Serve a model over HTTP: native API, OpenAI API, programs.

Every option may also come from a YAML file (--config) or from an SGL_<NAME> variable; flags win over the file, and the
file over variables."""
_GATEWAY = """Serve at one address what several servers serve.

Each request goes to the server that would be done with it first. What fails before its first byte is tried again."""
_CLUSTER_UP = """Run replicas of a server behind one address, as a YAML FILE says.

Stays until Ctrl-C or `sgl cluster down`. FILE holds options of `sgl serve`, and how many replicas."""
_CLUSTER_UPDATE = """Replace a cluster's replicas by ones with FILE's options.

One after the other, and each finishes what runs."""
_RUN = """Run a Python file whose programs go to a server or an engine, or a saved program.

What follows a Python FILE is the file's own. A saved program (FILE.json, of f.compile().save) takes its arguments as
--arg NAME=TEXT and prints its text, or with --json its variables."""
_TRACE = """Run a Python file or a saved program and write the timelines of what ran as an HTML page.

What follows FILE is as for sgl run."""
_EPILOG = """Every command runs on the small embedded model where no other is named.

To complete commands and options in bash: eval "$(_SGL_COMPLETE=bash_source sgl)"

In other shells: zsh_source, fish_source."""


def _serve() -> Parameters:
    from sgl.runtime.config import ServerConfig

    groups = {
        "host": "Where the server listens",
        "api_key": "Who may call it",
        "max_request_bytes": "What it reads and how long it waits",
        "served_model_name": "What it answers",
        "otlp_endpoint": "Traces and logs",
    }
    return [*_model(), *field_options(ServerConfig, groups), *_engine()]


def _gateway() -> Parameters:
    from sgl.runtime.gateway.config import GatewayConfig

    groups = {"routing_policy": "Who gets a request", "retries": "Failures", "max_in_flight": "Limits"}
    groups["breaker_failures"] = "Broken workers"
    worker = "A server's address; once for each. None: they are added at /workers, with --admin-api-key."
    key = "Of what changes the workers at /workers. [default: nobody may]"
    return [
        Option(["--worker"], multiple=True, metavar="URL", help=worker),
        Option(["--host"], default="127.0.0.1", help="Address to listen on.", show_default=True),
        Option(["--port"], type=int, default=30000, help="Port; 0: any free one.", show_default=True),
        Option(["--admin-api-key"], metavar="KEY", help=key),
        *field_options(GatewayConfig, groups),
    ]


def _cluster_file() -> Parameters:
    return [click.RichArgument(["file"], type=click.Path(), help="Options by name, such as replicas: 2.")]


def _cluster_port() -> Parameters:
    return [Option(["--port"], type=int, metavar="PORT", help="Of the cluster, where several run here.")]


def _cluster_status() -> Parameters:
    return [*_cluster_port(), Option(["--json"], is_flag=True, help="Print it as JSON.")]


def _cluster_scale() -> Parameters:
    number = click.RichArgument(["replicas"], type=int, metavar="N", help="How many.")
    return [*_cluster_port(), Option(["--prefill"], is_flag=True, help="Of those that compute prompts."), number]


def _cluster_update() -> Parameters:
    return [*_cluster_port(), *_cluster_file()]


def _model() -> Parameters:
    model = "A Hugging Face folder, hub id or GGUF file. [default: the embedded model]"
    return [
        click.RichArgument(["model"], required=False, type=click.Path(), help=model),
        Option(["--config"], type=click.Path(), metavar="FILE", help="A YAML file of options, named as the flags."),
    ]


def _engine() -> Parameters:
    from sgl.runtime.config import EngineConfig

    groups = {
        "model_path": "The model",
        "device": "Device and precision",
        "tp_size": "Several processes and hosts",
        "attention_backend": "Kernels",
        "page_size": "Memory",
        "max_running_requests": "Batches",
        "enable_hierarchical_cache": "Memory beyond the device",
        "disaggregation_mode": "Prompts and outputs by different engines",
        "disable_overlap_schedule": "Time limits and streams",
        "image_urls": "Images",
        "disable_jump_forward": "Constrained outputs",
        "enable_lora": "LoRA adapters",
        "speculative_algorithm": "Speculation",
        "deterministic": "Reproducing and debugging",
    }
    return field_options(EngineConfig, groups)


def _run() -> Parameters:
    record = "Write to this file what the programs sent and were answered, for --replay."
    again = "FILE is such a trace: run it again, and say where the first difference is."
    return [
        Option(["--record"], metavar="TRACE", type=click.Path(), help=record),
        Option(["--replay"], is_flag=True, help=again),
        *_ran(),
    ]


def _ran() -> Parameters:
    model = (
        "Instead: an engine of its own, on a Hugging Face folder, hub id or GGUF file. [default: the embedded one]"
    )
    return [
        Option(["--url"], metavar="URL", help="A server that runs already."),
        Option(["--api-key"], metavar="KEY", help="Of that server."),
        Option(["--model"], metavar="MODEL", type=click.Path(), help=model),
        click.RichArgument(["file"], type=click.Path(), help="A Python file, or a saved program: FILE.json."),
        click.RichArgument(
            ["arguments"], nargs=-1, type=click.UNPROCESSED, help="Its own; of a saved program --arg and --json."
        ),
    ]


def _trace() -> Parameters:
    text = "Where to write it. [default: trace.html]"
    return [Option(["--output"], default="trace.html", type=click.Path(), metavar="PAGE", help=text), *_ran()]


def _chat() -> Parameters:
    from sgl.bench.load import URL

    return [
        Option(["--url"], default=URL, metavar="URL", help=f"Where the server is. [default: {URL}]"),
        Option(["--api-key"], metavar="KEY", help="Of the server."),
        Option(["--system"], metavar="TEXT", help="The system prompt."),
        Option(["--max-tokens"], type=int, metavar="N", help="Of an answer. [default: what the context holds]"),
        Option(["--temperature"], type=float, default=0.7, metavar="T", help="Of the sampling. [default: 0.7]"),
    ]


def _report() -> Parameters:
    output, group = "Write it as JSON to a file as well.", "The report"
    return [
        Option(["--json"], is_flag=True, help="Print it as JSON.", panel=group),
        Option(["--output"], type=click.Path(), metavar="FILE", help=output, panel=group),
    ]


def _bench_serving() -> Parameters:
    from sgl.bench.datasets import Source
    from sgl.bench.load import Load

    plot = "Draw it as well, as .html, .png, .svg or .pdf; needs sgl[plot]."
    slo = "A bound in milliseconds on ttft, tpot or e2e, for the goodput; may be repeated."
    return [
        *_report(),
        Option(["--plot"], type=click.Path(), metavar="FILE", help=plot, panel="The report"),
        Option(["--slo"], multiple=True, metavar="NAME=MS", help=slo, panel="The report"),
        *field_options(Load, {"url": "The load"}),
        *field_options(Source, {"dataset": "What is sent"}),
    ]


def _bench_engine() -> Parameters:
    from sgl.bench.datasets import Source

    return [*_model(), *_report(), *field_options(Source, {"dataset": "What is sent"}), *_engine()]
