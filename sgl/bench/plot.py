"""A benchmark drawn by matplotlib (`sgl[plot]`): throughput, requests in flight, latencies and their distribution. HTML
adds the figures."""

from __future__ import annotations

import html
import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl.bench import about
from sgl.bench.load import Measured
from sgl.errors import ConfigError, needs_extra

Points = list[tuple[float, float]]
FORMATS = (".html", ".png", ".svg", ".pdf")
_WINDOWS = 60  # windows for rates


@dataclass(frozen=True)
class Panel:
    """A diagram: points by name, joined or as dots, and upper bounds."""

    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    bounds: Mapping[str, float] = field(default_factory=dict)
    is_joined: bool = True


def check_plot(path: Path) -> None:
    """Raise ConfigError, before measuring, if no such picture can be made."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"--plot {path}: there are {', '.join(FORMATS)}", option="plot")
    _matplotlib(path)


def write_plot(path: Path, results: Sequence[Measured], report: Mapping[str, Any]) -> None:
    """Draw a run; `report`: from `report.report`."""
    diagrams = panels(results, report["seconds"], report.get("slo_ms", {}))
    figure, axes = _matplotlib(path).subplots(2, 3, figsize=(15, 8), layout="constrained")
    for panel, axis in zip(diagrams, axes.flat, strict=True):
        for name, points in panel.series.items():
            axis.plot(
                *zip(*points, strict=True) if points else ([], []), "-" if panel.is_joined else ".", label=name
            )
        for name, bound in panel.bounds.items():
            axis.axvline(bound, color="tab:red", linestyle="--", label=name)
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y, xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)
        if len(panel.series) + len(panel.bounds) > 1:
            axis.legend()
    is_page = path.suffix == ".html"
    if not is_page:  # above the picture on a page
        figure.suptitle(_heading(report), fontsize=10, x=0.01, ha="left")
    if is_page:
        svg = io.StringIO()
        figure.savefig(svg, format="svg")
        path.write_text(_page(svg.getvalue(), report), encoding="utf-8")
    else:
        figure.savefig(path, dpi=110)


def _matplotlib(path: Path) -> Any:
    with needs_extra("plot", f"--plot {path}", option="plot"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def panels(results: Sequence[Measured], seconds: float, slo_ms: Mapping[str, float]) -> list[Panel]:
    """The diagrams of a run; `slo_ms` as in `report`."""
    done = [result for result in results if result.error is None]
    tpots = [tpot for r in done if (tpot := r.time_per_output_token) is not None]
    firsts = [(r.sent, 1000 * r.first_token) for r in done if r.first_token is not None]
    gaps = [gap for r in done for gap in r.gaps]

    def bound(name: str) -> dict[str, float]:
        return {f"{name} SLO": slo_ms[name]} if name in slo_ms else {}

    spread = "share of requests"
    return [
        Panel("Throughput", "seconds", "tokens a second", {"output": _rate(done, seconds)}),
        Panel("Requests in flight", "seconds", "requests", {"requests": _in_flight(done)}),
        Panel("First tokens", "sent at, seconds", "ms to the first token", {"requests": firsts}, is_joined=False),
        Panel("Time to first token", "ms", spread, {"TTFT": _spread(y / 1000 for _, y in firsts)}, bound("ttft")),
        Panel("Time per token", "ms", "share", {"TPOT": _spread(tpots), "ITL": _spread(gaps)}, bound("tpot")),
        Panel("Whole request", "ms", spread, {"E2E": _spread(r.latency for r in done)}, bound("e2e")),
    ]


def _rate(results: Iterable[Measured], seconds: float) -> Points:
    """Output tokens per second, at each window's middle."""
    width = seconds / _WINDOWS
    counts = [0] * _WINDOWS
    for result in results:
        for at, num_tokens in result.events:
            counts[min(_WINDOWS - 1, int((result.sent + at) / width))] += num_tokens
    return [((i + 0.5) * width, count / width) for i, count in enumerate(counts)]


def _in_flight(results: Iterable[Measured]) -> Points:
    changes = sorted([(at, step) for r in results for at, step in ((r.sent, 1), (r.sent + r.latency, -1))])
    points, level = [(0.0, 0.0)], 0
    for at, step in changes:
        points.append((at, float(level)))
        level += step
        points.append((at, float(level)))
    return points


def _spread(seconds: Iterable[float]) -> Points:
    """The cumulative distribution in ms; some hundred points at most."""
    ordered = sorted(seconds)
    step = max(1, len(ordered) // 300)
    chosen = [*range(0, len(ordered), step), *([len(ordered) - 1] if ordered else [])]
    return [(1000 * ordered[i], (i + 1) / len(ordered)) for i in chosen]


_STYLE = """
:root { color-scheme: light } body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem }
svg { width: 100%; height: auto } table { border-collapse: collapse; margin: 1rem 0 }
td, th { text-align: right; padding: .2rem .75rem; border-bottom: 1px solid #8883 }
td:first-child, th:first-child { text-align: left } .about td { text-align: left; overflow-wrap: anywhere }
.about th { font-weight: normal; opacity: .6; vertical-align: top }
"""


def _page(picture: str, report: Mapping[str, Any]) -> str:
    """An SVG of the picture, with the report's figures."""
    latencies = {name: value for name, value in report.items() if name.endswith("_ms") and "mean" in value}
    columns = list(next(iter(latencies.values()), {}))
    table = _row("th", ["latency, ms", *columns]) + "".join(
        _row("td", [name.removesuffix("_ms").upper(), *(f"{value:.2f}" for value in values.values())])
        for name, values in latencies.items()
    )
    plain = {name: value for name, value in report.items() if isinstance(value, (int, float))}
    numbers = "".join(
        _row("td", [name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"])
        for name, value in plain.items()
    )
    said = about.lines(report)
    subject = "".join(f"<tr><th>{name}</th><td>{html.escape(line)}</td></tr>" for name, line in said.items())
    name = f"sgl bench {report.get('kind', 'serving')}"
    title = html.escape(f"{name}: {said['model']}, {report['date']}" if said else name)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<style>{_STYLE}</style><h1>{name}</h1><table class="about">{subject}</table>'
        f"{picture[picture.index('<svg') :]}<table>{table}</table><table>{numbers}</table></html>\n"
    )


def _heading(report: Mapping[str, Any]) -> str:
    """The subject for matplotlib, where $ begins a formula."""
    said = [f"{name}: {line}" for name, line in about.lines(report).items()]
    text = "\n".join([f"sgl bench {report.get('kind', 'serving')}", *(textwrap.fill(line, 170) for line in said)])
    return text.replace("$", r"\$")


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
