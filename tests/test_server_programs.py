"""Whole programs over HTTP: one round trip, several segments, rows, connections that break, clients that go away."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests

import sgl
from sgl.errors import ContextTooLong, ProgramError
from sgl.lang.ir import nodes as ir
from sgl.runtime.engine import Engine
from sgl.runtime.server import programs as programs_module
from sgl.runtime.server.program_pages import Pages
from tests.live_server import LiveServer, state_of
from tests.patience import PATIENCE, wait_until

PROGRAM = {"v": 1, "name": "p", "seed": 1, "defaults": {"temperature": 0.0, "ignore_eos": True}}
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def nothing_leaks(engine: Engine) -> Iterator[None]:
    """After every test no request runs, no page is leased, and each has its owner."""
    yield
    wait_until(lambda: not state_of(engine)["num_running_reqs"], "a program goes on for nobody")
    assert engine.check_ledger() == []


def text(content: str, stream: int = 0) -> dict[str, Any]:
    return {"st": stream, "op": "text", "text": content}


def gen(name: str, max_tokens: int = 5, **params: Any) -> dict[str, Any]:
    return {"st": 0, "op": "gen", "name": name, "params": {"max_tokens": max_tokens, **params}}


def tokens(engine: Engine, content: str) -> list[int]:
    """With BOS."""
    assert engine.tokenizer is not None
    ids: list[int] = engine.tokenizer.encode(content).tolist()
    return ids


class Events:
    """The events of a program, read one by one from an open connection."""

    def __init__(self, answer: requests.Response) -> None:
        assert answer.status_code == 200, answer.text
        self.answer = answer
        self.numbers: list[int] = []
        self._lines = answer.iter_lines()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._lines:
            if line.startswith(b"id: "):
                self.numbers.append(int(line[4:]))
            elif line.startswith(b"data: "):
                yield json.loads(line[6:])

    def next(self, kind: str | None = None) -> dict[str, Any]:
        """The next event, which must be of that type."""
        event = next(iter(self))
        assert kind in (None, event["type"]), event
        return event


def open_program(server: LiveServer, segment: Any = None, **more: Any) -> Events:
    program = {**PROGRAM, **more.pop("program", {})}
    body = {"program": program, **more, **({} if segment is None else {"segment": segment})}
    return Events(server.post("/v1/programs", body, stream=True))


def test_a_program_of_one_segment_takes_one_round_trip(server: LiveServer, engine: Engine) -> None:
    events = list(open_program(server, {"nodes": [text("hello"), gen("x")], "final": True}))
    assert [event["type"] for event in events] == ["opened", "node_done", "done"]
    expected = engine.generate("hello", {**GREEDY, "max_new_tokens": 5})["text"]
    assert (events[1]["stream"], events[1]["index"]) == (0, 1)
    assert events[1]["text"] == events[1]["value"] == expected
    assert events[1]["meta"]["completion_tokens"] == 5


def test_deltas_come_in_stream_mode_and_join_to_the_text(server: LiveServer) -> None:
    events = list(
        open_program(server, {"nodes": [text("hello"), gen("x", 12)], "final": True}, program={"stream": True})
    )
    deltas = [event for event in events if event["type"] == "delta"]
    assert len(deltas) > 3
    assert "".join(delta["text"] for delta in deltas) == events[-2]["text"]


def test_later_segments_go_on_where_the_program_stands(server: LiveServer, engine: Engine) -> None:
    events = open_program(server, {"nodes": [text("hello"), gen("x")]})
    program = events.next("opened")["id"]
    events.next("node_done")
    segment = {"nodes": [text(" and "), gen("y")], "final": True}
    assert server.post(f"/v1/programs/{program}/segments", {"segment": segment}).status_code == 200
    second = events.next("node_done")
    params = {**GREEDY, "max_new_tokens": 5}
    ids = [*tokens(engine, "hello"), *engine.generate("hello", params)["output_ids"], *tokens(engine, " and ")[1:]]
    expected = engine.generate(input_ids=ids, sampling_params=params)["text"]
    assert (second["index"], second["text"]) == (3, expected)
    assert events.next("done")
    assert list(events) == []
    assert events.numbers == [1, 2, 3, 4]


def test_a_program_may_begin_without_a_segment(server: LiveServer) -> None:
    events = open_program(server)
    program = events.next("opened")["id"]
    assert server.post(f"/v1/programs/{program}/segments", {"segment": {"nodes": [], "final": True}}).ok
    assert events.next("done")


def test_rows_share_a_skeleton_and_keep_apart(server: LiveServer, engine: Engine) -> None:
    rows = [{"args": {"word": word}, "seed": i} for i, word in enumerate(("one", "two", "three"))]
    segment = {"nodes": [text("say "), {"st": 0, "op": "arg", "name": "word"}, gen("x")], "final": True}
    events = list(open_program(server, segment, rows=rows))
    texts = {event["row"]: event["text"] for event in events if event["type"] == "node_done"}
    for i, word in enumerate(("one", "two", "three")):
        assert texts[i] == engine.generate(f"say {word}", {**GREEDY, "max_new_tokens": 5})["text"]
    assert sorted(event["row"] for event in events if event["type"] == "done") == [0, 1, 2]


def test_rows_of_a_batch_begin_in_turns(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more at once than there is room for, so that others' requests come in between; all of them end."""
    monkeypatch.setattr(programs_module, "_ROWS_AT_ONCE", 3)
    monkeypatch.setattr(programs_module, "_ROWS_IN_TURN", 2)
    opened, running, counts = server.service.engine.open_program, set[int](), list[int]()

    def counted(program: Any, sink: Any) -> Any:
        number = len(counts)
        running.add(number)
        counts.append(len(running))

        def told(event: Any) -> None:
            if isinstance(event, ir.Done):
                running.discard(number)
            sink(event)

        return opened(program, told)

    monkeypatch.setattr(server.service.engine, "open_program", counted)
    rows = [{"seed": i} for i in range(20)]
    events = list(open_program(server, {"nodes": [text("say "), gen("x", 2)], "final": True}, rows=rows))
    assert sorted(event["row"] for event in events if event["type"] == "done") == list(range(20))
    assert sorted(event["row"] for event in events if event["type"] == "node_done") == list(range(20))
    assert 1 < max(counts) <= 3


