"""Typed results: a Python type's constraint, and the parser of its texts. Pydantic is imported on first use. Strings of
a Literal or Enum are bare; everything else is JSON."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import logging
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sgl.errors import InvalidRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Typed:
    """A type's constraint as the IR's {kind: value}, and its parser."""

    constraint: Mapping[str, Any]
    parse: Callable[[str], Any]


def typed(schema: Any) -> Typed:
    """`schema`: a JSON Schema (dict or text), or a type for pydantic: model, Literal, Enum, list[int], int | None …"""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise InvalidRequest(f"schema is not JSON: {error}", param="schema") from error
        if not isinstance(schema, dict):
            raise InvalidRequest("schema must be a JSON Schema object", param="schema")
    if isinstance(schema, Mapping):
        return Typed({"json": dict(schema)}, json.loads)
    options = _bare_options(schema)
    if options is not None:
        return Typed({"regex": "(" + "|".join(re.escape(text) for text in options) + ")"}, options.__getitem__)
    return _typed_by_pydantic(schema)


def json_constraint(schema: Any) -> Mapping[str, Any]:
    """The constraint of `json_schema=`."""
    constraint = typed(schema).constraint
    if "json" not in constraint:
        raise InvalidRequest("json_schema must be a JSON Schema; pass types as schema=", param="json_schema")
    return constraint


def _bare_options(schema: Any) -> dict[str, Any] | None:
    """The texts and values of a Literal or Enum of strings."""
    if typing.get_origin(schema) is typing.Literal:
        values = {value: value for value in typing.get_args(schema)}
    elif isinstance(schema, type) and issubclass(schema, enum.Enum):
        values = {member.value: member for member in schema}
    else:
        return None
    return values if values and all(isinstance(text, str) for text in values) else None


def _typed_by_pydantic(schema: Any) -> Typed:
    if inspect.isroutine(schema):  # pydantic would describe its arguments
        raise InvalidRequest(f"schema={schema!r} is a function, not a type: did you mean tools=?", param="schema")
    try:
        return _adapted(schema)
    except TypeError:  # an unhashable annotation
        return _adapted.__wrapped__(schema)


@functools.lru_cache(maxsize=256)
def _adapted(schema: Any) -> Typed:
    import pydantic

    from sgl.lang.typed.exact_schema import NO_SCHEMA, ExactJsonSchema, not_enforced, why_none

    try:
        adapter: Any = pydantic.TypeAdapter(_understood(schema))
        json_schema = adapter.json_schema(schema_generator=ExactJsonSchema)
    except NO_SCHEMA as error:
        message = f"schema={schema!r} is neither a JSON Schema nor a type that has one: {why_none(error)}"
        raise InvalidRequest(message, param="schema") from error
    if open_parts := ", ".join(dict.fromkeys(not_enforced(json_schema))):
        logger.warning("schema=%r: a text may fail what no grammar can tell: %s", schema, open_parts)
    return Typed({"json": json_schema}, adapter.validate_json)


def _understood(schema: Any) -> Any:
    """`typing.TypedDict` as typing_extensions', which pydantic needs before Python 3.12."""
    if sys.version_info >= (3, 12):
        return schema
    if typing.is_typeddict(schema) and type(schema).__module__ == "typing":
        from typing_extensions import TypedDict

        hints = typing.get_type_hints(schema, include_extras=True)
        fields: dict[str, Any] = {}
        for name, hint in hints.items():
            stated = typing.get_origin(hint)
            if stated in (typing.Required, typing.NotRequired):  # string annotations hide both from the class
                hint = typing.get_args(hint)[0]
            else:
                stated = typing.Required if name in schema.__required_keys__ else typing.NotRequired
            fields[name] = stated[_understood(hint)]
        make: Any = TypedDict  # type checkers want a class statement
        rebuilt = make(schema.__name__, fields)
        rebuilt.__doc__ = schema.__doc__
        return rebuilt
    origin, args = typing.get_origin(schema), typing.get_args(schema)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_understood(arg) for arg in args)]  # noqa: UP007 - computed
    if args and origin in (list, dict, tuple, set, frozenset):
        return origin[tuple(_understood(arg) for arg in args)]
    return schema
