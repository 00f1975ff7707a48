"""How states look: their timeline for `sgl.lang.view`, and a display in notebooks that follows a run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from sgl.lang.ir import nodes as ir
from sgl.lang.record.cell import Cell, Failure, Part
from sgl.lang.record.stream import Stream

REFRESH_SECONDS = 0.2  # of a display that follows a run

_SHOWN = ("name", "text", "role", "kind", "choices", "children", "mode")  # fields that a view reads


class _Run(Protocol):
    """The part of `Run` used here."""

    program: ir.Program

    @property
    def is_done(self) -> bool: ...
    def stream(self, index: int) -> Stream: ...
    def failed(self) -> Failure | None: ...


def timeline(run: _Run, stream: Stream) -> dict[str, Any]:
    """What a stream wrote so far, its bases' text before and its branches after: the shape of the server's timelines,
    without times. Never waits."""
    nodes: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    waiting = [(0, stream.chain())]
    while waiting:
        number, recorded = waiting.pop()
        _add(nodes, events, run.program.args, number, recorded)
        forked = [child for node, _ in recorded if isinstance(node, ir.Fork) for child in node.children]
        for branch in map(run.stream, forked):
            waiting.append((branch.id, list(zip(branch.nodes, branch.parts, strict=False))))
    if (failure := run.failed()) is not None and stream.failure is None:
        events.append({"type": "node_failed", "stream": None, "index": None, "error": _error(failure)})
    return {"name": run.program.name, "is_running": not run.is_done, "nodes": nodes, "events": events}


def _add(
    nodes: list[dict[str, Any]],
    events: list[dict[str, Any]],
    args: Mapping[str, str],
    number: int,
    recorded: Iterable[tuple[ir.Node, Part]],
) -> None:
    for index, (node, part) in enumerate(recorded):
        shown = {key: getattr(node, key) for key in _SHOWN if hasattr(node, key)}
        if isinstance(node, ir.Arg):
            nodes.append({"st": number, "op": ir.Text.op, "text": args[node.name]})
        elif isinstance(node, ir.Join) and node.mode == "append" and not isinstance(part, Cell):
            nodes.append({"st": number, "op": node.op, "mode": node.mode})
        else:
            nodes.append({"st": number, "op": node.op, **shown})
        if isinstance(part, Cell) and (event := _event(part)):
            events.append({"stream": number, "index": index, **event})


def _event(cell: Cell) -> dict[str, Any] | None:
    if cell.failure is not None:
        return {"type": "node_failed", "error": _error(cell.failure)}
    if cell.done:
        return {"type": "node_done", "text": cell.text, "value": cell.value, "meta": cell.meta}
    so_far = "".join([chunk.text for chunk in cell.chunks if not chunk.is_reasoning])
    return {"type": "delta", "text": so_far} if so_far else None


def _error(failure: Failure) -> dict[str, Any]:
    return {"message": failure.text(), "class": type(failure.cause).__name__}


def html(run: _Run, stream: Stream) -> str:
    """The view, for a notebook."""
    from sgl.lang.view.html import notebook

    return notebook(timeline(run, stream))


def terminal(run: _Run, stream: Stream) -> Any:
    """The view, for rich."""
    from sgl.lang.view.terminal import text

    return text(timeline(run, stream))


def display(run: _Run, stream: Stream, plain: str) -> None:
    """Show the view in IPython, and keep it up to date until the run ends, where displays can be updated: in a
    notebook, not in a terminal."""
    IPython = sys.modules["IPython"]  # it calls  # noqa: N806
    shell = IPython.get_ipython()
    bundle = {"text/plain": plain, "text/html": html(run, stream)}
    if run.is_done or getattr(shell, "kernel", None) is None:
        IPython.display.display(bundle, raw=True)
        return
    handle = IPython.display.display(bundle, raw=True, display_id=True)
    threading.Thread(target=_follow, args=(handle, run, stream), daemon=True, name="sgl-display").start()


def _follow(handle: Any, run: _Run, stream: Stream) -> None:
    is_done, shown = False, ""
    while not is_done:
        is_done = run.is_done  # read first: what comes before the end is shown
        latest = html(run, stream)
        if latest != shown or is_done:
            text = stream.partial_text()
            handle.update({"text/plain": text, "text/html": latest}, raw=True)
            shown = latest
        if not is_done:
            time.sleep(REFRESH_SECONDS)
