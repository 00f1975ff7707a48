"""A program's view as HTML without scripts: its text in coloured spans, and lanes of when they came about.

The markup is for any page: classes begin with `sgl-`, nothing is loaded, no attribute needs a policy's leave, and
whatever a program or a model wrote is escaped. `view.css` has its looks; a page with `view.js` links text and lanes
(elements of one node have the same `data-node`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from sgl.lang.view.spans import Branch, Piece, Span, View, duration, view_of

MAX_LANES = 64
_WIDTH, _HEIGHT = 1000, 16  # of a lane, in its own units
_LEAST = 6  # width of what took no time
_LEGEND = (
    ("sgl-generated", "generated"),
    ("sgl-unlikely", "unlikely"),
    ("sgl-forced", "forced"),
    ("sgl-chosen", "chosen"),
    ("sgl-failed", "failed"),
)


@cache
def asset(name: str) -> str:
    """The text of a file beside this one: `view.css`, `view.js`, `trace.html`."""
    return resources.files("sgl.lang.view").joinpath(name).read_text(encoding="utf-8")


def page_part(timeline: Mapping[str, Any], *, with_lanes: bool = True) -> str:
    """The view of a timeline, for a page that has `view.css`."""
    view = view_of(timeline)
    lanes = _lanes(view) if with_lanes else ""
    beside = " sgl-beside" if lanes else ""
    text = f'<div class="sgl-text{beside}">{"".join(_text(view.root))}{_end(view)}</div>'
    return f'<div class="sgl-view">{_legend(view)}<div class="sgl-columns">{text}{lanes}</div></div>'


def notebook(timeline: Mapping[str, Any]) -> str:
    """The view of a timeline, with its looks."""
    return f"<style>{asset('view.css')}</style>{page_part(timeline, with_lanes=False)}"


def trace_page(timelines: list[Any], data: str) -> str:
    """A page of its own with several views; `data`, JSON that ends no script, is embedded."""
    count = f"{len(timelines)} program{'' if len(timelines) == 1 else 's'}"
    parts = [
        f"<details{' open' if not i else ''}><summary>{_title(timeline)}</summary>{page_part(timeline)}</details>"
        for i, timeline in enumerate(timelines)
    ]
    given = {"count": count, "programs": "\n".join(parts), "data": data}
    return filled(asset("trace.html"), given)


def filled(page: str, given: Mapping[str, str]) -> str:
    """A page with `{{name}}` replaced by what is given, and `/* view.css */` by that file."""
    return re.sub(
        r"\{\{(\w+)\}\}|/\* (view\.\w+) \*/", lambda match: given[match[1]] if match[1] else asset(match[2]), page
    )


def _title(timeline: Mapping[str, Any]) -> str:
    took = max((event.get("at", 0.0) for event in timeline["events"]), default=0.0)
    number = len(timeline["nodes"])
    return f"{escape(str(timeline['name']))} <small>{number} node{'' if number == 1 else 's'}, {duration(took)}</small>"


def _legend(view: View) -> str:
    found = {name for span in view.spans() for name in _classes_of(span)}
    keys = "".join(f'<span class="sgl-span {name}">{text}</span>' for name, text in _LEGEND if name in found)
    return f'<div class="sgl-legend">{keys}</div>' if keys else ""


def _classes_of(span: Span) -> Iterator[str]:
    if span.state == "failed":
        yield "sgl-failed"
    elif span.kind in ("generated", "chosen") and span.pieces:
        yield f"sgl-{span.kind}"
    if any(piece.is_forced for piece in span.pieces):
        yield "sgl-forced"
    if any(_is_unlikely(piece) for piece in span.pieces):
        yield "sgl-unlikely"


def _is_unlikely(piece: Piece) -> bool:
    return piece.logprob is not None and piece.logprob < math.log(0.3)


def _text(branch: Branch) -> Iterator[str]:
    is_after_block = branch.depth > 0
    for span in branch.spans:
        if span.op == "fork":
            yield from _branches(span)
        elif span.kind == "given":
            text = span.text
            text = text.removeprefix("\n") if is_after_block else text
            yield f'<span class="sgl-given">{escape(text)}</span>'
        else:
            yield from _span(span)
        is_after_block = span.op == "fork" or bool(span.choices)


def _branches(span: Span) -> Iterator[str]:
    yield '<div class="sgl-branches">'
    for i, branch in enumerate(span.branches):
        yield f'<div class="sgl-branch"><small>branch {i}</small>'
        yield from _text(branch)
        yield "</div>"
    yield "</div>"
    if left_out := span.num_branches - len(span.branches):
        yield f'<small class="sgl-note">… {left_out} more branches</small>'


def _span(span: Span) -> Iterator[str]:
    classes = f"sgl-span sgl-{span.kind} sgl-{span.state}"
    yield f'<span class="{classes}" data-node="{span.stream}:{span.index}" title="{escape(about(span))}">'
    if span.name is not None:
        yield f'<b class="sgl-name">{escape(span.name)}</b>'
    for piece in span.pieces:
        yield _piece(piece)
    if span.state == "pending":
        yield '<i class="sgl-cursor">…</i>'
    elif span.state == "failed":
        why = next((value for label, value in span.facts if label == "error"), "not reached")
        yield f'<em class="sgl-why">{escape(why)}</em>'
    yield "</span>"
    if span.choices:
        yield from _bars(span)


def _piece(piece: Piece) -> str:
    if piece.is_forced:
        return f'<i class="sgl-forced" title="forced: nothing else was allowed">{escape(piece.text)}</i>'
    if piece.logprob is None:
        return escape(piece.text)
    probability = math.exp(min(0.0, piece.logprob))
    shade = sum(probability < bound for bound in (0.9, 0.6, 0.3, 0.1))
    said = f"logprob {piece.logprob:.3f}, {100 * probability:.1f} %"
    return f'<i class="sgl-token sgl-p{shade}" title="{said}">{escape(piece.text)}</i>'


def _bars(span: Span) -> Iterator[str]:
    yield '<span class="sgl-bars">'
    for choice, probability in span.choices:
        chosen = " sgl-taken" if choice == span.text else ""
        wide = f"{100 * probability:.1f}"
        yield f'<span class="sgl-bar{chosen}"><span>{escape(choice)}</span>'
        yield '<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        yield f'<rect width="{wide}" height="10"/></svg><small>{wide} %</small></span>'
    if left_out := span.num_choices - len(span.choices):
        yield f'<small class="sgl-note">… {left_out} more choices</small>'
    yield "</span>"


def about(span: Span) -> str:
    """A span's node and its facts, in a line each."""
    head = " ".join(filter(None, (span.op, span.name, f"at {span.path}")))
    return "\n".join([head, *(f"{label}: {value}" for label, value in span.facts)])


