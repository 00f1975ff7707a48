"""JSON Schemas of Python types that allow only texts which pydantic accepts.

Pydantic's own leave gaps as constraints: a Decimal may be any string, a URL any scheme, an integer key any text. What
only Python can check, such as validators and files, is named in a `$comment`. Imported on demand, with pydantic."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from typing import Any, TypeAlias

from pydantic import ByteSize, EncodedStr
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core import SchemaError, core_schema

from sgl.lang.typed.alias_paths import Places, Unclear, has_aliases

NO_SCHEMA = (NameError, TypeError, PydanticUserError, PydanticSchemaGenerationError, SchemaError)
"""Pydantic's errors for types without JSON Schema."""

Change: TypeAlias = Callable[[dict[str, Any], Any], dict[str, Any]]
"""From pydantic's JSON Schema and the core schema to ours."""

_LARGEST = 1e300  # of finite numbers
_FLOAT_DIGITS = 15  # kept by every float
_CLOCK = "[0-9]{2}:[0-9]{2}:[0-5][0-9]"  # no leap second
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"  # no year 0
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_DATE = rf"{_YEAR}-[0-9]{{2}}-[0-9]{{2}}"
_NAIVE = rf"{_DAY}T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?"
_DURATION = "[^0-9]*(?:[0-9]{1,6}[^0-9]+)*"

_KEYS = {
    "int": "0|-?[1-9][0-9]{0,17}",
    "float": r"(?:0|-?[1-9][0-9]{0,14})(?:\.[0-9]{1,14})?",
    "decimal": r"(?:0|-?[1-9][0-9]{0,14})(?:\.[0-9]{1,14})?",
    "bool": "true|false",
}
_UNBOUNDED = {"type", "strict", "ref", "metadata", "serialization", "allow_inf_nan"}
"""Keys of a number's schema that set no bounds."""
_FEW_KEYS = 1000
_NOT_ENFORCED = "not enforced: "
_BYTE_SIZE = "^[0-9]{1,12} ?(?:[kKmMgGtTpP]i?)?[bB]$"
_COMPLEX = r"-?[0-9]{1,14}(?:\.[0-9]{1,14})?(?:[+-][0-9]{1,14}(?:\.[0-9]{1,14})?j)?"
_FINITE = {"string", "boolean", "null"}
"""Item types whose equality a grammar can see."""

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_LABEL = "[a-zA-Z0-9]{1,30}(?:-[a-zA-Z0-9]{1,30})?"
_HOST = rf"(?:(?:{_LABEL}\.)*[a-zA-Z]{{1,30}}|{_IPV4})(?::[0-9]{{1,4}})?"
_WITH_HOST = {"http", "https", "ws", "wss", "ftp"}
_CREDENTIALS = "(?:[a-zA-Z0-9_-]{0,30}(?::[a-zA-Z0-9_-]{1,60})?@)?"

_TWO = "[A-Za-f][A-HQ-Xg-nw-z0-3]"  # sextets of two bytes below 128
_LAST = f"(?:[A-Za-f][AQgw]==|{_TWO}[AEIMQUYcgkosw048]=)?"
_TEXT = "text/plain"

