"""Reads a schema: each subschema becomes a formula over those that it holds and refers to.

It knows references and the keywords that apply schemas to the same value; `keywords.py` knows the others, and the
evaluator combines formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Final

from sgl.grammar.schema.document import IN_PLACE, Document, Location, Resource, UnresolvedReference
from sgl.grammar.schema.formula import (
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
    Operator,
    Unknown,
    Values,
    freeze,
)
from sgl.grammar.schema.objects import KeywordGroup, ObjectConjunct
from sgl.grammar.schema.report import Report

Scope = frozenset[tuple[str, Location]]
"""The dynamic scope: the outermost resource's anchor of each dynamic name."""

TYPES: Final = {
    "null": 1 << LITERAL,
    "boolean": 1 << LITERAL,
    "integer": 1 << NUMBER,
    "number": 1 << NUMBER,
    "string": 1 << STRING,
    "object": 1 << OBJECT,
    "array": 1 << ARRAY,
}
"""The names of types, with the mask of their kind."""
_EVERY_TYPE: Final = frozenset(TYPES)
UNEVALUATED: Final = {OBJECT: "unevaluatedProperties", ARRAY: "unevaluatedItems"}
MOST_BRANCHES_WITH_UNEVALUATED: Final = 8


class NeedsTracking(Exception):
    """The schema depends on evaluated keys or on the dynamic scope: read it again with both tracked."""


@dataclass(slots=True, eq=False, kw_only=True)
class ObjectFormula(Formula):
    """The objects of a conjunct, and all other values."""

    conjunct: ObjectConjunct


class Reader:
    """Reads one document."""

    def __init__(self, document: Document, formulas: Formulas, report: Report, *, is_tracking: bool) -> None:
        self.document = document
        self.formulas = formulas
        self.report = report
        self.is_tracking = is_tracking
        self._read: dict[tuple[object, Resource, Scope], tuple[Formula, Location]] = {}
        self._facts: dict[tuple[str | None, tuple[str, ...]], ObjectFormula] = {}

    def formula(self, location: Location, scope: Scope = frozenset()) -> Formula:
        """The formula of a subschema."""
        if self.is_tracking:
            scope = self.entered(location, scope)
        key = (self.document.content(location.schema, location.resource), location.resource, scope)
        found = self._read.get(key)
        if found is None:
            found = self._read[key] = (self._make_formula(location, scope), location)
        if found[1].schema is not location.schema:
            self.report.same(found[1], location)
        return found[0]

    def entered(self, location: Location, scope: Scope) -> Scope:
        """The dynamic scope after entering a resource."""
        names = {name for name, _ in scope}
        anchors = self.document.dynamic_anchors(location.resource)
        return scope | {(name, anchor) for name, anchor in anchors.items() if name not in names}

    def _make_formula(self, location: Location, scope: Scope) -> Formula:
        schema = location.schema
        if isinstance(schema, bool):
            return TRUE if schema else FALSE
        if not isinstance(schema, dict):
            return self.unknown(location, "schema", "a schema is an object or a boolean")
        dialect = location.resource.dialect
        keywords = dialect.keywords.intersection(schema)
        if "$ref" in keywords and dialect.ref_hides_siblings:
            keywords = frozenset(("$ref",))
        if keywords.isdisjoint(IN_PLACE):
            return self.by_itself(location, scope, keywords)
        return Subschema("schema", self, location, scope, keywords)

    def by_itself(self, location: Location, scope: Scope, keywords: frozenset[str]) -> Formula:
        """The formula of the keywords that apply no schemas to the same value."""
        both = self.formulas.both
        values = both(*[self._values(location, name) for name in ("const", "enum") if name in keywords])
        rest = keywords - {"const", "enum"}
        if not rest:
            return values
        own = Subschema("leaf", self, location, scope, rest)
        # In draft 4 the range decides which spellings of a number are integers.
        tells_spellings = location.resource.dialect.draft == 4 and "number" not in (own.types or ())
        is_plain = rest <= {"type", "nullable"} and not (tells_spellings and own.kinds >> NUMBER & 1)
        if isinstance(values, Values) and own.types is not None and is_plain:
            return self.formulas.values({key: v for key, v in values.values.items() if _is_of(key, own.types)})
        return both(values, own)

    def _values(self, location: Location, keyword: str) -> Formula:
        assert isinstance(location.schema, dict)
        given = location.schema[keyword]
        if keyword == "const":
            given = [given]
        if not isinstance(given, list):
            return self.unknown(location, keyword, "a list is expected")
        try:
            return self.formulas.values({freeze(value): value for value in given})
        except (TypeError, ValueError) as error:
            return self.unknown(location, keyword, str(error), error)

    def unknown(self, location: Location, keyword: str, reason: str, cause: Exception | None = None) -> Formula:
        """Report a keyword that cannot be enforced; the formula of any value."""
        return Unknown(problem=self.report.problem(location.path(), keyword, reason, cause))

    def fact(self, *, absent: str | None = None, required: tuple[str, ...] = ()) -> Formula:
        """That a key is absent, or that keys are present: the same formula each time."""
        found = self._facts.get((absent, required))
        if found is None:
            blocks = () if absent is None else (KeywordGroup({absent: FALSE}),)
            found = self._facts[absent, required] = ObjectFormula(conjunct=ObjectConjunct(blocks, required))
        return found


