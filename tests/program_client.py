"""A client of programs by hand: nodes in, events out, without the language."""

from __future__ import annotations

import threading
from typing import Any

from sgl.lang.ir import nodes as ir
from sgl.runtime.engine import Engine
from tests.patience import PATIENCE

SECONDS = PATIENCE
# Whatever is sampled is text that comes out alike when it is encoded again: printable ASCII, one token a letter.
PRINTABLE = {token_id: -100.0 for token_id in range(259) if not 3 <= token_id < 3 + 94}


class Client:
    """A program by hand: nodes in, events out."""

    def __init__(self, engine: Engine, **program: Any) -> None:
        self.events: list[ir.Event] = []
        self.late: list[ir.Event] = []
        """What came after Done: nothing may."""
        self.cancel_after: int | None = None
        self.is_done = threading.Event()
        self._news = threading.Condition()
        fields = {"name": "test", "seed": 1, "defaults": {"logit_bias": PRINTABLE}, **program}
        self.session = engine.open_program(ir.Program(**fields), self._sink)

    def _sink(self, event: ir.Event) -> None:
        if self.is_done.is_set():
            self.late.append(event)
        with self._news:
            self.events.append(event)
            self._news.notify_all()
        if len(self.events) == self.cancel_after:
            self.session.cancel()
        if isinstance(event, ir.Done):
            self.is_done.set()

    def send(self, *nodes: ir.Node | tuple[int, ir.Node], final: bool = False, answers: Any = ()) -> None:
        addressed = tuple(node if isinstance(node, tuple) else (0, node) for node in nodes)
        self.session.send(ir.Segment(addressed, tuple(answers), final))

    def wait(self, kind: type, count: int = 1) -> list[Any]:
        """The first `count` events of a kind, once they are there."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.of(kind)) >= count, SECONDS), self.events
            return self.of(kind)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def finish(self, *nodes: ir.Node | tuple[int, ir.Node]) -> list[Any]:
        """Send the final segment; the NodeDone events once all is done."""
        self.send(*nodes, final=True)
        assert self.is_done.wait(SECONDS), self.events
        return self.of(ir.NodeDone)

    def error(self) -> Exception:
        [failed] = self.wait(ir.NodeFailed)
        return failed.error


def gen(name: str | None = None, **params: Any) -> ir.Gen:
    return ir.Gen(name, {"max_tokens": 6, **params})


def assert_idle(engine: Engine) -> None:
    memory = engine._scheduler.memory
    assert engine.check_ledger() == []
    assert (len(memory.running), len(memory.leases), memory.cache.locked_pages) == (0, 0, 0)
    assert not engine._router._sinks