def test_a_broken_connection_resumes_after_the_last_event(server: LiveServer) -> None:
    segment = {"nodes": [text("hello"), gen("x", 60)], "final": True}
    whole = list(open_program(server, segment, program={"stream": True}))
    events = open_program(server, segment, program={"stream": True})
    seen = [events.next() for _ in range(4)]
    events.answer.close()
    program = seen[0]["id"]
    headers = {"Last-Event-ID": "4"}
    rest = Events(server.get(f"/v1/programs/{program}/events", headers=headers, stream=True))
    seen += list(rest)
    assert rest.numbers == list(range(5, len(seen) + 1))
    assert [event["type"] for event in seen[-2:]] == ["node_done", "done"]
    assert (
        "".join(event["text"] for event in seen if event["type"] == "delta")
        == seen[-2]["text"]
        == whole[-2]["text"]
    )
    again = Events(server.get(f"/v1/programs/{program}/events", stream=True))
    assert [event["type"] for event in again] == [event["type"] for event in seen], (
        "from the beginning, as often as wanted"
    )


def test_a_program_that_nobody_listens_to_is_cancelled(server: LiveServer, engine: Engine) -> None:
    program = {"lease_s": 0.1}
    events = open_program(server, {"nodes": [text("hello"), gen("x", 400)]}, program=program)
    identity = events.next("opened")["id"]
    events.answer.close()
    wait_until(
        lambda: server.post(f"/v1/programs/{identity}/segments", {"segment": {"nodes": []}}).status_code == 404
    )


@pytest.mark.parametrize("deadline_s", [None, 600.0])
def test_a_request_that_is_due_ends_its_program_and_the_events(
    server: LiveServer, deadline_s: float | None
) -> None:
    body = {"program": {**PROGRAM, "deadline_s": deadline_s}, "segment": {"nodes": [text("hello"), gen("x")]}}
    for seconds in (0.3, 1, 3, 9):  # until it is opened in time
        headers = {"X-Sgl-Deadline-S": str(seconds)}
        answer = requests.post(f"{server.url}/v1/programs", json=body, headers=headers, timeout=PATIENCE)
        if answer.status_code == 200:
            break
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events[-2:]] == ["node_failed", "done"]
    assert events[-2]["error"]["class"] == "RequestTimeout"


