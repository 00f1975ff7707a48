"""Reads a schema: each subschema becomes a formula, and its keywords become sets, kind by kind.

It knows what every keyword means on its own, how the drafts differ, and where a keyword is malformed. How sets and
formulas combine is the evaluator's business, which calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Final, NamedTuple, TypeVar

from sgl.errors import GrammarTooLarge, RegexSyntaxError
from sgl.grammar.formats import KNOWN_BUT_UNDECIDABLE, format_text
from sgl.grammar.json_arrays import ANY_ARRAY, ArrayCase, Arrays, Count, EvaluatedItems, Items
from sgl.grammar.json_document import Document, Location, UnresolvedReference
from sgl.grammar.json_formula import (
    ALL_KINDS,
    ARRAY,
    FALSE,
    LITERAL,
    NUMBER,
    OBJECT,
    STRING,
    TRUE,
    Formula,
    Formulas,
    Frozen,
    freeze,
    frozen_values,
)
from sgl.grammar.json_objects import ANY_OBJECT, Block, EvaluatedKeys, ObjectCase, Objects
from sgl.grammar.json_report import Dropped, Report
from sgl.grammar.json_strings import EVERY_STRING, Strings, StringSet, make_strings, not_in, pattern_strings
from sgl.grammar.numbers import EVERY_NUMBER, INTEGERS, NO_NUMBER, NumberSet, Range, exact, make_set

Literals = frozenset[str]
EVERY_LITERAL: Final = frozenset(("null", "true", "false"))
KindSet = Literals | NumberSet | StringSet | Objects | Arrays
EVERYTHING: Final[tuple[KindSet, ...]] = (EVERY_LITERAL, EVERY_NUMBER, EVERY_STRING, (ANY_OBJECT,), (ANY_ARRAY,))
NOTHING: Final[tuple[KindSet, ...]] = (frozenset(), NO_NUMBER, StringSet(), (), ())
Scope = frozenset[tuple[str, Location]]
"""The dynamic scope, as far as it matters: the outermost resource's anchor for each dynamic name."""

_TYPES: Final = {
    "null": 1 << LITERAL,
    "boolean": 1 << LITERAL,
    "integer": 1 << NUMBER,
    "number": 1 << NUMBER,
    "string": 1 << STRING,
    "object": 1 << OBJECT,
    "array": 1 << ARRAY,
}
_IN_PLACE: Final = frozenset(
    [
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
        "unevaluatedItems",
    ]
)
_WITH_CHILDREN: Final = frozenset(
    [
        "properties",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "items",
        "prefixItems",
        "additionalItems",
        "contains",
    ]
)
_VALUES: Final = frozenset(("enum", "const", "type", "nullable"))
_T = TypeVar("_T")
MOST_BRANCHES_WITH_UNEVALUATED: Final = 8


class Known(NamedTuple):
    """The values of one kind in a formula; a superset of them if `problem` names something that was dropped."""

    value: KindSet
    problem: Dropped | None = None


class NeedsTracking(Exception):
    """The schema looks at what others have evaluated or at the dynamic scope: read it again with both tracked."""


@dataclass(slots=True, eq=False)
class SchemaSubject:
    """What a formula for a subschema is about."""

    location: Location
    scope: Scope
    keywords: frozenset[str]
    expansion: Formula | None = None


