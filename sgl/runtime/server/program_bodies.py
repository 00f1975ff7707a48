"""Bodies of requests that run programs."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from sgl.lang.ir.sampling import MAX_WHOLE
from sgl.runtime.server.fields import Strict

MAX_ROWS: Final = 10_000

_NODES = [
    {"st": 0, "op": "text", "text": "Hello"},
    {"st": 0, "op": "gen", "name": "x", "params": {"max_tokens": 8}},
]
EXAMPLE = {"program": {"v": 1, "name": "p", "seed": 1}, "segment": {"nodes": _NODES, "final": True}}


class Row(Strict):
    """What is a row's own."""

    args: dict[str, str] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-MAX_WHOLE, le=MAX_WHOLE)] | None = None


class ProgramBody(Strict):
    """A program and its first segment (schemas `ir_program`, `ir_segment`); with rows, one final segment for all."""

    program: dict[str, Any]
    segment: dict[str, Any] | None = None
    rows: list[Row] | None = Field(None, min_length=1, max_length=MAX_ROWS)
    return_kv_transfer_params: bool | None = None
    """Of a prefill engine: answer what a decode engine takes as kv_transfer_params, and run nothing."""
    kv_transfer_params: list[dict[str, Any] | None] | None = Field(None, max_length=MAX_ROWS)
    """What a prefill engine answered for this program: one for each row."""


class SegmentBody(Strict):
    """The next segment, of the schema `ir_segment`. Numbered from 1, it may be sent again."""

    segment: dict[str, Any]
    number: int | None = None