def test_the_time_that_pages_took_is_part_of_a_programs(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, left = 0.0, list[float | None]()
    start = programs_module._Program.start

    async def pull(*given: Any) -> None:
        nonlocal now
        now += 400

    def noted(self: Any, opened: Any, segment: Any) -> None:
        left.extend(each.deadline_s for each in opened)
        start(self, opened, segment)

    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr(programs_module, "time", clock)
    monkeypatch.setattr(Pages, "pull", pull)
    monkeypatch.setattr(programs_module._Program, "start", noted)
    segment = {"nodes": [text("hello")], "final": True}
    for deadline_s in (600.0, 300.0, None):
        more = {"program": {"deadline_s": deadline_s}, "kv_transfer_params": [None]}
        list(open_program(server, segment, **more))
    assert left == [200.0, 0.0, None]


def test_delete_cancels_and_ends_the_events(server: LiveServer) -> None:
    events = open_program(server, {"nodes": [text("hello"), gen("x", 400)]}, program={"stream": True})
    identity = events.next("opened")["id"]
    events.next("delta")
    assert requests.delete(f"{server.url}/v1/programs/{identity}", timeout=PATIENCE).status_code == 200
    assert all(event["type"] == "delta" for event in events)
    assert requests.delete(f"{server.url}/v1/programs/{identity}", timeout=PATIENCE).status_code == 404
    assert server.post(f"/v1/programs/{identity}/segments", {"segment": {"nodes": []}}).status_code == 404


def test_failures_name_their_node(server: LiveServer) -> None:
    nodes = [text("x" * 600), gen("x")]
    *_, failed, done = list(open_program(server, {"nodes": nodes, "final": True}))
    assert (failed["type"], failed["stream"], failed["index"]) == ("node_failed", 0, 1)
    assert failed["error"]["class"] == "ContextTooLong"
    assert done["type"] == "done"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "program"),
        ({"program": {"v": 2, "name": "x", "seed": 1}}, "version"),
        ({"program": {**PROGRAM, "nam": "x"}}, "nam"),
        ({"program": PROGRAM, "segment": {"nodes": [{"op": "gne", "st": 0}]}}, "gne"),
        ({"program": PROGRAM, "segment": {"nodes": [text("x", stream=3)]}}, "stream 3"),
        ({"program": PROGRAM, "segment": {"nodes": [{"st": 0, "op": "arg", "name": "a"}]}}, "argument 'a'"),
        ({"program": PROGRAM, "rows": [{}]}, "final"),
        ({"program": {**PROGRAM, "chat_template": "{% for i in range(9) %}{% endfor %}"}}, "code"),
        ({"program": PROGRAM, "segment": {"nodes": [], "final": True}, "rows": []}, "rows"),
        ({"program": PROGRAM, "sgement": {}}, "did you mean 'segment'"),
    ],
)
def test_bad_programs_are_refused_before_anything_runs(server: LiveServer, body: Any, words: str) -> None:
    answer = server.post("/v1/programs", body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_programs_have_a_limit(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs_module, "MAX_PROGRAMS", 0)
    assert server.post("/v1/programs", {"program": PROGRAM}).status_code == 429


# ── the language's own client ───────────────────────────────────────────────────────────────────────────────────────


@sgl.function
def story(s: Any, word: str) -> None:
    s += "the " + word + sgl.gen("first", max_tokens=40)
    branches = s.fork(2)
    for branch in branches:
        branch += " it " + sgl.gen("part", max_tokens=4)
    s += branches[0]["part"] + sgl.select("end", ["yes", "no"]) + sgl.gen("last", max_tokens=4)


class Cutter:
    """A proxy whose connections to the server break after so many bytes of an answer."""

    def __init__(self, url: str, after: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._target, self._after, self.num_cut = (host, int(port)), after, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                server = socket.create_connection(self._target)
                threading.Thread(target=self._pump, args=(client, server, None), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, self._after), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, left: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(512):
                sink.sendall(data)
                if left is not None and (left := left - len(data)) < 0:
                    self.num_cut += 1
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def test_programs_of_the_language_are_shipped_whole(server: LiveServer, engine: Engine) -> None:
    def num_posts() -> int:
        return sum(
            count for (path, _), count in server.service.metrics.responses.items() if path != "/get_model_info"
        )

    expected = story.run("cat", backend=engine, seed=3, **GREEDY).text()
    backend = sgl.RuntimeEndpoint(server.url)
    before = num_posts()
    state = story.run("cat", backend=backend, seed=3, **GREEDY)
    assert state.text() == expected
    assert num_posts() - before <= 3, "a request for each time that the body looked at a value, and no more"


@pytest.mark.parametrize("stream", [False, True])
def test_programs_survive_connections_that_break(server: LiveServer, stream: bool) -> None:
    whole = story.run("dog", backend=sgl.RuntimeEndpoint(server.url), seed=3, **GREEDY).text()
    cutter = Cutter(server.url, 2500)
    try:
        backend = sgl.RuntimeEndpoint(cutter.url, max_retries=20)
        state = story.run("dog", backend=backend, seed=3, stream=stream, **GREEDY)
        if stream:
            assert "".join(state.text_iter()) == whole
        assert state.text() == whole
        assert cutter.num_cut > stream, "some were cut in the middle"
    finally:
        backend.shutdown()
        cutter.close()


def test_templates_that_the_server_does_not_know_are_rendered_by_the_client(server: LiveServer) -> None:
    @sgl.function
    def chat(s: Any) -> None:
        s += sgl.user("hi") + sgl.assistant(sgl.gen("x", max_tokens=3))

    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    source += "{% if add_generation_prompt %}<assistant>{% endif %}"
    for template, begin in (
        (source, "<user>hi</>"),
        ("chatml", "<|im_start|>"),
        (None, "<s>[user]hi\n[assistant]"),
    ):
        backend = sgl.RuntimeEndpoint(server.url, chat_template_name=template)
        assert begin in chat.run(backend=backend).text()


def test_errors_of_a_program_keep_their_class_on_the_way(server: LiveServer) -> None:
    @sgl.function
    def too_long(s: Any) -> None:
        s += "x" * 600 + sgl.gen("y")

    state = too_long.run(backend=sgl.RuntimeEndpoint(server.url))
    with pytest.raises(ProgramError, match="601 tokens") as raised:
        state["y"]
    assert isinstance(raised.value.__cause__, ContextTooLong)
    assert raised.value.__cause__.limit == 512
