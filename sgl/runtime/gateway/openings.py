"""What a gateway reads of a program: how its rows are shared out, what each part of it will do, and a segment's number.
What it passes on it does not decode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from sgl.errors import InvalidRequest, SglError
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.encoding import node_from_json
from sgl.lang.ir.sampling import MAX_SECONDS
from sgl.runtime.gateway.policy import Demand
from sgl.runtime.server.placement import GENERATED, MOST_NODES, future_of_program
from sgl.runtime.server.program_bodies import MAX_ROWS

Fields = dict[str, msgspec.Raw]

_fields = msgspec.json.Decoder(Fields).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_value = msgspec.json.decode
_NONE, _FALSE = msgspec.Raw(b"null"), msgspec.Raw(b"false")


@dataclass(frozen=True, slots=True)
class PartBody:
    """What one worker gets of a program."""

    body: bytes | None
    """None: the client's."""
    demand: Demand
    deadline: float | None = None  # seconds
    first_row: int | None = None  # among the client's; None: it has no rows
    num_rows: int = 1
    beginning: float = 0.0
    """Tokens of a row's prompt before its first gen, as far as they are known."""


def parts_of(
    data: bytes | bytearray,
    session: str | None,
    workers: Sequence[frozenset[str]],
    adapters: frozenset[str] = frozenset(),
    seconds: float | None = None,
) -> list[PartBody]:
    """A body for each worker that gets some of a program's rows. With k workers, n rows take the time of n / k of them
    and k times that of their shared beginning: least for the root of n rows / beginning. workers: the LoRA adapters
    that each has. adapters: those that any has, of which it may ask for some. seconds: until its request is due. Raises
    InvalidRequest if it is no object; other mistakes are the worker's to tell."""
    try:
        fields = _fields(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise InvalidRequest("a program is opened with a JSON object", param="program") from None
    for name in ("kv_transfer_params", "return_kv_transfer_params"):
        if fields.get(name, _NONE) not in (_NONE, _FALSE):
            raise InvalidRequest(f"{name} is for servers of programs: a gateway pairs them itself", param=name)
    try:
        program = _value(fields["program"])
        rows = _items(fields.get("rows", _NONE)) if fields.get("rows", _NONE) != _NONE else []
        segment, row = fields.get("segment", _NONE), _value(rows[0]) if rows else {}
        demand, beginning = _demand(program, segment, row, session, adapters)
        deadline = program.get("deadline_s")
    except (SglError, msgspec.MsgspecError, TypeError, ValueError, AttributeError, KeyError, RecursionError):
        return [PartBody(None, Demand(session=session))]
    if deadline is None:
        deadline = seconds
    elif type(deadline) in (int, float) and 0 < deadline <= MAX_SECONDS:
        deadline = min(float(deadline), seconds or MAX_SECONDS)
    else:
        deadline = None
    if not 0 < len(rows) <= MAX_ROWS:
        return [PartBody(None, demand, deadline, beginning=beginning)]
    shared = max(1.0, float(len(demand.blocks) * demand.block_tokens))
    own = max(0.0, demand.prompt - shared) + GENERATED * demand.generated
    most = min(sum(demand.adapters <= has for has in workers), len(rows))
    number = max(1, min(round(math.sqrt(len(rows) * own / shared)), most))
    size = -(-len(rows) // number)
    parts = []
    for first in range(0, len(rows), size):
        its = rows[first : first + size]
        body = _joined({**fields, "rows": msgspec.Raw(b"[" + b",".join(map(bytes, its)) + b"]")})
        prompt = demand.prompt + (len(its) - 1) * max(0.0, demand.prompt - shared)
        generated, requests = len(its) * demand.generated, len(its) * demand.requests
        its_demand = replace(demand, prompt=prompt, generated=generated, requests=requests)
        parts.append(PartBody(body if number > 1 else None, its_demand, deadline, first, len(its), beginning))
    return parts


def with_deadline(data: bytes | bytearray, seconds: float) -> bytes:
    """A program's body with another deadline."""
    fields = _fields(data)
    program = {**_fields(fields["program"]), "deadline_s": msgspec.Raw(msgspec.json.encode(seconds))}
    return _joined({**fields, "program": msgspec.Raw(_joined(program))})


def segment_of(
    data: bytes | bytearray, adapters: frozenset[str] = frozenset()
) -> tuple[int | None, bytes, frozenset[str]]:
    """A segment's number, if the client gave one, the segment, and which of these adapters it names. Raises
    InvalidRequest."""
    try:
        fields = _fields(data)
        segment = bytes(fields["segment"])
    except (msgspec.MsgspecError, ValueError, RecursionError, KeyError):
        segment = b""
    if not segment.startswith(b"{"):
        raise InvalidRequest("a segment is needed", param="segment")
    try:
        number = _value(fields.get("number", _NONE))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        number = 0
    if number is not None and (type(number) is not int or number < 1):
        raise InvalidRequest("a segment's number is an integer: 1 for the first added", param="number")
    try:
        asked = _asked({}, segment) & adapters if adapters else adapters
    except (msgspec.MsgspecError, TypeError, ValueError, AttributeError, KeyError, RecursionError):
        asked = frozenset()  # the worker says what is wrong
    return number, segment, asked


def _demand(
    program: Any, segment: msgspec.Raw, row: Any, session: str | None, adapters: frozenset[str]
) -> tuple[Demand, float]:
    """Of a program, its first segment and its first row, none of which is checked; and its beginning's tokens."""
    given = _fields(segment) if segment != _NONE else {}
    nodes = [_value(node) for node in _items(given.get("nodes", msgspec.Raw(b"[]")))[:MOST_NODES]]
    args = {**(program.get("args") or {}), **(row.get("args") or {})}
    its = ir.Program(**{name: value for name, value in program.items() if name != "v"} | {"args": args})
    first = ir.Segment(tuple((node["st"], node_from_json(node)) for node in nodes))
    future = future_of_program(its, first)
    requests = len({stream for stream, _ in first.nodes}) or 1
    asked = _asked(its.defaults, segment) & adapters if adapters else adapters
    demand = Demand(future.blocks, future.block_tokens, future.prompt, future.generated, session, requests, asked)
    return demand, future.beginning


def _asked(defaults: Mapping[str, Any], segment: bytes | msgspec.Raw) -> frozenset[str]:
    """The LoRA adapters that its nodes name. What is not there yet may take the one of the defaults."""
    given: dict[str, Any] = _value(segment) if segment != _NONE else {}
    params: list[Mapping[str, Any]] = [] if given.get("final") is True else [defaults]
    for node in given.get("nodes", ()):
        if node["op"] in (ir.Gen.op, ir.Select.op):  # a select has the defaults alone
            params.append({**defaults, **(node.get("params", {}) if node["op"] == ir.Gen.op else {})})
    names = [(each.get("extra") or {}).get("lora_path") for each in params]
    return frozenset(name for name in names if isinstance(name, str))


def _joined(fields: Mapping[str, msgspec.Raw]) -> bytes:
    return (
        b"{" + b",".join(msgspec.json.encode(name) + b":" + bytes(value) for name, value in fields.items()) + b"}"
    )
