"""What a gateway shows of its cluster: a page, a dashboard of metrics that exist, traces that go on in its workers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from sgl.runtime.engine import Engine
from tests.live_server import OPTIONS, LiveServer, chat_checkpoint, served
from tests.test_deploy import dashboard, every
from tests.test_gateway import MockWorker, echo, gateway_of, run, until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with (
        Engine(str(chat_checkpoint(tmp_path_factory.mktemp("model"))), **OPTIONS) as engine,
        served(engine, served_model_name="tiny") as server,
    ):
        yield server


BODY = {"text": "hello " * 20, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}


def test_the_page_shows_what_workers_do(server: LiveServer) -> None:
    async def test() -> None:
        async with gateway_of(echo) as (gateway, workers, client):
            gateway.servers.add(server.url, "live")
            for _ in range(4):
                async with client.post("/generate", json=BODY) as answer:
                    assert answer.status == 200
            await until(lambda: bool(gateway.servers["live"].load.hit_rate))
            async with client.get("/cluster/status") as answer:
                told: dict[str, Any] = await answer.json()
            assert (told["ready"], told["requests"], told["open_requests"], told["programs"]) == (2, 4, 0, 0)
            live = next(worker for worker in told["workers"] if worker["id"] == "live")
            assert live["hit_rate"] > 0
            assert (live["breaker"], live["is_up"], live["placed"]) == ("closed", True, 2)
            assert all(isinstance(live[name], (int, float)) for name in ("running", "waiting", "kv_usage"))
            async with client.get("/cluster") as answer:
                page = await answer.text()
                assert "script-src 'sha256-" in answer.headers["Content-Security-Policy"]
                assert answer.content_type == "text/html"
            assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)
            assert set(re.findall(r"\bs\.(\w+)", page)) <= set(told)
            assert set(re.findall(r"\bw\.(\w+)", page)) <= set(live)
            assert set(re.findall(r'(?:rate|sum)\("(\w+)"\)', page)) <= set(told) | set(live)
            await workers[0].stop()
            await until(lambda: not gateway.servers[workers[0].url].is_up)
            async with client.get("/cluster/status") as answer:
                assert (await answer.json())["ready"] == 1

    run(test)


def test_metrics_are_of_the_workers_that_there_are() -> None:
    async def test() -> None:
        async with gateway_of(echo, echo) as (gateway, workers, client):
            for worker in workers:
                text = await (await client.get("/metrics")).text()
                assert f'sgl_gateway_worker_requests{{worker="{worker.url}"}} 0.0' in text
                gateway.servers.remove(worker.url)
            assert "sgl_gateway_worker_requests{" not in await (await client.get("/metrics")).text()

    run(test)


def test_the_page_holds_many_workers() -> None:
    async def test() -> None:
        async with gateway_of(echo) as (gateway, workers, client):
            for number in range(64):
                gateway.servers.add(workers[0].url, f"worker-{number}")
            async with client.get("/cluster/status") as answer:
                body = await answer.read()
                assert len((await answer.json())["workers"]) == 65
            assert len(body) < 65 * 512

    run(test)


def test_the_dashboard_shows_metrics_that_gateway_and_worker_have(server: LiveServer) -> None:
    async def text() -> str:
        async with gateway_of() as (gateway, _, client):
            gateway.servers.add(server.url, "live")
            # counters with labels exist from their first count on
            gateway.metrics.retries.labels("timeout").inc()
            gateway.metrics.refused.labels("full").inc()
            async with client.post("/generate", json=BODY) as answer:
                assert answer.status == 200
            async with client.get("/metrics") as answer:
                found: str = await answer.text()
        return found

    async def test() -> None:
        samples: dict[str, set[str]] = {}
        for name, labels in re.findall(r"^([\w:]+)(?:\{(.*)\})? ", await text(), re.MULTILINE):
            samples.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
        queries = every(dashboard("cluster.json"), "expr")
        assert len(queries) > 20
        for query in queries:
            names = set(re.findall(r"\b(?:sgl:|sgl_gateway_)\w+", query))
            assert names
            assert names <= set(samples), query
            by = {label for labels in re.findall(r"by \(([\w, ]+)\)", query) for label in labels.split(", ")}
            used = by | set(re.findall(r"[{,](\w+)=", query))
            assert all(used <= samples[name] for name in names), query
        [variable] = dashboard("cluster.json")["templating"]["list"]
        name, label = re.findall(r"[\w:]+", variable["query"]["query"])[1:]
        assert label in samples[name]

    run(test)


def test_a_trace_goes_on_in_the_worker(server: LiveServer) -> None:
    pytest.importorskip("opentelemetry.sdk")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from sgl.runtime.server.tracing import Tracer

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))

    async def test() -> None:
        async with gateway_of() as (gateway, _, client):
            gateway.servers.add(server.url, "live")
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            async with client.post("/generate", json=BODY, headers=headers) as answer:
                assert answer.status == 200
            await until(lambda: any(span.name == "POST /generate" for span in spans.get_finished_spans()))

    server.service.tracer = Tracer(provider)
    try:
        run(test)
    finally:
        server.service.tracer = None
    found = {span.name: span for span in spans.get_finished_spans() if span.context.trace_id == int(TRACE, 16)}
    assert {"POST /generate", "generate", "queue", "prefill", "decode"} <= set(found)
    whole = found["POST /generate"]
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert found["generate"].parent.span_id == whole.context.span_id


def test_mock_workers_need_not_say_anything() -> None:
    async def test() -> None:
        async with gateway_of(echo) as (_, workers, client):
            assert isinstance(workers[0], MockWorker)
            async with client.get("/cluster/status") as answer:
                [worker] = (await answer.json())["workers"]
            assert (worker["running"], worker["hit_rate"], worker["kv_usage"]) == (0, None, 0.0)

    run(test)
