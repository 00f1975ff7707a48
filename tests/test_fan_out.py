"""What one call may ask for, and that long groups of requests are taken in and ended in slices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import sgl
from sgl.errors import InvalidRequest, QueueFull, RequestAborted
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.check import Checker, Limits, program_from_wire
from sgl.runtime.engine import Engine
from sgl.runtime.loop import loop as loop_module
from sgl.runtime.loop.time_slicer import TimeSlicer
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint
from tests.program_client import SECONDS, Client, assert_idle, gen
from tests.test_loop import Harness

PROGRAM = {"v": 1, "name": "p", "seed": 1}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = str(chat_checkpoint(tmp_path_factory.mktemp("model")))
    with Engine(path, **OPTIONS, max_requests_per_call=300, max_running_requests=4) as engine:
        yield engine


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": ["a"] * 301},
        {"prompt": ["a"] * 4, "sampling_params": {"n": 100}},
        {"prompt": "a", "sampling_params": {"n": 301}},
        {"prompt": ["a", "b"], "sampling_params": [{"n": 300}, {"n": 1}]},
        {"input_ids": [[1]] * 10, "sampling_params": {"n": 31}},
    ],
)
def test_a_call_is_refused_before_it_is_expanded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    made = []
    monkeypatch.setattr(engine._builder, "submissions", lambda *a, **o: made.append(a))
    for stream in (False, True):
        with pytest.raises(InvalidRequest, match="max_requests_per_call is 300"):
            engine.generate(**arguments, stream=stream)
    assert not made


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ["a"] * 200, "sampling_params": {"n": 2}}),
        ("/generate", {"text": ["a"] * 200, "sampling_params": {"n": 2}, "stream": True}),
        ("/v1/completions", {"prompt": ["a"] * 301}),
        ("/v1/completions", {"prompt": ["a"] * 101, "n": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 301}),
    ],
)
def test_over_http_it_is_a_400_that_names_the_limit(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert "max_requests_per_call is 300" in answer.text or "128" in answer.text


def test_as_many_as_are_allowed_are_answered(engine: Engine) -> None:
    assert len(engine.generate(["a"] * 100, {"n": 3, "max_new_tokens": 1})) == 300


def test_a_call_that_could_never_wait_is_refused_whole(tmp_path: Any) -> None:
    with Engine(str(chat_checkpoint(tmp_path)), **OPTIONS, max_queued_requests=20) as small:
        with pytest.raises(QueueFull, match="max_queued_requests is 20"):
            small.generate(["a"] * 7, {"n": 3})
        assert len(small.generate(["a"] * 10, {"n": 2, "max_new_tokens": 1})) == 20


def nodes(children: int, **fields: Any) -> list[dict[str, Any]]:
    inner = [{"st": child, **fields} for child in range(1, children + 1)]
    return [
        {"st": 0, "op": "text", "text": "x"},
        {"st": 0, "op": "fork", "children": [*range(1, children + 1)]},
        *inner,
    ]


@pytest.mark.parametrize(
    ("rows", "children", "fields", "fits"),
    [
        (1, 10, {"op": "gen", "params": {"n": 10}}, True),
        (1, 11, {"op": "gen", "params": {"n": 10}}, False),
        (1, 50, {"op": "gen"}, True),
        (1, 51, {"op": "gen"}, False),  # the program's own n is 2
        (1, 10, {"op": "select", "name": "s", "choices": list("abcdefghij")}, True),
        (1, 11, {"op": "select", "name": "s", "choices": list("abcdefghij")}, False),
        (10, 10, {"op": "gen", "params": {"n": 1}}, True),
        (11, 10, {"op": "gen", "params": {"n": 1}}, False),
    ],
)
def test_a_program_asks_for_so_much_at_once(rows: int, children: int, fields: dict[str, Any], fits: bool) -> None:
    program = program_from_wire({**PROGRAM, "defaults": {"n": 2}})
    checker = Checker(program, Limits(requests=100), rows=rows)
    segment = {"nodes": nodes(children, **fields), "final": True}
    if fits:
        checker.segment(segment)
    else:
        with pytest.raises(InvalidRequest, match=r"nodes\[\d+\]: \d+ requests .* limit is 100"):
            checker.segment(segment)


def test_gens_that_wait_for_each_other_count_once() -> None:
    checker = Checker(program_from_wire(PROGRAM), Limits(requests=100))
    for _ in range(5):
        checker.segment({"nodes": [{"st": 0, "op": "gen", "params": {"n": 100}}] * 5})


def test_rows_times_nodes_are_bounded() -> None:
    checker = Checker(program_from_wire(PROGRAM), Limits(nodes_of_rows=1000), rows=100)
    checker.segment({"nodes": [{"st": 0, "op": "text", "text": "x"}] * 10})
    with pytest.raises(InvalidRequest, match=r"rows x nodes.* limit is 1000"):
        checker.segment({"nodes": [{"st": 0, "op": "text", "text": "x"}]})


def test_a_program_over_http_and_in_process_is_held_to_the_engines_limit(
    engine: Engine, server: LiveServer
) -> None:
    client = Client(engine)
    with pytest.raises(InvalidRequest, match="limit is 300"):
        client.send(ir.Text("x"), ir.Fork((1, 2)), (1, gen(n=200)), (2, gen(n=200)))
    client.session.cancel()
    assert client.is_done.wait(SECONDS)
    body = {"program": PROGRAM, "segment": {"nodes": nodes(4, op="gen", params={"n": 80}), "final": True}}
    assert "limit is 300" in server.post("/v1/programs", body).json()["error"]["message"]
    rows = {**body, "segment": {"nodes": nodes(1, op="gen"), "final": True}, "rows": [{}] * 301}
    assert "limit is 300" in server.post("/v1/programs", rows).json()["error"]["message"]
    assert_idle(engine)


def test_many_samples_of_one_gen_go_the_same_way_as_few(engine: Engine) -> None:
    @sgl.function
    def program(s: Any, n: int) -> None:
        s += "Hello" + sgl.gen("x", max_tokens=3, n=n)

    few = program.run(n=3, backend=engine, seed=5)["x"]
    many = program.run(n=40, backend=engine, seed=5)["x"]
    assert many[:3] == few


# ── slices ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_slices_take_turns_and_one_is_done_at_once() -> None:
    log: list[str] = []

    def work(name: str, number: int) -> Iterator[None]:
        for i in range(number):
            log.append(f"{name}{i}")
            if i < number - 1:
                yield

    slicer = TimeSlicer()
    slicer.start(work("a", 3))
    slicer.start(work("b", 1))
    slicer.start(work("c", 2))
    assert log == ["a0", "b0", "c0"]
    assert slicer
    slicer.run_for(0.0)
    assert log[3:] == ["a1"]
    slicer.run_for(60.0)
    assert log[4:] == ["c1", "a2"]
    assert not slicer


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.loop.stop()


def test_one_request_is_taken_in_before_the_rest_of_a_long_group(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is a control: neither waits for a thousand others."""
    monkeypatch.setattr(loop_module, "_SLICE_SECONDS", 0.0)  # one slice a step
    group = [harness.submission([1, 2, k % 90], 2) for k in range(2000)]
    one = harness.submission([7, 7], 2)
    seen: list[tuple[int, bool]] = []
    gate = threading.Event()
    harness.loop.post(lambda: gate.wait(SECONDS) and None)
    harness.loop.submit(group)
    harness.loop.submit([one])
    harness.loop.post(lambda: seen.append((sum(each.has_entered for each in group), one.has_entered)))
    gate.set()
    outputs = harness.collect(2001)
    assert len(outputs) == 2001
    [(entered, one_has)] = seen
    assert one_has
    assert entered < 500


