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
from sgl.errors import BackendError, ServerUnreachable, SglError
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
        options["answered"]()
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


def events_of(http: Any, monkeypatch: pytest.MonkeyPatch, *, segments: int = 1, **fields: Any) -> list[ir.Event]:
    monkeypatch.setattr("sgl.lang.backends.remote.MAX_PAUSE", 0.001)
    events: list[ir.Event] = []

    async def main() -> None:
        session = RemoteSession(http, ir.Program("p", 0, **fields), events.append, lambda _: None)
        for _ in range(segments):
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


class Scripted:
    """An HTTP client of a server whose streams of events are given: an exception breaks one, None leaves it half
    open."""

    def __init__(self, *streams: list[Any], max_retries: int = 3) -> None:
        self.base_url, self.max_retries = "http://scripted", max_retries
        self.streams, self.asked, self.posts = list(streams), list[str](), list[str]()
        self.refused = list[SglError]()  # of the segments that are sent

    async def sse(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        self.asked.append(f"{method} {path}")
        for number, event in enumerate(self.streams.pop(0), 1):
            if isinstance(event, Exception):
                raise event
            options["answered"]()
            if event is None:
                await asyncio.sleep(2 * PATIENCE)
            yield number + (options.get("last_event_id") or 0), event

    async def post(self, path: str, body: Any) -> None:
        self.posts.append(path)
        await asyncio.sleep(0)
        if self.refused:
            raise self.refused.pop(0)

    def tell_delete(self, path: str) -> None:
        """Told when the program is given up."""


OPEN = {"type": "opened", "id": "p"}
DONE = {"type": "done"}
GONE = NotThere("there is no such program")
BROKEN = BackendError("it broke off its answer", retryable=True)
REFUSED = ServerUnreachable("the connection was refused", url="http://scripted")


def without_server(status: int) -> BackendError:
    """What a proxy answers."""
    return BackendError("no server", status=status, retryable=True)


def delta(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "delta", "stream": 0, "index": 0, "text": text, **more}


def node_done(text: str) -> dict[str, Any]:
    return {"type": "node_done", "stream": 0, "index": 0, "text": text, "value": text, "meta": {}}


def test_a_program_that_its_server_ended_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    http = Scripted([OPEN], [GONE], [OPEN, DONE])
    [error] = errors_in(events_of(http, monkeypatch))
    assert "given the program up" in str(error)
    assert http.asked == ["POST /v1/programs", "GET /v1/programs/p/events"]


class Clock:
    """Time of which each look takes some."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.parametrize(("deadline", "most"), [(None, 62.0), (20.0, 22.0)])
@pytest.mark.parametrize("lost", [REFUSED, *(without_server(status) for status in (502, 503, 504))], ids=str)
def test_a_server_that_is_unreachable_is_tried_again_for_a_time(
    lost: SglError, deadline: float | None, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own address refuses connections; a proxy before it answers."""
    clock = Clock(1.0)
    monkeypatch.setattr("sgl.lang.backends.remote.time", clock)
    back = Scripted([OPEN, BROKEN], *([lost] for _ in range(15)), [GONE], *([lost] for _ in range(2)), [OPEN, DONE])
    assert not errors_in(events_of(back, monkeypatch, deadline_s=deadline))
    clock.now = 0.0
    never = Scripted([OPEN, BROKEN], *([lost] for _ in range(100)))
    assert errors_in(events_of(never, monkeypatch, deadline_s=deadline)) == [lost]
    assert most - 3 <= clock.now <= most


@pytest.mark.parametrize(
    ("error", "max_retries", "times"),
    [(BackendError("full", status=429, retryable=True), 3, 4), (BROKEN, 3, 4), (REFUSED, 0, 1)],
)
def test_what_a_server_answers_is_tried_again_as_often_as_other_requests(
    error: SglError, max_retries: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = [OPEN, error] if error is BROKEN else [error]  # the connection breaks once it is answered
    http = Scripted([OPEN, error], *(tries for _ in range(50)), max_retries=max_retries)
    assert errors_in(events_of(http, monkeypatch)) == [error]
    assert len(http.asked) == times


def test_a_server_that_never_opened_the_program_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    http = Scripted(*([REFUSED] for _ in range(50)))
    assert errors_in(events_of(http, monkeypatch)) == [REFUSED]
    assert len(http.asked) == 4


@pytest.mark.parametrize("lost", [GONE, REFUSED, BROKEN, without_server(502)], ids=str)
def test_where_a_segment_does_not_arrive_the_events_are_asked_for_again(
    lost: SglError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is half open never breaks."""
    http = Scripted([OPEN, None], [GONE], [OPEN, None], [delta("a"), DONE])
    http.refused = [lost, lost]  # the second of the program opened again: somebody knows it
    assert not errors_in(events_of(http, monkeypatch, segments=2))
    events = "GET /v1/programs/p/events"
    assert http.asked == ["POST /v1/programs", events, "POST /v1/programs", events]


def test_a_segment_that_finds_no_program_is_sent_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The events come from one server of several behind one address, which take turns."""
    http = Scripted([OPEN, None], *([delta(""), None] for _ in range(50)))
    http.refused = [GONE] * 50
    [error] = errors_in(events_of(http, monkeypatch, segments=2))
    assert "given the program up" in str(error)
    assert len(http.posts) == 4


@pytest.mark.parametrize(
    ("again", "ends_well"),
    [
        (["The ca", "t sat on the", " mat"], True),
        (["The cat sat on the mat"], True),
        (["A dog ran off", " and barked"], False),
        (["A dog"], False),
        (["The cat"], True),  # the rest comes with the whole text
        ([], True),
    ],
)
@pytest.mark.parametrize("is_reasoning", [False, True])
def test_a_streamed_text_is_of_one_life(
    again: list[str], ends_well: bool, is_reasoning: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = "A dog ran off and barked" if again and again[0].startswith("A") else "The cat sat on the mat"
    end = {**node_done("x"), "meta": {"reasoning_content": whole}} if is_reasoning else node_done(whole)
    life = [OPEN, *(delta(piece, reasoning=is_reasoning) for piece in again), end, DONE]
    first = [OPEN, *(delta(piece, reasoning=is_reasoning) for piece in ("The cat ", "sat on")), BROKEN]
    http = Scripted(first, [GONE], first, [GONE], life)
    events = events_of(http, monkeypatch, stream=True)
    streamed = "".join(event.text for event in events if isinstance(event, ir.Delta))
    assert whole.startswith(streamed) if ends_well else streamed == "The cat sat on"
    assert ["come out otherwise" in str(error) for error in errors_in(events)] == ([] if ends_well else [True])
