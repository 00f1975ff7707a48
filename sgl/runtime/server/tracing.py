"""OpenTelemetry spans: each HTTP request, in it each generation's queue, prefill, decode, and what its ranks did. Needs
`sgl[otel]`."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_VERSION = importlib.metadata.version("sgl")
_PROPAGATOR = TraceContextTextMapPropagator()


def otlp_tracer(endpoint: str) -> Tracer:
    """Exports spans by OTLP over HTTP; the default path is /v1/traces."""
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
    provider = TracerProvider(resource=Resource.create({"service.name": "sgl", "service.version": _VERSION}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracer(provider)


class Tracer:
    """Makes one server's spans."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("sgl", _VERSION)

    def request(
        self, method: str, path: str, identity: str, headers: Mapping[str, str]
    ) -> AbstractContextManager[Span]:
        """The span of a request being answered, in the client's trace if headers carry one (W3C traceparent)."""
        return self._tracer.start_as_current_span(
            f"{method} {path}",
            context=_PROPAGATOR.extract({name.lower(): value for name, value in headers.items()}),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": path, "sgl.request_id": identity},
            record_exception=False,
            set_status_on_exception=False,
        )

    @staticmethod
    def answered(span: Span, status: int) -> str:
        """Set a request's status (499: its client left). Returns the trace id as logs and traceparent write it."""
        span.set_attribute("http.response.status_code", status)
        if status >= 499:
            span.set_status(Status(StatusCode.ERROR, "the client left" if status == 499 else ""))
        return f"{span.get_span_context().trace_id:032x}"

    def here(self) -> Context:
        """The current span, as parent of later reports."""
        return trace.set_span_in_context(trace.get_current_span())

    def generation(self, meta: Mapping[str, Any], *, name: str = "generate", parent: Context | None = None) -> None:
        """Record a generation that has just ended, from its meta_info; `parent`: the current span."""
        end = time.time_ns()
        usage: Mapping[str, Any] = meta.get("usage") or {}
        queue = meta.get("queue_time", usage.get("queue_seconds", 0.0))
        took = max(queue, meta.get("e2e_latency", queue + usage.get("compute_seconds", 0.0)))
        prompt_tokens = usage["new_tokens"] + usage["cached_tokens"] if usage else None
        reason = meta.get("finish_reason") or {}
        start = end - round(1e9 * took)
        attributes = {
            "sgl.rid": meta.get("id"),
            "gen_ai.usage.input_tokens": meta.get("prompt_tokens", prompt_tokens),
            "gen_ai.usage.output_tokens": meta.get("completion_tokens", usage.get("generated_tokens")),
            "gen_ai.response.finish_reasons": [reason["type"]] if "type" in reason else None,
            "sgl.cached_tokens": meta.get("cached_tokens", usage.get("cached_tokens")),
            "sgl.forced_tokens": meta.get("forced_tokens", usage.get("forced_tokens")),
            "sgl.drafted_tokens": meta.get("drafted_tokens", usage.get("drafted_tokens")),
            "sgl.accepted_tokens": meta.get("accepted_tokens", usage.get("accepted_tokens")),
        }
        attributes = {name: value for name, value in attributes.items() if value is not None}
        span = self._tracer.start_span(name, context=parent, start_time=start, attributes=attributes)
        if reason.get("type") == "abort":
            span.set_status(Status(StatusCode.ERROR, str(reason.get("message", ""))))
        inside = trace.set_span_in_context(span)
        queued = min(end, start + round(1e9 * queue))
        # a select scores all candidates in one prefill
        prefilled = min(end, queued + round(1e9 * meta["prefill_time"])) if "prefill_time" in meta else end
        for stage, began, ended in (
            ("queue", start, queued),
            ("prefill", queued, prefilled),
            ("decode", prefilled, end),
        ):
            self._tracer.start_span(stage, context=inside, start_time=began).end(ended)
        for its in meta.get("ranks") or usage.get("ranks") or ():
            counted = {f"sgl.rank.{key}": value for key, value in its.items() if key != "rank"}
            rank = self._tracer.start_span(
                f"rank {its['rank']}",
                context=inside,
                start_time=queued,
                attributes={"sgl.rank": its["rank"], **counted},
            )
            rank.end(end)
        span.end(end)

    def close(self) -> None:
        """Flush spans."""
        self._provider.shutdown()
