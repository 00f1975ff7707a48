"""A conversation outside a function: recorded, shipped and ended as a body is, on every kind of backend."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest

import sgl
from sgl.errors import BackendError, InvalidRequest, ProgramError, RequestTimeout
from sgl.lang.backends.remote import RemoteSession
from sgl.lang.ir import nodes as ir
from tests.fake_servers import FakeServer
from tests.lang_mocks import MockBackend, ProgramBackend
from tests.live_server import LiveServer
from tests.patience import wait_until
from tests.test_lang_openai import answer


@pytest.fixture(params=["engine", "server", "openai", "single calls", "programs"])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    match request.param:
        case "engine":
            yield request.getfixturevalue("engine")
        case "server":
            yield sgl.RuntimeEndpoint(request.getfixturevalue("server").url)
        case "openai":
            with FakeServer(answer) as fake:
                yield sgl.OpenAI("some-chat-model", base_url=fake.url + "/v1", api_key="k")
        case "single calls":
            yield MockBackend()
        case _:
            yield ProgramBackend()


def test_a_conversation_goes_on_outside_a_function(backend: Any) -> None:
    with sgl.session(backend, temperature=0, max_tokens=4) as s:
        for i in range(3):
            s += sgl.user(f"Question {i}?")
            s += sgl.assistant(sgl.gen("answer"))
            assert isinstance(s["answer"], str)
            assert s.messages()[-1] == {"role": "assistant", "content": s["answer"].lstrip()}
        roles = [message["role"] for message in s.messages()]
        assert roles[-6:] == ["user", "assistant"] * 3
        branches = s.fork(2)
        branches += sgl.user("And?") + sgl.assistant(sgl.gen("more"))
        branches.join()
        s += sgl.user("The end.")
    assert isinstance(s, sgl.ProgramState)
    assert len(s["more"]) == 2  # readable after the block
    assert s.error() is None
    with pytest.raises(ProgramError, match="the program has ended"):
        s += "more"


@pytest.mark.usefixtures("unhurried")
def test_a_session_gives_what_a_function_gives(engine: sgl.Engine) -> None:
    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s += "Once " + sgl.gen("x", max_tokens=6)
        s += s["x"][:2] + sgl.gen("y", regex="[a-z]{3}")

    expected = program.run(backend=engine, seed=5)
    with sgl.session(engine, seed=5) as s:
        s += "Once " + sgl.gen("x", max_tokens=6)
        s += s["x"][:2] + sgl.gen("y", regex="[a-z]{3}")
    assert s.variables() == expected.variables()
    assert s.usage["requests"] == expected.usage["requests"] == 2


@pytest.mark.usefixtures("unhurried")
def test_what_is_recorded_is_sent_when_it_is_looked_at_and_the_rest_at_the_end() -> None:
    backend = ProgramBackend()
    with sgl.session(backend) as s:
        s += "a" + sgl.gen("x")
        s["x"]
        assert backend.requests == 1
        s += "b"
    s.sync()
    assert backend.requests == 2
    assert backend.sessions[0].segments[-1]["final"]


def test_a_session_streams(backend: Any) -> None:
    if isinstance(backend, ProgramBackend):
        backend = backend.mock
    with sgl.session(backend, stream=True, temperature=0, max_tokens=4) as s:
        for _ in range(2):
            s += sgl.user("Question?") + sgl.assistant(sgl.gen("answer"))
            assert "".join(s.text_iter("answer")) == s["answer"]


def test_asynchronous_sessions_are_awaited(backend: Any) -> None:
    async def talk(question: str) -> str:
        async with sgl.session(backend, temperature=0, max_tokens=4) as s:
            s += sgl.user(question) + sgl.assistant(sgl.gen("answer"))
            first: str = await s["answer"]
            s += sgl.user("And?") + sgl.assistant(sgl.gen("answer"))
        return first + await s["answer"]

    async def main() -> list[str]:
        return await asyncio.gather(*(talk(f"Question {i}?") for i in range(3)))

    assert len(asyncio.run(main())) == 3


def test_a_server_program_ends_with_its_session(server: LiveServer) -> None:
    endpoint = sgl.RuntimeEndpoint(server.url)

    def num_open() -> int:
        return sum(program["is_running"] for program in endpoint.request("/v1/programs"))

    with sgl.session(endpoint) as s:
        s += "a" + sgl.gen("x", max_tokens=2)
        s["x"]
        assert num_open() == 1
    s.sync()
    wait_until(lambda: num_open() == 0)

    def fail() -> None:
        with sgl.session(endpoint) as s:
            s += "a" + sgl.gen("x", max_tokens=2)
            s["x"]
            raise KeyError("a user's own error")

    with pytest.raises(KeyError):
        fail()
    wait_until(lambda: num_open() == 0)
    session = sgl.session(endpoint)
    state: Any = session.__enter__()
    state += "a" + sgl.gen("x", max_tokens=2)
    state["x"]
    assert num_open() == 1
    del state, session  # nobody can go on with it
    gc.collect()
    wait_until(lambda: num_open() == 0)


def test_an_error_in_the_block_gives_the_conversation_up() -> None:
    backend = MockBackend(held=["x"])
    states = []

    def fail() -> None:
        with sgl.session(backend) as s:
            states.append(s)
            s += "a" + sgl.gen("x")
            wait_until(lambda: backend.running == 1)  # sent because the block does nothing more for a while
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    wait_until(lambda: backend.cancelled == 1)
    assert isinstance(states[0].error(), ValueError)


def test_a_failed_gen_is_raised_where_it_is_looked_at() -> None:
    with sgl.session(MockBackend(fail_on=["x"])) as s:
        s += "a" + sgl.gen("x")
        with pytest.raises(ProgramError, match=r"gen 'x'.* failed: the mock was told to fail"):
            s["x"]
        with pytest.raises(ProgramError, match=r"failed"):
            s += "more"
    assert isinstance(s.error(), ProgramError)


def test_tools_and_agents_work_in_a_session() -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    texts = iter(['<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', "five"])
    with sgl.session(MockBackend(lambda *_: next(texts))) as s:
        s += sgl.user("How much is 2 + 3?")
        assert sgl.agent(s, [add]) == "five"
    assert s.messages()[2]["content"] == "5"


def test_wrong_options_are_refused_at_once() -> None:
    for wrong in ({"temprature": 0}, {"use_thread": False}):
        with pytest.raises(TypeError, match="is no option of a session"):
            sgl.session(MockBackend(), **wrong)  # type: ignore[arg-type]
    for value in ({"temperature": -1}, {"sampling": 5}, {"sampling": {"min_p": 2}}):
        with pytest.raises(InvalidRequest):
            sgl.session(MockBackend(), **value)  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="is no backend"), sgl.session("engine"):  # type: ignore[arg-type]
        pass
    session = sgl.session(MockBackend())
    with session, pytest.raises(InvalidRequest, match="under way"), session:
        pass
    with session as s:  # another conversation
        s += "again"
    assert s.text() == "again"


def test_a_session_in_a_body_inherits_from_it() -> None:
    backend = MockBackend()

    @sgl.function
    def outer(s: sgl.ProgramState) -> int:
        with sgl.session() as inner:
            inner += "a" + sgl.gen("x")
            inner["x"]
        return inner.seed

    seeds = [outer.run(backend=backend, seed=3, temperature=0.5).ret_value for _ in range(2)]
    assert seeds[0] == seeds[1] != 3
    assert backend.calls[0][1].sampling["temperature"] == 0.5


class Silent:
    """An HTTP client of a server that has opened a program, and whose event streams time out `times` times."""

    def __init__(self, times: int, first: list[dict[str, Any]]) -> None:
        self.base_url, self.max_retries = "http://silent", 3
        self.times, self.first = times, first
        self.posts: list[Any] = []

    async def sse(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        if method == "POST":
            for number, event in enumerate(self.first, 1):
                yield number, event
        if self.times:
            self.times -= 1
            raise RequestTimeout("the stream is too old", seconds=600)
        yield 10, {"type": "done"}

    async def post(self, path: str, body: Any) -> None:
        self.posts.append(body)

    def tell_delete(self, path: str) -> None:
        """Told when the program is given up."""


@pytest.mark.parametrize(("is_answered", "ends_well"), [(True, True), (False, False)])
def test_a_conversation_may_rest_longer_than_a_connection(
    is_answered: bool, ends_well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl.lang.backends.remote.MAX_PAUSE", 0.001)
    done = {"type": "node_done", "stream": 0, "index": 0, "text": "a", "value": "a", "meta": {}}
    events: list[ir.Event] = []

    async def main() -> None:
        http: Any = Silent(12, [{"type": "opened", "id": "p"}, *([done] if is_answered else [])])
        session = RemoteSession(http, ir.Program("p", 0), events.append, lambda _: None)
        session.send(ir.Segment(((0, ir.Gen("x")),)))
        while not events or not isinstance(events[-1], ir.Done):
            await asyncio.sleep(0.001)

    asyncio.run(main())
    failed = [event.error for event in events if isinstance(event, ir.NodeFailed)]
    assert [isinstance(error, BackendError) for error in failed] == ([] if ends_well else [True])
