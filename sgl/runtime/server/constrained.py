"""Output constraints in the spellings of OpenAI, SGLang, vLLM and ours. Each becomes the engine's regex, JSON Schema,
EBNF grammar or structural tag."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from sgl.errors import InvalidRequest
from sgl.grammar.regular.syntax import MAX_PATTERN_LEN
from sgl.runtime.server.fields import Anything, Empty, Off, Strict

_META = re.compile(r"[\\.^$*+?{}\[\]|()]")
_OBJECT = {"type": "object"}


class NamedSchema(Strict):
    """A JSON Schema with a name."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of the whole answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """The schema of a json_object."""

    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[str] | None = None
    at_least_one: bool | None = None
    stop_after_first: bool | None = None

    def constraint(self) -> tuple[str, Any] | None:
        """The engine's constraint and its value, or None."""
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            names = ("type", "format", "structures", "triggers", "at_least_one", "stop_after_first")
            tag = {name: value for name in names if (value := getattr(self, name)) is not None}
            return "structural_tag", tag
        if self.type == "json_object":
            return "json_schema", self.schema_ or _OBJECT
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        if schema is None:
            param = "response_format.json_schema"
            raise InvalidRequest("response_format.json_schema.schema is needed", param=param)
        return "json_schema", schema


class _Constraining(Strict):
    """Fields annotated with the engine's constraint that they set."""

    def constraints(self) -> Iterator[tuple[str, tuple[str, Any]]]:
        """Each given field's name with its constraint and value."""
        for name, field in type(self).model_fields.items():
            kind = next((mark for mark in field.metadata if isinstance(mark, str)), None)
            if kind is not None and (value := getattr(self, name)) not in (None, False):
                yield field.alias or name, (kind, _OBJECT if value is True else value)


Regex = Annotated[str | None, "regex"]
Schema = Annotated[str | dict[str, Any] | None, "json_schema"]
AnyObject = Annotated[bool | None, "json_schema"]
Choices = Annotated[list[str] | None, "choices"]
"""One of these texts."""
Ebnf = Annotated[str | None, "ebnf"]
Tag = Annotated[str | dict[str, Any] | None, "structural_tag"]


class StructuredOutputs(_Constraining):
    """vLLM's; one of the first six."""

    json_: Schema = Field(None, alias="json")
    regex: Regex = None
    choice: Choices = None
    grammar: Ebnf = None
    json_object: AnyObject = None
    structural_tag: Tag = None

    disable_fallback: Anything = None
    """There is no other backend to fall back to."""
    disable_any_whitespace: Anything = None
    """The default allows none; see --json-whitespace."""
    disable_additional_properties: Off = None
    whitespace_pattern: Empty = None


class Constrained(_Constraining):
    """The constraint fields of a request."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: Regex = None
    ebnf: Ebnf = None
    json_schema: Schema = None
    structural_tag: Tag = None
    choices: Choices = None
    guided_json: Schema = None
    guided_regex: Regex = None
    guided_choice: Choices = None
    guided_grammar: Ebnf = None
    guided_json_object: AnyObject = None
    guided_whitespace_pattern: Empty = None

    def constraint(self) -> dict[str, Any]:
        """The sampling parameter that they set, if any. Raises InvalidRequest where two differ."""
        found = list(self.constraints())
        if self.structured_outputs is not None:
            found += [(f"structured_outputs.{name}", each) for name, each in self.structured_outputs.constraints()]
        if self.response_format is not None and (wanted := self.response_format.constraint()) is not None:
            found.append(("response_format", wanted))
        if not found:
            return {}
        (first, constraint), *others = found
        for field, other in others:
            if other != constraint:
                raise InvalidRequest(
                    f"{first} and {field} both say what the answer must look like: give one of them", param=field
                )
        name, value = constraint
        if name == "choices":
            return {"regex": _one_of(first, value)}
        return {name: value}


def _one_of(field: str, choices: list[str]) -> str:
    if not choices:
        raise InvalidRequest(f"{field} must hold at least one text", param=field)
    if (length := sum(map(len, choices)) + len(choices)) > MAX_PATTERN_LEN:
        message = f"{field} has {length} characters, and {MAX_PATTERN_LEN} are the most that it may have in all"
        raise InvalidRequest(message, param=field)
    return "(" + "|".join(_META.sub(r"\\\g<0>", choice) for choice in choices) + ")"
