"""OpenTelemetry spans of a server, collected by the SDK's own exporter into memory; skipped without the SDK."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

import sgl
from sgl.cli import main
from sgl.runtime.engine import Engine
from tests.live_server import LiveServer

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sgl.runtime.server.tracing import Tracer, otlp_tracer
from tests.patience import PATIENCE, wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SHORT = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
STAGES = ["queue", "prefill", "decode"]


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def server(engine: Engine, spans: InMemorySpanExporter) -> Iterator[LiveServer]:
    server = LiveServer(engine)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    server.service.tracer = Tracer(provider)
    yield server
    server.close()


def by_name(spans: InMemorySpanExporter, root: str, count: int = 1) -> dict[str, list[ReadableSpan]]:
    """All spans, once there are so many of the name that ends last, which may be after the answer was read."""
    wait_until(lambda: sum(span.name == root for span in spans.get_finished_spans()) >= count)
    found: dict[str, list[ReadableSpan]] = {}
    for span in sorted(spans.get_finished_spans(), key=lambda span: span.start_time or 0):
        found.setdefault(span.name, []).append(span)
    return found


def check_generation(span: ReadableSpan, spans: InMemorySpanExporter) -> None:
    """Its stages follow one another and fill it."""
    stages = [s for s in spans.get_finished_spans() if s.parent and s.parent.span_id == span.context.span_id]
    assert [stage.name for stage in sorted(stages, key=lambda s: STAGES.index(s.name))] == STAGES
    ends = {stage.name: (stage.start_time, stage.end_time) for stage in stages}
    assert span.start_time == ends["queue"][0] <= ends["queue"][1] == ends["prefill"][0]
    assert ends["prefill"][1] == ends["decode"][0] <= ends["decode"][1] == span.end_time
    assert ends["prefill"][0] < ends["prefill"][1], "a prompt takes time"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_span_with_its_stages_in_the_clients_trace(
    server: LiveServer, spans: InMemorySpanExporter, stream: bool
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine", "tracestate": "vendor=1"}
    body = {"text": "hello", "sampling_params": SHORT, "stream": stream}
    assert server.post("/generate", body, headers=headers).status_code == 200
    found = by_name(spans, "POST /generate")
    [root], [generation] = found["POST /generate"], found["generate"]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT
    assert root.context.trace_state.get("vendor") == "1"
    expected = {"http.request.method": "POST", "http.route": "/generate", "sgl.request_id": "mine"}
    assert dict(root.attributes or {}) == {**expected, "http.response.status_code": 200}
    assert generation.parent is not None
    assert generation.parent.span_id == root.context.span_id
    counted = dict(generation.attributes or {})
    assert counted["gen_ai.usage.input_tokens"] == 5
    assert counted["gen_ai.usage.output_tokens"] == 4
    assert counted["gen_ai.response.finish_reasons"] == ("length",)
    check_generation(generation, spans)
    assert root.start_time <= generation.start_time + 5_000_000


@pytest.mark.parametrize("meta", [{}, {"usage": {"new_tokens": 1, "cached_tokens": 0}}])
def test_a_generation_tells_what_was_drafted(
    server: LiveServer, spans: InMemorySpanExporter, meta: dict[str, Any]
) -> None:
    counts = {"drafted_tokens": 9, "accepted_tokens": 4}
    tracer = server.service.tracer
    assert tracer is not None
    tracer.generation({"usage": {**meta["usage"], **counts}} if meta else counts)
    [generation] = by_name(spans, "generate")["generate"]
    attributes = dict(generation.attributes or {})
    assert (attributes["sgl.drafted_tokens"], attributes["sgl.accepted_tokens"]) == (9, 4)


def test_chats_of_several_samples_have_a_span_each(server: LiveServer, spans: InMemorySpanExporter) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 3}
    assert server.post("/v1/chat/completions", body).status_code == 200
    found = by_name(spans, "POST /v1/chat/completions")
    [root] = found["POST /v1/chat/completions"]
    assert root.parent is None, "a trace of its own"
    assert len(found["generate"]) == 3
    for generation in found["generate"]:
        check_generation(generation, spans)
        assert generation.context.trace_id == root.context.trace_id


def test_programs_have_a_span_for_each_node_that_computed(server: LiveServer, spans: InMemorySpanExporter) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "hello " + sgl.gen("x", max_tokens=4, temperature=0, n=2) + sgl.select("y", ["yes", "no"])
        s += sgl.user("?")

    program.run(backend=sgl.RuntimeEndpoint(server.url), chat_template="qwen").text()
    found = by_name(spans, "POST /v1/programs")
    [root] = found["POST /v1/programs"]
    assert [len(each) for name, each in sorted(found.items()) if name.startswith("node ")] == [2, 1]
    for node in [node for name, each in found.items() if name.startswith("node ") for node in each]:
        assert node.parent is not None
        assert node.parent.span_id == root.context.span_id
        assert (node.attributes or {})["gen_ai.usage.input_tokens"] >= 6
        check_generation(node, spans)


@pytest.mark.usefixtures("slowly")
def test_failures_and_clients_that_leave_are_marked(
    server: LiveServer, engine: Engine, spans: InMemorySpanExporter
) -> None:
    server.post("/generate", {"sampling_params": SHORT})
    [refused] = by_name(spans, "POST /generate")["POST /generate"]
    assert (refused.attributes or {})["http.response.status_code"] == 400
    assert refused.status.is_unset, "that is the client's mistake"
    spans.clear()
    body = {"text": "hello", "sampling_params": {**SHORT, "max_new_tokens": 480}, "stream": True}
    answer = server.post("/generate", body, stream=True)
    next(answer.iter_lines())
    answer.close()
    [left] = by_name(spans, "POST /generate")["POST /generate"]
    assert (left.attributes or {})["http.response.status_code"] == 499
    assert not left.status.is_ok


def test_a_malformed_traceparent_is_passed_over(server: LiveServer, spans: InMemorySpanExporter) -> None:
    for header in ("", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"):
        assert server.get("/v1/models", headers={"traceparent": header}).status_code == 200
    roots = by_name(spans, "GET /v1/models", 4)["GET /v1/models"]
    assert len(roots) == 4
    assert all(root.parent is None for root in roots)


def test_spans_reach_a_collector(server: LiveServer) -> None:
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        server.service.tracer = otlp_tracer(f"http://127.0.0.1:{collector.server_address[1]}")
        server.post("/generate", {"text": "hello", "sampling_params": SHORT})
        server.service.tracer.close()
        collector.shutdown()
    [(path, data)] = received
    assert path == "/v1/traces"
    for name in (b"POST /generate", b"prefill", b"service.name"):
        assert name in data


def test_asking_for_traces_without_the_package_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl.cli.serve.configure_logging", lambda *_: None)  # of this process
    monkeypatch.delitem(sys.modules, "sgl.runtime.server.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--otlp-endpoint", "http://localhost:4318", "--port", "0"])
    assert stopped.value.code == 2
    assert "pip install 'sgl[otel]'" in capsys.readouterr().err


def test_a_server_without_traces_loads_nothing_of_them() -> None:
    code = "import sys, sgl.cli.serve, sgl.runtime.server.app; print('opentelemetry' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert done.stdout.strip() == "False"