_IP = {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}
_FORMATS: dict[str, dict[str, Any]] = {
    "ipvanyaddress": _IP,
    "ipvanyinterface": _IP,
    "ipvanynetwork": _IP,
    "ipv4interface": {"pattern": rf"^{_IPV4}(?:/(?:[12]?[0-9]|3[0-2]))?$"},
    "ipv6interface": {"format": "ipv6"},
    "ipv4network": {
        "pattern": rf"^(?:{_OCTET}\.0\.0\.0/8|(?:{_OCTET}\.){{2}}0\.0/16|(?:{_OCTET}\.){{3}}0/24|{_IPV4}(?:/32)?)$"
    },
    "ipv6network": {"format": "ipv6"},
    "base64": {"pattern": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$"},
    "base64url": {
        "pattern": "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-][AQgw]==|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048]=)?$"
    },
    "base64 text": {"pattern": f"^(?:{_TWO}[ABEFIJMNQRUVYZcdghklopstwx014589][A-Za-z0-9+/])*{_LAST}$"},
    "base64url text": {"pattern": f"^(?:{_TWO}[ABEFIJMNQRUVYZcdghklopstwx014589][A-Za-z0-9_-])*{_LAST}$"},
    **{f"uuid{n}": {"format": "uuid", "pattern": f"^.{{14}}{n}.{{4}}[89abAB]"} for n in range(1, 9)},
}
"""Schemas for pydantic's formats that JSON Schema lacks."""


class ExactJsonSchema(GenerateJsonSchema):
    """For pydantic's `json_schema(schema_generator=…)`. Objects are closed unless `extra="allow"`: a model that may
    invent fields does so until its tokens run out."""

    _configs: list[Any]
    """Of the models, TypedDicts and dataclasses around the current fields."""

    def generate(self, schema: Any, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
        """See GenerateJsonSchema."""
        self._configs = [{}]
        closed: dict[str, Any] = _closed(super().generate(schema, mode))
        return closed

    def generate_inner(self, schema: Any) -> dict[str, Any]:
        """See `_by_code`: a type may state a function's schema itself."""
        if schema["type"] in ("model", "dataclass", "typed-dict"):
            self._configs.append(schema.get("config", {}))
            try:
                return super().generate_inner(schema)
            finally:
                self._configs.pop()
        found: dict[str, Any] = super().generate_inner(schema)
        is_plain = schema["type"] == "function-plain" and "$comment" not in found
        return _by_code(found, schema) if is_plain else found

    def build_schema_type_to_method(self) -> dict[Any, Callable[[Any], dict[str, Any]]]:
        """Pydantic's methods by type of core schema, changed by `_at_places` and `_CHANGES`."""
        methods = super().build_schema_type_to_method()
        for kind in ("model-fields", "dataclass-args", "typed-dict"):
            methods[kind] = partial(self._at_places, methods[kind])
        for kind, change in _CHANGES.items():
            methods[kind] = partial(_changed, methods[kind], change)
        return methods

    def _at_places(self, make: Callable[[Any], dict[str, Any]], schema: Any) -> dict[str, Any]:
        if not has_aliases(schema):
            return make(schema)
        try:
            places = Places(schema, self._configs[-1])
            return places.nested(make(places.plain(schema)))
        except Unclear as error:
            raise PydanticInvalidForJsonSchema(str(error)) from error

    def str_schema(self, schema: core_schema.StringSchema) -> dict[str, Any]:
        """Lengths count after stripping."""
        found = super().str_schema(schema)
        if schema.get("strip_whitespace") and "minLength" in found:
            found.setdefault("pattern", r"^\S(?:[\s\S]*\S)?$")
        return found

    def float_schema(self, schema: core_schema.FloatSchema) -> dict[str, Any]:
        """Finite if required."""
        found = super().float_schema(schema)
        return _finite(found) if schema.get("allow_inf_nan") is False else found

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> dict[str, Any]:
        """A number, not a string, with the allowed digits."""
        whole: dict[str, Any] = super().decimal_schema(schema)
        found: dict[str, Any] = whole["anyOf"][0] if "anyOf" in whole else whole
        digits, places = schema.get("max_digits"), schema.get("decimal_places")
        if places is None and digits is not None:
            places = digits // 2
        if places is not None:
            found.setdefault("multipleOf", float(f"1e-{places}"))
        if digits is not None and places is not None:
            exact = Decimal(10) ** (digits - places) - Decimal(10) ** -places
            largest = float(exact) if digits <= _FLOAT_DIGITS else int(exact)
            found["minimum"] = max(found.get("minimum", -largest), -largest)
            found["maximum"] = min(found.get("maximum", largest), largest)
        return found if schema.get("allow_inf_nan") else _finite(found)

    def fraction_schema(self, schema: Any) -> dict[str, Any]:
        """Python's spelling: "3/4"."""
        return {"type": "string", "pattern": "^-?(?:0|[1-9][0-9]{0,17})(?:/[1-9][0-9]{0,17})?$"}

    def complex_schema(self, schema: core_schema.ComplexSchema) -> dict[str, Any]:
        """Python's spelling: "1+2j"."""
        return {"type": "string", "pattern": f"^{_COMPLEX}$"}

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> dict[str, Any]:
        """With an offset, unless the type forbids it."""
        found = super().datetime_schema(schema)
        if schema.get("tz_constraint") == "naive" and found.get("type") == "string":
            return _in_time({"type": "string", "pattern": f"^{_NAIVE}$"}, schema)
        return _in_time(_starting_with(found, f"{_DATE}[Tt]{_CLOCK}"), schema)

    def url_schema(self, schema: core_schema.UrlSchema) -> dict[str, Any]:
        """An allowed scheme, with a host if it needs one."""
        found = super().url_schema(schema)
        if schemes := schema.get("allowed_schemes"):
            without = "" if schema.get("host_required") or _WITH_HOST & {*schemes} else "|/"
            host = "/" if "file" in schemes else f"(?:{_CREDENTIALS}{_HOST}(?:[/?#]|$){without})"
            _starting_with(found, f"{_one_of(schemes)}://{host}")
        return found

    def multi_host_url_schema(self, schema: core_schema.MultiHostUrlSchema) -> dict[str, Any]:
        """Scheme, credentials, host and name."""
        scheme = _one_of(schema.get("allowed_schemes") or ["db"])
        return {"type": "string", "pattern": f"^{scheme}://{_CREDENTIALS}{_HOST}(?:/[a-zA-Z0-9_-]{{0,60}})?$"}

    def dict_schema(self, schema: core_schema.DictSchema) -> dict[str, Any]:
        """Keys are texts of the key's type."""
        found = super().dict_schema(schema)
        keys: Any = schema.get("keys_schema", {"type": "any"})
        for values in found.pop("patternProperties", {}).values():  # would leave other keys open
            found["additionalProperties"] = values
        if keys["type"] != "any" and (names := self._names(keys)) != {"type": "string"}:
            found["propertyNames"] = names
        return found

    def _names(self, keys: Any) -> dict[str, Any]:
        """The key texts of a type."""
        if keys["type"] in _KEYS:
            if keys.keys() <= _UNBOUNDED:
                return {"pattern": f"^(?:{_KEYS[keys['type']]})$"}
            values = _few_integers(keys)
            if values is None:
                return self.handle_invalid_for_json_schema(keys, "the keys of a dict, numbers within such bounds")
            return {"enum": [str(value) for value in values]}
        if keys["type"] == "union":
            choices = (choice[0] if isinstance(choice, tuple) else choice for choice in keys["choices"])
            some = [self._names(choice) for choice in choices]
            return {"type": "string"} if {"type": "string"} in some else {"anyOf": some}
        names: dict[str, Any] = dict(self.generate_inner(keys))
        if not self._is_text(names):
            self.handle_invalid_for_json_schema(keys, f"the keys of a dict, {keys['type']}, which are no texts")
        return names

    def _is_text(self, found: dict[str, Any]) -> bool:
        """Whether a schema describes strings; listed values of other types match no text."""
        for _ in range(8):  # chained references
            found = self.get_schema_from_definitions(found["$ref"]) or {} if "$ref" in found else found
        if "anyOf" in found:
            return all(map(self._is_text, found["anyOf"]))
        return found.get("type") == "string" or "enum" in found or "const" in found

    def json_schema(self, schema: core_schema.JsonSchema) -> dict[str, Any]:
        """No grammar can check JSON inside a string."""
        return self.handle_invalid_for_json_schema(schema, "Json, a text that holds JSON: use the type inside it")

    def function_after_schema(self, schema: core_schema.AfterValidatorFunctionSchema) -> dict[str, Any]:
        """See `_by_code`."""
        owner = getattr(schema["function"]["function"], "__self__", None)
        if isinstance(owner, type) and issubclass(owner, ByteSize):
            return {"anyOf": [{"type": "string", "pattern": _BYTE_SIZE}, {"type": "integer", "minimum": 0}]}
        found = _by_code(super().function_after_schema(schema), schema)
        return {**found, "contentMediaType": _TEXT} if isinstance(owner, EncodedStr) else found


def not_enforced(schema: Any) -> Iterator[str]:
    """What an exact schema's comments say is not enforced."""
    if isinstance(schema, dict):
        comment = schema.get("$comment")
        if isinstance(comment, str) and comment.startswith(_NOT_ENFORCED):
            yield comment.removeprefix(_NOT_ENFORCED)
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from not_enforced(inner)


def _by_code(found: dict[str, Any], schema: Any) -> dict[str, Any]:
    """The schema with a comment naming its validator, unless pydantic's own and covered elsewhere."""
    function = schema["function"]["function"]
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", repr(function))
    is_own = str(getattr(function, "__module__", "")).startswith(("pydantic.", "pydantic_core."))
    # the first calls a predicate
    if is_own and "apply_known_metadata" not in name and name not in _OF_THE_WORLD and "iana_tz" not in name:
        return found
    return _said(found, f"the validator {name}")


_OF_THE_WORLD = {"PathType.validate_file", "PathType.validate_directory", "PathType.validate_new"} | {
    "PathType.validate_socket",
    "import_string",
}
"""Pydantic's validators that look outside."""


def _in_time(found: dict[str, Any], schema: Any) -> dict[str, Any]:
    """A time's schema with a comment on bounds not enforced."""
    if "now_op" in schema:
        found = _said(found, f"in the {schema['now_op']}")
    bounds = [f"{name} {schema[name]}" for name in ("gt", "ge", "lt", "le") if name in schema]
    return _said(found, ", ".join(bounds)) if bounds else found


def _said(found: dict[str, Any], what: str) -> dict[str, Any]:
    before = f"{found['$comment']}, " if "$comment" in found else _NOT_ENFORCED
    return {**found, "$comment": before + what}


def _few_integers(keys: Any) -> range | None:
    """The few integers within a schema's bounds, or None."""
    low = keys["ge"] if "ge" in keys else keys["gt"] + 1 if "gt" in keys else None
    high = keys["le"] if "le" in keys else keys["lt"] - 1 if "lt" in keys else None
    step = keys.get("multiple_of", 1)
    if keys["type"] != "int" or low is None or high is None or high - low > _FEW_KEYS or step < 1:
        return None
    return range(-(-low // step) * step, high + 1, step)


def why_none(error: Exception) -> str:
    """A `NO_SCHEMA` error's text without advice on pydantic's settings."""
    return str(getattr(error, "message", error)).partition(". Set `arbitrary_types_allowed")[0]


def _one_of(schemes: list[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, schemes))})"


def _finite(found: dict[str, Any]) -> dict[str, Any]:
    """A number bounded to a float's range."""
    if not {"minimum", "exclusiveMinimum"} & found.keys():
        found["minimum"] = -_LARGEST
    if not {"maximum", "exclusiveMaximum"} & found.keys():
        found["maximum"] = _LARGEST
    return found


def _set(found: dict[str, Any], schema: Any) -> dict[str, Any]:
    """Drop uniqueness where a grammar cannot compare items and their number is free: a set ignores repetition."""
    items = found.setdefault("items", {})
    if not items:
        items["type"] = ["string", "number", "boolean", "null"]  # hashable in Python
    can_tell = str(items.get("type")) in _FINITE or {"enum", "const"} & items.keys()
    can_tell = can_tell or schema.get("items_schema", {}).get("type") in ("enum", "literal")
    if not can_tell and schema.get("min_length", 0) <= 1:
        found.pop("uniqueItems", None)
    return found


def _starting_with(found: dict[str, Any], pattern: str) -> dict[str, Any]:
    """A schema whose strings start with a pattern; numbers are unchanged."""
    if found.get("type") == "string":
        found["pattern"] = f"^{pattern}"
    return found


def _changed(make: Callable[[Any], dict[str, Any]], change: Change, schema: Any) -> dict[str, Any]:
    return change(make(schema), schema)


_CHANGES: dict[Any, Change] = {
    "function-before": _by_code,
    "function-wrap": _by_code,
    "set": _set,
    "frozenset": _set,
    "date": lambda found, schema: _in_time(_starting_with(found, _DATE), schema),
    "time": lambda found, schema: _in_time(_starting_with(found, _CLOCK), schema),
    "timedelta": lambda found, schema: _in_time(_starting_with(found, f"{_DURATION}$"), schema),
}


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key, inner in schema.items():
        if key in ("properties", "patternProperties", "$defs"):
            closed[key] = {name: _closed(item) for name, item in inner.items()}
        elif key in ("items", "additionalProperties"):
            closed[key] = _closed(inner)
        elif key in ("anyOf", "oneOf", "prefixItems"):
            closed[key] = [_closed(item) for item in inner]
    if "properties" in schema:
        closed.setdefault("additionalProperties", False)
    format_name = f"{schema.get('format')}{' text' if schema.get('contentMediaType') == _TEXT else ''}"
    if isinstance(known := _FORMATS.get(format_name), dict):
        del closed["format"]
        closed |= known
    return closed