def test_a_group_that_is_given_up_on_its_way_ends_whole_and_then_says_so(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_SLICE_SECONDS", 0.0)
    group = [harness.submission([1, 2, k % 90], 200) for k in range(1000)]
    others = [harness.submission([5, k], 3) for k in range(5)]
    harness.loop.submit(group)
    harness.loop.submit(others)
    harness.loop.abort_and_wait([each.request.uid for each in group])
    assert all(each.request.is_done for each in group)
    outputs = harness.collect(1005)
    for each in group:
        reason = outputs[each.request.uid][-1].finish_reason
        assert reason is not None
        assert isinstance(reason.error, RequestAborted)
    for each in others:
        reason = outputs[each.request.uid][-1].finish_reason
        assert reason is not None
        assert reason.type in ("stop", "length")
    assert not harness.loop._live
    assert harness.loop._num_streamed == harness.loop._num_constrained == 0
    assert not len(harness.scheduler.queue)


def test_an_engine_that_stops_amid_a_long_group_answers_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_SLICE_SECONDS", 0.0)
    harness = Harness()
    group = [harness.submission([1, 2, k % 90], 200) for k in range(1000)]
    said = threading.Event()
    harness.loop.submit(group)
    harness.loop.abort([each.request.uid for each in group[500:]], said.set)
    harness.loop.stop()
    assert said.is_set()
    assert len(harness.collect(1000)) == 1000
