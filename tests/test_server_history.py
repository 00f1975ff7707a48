"""What the server remembers of what it did: its numbers, and requests of the keys that may see them."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from sgl.runtime.engine import Engine
from sgl.runtime.server.history import ENDED, SAMPLES, History, Note, note
from sgl.runtime.server.identity import Caller
from tests.live_server import LiveServer, served
from tests.patience import PATIENCE, wait_until

BODY = {"text": "hello", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
ALICE, BOB, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("k-alice", "k-bob", "k-admin"))


@pytest.fixture
def server(engine: Engine) -> Iterator[LiveServer]:
    with served(engine) as server:
        yield server


def test_requests_are_listed_with_what_they_cost_and_without_texts(server: LiveServer) -> None:
    server.post("/generate", {**BODY, "text": ["hello", "secret words"]})
    chat = {"messages": [{"role": "user", "content": "secret words"}], "max_tokens": 4, "ignore_eos": True}
    server.post("/v1/chat/completions", {**chat, "stream": True})
    server.post("/v1/embeddings", {"input": "secret words"})
    server.post("/tokenize", {"text": "secret words"})  # generates nothing
    server.post("/generate", {"text": "a", "sampling_params": {"top_p": 7}})
    refused, embedded, chatted, generated = server.get("/v1/requests").json()
    assert (generated["path"], generated["outputs"], generated["completion_tokens"]) == ("/generate", 2, 16)
    assert (chatted["path"], chatted["completion_tokens"], chatted["status"]) == ("/v1/chat/completions", 4, 200)
    assert (embedded["path"], embedded["completion_tokens"]) == ("/v1/embeddings", 0)
    assert (refused["status"], refused["outputs"]) == (400, 0)
    assert generated["prompt_tokens"] > 0
    assert "secret" not in server.get("/v1/requests").text


@pytest.mark.usefixtures("slowly")
def test_what_goes_on_comes_first(server: LiveServer) -> None:
    server.post("/generate", BODY)
    long = {"text": "hello", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    thread = threading.Thread(target=server.post, args=("/generate", long))
    thread.start()

    def first() -> Any:
        return (server.get("/v1/requests").json() or [{"status": 0}])[0]

    wait_until(lambda: first()["status"] is None, "the request goes on")
    thread.join()
    wait_until(lambda: first()["completion_tokens"] == 400, "it has ended")


def test_programs_are_requests_with_the_tokens_of_their_nodes(server: LiveServer) -> None:
    nodes = [
        {"st": 0, "op": "text", "text": "Hello"},
        {"st": 0, "op": "gen", "name": "x", "params": {"max_tokens": 8, "ignore_eos": True}},
    ]
    server.post(
        "/v1/programs", {"program": {"v": 1, "name": "p", "seed": 1}, "segment": {"nodes": nodes, "final": True}}
    )
    [found] = server.get("/v1/requests").json()
    assert (found["path"], found["completion_tokens"], found["outputs"]) == ("/v1/programs", 8, 1)


def test_keys_see_their_own_requests(engine: Engine) -> None:
    keys = {"api_key": ("alice=k-alice", "bob=k-bob"), "admin_api_key": "k-admin"}
    with served(engine, **keys) as server:
        server.post("/generate", BODY, headers=ALICE)
        assert server.get("/v1/requests").status_code == 401
        counts = [len(server.get("/v1/requests", headers=each).json()) for each in (ALICE, BOB, ADMIN)]
        assert counts == [1, 0, 1]


def test_samples_come_by_themselves(server: LiveServer) -> None:
    server.post("/generate", BODY)

    def samples() -> Any:
        return [each["engine"] for each in server.get("/v1/history").json()["samples"]]

    wait_until(lambda: len(samples()) >= 2, "samples are taken")
    assert samples()[-1]["generated_tokens"] >= 8
    assert len(samples()) <= SAMPLES


def test_what_is_remembered_is_bounded() -> None:
    history = History()
    for i in range(3 * ENDED):
        note.set(Note(str(i), "/generate", None if i else "quiet", float(i)))
        history.generates()
        history.generates()  # a call of several
        current = note.get()
        assert current is not None
        history.ended(current, 200)
    quiet = Caller("quiet", is_admin=False)
    assert [each["id"] for each in history.requests(quiet)] == ["0"], "others push nothing out"
    assert [each["id"] for each in history.requests(Caller())] == [str(3 * ENDED - 1 - i) for i in range(ENDED)]


def test_the_samples_end_with_the_server_whatever_they_wait_for() -> None:
    """Python 3.11's `wait_for` swallows a cancellation that comes while its future is done."""

    async def ends_after(turns: int) -> None:
        async def state() -> Any:
            return defaultdict(int)

        async with History().sampling(state):
            for _ in range(turns):
                await asyncio.sleep(0)

    async def all_end() -> None:
        tasks = [asyncio.ensure_future(ends_after(turns)) for turns in range(8)]
        _, open_ = await asyncio.wait(tasks, timeout=PATIENCE)
        assert not open_

    asyncio.run(all_end())
