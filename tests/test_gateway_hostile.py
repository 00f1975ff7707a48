"""A gateway before clients that are hostile, and workers that are."""

from __future__ import annotations

import asyncio

from aiohttp import web

from tests.test_gateway import MockWorker, echo, gateway_of, run


def test_a_request_for_one_worker_is_tried_there_again_and_gets_its_refusal() -> None:
    async def full(request: web.Request, worker: MockWorker) -> web.StreamResponse:
        if len(worker.requests) == 1:
            return web.json_response({"id": "resp_1", "object": "response"})
        return web.json_response({"error": {"message": "full"}}, status=429)

    async def test() -> None:
        async with gateway_of(full, full, retries=2) as (_, workers, client):
            await client.post("/v1/responses", json={"input": "x"})
            async with asyncio.timeout(5):
                answer = await client.post("/v1/responses", json={"input": "y", "previous_response_id": "resp_1"})
            assert answer.status == 429, "the worker's own, at once"
            assert sorted(len(worker.requests) for worker in workers) == [0, 4]

    run(test)
