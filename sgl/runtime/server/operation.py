"""Operators' endpoints: metrics, API description, status page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from aiohttp import web
from prometheus_client import generate_latest

from sgl.errors import InvalidRequest
from sgl.numerals import whole
from sgl.runtime.metrics import Histogram, Scrape
from sgl.runtime.server.identity import current_caller
from sgl.runtime.server.loads import Loads
from sgl.runtime.server.openapi import openapi
from sgl.runtime.server.pages import page
from sgl.runtime.server.replies import EngineLoads, RequestRecord, Samples, Status
from sgl.runtime.server.routes import Api, Route, endpoint
from sgl.runtime.server.service import Service


class OperationApi(Api):
    """Operators' endpoints; `others`: the other APIs' routes."""

    def __init__(self, service: Service, others: Sequence[Route]) -> None:
        super().__init__(service)
        self._others = others
        self._loads = Loads(service)

    @endpoint("GET /metrics", content_type="text/plain")
    async def metrics(self, request: web.Request) -> web.Response:
        """Metrics in Prometheus' format."""
        service = self._service
        state = await service.engine_state()
        scrape = Scrape(service.metrics, service.model_name, service.max_total_tokens, state)
        # Not OpenMetrics, even if accepted: the library would turn colons in names to underscores.
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=generate_latest(scrape), headers=headers)

    @endpoint("GET /v1/status")
    async def status(self, request: web.Request) -> Status:
        """The page's data: current counts, and latencies since the start."""
        service, metrics = self._service, self._service.metrics
        return {
            "model": service.model_name,
            "time": time.time(),
            "started": service.started,
            "open_requests": metrics.open_requests,
            "max_total_tokens": service.max_total_tokens,
            "engine": await service.engine_state(),
            "latency": {
                "time_to_first_token": _quantiles(metrics.time_to_first_token),
                "inter_token_latency": _quantiles(metrics.inter_token_latency),
                "e2e_request_latency": _quantiles(metrics.e2e_request_latency),
            },
            "responses": [[path, status, count] for (path, status), count in metrics.responses.items()],
        }

    @endpoint("GET /v1/loads")
    async def loads(self, request: web.Request) -> EngineLoads:
        """What each engine has to do. `dp_rank`: one alone; `include`: sections besides core, separated by commas."""
        query = request.query
        if (wanted := query.get("format", "json")) != "json":
            raise InvalidRequest(f"format must be json, not {wanted!r}: /metrics is for Prometheus", param="format")
        if (rank := whole(given := query.get("dp_rank", "0"), 99_999)) is None:
            raise InvalidRequest(f"dp_rank must be a number from 0, not {given[:99]!r}", param="dp_rank")
        include = [name.strip() for name in query.get("include", "").split(",") if name.strip()]
        return await self._loads.look(rank if "dp_rank" in query else None, include)

    @endpoint("GET /v1/history")
    async def history(self, request: web.Request) -> Samples:
        """The engine's counts of the last ten minutes, every two seconds."""
        return {"samples": self._service.history.samples()}

    @endpoint("GET /v1/requests")
    async def requests(self, request: web.Request) -> list[RequestRecord]:
        """The caller's requests that generate, those that go on first, and the latest of those that ended."""
        return self._service.history.requests(current_caller.get())

    @endpoint("GET /openapi.json", is_open=True)
    async def openapi(self, request: web.Request) -> dict[str, Any]:
        """This description, as OpenAPI 3.1."""
        return self._openapi

    @endpoint("GET /", is_open=True, content_type="text/html")
    async def page(self, request: web.Request) -> web.Response:
        """The status page, which polls /v1/status."""
        return page("sgl.runtime.server", "page.html")

    @endpoint("GET /docs", is_open=True, content_type="text/html")
    async def docs(self, request: web.Request) -> web.Response:
        """/openapi.json as a page, which also sends requests."""
        return page("sgl.runtime.server", "docs.html")

    @cached_property
    def _openapi(self) -> dict[str, Any]:
        return openapi([*self._others, *self.routes()])


def _quantiles(histogram: Histogram) -> dict[str, float | None]:
    return {f"p{round(100 * share)}": histogram.quantile(share) for share in (0.5, 0.9, 0.99)}
