"""What a program may hold: whatever makes text of text is charged before it does, in every executor."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from sgl.errors import InvalidRequest, QueueFull, SglError
from sgl.lang.ir import interpreter as nodes
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.check import Checker, program_from_wire
from sgl.lang.ir.interpreter import Quota
from sgl.runtime.engine import Engine
from sgl.runtime.server import programs
from tests.lang_mocks import MockBackend
from tests.live_server import LiveServer
from tests.program_client import SECONDS, Client, assert_idle, gen

BIG = "x" * 4000


def nested_scopes() -> list[dict[str, Any]]:
    """Each scope is written twice within the next: 2^k times 4 kB."""
    nodes: list[dict[str, Any]] = [{"op": "scope_begin", "name": "s"}, {"op": "text", "text": BIG}]
    nodes.append({"op": "scope_end", "name": "s"})
    for _ in range(16):
        last = len(nodes) - 1
        ref = {"op": "ref", "stream": 0, "index": last}
        nodes += [{"op": "scope_begin", "name": "s"}, ref, ref, {"op": "scope_end", "name": "s"}]
    return [{"st": 0, **node} for node in nodes]


def many_refs() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = [{"op": "scope_begin", "name": "s"}, {"op": "text", "text": BIG}]
    nodes.append({"op": "scope_end", "name": "s"})
    nodes += [{"op": "ref", "stream": 0, "index": 2}] * 9000
    return [{"st": 0, **node} for node in nodes]


def deep_scopes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = [{"op": "scope_begin", "name": "s"}] * 4900
    nodes = [*nodes, {"op": "text", "text": BIG * 10}, *[{"op": "scope_end", "name": "s"}] * 4900]
    return [{"st": 0, **node} for node in nodes]


def joins() -> list[dict[str, Any]]:
    """Branches that repeat a text, joined into their parent again and again."""
    nodes: list[dict[str, Any]] = [{"st": 0, "op": "scope_begin", "name": "s"}]
    nodes += [{"st": 0, "op": "text", "text": BIG * 100}, {"st": 0, "op": "scope_end", "name": "s"}]
    for child in range(1, 400):
        nodes += [{"st": 0, "op": "fork", "children": [child]}, {"st": child, "op": "ref", "stream": 0, "index": 2}]
        nodes.append({"st": 0, "op": "join", "children": [child], "mode": "append"})
    return nodes


def arguments() -> list[dict[str, Any]]:
    return [{"st": 0, "op": "arg", "name": "a"}] * 9000


def functions() -> list[dict[str, Any]]:
    """A text that is read again and again, of which nothing stays."""
    nodes: list[dict[str, Any]] = [{"st": 0, "op": "scope_begin", "name": "s"}]
    nodes += [{"st": 0, "op": "text", "text": BIG * 500}, {"st": 0, "op": "scope_end", "name": "s"}]
    ref = {"op": "ref", "stream": 0, "index": 2, "functions": [["lower"]] * 60 + [["slice", 0, 1]]}
    return [*nodes, *[{"st": 0, **ref}] * 500]


LAUGHS = [nested_scopes, many_refs, deep_scopes, joins, arguments, functions]


def segment_of(nodes: list[dict[str, Any]]) -> ir.Segment:
    program = program_from_wire({"v": 1, "name": "p", "seed": 1, "args": {"a": BIG}})
    return Checker(program).segment({"nodes": nodes, "final": True})


def assert_refused(error: Exception | str) -> None:
    assert "the limit is" in str(error)
    assert "characters" in str(error)


@pytest.mark.parametrize("laugh", LAUGHS)
def test_an_engine_refuses_at_the_node_and_goes_on(engine: Engine, laugh: Any) -> None:
    client = Client(engine, args={"a": BIG})
    client.session.send(segment_of(laugh()))
    assert client.is_done.wait(SECONDS)
    failed = client.of(ir.NodeFailed)
    assert isinstance(failed[0].error, InvalidRequest)
    assert failed[0].index is not None
    assert_refused(failed[0].error)
    assert_idle(engine)


def test_it_makes_no_more_than_the_limit(engine: Engine) -> None:
    segment = segment_of(nested_scopes())
    tracemalloc.start()
    try:
        client = Client(engine)
        client.session.send(segment)
        assert client.is_done.wait(SECONDS)
        assert tracemalloc.get_traced_memory()[1] < 4 * ir.MAX_HELD_CHARACTERS
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("laugh", LAUGHS)
def test_an_executor_of_single_calls_refuses_too(laugh: Any) -> None:
    events: list[ir.Event] = []
    session = MockBackend().open(ir.Program("p", 1, args={"a": BIG}), events.append)
    session.send(segment_of(laugh()))
    [failed] = [event for event in events if isinstance(event, ir.NodeFailed)][:1]
    assert isinstance(failed.error, SglError)
    assert_refused(failed.error)


@pytest.mark.parametrize("laugh", [nested_scopes, joins])
def test_over_http_it_is_the_nodes_error(engine: Engine, laugh: Any) -> None:
    server = LiveServer(engine)
    try:
        body = {"program": {"v": 1, "name": "p", "seed": 1}, "segment": {"nodes": laugh(), "final": True}}
        answer = server.post("/v1/programs", body)
        assert answer.status_code == 200
        assert "node_failed" in answer.text
        assert_refused(answer.text)
    finally:
        server.close()


def test_the_count_stops_at_the_limit_and_not_before() -> None:
    quota = Quota()
    quota.charge(ir.MAX_HELD_CHARACTERS)
    with pytest.raises(InvalidRequest, match="limit is 16000000"):
        quota.charge(1)
    quota.charge(ir.MAX_HELD_TOKENS, "tokens")
    with pytest.raises(InvalidRequest, match="tokens"):
        quota.charge(1, "tokens")


def test_programs_hold_so_much_together_and_give_it_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP too, where it is told as a full queue is."""
    monkeypatch.setitem(nodes._MOST_TOGETHER, "characters", 3 * len(BIG))
    holding = Client(engine)
    holding.send(ir.Text("a"), gen("x"), ir.Text(BIG * 2))
    holding.wait(ir.NodeDone)
    other = Client(engine)
    other.send(ir.Text(BIG), final=True)
    assert isinstance(other.error(), QueueFull)
    server = LiveServer(engine)
    texts = [{"st": 0, "op": "text", "text": BIG}]
    body = {"program": {"v": 1, "name": "p", "seed": 1}, "segment": {"nodes": texts, "final": True}}
    try:
        assert "queue_full" in server.post("/v1/programs", body).text
        holding.session.cancel()
        assert holding.is_done.wait(SECONDS)
        assert "node_failed" not in server.post("/v1/programs", body).text
    finally:
        server.close()
    for _ in range(10):
        again = Client(engine)
        again.send(ir.Text(BIG * 2), final=True)
        assert again.is_done.wait(SECONDS)
        assert not again.of(ir.NodeFailed)
    assert_idle(engine)