class Reader:
    """Reads one document. `keys_of` works out the strings of a formula, for propertyNames."""

    def __init__(
        self,
        document: Document,
        formulas: Formulas,
        report: Report,
        *,
        is_tracking: bool,
        strings_of: Callable[[Formula], Known],
    ) -> None:
        self.document = document
        self.formulas = formulas
        self.report = report
        self.is_tracking = is_tracking
        self.strings_of = strings_of
        self._formulas: dict[tuple[int, Scope], Formula] = {}

    # Formulas

    def formula(self, location: Location, scope: Scope = frozenset()) -> Formula:
        """The formula of a subschema."""
        if self.is_tracking:
            scope = self._entered(location, scope)
        key = (id(location.schema), scope)
        found = self._formulas.get(key)
        if found is None:
            found = self._formulas[key] = self._make_formula(location, scope)
        return found

    def _entered(self, location: Location, scope: Scope) -> Scope:
        names = {name for name, _ in scope}
        anchors = self.document.dynamic_anchors(location.resource)
        return scope | {(name, anchor) for name, anchor in anchors.items() if name not in names}

    def _make_formula(self, location: Location, scope: Scope) -> Formula:
        schema = location.schema
        if schema is True:
            return TRUE
        if schema is False:
            return FALSE
        if not isinstance(schema, dict):
            return self._unknown(location.path(), "schema", "a schema is an object or a boolean")
        dialect = location.resource.dialect
        keywords = dialect.keywords.intersection(schema)
        if "$ref" in keywords and (dialect.ref_hides_siblings or len(keywords) == 1):
            keywords = frozenset(("$ref",))
        if not keywords:
            return TRUE
        kinds = self._possible_kinds(schema, keywords)
        if not keywords.isdisjoint(_IN_PLACE):
            subject = SchemaSubject(location, scope, keywords)
            return self.formulas.leaf("schema", (id(schema), scope), subject, kinds)
        if "enum" in keywords or "const" in keywords:
            return self._local(location, scope, keywords, kinds)
        return self._keywords_alone(location, scope, keywords, kinds)

    def _local(self, location: Location, scope: Scope, keywords: frozenset[str], kinds: int) -> Formula:
        """What a subschema says itself, without its applicators to the same value."""
        parts = []
        rest = keywords
        for keyword in ("const", "enum"):
            if keyword in keywords:
                rest = rest - {keyword}
                parts.append(self._plain_values(location, keyword))
        if parts and rest <= _VALUES and all(part.operator == "values" for part in parts):
            both = self.formulas.both(*parts)
            if both is FALSE or "type" not in rest:
                return both
            return self.formulas.values(self._of_type(both, location, rest))
        return self.formulas.both(*parts, self._keywords_alone(location, scope, rest, kinds))

    def _keywords_alone(self, location: Location, scope: Scope, keywords: frozenset[str], kinds: int) -> Formula:
        if not keywords:
            return TRUE
        schema = location.schema
        assert isinstance(schema, dict)
        key: object
        if keywords.isdisjoint(_WITH_CHILDREN):
            # Alike whatever they are called: such leaves are shared by their content.
            try:
                content = frozenset((keyword, freeze(schema[keyword])) for keyword in keywords)
                key = (content, location.resource.dialect)
            except (TypeError, ValueError):
                key = (id(schema), scope)
        else:
            key = (id(schema), scope)
        return self.formulas.leaf("local", key, SchemaSubject(location, scope, keywords), kinds)

    def _unknown(self, path: str, keyword: str, reason: str, cause: Exception | None = None) -> Formula:
        problem = self.report.problem(path, keyword, reason, cause)
        return self.formulas.leaf("unknown", problem, problem)

    def _possible_kinds(self, schema: dict[str, object], keywords: frozenset[str]) -> int:
        named = schema.get("type") if "type" in keywords else None
        names = [named] if isinstance(named, str) else named
        if not isinstance(names, list):
            return ALL_KINDS
        kinds = 0
        for name in names:
            if not isinstance(name, str) or name not in _TYPES:
                return ALL_KINDS
            kinds |= _TYPES[name]
        return kinds | 1 << LITERAL if "nullable" in keywords else kinds

    def _plain_values(self, location: Location, keyword: str) -> Formula:
        assert isinstance(location.schema, dict)
        given = location.schema[keyword]
        if keyword == "const":
            given = [given]
        if not isinstance(given, list):
            return self._unknown(location.path(), keyword, "a list is expected")
        try:
            return self.formulas.values(frozen_values(given))
        except (TypeError, ValueError) as error:
            return self._unknown(location.path(), keyword, str(error), error)

    def _of_type(self, values: Formula, location: Location, keywords: frozenset[str]) -> dict[Frozen, object]:
        assert isinstance(values.subject, dict)
        types = self._types(location, keywords)
        names = types[0]
        kept = {}
        for key, value in values.subject.items():
            tag, held = key
            if tag == "literal":
                fits = "null" in names if held == "null" else "boolean" in names
            elif tag == "number":
                assert isinstance(held, Fraction)
                fits = "number" in names or ("integer" in names and held.denominator == 1)
            else:
                fits = tag in names
            if fits:
                kept[key] = value
        return kept

    def expand(self, formula: Formula) -> Formula:
        """A subschema with applicators as the conjunction of its parts, without unevaluated*."""
        subject = formula.subject
        assert isinstance(subject, SchemaSubject)
        if subject.expansion is None:
            subject.expansion = self._expand(subject)
        return subject.expansion

    def without_applicators(self, formula: Formula) -> Formula:
        """What a subschema says without referring to other schemas for the same value."""
        subject = formula.subject
        assert isinstance(subject, SchemaSubject)
        own = subject.keywords - _IN_PLACE - {"then", "else"}
        kinds = formula.kinds
        return self._local(subject.location, subject.scope, own, kinds) if own else TRUE

    def _expand(self, subject: SchemaSubject) -> Formula:
        location, scope, keywords = subject.location, subject.scope, subject.keywords
        schema = location.schema
        assert isinstance(schema, dict)
        parts = []
        own = keywords - _IN_PLACE - {"then", "else"}
        if own:
            parts.append(self._local(location, scope, own, self._possible_kinds(schema, keywords)))
        for keyword in schema:
            if keyword in keywords and keyword in _IN_PLACE:
                if keyword.startswith("unevaluated"):
                    if not self.is_tracking:
                        raise NeedsTracking
                else:
                    parts.append(self._applicator(keyword, schema[keyword], location, scope, keywords))
        return self.formulas.both(*parts) if parts else TRUE

    def _applicator(
        self, keyword: str, value: object, location: Location, scope: Scope, keywords: frozenset[str]
    ) -> Formula:
        if keyword == "not":
            return self.formulas.negate(self._child(location, scope, "not"))
        if keyword == "if":
            return self._conditional(location, scope, keywords)
        if keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            return self._reference(keyword, value, location, scope)
        if keyword in ("allOf", "anyOf", "oneOf"):
            if not isinstance(value, list) or not value:
                return self._unknown(location.path(), keyword, "a list of schemas is expected")
            members = [self._child(location, scope, keyword, index) for index in range(len(value))]
            if keyword == "allOf":
                return self.formulas.both(*members)
            if keyword == "oneOf":
                return self.formulas.exactly_one(*members, path=location.path())
            return self._any_of(members, location)
        if not isinstance(value, dict):
            return self._unknown(location.path(), keyword, "an object is expected")
        return self.formulas.both(*[self._dependency(location, scope, keyword, name) for name in value])

    def _child(self, location: Location, scope: Scope, *tokens: str | int) -> Formula:
        return self.formula(self.document.child(location, *tokens), scope)

    def _any_of(self, members: list[Formula], location: Location) -> Formula:
        if not self.is_tracking:
            return self.formulas.either(*members)
        # Every branch that holds counts as having looked at keys and items, so each set of branches is a case.
        if len(members) > MOST_BRANCHES_WITH_UNEVALUATED:
            return self._unknown(location.path(), "anyOf", "too many branches beside unevaluated*")
        chosen = [
            self.formulas.both(*branches)
            for size in range(1, len(members) + 1)
            for branches in combinations(members, size)
        ]
        return self.formulas.either_in_full(chosen)

    def _conditional(self, location: Location, scope: Scope, keywords: frozenset[str]) -> Formula:
        condition = self._child(location, scope, "if")
        then = self._child(location, scope, "then") if "then" in keywords else TRUE
        otherwise = self._child(location, scope, "else") if "else" in keywords else TRUE
        if then is TRUE and otherwise is TRUE and not self.is_tracking:
            return TRUE
        both = self.formulas.both
        return self.formulas.either_in_full(
            [both(condition, then), both(self.formulas.negate(condition), otherwise)]
        )

    def _dependency(self, location: Location, scope: Scope, keyword: str, name: str) -> Formula:
        assert isinstance(location.schema, dict)
        value = location.schema[keyword][name]
        absent = self._fact(("absent", name), ObjectCase((Block({name: FALSE}),)))
        if isinstance(value, str) and keyword == "dependencies":
            value = [value]
        if isinstance(value, list):
            if not all(isinstance(item, str) for item in value):
                return self._unknown(location.path(), keyword, "a list of names is expected")
            names = tuple(dict.fromkeys((name, *value)))
            return self.formulas.either(absent, self._fact(("required", names), ObjectCase(required=names)))
        if keyword == "dependentRequired":
            return self._unknown(location.path(), keyword, "a list of names is expected")
        present = self._fact(("required", (name,)), ObjectCase(required=(name,)))
        return self.formulas.either(
            absent, self.formulas.both(present, self._child(location, scope, keyword, name))
        )

    def _fact(self, key: object, case: ObjectCase) -> Formula:
        return self.formulas.leaf("fact", key, (case,))

    def _reference(self, keyword: str, value: object, location: Location, scope: Scope) -> Formula:
        if not isinstance(value, str):
            return self._unknown(location.path(), keyword, "a reference is a string")
        try:
            target = self.document.resolve(value, location)
        except UnresolvedReference as error:
            return self._unknown(location.path(), keyword, f"{value!r}: {error}", error)
        if keyword != "$ref":
            if not self.is_tracking:
                raise NeedsTracking
            name = "" if keyword == "$recursiveRef" else value.partition("#")[2]
            if self.document.dynamic_anchor(target.resource, name) is target:
                target = dict(self._entered(target, scope))[name]
        return self.formula(target, scope)

    # Sets

    def unevaluated(self, formula: Formula, kind: int) -> Formula | None:
        """What a subschema demands of keys or items that nothing else in it looks at."""
        subject = formula.subject
        assert isinstance(subject, SchemaSubject)
        keyword = {OBJECT: "unevaluatedProperties", ARRAY: "unevaluatedItems"}.get(kind)
        if keyword is None or keyword not in subject.keywords:
            return None
        return self._child(subject.location, subject.scope, keyword)

    def keyword_set(self, formula: Formula, kind: int) -> Known:
        """What a subschema's own keywords say about values of one kind."""
        subject = formula.subject
        assert isinstance(subject, SchemaSubject)
        location, keywords = subject.location, subject.keywords
        names, problem = self._types(location, keywords)
        keyword_values = _KeywordValues(location, keywords, self.report)
        known: Known
        if kind == LITERAL:
            literals = {"null"} if "null" in names else set()
            if "boolean" in names:
                literals |= {"true", "false"}
            return Known(frozenset(literals), problem)
        if kind == NUMBER:
            if "number" not in names and "integer" not in names:
                return Known(NO_NUMBER)
            known = _numbers(keyword_values, EVERY_NUMBER if "number" in names else INTEGERS)
        elif kind == STRING:
            if "string" not in names:
                return Known(StringSet())
            known = _strings(keyword_values)
        elif kind == OBJECT:
            if "object" not in names:
                return Known(())
            known = self._objects(keyword_values, subject)
        else:
            if "array" not in names:
                return Known(())
            known = self._arrays(keyword_values, subject)
        return Known(known.value, known.problem or problem)

    def _types(self, location: Location, keywords: frozenset[str]) -> tuple[frozenset[str], Dropped | None]:
        if "type" not in keywords:
            return frozenset(_TYPES), None
        assert isinstance(location.schema, dict)
        given = location.schema["type"]
        names = [given] if isinstance(given, str) else given
        if not isinstance(names, list) or not all(isinstance(name, str) and name in _TYPES for name in names):
            problem = self.report.problem(location.path(), "type", f"{given!r} names no type of JSON values")
            return frozenset(_TYPES), problem
        is_openapi = not location.resource.dialect.is_declared
        if "nullable" in keywords and location.schema["nullable"] is True and is_openapi:
            return frozenset((*names, "null")), None
        return frozenset(names), None

    def _objects(self, values: _KeywordValues, subject: SchemaSubject) -> Known:
        location, scope = subject.location, subject.scope
        names = {
            name: self._child(location, scope, "properties", name)
            for name in values.of_type("properties", dict, {})
        }
        patterns = []
        may_miss_keys = False
        for pattern in values.of_type("patternProperties", dict, {}):
            keys = values.pattern("patternProperties", pattern)
            if keys is None:
                may_miss_keys = True
            else:
                value = self._child(location, scope, "patternProperties", pattern)
                patterns.append((keys.language(), value))
        rest = self._child(location, scope, "additionalProperties") if values.has("additionalProperties") else TRUE
        evaluated = EvaluatedKeys()
        if self.is_tracking:
            evaluated = EvaluatedKeys(
                frozenset(names), frozenset(key for key, _ in patterns), values.has("additionalProperties")
            )
        if may_miss_keys:
            rest = TRUE
        blocks = []
        if names or patterns or rest is not TRUE:
            blocks.append(Block(names, tuple(patterns), rest))
        if values.has("propertyNames"):
            known = self.strings_of(self._child(location, scope, "propertyNames"))
            assert isinstance(known.value, StringSet)
            values.problem = values.problem or known.problem
            if known.value != EVERY_STRING:
                blocks.append(Block(patterns=((not_in(known.value.bodies()), FALSE),)))
        case = ObjectCase(
            tuple(blocks),
            tuple(dict.fromkeys(values.strings("required"))),
            values.count("minProperties") or 0,
            values.count("maxProperties"),
            evaluated=evaluated,
        )
        if not (blocks or case.required or case.low or self.is_tracking) and case.high is None:
            case = ANY_OBJECT
        return Known((case,), values.problem)

    def _arrays(self, values: _KeywordValues, subject: SchemaSubject) -> Known:
        location, scope, draft = subject.location, subject.scope, subject.location.resource.dialect.draft
        prefix: list[Formula] = []
        rest = TRUE
        looks_at_all = False
        behind = "items"
        for keyword in ("prefixItems", "items"):
            members = values.raw(keyword)
            if isinstance(members, list):
                prefix = [self._child(location, scope, keyword, index) for index in range(len(members))]
                behind = "items" if keyword == "prefixItems" else "additionalItems"
            elif keyword == "prefixItems" and values.has(keyword):
                values.malformed(keyword, "a list of schemas is expected")
        if values.has(behind) and not isinstance(values.raw(behind), list):
            rest = self._child(location, scope, behind)
            looks_at_all = True
        counts = []
        evaluated = EvaluatedItems(len(prefix), looks_at_all)
        if values.has("contains"):
            wanted = self._child(location, scope, "contains")
            low = values.count("minContains")
            counts.append(Count(0, wanted, 1 if low is None else low, values.count("maxContains")))
            if draft >= 2020:
                evaluated = EvaluatedItems(len(prefix), looks_at_all, (wanted,))
        is_unique = values.of_type("uniqueItems", bool, False)
        blocks = (Items(tuple(prefix), rest),) if prefix or rest is not TRUE else ()
        case = ArrayCase(
            blocks,
            values.count("minItems") or 0,
            values.count("maxItems"),
            tuple(counts),
            location.path() if is_unique else None,
            evaluated if self.is_tracking else EvaluatedItems(),
        )
        is_plain = not (blocks or case.low or counts or is_unique or self.is_tracking) and case.high is None
        return Known((ANY_ARRAY if is_plain else case,), values.problem)