def _end(view: View) -> str:
    nodes, characters = view.shortened
    notes = [f"… {number} more {what}" for number, what in ((characters, "characters"), (nodes, "nodes")) if number]
    shown = "".join(f'<small class="sgl-note">{note}</small>' for note in notes)
    return shown + (f'<em class="sgl-why">{escape(view.error)}</em>' if view.error else "")


def _lanes(view: View) -> str:
    branches = list(view.branches())
    end = max((span.stages.done for span in view.spans() if span.stages), default=0.0)
    if not end:
        return ""
    lanes = [_lane(branch, end) for branch in branches[:MAX_LANES]]
    if len(branches) > MAX_LANES:
        lanes.append(f'<small class="sgl-note">… {len(branches) - MAX_LANES} more streams</small>')
    axis = "".join(f"<span>{duration(end * i / 2)}</span>" for i in range(3))
    key = "".join(
        f'<span class="sgl-key sgl-{name}">{text}</span>'
        for name, text in (("queue", "waited"), ("prefill", "computed the prompt"), ("compute", "decoded"))
    )
    return f'<div class="sgl-lanes">{"".join(lanes)}<div class="sgl-axis">{axis}</div><div>{key}</div></div>'


def _lane(branch: Branch, end: float) -> str:
    label = branch.path.rstrip("/").rpartition("/")[2] or "program"
    bars = "".join([_bar(span, end) for span in branch.spans if span.stages and span.kind != "template"])
    return (
        f'<div class="sgl-lane"><small class="sgl-d{min(branch.depth, 3)}">{label}</small>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">'
        f'<line x2="{_WIDTH}" y1="{_HEIGHT / 2:g}" y2="{_HEIGHT / 2:g}"/>{bars}</svg></div>'
    )


def _bar(span: Span, end: float) -> str:
    stages = span.stages
    assert stages is not None, "it was asked for"

    def rect(kind: str, since: float, until: float, least: float) -> str:
        x, wide = _WIDTH * max(0.0, since) / end, max(least, _WIDTH * (until - since) / end)
        x = min(x, _WIDTH - least)
        return f'<rect class="sgl-{kind}" x="{x:.1f}" width="{wide:.1f}" y="2" height="{_HEIGHT - 4}"/>'

    parts = [f"<title>{escape(about(span))}</title>"]
    if stages.started > stages.start:
        parts.append(rect("queue", stages.start, stages.started, 0))
    if stages.computed > stages.started:
        parts.append(rect("prefill", stages.started, stages.computed, 0))
    parts.append(rect("broken" if span.state == "failed" else "compute", stages.computed, stages.done, _LEAST))
    return f'<g data-node="{span.stream}:{span.index}" tabindex="0">{"".join(parts)}</g>'
