"""Draw docs/figures.svg from the committed figures of benchmarks/results.json.

    python benchmarks/picture.py [RESULTS] [PICTURE]

Each panel compares the engines in one measurement that ran on one machine; `source` says which and when.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLOURS = ("#0f766e", "#a8a29e", "#d6d3d1")


def draw(results: dict[str, Any], path: Path) -> None:
    """One column of panels with large letters, so that a phone shows it legibly."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"font.size": 13, "font.family": "DejaVu Sans", "svg.fonttype": "path", "svg.hashsalt": "sgl"}
    )
    panels, engines = results["panels"], results["engines"]
    figure, axes = plt.subplots(len(panels), 1, figsize=(7.0, 2.15 * len(panels) + 0.4))
    for axis, panel in zip(axes, panels, strict=True):
        _panel(axis, panel, engines)
    figure.text(0.055, 0.008, results["machine"], fontsize=11, color="#57534e")
    figure.tight_layout(rect=(0, 0.02, 1, 1), h_pad=1.6)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _panel(axis: Any, panel: dict[str, Any], engines: list[str]) -> None:
    values = panel["values"]
    most = max(value for value in values if value is not None)
    places = range(len(engines))[::-1]
    axis.barh(list(places), [value or 0 for value in values], color=COLOURS, height=0.72)
    for place, value in zip(places, values, strict=True):
        label = panel["missing"] if value is None else f"{value:,.{panel['digits']}f}{panel['unit']}"
        axis.text((value or 0) + most * 0.015, place, label, va="center", color="#1c1917" if value else "#78716c")
    axis.set_title(panel["title"], loc="left", x=-0.27, fontweight="bold", fontsize=13)
    axis.text(-0.27, -0.1, panel["source"], transform=axis.transAxes, fontsize=10, color="#78716c", va="top")
    axis.set_yticks(list(places), engines)
    axis.set_xlim(0, most * 1.17)
    axis.xaxis.set_visible(False)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)


def main() -> None:
    """Read, draw, say where."""
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results.json"
    picture = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE.parent / "docs" / "figures.svg"
    draw(json.loads(results.read_text()), picture)
    print(picture)


if __name__ == "__main__":
    main()
