"""JSON Schema to a regex by outlines-core, as far as that is faithful.

outlines-core reads the first keyword that it knows and ignores the rest. So a schema is first reduced to what it reads
correctly, references inlined; all else is refused by name. Its texts are valid, but often not all that the schema
allows: objects have no undeclared keys, and JSON of any shape is two levels deep.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

import interegular
from outlines_core.json_schema import build_regex_from_schema

from sgl.errors import GrammarError, GrammarTooLarge
from sgl.grammar.backends.plain_regex import plain_regex, refusal, would_be_rounded
from sgl.grammar.text.pointer import member
from sgl.time_limit import check_time

_WHITESPACE = {"compact": "", "flexible": r"( |\r?\n[ \t]{0,64})?"}
_NOTES = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions"),
}
_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "integer": set(),
    "number": set(),
    "boolean": set(),
    "null": set(),
}
_ALONE = ("$ref", "allOf", "anyOf", "oneOf")
_UNQUOTED = r'(?:[^"\\\x00-\x1F\x7F-\x9F]|\\[\\/bfnrt])'
"""A character of a string of bounded length, without quotes: outlines-core prepares for matches that begin anywhere,
and where a quote may begin another, each character doubles the time."""
_MAX_SCHEMAS = 10_000  # with references inlined
_MAX_ALGEBRA = 2000  # characters of a regex for interegular, which makes every state


def schema_regex(schema: Any, whitespace: str) -> str:
    """The regex of a schema's JSON texts. Raises GrammarError by the name of what cannot be enforced."""
    reader = _Reader(schema, _WHITESPACE[whitespace])
    return reader.regex(reader.read(schema, ()))


