"""Which kinds of values the schemas of arguments allow, where text alone does not tell a string from another value."""

from __future__ import annotations

import contextlib
import decimal
import json
import math
from collections.abc import Mapping
from typing import Any

KINDS = frozenset({"string", "number", "boolean", "null", "array", "object"})
_MAX_DEPTH = 32
_EXACT = decimal.Context(prec=4300, Emax=4299)  # of so many digits integers are read and written


def _number(text: str) -> float:
    """Beyond floats an integer, so that it can be written again; infinity if it had more digits."""
    number = float(text)
    if math.isinf(number):
        with contextlib.suppress(ArithmeticError):
            return int(_EXACT.create_decimal(text))
    return number


parsed = json.JSONDecoder(parse_float=_number, parse_constant=int).decode
"""The value of a JSON text. Raises ValueError, also for NaN and Infinity, which are no numbers, and RecursionError."""


def types_of(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """The types that the schema of arguments allows for the value of a key; "number" stands for integers too."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = parameters.get("additionalProperties", True)
    return _types(schema, parameters, 0)


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that was written as it is if it is a string, else as JSON."""
    try:
        value = parsed(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _kind(value)
    is_text = "string" in types and (kind == "string" or kind not in types)
    return json.dumps(text, ensure_ascii=False) if is_text else text.strip()


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return KINDS
    found = KINDS
    reference = schema.get("$ref")
    if isinstance(reference, str):
        found &= _types(_resolved(reference, root), root, depth + 1)
    given = schema.get("type")
    if given is not None:
        names = given if isinstance(given, list) else [given]
        found &= {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    if isinstance(schema.get("enum"), list):
        found &= set(map(_kind, schema["enum"]))
    if "const" in schema:
        found &= {_kind(schema["const"])}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            found &= frozenset().union(*(_types(each, root, depth + 1) for each in schema[keyword]))
    if isinstance(schema.get("allOf"), list):
        for each in schema["allOf"]:
            found &= _types(each, root, depth + 1)
    return found


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within the document names; None where that is elsewhere."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].strip("/").split("/") if len(reference) > 1 else ():
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (int | float, "number"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"
