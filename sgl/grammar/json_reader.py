"""Reads a schema: each subschema becomes a formula, and its keywords become sets, kind by kind.

It knows what every keyword means on its own, how the drafts differ, and where a keyword is malformed. How sets and
formulas combine is the evaluator's business, which calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import combinations
from typing import Final

from sgl.grammar.json_document import Document, Location, Resource, UnresolvedReference
from sgl.grammar.json_formula import (
    ALL_KINDS,
    ARRAY,
    FALSE,
    LITERAL,
    OBJECT,
    TRUE,
    Formula,
    Formulas,
    Frozen,
    freeze,
    frozen_values,
)
from sgl.grammar.json_keywords import TYPES, Keywords, Known
from sgl.grammar.json_objects import Block, ObjectCase
from sgl.grammar.json_report import Report

Scope = frozenset[tuple[str, Location]]
"""The dynamic scope, as far as it matters: the outermost resource's anchor for each dynamic name."""

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
MOST_BRANCHES_WITH_UNEVALUATED: Final = 8


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
        self._formulas: dict[tuple[object, Resource, Scope], tuple[Formula, Location]] = {}

    # Formulas

    def formula(self, location: Location, scope: Scope = frozenset()) -> Formula:
        """The formula of a subschema."""
        if self.is_tracking:
            scope = self._entered(location, scope)
        key = (self.document.content(location.schema, location.resource), location.resource, scope)
        found = self._formulas.get(key)
        if found is None:
            found = self._formulas[key] = (self._make_formula(location, scope), location)
        if found[1].schema is not location.schema:
            self.report.same(found[1], location)
        return found[0]

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
            if not isinstance(name, str) or name not in TYPES:
                return ALL_KINDS
            kinds |= TYPES[name]
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
        names = self._keywords(location, frozenset(), keywords).types()
        kept = {}
        for key, value in values.subject.items():
            tag, held = key
            if tag == "literal":
                fits = "null" in names if held == "null" else "boolean" in names
            elif tag == "number":
                assert isinstance(held, Fraction | int)
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
        return self._keywords(subject.location, subject.scope, subject.keywords).set_of(kind)

    def _keywords(self, location: Location, scope: Scope, keywords: frozenset[str]) -> Keywords:
        child = partial(self._child, location, scope)
        return Keywords(location, keywords, self.report, child, self.strings_of, is_tracking=self.is_tracking)
