"""Numbers that are none, or have no end: each is refused where it comes in, and nobody else notices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import requests

import sgl
from sgl.errors import ConfigError, InvalidRequest, RequestTimeout
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.check import Checker, program_from_wire
from sgl.lang.ir.sampling import MAX_SECONDS
from sgl.runtime.config import EngineConfig, ServerConfig
from sgl.runtime.engine import Engine
from sgl.runtime.loop.timers import Timers
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
