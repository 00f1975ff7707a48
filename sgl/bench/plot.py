"""A benchmark as a picture: throughput, requests in flight and latencies over time, and how latencies are spread.

HTML is drawn here and needs nothing else; other formats are drawn by matplotlib, which comes with `sgl[plot]`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl.bench.load import Measured
from sgl.errors import ConfigError

Points = list[tuple[float, float]]
FORMATS = (".html", ".png", ".svg", ".pdf")
_WINDOWS = 60  # that the time is cut into for rates


@dataclass(frozen=True)
class Panel:
    """One diagram: points by name, joined or as dots, and bounds to keep below."""

    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    bounds: Mapping[str, float] = field(default_factory=dict)
    is_joined: bool = True


def check_plot(path: Path) -> None:
    """Raise ConfigError if a picture cannot be written there, before anything is measured."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"--plot {path}: there are {', '.join(FORMATS)}", option="plot")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}", option="plot")
    if path.suffix != ".html":
        _matplotlib(path)


def write_plot(path: Path, results: Sequence[Measured], report: Mapping[str, Any]) -> None:
    """Draw a run; `report` is what `report.report` says of it."""
    diagrams = panels(results, report["seconds"], report.get("slo_ms", {}))
    if path.suffix == ".html":
        path.write_text(_page(diagrams, report), encoding="utf-8")
        return
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
    figure.savefig(path, dpi=110)


def _matplotlib(path: Path) -> Any:
    try:
        import matplotlib
    except ImportError as error:
        message = f"--plot {path}: {path.suffix} needs matplotlib (pip install 'sgl[plot]'); .html needs nothing"
        raise ConfigError(message, option="plot") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def panels(results: Sequence[Measured], seconds: float, slo_ms: Mapping[str, float]) -> list[Panel]:
    """The diagrams of a run of that many seconds; `slo_ms` as `report` names it."""
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
    """Output tokens a second, in the middle of each window."""
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
    """Which share of all values, in ms, is no larger than each of them; at most some hundred points."""
    ordered = sorted(seconds)
    step = max(1, len(ordered) // 300)
    chosen = [*range(0, len(ordered), step), *([len(ordered) - 1] if ordered else [])]
    return [(1000 * ordered[i], (i + 1) / len(ordered)) for i in chosen]


# ── HTML ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_STYLE = """
:root { color-scheme: light dark; --line: #8883; --a: light-dark(#1b4fd8, #8ab4ff); --b: light-dark(#b45309, #fbbf24) }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(24rem, 1fr)); gap: 1rem }
figure { margin: 0; border: 1px solid var(--line); border-radius: .5rem; padding: .75rem }
figcaption { font-weight: 600 } svg { width: 100%; display: block } text { font-size: 11px; fill: currentColor }
.s0 { stroke: var(--a); fill: none } .s1 { stroke: var(--b); fill: none } polyline { stroke-width: 1.5 }
circle.s0 { fill: var(--a); stroke: none } .grid { stroke: var(--line) } .bound { stroke: #c33; stroke-dasharray: 4 3 }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
td, th { text-align: right; padding: .2rem .75rem; border-bottom: 1px solid var(--line) }
td:first-child, th:first-child { text-align: left }
"""
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 420, 260, 52, 24, 12, 40


def _page(diagrams: Sequence[Panel], report: Mapping[str, Any]) -> str:
    figures = "".join(
        f"<figure><figcaption>{html.escape(panel.title)}</figcaption>{_svg(panel)}</figure>" for panel in diagrams
    )
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
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>sgl bench serving</title>'
        f"<style>{_STYLE}</style><h1>sgl bench serving</h1><main>{figures}</main>"
        f"<table>{table}</table><table>{numbers}</table></html>\n"
    )


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _svg(panel: Panel) -> str:
    points = [point for series in panel.series.values() for point in series]
    x_top = max([x for x, _ in points] + list(panel.bounds.values()), default=0.0) or 1.0
    x_ticks = [tick for tick in _ticks(x_top) if tick <= x_top]
    y_ticks = _ticks(max([y for _, y in points], default=1.0))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(value: float) -> str:
        return f"{_LEFT + width * value / x_top:.1f}"

    def y(value: float) -> str:
        return f"{_TOP + height * (1 - value / y_ticks[-1]):.1f}"

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick)}" dy="4" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        parts.append(f'<text x="{x(tick)}" y="{_HEIGHT - 24}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{html.escape(panel.x)}</text>'
    )
    parts.append(f'<text x="4" y="12">{html.escape(panel.y)}</text>')
    for name, bound in panel.bounds.items():
        parts.append(f'<line class="bound" x1="{x(bound)}" x2="{x(bound)}" y1="{_TOP}" y2="{_TOP + height}"/>')
        parts.append(f'<text x="{x(bound)}" y="{_TOP + 12}" dx="4">{html.escape(name)}</text>')
    for number, (name, series) in enumerate(panel.series.items()):
        parts.append(_drawn(series, number, x, y, is_joined=panel.is_joined))
        if len(panel.series) > 1:
            end = _WIDTH - _RIGHT
            parts.append(f'<line class="s{number}" x1="{end - 54}" x2="{end - 38}" y1="{8 + 14 * number}" ')
            parts.append(f'y2="{8 + 14 * number}"/><text x="{end - 34}" y="{12 + 14 * number}">{name}</text>')
    return "".join(parts) + "</svg>"


def _drawn(
    series: Points, number: int, x: Callable[[float], str], y: Callable[[float], str], *, is_joined: bool
) -> str:
    if is_joined:
        line = " ".join(f"{x(a)},{y(b)}" for a, b in series)
        return f'<polyline class="s{number}" points="{line}"/>'
    return "".join(f'<circle class="s{number}" cx="{x(a)}" cy="{y(b)}" r="2"/>' for a, b in series)


def _ticks(top: float) -> list[float]:
    """Round numbers from 0 to just above `top`."""
    top = top or 1.0
    raw = top / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw)
    return [round(i * step, 12) for i in range(math.ceil(top / step - 1e-9) + 1)]