def test_tokens_of_all_programs_are_bounded_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.tokenizer is not None
    text = "the cat sat on the mat. " * 4
    monkeypatch.setitem(nodes._MOST_TOGETHER, "tokens", len(engine.tokenizer.encode(text)) * 3 // 2)
    holding = Client(engine)
    holding.send(ir.Text(text), gen("x"))
    holding.wait(ir.NodeDone)
    other = Client(engine)
    other.send(ir.Text(text), gen("x"), final=True)
    assert isinstance(other.error(), QueueFull)
    holding.session.cancel()
    assert holding.is_done.wait(SECONDS)
    assert_idle(engine)


def test_timelines_of_large_programs_are_not_all_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "RECENT_CHARACTERS", 3 * len(BIG))
    server = LiveServer(engine)
    body = {"program": {"v": 1, "name": "p", "seed": 1}}
    try:
        for number in range(10):
            texts = [{"st": 0, "op": "text", "text": f"{BIG}{number}"}]
            assert (
                server.post("/v1/programs", {**body, "segment": {"nodes": texts, "final": True}}).status_code == 200
            )
        assert 1 <= len(server.get("/v1/programs").json()) <= 3
    finally:
        server.close()


def test_the_timeline_of_a_large_program_is_read_beside_the_event_loop(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LiveServer(engine)
    loads, threads = json.loads, set[str]()

    def loaded(data: Any) -> Any:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        return loads(data)

    try:
        texts = [{"st": 0, "op": "text", "text": BIG * 20}]
        body = {"program": {"v": 1, "name": "p", "seed": 1}, "segment": {"nodes": texts, "final": True}}
        assert server.post("/v1/programs", body).status_code == 200
        [listed] = server.get("/v1/programs").json()
        monkeypatch.setattr(programs, "json", SimpleNamespace(loads=loaded))
        for view in ("timeline", "view"):
            assert server.get(f"/v1/programs/{listed['id']}/{view}").status_code == 200
        assert threads == {"sgl-results"}
    finally:
        server.close()


def test_what_open_programs_hold_together_is_bounded_in_the_server_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither programs nor segments are taken then; what is open goes on, and ending it makes room."""
    monkeypatch.setattr(programs, "MAX_HELD", 3 * len(BIG))
    server = LiveServer(engine)
    program = {"v": 1, "name": "p", "seed": 1}

    def texts(number: int) -> dict[str, Any]:
        return {"nodes": [{"st": 0, "op": "text", "text": f"{BIG}{number}"}]}

    def opened() -> tuple[Iterator[bytes], str]:
        answer = server.post("/v1/programs", {"program": program, "segment": texts(0)}, stream=True)
        assert answer.status_code == 200, answer.text
        lines = answer.iter_lines()
        return lines, json.loads(next(line for line in lines if b"opened" in line).partition(b"data: ")[2])["id"]

    def delete(identity: str) -> int:
        return requests.delete(f"{server.url}/v1/programs/{identity}", timeout=SECONDS).status_code

    try:
        (_, one), (events, other) = opened(), opened()
        assert server.post(f"/v1/programs/{one}/segments", {"segment": texts(1)}).status_code == 200
        refused = [
            server.post("/v1/programs", {"program": program, "segment": texts(2)}),
            server.post(f"/v1/programs/{other}/segments", {"segment": texts(2)}),
        ]
        assert [answer.status_code for answer in refused] == [429, 429]
        assert all("hold more than" in answer.json()["error"]["message"] for answer in refused)
        assert delete(one) == 200
        assert server.post(f"/v1/programs/{other}/segments", {"segment": {**texts(3), "final": True}}).ok
        assert any(b'"type":"done"' in line.replace(b" ", b"") for line in events)
        delete(other)
        _, last = opened()
        assert delete(last) == 200
    finally:
        server.close()


def test_branches_of_branches_of_a_failed_stream_fail_however_deep(engine: Engine) -> None:
    """No stack of calls is as deep as they are."""
    client = Client(engine)
    chain: list[Any] = [(depth, ir.Fork((depth + 1,))) for depth in range(3000)]
    client.send(ir.Text("x"), ir.Gen("bad", constraint={"regex": "("}), *chain, final=True)
    assert client.is_done.wait(SECONDS)
    assert len(client.of(ir.NodeFailed)) == 1


def test_a_split_makes_no_millions_of_parts() -> None:
    with pytest.raises(InvalidRequest, match="parts"):
        ir.apply_functions("a " * 2_000_000, [("split", " ", -1)])
    with pytest.raises(InvalidRequest, match="parts"):
        ir.apply_functions("a " * 2_000_000, [("split", None, 0)])
    with pytest.raises(InvalidRequest, match="separator"):
        ir.apply_functions("abc", [("split", "", 0)])
    assert ir.apply_functions("a,b,c", [("split", ",", -1)]) == "c"
