"""/openapi.json: OpenAPI 3.1 made from routes, body models and replies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema, WithDefaultSchema

from sgl.lang.ir import check as ir_check
from sgl.runtime.server.routes import Route
from sgl.runtime.server.service import VERSION

_REFERENCE = "#/components/schemas/{model}"
_STATUSES = {
    400: "The request cannot be served as it stands",
    401: "The API key is missing or wrong",
    403: "It is the admin's, or a page of a stranger asks",
    404: "There is no such thing",
    405: "The endpoint is for other methods, which Allow names",
    408: "The request took longer than it may",
    413: "The body is too long",
    414: "The path is too long",
    417: "The request expects what no request may",
    431: "The headers are too long, or too many",
    429: "Too many requests wait: try again after Retry-After seconds",
    499: "The request was aborted",
    500: "An error of the server",
    503: "The engine is not there: try again after Retry-After seconds",
}
_TEXT = {"type": "string"}
_EVENTS: dict[str, Any] = {}  # some tools read a stream's schema as one of the whole text, others of each event
Schemas = dict[Any, dict[str, Any]]
"""By type."""


def openapi(routes: Iterable[Route]) -> dict[str, Any]:
    """The OpenAPI document."""
    routes = list(routes)
    schemas, components = _schemas(routes)
    paths: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schemas)
    moved = json.dumps(ir_check.json_schema()).replace("#/$defs/", "#/components/schemas/ir_")
    components |= {f"ir_{name}": schema for name, schema in json.loads(moved)["$defs"].items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "sgl", "version": VERSION},
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas(routes: Iterable[Route]) -> tuple[Schemas, dict[str, Any]]:
    """The schemas of bodies and answers, and what they refer to; names that two modules have are told apart."""
    given: dict[Any, Literal["validation", "serialization"]] = {}
    for route in routes:
        given |= {kind: "serialization" for kind in (route.answer, route.failure) if kind is not None}
        given |= {} if route.body is None else {route.body: "validation"}
    adapters = [(kind, mode, TypeAdapter(kind)) for kind, mode in given.items()]
    schemas, named = TypeAdapter.json_schemas(adapters, ref_template=_REFERENCE, schema_generator=_ForGenerators)
    return {kind: schema for (kind, _), schema in schemas.items()}, named["$defs"]


class _ForGenerators(GenerateJsonSchema):
    """Writes two things so that generators of clients make types that callers can use."""

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        """In words: a field with a default counts as always there."""
        inner = self.generate_inner(schema["schema"])
        default = schema.get("default")
        return inner if default is None else {"description": f"Default: {json.dumps(default)}.", **inner}

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        """Unknown fields may be null: said by a keyword that generators skip, else every known one must be, too."""
        written = super().model_schema(schema)
        if isinstance(unknown := written.get("additionalProperties"), dict):
            del written["additionalProperties"]
            written["unevaluatedProperties"] = unknown
        return written


def _operation(route: Route, path: str, schemas: Schemas) -> dict[str, Any]:
    by_type = {"application/json": schemas[route.answer], "text/event-stream": _EVENTS}
    types = [route.content_type, *(["text/event-stream"] if route.streams else [])]
    types += ["application/x-ndjson"] if route.lines else []
    answer = {each: {"schema": by_type.get(each, _TEXT)} for each in types}
    error = {"content": {"application/json": {"schema": schemas[route.failure]}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}_{path.strip('/') or 'page'}").strip("_"),
        "tags": [route.tag],
        "responses": {
            "200": {"description": "What was asked for", "content": answer},
            **{str(status): {"description": text, **error} for status, text in _STATUSES.items()},
        },
    }
    if not route.is_open:
        operation["security"] = [{}, {"key": []}]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"\{(\w+)\}", path)
    ]
    parameters += [{"name": name, "in": "header", "required": False, "schema": _TEXT} for name in route.headers]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        content = {"application/json": {"schema": schemas[route.body]}}
        if route.example is not None:
            content["application/json"]["example"] = route.example
        operation["requestBody"] = {"required": True, "content": content}
    return operation