class _Reader:
    def __init__(self, root: Any, whitespace: str) -> None:
        self.root = root
        self.whitespace = whitespace
        self.narrowed: list[str] = []
        """The features by which texts are fewer than the schema allows."""
        self._num_schemas = 0

    def regex(self, read: dict[str, Any], *, sort_keys: bool = False) -> str:
        try:
            return str(build_regex_from_schema(json.dumps(read, sort_keys=sort_keys), self.whitespace))
        except ValueError as error:
            message = " ".join(str(error).split())[:300]
            raise GrammarError(f'grammar_backend "outlines" cannot read the schema: {message}') from error

    def read(self, schema: Any, within: tuple[str, ...]) -> dict[str, Any]:
        """A schema in keywords that outlines-core reads correctly. within: the references that led here."""
        check_time()
        self._num_schemas += 1
        if self._num_schemas > _MAX_SCHEMAS:
            message = f"the schema has more than {_MAX_SCHEMAS} schemas, its references written out"
            raise GrammarTooLarge(message, states=self._num_schemas, limit=_MAX_SCHEMAS)
        if schema is False:
            raise _refusal("a schema that allows nothing")
        if not isinstance(schema, dict | bool):
            raise GrammarError(f"a schema is an object or a bool, not {type(schema).__name__}")
        known: dict[str, Any] = (
            {} if isinstance(schema, bool) else {key: value for key, value in schema.items() if key not in _NOTES}
        )
        if not known:
            self.narrowed.append("JSON of any shape")
            return {}
        for key, value in known.items():
            _check_form(key, value)
        for key in _ALONE:
            if key in known:
                if len(known) > 1:
                    raise _refusal(f"{key} beside {', '.join(sorted(known.keys() - {key}))}")
                return self._combined(key, known[key], within)
        if "enum" in known or "const" in known:
            return _values(known)
        return self._typed(known, within)

    def _combined(self, key: str, value: Any, within: tuple[str, ...]) -> dict[str, Any]:
        if key == "$ref":
            if value in within:
                raise _refusal(f"recursion ($ref {value})")
            return self.read(_at(self.root, value), (*within, value))
        if key == "allOf" and len(value) > 1:
            raise _refusal("allOf of several schemas")
        before, self.narrowed = self.narrowed, []
        read = [self.read(part, within) for part in value]
        if len(read) > 1 and key == "oneOf":
            self._check_disjoint(read)
        elif len(read) > 1:
            read = self._without_contained(read)
        self.narrowed = before + self.narrowed
        return read[0] if len(read) == 1 else {"anyOf": read}

    def _check_disjoint(self, read: list[dict[str, Any]]) -> None:
        """Raises GrammarError if a value belongs to two alternatives."""
        if self.narrowed:
            raise _refusal(f"oneOf over {self.narrowed[0]}")
        automata = self._automata(read)
        if automata is None:
            raise _refusal("oneOf of large alternatives")
        for number, one in enumerate(automata):
            for later, other in enumerate(automata[number + 1 :], number + 1):
                if not one.isdisjoint(other):
                    raise _refusal(f"oneOf whose alternatives {number} and {later} have values in common")

    def _without_contained(self, read: list[dict[str, Any]]) -> list[dict[str, Any]]:
        automata = self._automata(read)
        if automata is None:
            return read
        kept = list(range(len(read)))
        for number in range(len(read) - 1, -1, -1):
            others = [automata[other] for other in kept if other != number]
            if any(automata[number].issubset(other) for other in others):
                kept.remove(number)
        return [read[number] for number in kept]

    def _automata(self, read: list[dict[str, Any]]) -> list[Any] | None:
        """interegular's automata, of texts with sorted keys; None if they would take too long."""
        regexes = [self.regex(part, sort_keys=True) for part in read]
        if sum(map(len, regexes)) > _MAX_ALGEBRA:
            return None
        return [interegular.parse_pattern(regex).to_fsm() for regex in regexes]

    def _typed(self, known: dict[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
        asked = known.keys() - {"type"}
        for key in sorted(asked - set().union(*_OF_TYPE.values())):
            raise _refusal(f"the keyword {key}")
        types = known.get("type")
        if types is None:
            types = [kind for kind, keys in _OF_TYPE.items() if keys & asked]
            self.narrowed.append("schemas without a type")
        types = types if isinstance(types, list) else [types]
        read = [self._one_type(kind, {key: known[key] for key in asked & _OF_TYPE[kind]}, within) for kind in types]
        return read[0] if len(read) == 1 else {"anyOf": read}

    def _one_type(self, kind: str, known: dict[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
        read = {"type": kind, **known}
        match kind:
            case "string":
                self._check_string(known)
                if "pattern" in known:
                    regex = plain_regex(known["pattern"], "outlines", "ecma", search=True, json=True)
                    read["pattern"] = f"^{regex}$"
                elif "minLength" in known or "maxLength" in known:
                    self.narrowed.append("strings of bounded length, which get no quotes")
                    counts = f"{known.get('minLength', 0)},{known.get('maxLength', '')}"
                    return {"type": "string", "pattern": f"^{_UNQUOTED}{{{counts}}}$"}
            case "array":
                return self._array(known, within)
            case "object":
                return self._object(known, within)
        return read

    def _check_string(self, known: dict[str, Any]) -> None:
        if len(known.keys() & {"pattern", "format"}) + bool(known.keys() & {"minLength", "maxLength"}) > 1:
            raise _refusal(" beside ".join(sorted(known)))
        if known.get("format", "uuid") != "uuid":  # others let invalid texts through
            raise _refusal(f"the format {known['format']!r}")
        if "format" in known:
            self.narrowed.append("formats")

    def _array(self, known: dict[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
        least, most = known.get("minItems", 0), known.get("maxItems")
        if "prefixItems" in known:
            size = len(known["prefixItems"])
            if least > size or (most is not None and most < size):
                raise _refusal("prefixItems of other lengths than all of them")
            if not least == most == size:
                self.narrowed.append("arrays that may be longer or shorter than their prefixItems")
            return {"type": "array", "prefixItems": [self.read(part, within) for part in known["prefixItems"]]}
        bounds: dict[str, Any] = {key: known[key] for key in ("minItems", "maxItems") if key in known}
        if known.get("items") is False or most == 0:
            if least:
                raise _refusal("an array that must have items and may have none")
            return {"type": "array", "maxItems": 0}
        items = self.read(known.get("items", True), within)
        return {"type": "array", **({"items": items} if items else {}), **bounds}

    def _object(self, known: dict[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
        declared, required = known.get("properties", {}), known.get("required", [])
        more = known.get("additionalProperties")
        for key in [key for key in required if key not in declared]:
            raise _refusal(f"required {key!r}, which is not declared")
        if not declared and more is not False:
            if more is None or more is True:
                self.narrowed.append("JSON of any shape")
                return {"type": "object"}
            values = self.read(more, within)
            return {"type": "object", **({"additionalProperties": values} if values else {})}
        if more not in (None, False):
            raise _refusal("additionalProperties beside properties")
        if more is None:
            self.narrowed.append("objects that leave undeclared keys open")
        for key in declared:
            _check_text(key, "a key")
        properties = {key: self.read(value, within) for key, value in declared.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": [key for key in declared if key in required],
        }


def _check_form(key: str, value: Any) -> None:
    match key:
        case "minLength" | "maxLength" | "minItems" | "maxItems":
            is_right, form = type(value) is int and value >= 0, "one of the whole numbers from 0"
        case "pattern" | "format":
            is_right, form = isinstance(value, str), "a string"
        case "properties":
            is_right, form = isinstance(value, dict), "an object"
        case "allOf" | "anyOf" | "oneOf" | "prefixItems" | "enum":
            is_right, form = isinstance(value, list) and bool(value), "a list of at least one"
        case "required":
            is_right, form = (
                isinstance(value, list) and all(isinstance(name, str) for name in value),
                "a list of keys",
            )
        case "type":
            names = value if isinstance(value, list) else [value]
            is_right = bool(names) and all(isinstance(name, str) and name in _OF_TYPE for name in names)
            form = "the name of a type, or a list of some"
        case _:
            return
    if not is_right:
        raise GrammarError(f"{key} is {form}, not {value!r:.100}")


def _values(known: dict[str, Any]) -> dict[str, Any]:
    for key in sorted(known.keys() - {"enum", "const", "type"}):
        raise _refusal(f"{key} beside enum or const")
    values = [known["const"]] if "const" in known else known["enum"]
    if "const" in known and "enum" in known:
        raise _refusal("enum beside const")
    if "type" in known:
        types = known["type"] if isinstance(known["type"], list) else [known["type"]]
        values = [value for value in values if _types_of(value) & set(types)]
        if not values:
            raise GrammarError("the schema can match nothing: enum holds no value of its type")
    for value in values:
        if isinstance(value, dict | list):
            raise _refusal("objects and arrays in enum or const")
        if isinstance(value, str):
            _check_text(value, "enum or const")
        if would_be_rounded(value):
            raise _refusal(f"the number {value!r:.60}, which it would round")
    # As other numbers of the same value are written.
    return {"enum": [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]}


_TYPES: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    type(None): {"null"},
    dict: {"object"},
    list: {"array"},
}


def _types_of(value: Any) -> set[str]:
    return _TYPES[int if isinstance(value, float) and value.is_integer() else type(value)]


def _check_text(text: str, where: str) -> None:
    """Refuse what outlines-core would not escape: keys are copied, strings escape only what has a short escape."""
    is_escaped = json.dumps(text, ensure_ascii=False) != f'"{text}"'
    if any(0x7F <= ord(char) <= 0x9F for char in text) or (is_escaped and where == "a key"):
        raise _refusal(f"control characters, quotes and backslashes in {where}")
    if any(char < " " and char not in "\b\t\n\f\r" for char in text):
        raise _refusal(f"control characters in {where}")


def _at(root: Any, reference: Any) -> Any:
    """The target of a reference within the document."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _refusal(f"the reference {reference!r}: it reads those that begin with #/")
    found = root
    for part in reference.split("/")[1:]:
        name = member(found, unquote(part))
        if name is None:
            raise GrammarError(f"$ref {reference} leads nowhere")
        found = found[name]
    return found


def _refusal(feature: str) -> GrammarError:
    return refusal("outlines", feature)
