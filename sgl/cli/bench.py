"""`sgl bench`: measures with a progress bar; reports as tables, JSON or a picture."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from sgl.bench import about, client
from sgl.bench.datasets import Source
from sgl.bench.load import Load, Measured, arrivals
from sgl.bench.plot import check_plot, write_plot
from sgl.bench.report import bounds_of
from sgl.bench.report import report as report_of
from sgl.cli.options import check_output, configs, from_flags
from sgl.errors import needs_extra
from sgl.runtime.config import EngineConfig


def bench(options: SimpleNamespace) -> int:
    """Measure; 1 if a request failed."""
    if options.output is not None:
        check_output(options.output)
    report = measured(options)
    text = json.dumps(report, indent=2)
    if options.output is not None:
        Path(options.output).write_text(text + "\n")
    console = Console(highlight=False)
    if options.json:
        console.print(text, markup=False, soft_wrap=True)
    else:
        show(report, console)
    return 1 if report.get("failed") else 0


def measured(options: SimpleNamespace) -> dict[str, Any]:
    """The report of a measurement. Raises ConfigError and ServerUnreachable."""
    return _serving(options) if options.kind == "serving" else _engine(options)


def _serving(options: SimpleNamespace) -> dict[str, Any]:
    plot = None if options.plot is None else Path(options.plot)
    if plot is not None:
        check_plot(plot)
        check_output(options.plot)
    source, load = Source(**from_flags(options, Source)), Load(**from_flags(options, Load))
    bounds, jobs = bounds_of(options.slo), source.jobs()
    times = arrivals(jobs, load, random.Random(source.seed))
    subject = asyncio.run(about.server_facts(load))
    begin = about.facts(options.kind, subject, source, load)
    title, failed = f"{subject['model'] or 'a model'} at {load.url}", 0
    is_off = True if getattr(options, "is_quiet", False) else None  # None: it is on a terminal
    with tqdm(desc=title, total=len(jobs), leave=False, disable=is_off) as bar:

        def progress(measured: Measured) -> None:
            nonlocal failed
            failed += measured.error is not None
            if failed:
                bar.set_postfix(failed=failed, refresh=False)
            bar.update()

        results, seconds = asyncio.run(client.run(jobs, times, load, progress))
    report = {**begin, **report_of(results, seconds, bounds)}
    if plot is not None:
        write_plot(plot, results, report)
    return report


def _engine(options: SimpleNamespace) -> dict[str, Any]:
    with needs_extra("engine", f"sgl bench {options.kind}"):
        from sgl.bench import offline
        from sgl.runtime.engine import Engine

    source, (config,) = Source(**from_flags(options, Source)), configs(options, (EngineConfig,))
    jobs, name = source.jobs(), config.model_name
    with Console(stderr=True).status(f"loading {name}") as status, Engine(**dataclasses.asdict(config)) as engine:
        status.update(f"{len(jobs)} requests to {name}")
        begin = about.facts(options.kind, about.engine_facts(name, engine.get_server_info()), source)
        return {**begin, **(offline.throughput if options.kind == "offline" else offline.latency)(engine, jobs)}


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Show the report's subject, its latencies as a table, and its other figures."""
    console = console or Console(highlight=False)
    console.print(f"sgl bench {report['kind']}", style="bold")
    said = Table.grid(padding=(0, 3))
    for name, line in about.lines(report).items():
        said.add_row(Text(name, style="dim"), Text(line, overflow="fold"))
    console.print(said)
    latencies = {name: value for name, value in report.items() if isinstance(value, dict) and "mean" in value}
    if latencies:
        table = Table("latency, ms", title_justify="left")
        for name in next(iter(latencies.values())):
            table.add_column(name, justify="right")
        for name, values in latencies.items():
            table.add_row(name.removesuffix("_ms").upper(), *(f"{value:,.2f}" for value in values.values()))
        console.print(table)
    figures = Table.grid(padding=(0, 3))
    figures.add_column()
    figures.add_column(justify="right")
    for name, value in report.items():
        if isinstance(value, int | float):
            shown = f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
            figures.add_row(name.replace("_", " "), shown, style="red" if name == "failed" and value else None)
    console.print(figures)
    for error in report.get("errors", ()):
        console.print(error, style="red", markup=False)
