"""/openapi.json: OpenAPI 3.1 made from routes and body models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from sgl.lang.ir import check as ir_check
from sgl.runtime.server.routes import Route
from sgl.runtime.server.service import VERSION

_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
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


def openapi(routes: Iterable[Route]) -> dict[str, Any]:
    """The OpenAPI document."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schemas)
    moved = json.dumps(ir_check.json_schema()).replace("#/$defs/", "#/components/schemas/ir_")
    schemas |= {f"ir_{name}": schema for name, schema in json.loads(moved)["$defs"].items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "sgl", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {route.content_type: {}}
    if route.streams:
        answer["text/event-stream"] = {}
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()} {path}",
        "responses": {
            "200": {"description": "What was asked for", "content": answer},
            **{str(status): {"description": text, **error} for status, text in _STATUSES.items()},
        },
    }
    if not route.is_open:
        operation["security"] = [{}, {"key": []}]
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.body is not None:
        reference = _add_schema(route.body, schemas)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    return operation


def _add_schema(model: type[BaseModel], schemas: dict[str, Any]) -> dict[str, str]:
    schema = model.model_json_schema(ref_template=_REFERENCE)
    schemas |= schema.pop("$defs", {})
    schemas[model.__name__] = schema
    return {"$ref": _REFERENCE.format(model=model.__name__)}