class Subschema(Formula):
    """Some keywords of a schema object, in a dynamic scope.

    With the operator "schema" some of them apply schemas to the same value: it is its `expansion`, and its
    unevaluated*. Else it is a leaf.
    """

    __slots__ = ("_expansion", "keywords", "location", "reader", "schema", "scope", "types")

    def __init__(
        self, operator: Operator, reader: Reader, location: Location, scope: Scope, keywords: frozenset[str]
    ) -> None:
        assert isinstance(location.schema, dict)
        self.reader = reader
        self.location = location
        self.schema = location.schema
        self.scope = scope
        self.keywords = keywords
        self._expansion: Formula | None = None
        self.types = self._types()
        """The allowed names of types; None if `type` is malformed."""
        kinds = ALL_KINDS if self.types is None else sum({TYPES[name] for name in self.types})
        super().__init__(operator, kinds=kinds)

    def _types(self) -> frozenset[str] | None:
        if "type" not in self.keywords:
            return _EVERY_TYPE
        given = self.schema["type"]
        names = [given] if isinstance(given, str) else given
        if not isinstance(names, list) or not all(isinstance(name, str) and name in TYPES for name in names):
            return None
        if "nullable" in self.keywords and not self.location.resource.dialect.is_declared:
            # OpenAPI 3.0, whose documents declare no draft
            return frozenset((*names, "null") if self.schema["nullable"] is True else names)
        return frozenset(names)

    def child(self, *tokens: str | int) -> Formula:
        """The formula of a subschema, by its keys."""
        return self.reader.formula(self.reader.document.child(self.location, *tokens), self.scope)

    def unevaluated(self, kind: int) -> Formula | None:
        """The formula of unevaluated keys or items, if it has one."""
        keyword = UNEVALUATED.get(kind)
        return None if keyword is None or keyword not in self.keywords else self.child(keyword)

    def by_itself(self) -> Formula:
        """The formula of its other keywords."""
        return self.reader.by_itself(
            self.location, self.scope, self.keywords.difference(IN_PLACE, ("then", "else"))
        )

    def expansion(self) -> Formula:
        """The conjunction of its parts, without unevaluated*."""
        if self._expansion is None:
            applying = self.keywords.intersection(IN_PLACE)
            parts = [self.by_itself()]
            parts += [self._applied(keyword) for keyword in self.schema if keyword in applying]
            self._expansion = self.reader.formulas.both(*parts)
        return self._expansion

    def _applied(self, keyword: str) -> Formula:
        formulas, value = self.reader.formulas, self.schema[keyword]
        match keyword:
            case "unevaluatedProperties" | "unevaluatedItems":
                if not self.reader.is_tracking:
                    raise NeedsTracking
                return TRUE
            case "not":
                return formulas.negate(self.child("not"))
            case "if":
                return self._conditional()
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                return self._reference(keyword, value)
            case "allOf" | "anyOf" | "oneOf":
                if not isinstance(value, list) or not value:
                    return self._unknown(keyword, "a list of schemas is expected")
                members = [self.child(keyword, index) for index in range(len(value))]
                if keyword == "allOf":
                    return formulas.both(*members)
                if keyword == "oneOf":
                    return formulas.exactly_one(*members, path=self.location.path())
                return self._any_of(members)
        if not isinstance(value, dict):
            return self._unknown(keyword, "an object is expected")
        return formulas.both(*[self._dependency(keyword, name, item) for name, item in value.items()])

    def _unknown(self, keyword: str, reason: str, cause: Exception | None = None) -> Formula:
        return self.reader.unknown(self.location, keyword, reason, cause)

    def _any_of(self, members: list[Formula]) -> Formula:
        formulas = self.reader.formulas
        if not self.reader.is_tracking:
            return formulas.either(*members)
        # Every branch that holds evaluates keys and items, so each set of branches is a conjunct.
        if len(members) > MOST_BRANCHES_WITH_UNEVALUATED:
            return self._unknown("anyOf", "too many branches beside unevaluated*")
        sizes = range(1, len(members) + 1)
        chosen = [branches for size in sizes for branches in combinations(members, size)]
        return formulas.either_in_full(formulas.both(*branches) for branches in chosen)

    def _conditional(self) -> Formula:
        formulas = self.reader.formulas
        condition = self.child("if")
        then = self.child("then") if "then" in self.keywords else TRUE
        otherwise = self.child("else") if "else" in self.keywords else TRUE
        if then is TRUE and otherwise is TRUE and not self.reader.is_tracking:
            return TRUE
        return formulas.either_in_full(
            [formulas.both(condition, then), formulas.both(formulas.negate(condition), otherwise)]
        )

    def _dependency(self, keyword: str, name: str, value: object) -> Formula:
        reader = self.reader
        if isinstance(value, str) and keyword == "dependencies":
            value = [value]
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            needed = reader.fact(required=tuple(dict.fromkeys((name, *value))))
        elif isinstance(value, list) or keyword == "dependentRequired":
            return self._unknown(keyword, "a list of names is expected")
        else:
            needed = reader.formulas.both(reader.fact(required=(name,)), self.child(keyword, name))
        return reader.formulas.either(reader.fact(absent=name), needed)

    def _reference(self, keyword: str, value: object) -> Formula:
        reader = self.reader
        if not isinstance(value, str):
            return self._unknown(keyword, "a reference is a string")
        try:
            target = reader.document.resolve(value, self.location)
        except UnresolvedReference as error:
            return self._unknown(keyword, f"{value!r}: {error}", error)
        if keyword != "$ref":
            if not reader.is_tracking:
                raise NeedsTracking
            name = "" if keyword == "$recursiveRef" else value.partition("#")[2]
            if reader.document.dynamic_anchors(target.resource).get(name) is target:
                target = dict(reader.entered(target, self.scope))[name]
        return reader.formula(target, self.scope)


def _is_of(value: Frozen, types: frozenset[str]) -> bool:
    tag, held = value
    if tag == "literal":
        return ("null" if held == "null" else "boolean") in types
    if tag == "number":
        assert isinstance(held, Fraction | int)
        return "number" in types or ("integer" in types and held.denominator == 1)
    return tag in types
