"""Nodes, programs, segments and events as JSON values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from sgl.errors import InvalidRequest
from sgl.lang.ir import nodes as ir


def to_json(value: Any) -> Any:
    """A node, program, segment or event as JSON values, without fields at their default."""
    if isinstance(value, ir.Segment):
        data: dict[str, Any] = {"nodes": [{"st": st, **to_json(node)} for st, node in value.nodes]}
        if value.answers:
            data["answers"] = [
                {"st": st, "index": index, "turns": [to_json(turn) for turn in turns]}
                for st, index, turns in value.answers
            ]
        return {**data, "final": True} if value.final else data
    data = {"op": value.op} if isinstance(value, ir.Node) else {}
    if isinstance(value, ir.Program):
        data["v"] = ir.VERSION
        if not isinstance(value.chat_template, str | None):
            raise InvalidRequest("only a chat template's name or Jinja source can be sent", param="chat_template")
    for item in fields(value):
        content = getattr(value, item.name)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if not item.metadata.get("local") and content != default:
            data[item.name] = _plain(content)
    return data


def node_from_json(data: Mapping[str, Any]) -> ir.Node:
    """Inverse of `to_json` for a checked node."""
    return ir.NODES[data["op"]](**{key: _frozen(value) for key, value in data.items() if key not in ("op", "st")})


def segment_from_json(data: Mapping[str, Any]) -> ir.Segment:
    """Inverse of `to_json` for a checked segment."""
    return ir.Segment(
        tuple((item["st"], node_from_json(item)) for item in data["nodes"]),
        tuple(
            (a["st"], a["index"], tuple(ir.Turn(**turn) for turn in a["turns"])) for a in data.get("answers", ())
        ),
        data.get("final", False),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
