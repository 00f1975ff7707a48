"""The gateway before prefill and decode workers: whose pages a request brings, and what happens when any side fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sgl.runtime.engine import Engine
from sgl.runtime.gateway.app import Gateway
from tests.live_server import served
from tests.test_gateway import MockWorker, breaks, echo, gateway_of, refuses, run, until, value
from tests.test_transfers_engine import (
    GREEDY,
    PROMPTS,
    TEMPLATE,
    assert_all_is_back,
    decode,
    key,
    path,
    plain,
    prefill,
    state,
)

__all__ = ["decode", "key", "path", "plain", "prefill"]  # fixtures

PROMPT = list(range(100, 500))
_DIFFERENT = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "meta_info"}
_DIFFERENT |= {"input_tokens", "cache_read_input_tokens", "input_tokens_details", "prompt_tokens_details"}
BODY = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "regex": "a+"}, "stream": True, "rid": "mine"}
STATE = {
    "num_running_reqs": 0,
    "num_queue_reqs": 0,
    "kv_available_tokens": 1000,
    "kv_evictable_tokens": 0,
}


def info(mode: str | None) -> dict[str, Any]:
    return {"internal_states": [STATE], "max_total_tokens": 1000, "disaggregation_mode": mode}


async def computes(request: web.Request, worker: MockWorker) -> web.StreamResponse:
    if request.path == "/end_kv_transfer":
        return web.json_response({"ended": 1})
    body = await request.json()
    assert body["return_kv_transfer_params"] is True
    several = isinstance(body.get("prompt"), list) or isinstance(body.get("input_ids", [0])[0], list)
    params = {"lease": f"{len(worker.requests)}", "url": worker.url}
    if request.path == "/generate":
        one = {"text": "", "kv_transfer_params": params}
        return web.json_response([one] * len(body["input_ids"]) if several else one)
    return web.json_response(
        {"choices": [], "kv_transfer_params": [params] * len(body["prompt"]) if several else params}
    )


async def refuses_pages(request: web.Request, worker: MockWorker) -> web.StreamResponse:
    if "kv_transfer_params" in await request.json():
        wrong = {"message": "kv_transfer_params is of another model", "param": "kv_transfer_params"}
        return web.json_response({"error": wrong}, status=400)
    return await echo(request, worker)


async def with_modes(gateway: Gateway, workers: list[MockWorker], modes: str) -> None:
    """P, D or - for each: once the gateway knows."""
    named = {"P": "prefill", "D": "decode", "-": None}
    for worker, mode in zip(workers, modes, strict=True):
        worker.info = info(named[mode])
    await until(lambda: [its.mode for its in gateway.servers.values()] == [named[mode] for mode in modes])


def generated(worker: MockWorker) -> list[dict[str, Any]]:
    return [body for where, body, _ in worker.requests if where != "/end_kv_transfer"]


def ended(worker: MockWorker) -> list[Any]:
    return [body["kv_transfer_params"] for where, body, _ in worker.requests if where == "/end_kv_transfer"]


def pairs(
    test: Callable[[Gateway, list[MockWorker], aiohttp.ClientSession], Any],
    modes: str,
    *answers: Any,
    **options: Any,
) -> None:
    """Run a test before such workers."""

    async def around() -> None:
        async with gateway_of(*answers, **{"min_prefill_tokens": 100, **options}) as (gateway, workers, client):
            await with_modes(gateway, workers, modes)
            await test(gateway, workers, client)

    run(around)


async def post(client: aiohttp.ClientSession, where: str, body: Any) -> tuple[int, dict[str, Any]]:
    async with client.post(where, json=body, headers={"Authorization": "Bearer k"}) as answer:
        return answer.status, {**await answer.json(), "worker": answer.headers.get("X-Sgl-Worker")}


def test_a_plain_request_brings_the_pages_of_a_prefill_worker() -> None:
    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        prefill, decode = workers
        status, answer = await post(client, "/generate", BODY)
        assert (status, answer["worker"]) == (200, decode.url)
        [asked], [sent] = generated(prefill), generated(decode)
        own = {"sampling_params": {"max_new_tokens": 0}, "return_kv_transfer_params": True}
        assert asked == {"input_ids": PROMPT, "rid": "mine", **own}
        assert sent == {**BODY, "kv_transfer_params": {"lease": "1", "url": prefill.url}}
        assert all(
            headers["authorization"] == "Bearer k" for worker in workers for _, _, headers in worker.requests
        )
        chat = {
            "messages": [{"role": "user", "content": "x" * 2000}],
            "max_completion_tokens": 5,
            "n": 2,
            "tools": [],
        }
        status, _ = await post(client, "/v1/chat/completions", {**chat, "response_format": {"type": "json_object"}})
        asked = {"messages": chat["messages"], "tools": [], "max_tokens": 0, "return_kv_transfer_params": True}
        assert generated(prefill)[1] == asked
        assert generated(decode)[1]["n"] == 2
        several = {"prompt": ["x" * 2000, "y" * 2000], "max_tokens": 3}
        await post(client, "/v1/completions", several)
        assert generated(decode)[2]["kv_transfer_params"] == [{"lease": "3", "url": prefill.url}] * 2
        message = {"messages": chat["messages"], "system": "Be kind.", "max_tokens": 9, "stop_sequences": ["x"]}
        await post(client, "/v1/messages", {**message, "output_format": {"type": "json_schema", "schema": {}}})
        own = {"max_tokens": 0, "return_kv_transfer_params": True}
        assert generated(prefill)[3] == {"messages": chat["messages"], "system": "Be kind.", **own}
        response = {"input": "x" * 2000, "text": {"format": {"type": "json_object"}}, "max_output_tokens": 9}
        await post(client, "/v1/responses", {**response, "metadata": {"a": "b"}, "instructions": "Be kind."})
        own = {"max_output_tokens": 0, "store": False, "return_kv_transfer_params": True}
        assert generated(prefill)[4] == {"input": response["input"], "instructions": "Be kind.", **own}
        assert [each["kv_transfer_params"]["lease"] for each in generated(decode)[3:]] == ["4", "5"]
        assert ended(prefill) == []
        assert value(gateway, "pairs_total", outcome="paired") == 5

    pairs(test, "PD", computes, echo)


def test_what_is_short_computed_or_arranged_by_its_client_takes_no_prefill_worker() -> None:
    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        prefill, decode = workers
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/generate", {"input_ids": PROMPT[:50]}),
            ("/generate", {"input_ids": PROMPT, "kv_transfer_params": {"lease": "x"}}),
            ("/generate", {"input_ids": PROMPT[1:], "kv_transfer_params": None}),
            ("/generate", {"input_ids": PROMPT[2:], "lora_path": "one"}),
            ("/generate", {"input_ids": PROMPT[3:], "return_logprob": True, "logprob_start_len": 0}),
            ("/generate", {"text": "x" * 2000, "image_data": "data:"}),
            (
                "/v1/messages",
                {"messages": [{"content": [{"type": "image"}, {"type": "text", "text": "x" * 2000}]}]},
            ),
            (
                "/v1/messages",
                {"messages": [{"content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            ),
            ("/v1/responses", {"input": "x" * 2000, "previous_response_id": "resp_1"}),
            ("/v1/responses", {"input": [{"id": "msg_1"}, {"role": "user", "content": "x" * 2000}]}),
            ("/v1/responses", {"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]}),
            ("/v1/chat/completions", {"messages": [{"content": [{"type": "image_url"}, {"type": "text"}]}] * 100}),
            ("/v1/chat/completions", {"messages": 5}),
        ]
        for where, body in bodies:
            status, _ = await post(client, where, body)
            assert status == 200
            assert decode.requests[-1][:2] == (where, body)
        await post(client, "/generate", {"input_ids": PROMPT[9:]})
        await post(client, "/generate", {"input_ids": PROMPT[9:]})  # it is there since then
        assert len(prefill.requests) == 1
        assert value(gateway, "pairs_total", outcome="short") == 3
        for where in ("/v1/models", "/v1/responses/resp_1"):
            async with client.get(where) as answer:
                assert answer.headers["X-Sgl-Worker"] == decode.url

    pairs(test, "PD", computes, echo)


def test_who_wants_pages_alone_gets_them_of_a_prefill_worker() -> None:
    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}, "return_kv_transfer_params": True}
        for _ in range(3):
            _, answer = await post(client, "/generate", body)
            assert answer["worker"] == workers[1].url

    pairs(test, "DP", echo, computes)


def test_a_prefill_worker_that_fails_is_replaced_by_another_or_by_the_decode_worker() -> None:
    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        for start in range(4):
            status, _ = await post(client, "/generate", {"input_ids": PROMPT[start:]})
            assert status == 200
        assert len(generated(workers[1])) == 4
        assert all("kv_transfer_params" in body for body in generated(workers[2]))
        workers[1].answer = refuses
        status, _ = await post(client, "/generate", {"input_ids": PROMPT[9:]})
        assert status == 200
        assert "kv_transfer_params" not in generated(workers[2])[-1]
        assert value(gateway, "pairs_total", outcome="failed") == 1

    pairs(test, "PPD", breaks, computes, echo, breaker_failures=1000)


@pytest.mark.parametrize("answer", [breaks, refuses])
def test_a_decode_worker_that_fails_is_replaced_and_its_pages_are_asked_for_again(answer: Any) -> None:
    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        prefill, failing, decode = workers
        for start in range(4):
            status, found = await post(client, "/generate", {"input_ids": PROMPT[start:]})
            assert (status, found["worker"]) == (200, decode.url)
        assert generated(failing)
        sent = [body["kv_transfer_params"] for body in generated(decode)]
        assert len(sent) == 4
        lost = [body["kv_transfer_params"] for body in generated(failing)]
        await until(lambda: len(ended(prefill)) == len(lost))
        assert sorted(map(json.dumps, ended(prefill))) == sorted(map(json.dumps, lost))

    pairs(test, "PDD", computes, answer, echo, breaker_failures=1000)


def test_prefill_workers_answer_where_no_decode_worker_does() -> None:
    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        status, answer = await post(client, "/generate", BODY)
        assert (status, answer["worker"]) == (200, workers[0].url)
        assert generated(workers[0])[-1] == BODY

    async def computes_or_answers(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        wants = request.path == "/end_kv_transfer" or "return_kv_transfer_params" in await request.json()
        return await (computes if wants else echo)(request, worker)

    pairs(test, "PD", computes_or_answers, breaks)


@pytest.mark.parametrize("how", ["garbage", "cut"])
def test_a_prefill_worker_whose_answers_nobody_can_read_is_left_alone(how: str) -> None:
    async def unreadable(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"kv_transfer_params": {"le')
        if how == "cut":
            assert request.transport is not None
            request.transport.abort()
        return response

    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        for number in range(6):
            assert (await post(client, "/generate", {"input_ids": [number, *PROMPT]}))[0] == 200
        assert len(generated(workers[0])) == 3
        assert gateway.servers[workers[0].url].breaker.is_open
        assert value(gateway, "pairs_total", outcome="failed") == 6

    pairs(test, "PD", unreadable, echo, breaker_failures=3, breaker_seconds=60.0)


def test_a_decode_worker_that_goes_while_a_prompt_is_computed_gets_no_request() -> None:
    goes_on = asyncio.Event()

    async def waits(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        if request.path == "/generate":
            await goes_on.wait()
        return await computes(request, worker)

    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        asked = asyncio.ensure_future(post(client, "/generate", {"input_ids": PROMPT}))
        await until(lambda: bool(generated(workers[0])))
        [chosen] = [its for its in workers[1:] if gateway.servers[its.url].worker.in_flight]
        gateway.servers.remove(chosen.url)
        goes_on.set()
        [other] = [its for its in workers[1:] if its is not chosen]
        assert (await asked)[0] == 200
        assert (len(generated(chosen)), len(generated(other))) == (0, 1)

    pairs(test, "PDD", waits, echo, echo)


def test_a_request_for_a_prefill_worker_takes_no_turn_of_another() -> None:
    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        prefill, decode = gateway.servers.values()
        prefill.failed()
        decode.failed()
        asked = []
        for more in ({"return_kv_transfer_params": True}, {}):
            asked.append(asyncio.ensure_future(post(client, "/generate", {"input_ids": PROMPT, **more})))
            await until(lambda: gateway._limits.num_waiting == len(asked))
        decode.breaker._until = 0.0  # one may try it
        gateway.servers.tell()
        assert (await asked[1])[0] == 200
        assert not asked[0].done()
        prefill.answered()
        assert (await asked[0])[0] == 200

    pairs(test, "PD", computes, echo, breaker_failures=1, breaker_seconds=60.0, worker_wait=10.0)


def test_pages_that_are_refused_are_computed_where_they_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        for start in range(2):
            status, _ = await post(client, "/generate", {"input_ids": PROMPT[start:]})
            assert status == 200
        assert [("kv_transfer_params" in body) for body in generated(workers[1])] == [True, False] * 2
        await until(lambda: len(ended(workers[0])) == 2)
        assert value(gateway, "pairs_total", outcome="refused") == 2

    pairs(test, "PD", computes, refuses_pages)
    assert caplog.text.count("of another model") == 1


def test_an_error_of_the_clients_own_is_passed_on_though_it_quotes_the_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    about = {"message": 'unknown "param": "kv_transfer_params", said "kv_transfer_params"', "param": "text"}

    async def wrong(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        return web.json_response({"error": about}, status=400)

    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        status, answer = await post(client, "/generate", BODY)
        assert (status, answer["error"]) == (400, about)
        assert len(generated(workers[1])) == 1
        assert value(gateway, "pairs_total", outcome="refused") == 0
        await until(lambda: len(ended(workers[0])) == 1)

    pairs(test, "PD", computes, wrong)
    assert "takes no pages" not in caplog.text


@pytest.mark.parametrize("status", [200, 400])
def test_pages_that_nobody_pulls_are_let_go_of(status: int) -> None:
    async def slow_or_wrong(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        if status == 200:
            await asyncio.sleep(60)
        return web.json_response({"error": {"message": "no"}}, status=status)

    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        prefill, decode = workers
        if status == 200:  # the client leaves
            task = asyncio.ensure_future(post(client, "/generate", BODY))
            await until(lambda: bool(decode.requests))
            task.cancel()
        else:
            assert (await post(client, "/generate", BODY))[0] == 400
        await until(lambda: ended(prefill) == [{"lease": "1", "url": prefill.url}])
        assert [its.in_flight for its in gateway.fleet.workers] == [0, 0]

    pairs(test, "PD", computes, slow_or_wrong)


def test_placement_counts_what_each_worker_computes() -> None:
    may_go_on = asyncio.Event()

    async def waits(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        await may_go_on.wait()
        return await echo(request, worker)

    async def test(gateway: Gateway, workers: list[MockWorker], client: aiohttp.ClientSession) -> None:
        tasks = []
        for number in range(6):
            body = {"input_ids": [number, *PROMPT], "sampling_params": {"max_new_tokens": 10}}
            tasks.append(asyncio.ensure_future(post(client, "/generate", body)))
            await until(lambda number=number: sum(len(its.requests) for its in workers[2:]) == number + 1)  # type: ignore[misc]
        work = {its.id: its.work for its in gateway.fleet.workers}
        assert [work[its.url] for its in workers] == [0, 0, 120, 120]  # of outputs alone
        assert [len(its.requests) for its in workers] == [3, 3, 3, 3]
        may_go_on.set()
        await asyncio.gather(*tasks)
        assert not any(its.work for its in gateway.fleet.workers)

    pairs(test, "PPDD", computes, computes, waits, waits, routing_policy="cache_aware")


def test_answers_through_the_gateway_are_those_of_one_engine(
    prefill: Engine, decode: Engine, plain: Engine
) -> None:
    """Over HTTP, at each path and in each form that is paired: the decode engine computes no prompt."""
    text = "what is there to say of the long winter, and of the short summer?"
    chat = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 5}
    tool = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {}}}}
    its = {"name": "say", "input_schema": {"type": "object", "properties": {}}}
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    response = {"input": chat["messages"], "temperature": 0, "max_output_tokens": 40}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": text, "sampling_params": {**GREEDY, "regex": "[ab]{4}"}}),
        ("/generate", {"text": text, "sampling_params": {**GREEDY, "n": 2}, "return_logprob": True}),
        ("/generate", {"input_ids": PROMPTS[:2], "sampling_params": [GREEDY, {**GREEDY, "max_new_tokens": 3}]}),
        ("/generate", {"text": text, "sampling_params": GREEDY, "stream": True, "timeout": 600}),
        ("/v1/completions", {"prompt": [text, "b" + text], "temperature": 0, "max_tokens": 4, "logprobs": 2}),
        ("/v1/completions", {"prompt": text, "temperature": 0, "stream": True, "min_tokens": 3, "max_tokens": 5}),
        ("/v1/chat/completions", {**chat, "n": 2, "logprobs": True, "top_logprobs": 2, "extra_key": "mine"}),
        ("/v1/chat/completions", {**chat, "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {**chat, "max_tokens": 60, "tools": [tool], "tool_choice": "required"}),
        ("/v1/chat/completions", {**chat, "response_format": {"type": "json_object"}, "max_tokens": 40}),
        ("/v1/messages", {**chat, "system": "Be kind.", "stop_sequences": ["q"]}),
        ("/v1/messages", {**chat, "stream": True, "output_config": {"format": schema}}),
        ("/v1/messages", {**chat, "tools": [its], "tool_choice": {"type": "any"}, "max_tokens": 60}),
        ("/v1/responses", {"input": text, "temperature": 0, "max_output_tokens": 5, "metadata": {"a": "b"}}),
        ("/v1/responses", {**response, "stream": True, "text": {"format": {"type": "json_object"}}}),
    ]

    def parts(answer: Any, number: Callable[[float], Any]) -> Any:
        """What does not differ from call to call, floats about the same."""
        if isinstance(answer, dict):
            return {name: parts(value, number) for name, value in answer.items() if name not in _DIFFERENT}
        if isinstance(answer, float):
            return number(answer)
        return [parts(each, number) for each in answer] if isinstance(answer, list) else answer

    def read(answer: str) -> Any:
        events = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
        return [json.loads(event) for event in events] if events else json.loads(answer)

    with (
        served(prefill, template=TEMPLATE) as one,
        served(decode, template=TEMPLATE) as other,
        served(plain, template=TEMPLATE) as alone,
    ):

        async def test() -> None:
            async with gateway_of(min_prefill_tokens=8) as (gateway, _, client):
                gateway.servers.add(one.url)
                gateway.servers.add(other.url)
                await until(lambda: {its.mode for its in gateway.servers.values()} == {"prefill", "decode"})
                for number, (where, body) in enumerate(bodies):
                    for engine in (prefill, decode):
                        engine.flush_cache()
                    gateway.fleet.index.cleared(other.url)
                    wanted = await asyncio.to_thread(alone.post, where, body)
                    assert wanted.status_code == 200, wanted.text
                    async with client.post(where, json=body) as answer:
                        assert answer.headers["X-Sgl-Worker"] == other.url
                        found = parts(read(await answer.text()), float)
                    assert found == parts(read(wanted.text), lambda one: pytest.approx(one, abs=1e-4)), where
                    assert value(gateway, "pairs_total", outcome="paired") == number + 1, body
                    assert state(decode)["num_transfers_failed"] == 0
                await until(lambda: not state(prefill)["num_transfer_leases"])

        run(test)
    assert_all_is_back(prefill)
    assert_all_is_back(decode)