class _KeywordValues:
    """The values of a subschema's keywords, checked as they are asked for; `problem` is the first that was
    dropped."""

    def __init__(self, location: Location, keywords: frozenset[str], report: Report) -> None:
        assert isinstance(location.schema, dict)
        self.location = location
        self.keywords = keywords
        self.schema = location.schema
        self.report = report
        self.problem: Dropped | None = None

    def has(self, keyword: str) -> bool:
        return keyword in self.keywords

    def raw(self, keyword: str) -> object:
        return self.schema[keyword] if keyword in self.keywords else None

    def malformed(self, keyword: str, reason: str, cause: Exception | None = None) -> None:
        """The keyword cannot be enforced; go on without it, if at all."""
        problem = self.report.problem(self.location.path(), keyword, reason, cause)
        self.problem = self.problem or problem

    def of_type(self, keyword: str, expected: type[_T], default: _T) -> _T:
        value = self.raw(keyword)
        if value is None:
            return default
        if not isinstance(value, expected):
            self.malformed(keyword, f"{expected.__name__} is expected, not {type(value).__name__}")
            return default
        return value

    def count(self, keyword: str) -> int | None:
        value = self.raw(keyword)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            self.malformed(keyword, "a number of things is expected")
            return None
        return int(value)

    def strings(self, keyword: str) -> list[str]:
        value = self.of_type(keyword, list, [])
        if not all(isinstance(item, str) for item in value):
            self.malformed(keyword, "a list of names is expected")
            return []
        return value

    def number(self, keyword: str) -> Fraction | None:
        value = self.raw(keyword)
        if value is None or isinstance(value, bool):
            return None
        if not isinstance(value, int | float):
            self.malformed(keyword, "a number is expected")
            return None
        try:
            return exact(value)
        except (ValueError, OverflowError) as error:
            self.malformed(keyword, str(error), error)
            return None

    def pattern(self, keyword: str, pattern: object) -> Strings | None:
        if not isinstance(pattern, str):
            self.malformed(keyword, "a pattern is a string")
            return None
        try:
            return pattern_strings(pattern)
        except (RegexSyntaxError, GrammarTooLarge) as error:
            self.malformed(keyword, f"pattern {pattern!r}: {error}", error)
            return None


