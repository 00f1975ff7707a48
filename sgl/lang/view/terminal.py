"""A program's view for terminals that rich writes to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sgl.lang.view.spans import Branch, Piece, Span, view_of

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {
    "generated": "blue",
    "chosen": "magenta",
    "template": "dim",
    "repeated": "underline",
    "tool": "underline",
}


def text(timeline: Mapping[str, Any]) -> Text:
    """The text of a timeline: generated blue, forced grey, unlikely tokens yellow, choices magenta, templates dim."""
    from rich.text import Text

    view, written = view_of(timeline), Text()
    _write(written, view.root)
    if view.error:
        written.append(f"[{view.error}]", "red")
    return written


def _write(written: Text, branch: Branch) -> None:
    for span in branch.spans:
        for piece in span.pieces:
            written.append(piece.text, _style(span, piece))
        if span.state != "done":
            written.append(f"[{span.name or span.op}: {span.state}]", "red" if span.state == "failed" else "dim")
        for i, child in enumerate(span.branches):
            written.append(f"\n[branch {i}] ", "dim")
            _write(written, child)
        if span.branches:
            written.append("\n")


def _style(span: Span, piece: Piece) -> str:
    if piece.is_forced:
        return "bright_black"
    if piece.logprob is not None and piece.logprob < math.log(0.3):
        return "yellow"
    return _STYLES.get(span.kind, "")
