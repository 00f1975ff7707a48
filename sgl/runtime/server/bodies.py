"""Bytes of a body to a checked model. Limits on values and depth, and stopping at the first error, bound the work."""

from __future__ import annotations

import math
import re
from typing import Any, TypeVar, cast

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, from_json
from pydantic_core.core_schema import no_info_before_validator_function

from sgl.errors import ContextTooLong, InvalidRequest
from sgl.runtime.server.errors import as_invalid_request

Body = TypeVar("Body", bound=BaseModel)

MAX_VALUES = 1 << 21
"""JSON values and keys in one body: enough for the ids of a batch of long prompts."""
MAX_KEYS = 1 << 16
"""Fields of one object."""
MAX_TEXTS = 1 << 19
"""Texts, or lists of token ids, in one list."""
MAX_OBJECTS = 10_000
"""Objects in one list, such as messages."""
MAX_DEPTH = 200
"""Nesting; also the JSON parser's limit."""
MAX_DIGITS = 1000
"""Of one number; schemas may have large bounds."""

_MAX_BITS = int(MAX_DIGITS * math.log2(10))
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_PLACE = re.compile(r" at line 1 column (\d+)$")


def _as_integer(value: Any) -> Any:
    """4.0 is the integer 4, as in JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bounded(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bounded(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    function = schema.get("function")
    if isinstance(function, dict) and function.get("function") is _as_integer:  # of a model within this one
        return schema
    if schema.get("type") == "int":
        return no_info_before_validator_function(_as_integer, cast(CoreSchema, schema))
    if schema.get("type") == "list" and schema.get("items_schema", {}).get("type") == "int":  # ids: as they are
        return {**schema, "fail_fast": True, "max_length": schema.get("max_length", MAX_VALUES)}
    changed = {name: _bounded(item) for name, item in schema.items()}
    if schema.get("type") != "list":
        return changed
    items = schema.get("items_schema", {}).get("type")
    most = MAX_TEXTS if items in ("str", "list", "any") else MAX_OBJECTS
    return {**changed, "fail_fast": True, "max_length": schema.get("max_length", most)}


class Bounded(BaseModel):
    """A body or part of one. Lists are bounded and stop at the first error: a million errors take gigabytes."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Pydantic's, with those bounds, and integers also as 4.0."""
        schema: CoreSchema = _bounded(handler(source))
        return schema


def parse(data: bytes | bytearray, model: type[Body], context_length: int | None = None) -> Body:
    """Parse a body. Raises InvalidRequest with the first error, ContextTooLong for too many token ids."""
    check_number(data)
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise _no_json(str(error)) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body is not a JSON object, but {_kind(value)}")
    check_values(value)
    try:
        body = model.model_validate(value)
    except ValidationError as error:
        raise as_invalid_request(error, list(model.model_fields)) from None
    if context_length is not None:
        _check_ids(body, context_length)
    return body


def check_number(data: bytes | bytearray) -> None:
    """Raise InvalidRequest for more than `MAX_VALUES` values."""
    if most_values(data) > MAX_VALUES and (number := most_values(_STRING.sub(b"0", data))) > MAX_VALUES:
        raise InvalidRequest(f"the body holds {number} values, and {MAX_VALUES} are the most that one may have")


def most_values(data: bytes | bytearray) -> int:
    """An upper bound of the number of values: commas and brackets inside texts count too."""
    return 1 + data.count(b",") + data.count(b":") + data.count(b"[") + data.count(b"{")


def load_json(text: str, what: str, *, param: str | None = None, may_be_cut: bool = False) -> Any:
    """Parse JSON inside a body's text under the same limits. may_be_cut: its end may be missing; what is complete
    counts, and the last string as far as it goes. Raises InvalidRequest."""
    partial: Any = "trailing-strings" if may_be_cut else False
    try:
        value = from_json(text.encode("utf-8", "surrogatepass"), allow_inf_nan=False, allow_partial=partial)
    except ValueError as error:
        raise _no_json(str(error), what, param) from None
    check_values(value, param)
    return value


def check_values(value: Any, param: str | None = None) -> None:
    """Raise InvalidRequest for infinite or endless numbers and for objects with too many fields."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            if len(item) > MAX_KEYS:
                message = f"an object has {len(item)} fields, and {MAX_KEYS} are the most that one may have"
                raise InvalidRequest(message, param=param)
            left += item.values()
        elif isinstance(item, list):
            kinds = set(map(type, item))
            if kinds <= {str, bool, type(None)}:
                continue
            if kinds == {int}:
                left += (min(item), max(item))
            else:
                left += item
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise InvalidRequest("a number is too large: it must be finite", param=param)
        elif isinstance(item, int) and item.bit_length() > _MAX_BITS:
            raise InvalidRequest(f"a number has more than {MAX_DIGITS} digits", param=param)


def _check_ids(body: BaseModel, context_length: int) -> None:
    for name in ("input_ids", "prompt"):
        given = getattr(body, name, None)
        several = given if isinstance(given, list) and given and isinstance(given[0], list) else [given]
        for ids in several:
            if isinstance(ids, list) and ids and isinstance(ids[0], int) and len(ids) > context_length:
                raise ContextTooLong.of(len(ids), context_length, param=name)


def _no_json(said: str, what: str = "the body", param: str | None = None) -> InvalidRequest:
    said = _PLACE.sub(r" at byte \1", said)
    if said.startswith("recursion limit"):
        return InvalidRequest(f"{what} is nested more than {MAX_DEPTH} deep", param=param)
    if said.startswith("number out of range"):
        return InvalidRequest(f"{what} has a number of more than {MAX_DIGITS} digits", param=param)
    if "hex escape" in said:
        said += ": half of a surrogate pair is no character"
    return InvalidRequest(f"{what} is not JSON: {said}", param=param)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