def _numbers(values: _KeywordValues, result: NumberSet) -> Known:
    for plain, exclusive, is_low in (("minimum", "exclusiveMinimum", True), ("maximum", "exclusiveMaximum", False)):
        bounds = [(values.number(plain), values.raw(exclusive) is True), (values.number(exclusive), True)]
        for bound, is_open in bounds:
            if bound is not None:
                part = Range(low=bound, low_open=is_open) if is_low else Range(high=bound, high_open=is_open)
                result &= make_set([part])
    step = values.number("multipleOf")
    if step is not None:
        if step <= 0:
            values.malformed("multipleOf", "a number greater than 0 is expected")
        else:
            result &= make_set([Range(multiple_of=step)])
    return Known(result, values.problem)


def _strings(values: _KeywordValues) -> Known:
    strings = Strings(low=values.count("minLength") or 0, high=values.count("maxLength"))
    if values.has("pattern"):
        matching = values.pattern("pattern", values.raw("pattern"))
        if matching is not None:
            strings &= matching
    if values.has("format"):
        name = values.of_type("format", str, "")
        path = values.location.path()
        if not values.location.resource.dialect.asserts_formats:
            values.report.note(path, "format", f"{name!r} is an annotation in the draft that $schema declares")
        elif name in KNOWN_BUT_UNDECIDABLE:
            values.malformed("format", f"{name!r}: {KNOWN_BUT_UNDECIDABLE[name]}")
        else:
            body = format_text(name)
            if body is not None:
                strings &= Strings(body=body)
    return Known(make_strings([strings]), values.problem)
