"""A table of a program's nodes, for terminals that rich writes to and for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from sgl.lang.ir import nodes as ir
from sgl.lang.ir.encoding import to_json
from sgl.lang.view.html import notebook

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLUMNS = ("node", "op", "name", "what")
_STYLES = {"gen": "blue", "select": "magenta"}
_CLASSES = {"gen": "sgl-generated", "select": "sgl-chosen"}

MAX_ROWS = 500  # of a table in a notebook
MAX_CHARACTERS = 2000  # of a cell of it

Nodes = Iterable[tuple[str, ir.Node]]


def table(nodes: Nodes, end: str) -> RenderableType:
    """Nodes with their paths, a line each, and a last line."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    lines = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        lines.add_column(column, overflow="fold")
    for path, op, name, what in _rows(nodes):
        lines.add_row(Text(path, "dim"), Text(op, _STYLES.get(op, "")), Text(name), Text(what))
    return Group(lines, Text(end, "dim"))


def html_table(nodes: Nodes, end: str, timeline: Mapping[str, Any]) -> str:
    """The same for a notebook, above the text that they write; long ones are cut and say so."""
    nodes = list(nodes)
    if len(nodes) > MAX_ROWS:
        end = f"… {len(nodes) - MAX_ROWS} more nodes; {end}"
    head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    rows = "".join(
        f'<tr><td>{escape(path)}</td><td><span class="sgl-span {_CLASSES.get(op, "")}">{escape(op)}</span></td>'
        f"<td>{escape(_cut(name))}</td><td><code>{escape(_cut(what))}</code></td></tr>"
        for path, op, name, what in _rows(nodes[:MAX_ROWS])
    )
    table = f'<table class="sgl-nodes"><tr>{head}</tr>{rows}</table><p><small>{escape(end)}</small></p>'
    return f'<div class="sgl-view">{table}</div>{notebook(timeline)}'


def _rows(nodes: Nodes) -> Iterator[tuple[str, str, str, str]]:
    for path, node in nodes:
        data = to_json(node)
        op, name = data.pop("op"), data.pop("name", "")
        text = data.pop("text", None)
        rest = " ".join(f"{key}={value!r}" for key, value in data.items())
        yield path, op, str(name or ""), rest if text is None else repr(text)


def _cut(text: str) -> str:
    left_out = len(text) - MAX_CHARACTERS
    return f"{text[:MAX_CHARACTERS]} … {left_out} more characters" if left_out > 0 else text
