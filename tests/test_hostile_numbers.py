"""Numbers that are none, or have no end: each is refused where it comes in, and nobody else notices."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import requests
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

import sgl
from sgl.bench.report import bounds_of
from sgl.errors import ConfigError, InvalidRequest, RequestTimeout
from sgl.lang.backends.http import MAX_DELAY, HttpClient, _status_error, retry_delay
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.check import Checker, program_from_wire
from sgl.lang.ir.sampling import MAX_SECONDS
from sgl.numerals import decimal, port, whole
from sgl.runtime.config import EngineConfig, ServerConfig
from sgl.runtime.engine import Engine
from sgl.runtime.loop.timers import Timers
from sgl.runtime.server.deadline import header_seconds
from tests.live_server import LiveServer
from tests.patience import PATIENCE
from tests.program_client import SECONDS, Client, assert_idle

NONE = [math.nan, math.inf, -math.inf, 10**400, -(10**400), 10**5000]
PROGRAM = {"v": 1, "name": "p", "seed": 1}


@pytest.mark.parametrize("when", [math.nan, math.inf, -math.inf])
def test_no_timer_is_set_for_what_is_no_time(when: float) -> None:
    timers, done = Timers(), list[int]()
    with pytest.raises(ValueError, match="finite"):
        timers.call_at(when, lambda: done.append(0))
    timers.call_at(0.0, lambda: done.append(1))
    timers.run_due()
    assert done == [1]


@pytest.mark.parametrize("number", NONE, ids=range(len(NONE)))
@pytest.mark.parametrize("field", ["lease_s", "deadline_s", "seed", "speculate_tokens"])
def test_a_program_holds_no_such_number(field: str, number: float) -> None:
    with pytest.raises(InvalidRequest):
        program_from_wire({**PROGRAM, field: number})


@pytest.mark.parametrize("field", ["lease_s", "deadline_s"])
def test_the_times_of_a_program_have_a_maximum_that_the_message_names(field: str) -> None:
    most = ir.MAX_LEASE_S if field == "lease_s" else MAX_SECONDS
    assert program_from_wire({**PROGRAM, field: most})
    with pytest.raises(InvalidRequest, match=str(most)):
        program_from_wire({**PROGRAM, field: 2 * most})


@pytest.mark.parametrize("number", NONE, ids=range(len(NONE)))
@pytest.mark.parametrize(
    "node",
    [
        lambda x: {"op": "gen", "params": {"temperature": x}},
        lambda x: {"op": "gen", "params": {"timeout": x}},
        lambda x: {"op": "gen", "params": {"priority": x}},
        lambda x: {"op": "ref", "stream": 0, "index": 0, "functions": [["slice", x, None]]},
        lambda x: {"op": "fork", "children": [x]},
        lambda x: {"op": "tool_results", "index": x},
    ],
)
def test_nor_does_any_of_its_nodes(node: Any, number: float) -> None:
    checker = Checker(program_from_wire(PROGRAM))
    with pytest.raises(InvalidRequest):
        checker.segment({"nodes": [{"st": 0, **node(number)}]})


@pytest.mark.parametrize("where", ["extra", "constraint", "tools"])
def test_nor_does_what_it_only_passes_on(where: str) -> None:
    gen: dict[str, Any] = {"st": 0, "op": "gen"}
    inner = {"deep": [{"x": math.inf}]}
    gen |= {
        "extra": {"params": {"extra": inner}},
        "constraint": {"constraint": {"json": inner}},
        "tools": {"tools": [inner]},
    }[where]
    with pytest.raises(InvalidRequest, match="finite"):
        Checker(program_from_wire(PROGRAM)).segment({"nodes": [gen]})


@pytest.mark.parametrize("number", NONE, ids=range(len(NONE)))
@pytest.mark.parametrize("option", ["timeout", "priority", "logprob_start_len", "top_logprobs_num"])
def test_a_call_of_an_engine_takes_no_such_number(engine: Engine, option: str, number: float) -> None:
    with pytest.raises(InvalidRequest, match=option):
        engine.generate("a", {"max_new_tokens": 1}, **{option: number, "return_logprob": True})  # type: ignore[arg-type]


@pytest.mark.parametrize("number", NONE, ids=range(len(NONE)))
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_k", "n", "max_new_tokens", "seed"])
def test_nor_do_its_sampling_parameters(engine: Engine, name: str, number: float) -> None:
    with pytest.raises(InvalidRequest, match=name):
        engine.generate("a", {name: number})


@pytest.mark.parametrize("number", NONE, ids=range(len(NONE)))
@pytest.mark.parametrize("name", ["timeout", "temperature", "priority", "max_new_tokens"])
def test_nor_does_a_run(engine: Engine, name: str, number: float) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x", max_tokens=1)

    with pytest.raises((InvalidRequest, sgl.errors.ProgramError)):
        program.run(backend=engine, **{name: number})["x"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 400])
def test_over_http_each_is_a_400(server: LiveServer, number: str) -> None:
    def post(path: str, body: str) -> int:
        return requests.post(server.url + path, data=body.encode(), timeout=PATIENCE).status_code

    for field in ("timeout", "priority"):
        assert post("/generate", f'{{"text": "a", "{field}": {number}}}') == 400
    assert post("/generate", f'{{"text": "a", "sampling_params": {{"temperature": {number}}}}}') == 400
    for field in ("lease_s", "deadline_s", "seed"):
        program = f'{{"v": 1, "name": "p", "seed": 1, "{field}": {number}}}'
        assert post("/v1/programs", f'{{"program": {program}, "segment": {{"nodes": [], "final": true}}}}') == 400
    row = f'"rows": [{{"seed": {number}}}], "segment": {{"nodes": [], "final": true}}'
    assert post("/v1/programs", f'{{"program": {{"v": 1, "name": "p", "seed": 1}}, {row}}}') == 400
    gen = f'{{"st": 0, "op": "gen", "params": {{"timeout": {number}}}}}'
    program = '{"v": 1, "name": "p", "seed": 1}'
    assert post("/v1/programs", f'{{"program": {program}, "segment": {{"nodes": [{gen}], "final": true}}}}') == 400


def test_deadlines_of_others_pass_on_time_beside_it(engine: Engine) -> None:
    with pytest.raises(InvalidRequest):
        Client(engine, deadline_s=math.nan)
    assert isinstance(Client(engine, deadline_s=0.05).error(), RequestTimeout)


def test_a_deadline_counts_from_the_opening_and_not_from_the_first_segment(engine: Engine) -> None:
    client = Client(engine, deadline_s=0.05)
    assert client.is_done.wait(SECONDS), "nothing is ever sent"
    error = client.error()
    assert isinstance(error, RequestTimeout)
    assert error.seconds == 0.05
    assert_idle(engine)


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e300])
def test_options_are_finite(number: float) -> None:
    for name in ("request_timeout", "queue_timeout", "program_lease_ttl", "constraint_timeout"):
        with pytest.raises(ConfigError, match=name):
            EngineConfig.from_options({name: number})
    for name in ("read_timeout", "write_timeout", "drain_timeout", "watchdog_timeout"):
        with pytest.raises(ConfigError, match=name):
            ServerConfig.from_options({name: number})


WHOLE = ["1_0", " 1", "1 ", "\uff11", "\u00b2", "nan", "inf", "-1", "+1", "", "1.0", "0x1", "9" * 1_000_000]


@pytest.mark.parametrize("text", WHOLE, ids=range(len(WHOLE)))
def test_a_text_of_other_signs_than_digits_is_no_number(text: str) -> None:
    assert whole(text, 10**6) is None
    assert port(text) is None
    assert (decimal(text) is None) == (text != "1.0")
    assert retry_after(text) is None
    if text != "1.0":
        with pytest.raises(ConfigError, match="write ttft=200 for 200 ms"):
            bounds_of([f"ttft={text}"])
        with pytest.raises(InvalidRequest, match="number of seconds"):
            header_seconds(text)


def retry_after(text: str) -> float | None:
    error = _status_error("http://x", 503, "{}", text)
    assert isinstance(error, sgl.errors.BackendError)
    return getattr(error, "retry_after", None)


@given(st.integers(0, 10**13), st.integers(1, 10**13))
def test_digits_are_the_number_up_to_the_most(number: int, most: int) -> None:
    assert whole(str(number), most) == (number if number <= most else None)
    assert port(str(number)) == (number if 0 < number < 65536 else None)
    assert decimal(str(number)) == number
    assert bounds_of([f"e2e={number / 8}"]) == {"e2e": pytest.approx(number / 8000)}


def test_a_slo_is_finite() -> None:
    with pytest.raises(ConfigError, match="write tpot=200"):
        bounds_of(["tpot=1e999"])
    assert retry_after("3") == 3.0
    assert retry_delay(0, _status_error("http://x", 503, "", "9" * 12)) == MAX_DELAY  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [b"1_0", b"x7", "\uff11".encode(), b"", b"9" * 5000, b"\xff"])
def test_events_whose_id_is_no_number_have_none(name: bytes) -> None:
    """Such as an OpenAI API's, which may call them what it likes."""

    async def test() -> None:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(body=b"id: 7\ndata: 1\n\nid: " + name + b"\ndata: 2\n\ndata: [DONE]\n\n")

        app = web.Application()
        app.router.add_post("/events", answer)
        async with TestServer(app) as server:
            http = HttpClient(str(server.make_url("")), max_retries=0)
            assert [event async for event in http.sse("POST", "/events", {})] == [(7, 1), (0, 2)]
            await http.close()

    asyncio.run(asyncio.wait_for(test(), PATIENCE))
