"""Checks programs and segments from a wire before execution: each message's shape against the JSON Schema below, then,
in a `Checker` per program, addresses, roles and limits. For servers; recording clients need none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sgl.errors import InvalidRequest, nearest_name
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.choices import METHODS
from sgl.lang.ir.encoding import segment_from_json
from sgl.lang.ir.reasoning import FORMATS
from sgl.lang.ir.sampling import MAX_SECONDS, MAX_WHOLE, PARAMS, shown


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may ask for."""

    nodes: int = 10_000
    streams: int = 4_097
    characters: int = 16_000_000
    constraint_characters: int = 1_000_000
    choices: int = 4_096
    requests: int = 65_536  # at once: sum of the streams' widest nodes, times rows
    nodes_of_rows: int = 1_000_000


_STRING = {"type": "string"}
_INDEX = {"type": "integer", "minimum": 0}
_NAME = {"type": ["string", "null"]}
_INTEGER = {"type": "integer"}
_OBJECT = {"type": "object"}
_OR_NULL = {"type": ["integer", "null"]}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _tuple(*items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "prefixItems": list(items), "minItems": len(items), "maxItems": len(items)}


def _list(items: dict[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


_SHAPES: dict[str, dict[str, Any]] = {
    "integer": _INTEGER,
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "texts": _list(_STRING),
    "object": _OBJECT,
    "ids": _list(_INTEGER),
}
SAMPLING_SCHEMA = _object(**{name: _SHAPES[param.kind] for name, param in PARAMS.items()})
SAMPLING_SCHEMA["properties"]["n"] = {**_INTEGER, "minimum": PARAMS["n"].low, "maximum": PARAMS["n"].high}
_TEXT_FUNCTIONS = [
    _tuple({"enum": ["strip", "lower", "upper"]}),
    _tuple({"const": "split"}, _NAME, _INTEGER),
    _tuple({"const": "slice"}, _OR_NULL, _OR_NULL),
    _tuple({"const": "replace"}, _STRING, _STRING),
]
_NARROWED: dict[tuple[type, str], dict[str, Any]] = {
    (ir.Gen, "params"): SAMPLING_SCHEMA,
    (ir.Gen, "constraint"): {**_object(regex=_STRING, json=_OBJECT, ebnf=_STRING), "maxProperties": 1},
    (ir.Gen, "reasoning"): {"enum": list(FORMATS)},
    (ir.Select, "choices"): _list({"type": "string", "minLength": 1}, minItems=1),
    (ir.Select, "method"): {"enum": list(METHODS)},
    (ir.Ref, "functions"): _list({"anyOf": _TEXT_FUNCTIONS}, maxItems=64),
    (ir.Fork, "children"): _list(_INDEX, minItems=1),
    (ir.Program, "seed"): {**_INTEGER, "minimum": -MAX_WHOLE, "maximum": MAX_WHOLE},
    (ir.Program, "defaults"): SAMPLING_SCHEMA,
    (ir.Program, "lease_s"): {"type": "number", "minimum": 0, "maximum": ir.MAX_LEASE_S},
    (ir.Program, "deadline_s"): {"type": ["number", "null"], "minimum": 0, "maximum": MAX_SECONDS},
    (ir.Program, "chat_template"): _NAME,
    (ir.Program, "speculate_tokens"): _OR_NULL,
}
"""Fields narrower than their types."""
_PLAIN: dict[Any, dict[str, Any]] = {
    str: _STRING,
    int: _INDEX,
    float: {"type": "number"},
    bool: {"type": "boolean"},
    Any: {},
}


def _schema_of(hint: Any) -> dict[str, Any]:
    """The wire schema of a field's type; integers are addresses."""
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return {"enum": list(inner)}
    if get_origin(hint) is tuple:
        return _list(_schema_of(inner[0]))
    if get_origin(hint) is Mapping:
        return {**_OBJECT, **({"additionalProperties": item} if (item := _schema_of(inner[1])) else {})}
    if type(None) in inner:
        schema = _schema_of(inner[0])
        return {"type": [schema["type"], "null"]} if "type" in schema else schema
    return _PLAIN[hint]


def _message(cls: type, **more: Any) -> dict[str, Any]:
    """The JSON Schema of what `to_json` makes of a class, with `more` fields first."""
    hints = get_type_hints(cls)
    sent = [item for item in fields(cls) if not item.metadata.get("local")]
    shapes = {item.name: _NARROWED.get((cls, item.name)) or _schema_of(hints[item.name]) for item in sent}
    needed = [item.name for item in sent if item.default is MISSING and item.default_factory is MISSING]
    return _object(*more, *needed, **more, **shapes)


NODE_SCHEMAS = {op: _message(cls, st=_INDEX, op={"const": op}) for op, cls in ir.NODES.items()}
PROGRAM_SCHEMA = _message(ir.Program, v={"const": ir.VERSION})
SEGMENT_SCHEMA = _object(
    "nodes",
    nodes=_list({"anyOf": [{"$ref": f"#/$defs/{op}"} for op in NODE_SCHEMAS]}),
    answers=_list(_object("st", "index", "turns", st=_INDEX, index=_INDEX, turns=_list(_message(ir.Turn)))),
    final={"type": "boolean"},
)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of programs and segments."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"sgl program, version {ir.VERSION}",
        "anyOf": [{"$ref": "#/$defs/program"}, {"$ref": "#/$defs/segment"}],
        "$defs": {"program": PROGRAM_SCHEMA, "segment": SEGMENT_SCHEMA, **NODE_SCHEMAS},
    }


def program_from_wire(data: Any) -> ir.Program:
    """Parse a program. Raises InvalidRequest with the place."""
    if isinstance(data, Mapping) and data.get("v") != ir.VERSION:
        raise InvalidRequest(f"IR version {shown(data.get('v'))} is not {ir.VERSION}", param="v")
    _check(data, PROGRAM_SCHEMA, "program")
    return ir.Program(**{key: value for key, value in data.items() if key != "v"})


@dataclass
class _StreamCheck:
    length: int = 0
    role: str | None = None
    scopes: list[str] = field(default_factory=list)
    texts: set[int] = field(default_factory=set)  # nodes that refs may point at
    tool_gens: set[int] = field(default_factory=set)
    is_closed: bool = False
    parent: int | None = None
    width: int = 0  # requests of its widest node


class Checker:
    """Checks one program's segments in order."""

    def __init__(self, program: ir.Program, limits: Limits | None = None, *, rows: int = 1) -> None:
        """`rows`: how often the program runs."""
        self._program = program
        self._rows = rows
        self._num_requests = 0
        self._limits = limits or Limits()
        self._streams = {0: _StreamCheck()}
        self._num_nodes = 0
        self.num_characters = 0
        """In everything checked."""
        self._is_final = False
        self._waiting: set[tuple[int, int]] = set()  # unanswered tool_results nodes

    def segment(self, data: Any) -> ir.Segment:
        """Parse a segment. Raises InvalidRequest; the program is then unusable."""
        is_mapping = isinstance(data, Mapping) and isinstance(data.get("nodes"), list)
        _check({**data, "nodes": []} if is_mapping else data, SEGMENT_SCHEMA, "segment")
        if self._is_final and (data["nodes"] or not data.get("answers")):
            raise InvalidRequest("after the final segment only answers may come", param="final")
        for i, item in enumerate(data["nodes"]):
            place = f"nodes[{i}]"
            op = item.get("op") if isinstance(item, Mapping) else None
            if not isinstance(op, str) or op not in NODE_SCHEMAS:
                raise InvalidRequest(
                    f"{place}: unknown op {shown(op)}; there are {', '.join(NODE_SCHEMAS)}", param=place
                )
            _check(item, NODE_SCHEMAS[op], place)
            self._node(item, place)
        for i, answer in enumerate(data.get("answers", ())):
            self._answer(answer, f"answers[{i}]")
        self._is_final = self._is_final or bool(data.get("final"))
        return segment_from_json(data)

    def _answer(self, answer: Mapping[str, Any], place: str) -> None:
        address = answer["st"], answer["index"]
        if address not in self._waiting:
            raise InvalidRequest(
                f"{place}: node {address[1]} of stream {address[0]} waits for no answer", param=place
            )
        self._waiting.remove(address)
        self.num_characters += _characters(answer)
        self._limit("characters", self.num_characters, self._limits.characters, place)

    def _node(self, item: Mapping[str, Any], place: str) -> None:
        stream = self._streams.get(item["st"])
        if stream is None:
            raise InvalidRequest(f"{place}: stream {item['st']} was never forked", param=place)
        if stream.is_closed:
            raise InvalidRequest(f"{place}: stream {item['st']} was joined", param=place)
        self._count(item, place)
        problem = self._meaning(item, stream)
        if problem:
            raise InvalidRequest(f"{place}: {problem}", param=place)
        stream.length += 1

    def _count(self, item: Mapping[str, Any], place: str) -> None:
        self._num_nodes += 1
        self.num_characters += _characters(item) - len(item["op"])
        limits = self._limits
        num_streams = len(self._streams) + len(item["children"] if item["op"] == "fork" else ())
        self._limit("nodes", self._num_nodes, limits.nodes, place)
        self._limit("streams", num_streams, limits.streams, place)
        if self._rows > 1:
            self._limit("nodes (rows x nodes)", self._rows * self._num_nodes, limits.nodes_of_rows, place)
        self._widen(self._streams[item["st"]], item)
        self._limit("requests (rows x streams x n)", self._rows * self._num_requests, limits.requests, place)
        self._limit("choices", len(item.get("choices", ())), limits.choices, place)
        constraint = _characters(item.get("constraint"))
        self._limit("constraint_characters", constraint, limits.constraint_characters, place)
        self._limit("characters", self.num_characters, limits.characters, place)

    def _widen(self, stream: _StreamCheck, item: Mapping[str, Any]) -> None:
        """Count concurrent requests: nodes of one stream run in turn, streams in parallel."""
        width = len(item.get("choices", ()))
        if item["op"] == "gen":
            width = item.get("params", {}).get("n", self._program.defaults.get("n", 1))
        self._num_requests += max(0, width - stream.width)
        stream.width = max(stream.width, width)

    @staticmethod
    def _limit(what: str, count: int, limit: int, place: str) -> None:
        if count > limit:
            raise InvalidRequest(f"{place}: {count} {what}, and the limit is {limit}", param=what)

    def _meaning(self, item: Mapping[str, Any], stream: _StreamCheck) -> str | None:
        """What is wrong with a node in its place, or None."""
        match item["op"]:
            case "role_begin" | "role_end" as op:
                if problem := ir.turn_problem(op, item["role"], stream.role):
                    return problem
                stream.role = item["role"] if op == "role_begin" else None
            case "arg":
                if item["name"] not in self._program.args:
                    return f"the program was opened without an argument {item['name']!r}"
            case "gen" | "select" | "ref":
                if item["op"] == "ref":
                    target, index = self._streams.get(item["stream"]), item["index"]
                    if target is None or index not in target.texts:
                        return f"node {index} of stream {item['stream']} is no earlier gen, select, ref or scope"
                stream.texts.add(stream.length)
                if item.get("tools"):
                    stream.tool_gens.add(stream.length)
            case "tool_results":
                if item["index"] not in stream.tool_gens:
                    return f"node {item['index']} is no gen with tools"
                self._waiting.add((item["st"], stream.length))
            case "scope_begin":
                stream.scopes.append(item["name"])
            case "scope_end":
                if not stream.scopes or stream.scopes.pop() != item["name"]:
                    return f"no scope {item['name']!r} is open"
                stream.texts.add(stream.length)
            case "fork":
                for child in item["children"]:
                    if child in self._streams:
                        return f"stream {child} exists already"
                    self._streams[child] = _StreamCheck(role=stream.role, parent=item["st"])
            case "join":
                for child in item["children"]:
                    branch = self._streams.get(child)
                    if branch is None or branch.parent != item["st"] or branch.is_closed:
                        return f"stream {child} is no open branch of stream {item['st']}"
                    branch.is_closed = True
        return None


_TYPES: dict[str, Any] = {
    "string": str,
    "object": Mapping,
    "array": list | tuple,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": int | float,
}


def _characters(value: Any) -> int:
    """Characters of strings and inner keys; other values count one. Raises InvalidRequest for infinite numbers."""
    total, left = 0, list(value.values()) if isinstance(value, Mapping) else [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            left += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            left += item
        else:
            total += 1
            if isinstance(item, float) and not math.isfinite(item):
                raise InvalidRequest(f"a program holds finite numbers only, not {item}", param="nodes")
    return total


def _check(value: Any, schema: Mapping[str, Any], place: str) -> None:
    """Check a value against the subset of JSON Schema used above."""
    problem = _mismatch(value, schema)
    if problem:
        raise InvalidRequest(f"{place}: {problem}", param=place)
    if isinstance(value, Mapping):
        known = schema.get("properties", {})
        for key, item in value.items():
            further = known.get(key, schema.get("additionalProperties", True))
            if further is False:
                hint = nearest_name(key, known)
                raise InvalidRequest(f"{place}: unknown field {key!r}{hint}", param=f"{place}.{key}")
            if further is not True:
                _check(item, further, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        first = schema.get("prefixItems", ())
        for i, item in enumerate(value):
            further = first[i] if i < len(first) else schema.get("items")
            if further is not None:
                _check(item, further, f"{place}[{i}]")


def _mismatch(value: Any, schema: Mapping[str, Any]) -> str | None:
    """How the value itself, without items and fields, violates the schema."""
    if "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        is_bool = isinstance(value, bool)
        if not any(isinstance(value, _TYPES[name]) and is_bool <= (name == "boolean") for name in types):
            return f"expected {' or '.join(types)}, not {type(value).__name__}"
    if problem := _number_problem(value):
        return problem
    if "const" in schema and value != schema["const"]:
        return f"expected {schema['const']!r}, not {shown(value)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"expected one of {', '.join(map(repr, schema['enum']))}, not {shown(value)}"
    if "anyOf" in schema and not any(_fits(value, option) for option in schema["anyOf"]):
        return f"{shown(value)} has none of the forms it may have"
    for key in schema.get("required", ()):
        if key not in value:
            return f"{key!r} is missing"
    return _size_mismatch(value, schema)


def _number_problem(value: Any) -> str | None:
    """What is wrong with a number, or None."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"expected a finite number, not {value}"
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        return "expected a number of at most 64 bits"
    return None


def _size_mismatch(value: Any, schema: Mapping[str, Any]) -> str | None:
    if value is None:
        return None
    size = len(value) if isinstance(value, str | list | tuple | Mapping) else value
    for low in ("minimum", "minItems", "minLength"):
        if low in schema and size < schema[low]:
            return f"{size}{_unit(low)} less than {schema[low]}"
    for high in ("maximum", "maxItems", "maxProperties"):
        if high in schema and size > schema[high]:
            return f"{size}{_unit(high)} more than {schema[high]}"
    return None


def _unit(keyword: str) -> str:
    """What is counted, and the verb."""
    return {"Items": " items are", "Length": " characters are", "Properties": " fields are"}.get(keyword[3:], " is")


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    try:
        _check(value, schema, "")
    except InvalidRequest:
        return False
    return True
