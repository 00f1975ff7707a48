"""What an answer is held to, in each of the ways that clients spell it: OpenAI's, SGLang's, vLLM's and our own.

All of them become one of the engine's four constraints: a regex, a JSON Schema, an EBNF grammar or a structural tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from sgl.errors import InvalidRequest
from sgl.runtime.server.fields import Anything, Empty, Off, Strict

_META = re.compile(r"[\\.^$*+?{}\[\]|()]")
_OBJECT = {"type": "object"}


class NamedSchema(Strict):
    """A JSON Schema under a name."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """How the whole answer must look."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """What a json_object must keep to."""

    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[str] | None = None
    at_least_one: bool | None = None
    stop_after_first: bool | None = None

    def constraint(self) -> tuple[str, Any] | None:
        """The engine's constraint and its value, if the format is one."""
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


class StructuredOutputs(Strict):
    """vLLM's constraints: one of the first six."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None

    disable_fallback: Anything = None
    """There is one back end, so nothing to fall back to."""
    disable_any_whitespace: Anything = None
    """See --json-whitespace: compact, which is the default, allows none."""
    disable_additional_properties: Off = None
    whitespace_pattern: Empty = None

    def constraints(self) -> Iterator[tuple[str, tuple[str, Any]]]:
        """Those that are given: the field's name, then the engine's constraint and its value."""
        prefix = "structured_outputs"
        yield from _plain(
            (f"{prefix}.json", "json_schema", self.json_),
            (f"{prefix}.regex", "regex", self.regex),
            (f"{prefix}.choice", "choices", self.choice),
            (f"{prefix}.grammar", "ebnf", self.grammar),
            (f"{prefix}.json_object", "json_schema", _OBJECT if self.json_object else None),
            (f"{prefix}.structural_tag", "structural_tag", self.structural_tag),
        )


class Constrained(Strict):
    """The fields that constrain an answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    structural_tag: str | dict[str, Any] | None = None
    choices: list[str] | None = None
    """The answer is one of these texts."""
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: Empty = None

    def constraint(self) -> dict[str, Any]:
        """The sampling parameter that the fields ask for, or none. Raises InvalidRequest where two of them ask for
        different ones."""
        found = list(self._constraints())
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

    def _constraints(self) -> Iterator[tuple[str, tuple[str, Any]]]:
        yield from _plain(
            ("regex", "regex", self.regex),
            ("ebnf", "ebnf", self.ebnf),
            ("json_schema", "json_schema", self.json_schema),
            ("structural_tag", "structural_tag", self.structural_tag),
            ("choices", "choices", self.choices),
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choices", self.guided_choice),
            ("guided_grammar", "ebnf", self.guided_grammar),
            ("guided_json_object", "json_schema", _OBJECT if self.guided_json_object else None),
        )
        if self.structured_outputs is not None:
            yield from self.structured_outputs.constraints()
        if self.response_format is not None and (wanted := self.response_format.constraint()) is not None:
            yield "response_format", wanted


def _plain(*fields: tuple[str, str, Any]) -> Iterator[tuple[str, tuple[str, Any]]]:
    for field, name, value in fields:
        if value is not None:
            yield field, (name, value)


def _one_of(field: str, choices: list[str]) -> str:
    if not choices:
        raise InvalidRequest(f"{field} must hold at least one text", param=field)
    return "(" + "|".join(_META.sub(r"\\\g<0>", choice) for choice in choices) + ")"
