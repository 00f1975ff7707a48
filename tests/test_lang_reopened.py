"""Programs on a server that was killed and is back: opened again with their seeds, they go on where they were."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import sgl
from sgl.errors import BackendError, SglError
from sgl.lang.backends.http import NotThere
from sgl.lang.backends.remote import RemoteSession
from sgl.lang.ir import nodes as ir
from sgl.runtime.engine import Engine
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served, slow_steps
from tests.patience import PATIENCE
from tests.test_server_programs import Cutter


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(str(chat_checkpoint(tmp_path_factory.mktemp("model"))), **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def servers(engine: Engine) -> Iterator[list[LiveServer]]:
    """Two lives of one: neither knows the other's programs."""
    with served(engine, reconnect_grace=0.1) as first, served(engine, reconnect_grace=0.1) as second:
        yield [first, second]


class Front(Cutter):
    """What clients reach of a server with several lives."""

    def __init__(self, servers: list[LiveServer]) -> None:
        super().__init__(servers[0].url, 1 << 40)
        self._servers, self._lives = servers, 0
        self._open: list[socket.socket] = []

    def _pump(self, source: socket.socket, sink: socket.socket, left: int | None) -> None:
        self._open += [source, sink]
        super()._pump(source, sink, left)

    def kill(self) -> None:
        """All connections break, and the next life begins."""
        self._lives += 1
        host, port = self._servers[self._lives % len(self._servers)].url.removeprefix("http://").split(":")
        self._target = host, int(port)
        ended, self._open = self._open, []
        for each in ended:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def front(servers: list[LiveServer]) -> Iterator[Front]:
    front = Front(servers)
    yield front
    front.close()


@sgl.function
def agent(s: sgl.ProgramState, after: Any = bool, topic: str = "cats") -> None:
    s += "About " + topic + ":" + sgl.gen("first", max_tokens=12, temperature=1.0)
    s["first"]
    after()
    branches = s.fork(2)
    branches += sgl.gen("thought", max_tokens=8, temperature=1.0)
    branches.join("concate_and_append")
    s += sgl.select("which", ["yes", "no"])
    s["which"]
    after()
    s += sgl.gen("end", regex="[a-z]{3,9}", temperature=1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_values_are_those_of_a_program_whose_server_lives(front: Front, engine: Engine, stream: bool) -> None:
    expected = agent.run(backend=engine, seed=3)
    backend = sgl.RuntimeEndpoint(front.url)
    state = agent.run(front.kill, backend=backend, seed=3, stream=stream)
    if stream:
        assert "".join(state.text_iter()) == expected.text()
    assert (state.text(), state.variables()) == (expected.text(), expected.variables())
    assert front._lives == 2


def test_a_stream_is_told_no_text_twice(front: Front, engine: Engine) -> None:
    options: dict[str, Any] = {"seed": 5, "temperature": 1.0, "max_tokens": 60, "ignore_eos": True}

    @sgl.function
    def long(s: sgl.ProgramState) -> None:
        s += "Once" + sgl.gen("x")

    expected = long.run(backend=engine, **options)["x"]
    with slow_steps(engine):
        state = long.run(backend=sgl.RuntimeEndpoint(front.url), stream=True, **options)
        pieces = []
        for piece in state.text_iter("x"):
            pieces.append(piece)
            if len(pieces) in (3, 9):
                front.kill()
    assert ("".join(pieces), state["x"]) == (expected, expected)


def test_a_session_outlives_its_server_also_while_it_rests(front: Front, engine: Engine) -> None:
    def talk(backend: Any, after: Any) -> list[str]:
        with sgl.session(backend, seed=2, temperature=1.0, max_tokens=6) as s:
            for i in range(3):
                s += sgl.user(f"And {i}?") + sgl.assistant(sgl.gen("answer"))
                s["answer"]
                after()
        return [s.text(), s["answer"]]

    assert talk(sgl.RuntimeEndpoint(front.url), front.kill) == talk(engine, bool)


class Killed:
    """An HTTP client of a server that is killed whenever it has sent `events`, and tells `values` in turn."""

    def __init__(self, *values: str, times: int) -> None:
        self.base_url, self.max_retries = "http://killed", 3
        self.values, self.times, self.opened = list(values), times, list[Any]()

    async def sse(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        if method == "GET":
            raise NotThere("there is no such program")
        self.opened.append(body)
        yield 1, {"type": "opened", "id": str(len(self.opened))}
        if self.values:
            text = self.values.pop(0)
            yield 2, {"type": "node_done", "stream": 0, "index": 0, "text": text, "value": text, "meta": {}}
        if len(self.opened) <= self.times:
            raise BackendError("it broke off its answer", retryable=True)
        yield 3, {"type": "done"}

    async def post(self, path: str, body: Any) -> None:
        raise NotThere("there is no such program")

    def tell_delete(self, path: str) -> None:
        """Told when the program is given up."""


def events_of(http: Any, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> list[ir.Event]:
    monkeypatch.setattr("sgl.lang.backends.remote.MAX_PAUSE", 0.001)
    events: list[ir.Event] = []

    async def main() -> None:
        session = RemoteSession(http, ir.Program("p", 0, **fields), events.append, lambda _: None)
        session.send(ir.Segment(((0, ir.Gen("x")),)))
        while not events or not isinstance(events[-1], ir.Done):
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    return events


def errors_in(events: list[ir.Event]) -> list[SglError]:
    return [event.error for event in events if isinstance(event, ir.NodeFailed)]


@pytest.mark.parametrize(("times", "ends_well"), [(3, True), (4, False)])
def test_a_program_that_its_server_never_outlives_is_opened_only_so_often(
    times: int, ends_well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = Killed(times=times)
    errors = errors_in(events_of(http, monkeypatch))
    assert len(http.opened) == 4
    assert ["given the program up" in str(error) for error in errors] == ([] if ends_well else [True])


def test_values_that_come_out_otherwise_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    [error] = errors_in(events_of(Killed("a", "b", times=1), monkeypatch))
    assert isinstance(error, BackendError)
    assert "come out otherwise" in str(error)
    assert not errors_in(events_of(Killed("a", "a", times=1), monkeypatch))


def test_a_deadline_counts_from_the_first_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    http = Killed(times=1)
    clock = SimpleNamespace(monotonic=lambda: 7.0 * len(http.opened))
    monkeypatch.setattr("sgl.lang.backends.remote.time", clock)
    events_of(http, monkeypatch, deadline_s=10.0)
    assert [body["program"]["deadline_s"] for body in http.opened] == [10.0, 3.0]
