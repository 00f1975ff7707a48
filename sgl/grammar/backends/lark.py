"""Constraints in Lark's notation, for llguidance."""

from __future__ import annotations

import json
import re
from typing import Any

from sgl.errors import GrammarError
from sgl.grammar.automaton.structural_tag import Structure, read_structural_tag
from sgl.grammar.backends.plain_regex import (
    NOTHING,
    literal,
    plain_regex,
    refusal,
    regex_of_choices,
    would_be_rounded,
)
from sgl.grammar.ebnf.cfg import Cfg
from sgl.grammar.regular.charset import CharSet
from sgl.time_limit import check_time

_START = re.compile(r"^[ \t]*[?!]*start[ \t]*(\[[^\]\n]*\][ \t]*)?:(?!:=)", re.MULTILINE)
_WHITESPACE: dict[str, dict[str, Any]] = {
    "compact": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    "flexible": {"whitespace_pattern": r"( |\r?\n[ \t]{0,64})?"},
}
# Schemas beside or under one of these may declare other keys than their neighbours: closing them could allow no value.
_MERGING = {
    *("allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef"),
}
_BESIDE = {"$ref", "anyOf", "oneOf"}
_SPEAKS_OF_KEYS = _BESIDE | {
    *("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties", "minProperties"),
}


def is_lark(source: str) -> bool:
    """Whether a grammar is in Lark's notation: it has no ::=, or it defines a rule `start`."""
    return "::=" not in source or _START.search(source) is not None


def lark_of_rules(rules: Cfg) -> str:
    """Rules with terminals of one character each: llguidance's lexer is greedy, so its parser decides everything."""
    names = ["start", *(f"r{number}" for number in range(1, len(rules.rules)))]
    lines = [f"T{i}: /{_class_of(chars)}/" for i, chars in enumerate(rules.terminals)]
    for name, alternatives in zip(names, rules.rules, strict=True):
        each = [" ".join([names[s] if s >= 0 else f"T{~s}" for s in one]) for one in alternatives]
        lines.append(f"{name}: {' | '.join(each)}")
    return "\n".join(lines)


def lark_of_constraint(kind: str, source: Any, whitespace: str, *, closes_objects: bool) -> str:
    """A constraint of any kind but `ebnf`. Raises GrammarError."""

    def value(schema: Any) -> str:
        if not isinstance(schema, dict | bool):
            raise GrammarError(f"a schema is an object or a bool, not {type(schema).__name__}")
        if schema is False:
            raise GrammarError("the schema can match nothing at all")
        schema = {} if schema is True else schema
        _check(schema)
        schema = _closed(schema) if closes_objects and not _merges(schema) else schema
        return f"%json {json.dumps({**schema, 'x-guidance': _WHITESPACE[whitespace]})}"

    match kind:
        case "json_schema":
            return f"start: {value(source)}"
        case "regex":
            regex = plain_regex(source, "llguidance")
            if NOTHING in regex:
                raise refusal("llguidance", "a class without characters")
            return f"start: /{regex}/"
        case "choices":
            return f"start: /{regex_of_choices(source)}/"
    if isinstance(source, dict) and "format" in source:
        raise refusal("llguidance", "a structural tag with a format")
    tag = read_structural_tag(source)
    lines = [r"TEXT: /[\s\S]*/"]
    for number, trigger in enumerate(tag.triggers):
        bodies = [_structure(one, trigger, value) for one in tag.structures if one.begin.startswith(trigger)]
        lines += [f"trigger_{number}[lazy]: TEXT {json.dumps(trigger)}"]
        lines += [f"tag_{number}: trigger_{number} ({' | '.join(bodies)})"]
    tags = f"({' | '.join(f'tag_{number}' for number in range(len(tag.triggers)))})"
    if tag.stop_after_first:
        start = tags if tag.at_least_one else f"{tags} | TEXT"
    else:
        start = f"{tags}{'+' if tag.at_least_one else '*'} TEXT"
    return "\n".join([f"start: {start}", *lines])


def _structure(structure: Structure, trigger: str, value: Any) -> str:
    """The text after a trigger. A regex and its end tag are one lexeme, or the lexer would take the tag for text."""
    rest = structure.begin[len(trigger) :]
    before = f"{json.dumps(rest)} " if rest else ""
    if structure.regex is not None:
        return f"{before}/{plain_regex(structure.regex, 'llguidance')}{literal(structure.end)}/"
    return f"{before}{value(structure.schema)} {json.dumps(structure.end) if structure.end else ''}"


def _check(schema: Any) -> None:
    """Refuse what llguidance gets wrong: large integers end its process, and a key that repeats counts twice."""
    check_time()
    if would_be_rounded(schema):
        raise refusal("llguidance", f"the number {schema!r:.60}, which it would round")
    if isinstance(schema, dict):
        least, required = schema.get("minProperties"), schema.get("required")
        if isinstance(least, int) and least > 1 + len(required if isinstance(required, list) else []):
            raise refusal("llguidance", "minProperties of more than one key beyond those required")
        schema = [value for key, value in schema.items() if key not in ("default", "example", "examples")]
    if isinstance(schema, list):
        for item in schema:
            _check(item)


def _closed(schema: Any) -> Any:
    """A schema with `additionalProperties: false` wherever it says nothing of undeclared keys."""
    check_time()
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in ("enum", "const", "default") else _closed(value) for key, value in schema.items()}
    declared = schema.get("properties")
    if isinstance(declared, dict) and not schema.keys() & _SPEAKS_OF_KEYS:
        required = schema.get("required", [])
        if isinstance(required, list) and all(isinstance(key, str) and key in declared for key in required):
            found["additionalProperties"] = False
    return found


def _merges(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_merges, schema))
    if not isinstance(schema, dict):
        return False
    is_beside = bool(schema.keys() & _BESIDE) and len(schema.keys() - {"$defs", "definitions"}) > 1
    return is_beside or bool(schema.keys() & _MERGING) or any(map(_merges, schema.values()))


def _class_of(chars: CharSet) -> str:
    ranges = (f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in chars)
    return f"[{''.join(ranges)}]"
